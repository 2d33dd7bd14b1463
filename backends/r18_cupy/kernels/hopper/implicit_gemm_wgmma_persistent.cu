// Convolution of stride 1 as a matrix product on Hopper's tensor cores, each pixel copied once, by
// blocks that stay. NHWC.
//
// Tiles are whole output rows, see wgmma_rows.cuh. A block takes one after the other: the image rows
// of the next are on their way while it ends the last, whose outputs go to where the residual lay.
//
// Two slots take turns. For each tile: a turn for each chunk of channels, which image rows fill;
// then one for each slab, which the residual fills, or nothing, and from which outputs leave.
#include "hopper/halo.cuh"

constexpr int SLOTS = 2;

// Everything that the block's tiles need, in order. One thread.
struct Feeder {
  const TensorMap &x, &weight, &residual;
  const ConvShape& p;
  const RowsShape& shape;
  const Ring ring, slot_ring;
  const unsigned stages, slots;
  Turn turn, slot;          // of weights; of chunks and slabs
  int used = 0, filled = 0;  // stages and slots, so far
  int tile, chunk = 0, position = 0;   // of the weights that are next
  int slot_tile, slot_part = 0;        // of what fills the next slot: a chunk, or a slab after them

  // The weights of one position.
  __device__ __forceinline__ void feed_weights(int chunks, int positions) {
    if (used++ >= TILE_STAGES) barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
    barrier_arrive_expecting(ring.full(turn.stage), STAGE_BYTES);
    copy_box(stages + turn.stage * STAGE_BYTES, weight, ring.full(turn.stage),
             (position * chunks + chunk) * TILE_K, tile_at(tile, p, shape.rows).channel0);
    turn.advance(TILE_STAGES);
    if (++position == positions) {
      position = 0;
      if (++chunk == chunks) chunk = 0, tile += gridDim.x;
    }
  }

  __device__ __forceinline__ void feed_slot(int chunks) {
    const unsigned full = slot_ring.full(slot.stage);
    const unsigned target = slots + slot.stage * shape.slot_pitch;
    const Tile at = tile_at(slot_tile, p, shape.rows);
    if (filled++ >= SLOTS) barrier_wait(slot_ring.empty(slot.stage), slot.parity ^ 1);
    if (slot_part < chunks) {
      barrier_arrive_expecting(full, shape.patch_nbytes);
      copy_patch(target, x, full, slot_part * TILE_K, -p.pw, at.line0 - p.ph, at.image);
    } else if (shape.has_residual) {
      barrier_arrive_expecting(full, shape.rows * p.ow * ROW_BYTES);
      copy_box(target, residual, full, at.channel0 + (slot_part - chunks) * SLAB_CHANNELS,
               at.line0 * p.ow, at.image);
    } else {
      barrier_arrive(full);
    }
    slot.advance(SLOTS);
    if (++slot_part == chunks + SLABS) slot_part = 0, slot_tile += gridDim.x;
  }
};

