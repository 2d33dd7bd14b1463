// fp16x3 operands: a float32 value as two float16 numbers, v ≈ high + low · 2⁻¹¹. high is v rounded
// to nearest even; low is the remainder, which float32 holds exactly, times 2¹¹ and rounded the
// same way. If high is infinite, low is NaN. The host's counterpart is `split` in conv/operands.py.
#pragma once
#include <cuda_fp16.h>

constexpr float LOW_SCALE = 2048.0f;

// The high and low halves of two values.
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
