// Convolution of stride 1 as a matrix product on Hopper's tensor cores, each pixel copied once.
// NHWC.
//
// A block computes whole output rows. It has the image rows under them in shared memory, padding
// included, as one run of pixels: row after row of `padded` = W + 2·pw pixels. What lies at (r, s)
// in the windows of a run of output places is then the same run, r·padded + s pixels further on:
// the matrix begins there, and nothing is gathered. The last kw − 1 places of a row are windows that
// straddle two rows; they are computed and not written.
//
// K runs over chunks of 128 bytes of channels and, in each, over the window's positions: a chunk of
// the image rows is copied once for all of them, weights of each position follow one another.
#include "wgmma_conv.cuh"

constexpr int STAGE_BYTES = TILE_M * ROW_BYTES;  // of weights

static_assert(TILE_GROUPS_M == 1 && TILE_GROUPS_N == 1, "one warpgroup multiplies");

// The host's `ROWS_SHAPE` mirrors it field by field.
struct RowsShape {
  int rows, padded;  // of output a block; image pixels a row, padding included
  int patches;       // chunks of image rows in shared memory at once
  int patch_nbytes;  // of one
  int patch_pitch;   // bytes from one to the next, a multiple of 1024
};

// Grid: images, in them tiles of rows and, innermost, of channels.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_rows(const __grid_constant__ TensorMap x,
                                const __grid_constant__ TensorMap weight,
                                const float* __restrict__ bias,
                                const STORAGE* __restrict__ residual, STORAGE* __restrict__ out,
                                const ConvShape p, const RowsShape shape) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* shared = aligned_stages(dynamic);
  const unsigned patches = shared_address(shared);
  const unsigned stages = patches + shape.patches * shape.patch_pitch;
  const Ring ring{stages + TILE_STAGES * STAGE_BYTES};            // of weights
  const Ring patch_ring{ring.first + 16 * TILE_STAGES};
  const int channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const int row_tiles = (p.oh + shape.rows - 1) / shape.rows;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int line0 = blockIdx.x / channel_tiles % row_tiles * shape.rows;  // of output
  const int image = blockIdx.x / channel_tiles / row_tiles;
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;

  let_next_launch_begin();
  if (threadIdx.x == 0) {
    ring.init(TILE_STAGES);
    patch_ring.init(shape.patches);
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x == MULTIPLIERS) {
      // Weights of the first stages are on their way before the launch before has ended.
      const int count = chunks * positions, ahead = min(count, TILE_STAGES);
      Turn turn;
      int chunk = 0, position = 0;
      const auto feed_weights = [&] {
        barrier_arrive_expecting(ring.full(turn.stage), STAGE_BYTES);
        copy_box(stages + turn.stage * STAGE_BYTES, weight, ring.full(turn.stage),
                 (position * chunks + chunk) * TILE_K, channel0);
        turn.advance(TILE_STAGES);
        if (++position == positions) position = 0, ++chunk;
      };
      for (int i = 0; i < ahead; ++i) feed_weights();
      wait_for_launch_before();
      Turn patch;
      int fed = 0;  // chunks of image rows
      const auto feed_patch = [&] {
        if (fed >= shape.patches) barrier_wait(patch_ring.empty(patch.stage), patch.parity ^ 1);
        barrier_arrive_expecting(patch_ring.full(patch.stage), shape.patch_nbytes);
        copy_patch(patches + patch.stage * shape.patch_pitch, x, patch_ring.full(patch.stage),
                   fed * TILE_K, -p.pw, line0 - p.ph, image);
        patch.advance(shape.patches);
        ++fed;
      };
      for (int i = 0; i < min(chunks, shape.patches); ++i) feed_patch();
      for (int i = ahead; i < count; ++i) {
        // A chunk's place is free once the weights after it are asked for: no wait blocks those.
        if (fed < chunks && i >= (fed - shape.patches + 1) * positions + TILE_STAGES) feed_patch();
        barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
        feed_weights();
      }
      while (fed < chunks) feed_patch();
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool speaks = lane == 0;  // of its warp
  float sums[GROUP_N / 2] = {};
  Turn turn, patch;
  int before = 0, patch_before = 0;  // the stages of the position before, of the chunk before
  for (int chunk = 0; chunk < chunks; ++chunk, patch.advance(shape.patches)) {
    barrier_wait(patch_ring.full(patch.stage), patch.parity);
    const unsigned pixels = patches + patch.stage * shape.patch_pitch;
    for (int r = 0; r < p.kh; ++r) {
      for (int s = 0; s < p.kw; ++s, turn.advance(TILE_STAGES)) {
        barrier_wait(ring.full(turn.stage), turn.parity);
        multiply(sums, stages + turn.stage * STAGE_BYTES,
                 pixels + (r * shape.padded + s) * ROW_BYTES);
        wgmma_wait<1>();  // all but these products have read what they read
        if (speaks && chunk + r + s > 0) barrier_arrive(ring.empty(before));
        if (speaks && chunk > 0 && r + s == 0) barrier_arrive(patch_ring.empty(patch_before));
        before = turn.stage;
      }
    }
    patch_before = patch.stage;
  }
  wgmma_wait<0>();
  wait_for_launch_before();
  multipliers_barrier();  // all have done with the stages, which the sums overwrite
  float* tile = reinterpret_cast<float*>(shared);
  lay_down(sums, tile + lane % 4 * 2 * PITCH + warp * 16 + lane / 4);
  multipliers_barrier();
  const int lines = min(shape.rows, p.oh - line0);
  const auto pixel_at = [&](int place) {
    const int line = place / shape.padded, column = place - line * shape.padded;
    return column < p.ow ? (image * p.oh + line0 + line) * p.ow + column : -1;
  };
  const int last = (lines - 1) * shape.padded + p.ow;
  write_out(p, tile, channel0, 0, last, bias, residual, out, pixel_at, own_sums);
}
