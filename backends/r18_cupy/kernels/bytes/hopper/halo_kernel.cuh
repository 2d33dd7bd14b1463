// The kernel over whole output rows: one tile of them by 64 channels per CTA.
// 1. The producer thread loads chunks of TILE_K channels of the image rows into slots, and the
//    weights of each (chunk, window position) into a ring of stages.
// 2. One consumer warpgroup multiplies: for each chunk it steps through the window's positions,
//    shifting the address of the same pixels.
// 3. Epilogue in the slab: the residual, which TMA loads during the products, and a TMA store.
//
// The including file defines mainloop(sums, ring, slot_ring, stages, slots, p, shape), which
// multiplies every stage of weights by its slot, and releases both.
#pragma once
#include "bytes/hopper/halo.cuh"
#include "common/settle.cuh"
#include "hopper/uniform.cuh"

static_assert(TILE_GROUPS_N == 1, "one warpgroup multiplies");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");

// Grid: images, row tiles and, innermost, channel tiles. Without a residual its descriptor is
// unused.
__device__ __forceinline__ void convolve_rows(const TensorMap& x, const TensorMap& weight,
                                              const TensorMap& residual, const TensorMap& out,
                                              const Factors& factors, const ConvShape& p,
                                              const HaloShape& shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_shared(dynamic));
  const unsigned stages = slots + shape.slots * shape.patch_pitch;
  const unsigned slab = stages + TILE_STAGES * WEIGHT_BYTES;
  const Ring ring{slab + shape.slab_pitch, TILE_STAGES, CONSUMERS / 32};  // of weights
  const Ring slot_ring{ring.end(), shape.slots, CONSUMERS / 32};
  const Ring slab_ring{slot_ring.end(), 1, 1};
  Tile at = tile_at(blockIdx.x, p, shape.rows);
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;

  begin_block(x, weight, residual, out, ring, slot_ring, slab_ring);

  if (threadIdx.x / 32 == CONSUMERS / 32) {
    if (!elect_one()) return;
    // The weights of the first stages are loaded before the previous launch has ended.
    const int count = chunks * positions, ahead = min(count, TILE_STAGES);
    RingState state, slot_state;
    int chunk = 0, position = 0, issued = 0;
    const auto load_weights = [&] {
      mbarrier_arrive_expect_tx(ring.full(state.stage), WEIGHT_BYTES);
      tma_load(stages + state.stage * WEIGHT_BYTES, weight, ring.full(state.stage),
               (position * chunks + chunk) * TILE_K, at.channel0);
      state.advance(TILE_STAGES);
      if (++position == positions) position = 0, ++chunk;
    };
    const auto load_slot = [&] {
      if (issued >= shape.slots) {
        mbarrier_wait(slot_ring.empty(slot_state.stage), slot_state.phase ^ 1);
      }
      const unsigned full = slot_ring.full(slot_state.stage);
      mbarrier_arrive_expect_tx(full, shape.patch_nbytes);
      tma_load_patch(slots + slot_state.stage * shape.patch_pitch, x, full, issued * TILE_K, -p.pw,
                     at.line0 - p.ph, at.image);
      slot_state.advance(shape.slots);
      ++issued;
    };
    for (int i = 0; i < ahead; ++i) load_weights();
    settle(at.channel0, at.line0, at.image);
    wait_for_previous_launch();
    for (int i = 0; i < min(chunks, shape.slots); ++i) load_slot();
    if (factors.residual_multiplier) {
      mbarrier_arrive_expect_tx(slab_ring.full(0), shape.rows * p.ow * SLAB_ROW);
      tma_load(slab, residual, slab_ring.full(0), at.channel0, at.line0 * p.ow, at.image);
    }
    for (int i = ahead; i < count; ++i) {
      // Refill a slot only once the weights that its old chunk needs have been issued: waiting for
      // the slot earlier would deadlock.
      if (issued < chunks && i >= (issued - shape.slots + 1) * positions + TILE_STAGES) {
        load_slot();
      }
      mbarrier_wait(ring.empty(state.stage), state.phase ^ 1);
      load_weights();
    }
    while (issued < chunks) load_slot();
    return;
  }

  const Finishing by(p, factors, at.channel0);
  Sums sums;
  mainloop(sums, ring, slot_ring, stages, slots, p, shape);

  if (by.has_residual) mbarrier_wait(slab_ring.full(0), 0);
  finish(sums, slab, by, RowOf{p, shape, shape.per_place});
  fence_async_proxy();
  warpgroup_barrier(0);
  if (threadIdx.x == 0) {
    wait_for_previous_launch();
    tma_store(out, at.channel0, at.line0 * p.ow, at.image, slab);
    tma_store_commit();
    tma_store_wait();
  }
}
