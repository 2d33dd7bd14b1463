// What the kernels on `wgmma` share: one warp feeds stages of shared memory by TMA, warpgroups
// multiply what has arrived, and the sums leave as channels of pixels.
//
// Rows of A are output channels, rows of B output pixels: so the sums of a tile of few channels,
// which the first layers are, still come from instructions that read many pixels. The including
// file defines STORAGE and TILE_* and includes this once.
#pragma once
#include "async_copy.cuh"
#include "conv.cuh"
#include "dependent_launch.cuh"
#include "tensor_copy.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

constexpr int CHUNK = WIDTH<STORAGE>;  // channels that a thread writes at once
constexpr int ROW_BYTES = 128;         // of K in a tile
constexpr int STEPS = ROW_BYTES / 32;  // of a tile
constexpr int WARPGROUPS = TILE_GROUPS_M * TILE_GROUPS_N;
constexpr int MULTIPLIERS = 128 * WARPGROUPS;  // threads
constexpr int THREADS = MULTIPLIERS + 32;
constexpr int GROUP_N = TILE_N / TILE_GROUPS_N;  // pixels of a warpgroup
// Four channels of padding: a warp's sums, of 8 channels of every second pixel, lie in 32 banks.
constexpr int PITCH = TILE_M + 4;
constexpr int GROUPS = TILE_M / CHUNK;          // chunks of a pixel's channels
constexpr int ROWS_OUT = MULTIPLIERS / GROUPS;  // pixels that the block writes at once
constexpr int BATCH = 4;  // chunks of the residual that a thread asks for at once

static_assert(TILE_K * sizeof(STORAGE) == ROW_BYTES, "a row of a tile is 128 bytes");
static_assert(TILE_M == 64 * TILE_GROUPS_M, "a warpgroup multiplies 64 channels");
static_assert(TILE_N % TILE_GROUPS_N == 0 && GROUP_N % 8 == 0, "a matrix begins at 1024 bytes");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");
static_assert(MULTIPLIERS % GROUPS == 0, "a thread writes the same channels of each pixel");

using Chunk = Run<STORAGE, CHUNK>;

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
  __device__ __forceinline__ unsigned full(int stage) const { return first + 16 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return first + 16 * stage + 8; }
  __device__ __forceinline__ void init(int stages) const {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), MULTIPLIERS / 32);
    }
  }
};

// Which stage of a ring, and the parity of the phase in which it is used.
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// sums += A·Bᵀ over one tile of K; `a` and `b` are where the warpgroup's rows begin.
__device__ __forceinline__ void multiply(float (&sums)[GROUP_N / 2], unsigned a, unsigned b) {
  const unsigned long long left = matrix_descriptor(a), right = matrix_descriptor(b);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    wgmma<STORAGE, GROUP_N>(sums, left + step * STEP_OF_K, right + step * STEP_OF_K);
  }
  wgmma_commit();
}

// From registers to shared memory, [TILE_N][PITCH]: transposed, so that a pixel's channels lie
// side by side. `at` is the lane's first pixel and channel.
__device__ __forceinline__ void lay_down(const float (&sums)[GROUP_N / 2], float* at) {
#pragma unroll
  for (int j = 0; j < GROUP_N / 8; ++j) {
    float* pixel = at + 8 * j * PITCH;
    pixel[0] = sums[4 * j], pixel[PITCH] = sums[4 * j + 1];
    pixel[8] = sums[4 * j + 2], pixel[PITCH + 8] = sums[4 * j + 3];
  }
}

// Epilogue and store of the places [first, last) of the tile: a thread takes CHUNK channels of
// every ROWS_OUT-th. `pixel_at(place)` is the output pixel there, or negative where there is none;
// `sums_at(sum, chunk, swap)` reads a chunk of sums, its halves in an order of the thread's own, so
// that eight lanes read from 32 banks.
template <typename PixelAt, typename SumsAt>
__device__ __forceinline__ void write_out(const ConvShape& p, const float* tile, int channel0,
                                          int first, int last, const float* bias,
                                          const STORAGE* residual, STORAGE* out,
                                          const PixelAt& pixel_at, const SumsAt& sums_at) {
  const int group = threadIdx.x % GROUPS, channel = channel0 + group * CHUNK;
  if (channel >= p.o) return;
  const int swap = (group ^ group >> 2) & 1;
  float held[CHUNK];  // an absent bias is a zero here: a pointer that may be null would keep the
                      // array in memory, not in registers
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) held[v] = bias ? bias[channel + v] : 0.0f;
#pragma unroll 1
  for (int place0 = first + threadIdx.x / GROUPS; place0 < last; place0 += BATCH * ROWS_OUT) {
    int pixel[BATCH];
    Chunk added[BATCH];  // all loaded before the first is needed: one wait for a batch
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int place = place0 + j * ROWS_OUT;
      pixel[j] = place < last ? pixel_at(place) : -1;
      if (residual && pixel[j] >= 0) {
        added[j] = *reinterpret_cast<const Chunk*>(residual + (size_t)pixel[j] * p.o + channel);
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      if (pixel[j] < 0) continue;
      float sum[CHUNK];
      sums_at(sum, tile + (place0 + j * ROWS_OUT) * PITCH + group * CHUNK, swap);
      Chunk result;
#pragma unroll
      for (int v = 0; v < CHUNK; ++v) {
        result.at[v] =
            epilogue<STORAGE>(p, sum[v], v, v, held, residual ? added[j].at : nullptr);
      }
      *reinterpret_cast<Chunk*>(out + (size_t)pixel[j] * p.o + channel) = result;
    }
  }
}

// The same chunk's halves, in the order in which `swap` had them read.
__device__ __forceinline__ void unswap(float (&sum)[CHUNK], const float4 (&value)[CHUNK / 4],
                                       int swap) {
  constexpr int QUADS = CHUNK / 4;
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const float4 quad = QUADS == 2 && swap ? value[QUADS - 1 - q] : value[q];
    sum[4 * q] = quad.x, sum[4 * q + 1] = quad.y, sum[4 * q + 2] = quad.z, sum[4 * q + 3] = quad.w;
  }
}

// Where quad `q` of a chunk is to be read from.
__device__ __forceinline__ const float* swapped_quad(const float* chunk, int q, int swap) {
  return chunk + 4 * (CHUNK == 8 ? q ^ swap : q);
}

// A chunk of sums from the block's own shared memory.
__device__ __forceinline__ void own_sums(float (&sum)[CHUNK], const float* chunk, int swap) {
  float4 value[CHUNK / 4];
#pragma unroll
  for (int q = 0; q < CHUNK / 4; ++q) {
    value[q] = *reinterpret_cast<const float4*>(swapped_quad(chunk, q, swap));
  }
  unswap(sum, value, swap);
}
