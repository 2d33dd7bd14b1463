// Persistent implicit GEMM on Hopper for stride 1, with the input tile and its halo resident in
// shared memory. NHWC; fp16 and bf16. The algorithm's id and symbol keep their earlier word,
// `wgmma_stream`.
//
// As many CTAs as fit on the device take the tiles of halo.cuh in turn:
// 1. The producer thread runs ahead across tiles: it loads the image rows of the next tile and its
//    weights while the consumers finish the current one.
// 2. One consumer warpgroup multiplies as in implicit_gemm_wgmma_halo.cu.
// 3. Epilogue: bias, residual, ReLU; outputs overwrite the residual's slots and are stored by TMA
//    while the next tile starts.
//
// Two slots alternate. Each tile uses one slot per chunk of channels, filled with image rows, then
// one slot per slab, filled with the residual or left empty, from which the outputs are stored.
//
// Constraints: those of implicit_gemm_wgmma_halo.cu; 16-bit storage.
#include "hopper/halo.cuh"

constexpr int SLOTS = 2;

// Loads everything that the CTA's tiles need, in order. One thread.
struct Producer {
  const TensorMap &x, &weight, &residual;
  const ConvShape& p;
  const HaloShape& shape;
  const Pipeline pipeline, slot_pipeline;
  const unsigned stages, slots;
  PipelineState state, slot;         // of weights; of chunks and slabs
  int used = 0, filled = 0;            // stages and slots, so far
  int tile, chunk = 0, position = 0;   // of the next weights
  int slot_tile, slot_part = 0;        // of the next slot: a chunk, or after them a slab

  // The weights of one window position.
  __device__ __forceinline__ void load_weights(int chunks, int positions) {
    if (used++ >= TILE_STAGES) mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
    mbarrier_arrive_expect_tx(pipeline.full(state.stage), STAGE_BYTES);
    tma_load(stages + state.stage * STAGE_BYTES, weight, pipeline.full(state.stage),
             (position * chunks + chunk) * TILE_K, tile_at(tile, p, shape.rows).channel0);
    state.advance(TILE_STAGES);
    if (++position == positions) {
      position = 0;
      if (++chunk == chunks) chunk = 0, tile += gridDim.x;
    }
  }

  __device__ __forceinline__ void load_slot(int chunks) {
    const unsigned full = slot_pipeline.full(slot.stage);
    const unsigned target = slots + slot.stage * shape.slot_pitch;
    const Tile at = tile_at(slot_tile, p, shape.rows);
    if (filled++ >= SLOTS) mbarrier_wait(slot_pipeline.empty(slot.stage), slot.phase ^ 1);
    if (slot_part < chunks) {
      mbarrier_arrive_expect_tx(full, shape.patch_nbytes);
      tma_load_patch(target, x, full, slot_part * TILE_K, -p.pw, at.line0 - p.ph, at.image);
    } else if (shape.has_residual) {
      mbarrier_arrive_expect_tx(full, shape.rows * p.ow * ROW_BYTES);
      tma_load(target, residual, full, at.channel0 + (slot_part - chunks) * SLAB_CHANNELS,
               at.line0 * p.ow, at.image);
    } else {
      mbarrier_arrive(full);
    }
    slot.advance(SLOTS);
    if (++slot_part == chunks + SLABS) slot_part = 0, slot_tile += gridDim.x;
  }
};

