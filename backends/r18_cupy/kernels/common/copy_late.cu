// A delayed copy, with which the oracle checks that a kernel waits for the previous launch:
// 1. It allows the next launch to begin at once.
// 2. It spins for `nanoseconds`.
// 3. It copies `nbytes` from `source` to `target`. A kernel that did not wait has by then read the
//    old bytes.
//
// Constraints: both addresses are multiples of 16.
#include "common/dependent_launch.cuh"

// The device's clock in nanoseconds (PTX ISA, "%globaltimer").
__device__ __forceinline__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}

extern "C" __global__ void __launch_bounds__(256)
copy_late(const unsigned char* __restrict__ source, unsigned char* __restrict__ target,
          const size_t nbytes, const unsigned nanoseconds) {
  launch_dependents();
  for (const unsigned long long begin = now(); now() - begin < nanoseconds;) {
  }
  const size_t first = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const size_t words = nbytes / sizeof(uint4);
  for (size_t i = first; i < words; i += threads) {
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
  }
  for (size_t i = words * sizeof(uint4) + first; i < nbytes; i += threads) target[i] = source[i];
}
