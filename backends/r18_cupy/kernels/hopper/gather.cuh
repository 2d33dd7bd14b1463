// What the kernels share that gather pixels of an implicit matrix: a block computes a tile of
// channels and pixels, whichever matrix is which.
//
// K runs over the window's positions, and at each over the channels, 128 bytes of them at a time;
// weights come packed the same way, [O][depth]. TMA copies a tile of weights and one of pixels,
// which it gathers from the image itself, into the next free stage.
//
// Where a problem has too few tiles to fill a GPU, K is divided among the blocks of a cluster: see
// wgmma_parts.cuh.
#pragma once
#include "hopper/pipeline.cuh"

constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;

static_assert(SLABS * BYTES_B <= TILE_STAGES * STAGE_BYTES, "outputs leave where the tiles were");

// What TMA is told of.
struct Maps {
  const TensorMap &pixels, &weights, &residual, &out;
};

// The tiles [first, last) of K, one after the other into the stages, then the residual's slabs. One
// thread. Weights of the first tiles are on their way before the launch before this one has ended.
__device__ __forceinline__ void feed(const Maps& maps, const ConvShape& p, const Ring& ring,
                                     unsigned tiles, unsigned pixel0, int channel0, int first,
                                     int last, int slabs) {
  const unsigned column = pixel0 % p.ow, line = pixel0 / p.ow;
  const WindowCorner corner{(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph,
                            (int)(line / p.oh)};
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // of channels, at each position of the window
  int run = first % runs, s = first / runs % p.kw, r = first / runs / p.kw;
  const auto feed_weights = [&](int k, int stage) {
    barrier_arrive_expecting(ring.full(stage), STAGE_BYTES);
    copy_box(tiles + stage * STAGE_BYTES, maps.weights, ring.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) feed_weights(first + i, i);
  wait_for_launch_before();
  Turn turn;
  for (int k = first; k < last; ++k, turn.advance(TILE_STAGES)) {
    if (k - first >= TILE_STAGES) {
      barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
      feed_weights(k, turn.stage);
    }
    copy_pixels(tiles + turn.stage * STAGE_BYTES + BYTES_A, maps.pixels, ring.full(turn.stage),
                run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == p.kw) s = 0, ++r;
    }
  }
  for (int slab = 0; slab < slabs; ++slab, turn.advance(TILE_STAGES)) {
    barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);  // passes while nothing has been there
    barrier_arrive_expecting(ring.full(turn.stage), BYTES_B);
    copy_box(tiles + turn.stage * STAGE_BYTES + BYTES_A, maps.residual, ring.full(turn.stage),
             channel0 + slab * SLAB_CHANNELS, (int)pixel0);
  }
}

#if TILE_PARTS > 1
#include "hopper/cluster_split_k.cuh"
#endif
