// The producer/consumer pipeline of all `wgmma` kernels: one producer thread fills stages of shared
// memory by TMA, consumer warpgroups multiply them. The including file defines STORAGE and TILE_*
// and includes this once.
#pragma once
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"
#include "common/dependent_launch.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

constexpr int ROW_BYTES = 128;         // of K per row of a tile
constexpr int STEPS = ROW_BYTES / 32;  // instructions per tile
constexpr int WARPGROUPS = TILE_GROUPS_M * TILE_GROUPS_N;
constexpr int CONSUMERS = 128 * WARPGROUPS;  // threads

// fp16x3 has three accumulators per output. Where a warp of producers would cost the consumers too
// many registers, there is a warpgroup of them, and it gives registers away (PRODUCER_GROUP).
#ifdef PRODUCER_GROUP
constexpr int PRODUCERS = 128, PRODUCER_REGISTERS = 24;
// A CTA has the registers that it is launched with; each of the SM's four units has 512 for a lane.
constexpr int LAUNCH_REGISTERS = 512 / (TILE_BLOCKS * (WARPGROUPS + 1)) / 8 * 8;
constexpr int CONSUMER_REGISTERS =
    ((WARPGROUPS + 1) * LAUNCH_REGISTERS - PRODUCER_REGISTERS) / WARPGROUPS / 8 * 8;
constexpr int THREAD_REGISTERS = CONSUMER_REGISTERS;
static_assert(LAUNCH_REGISTERS < CONSUMER_REGISTERS && CONSUMER_REGISTERS <= 248,
              "consumers acquire what producers release");
#else
constexpr int PRODUCERS = 32, PRODUCER_REGISTERS = 0, CONSUMER_REGISTERS = 0;
// Warps are distributed over four units.
constexpr int UNIT_WARPS = ((4 * WARPGROUPS + 1) * TILE_BLOCKS + 3) / 4;
constexpr int THREAD_REGISTERS = 512 / UNIT_WARPS / 8 * 8;
#endif
constexpr int THREADS = CONSUMERS + PRODUCERS;
// A slab: 128 bytes of channels of each of the tile's pixels, swizzled. Outputs are stored and
// residuals are loaded in slabs.
constexpr int SLAB_CHANNELS = ROW_BYTES / sizeof(STORAGE);
constexpr int SLABS = TILE_M / SLAB_CHANNELS;

static_assert(TILE_K * sizeof(STORAGE) == ROW_BYTES, "a row of a tile is 128 bytes of K");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");

// Barrier of the consumer threads only.
__device__ __forceinline__ void consumers_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

// Aligns the stages to 1024 bytes, which the 128-byte swizzle needs. The host allocates 1024 bytes
// more for it.
__device__ __forceinline__ unsigned char* aligned_stages(unsigned char* dynamic) {
  return dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
}

// The mbarriers of a pipeline, a full/empty pair per stage. `full` completes a phase when the
// stage's bytes have arrived, `empty` when every consumer warp has read them.
struct Pipeline {
  unsigned first;
  int stages;
  __device__ __forceinline__ unsigned full(int stage) const { return first + 16 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return first + 16 * stage + 8; }
  __device__ __forceinline__ unsigned end() const { return first + 16 * stages; }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), CONSUMERS / 32);
    }
  }
};

// Prefetches the TMA descriptors while the previous launch still runs. The producer thread.
template <typename... TensorMaps>
__device__ __forceinline__ void prefetch_tensor_maps(const TensorMaps&... maps) {
  if (threadIdx.x == CONSUMERS) (prefetch_tensor_map(maps), ...);
}

// Start of every kernel: allows the next launch to begin, and initialises the mbarriers.
template <typename... Rings>
__device__ __forceinline__ void begin_block(const Rings&... rings) {
  launch_dependents();
  if (threadIdx.x == 0) {
    (rings.init(), ...);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// The stage that is next, and the parity of its phase.
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};
