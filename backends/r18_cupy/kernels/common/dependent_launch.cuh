// A launch that begins while the one before it in the stream ends (PTX ISA, "griddepcontrol"): from
// sm_90 on, elsewhere these do nothing. The host says of a launch that it may:
// `GridLaunch.overlaps`.
#pragma once

// The next launch may begin once every block has said so, or has ended.
// NOTE: only for kernels of which few blocks fit on a multiprocessor. Blocks of the next launch are
// placed where there is room by then: many small ones meet on the same multiprocessors, others stay
// idle, and float32 networks took far longer.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the launches before have ended and what they wrote is seen: before any read of what
// they write, and before any write at all, since they may still read what lay there. Weights alone
// may be read before.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
