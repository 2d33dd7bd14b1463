// Persistent implicit GEMM on Hopper for stride 1, two warpgroups in turn, with the input tile and
// its halo resident in shared memory. NHWC; fp16, bf16, tf32.
//
// One CTA per SM computes tiles of whole output rows by 64 channels (halo.cuh):
// 1. One producer thread loads weights into a ring of stages, another the image rows into a ring of
//    slots, each tile after tile and as far ahead as its ring reaches.
// 2. The two consumer warpgroups take tiles in turn. One multiplies while the other one writes its
//    outputs, so the tensor cores wait for neither image rows nor epilogues.
// 3. Epilogue: bias, residual and ReLU in a slab, and a TMA store. Once the store has read the
//    slab, the thread that issued it loads the next residual there.
//
// Order: a warpgroup waits for its stages and slots only while it has the turn. All stages and
// slots are therefore used in the order in which they are filled, and no wait skips a phase.
//
// Constraints: sm_90a; stride 1; C and O multiples of 16 bytes; slots, stages and slabs in shared
// memory, see `obstacle` in hopper/implicit_gemm_wgmma_pingpong.py.
#include "hopper/halo.cuh"

constexpr int TURNS = 2;               // consumer warpgroups, CONSUMERS threads each
constexpr int PRODUCER_WARPS = 2;      // of weights, of image rows
constexpr int ALL_THREADS = TURNS * CONSUMERS + PRODUCER_WARPS * 32;

static_assert(!SPLITS, "a warpgroup would split image rows only when it has the turn");
static_assert(TILE_BLOCKS == 1, "two warpgroups need the registers of an SM");

// Barrier of one consumer warpgroup. The numbers are literals: the compiler would otherwise reserve
// all sixteen.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

// Arrives for `count` threads.
__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(count)
               : "memory");
}

// An mbarrier for each consumer warpgroup.
struct PerWarpgroup {
  unsigned first;
  int arrivals;
  __device__ __forceinline__ unsigned of(int warpgroup) const { return first + 8 * warpgroup; }
  __device__ __forceinline__ unsigned end() const { return first + 8 * TURNS; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < TURNS; ++i) mbarrier_init(of(i), arrivals);
  }
};