// Grid: as many blocks as run at once, or tiles: images, in them tiles of rows and, innermost, of
// channels.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_stream(const __grid_constant__ TensorMap x,
                                  const __grid_constant__ TensorMap weight,
                                  const __grid_constant__ TensorMap residual,
                                  const __grid_constant__ TensorMap out,
                                  const float* __restrict__ bias, const ConvShape p,
                                  const RowsShape shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_stages(dynamic));
  const unsigned stages = slots + shape.slots_nbytes;
  const Ring ring{stages + TILE_STAGES * STAGE_BYTES, TILE_STAGES};  // of weights
  const Ring slot_ring{ring.end(), SLOTS};
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  expect(weight, x, residual, out);
  begin(ring, slot_ring);

  if (warp == MULTIPLIERS / 32) {
    if (lane == 0) {
      Feeder feeder{x, weight, residual, p, shape, ring, slot_ring, stages, slots};
      feeder.tile = feeder.slot_tile = blockIdx.x;
      const int tiles = (shape.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
      const int weights = tiles * chunks * positions, turns = tiles * (chunks + SLABS);
      // Weights of the first stages are on their way before the launch before has ended.
      int fed = 0, turn = 0;
      for (; fed < min(weights, TILE_STAGES); ++fed) feeder.feed_weights(chunks, positions);
      wait_for_launch_before();
      for (; turn < min(turns, SLOTS); ++turn) feeder.feed_slot(chunks);
      // A slot is asked for once it is soon free: when the weights have been fed that what lay there
      // two turns before waits for, and a stage full of those after them.
      const auto enough = [&](int next) {
        const int before = next - SLOTS, part = before % (chunks + SLABS);
        const int done = min(part + 1, chunks);  // chunks of that tile
        return (before / (chunks + SLABS) * chunks + done) * positions + TILE_STAGES;
      };
      for (; fed < weights; ++fed) {
        for (; turn < turns && fed >= enough(turn); ++turn) feeder.feed_slot(chunks);
        feeder.feed_weights(chunks, positions);
      }
      for (; turn < turns; ++turn) feeder.feed_slot(chunks);
    }
    return;
  }

  const bool speaks = lane == 0;  // of its warp
  Turn turn, slot;
  // Rows are found anew each time: kept, they would take registers that there are not.
  const auto per_place = [&] {
    int found = shape.per_place;
    asm volatile("" : "+r"(found));
    return found;
  };
  // Outputs leave while the next tile is multiplied, if that needs none of the slots they are in.
  constexpr bool LATER = SLABS < SLOTS;
  Turn leaving;  // the slots of the last tile's outputs
  bool left = true;
  const auto see_off = [&] {
    if (threadIdx.x == 0) store_wait();
    __syncwarp();
    for (int slab = 0; slab < SLABS; ++slab, leaving.advance(SLOTS)) {
      if (speaks) barrier_arrive(slot_ring.empty(leaving.stage));
    }
    left = true;
  };
  for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x) {
    const Tile at = tile_at(index, p, shape.rows);
    Products products;
    for (int chunk = 0; chunk < chunks; ++chunk, slot.advance(SLOTS)) {
      barrier_wait(slot_ring.full(slot.stage), slot.parity);
      const unsigned pixels = slots + slot.stage * shape.slot_pitch;
      int before = -1;  // the stage of the position before
      for (int r = 0; r < p.kh; ++r) {
        for (int s = 0; s < p.kw; ++s, turn.advance(TILE_STAGES)) {
          barrier_wait(ring.full(turn.stage), turn.parity);
          multiply(products, stages + turn.stage * STAGE_BYTES,
                   pixels + (r * shape.padded + s) * ROW_BYTES);
          wgmma_commit();
          if (!left) see_off();
          wgmma_wait<1>();  // all but these products have read what they read
          if (speaks && before >= 0) barrier_arrive(ring.empty(before));
          before = turn.stage;
        }
      }
      wgmma_wait<0>();
      if (speaks) {
        barrier_arrive(ring.empty(before));
        barrier_arrive(slot_ring.empty(slot.stage));
      }
    }

    Sums& sums = products.fold();
    if (bias) add_bias(sums, p, bias, at.channel0);
    leaving = slot;
    for (int slab = 0; slab < SLABS; ++slab, slot.advance(SLOTS)) {
      barrier_wait(slot_ring.full(slot.stage), slot.parity);
      // A slab holds the channels of the warpgroup, or of two of its warps. What a warp writes, it
      // alone has read.
      if (slab == warp * SLABS_GROUP / 4) {
        const unsigned target = slots + slot.stage * shape.slot_pitch;
        if (shape.has_residual) add_residual(sums, target, 0, RowOf<false>{p, shape, per_place()});
        __syncwarp();
        fill_slabs(sums, target, 0, RowOf<true>{p, shape, per_place()}, p.relu);
      }
    }
    async_fence();
    multipliers_barrier();
    if (threadIdx.x == 0) {
      if (index == blockIdx.x) wait_for_launch_before();
      Turn each = leaving;
      for (int slab = 0; slab < SLABS; ++slab, each.advance(SLOTS)) {
        const int channel = at.channel0 + slab * SLAB_CHANNELS;
        if (channel < p.o) {
          store_box(out, channel, at.line0 * p.ow, at.image,
                    slots + each.stage * shape.slot_pitch);
        }
      }
      store_commit();
    }
    left = false;
    if constexpr (!LATER) see_off();
  }
  if (!left) see_off();
}
