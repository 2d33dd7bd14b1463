// Programmatic dependent launch: a launch begins while the previous one in the stream ends (PTX
// ISA, "griddepcontrol"). From sm_90 on; elsewhere these do nothing. The host enables it per launch
// with `GridLaunch.overlaps`.
#pragma once

// Allows the next launch to begin once every CTA has called this or has exited. NOTE: only for
// kernels with few CTAs per SM. CTAs of the next launch are placed wherever there is room at that
// moment: many small ones crowd onto the same SMs while others stay idle, and float32 networks
// became far slower.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous launches have ended and their writes are visible. Call it before any
// read of their results, and before any write, since they may still read that memory. Only weights
// may be read earlier.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
