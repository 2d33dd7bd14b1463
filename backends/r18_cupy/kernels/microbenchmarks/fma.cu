// Peak rate of float32 FMA on the CUDA cores, for `r18 roofline --measure`. Each thread iterates
// x = c − x² in CHAINS independent chains: for c just below 2 the values stay within (−2, 2) and do
// not settle, so that the operands stay random.
constexpr int THREADS = 256, CHAINS = 16, ROUNDS = 16;

extern "C" __global__ void __launch_bounds__(THREADS)
fma_chains(const float* __restrict__ operands, float* __restrict__ out, const int repeats) {
  float x[CHAINS];
  const float c = 1.9f + 0.1f * operands[threadIdx.x];
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) x[i] = operands[(i + 1) * THREADS + threadIdx.x];

#pragma unroll 1
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) x[i] = fmaf(-x[i], x[i], c);
    }
  }

  float sum = 0;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) sum += x[i];
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
