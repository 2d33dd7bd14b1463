// What is the same in all threads of a warp, so that the assembler knows it. TMA and `wgmma` take
// their operands from uniform registers, one for a whole warp. What the assembler cannot show to be
// uniform it computes for each thread and then moves there, operand by operand.
#pragma once

// True in one lane of a warp, all of whose lanes call it. NOTE: the assembler knows that one thread
// enters a branch on it, as after threadIdx.x == 0. After other comparisons, such as
// threadIdx.x == CONSUMERS, a TMA instruction may be a loop over the threads that may be active,
// and a load is issued only every 200 cycles. sm_90 and later (PTX ISA, "elect.sync").
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected;
}

// The thread's warpgroup in its CTA. NOTE: as threadIdx.x / 128 its descriptors would be moved to
// uniform registers between one `wgmma` and the next, which takes 55 cycles instead of 32.
__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
}
