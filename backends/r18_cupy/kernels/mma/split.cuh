// float32 factors as two float16 numbers each: v ≈ high + low · 2⁻¹¹. high is v rounded to nearest
// even; low is what that leaves, which float32 holds exactly, times 2¹¹ and rounded likewise. An
// infinite high leaves NaN.
#pragma once
#include <cuda_fp16.h>

constexpr float LOW_SCALE = 2048.0f;

// Two factors' high halves, and their low ones.
struct SplitPair {
  unsigned high, low;
};

__device__ __forceinline__ SplitPair split(float first, float second) {
  const __half2 high = __floats2half2_rn(first, second);
  const float2 taken = __half22float2(high);
  const __half2 low =
      __floats2half2_rn((first - taken.x) * LOW_SCALE, (second - taken.y) * LOW_SCALE);
  return {*reinterpret_cast<const unsigned*>(&high), *reinterpret_cast<const unsigned*>(&low)};
}
