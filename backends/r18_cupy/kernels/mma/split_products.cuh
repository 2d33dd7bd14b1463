// fp16x3 products by mma.sync: one accumulator for high·high, another for high·low + low·high,
// which is scaled at the end. low·low is left out.
//
// Tensor cores truncate a sum at every step, always towards zero, so the error of a long sum grows
// with its steps. High·high products therefore begin at zero in each step, and are added in
// registers, rounded to nearest. Cross products weigh 2⁻⁹ of them.
#pragma once
#include "mma/mma.cuh"
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

// Instruction `product` of a step: adds to `acc` or, in fp16x3, to one of both.
__device__ __forceinline__ void add_product(int product, float (&acc)[4], float (&cross)[4],
                                            const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (!TILE_SPLIT) {
    multiply_add<Operand>(acc, a, b0, b1);
  } else if (product > 0) {
    multiply_add<Operand>(cross, a, b0, b1);
  } else {
    float part[4];
    multiply_halves(part, a, b0, b1);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += part[i];
  }
}

// acc += cross / LOW_SCALE.
template <int COUNT>
__device__ __forceinline__ void add_cross(float* acc, const float* cross) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) acc[i] = fmaf(cross[i], 1 / LOW_SCALE, acc[i]);
}
