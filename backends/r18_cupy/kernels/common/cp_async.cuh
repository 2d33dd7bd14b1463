// cp.async: asynchronous copies from global to shared memory. sm_80 and later. A copy is visible to
// its own thread after the wait, to the CTA after a barrier.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies BYTES, or writes BYTES zeros where `valid` is false. `source` is then not read, but must
// still be a global address. Both addresses are multiples of BYTES.
template <int BYTES>
__device__ __forceinline__ void cp_async(unsigned target, const void* source, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const int size = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    // Bypasses L1: the CTA rereads the data from shared memory only.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                 "n"(BYTES), "r"(size)
                 : "memory");
  }
}

// Commits the thread's copies since the last commit, possibly none, to a group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the latest PENDING groups of the thread are in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
