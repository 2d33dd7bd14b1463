// Reads of shared memory without bank conflicts, 16 bytes a thread, for `r18 roofline --measure`.
// Every thread writes the XOR of its reads.
constexpr int THREADS = 256, LOADS = 12;

// volatile: the compiler would hoist a load of constant data out of the loop.
__device__ __forceinline__ uint4 load(unsigned address) {
  uint4 held;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w)
               : "r"(address));
  return held;
}

extern "C" __global__ void __launch_bounds__(THREADS)
shared_reads(const uint4* __restrict__ words, unsigned* __restrict__ out, const int repeats) {
  __shared__ uint4 shared[LOADS * THREADS];
#pragma unroll
  for (int j = 0; j < LOADS; ++j) {
    shared[j * THREADS + threadIdx.x] = words[j * THREADS + threadIdx.x];
  }
  __syncthreads();

  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared + threadIdx.x));
  unsigned sum = 0;
#pragma unroll 1
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      const uint4 held = load(address + j * (THREADS * 16));
      sum ^= held.x ^ held.y ^ held.z ^ held.w;
    }
  }
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
