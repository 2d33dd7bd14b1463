// Convolution of bytes as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x). NHWC. Its
// tile and its producer; gather_kernel.cuh has the rest.
//
// K runs over the window's positions, and at each over the channels, TILE_K at a time. For every K
// tile the producer loads one tile of weights, and one of pixels that TMA gathers from the image.
//
// The including file includes the header of its numbers first (tile.cuh).
#pragma once
#include "bytes/hopper/tile.cuh"
#include "common/settle.cuh"

constexpr int BYTES_A = TILE_M * TILE_K, BYTES_B = TILE_N * TILE_K;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;
constexpr int SLAB_BYTES = GROUP_N * SLAB_ROW;  // per warpgroup

static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");
static_assert(BYTES_A % 1024 == 0 && STAGE_BYTES % 1024 == 0 && SLAB_BYTES % 512 == 0,
              "swizzled rows are aligned");

// The part of the tile that a warpgroup computes: 64 channels from `m`, GROUP_N pixels from `n`.
struct Part {
  int m, n;
};

__device__ __forceinline__ Part part_of(int warpgroup) {
  return {warpgroup / TILE_GROUPS_N * 64, warpgroup % TILE_GROUPS_N * GROUP_N};
}

// A tile's first channel and pixel.
struct Tile {
  int channel0;
  unsigned pixel0;
};

// Tile index: pixels, and channels innermost.
__device__ __forceinline__ Tile tile_at(unsigned index, const ConvShape& p) {
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  return {(int)(index % channel_tiles) * TILE_M, index / channel_tiles * TILE_N};
}

// Where the window of an output pixel begins.
__device__ __forceinline__ WindowCorner corner_at(unsigned pixel, const ConvShape& p) {
  const unsigned column = pixel % p.ow, line = pixel / p.ow;
  return {(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph, (int)(line / p.oh)};
}

// The producer: of each tile the K tiles [first, last), and the residual. One thread. The weights
// of the first stages are loaded before the previous launch has ended; everything else waits for
// it.
__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& weight,
                                        const TensorMap& residual, const ConvShape& p,
                                        const Ring& ring, const Ring& slab_ring, unsigned stages,
                                        unsigned slabs, int tiles, int first, int last,
                                        bool loads_residual) {
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // chunks of channels at each position
  int run0 = first % runs, s0 = first / runs % p.kw, r0 = first / runs / p.kw;
  const int ahead = min(TILE_STAGES, last - first);
  Tile at = tile_at(blockIdx.x, p);
  WindowCorner corner = corner_at(at.pixel0, p);
  const auto load_weights = [&](int k, int stage) {
    mbarrier_arrive_expect_tx(ring.full(stage), STAGE_BYTES);
    tma_load(stages + stage * STAGE_BYTES, weight, ring.full(stage), k * TILE_K, at.channel0);
  };
  for (int i = 0; i < ahead; ++i) load_weights(first + i, i);
  // The assembler may still move divisions (settle.cuh); in split tiles it does not.
  settle(run0, s0, r0, corner.w, corner.h, corner.n);
  wait_for_previous_launch();
  RingState state;
  int issued = 0;  // K tiles
  unsigned slab_phase = 1;
  for (int index = blockIdx.x;;) {
    int run = run0, s = s0, r = r0;
    for (int k = first; k < last; ++k, ++issued, state.advance(TILE_STAGES)) {
      if (issued >= TILE_STAGES) mbarrier_wait(ring.empty(state.stage), state.phase ^ 1);
      if (issued >= ahead) load_weights(k, state.stage);
      tma_load_im2col(stages + state.stage * STAGE_BYTES + BYTES_A, x, ring.full(state.stage),
                      run * TILE_K, corner, r, s);
      if (++run == runs) {
        run = 0;
        if (++s == p.kw) s = 0, ++r;
      }
      if (loads_residual && k == first + ahead - 1) {  // behind the first stages
        if (index >= (int)gridDim.x) mbarrier_wait(slab_ring.empty(0), slab_phase);
        mbarrier_arrive_expect_tx(slab_ring.full(0), WARPGROUPS * SLAB_BYTES);
        for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
          const Part part = part_of(warpgroup);
          tma_load(slabs + warpgroup * SLAB_BYTES, residual, slab_ring.full(0),
                   at.channel0 + part.m, (int)at.pixel0 + part.n);
        }
      }
    }
    index += gridDim.x, slab_phase ^= 1;
    if (TILE_PARTS > 1 || index >= tiles) break;
    at = tile_at(index, p);
    corner = corner_at(at.pixel0, p);
  }
}
