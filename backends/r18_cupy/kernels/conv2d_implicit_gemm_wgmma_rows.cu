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
  int per_place;     // ⌈2¹⁶ / padded⌉: a place's row without dividing
  int slots;         // of chunks of image rows, and of the residual's slabs after them
  int slot_pitch;    // bytes from the first to the second, a multiple of 1024
  int patch_nbytes;  // of a chunk of image rows
  int slab_pitch;    // bytes from one slab of outputs to the next, a multiple of 1024
  int shared_nbytes; // of slots, before the weights
};

// Grid: images, in them tiles of rows and, innermost, of channels.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_rows(const __grid_constant__ TensorMap x,
                                const __grid_constant__ TensorMap weight,
                                const __grid_constant__ TensorMap residual,
                                const __grid_constant__ TensorMap out,
                                const float* __restrict__ bias, const int has_residual,
                                const ConvShape p, const RowsShape shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_stages(dynamic));
  const unsigned stages = slots + shape.shared_nbytes;
  const Ring ring{stages + TILE_STAGES * STAGE_BYTES};  // of weights
  const Ring slot_ring{ring.first + 16 * TILE_STAGES};
  const int channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const int row_tiles = (p.oh + shape.rows - 1) / shape.rows;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int line0 = blockIdx.x / channel_tiles % row_tiles * shape.rows;  // of output
  const int image = blockIdx.x / channel_tiles / row_tiles;
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int slabs = has_residual ? SLABS : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  let_next_launch_begin();
  if (threadIdx.x == 0) {
    ring.init(TILE_STAGES);
    slot_ring.init(shape.slots);
    barrier_init_done();
  }
  __syncthreads();

  if (warp == MULTIPLIERS / 32) {
    if (lane == 0) {
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
      Turn slot;
      int fed = 0;  // chunks, then slabs
      const auto feed_slot = [&] {
        const unsigned full = slot_ring.full(slot.stage);
        const unsigned target = slots + slot.stage * shape.slot_pitch;
        if (fed >= shape.slots) barrier_wait(slot_ring.empty(slot.stage), slot.parity ^ 1);
        if (fed < chunks) {
          barrier_arrive_expecting(full, shape.patch_nbytes);
          copy_patch(target, x, full, fed * TILE_K, -p.pw, line0 - p.ph, image);
        } else {
          barrier_arrive_expecting(full, shape.rows * p.ow * ROW_BYTES);
          copy_box(target, residual, full, channel0 + (fed - chunks) * SLAB_CHANNELS,
                   line0 * p.ow, image);
        }
        slot.advance(shape.slots);
        ++fed;
      };
      for (int i = 0; i < min(chunks + slabs, shape.slots); ++i) feed_slot();
      for (int i = ahead; i < count; ++i) {
        // A slot is free once the weights that follow its chunk are asked for: nothing waits that
        // those need.
        if (fed < chunks + slabs && i >= (fed - shape.slots + 1) * positions + TILE_STAGES) {
          feed_slot();
        }
        barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
        feed_weights();
      }
      while (fed < chunks + slabs) feed_slot();
    }
    return;
  }

  const bool speaks = lane == 0;  // of its warp
  Sums sums = {};
  Turn turn, slot;
  int before = 0, slot_before = 0;  // the stages of the position before, of the chunk before
  for (int chunk = 0; chunk < chunks; ++chunk, slot.advance(shape.slots)) {
    barrier_wait(slot_ring.full(slot.stage), slot.parity);
    const unsigned pixels = slots + slot.stage * shape.slot_pitch;
    for (int r = 0; r < p.kh; ++r) {
      for (int s = 0; s < p.kw; ++s, turn.advance(TILE_STAGES)) {
        barrier_wait(ring.full(turn.stage), turn.parity);
        multiply(sums, stages + turn.stage * STAGE_BYTES,
                 pixels + (r * shape.padded + s) * ROW_BYTES);
        wgmma_wait<1>();  // all but these products have read what they read
        if (speaks && chunk + r + s > 0) barrier_arrive(ring.empty(before));
        if (speaks && chunk > 0 && r + s == 0) barrier_arrive(slot_ring.empty(slot_before));
        before = turn.stage;
      }
    }
    slot_before = slot.stage;
  }
  wgmma_wait<0>();
  if (speaks) barrier_arrive(slot_ring.empty(slot_before));

  // A place's row in the slabs, which hold no padding; what is no output goes behind the last.
  const auto row_of = [&](int place) {
    const int line = place * shape.per_place >> 16, column = place - line * shape.padded;
    return line < shape.rows && column < p.ow ? line * p.ow + column : shape.rows * p.ow;
  };
  if (bias) add_bias(sums, p, bias, channel0);
  for (int slab = 0; slab < slabs; ++slab, slot.advance(shape.slots)) {
    barrier_wait(slot_ring.full(slot.stage), slot.parity);
    // A slab holds the channels of the warpgroup, or of two of its warps.
    if (slab == warp * SLABS_GROUP / 4) {
      add_residual(sums, slots + slot.stage * shape.slot_pitch, 0, row_of);
    }
    __syncwarp();
    if (speaks) barrier_arrive(slot_ring.empty(slot.stage));
  }
  multipliers_barrier();  // all have done with the slots, which the outputs overwrite
  fill_slabs(sums, slots, shape.slab_pitch, row_of, p.relu);
  store_fence();
  multipliers_barrier();
  if (threadIdx.x == 0) {
    wait_for_launch_before();
    for (int slab = 0; slab < SLABS; ++slab) {
      const int channel = channel0 + slab * SLAB_CHANNELS;
      if (channel < p.o) {
        store_box(out, channel, line0 * p.ow, image, slots + slab * shape.slab_pitch);
      }
    }
    store_commit();
    store_wait();
  }
}
