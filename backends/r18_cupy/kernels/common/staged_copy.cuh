// Copies from global to shared memory that run while the block computes.
//
// From sm_80 on cp.async writes shared memory by itself, some tiles ahead; before, a value waits
// in a register from `fetch`, ahead of the arithmetic, to `land`, after it.
#pragma once
#include "common/cp_async.cuh"

template <typename T>
struct StagedCopy {
  // *to = inside ? *from : 0, by the time that the copy's group is awaited and it has landed.
  // `from` is not read where it is not inside, but must be an address of the tensor all the same.
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

// What this thread has fetched since the last call becomes a group, possibly an empty one.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  cp_async_commit();
#endif
}

// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  cp_async_wait<PENDING>();
#endif
}
