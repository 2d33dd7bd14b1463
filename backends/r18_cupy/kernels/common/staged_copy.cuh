// Copies from global to shared memory that overlap with arithmetic.
//
// From sm_80 on cp.async writes shared memory directly, several tiles ahead. Earlier architectures
// hold a value in a register from `fetch`, before the arithmetic, to `land`, after it.
#pragma once
#include "common/cp_async.cuh"

template <typename T>
struct StagedCopy {
  // *to = inside ? *from : 0, once the copy's group has been waited for and it has landed. `from`
  // is not read where `inside` is false, but must still be an address of the tensor.
  __device__ __forceinline__ void fetch(T* to, const T* from, bool inside) {
#if __CUDA_ARCH__ >= 800
    cp_async<sizeof(T)>(shared_address(to), from, inside);
#else
    value_ = inside ? *from : T{};
#endif
  }

  __device__ __forceinline__ void land(T* to) const {
#if __CUDA_ARCH__ < 800
    *to = value_;
#endif
  }

 private:
#if __CUDA_ARCH__ < 800
  T value_;
#endif
};

// Commits this thread's copies since the last call, possibly none, to a group.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  cp_async_commit();
#endif
}

// Waits until at most PENDING of this thread's groups are in flight.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  cp_async_wait<PENDING>();
#endif
}
