// What the kernels on `wgmma` share, whichever matrix is which: one warp feeds stages of shared
// memory by TMA, warpgroups multiply what has arrived. The including file defines STORAGE and TILE_*
// and includes this once.
#pragma once
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"
#include "common/dependent_launch.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

constexpr int ROW_BYTES = 128;         // of K in a tile
constexpr int STEPS = ROW_BYTES / 32;  // of a tile
constexpr int WARPGROUPS = TILE_GROUPS_M * TILE_GROUPS_N;
constexpr int MULTIPLIERS = 128 * WARPGROUPS;  // threads
constexpr int THREADS = MULTIPLIERS + 32;
// A slab: 128 bytes of channels of each of the tile's pixels, permuted as TMA wants it. Outputs
// leave in slabs, residuals come in them.
constexpr int SLAB_CHANNELS = ROW_BYTES / sizeof(STORAGE);
constexpr int SLABS = TILE_M / SLAB_CHANNELS;

static_assert(TILE_K * sizeof(STORAGE) == ROW_BYTES, "a row of a tile is 128 bytes");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");

// Barrier of the multiplying threads alone.
__device__ __forceinline__ void multipliers_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
}

// The first multiple of 1024 bytes in the block's shared memory; the host has asked for that much
// more.
__device__ __forceinline__ unsigned char* aligned_stages(unsigned char* dynamic) {
  return dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
}

// A ring's barriers, a pair a stage: `full` ends a phase when the stage's bytes have arrived,
// `empty` when every multiplying warp has read them.
struct Ring {
  unsigned first;
  int stages;
  __device__ __forceinline__ unsigned full(int stage) const { return first + 16 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return first + 16 * stage + 8; }
  __device__ __forceinline__ unsigned end() const { return first + 16 * stages; }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), MULTIPLIERS / 32);
    }
  }
};

// Fetches what the copy engine is told of while the launch before still runs. One thread's work.
template <typename... Maps>
__device__ __forceinline__ void expect(const Maps&... maps) {
  if (threadIdx.x == MULTIPLIERS) (prefetch_map(maps), ...);
}

// How every one of the kernels begins: the next launch may, and the barriers are there.
template <typename... Rings>
__device__ __forceinline__ void begin(const Rings&... rings) {
  let_next_launch_begin();
  if (threadIdx.x == 0) {
    (rings.init(), ...);
    barrier_init_done();
  }
  __syncthreads();
}

// Which stage of a ring, and the parity of the phase in which it is used.
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};
