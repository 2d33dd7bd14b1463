// Threads, mbarriers, products and slabs shared by the `wgmma` convolutions of bytes, which are
// integers or e4m3 numbers. NHWC.
//
// A producer warp fills shared memory by TMA; consumer warpgroups multiply. Rows of A are output
// channels, rows of B output pixels, as in hopper/products.cuh.
//
// Weights are packed with the rows of each 16 channels in the order 0, 2, … 14, 1, 3, … 15. A
// thread's two rows, i and i + 8 of 16, are then neighbouring channels, and their two bytes move
// through `stmatrix` and `ldmatrix` as one 16-bit element, transposed to channels of a pixel.
//
// Included by integers/hopper/requantization.cuh and float8/hopper/finishing.cuh, which define:
// - Sums: a thread's accumulators; layout in hopper/wgmma.cuh.
// - Factors: the epilogue's operands, in memory.
// - Finishing(p, factors, channel0): the factors of a thread's two channels.
// - finish(sums, slab, by, row_of): finishes a warpgroup's sums into its slab.
// - finish_four(sums, residual, by): for split-K, the output's bytes of a matrix's four sums,
//   [channel][pixel], and of the residual's bytes: channels 2i and 2i + 1 of a pixel, then of the
//   next pixel.
#pragma once
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/epilogue.cuh"
#include "bytes/hopper/wgmma.cuh"
#include "hopper/tma.cuh"
#include "mma/transposed_matrices.cuh"

constexpr int STEPS = TILE_K / 32;  // instructions per K tile
constexpr int WARPGROUPS = TILE_GROUPS_M * TILE_GROUPS_N;
constexpr int CONSUMERS = 128 * WARPGROUPS;  // threads
constexpr int THREADS = CONSUMERS + 32;
constexpr int GROUP_N = TILE_N / TILE_GROUPS_N;  // pixels per warpgroup
// A slab: 64 channels of each of a warpgroup's pixels, swizzled. It receives the residual, and the
// outputs take its place.
constexpr int SLAB_ROW = 64;

static_assert(TILE_M == 64 * TILE_GROUPS_M, "a warpgroup multiplies 64 channels");
static_assert(GROUP_N * TILE_GROUPS_N == TILE_N && GROUP_N % 16 == 0, "N of `wgmma`");
static_assert(WARPGROUPS <= 2, "as many as have barriers below");

// Barrier of one consumer warpgroup. The numbers are literals: the compiler would otherwise reserve
// all sixteen.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  if (WARPGROUPS == 1 || warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

// Aligns shared memory to 1024 bytes, which the swizzle needs. The host allocates 1024 bytes more.
__device__ __forceinline__ unsigned char* aligned_shared(unsigned char* dynamic) {
  return dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
}

// The mbarriers of a ring, a full/empty pair per stage. `full` completes a phase when the stage's
// bytes have arrived, `empty` when `readers` warps have read them.
struct Ring {
  unsigned first;
  int stages, readers;
  __device__ __forceinline__ unsigned full(int stage) const { return first + 16 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return first + 16 * stage + 8; }
  __device__ __forceinline__ unsigned end() const { return first + 16 * stages; }
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), readers);
    }
  }
};

// The stage that is next, and the parity of its phase.
struct RingState {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// Start of every kernel: allows the next launch to begin, prefetches the TMA descriptors while the
// previous one still runs, and initialises the mbarriers.
template <typename... Rings>
__device__ __forceinline__ void begin_block(const TensorMap& x, const TensorMap& weight,
                                            const TensorMap& residual, const TensorMap& out,
                                            const Rings&... rings) {
  if (threadIdx.x == CONSUMERS) {
    prefetch_tensor_map(weight);
    prefetch_tensor_map(x);
    prefetch_tensor_map(residual);
    prefetch_tensor_map(out);
  }
  launch_dependents();
  if (threadIdx.x == 0) {
    (rings.init(), ...);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// Issues A·Bᵀ over one K tile, whose rows the descriptors name; complete after `wgmma_commit` and a
// wait. `wgmma_fence` goes before the first. The sums' `first` products replace them.
template <typename X>
__device__ __forceinline__ void multiply_bytes(Sum<X> (&sums)[GROUP_N / 2], unsigned long long a,
                                               unsigned long long b, bool first) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    wgmma_bytes<X, GROUP_N>(sums, a + step * K_STEP, b + step * K_STEP, step > 0 || !first);
  }
}

// -- epilogue -------------------------------------------------------------------------------------

// The thread's two channels of a tile whose first channel is `channel0`. O is a multiple of 16.
__device__ __forceinline__ int channel_of(int channel0) {
  return channel0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2;
}

// Finishes COUNT matrices of 16 channels by 8 pixels, with the residual at `address` in the slab,
// and writes them there. Lane i has the address of pixel i % 8 of matrix i / 8.
//
// `by` makes bytes as `finish_four` does.
template <int COUNT, typename T, typename By>
__device__ __forceinline__ void finish_matrices(const T* sums, unsigned address, const By& by) {
  unsigned bytes[4] = {};
  if (by.has_residual) {
    if constexpr (COUNT == 4) {
      load_transposed(bytes, address);
    } else {
      load_transposed_pair(bytes, address);
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) bytes[i] = by(sums + 4 * i, bytes[i]);
  if constexpr (COUNT == 4) {
    store_transposed(address, bytes);
  } else {
    store_transposed_pair(address, bytes);
  }
}

// Finishes a warpgroup's sums into its slab, which holds the residual if there is one.
// `row_of(place)` maps a pixel of the tile to its row in the slab; no two places share one.
template <typename T, typename By, typename RowOf>
__device__ __forceinline__ void finish_slab(const T (&sums)[GROUP_N / 2], unsigned slab,
                                            const By& by, const RowOf& row_of) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const auto address = [&](int place) {
    const int row = row_of(place);
    return slab + row * SLAB_ROW + (warp ^ row / 2 % 4) * 16;
  };
#pragma unroll
  for (int j = 0; j < GROUP_N / 32; ++j) {
    finish_matrices<4>(sums + 16 * j, address(32 * j + lane), by);
  }
  if constexpr (GROUP_N % 32 != 0) {  // two matrices: the upper lanes' addresses are unused
    constexpr int LAST = GROUP_N / 32;
    finish_matrices<2>(sums + 16 * LAST, address(32 * LAST + lane % 16), by);
  }
}
