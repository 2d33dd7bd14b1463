// Implicit GEMM on Hopper for stride 1, with the input tile and its halo resident in shared memory:
// each pixel is loaded once per tile. NHWC; fp16, bf16, tf32, fp16x3. The algorithm's id and symbol
// keep their earlier word, `wgmma_rows`.
//
// A CTA computes one tile of whole output rows by 64 channels (halo.cuh):
// 1. The producer thread loads chunks of 128 bytes of channels of the image rows into slots, and
//    the weights of each (chunk, window position) into a ring of stages.
// 2. One consumer warpgroup multiplies: for each chunk it steps through the window's positions,
//    shifting the address of the same pixels. With SPLIT, a chunk is split once on arrival.
// 3. Epilogue: bias, residual (through the slots), ReLU, then the outputs overwrite the slots and
//    are stored by TMA.
//
// Constraints: sm_90a; stride 1; C and O multiples of 16 bytes; at least one output row in a tile's
// pixels and the image rows in shared memory, see `obstacle` in hopper/implicit_gemm_wgmma_halo.py.
#include "hopper/halo.cuh"

// Grid: images, row tiles and, innermost, channel tiles.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_rows(const __grid_constant__ TensorMap x,
                                const __grid_constant__ TensorMap weight,
                                const __grid_constant__ TensorMap residual,
                                const __grid_constant__ TensorMap out,
                                const float* __restrict__ bias, const ConvShape p,
                                const HaloShape shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_stages(dynamic));
  const unsigned stages = slots + shape.slots_nbytes;
  const Pipeline pipeline{stages + TILE_STAGES * STAGE_BYTES, TILE_STAGES};  // of weights
  const Pipeline slot_pipeline{pipeline.end(), shape.slots};
  Tile at = tile_at(blockIdx.x, p, shape.rows);
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int slabs = shape.has_residual ? SLABS : 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  prefetch_tensor_maps(weight, x, residual, out);
  begin_block(pipeline, slot_pipeline);

  if (warpgroup_index() == WARPGROUPS) {
    release_registers<PRODUCER_REGISTERS>();
    if (warp == CONSUMERS / 32 && elect_one()) {
      // The weights of the first stages are loaded before the previous launch has ended.
      const int count = chunks * positions, ahead = min(count, TILE_STAGES);
      PipelineState state;
      int chunk = 0, position = 0;
      const auto load_weights = [&] {
        mbarrier_arrive_expect_tx(pipeline.full(state.stage), STAGE_BYTES);
        tma_load(stages + state.stage * STAGE_BYTES, weight, pipeline.full(state.stage),
                 (position * chunks + chunk) * TILE_K, at.channel0);
        state.advance(TILE_STAGES);
        if (++position == positions) position = 0, ++chunk;
      };
      for (int i = 0; i < ahead; ++i) load_weights();
      settle(at.line0, at.image);
      wait_for_previous_launch();
      PipelineState slot_state;
      int issued = 0;  // chunks, then slabs
      const auto load_slot = [&] {
        const unsigned full = slot_pipeline.full(slot_state.stage);
        const unsigned target = slots + slot_state.stage * shape.slot_pitch;
        if (issued >= shape.slots) {
          mbarrier_wait(slot_pipeline.empty(slot_state.stage), slot_state.phase ^ 1);
        }
        if (issued < chunks) {
          mbarrier_arrive_expect_tx(full, shape.patch_nbytes);
          tma_load_patch(target, x, full, issued * TILE_K, -p.pw, at.line0 - p.ph, at.image);
        } else {
          mbarrier_arrive_expect_tx(full, shape.rows * p.ow * ROW_BYTES);
          tma_load(target, residual, full, at.channel0 + (issued - chunks) * SLAB_CHANNELS,
                   at.line0 * p.ow, at.image);
        }
        slot_state.advance(shape.slots);
        ++issued;
      };
      for (int i = 0; i < min(chunks + slabs, shape.slots); ++i) load_slot();
      for (int i = ahead; i < count; ++i) {
        // Refill a slot only once the weights that its old chunk needs have been issued: waiting
        // for the slot earlier would deadlock.
        if (issued < chunks + slabs && i >= (issued - shape.slots + 1) * positions + TILE_STAGES) {
          load_slot();
        }
        mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
        load_weights();
      }
      while (issued < chunks + slabs) load_slot();
    }
    return;
  }

  acquire_registers<CONSUMER_REGISTERS>();
  const bool elected = lane == 0;
  Accumulators accumulators;
  PipelineState state, slot_state;
  int before = 0, slot_before = 0;  // stages of the previous position and the previous chunk
  for (int chunk = 0; chunk < chunks; ++chunk, slot_state.advance(shape.slots)) {
    const unsigned pixels = slots + slot_state.stage * shape.slot_pitch;
    mbarrier_wait(slot_pipeline.full(slot_state.stage), slot_state.phase);
    if constexpr (SPLITS) {
      // Products are in flight during the split: the last ones of the previous chunk, which is in
      // another slot, and those of the other CTAs on the SM.
      split_patch(pixels, shape);
      operands_ready();
    }
    for (int r = 0; r < p.kh; ++r) {
      for (int s = 0; s < p.kw; ++s, state.advance(TILE_STAGES)) {
        mbarrier_wait(pipeline.full(state.stage), state.phase);
        multiply_next(
            accumulators, stages + state.stage * STAGE_BYTES,
            pixels + (r * shape.padded + s) * ROW_BYTES, [&] {
              if (elected && chunk + r + s > 0) mbarrier_arrive(pipeline.empty(before));
              if (elected && chunk > 0 && r + s == 0) {
                mbarrier_arrive(slot_pipeline.empty(slot_before));
              }
            });
        before = state.stage;
      }
    }
    slot_before = slot_state.stage;
  }
  wgmma_wait<0>();
  if (elected) mbarrier_arrive(slot_pipeline.empty(slot_before));

  Accumulator& acc = accumulators.fold();
  if (bias) add_bias(acc, p, bias, at.channel0);
  for (int slab = 0; slab < slabs; ++slab, slot_state.advance(shape.slots)) {
    mbarrier_wait(slot_pipeline.full(slot_state.stage), slot_state.phase);
    // A slab holds the channels of the warpgroup (16-bit) or of two of its warps (float).
    if (slab == warp * SLABS_GROUP / 4) {
      add_residual(acc, slots + slot_state.stage * shape.slot_pitch, 0,
                   RowOf<false>{p, shape, shape.per_place});
    }
    __syncwarp();
    if (elected) mbarrier_arrive(slot_pipeline.empty(slot_state.stage));
  }
  consumers_barrier();  // all slots have been read; the outputs overwrite them
  fill_slabs(acc, slots, shape.slab_pitch, RowOf<true>{p, shape, shape.per_place}, p.relu);
  fence_async_proxy();
  consumers_barrier();
  if (threadIdx.x == 0) {
    wait_for_previous_launch();
    for (int slab = 0; slab < SLABS; ++slab) {
      const int channel = at.channel0 + slab * SLAB_CHANNELS;
      if (channel < p.o) {
        tma_store(out, channel, at.line0 * p.ow, at.image, slots + slab * shape.slab_pitch);
      }
    }
    tma_store_commit();
    tma_store_wait();
  }
}