// Grid: the CTAs that are resident at once, or one per tile if there are fewer.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_stream(const __grid_constant__ TensorMap x,
                                  const __grid_constant__ TensorMap weight,
                                  const __grid_constant__ TensorMap residual,
                                  const __grid_constant__ TensorMap out,
                                  const float* __restrict__ bias, const ConvShape p,
                                  const HaloShape shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_stages(dynamic));
  const unsigned stages = slots + shape.slots_nbytes;
  const Pipeline pipeline{stages + TILE_STAGES * STAGE_BYTES, TILE_STAGES};  // of weights
  const Pipeline slot_pipeline{pipeline.end(), SLOTS};
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  prefetch_tensor_maps(weight, x, residual, out);
  begin_block(pipeline, slot_pipeline);

  if (warpgroup_index() == WARPGROUPS) {
    if (elect_one()) {
      Producer producer{x, weight, residual, p, shape, pipeline, slot_pipeline, stages, slots};
      producer.tile = producer.slot_tile = blockIdx.x;
      const int tiles = (shape.tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
      const int weights = tiles * chunks * positions, slot_uses = tiles * (chunks + SLABS);
      // The weights of the first stages are loaded before the previous launch has ended.
      int issued = 0, use = 0;
      for (; issued < min(weights, TILE_STAGES); ++issued) producer.load_weights(chunks, positions);
      wait_for_previous_launch();
      for (; use < min(slot_uses, SLOTS); ++use) producer.load_slot(chunks);
      // Refill a slot once it will soon be free: when the weights that its content of two uses ago
      // needs have been issued, and a full ring of stages after them.
      const auto enough = [&](int next) {
        const int before = next - SLOTS, part = before % (chunks + SLABS);
        const int done = min(part + 1, chunks);  // chunks of that tile
        return (before / (chunks + SLABS) * chunks + done) * positions + TILE_STAGES;
      };
      for (; issued < weights; ++issued) {
        for (; use < slot_uses && issued >= enough(use); ++use) producer.load_slot(chunks);
        producer.load_weights(chunks, positions);
      }
      for (; use < slot_uses; ++use) producer.load_slot(chunks);
    }
    return;
  }

  const bool elected = lane == 0;
  PipelineState state, slot;
  // Recompute rows each time: keeping them would spill registers.
  const auto per_place = [&] {
    int found = shape.per_place;
    asm volatile("" : "+r"(found));
    return found;
  };
  // Outputs are stored while the next tile is multiplied, if that tile does not need their slots
  // first.
  constexpr bool DEFER_RELEASE = SLABS < SLOTS;
  PipelineState storing;  // the slots of the last tile's outputs
  bool released = true;
  const auto release_slabs = [&] {
    if (threadIdx.x == 0) tma_store_wait();
    __syncwarp();
    for (int slab = 0; slab < SLABS; ++slab, storing.advance(SLOTS)) {
      if (elected) mbarrier_arrive(slot_pipeline.empty(storing.stage));
    }
    released = true;
  };
  for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x) {
    const Tile at = tile_at(index, p, shape.rows);
    Accumulators accumulators;
    for (int chunk = 0; chunk < chunks; ++chunk, slot.advance(SLOTS)) {
      mbarrier_wait(slot_pipeline.full(slot.stage), slot.phase);
      const unsigned pixels = slots + slot.stage * shape.slot_pitch;
      int before = -1;  // the stage of the previous position
      for (int r = 0; r < p.kh; ++r) {
        for (int s = 0; s < p.kw; ++s, state.advance(TILE_STAGES)) {
          mbarrier_wait(pipeline.full(state.stage), state.phase);
          multiply(accumulators, stages + state.stage * STAGE_BYTES,
                   pixels + (r * shape.padded + s) * ROW_BYTES);
          wgmma_commit();
          if (!released) release_slabs();
          wgmma_wait<1>();  // all but these products have read their operands
          if (elected && before >= 0) mbarrier_arrive(pipeline.empty(before));
          before = state.stage;
        }
      }
      wgmma_wait<0>();
      if (elected) {
        mbarrier_arrive(pipeline.empty(before));
        mbarrier_arrive(slot_pipeline.empty(slot.stage));
      }
    }

    Accumulator& acc = accumulators.fold();
    if (bias) add_bias(acc, p, bias, at.channel0);
    storing = slot;
    for (int slab = 0; slab < SLABS; ++slab, slot.advance(SLOTS)) {
      mbarrier_wait(slot_pipeline.full(slot.stage), slot.phase);
      // A slab holds the channels of the warpgroup. Each warp writes only what it has read itself.
      if (slab == warp * SLABS_GROUP / 4) {
        const unsigned target = slots + slot.stage * shape.slot_pitch;
        if (shape.has_residual) add_residual(acc, target, 0, RowOf<false>{p, shape, per_place()});
        __syncwarp();
        fill_slabs(acc, target, 0, RowOf<true>{p, shape, per_place()}, p.relu);
      }
    }
    fence_async_proxy();
    consumers_barrier();
    if (threadIdx.x == 0) {
      if (index == blockIdx.x) wait_for_previous_launch();
      PipelineState each = storing;
      for (int slab = 0; slab < SLABS; ++slab, each.advance(SLOTS)) {
        const int channel = at.channel0 + slab * SLAB_CHANNELS;
        if (channel < p.o) {
          tma_store(out, channel, at.line0 * p.ow, at.image,
                    slots + each.stage * shape.slot_pitch);
        }
      }
      tma_store_commit();
    }
    released = false;
    if constexpr (!DEFER_RELEASE) release_slabs();
  }
  if (!released) release_slabs();
}
