// Implicit GEMM with TMA's im2col mode: the part that does not depend on which matrix is A. A CTA
// computes one tile of channels by pixels.
//
// K runs over the window's positions, and at each position over the channels in chunks of 128
// bytes. Weights are packed in the same order, [O][depth]. For every K tile the producer loads one
// tile of weights, and one of pixels that TMA gathers from the image.
//
// Split-K: where a problem has too few tiles to fill the GPU, the CTAs of a cluster divide K. See
// cluster_split_k.cuh.
#pragma once
#include "hopper/pipeline.cuh"

constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;

static_assert(SLABS * BYTES_B <= TILE_STAGES * STAGE_BYTES,
              "the outputs reuse the memory of the stages");

// The TMA descriptors.
struct TensorMaps {
  const TensorMap &pixels, &weights, &residual, &out;
};

// The producer: K tiles [first, last), then the residual's slabs. One thread. The weights of the
// first stages are loaded before the previous launch has ended; pixels wait for it.
__device__ __forceinline__ void produce(const TensorMaps& maps, const ConvShape& p,
                                        const Pipeline& pipeline, unsigned tiles, unsigned pixel0,
                                        int channel0, int first, int last, int slabs) {
  const unsigned column = pixel0 % p.ow, line = pixel0 / p.ow;
  const WindowCorner corner{(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph,
                            (int)(line / p.oh)};
  // Chunks of channels at each position of the window.
  const int runs = (p.c + TILE_K - 1) / TILE_K;
  int run = first % runs, s = first / runs % p.kw, r = first / runs / p.kw;
  const auto load_weights = [&](int k, int stage) {
    mbarrier_arrive_expect_tx(pipeline.full(stage), STAGE_BYTES);
    tma_load(tiles + stage * STAGE_BYTES, maps.weights, pipeline.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) load_weights(first + i, i);
  wait_for_previous_launch();
  PipelineState state;
  for (int k = first; k < last; ++k, state.advance(TILE_STAGES)) {
    if (k - first >= TILE_STAGES) {
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      load_weights(k, state.stage);
    }
    tma_load_im2col(tiles + state.stage * STAGE_BYTES + BYTES_A, maps.pixels,
                    pipeline.full(state.stage),
                run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == p.kw) s = 0, ++r;
    }
  }
  for (int slab = 0; slab < slabs; ++slab, state.advance(TILE_STAGES)) {
    // Does not block on a stage that was never filled.
    mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
    mbarrier_arrive_expect_tx(pipeline.full(state.stage), BYTES_B);
    tma_load(tiles + state.stage * STAGE_BYTES + BYTES_A, maps.residual, pipeline.full(state.stage),
             channel0 + slab * SLAB_CHANNELS, (int)pixel0);
  }
}

#if TILE_PARTS > 1
#include "hopper/cluster_split_k.cuh"
#endif
