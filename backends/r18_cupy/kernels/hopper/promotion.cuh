// fp16x3 sums by `wgmma`: high·high products are promoted, i.e. added in registers and rounded.
//
// Tensor cores truncate a sum at every step, always towards zero, so the error of a long sum grows
// with its steps. Here the high·high products of each K tile begin at zero, and their sum of
// PROMOTED steps is added to float32 registers, rounded to nearest. Cross products, of a high and a
// low half, weigh 2⁻⁹ of the others; they stay in an accumulator of their own, and in flight while
// the sums are promoted.
//
// Registers: three accumulators per output where they suffice. Otherwise high·high products take
// turns: those of the first EARLY rows of B, then the rest.
//
// The including file defines THREADS and TILE_BLOCKS.
#pragma once
#include "hopper/wgmma.cuh"
#include "mma/split.cuh"

constexpr int PROMOTED = 2;  // K steps of high halves in a K tile

// Registers of a thread that are not accumulators.
constexpr int OTHER_REGISTERS = 44;

// Makes the compiler treat registers as read and written here. It does not know that `wgmma` writes
// them asynchronously, and would read them ahead of the wait.
template <int COUNT>
__device__ __forceinline__ void fence_registers(float (&of)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(of[i])::"memory");
}

// The accumulators of a thread, for N rows of B.
template <int N>
struct PromotedAccumulators {
  static constexpr bool WHOLE = 3 * N / 2 + OTHER_REGISTERS <= THREAD_REGISTERS;
  // The first of two parts is as large as the second or eight rows larger.
  static constexpr int EARLY = WHOLE ? N : (N / 8 + 1) / 2 * 8;

  float main[N / 2] = {};   // sums of high·high products
  float cross[N / 2] = {};  // cross products

  // The sums, after the last product has completed.
  __device__ __forceinline__ float (&fold())[N / 2] {
    fence_registers(cross);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) main[i] = fmaf(cross[i], 1 / LOW_SCALE, main[i]);
    return main;
  }
};

// Multiplies COUNT rows of B from FIRST on, and issues the cross products of the steps from `begin`
// to `end`, which are in flight on return. `previous_read` is called once all products before have
// completed.
template <int FIRST, int COUNT, int N, typename Products, typename PreviousRead>
__device__ __forceinline__ void multiply_part(PromotedAccumulators<N>& acc,
                                              const Products& products, int begin, int end,
                                              const PreviousRead& previous_read) {
  float part[COUNT / 2];
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < PROMOTED; ++step) products.template add_main<FIRST, COUNT>(part, step);
  wgmma_commit();
#pragma unroll
  for (int step = begin; step < end; ++step) products.add_cross(acc.cross, step);
  wgmma_commit();
  wgmma_wait<1>();  // all but the cross products
  previous_read();
  fence_registers(part);
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) acc.main[FIRST / 2 + i] += part[i];
}

// Multiplies one K tile. Of `products`, `add_cross(cross, step)` issues the cross products of a K
// step, `add_main<FIRST, COUNT>(part, step)` the others for COUNT rows of B from FIRST on,
// beginning at zero in step 0. `previous_read` is called once all products of the tile before have
// completed. Cross products of this tile are in flight on return.
template <int N, typename Products, typename PreviousRead>
__device__ __forceinline__ void multiply_promoted(PromotedAccumulators<N>& acc,
                                                  const Products& products,
                                                  const PreviousRead& previous_read) {
  constexpr int EARLY = PromotedAccumulators<N>::EARLY;
  if constexpr (EARLY == N) {
    multiply_part<0, N>(acc, products, 0, PROMOTED, previous_read);
  } else {
    multiply_part<0, EARLY>(acc, products, 0, PROMOTED / 2, previous_read);
    multiply_part<EARLY, N - EARLY>(acc, products, PROMOTED / 2, PROMOTED, [] {});
  }
}
