// A launch that begins while the one before it in the stream ends (PTX ISA, "griddepcontrol").
// sm_90 and later. The host says of a launch that it may: `GridLaunch.overlaps`.
#pragma once

// The next launch may begin once every block has said so.
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns once the launches before have ended and what they wrote is seen: before any read of what
// they write, and before any write at all, since they may still read what lay there. Weights alone
// may be read before.
__device__ __forceinline__ void wait_for_launch_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
