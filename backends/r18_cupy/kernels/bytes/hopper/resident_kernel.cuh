// The kernel over whole output rows, persistent, with all weights of 64 channels resident in shared
// memory: they are loaded once per CTA, and image rows once per tile.
// 1. The producer thread loads the weights, then for each tile the image rows under it into a slot
//    and the residual into a slab.
// 2. Consumer warpgroups take the tiles in turn: while one multiplies, the others finish.
// 3. Epilogue in the warpgroup's slab, and a TMA store that ends during the next tile's products.
#pragma once
#include "bytes/hopper/halo.cuh"
#include "common/settle.cuh"
#include "hopper/uniform.cuh"

constexpr int WINDOW = 3;  // rows and columns
constexpr int POSITIONS = WINDOW * WINDOW;

// Grid: a multiple of the channel tiles, so that a CTA's tiles have the same channels. Without a
// residual its descriptor is unused.
__device__ __forceinline__ void convolve_tiles(const TensorMap& x, const TensorMap& weight,
                                               const TensorMap& residual, const TensorMap& out,
                                               const Factors& factors, const ConvShape& p,
                                               const HaloShape& shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_shared(dynamic));
  const unsigned weights = slots + shape.slots * shape.patch_pitch;
  const unsigned slabs = weights + POSITIONS * WEIGHT_BYTES;
  const Ring slot_ring{slabs + shape.slabs * shape.slab_pitch, shape.slots, 4};  // image rows
  const Ring slab_ring{slot_ring.end(), shape.slabs, 1};  // residuals in, outputs out
  const Ring weight_ring{slab_ring.end(), 1, 1};
  const int channel0 = tile_at(blockIdx.x, p, shape.rows).channel0;
  const int warpgroup = warpgroup_index();
  const bool elected = threadIdx.x % 32 == 0;

  begin_block(x, weight, residual, out, slot_ring, slab_ring, weight_ring);

  if (warpgroup == WARPGROUPS) {
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(weight_ring.full(0), POSITIONS * WEIGHT_BYTES);
    for (int i = 0; i < POSITIONS; ++i) {
      tma_load(weights + i * WEIGHT_BYTES, weight, weight_ring.full(0), i * TILE_K, channel0);
    }
    Tile at = tile_at(blockIdx.x, p, shape.rows);
    settle(at.line0, at.image);
    wait_for_previous_launch();
    RingState slot, slab;
    int issued = 0;
    for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x, ++issued) {
      if (issued >= shape.slots) mbarrier_wait(slot_ring.empty(slot.stage), slot.phase ^ 1);
      const unsigned full = slot_ring.full(slot.stage);
      mbarrier_arrive_expect_tx(full, shape.patch_nbytes);
      tma_load_patch(slots + slot.stage * shape.patch_pitch, x, full, 0, -p.pw, at.line0 - p.ph,
                     at.image);
      slot.advance(shape.slots);
      if (issued >= shape.slabs) mbarrier_wait(slab_ring.empty(slab.stage), slab.phase ^ 1);
      if (factors.residual_multiplier) {
        mbarrier_arrive_expect_tx(slab_ring.full(slab.stage), shape.rows * p.ow * SLAB_ROW);
        tma_load(slabs + slab.stage * shape.slab_pitch, residual, slab_ring.full(slab.stage),
                 channel0, at.line0 * p.ow, at.image);
      } else {
        mbarrier_arrive(slab_ring.full(slab.stage));
      }
      slab.advance(shape.slabs);
      at = tile_at(index + gridDim.x, p, shape.rows);
    }
    return;
  }

  const bool storing = threadIdx.x % 128 == 0;  // the thread that stores the warpgroup's outputs
  const Finishing by(p, factors, channel0);
  RingState slot, slab;
  int stored = 0;  // the slab of the last tile
  const auto advance = [&](int tiles) {
    for (int i = 0; i < tiles; ++i) slot.advance(shape.slots), slab.advance(shape.slabs);
  };
  advance(warpgroup);
  bool first = true;
  mbarrier_wait(weight_ring.full(0), 0);
  for (int index = blockIdx.x + warpgroup * gridDim.x; index < shape.tiles;
       index += WARPGROUPS * gridDim.x) {
    const Tile at = tile_at(index, p, shape.rows);
    Sums sums;
    mbarrier_wait(slot_ring.full(slot.stage), slot.phase);
    const unsigned pixels = slots + slot.stage * shape.patch_pitch;
    const unsigned long long left = row_descriptor<TILE_K>(weights);
    const unsigned long long right = row_descriptor<TILE_K>(pixels);
    wgmma_fence();
    // All products are one group: between two groups the tensor cores would wait.
#pragma unroll
    for (int r = 0; r < WINDOW; ++r) {
#pragma unroll
      for (int s = 0; s < WINDOW; ++s) {
        multiply(sums, left + (WINDOW * r + s) * (WEIGHT_BYTES / 16),
                 right + (r * shape.padded + s) * (TILE_K / 16), r + s == 0);
      }
    }
    wgmma_commit();
    if (!first && storing) {
      tma_store_wait();  // the outputs of the last tile have left the slab
      mbarrier_arrive(slab_ring.empty(stored));
    }
    wgmma_wait<0>();
    fence_registers(sums);
    if (elected) mbarrier_arrive(slot_ring.empty(slot.stage));
    mbarrier_wait(slab_ring.full(slab.stage), slab.phase);
    const unsigned outputs = slabs + slab.stage * shape.slab_pitch;
    int per_place = shape.per_place;
    asm volatile("" : "+r"(per_place));  // recompute rows: keeping them would spill registers
    finish(sums, outputs, by, RowOf{p, shape, per_place});
    fence_async_proxy();
    warpgroup_barrier(warpgroup);
    if (storing) {
      if (first) wait_for_previous_launch();
      tma_store(out, at.channel0, at.line0 * p.ow, at.image, outputs);
      tma_store_commit();
    }
    first = false;
    stored = slab.stage;
    advance(WARPGROUPS);
  }
  if (!first && storing) tma_store_wait();
}
