// Convolution of integers as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x). NHWC.
//
// A CTA computes tiles in turn (bytes/hopper/gather_kernel.cuh):
// 1. A producer warp loads K tiles into a ring of stages: weights by TMA, pixels by TMA in im2col
//    mode. K runs over the window's positions, and at each over the channels, TILE_K at a time.
// 2. Consumer warpgroups multiply the stages with `wgmma` and add up in int32 registers.
// 3. Epilogue: requantisation with the residual, and TMA stores.
//
// Constraints: sm_90a; C and O multiples of 16; what TMA's im2col mode encodes (stride ≤ 8, window
// ≤ 256); tiles as `TILES` in integers/implicit_gemm_wgmma.py lists them.
#include "integers/hopper/requantization.cuh"
#include "bytes/hopper/gather.cuh"

// With split-K there may be nothing to multiply, and the sums are zeros before.
template <typename Overlapped>
__device__ __forceinline__ void mainloop(Sums& sums, const Ring& ring, RingState& state,
                                         unsigned a, unsigned b, int count,
                                         const Overlapped& overlapped) {
  const bool elected = threadIdx.x % 32 == 0;
  if constexpr (TILE_PARTS > 1) {
#pragma unroll
    for (int i = 0; i < GROUP_N / 2; ++i) sums[i] = 0;
  }
  int before = 0;  // the stage of the previous K tile
  for (int k = 0; k < count; ++k, state.advance(TILE_STAGES)) {
    mbarrier_wait(ring.full(state.stage), state.phase);
    wgmma_fence();
    multiply(sums, row_descriptor<TILE_K>(a + state.stage * STAGE_BYTES),
             row_descriptor<TILE_K>(b + state.stage * STAGE_BYTES), TILE_PARTS == 1 && k == 0);
    wgmma_commit();
    if (k == min(count, 3) - 1) overlapped();
    wgmma_wait<1>();  // all but these products have read their stage
    if (k > 0 && elected) mbarrier_arrive(ring.empty(before));
    before = state.stage;
  }
  wgmma_wait<0>();
  if (count > 0 && elected) mbarrier_arrive(ring.empty(before));
}

#include "bytes/hopper/gather_kernel.cuh"

// `residual_multiplier` may be null. NOTE: `residual` is not __restrict__, or the compiler could
// read what the previous launch still writes ahead of the wait.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS) IN_CLUSTER
qconv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                            const __grid_constant__ TensorMap weight,
                            const __grid_constant__ TensorMap residual_map,
                            const __grid_constant__ TensorMap out_map,
                            const int* __restrict__ bias, const float* __restrict__ multiplier,
                            const unsigned char* residual,
                            const float* __restrict__ residual_multiplier,
                            const int residual_signed, unsigned char* __restrict__ out,
                            const ConvShape p, const int tiles, const int k_tiles) {
  const Factors factors{bias, multiplier, residual_multiplier, residual_signed};
  convolve<0, 0>(x, weight, residual_map, out_map, factors, residual, out, p, tiles, k_tiles);
}
