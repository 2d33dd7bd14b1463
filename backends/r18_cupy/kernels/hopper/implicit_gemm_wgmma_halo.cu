// Convolution of stride 1 as a matrix product on Hopper's tensor cores, each pixel copied once.
// NHWC.
//
// A block computes one tile of output rows: see wgmma_rows.cuh.
//
// K runs over chunks of 128 bytes of channels and, in each, over the window's positions: a chunk of
// the image rows is copied once for all of them, weights of each position follow one another. Where
// factors are split, a chunk is when it has arrived, once for all positions.
#include "hopper/halo.cuh"

// Grid: images, in them tiles of rows and, innermost, of channels.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_rows(const __grid_constant__ TensorMap x,
                                const __grid_constant__ TensorMap weight,
                                const __grid_constant__ TensorMap residual,
                                const __grid_constant__ TensorMap out,
                                const float* __restrict__ bias, const ConvShape p,
                                const RowsShape shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_stages(dynamic));
  const unsigned stages = slots + shape.slots_nbytes;
  const Ring ring{stages + TILE_STAGES * STAGE_BYTES, TILE_STAGES};  // of weights
  const Ring slot_ring{ring.end(), shape.slots};
  const Tile at = tile_at(blockIdx.x, p, shape.rows);
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int slabs = shape.has_residual ? SLABS : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  expect(weight, x, residual, out);
  begin(ring, slot_ring);

  if (warp == MULTIPLIERS / 32) {
    if (lane == 0) {
      // Weights of the first stages are on their way before the launch before has ended.
      const int count = chunks * positions, ahead = min(count, TILE_STAGES);
      Turn turn;
      int chunk = 0, position = 0;
      const auto feed_weights = [&] {
        barrier_arrive_expecting(ring.full(turn.stage), STAGE_BYTES);
        copy_box(stages + turn.stage * STAGE_BYTES, weight, ring.full(turn.stage),
                 (position * chunks + chunk) * TILE_K, at.channel0);
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
          copy_patch(target, x, full, fed * TILE_K, -p.pw, at.line0 - p.ph, at.image);
        } else {
          barrier_arrive_expecting(full, shape.rows * p.ow * ROW_BYTES);
          copy_box(target, residual, full, at.channel0 + (fed - chunks) * SLAB_CHANNELS,
                   at.line0 * p.ow, at.image);
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
  Products products;
  Turn turn, slot;
  int before = 0, slot_before = 0;  // the stages of the position before, of the chunk before
  for (int chunk = 0; chunk < chunks; ++chunk, slot.advance(shape.slots)) {
    const unsigned pixels = slots + slot.stage * shape.slot_pitch;
    barrier_wait(slot_ring.full(slot.stage), slot.parity);
    if constexpr (SPLITS) {
      // Meanwhile products are under way: the last of the chunk before, which lies in another slot,
      // and those of the multiprocessor's other blocks.
      split_patch(pixels, shape);
      factors_made();
    }
    for (int r = 0; r < p.kh; ++r) {
      for (int s = 0; s < p.kw; ++s, turn.advance(TILE_STAGES)) {
        barrier_wait(ring.full(turn.stage), turn.parity);
        multiply(products, stages + turn.stage * STAGE_BYTES,
                 pixels + (r * shape.padded + s) * ROW_BYTES);
        wgmma_commit();
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

  Sums& sums = products.fold();
  if (bias) add_bias(sums, p, bias, at.channel0);
  for (int slab = 0; slab < slabs; ++slab, slot.advance(shape.slots)) {
    barrier_wait(slot_ring.full(slot.stage), slot.parity);
    // A slab holds the channels of the warpgroup, or of two of its warps.
    if (slab == warp * SLABS_GROUP / 4) {
      add_residual(sums, slots + slot.stage * shape.slot_pitch, 0,
                   RowOf<false>{p, shape, shape.per_place});
    }
    __syncwarp();
    if (speaks) barrier_arrive(slot_ring.empty(slot.stage));
  }
  multipliers_barrier();  // all have done with the slots, which the outputs overwrite
  fill_slabs(sums, slots, shape.slab_pitch, RowOf<true>{p, shape, shape.per_place}, p.relu);
  async_fence();
  multipliers_barrier();
  if (threadIdx.x == 0) {
    wait_for_launch_before();
    for (int slab = 0; slab < SLABS; ++slab) {
      const int channel = at.channel0 + slab * SLAB_CHANNELS;
      if (channel < p.o) {
        store_box(out, channel, at.line0 * p.ow, at.image, slots + slab * shape.slab_pitch);
      }
    }
    store_commit();
    store_wait();
  }
}
