// Convolution as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x). NHWC; fp16, bf16,
// tf32, or fp16x3 (SPLIT).
//
// 1. A producer thread loads K tiles into a ring of stages: weights by TMA, pixels by TMA in im2col
//    mode.
// 2. Consumer warpgroups multiply the stages with `wgmma` and accumulate in float32 registers.
// 3. Epilogue: bias, residual, ReLU, and TMA stores. With TILE_PARTS > 1 the CTAs of a cluster
//    divide K and add their accumulators first (split-K).
//
// Constraints: sm_90a; C and O multiples of 16 bytes; what TMA's im2col mode encodes (stride ≤ 8,
// window ≤ 256); tiles as `tiles_of` in hopper/implicit_gemm_wgmma.py lists them.
#include "hopper/products.cuh"
#include "hopper/gather.cuh"

// A warpgroup's share of the tile: 64 channels from `m` by GROUP_N pixels from `n`.
struct WarpgroupTile {
  const unsigned tiles;
  const int m, n;
  Accumulators accumulators;

  __device__ __forceinline__ WarpgroupTile(unsigned tiles, int warpgroup)
      : tiles(tiles),
        m(warpgroup / TILE_GROUPS_N * 64),
        n(warpgroup % TILE_GROUPS_N * GROUP_N) {}

  // With SPLIT, a K tile is split while the products of the previous one are in flight.
  __device__ __forceinline__ PipelineState mainloop(const Pipeline& pipeline, int count) {
    const unsigned a = tiles + m * ROW_BYTES, b = tiles + BYTES_A + n * ROW_BYTES;
    const bool elected = threadIdx.x % 32 == 0;
    PipelineState state;
    int before = 0;  // the stage of the previous tile
    for (int k = 0; k < count; ++k, state.advance(TILE_STAGES)) {
      mbarrier_wait(pipeline.full(state.stage), state.phase);
      if constexpr (SPLITS) split_pixels<TILE_N>(tiles + state.stage * STAGE_BYTES + BYTES_A);
      const int at = state.stage * STAGE_BYTES;
      multiply_next(accumulators, a + at, b + at, [&] {
        if (k > 0 && elected) mbarrier_arrive(pipeline.empty(before));
      });
      before = state.stage;
    }
    wgmma_wait<0>();
    if (count > 0 && elected) mbarrier_arrive(pipeline.empty(before));
    accumulators.fold();
    return state;
  }

  __device__ __forceinline__ void add_bias(const ConvShape& p, const float* bias, int channel0) {
    ::add_bias(accumulators.main, p, bias, channel0 + m);
  }

  __device__ __forceinline__ void add_residual_slab(int slab, unsigned at) {
    const int warp = threadIdx.x % 128 / 32;
    // A slab holds the channels of a warpgroup, or of two of its warps.
    if (slab != m / 64 * SLABS_GROUP + warp * SLABS_GROUP / 4) return;
    add_residual(accumulators.main, at + n * ROW_BYTES, 0, [](int place) { return place; });
  }

  __device__ __forceinline__ void fill_slabs(unsigned slabs, bool relu) {
    ::fill_slabs(accumulators.main, slabs + m / 64 * SLABS_GROUP * BYTES_B + n * ROW_BYTES, BYTES_B,
                 [](int place) { return place; }, relu);
  }

#if TILE_PARTS > 1
  // Transposed to [pixel][channel].
  __device__ __forceinline__ void store_accumulators(float* tile) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    float* at = tile + (n + lane % 4 * 2) * PITCH + m + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) {
      float* pixel = at + 8 * j * PITCH;
      pixel[0] = accumulators.main[4 * j], pixel[PITCH] = accumulators.main[4 * j + 1];
      pixel[8] = accumulators.main[4 * j + 2], pixel[PITCH + 8] = accumulators.main[4 * j + 3];
    }
  }
#endif
};

#include "hopper/gather_kernel.cuh"
