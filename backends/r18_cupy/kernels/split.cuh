// float32 factors as pairs of float16 numbers, for precision fp16x3: v ≈ high + low·2⁻¹¹. Of a
// product high·high is one sum's, and high·low + low·high another's, which is scaled at its end;
// low·low is left out. The host's side is split.py.
#pragma once
#include <cuda_fp16.h>

// With TILE_SPLIT a kernel multiplies such pairs, else what is stored.
#if TILE_SPLIT
using Factor = __half;
#else
using Factor = STORAGE;
#endif
constexpr int PARTS = TILE_SPLIT ? 2 : 1;     // numbers that make a factor
// Of such numbers, for one of factors: product i is that of part i / 2 of A and part i % 2 of B.
constexpr int PRODUCTS = TILE_SPLIT ? 3 : 1;

constexpr float SPLIT_SCALE = 2048.0f;

struct Halves {
  unsigned high, low;  // of two adjacent values, a register each
};

// The nearest number, and what it misses, which float32 holds exactly.
__device__ __forceinline__ Halves split(float2 value) {
  const __half2 high = __float22half2_rn(value);
  const float2 held = __half22float2(high);
  const __half2 low = __floats2half2_rn((value.x - held.x) * SPLIT_SCALE,
                                        (value.y - held.y) * SPLIT_SCALE);
  return {*reinterpret_cast<const unsigned*>(&high), *reinterpret_cast<const unsigned*>(&low)};
}

// A sum of products from its two parts, rounded once.
__device__ __forceinline__ float joined(float sum, float cross) {
  return fmaf(cross, 1.0f / SPLIT_SCALE, sum);
}
