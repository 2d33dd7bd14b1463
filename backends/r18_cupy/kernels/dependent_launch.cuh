// A launch that begins while the one before it in the stream ends (PTX ISA, "griddepcontrol"): from
// sm_90 on, elsewhere these do nothing. The host says of a launch that it may:
// `GridLaunch.overlaps`.
#pragma once

// The next launch may begin once every block has said so.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the launches before have ended and what they wrote is seen: before any read of what
// they write, and before any write at all, since they may still read what lay there. Weights alone
// may be read before.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a kernel that reads through the L1, at its begin: it is there when the launch before it ends,
// and has nothing to do until then. All threads.
// NOTE: in this order. The next launch then begins after all but this one have ended, with an L1
// that holds nothing of what they read; what this one reads, it does not overwrite elsewhere.
__device__ __forceinline__ void follow_launch_before() {
  wait_for_launch_before();
  let_next_launch_begin();
}

// Asks for weights to be brought into the L2: before the launch before is waited for, so that the
// memory has something to do meanwhile. One thread. Both are multiples of 16.
__device__ __forceinline__ void prefetch_weights(const void* weights, unsigned nbytes) {
#if __CUDA_ARCH__ >= 900
  if (nbytes > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(weights), "r"(nbytes)
                 : "memory");
  }
#endif
}
