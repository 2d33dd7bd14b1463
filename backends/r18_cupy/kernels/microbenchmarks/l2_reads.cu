// Reads of a working set that stays in the L2, for `r18 roofline --measure`. The grid sweeps over
// `mask + 1` words, a power of two, and past the L1. Every thread writes the XOR of its reads.
constexpr int THREADS = 1024, LOADS = 8;

extern "C" __global__ void __launch_bounds__(THREADS)
l2_reads(const uint4* __restrict__ words, unsigned* __restrict__ out, const int repeats,
         const unsigned mask) {
  const unsigned thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  unsigned at = thread, sum = 0;
#pragma unroll 1
  for (int repeat = 0; repeat < repeats; ++repeat) {
    uint4 held[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) held[j] = __ldcg(words + ((at + j * threads) & mask));
#pragma unroll
    for (int j = 0; j < LOADS; ++j) sum ^= held[j].x ^ held[j].y ^ held[j].z ^ held[j].w;
    at += LOADS * threads;
  }
  out[thread] = sum;
}
