// Convolution of e4m3 numbers as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x).
// NHWC.
//
// A CTA computes tiles in turn (bytes/hopper/gather_kernel.cuh):
// 1. A producer warp loads K tiles into a ring of stages: weights by TMA, pixels by TMA in im2col
//    mode. K runs over the window's positions, and at each over the channels, TILE_K at a time.
// 2. Consumer warpgroups multiply the stages with `wgmma`. Every RUN K tiles they add the sum to
//    float32 registers: the unit itself keeps too few bits (finishing.cuh).
// 3. Epilogue: multiplier, bias, residual and ReLU, and TMA stores.
//
// Constraints: sm_90a; C and O multiples of 16; what TMA's im2col mode encodes (stride ≤ 8, window
// ≤ 256); tiles as `TILES` in float8/implicit_gemm_wgmma.py lists them.
#include "float8/hopper/finishing.cuh"
#include "bytes/hopper/gather.cuh"
#include "hopper/uniform.cuh"

// Promoted sums take two registers for each output. Where a warp of producers would leave the
// consumers too few, there is a warpgroup of them, and it gives registers away.
constexpr bool GIVES_REGISTERS = GROUP_N > 128;
constexpr int PRODUCERS = GIVES_REGISTERS ? 128 : 32;
constexpr int PRODUCER_REGISTERS = GIVES_REGISTERS ? 40 : 0;
constexpr int CONSUMER_REGISTERS = GIVES_REGISTERS ? 232 : 0;

static_assert(!GIVES_REGISTERS || (WARPGROUPS == 2 && TILE_BLOCKS == 1),
              "three warpgroups are launched with 168 registers a thread");

// The first run of the second warpgroup is shorter. Otherwise both would wait for their sums at the
// same time, and the tensor cores for both.
template <typename Overlapped>
__device__ __forceinline__ void mainloop(Sums& sums, const Ring& ring, RingState& state,
                                         unsigned a, unsigned b, int count,
                                         const Overlapped& overlapped) {
  const bool elected = threadIdx.x % 32 == 0;
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) sums[i] = 0.0f;
  Sums part;
  int end = warpgroup_index() == 0 ? RUN : RUN - RUN / 2;
  for (int k = 0; k < count; end += RUN) {
    int before = -1;  // the stage of the run's previous K tile
    for (const int last = min(end, count); k < last; ++k, state.advance(TILE_STAGES)) {
      mbarrier_wait(ring.full(state.stage), state.phase);
      wgmma_fence();
      multiply(part, row_descriptor<TILE_K>(a + state.stage * STAGE_BYTES),
               row_descriptor<TILE_K>(b + state.stage * STAGE_BYTES), before < 0);
      wgmma_commit();
      if (k == min(count, 3) - 1) overlapped();
      wgmma_wait<1>();  // all but these products have read their stage
      if (before >= 0 && elected) mbarrier_arrive(ring.empty(before));
      before = state.stage;
    }
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(ring.empty(before));
    promote(sums, part);
  }
}

#include "bytes/hopper/gather_kernel.cuh"

// `residual_multiplier` may be null. NOTE: `residual` is not __restrict__, or the compiler could
// read what the previous launch still writes ahead of the wait.
extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, TILE_BLOCKS) IN_CLUSTER
sconv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                            const __grid_constant__ TensorMap weight,
                            const __grid_constant__ TensorMap residual_map,
                            const __grid_constant__ TensorMap out_map,
                            const float* __restrict__ bias, const float* __restrict__ multiplier,
                            const unsigned char* residual,
                            const float* __restrict__ residual_multiplier,
                            unsigned char* __restrict__ out, const ConvShape p, const int tiles,
                            const int k_tiles) {
  const Factors factors{bias, multiplier, residual_multiplier};
  convolve<PRODUCER_REGISTERS, CONSUMER_REGISTERS>(x, weight, residual_map, out_map, factors,
                                                   residual, out, p, tiles, k_tiles);
}
