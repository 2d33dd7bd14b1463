// Peak rate of `mma.sync`, for `r18 roofline --measure`: the limit of kernels for sm_80 and later.
// Each warp holds random fragments of A and B, multiplies each with each into accumulators of their
// own, again and again, and writes the sum of its accumulators.
//
// OPERAND: __half, __nv_bfloat16, float (tf32) or Bytes (uint8 by int8).
#include "integers/mma.cuh"
#include "mma/mma.cuh"

struct Bytes {};

constexpr int THREADS = 256, ROWS = 4, COLUMNS = 4, ROUNDS = 2;

template <typename T>
struct Accumulator {
  using Type = float;
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    multiply_add<T>(d, a, b[0], b[1]);
  }
};
template <>
struct Accumulator<Bytes> {
  using Type = int;
  static __device__ __forceinline__ void multiply(int (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    multiply_add_bytes<unsigned char>(d, a, b[0], b[1]);
  }
};
using Products = Accumulator<OPERAND>;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
mma_products(const unsigned* __restrict__ operands, Products::Type* __restrict__ out,
             const int repeats) {
  const unsigned* word = operands + threadIdx.x;
  unsigned a[ROWS][4], b[COLUMNS][2];
#pragma unroll
  for (int i = 0; i < ROWS * 4; ++i, word += THREADS) a[i / 4][i % 4] = *word;
#pragma unroll
  for (int j = 0; j < COLUMNS * 2; ++j, word += THREADS) b[j / 2][j % 2] = *word;

  Products::Type d[ROWS][COLUMNS][4] = {};
#pragma unroll 1
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) Products::multiply(d[i][j], a[i], b[j]);
      }
    }
  }

  Products::Type sum = 0;
#pragma unroll
  for (int i = 0; i < ROWS * COLUMNS * 4; ++i) sum += d[i / 16][i / 4 % COLUMNS][i % 4];
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
