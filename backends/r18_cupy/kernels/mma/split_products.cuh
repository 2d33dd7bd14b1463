// fp16x3 products by mma.sync: one accumulator for high·high, another for high·low + low·high,
// which is scaled at the end. low·low is left out.
#pragma once
#include "mma/split.cuh"

#if TILE_SPLIT
using Operand = __half;
#else
using Operand = STORAGE;  // the storage type is multiplied
#endif

constexpr int PARTS = TILE_SPLIT ? 2 : 1;  // float16 numbers per operand
// mma instructions per product of operands: instruction i takes half i / 2 of A and half i % 2 of
// B.
constexpr int PRODUCTS = TILE_SPLIT ? 3 : 1;

// acc += cross / LOW_SCALE.
template <int COUNT>
__device__ __forceinline__ void add_cross(float* acc, const float* cross) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) acc[i] = fmaf(cross[i], 1 / LOW_SCALE, acc[i]);
}
