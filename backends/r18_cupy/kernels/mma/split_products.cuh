// Products of split factors by mma.sync: high·high is one sum's, and high·low + low·high another's,
// which is scaled at its end. low·low is left out.
#pragma once
#include "mma/split.cuh"

#if TILE_SPLIT
using Operand = __half;
#else
using Operand = STORAGE;  // what is stored is multiplied
#endif

constexpr int PARTS = TILE_SPLIT ? 2 : 1;  // numbers that make a factor
// Of such numbers, for one of factors: product i is that of part i / 2 of A and part i % 2 of B.
constexpr int PRODUCTS = TILE_SPLIT ? 3 : 1;

// sums += cross / LOW_SCALE, each rounded once.
template <int COUNT>
__device__ __forceinline__ void add_cross(float* acc, const float* cross) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) acc[i] = fmaf(cross[i], 1 / LOW_SCALE, acc[i]);
}