// Grid: the CTAs that are resident at once, or one per tile if there are fewer. `sets`: sets of
// SLABS slabs in shared memory, one for each warpgroup or one for both.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_pingpong(const __grid_constant__ TensorMap x,
                                    const __grid_constant__ TensorMap weight,
                                    const __grid_constant__ TensorMap residual,
                                    const __grid_constant__ TensorMap out,
                                    const float* __restrict__ bias, const ConvShape p,
                                    const HaloShape shape, const int sets) {
  extern __shared__ unsigned char dynamic[];
  const unsigned slots = shared_address(aligned_stages(dynamic));
  const unsigned stages = slots + shape.slots_nbytes;
  const unsigned slabs = stages + TILE_STAGES * STAGE_BYTES;
  const unsigned set_pitch = SLABS * shape.slab_pitch;
  const Pipeline pipeline{slabs + sets * set_pitch, TILE_STAGES};  // of weights
  const Pipeline slot_pipeline{pipeline.end(), shape.slots};
  const PerWarpgroup turn{slot_pipeline.end(), CONSUMERS / 32};  // may use stages and slots
  // Its slabs hold the residual, or are free. Each thread arrives that wrote outputs to them, so
  // that its stores precede those of all threads that wait.
  const PerWarpgroup granted{turn.end(), CONSUMERS};
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int warpgroup = warpgroup_index(), lane = threadIdx.x % 32;

  prefetch_tensor_maps(weight, x, residual, out);
  begin_block(pipeline, slot_pipeline, turn, granted);

  // Gives the slabs of the CTA's tile number `nth`, which is `index` in the problem, to the
  // warpgroup that computes it. One thread.
  const auto grant = [&](int nth, int index) {
    const unsigned full = granted.of(nth % TURNS);
    if (!shape.has_residual) {
      mbarrier_arrive(full);
      return;
    }
    const Tile at = tile_at(index, p, shape.rows);
    const unsigned target = slabs + nth % sets * set_pitch;
    mbarrier_arrive_expect_tx(full, SLABS * shape.rows * p.ow * ROW_BYTES);
    for (int slab = 0; slab < SLABS; ++slab) {
      tma_load(target + slab * shape.slab_pitch, residual, full,
               at.channel0 + slab * SLAB_CHANNELS, at.line0 * p.ow, at.image);
    }
  };

  if (warpgroup == TURNS) {
    if (!elect_one()) return;
    if (threadIdx.x / 32 == TURNS * CONSUMERS / 32) {
      // Weights do not depend on the previous launch.
      PipelineState state;
      int used = 0;  // stages
      for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x) {
        const int channel0 = tile_at(index, p, shape.rows).channel0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
          for (int position = 0; position < positions; ++position, state.advance(TILE_STAGES)) {
            if (used++ >= TILE_STAGES) mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
            mbarrier_arrive_expect_tx(pipeline.full(state.stage), STAGE_BYTES);
            tma_load(stages + state.stage * STAGE_BYTES, weight, pipeline.full(state.stage),
                     (position * chunks + chunk) * TILE_K, channel0);
          }
        }
      }
    } else {
      Tile at = tile_at(blockIdx.x, p, shape.rows);
      settle(at.line0, at.image);
      wait_for_previous_launch();
      PipelineState slot;
      int used = 0, nth = 0;  // slots; tiles
      for (int index = blockIdx.x; index < shape.tiles; index += gridDim.x, ++nth) {
        for (int chunk = 0; chunk < chunks; ++chunk, slot.advance(shape.slots)) {
          const unsigned full = slot_pipeline.full(slot.stage);
          if (used++ >= shape.slots) mbarrier_wait(slot_pipeline.empty(slot.stage), slot.phase ^ 1);
          mbarrier_arrive_expect_tx(full, shape.patch_nbytes);
          tma_load_patch(slots + slot.stage * shape.slot_pitch, x, full, chunk * TILE_K, -p.pw,
                         at.line0 - p.ph, at.image);
        }
        if (nth < sets) {  // the later ones follow outputs
          mbarrier_arrive(granted.of(nth % TURNS), CONSUMERS - 1);
          grant(nth, index);
        }
        at = tile_at(index + gridDim.x, p, shape.rows);
      }
    }
    return;
  }

  const bool elected = lane == 0;
  const bool storing = threadIdx.x % CONSUMERS == 0;  // the thread that stores the outputs
  const int steps = chunks * positions;
  PipelineState slot;
  const auto skip_slots = [&] {
    for (int chunk = 0; chunk < chunks; ++chunk) slot.advance(shape.slots);
  };
  if (warpgroup == 1) skip_slots();
  int nth = warpgroup;
  for (int index = blockIdx.x + warpgroup * gridDim.x; index < shape.tiles;
       index += TURNS * gridDim.x, nth += TURNS) {
    const unsigned used = (unsigned)nth * steps;  // stages
    PipelineState state{(int)(used % TILE_STAGES), used / TILE_STAGES & 1};
    int left = steps;
    int before = 0, slot_before = 0;  // stages of the previous position and the previous chunk
    Accumulators accumulators;
    // The first tile of all has the turn from the start.
    if (nth > 0) mbarrier_wait(turn.of(warpgroup), (nth - 1) / TURNS & 1);
    for (int chunk = 0; chunk < chunks; ++chunk, slot.advance(shape.slots)) {
      const unsigned pixels = slots + slot.stage * shape.slot_pitch;
      mbarrier_wait(slot_pipeline.full(slot.stage), slot.phase);
      for (int r = 0; r < p.kh; ++r) {
        for (int s = 0; s < p.kw; ++s, state.advance(TILE_STAGES)) {
          mbarrier_wait(pipeline.full(state.stage), state.phase);
          multiply(accumulators, stages + state.stage * STAGE_BYTES,
                   pixels + (r * shape.padded + s) * ROW_BYTES);
          wgmma_commit();
          // The other warpgroup's products queue behind the last of these.
          if (--left == 0 && elected) mbarrier_arrive(turn.of(1 - warpgroup));
          wgmma_wait<1>();  // all but these products have read their operands
          if (elected && chunk + r + s > 0) mbarrier_arrive(pipeline.empty(before));
          if (elected && chunk > 0 && r + s == 0) mbarrier_arrive(slot_pipeline.empty(slot_before));
          before = state.stage;
        }
      }
      slot_before = slot.stage;
    }
    wgmma_wait<0>();
    if (elected) {
      mbarrier_arrive(pipeline.empty(before));
      mbarrier_arrive(slot_pipeline.empty(slot_before));
    }

    const Tile at = tile_at(index, p, shape.rows);
    Accumulator& acc = accumulators.fold();
    if (bias) add_bias(acc, p, bias, at.channel0);
    mbarrier_wait(granted.of(warpgroup), nth / TURNS & 1);
    const unsigned outputs = slabs + nth % sets * set_pitch;
    // Recompute rows each time: keeping them would spill registers.
    int per_place = shape.per_place;
    asm volatile("" : "+r"(per_place));
    if (shape.has_residual) {
      add_residual(acc, outputs, shape.slab_pitch, RowOf<false>{p, shape, per_place});
      __syncwarp();  // each warp overwrites only what it has read itself
    }
    asm volatile("" : "+r"(per_place));
    fill_slabs(acc, outputs, shape.slab_pitch, RowOf<true>{p, shape, per_place}, p.relu);
    fence_async_proxy();
    warpgroup_barrier(warpgroup);
    if (storing) {
      if (nth < TURNS) wait_for_previous_launch();
      for (int slab = 0; slab < SLABS; ++slab) {
        const int channel = at.channel0 + slab * SLAB_CHANNELS;
        if (channel < p.o) {
          tma_store(out, channel, at.line0 * p.ow, at.image, outputs + slab * shape.slab_pitch);
        }
      }
      tma_store_commit();
      tma_store_wait();
    }
    if (const int next = index + sets * gridDim.x; next < shape.tiles) {
      if (storing) {
        grant(nth + sets, next);
      } else {
        mbarrier_arrive(granted.of((nth + sets) % TURNS));
      }
    }
    __syncwarp();
    skip_slots();
  }
}
