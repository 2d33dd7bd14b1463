// Implicit GEMM with TMA's im2col mode: the part that does not depend on which matrix is A. A CTA
// computes one tile of channels by pixels.
//
// K runs over the window's positions, and at each position over the channels in chunks of 128
// bytes. Weights are packed in the same order, [O][depth]. For every K tile the producer loads one
// tile of weights, and one of pixels that TMA gathers from the image.
//
// With PROJECTION (conv2d_projection) K goes on over the window of a second image, that of the
// projection of a block's shortcut. Consumers see more K tiles, and nothing else.
//
// Split-K: where a problem has too few tiles to fill the GPU, the CTAs of a cluster divide K. See
// cluster_split_k.cuh.
#pragma once
#include "common/settle.cuh"
#include "hopper/pipeline.cuh"

constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;

static_assert(SLABS * BYTES_B <= TILE_STAGES * STAGE_BYTES,
              "the outputs reuse the memory of the stages");

// The TMA descriptors; the second one is of the residual, or of the projection's image.
struct TensorMaps {
  const TensorMap &pixels, &second, &weights, &out;
};

// The pixels of a convolution's K tiles, one tile after the other from `first` on, for the run of
// outputs that begins at `pixel0`.
struct PixelTiles {
  const TensorMap& map;
  WindowCorner corner;
  const int columns, runs;  // of the window; chunks of channels at each of its positions
  int run, s, r;

  __device__ __forceinline__ PixelTiles(const TensorMap& map, const ConvShape& p, unsigned pixel0,
                                        int first)
      : map(map),
        corner{(int)(pixel0 % p.ow) * p.sw - p.pw, (int)(pixel0 / p.ow % p.oh) * p.sh - p.ph,
               (int)(pixel0 / p.ow / p.oh)},
        columns(p.kw),
        runs((p.c + TILE_K - 1) / TILE_K),
        run(first % runs),
        s(first / runs % columns),
        r(first / runs / columns) {}

  __device__ __forceinline__ void settle() {
    ::settle(corner.w, corner.h, corner.n, run, s, r);
  }

  __device__ __forceinline__ void load_next(unsigned target, unsigned mbarrier) {
    tma_load_im2col(target, map, mbarrier, run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == columns) s = 0, ++r;
    }
  }
};

// The K tiles of a convolution, and then those of its projection.
struct ProjectedPixelTiles {
  PixelTiles own, projected;
  int left;  // of the convolution's own

  __device__ __forceinline__ ProjectedPixelTiles(const TensorMap& map, const ConvShape& p,
                                                 int own_tiles, const TensorMap& projected_map,
                                                 const ConvShape& projection, unsigned pixel0,
                                                 int first)
      : own(map, p, pixel0, first),
        projected(projected_map, projection, pixel0, max(first - own_tiles, 0)),
        left(own_tiles - first) {}

  __device__ __forceinline__ void settle() { own.settle(), projected.settle(); }

  __device__ __forceinline__ void load_next(unsigned target, unsigned mbarrier) {
    if (left-- > 0) {
      own.load_next(target, mbarrier);
    } else {
      projected.load_next(target, mbarrier);
    }
  }
};

// The producer: K tiles [first, last), then the residual's slabs. One thread. The weights of the
// first stages are loaded before the previous launch has ended; pixels wait for it.
template <typename Pixels>
__device__ __forceinline__ void produce(const TensorMaps& maps, Pixels pixels,
                                        const Pipeline& pipeline, unsigned tiles, unsigned pixel0,
                                        int channel0, int first, int last, int slabs) {
  const auto load_weights = [&](int k, int stage) {
    mbarrier_arrive_expect_tx(pipeline.full(stage), STAGE_BYTES);
    tma_load(tiles + stage * STAGE_BYTES, maps.weights, pipeline.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) load_weights(first + i, i);
  pixels.settle();  // divisions: 700 cycles; the assembler may still move them (settle.cuh)
  wait_for_previous_launch();
  PipelineState state;
  for (int k = first; k < last; ++k, state.advance(TILE_STAGES)) {
    if (k - first >= TILE_STAGES) {
      mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      load_weights(k, state.stage);
    }
    pixels.load_next(tiles + state.stage * STAGE_BYTES + BYTES_A, pipeline.full(state.stage));
  }
  for (int slab = 0; slab < slabs; ++slab, state.advance(TILE_STAGES)) {
    // Does not block on a stage that was never filled.
    mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
    mbarrier_arrive_expect_tx(pipeline.full(state.stage), BYTES_B);
    tma_load(tiles + state.stage * STAGE_BYTES + BYTES_A, maps.second, pipeline.full(state.stage),
             channel0 + slab * SLAB_CHANNELS, (int)pixel0);
  }
}
