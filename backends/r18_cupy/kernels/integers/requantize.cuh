// The arithmetic of quantised ops, to the bit (r18/graph/quantized.py): every step is one float32
// operation, rounded to nearest even. The intrinsics are never contracted into a fused
// multiply-add, which would round once where the specification rounds twice.
#pragma once

// Step 1: the int32 sum, bias included, in units of the output's scale.
__device__ __forceinline__ float scaled(int sum, float multiplier) {
  return __fmul_rn(__int2float_rn(sum), multiplier);
}

// Step 2: plus a residual, in the same units.
__device__ __forceinline__ float plus_residual(float number, int residual, float multiplier) {
  return __fadd_rn(number, __fmul_rn(__int2float_rn(residual), multiplier));
}

// Steps 3 and 4: the nearest integer, ties to even, saturated. A ReLU has nothing left to do where
// `low` is 0. `__float2int_rn` itself saturates at the ends of int32.
__device__ __forceinline__ int saturated(float number, int low, int high) {
  return min(max(__float2int_rn(number), low), high);
}
