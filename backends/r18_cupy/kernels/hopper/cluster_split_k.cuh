// Parts of K, each a block of a cluster's, and how their sums of a tile become one.
//
// Every block lays its sums down in its shared memory, where its stages were. Then each adds up a share
// of the tile's pixels out of the memory of all, in the order of the parts, and writes it. Bias and
// residual are on their way while the blocks wait for each other.
//
// The including file has, besides TILE_* and the STAGE_BYTES of a stage, a `Group` of a warpgroup,
// with
//   lay_down(tile): its sums, [TILE_N pixels][PITCH].
#pragma once
#include "hopper/cluster.cuh"
#include "common/vector.cuh"
#include "hopper/pipeline.cuh"

// Channels that a thread writes at once, whatever the storage: more are more loads after one another.
constexpr int CHUNK = 4;
// Four channels of padding: a warp's sums, of 8 channels of every second pixel, lie in 32 banks.
constexpr int PITCH = TILE_M + 4;
constexpr int CHUNKS = TILE_M / CHUNK;                         // of a pixel's channels
constexpr int ROWS_OUT = MULTIPLIERS / CHUNKS;                 // pixels that the block writes at once
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a block writes
constexpr int TURNS = (SHARE + ROWS_OUT - 1) / ROWS_OUT;       // until it has written them

static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums are laid down where the tiles were");
static_assert(MULTIPLIERS % CHUNKS == 0, "a thread writes the same channels of each pixel");

using Chunk = Run<STORAGE, CHUNK>;

// A chunk of the tile's sums, which lies at `place` in the memory of each, added up over the parts.
__device__ __forceinline__ float4 add_up(unsigned place) {
  float4 part[TILE_PARTS];  // all asked for before the first is needed
#pragma unroll
  for (int i = 0; i < TILE_PARTS; ++i) part[i] = cluster_load(cluster_address(place, i));
  float4 sum = part[0];
#pragma unroll
  for (int i = 1; i < TILE_PARTS; ++i) {
    sum.x += part[i].x, sum.y += part[i].y, sum.z += part[i].z, sum.w += part[i].w;
  }
  return sum;
}

// Ends the tile. All multiplying threads, when all have done with the stages; others may have ended.
template <typename Group>
__device__ __forceinline__ void end_parts(Group& group, float* tile, const ConvShape& p,
                                          unsigned pixel0, int channel0, const float* bias,
                                          const STORAGE* residual, STORAGE* out) {
  group.lay_down(tile);
  __syncwarp();
  cluster_arrive();

  const int share = (int)blockIdx.y * SHARE, chunk = threadIdx.x % CHUNKS * CHUNK;
  const int channel = channel0 + chunk, row0 = share + threadIdx.x / CHUNKS;
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const int rows = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
  const int end = channel < p.o ? rows : 0;
  const size_t start = (size_t)(pixel0 + row0) * p.o + channel, turn = (size_t)ROWS_OUT * p.o;
  float held[CHUNK] = {};  // an absent bias is a zero here: a pointer that may be null would keep
                           // the array in memory, not in registers
  if (bias && channel < p.o) load(held, bias + channel);
  Chunk added[TURNS];
  wait_for_launch_before();
  if (residual) {
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (row0 + i * ROWS_OUT >= end) break;
      added[i] = *reinterpret_cast<const Chunk*>(residual + (start + i * turn));
    }
  }
  __syncwarp();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int row = row0 + i * ROWS_OUT;
    if (row >= end) break;
    const float4 sum = add_up(shared_address(tile + row * PITCH + chunk));
    const float sums[CHUNK] = {sum.x, sum.y, sum.z, sum.w};
    Chunk result;
#pragma unroll
    for (int v = 0; v < CHUNK; ++v) {
      result.at[v] = epilogue<STORAGE>(p, sums[v], v, v, held, residual ? added[i].at : nullptr);
    }
    *reinterpret_cast<Chunk*>(out + (start + i * turn)) = result;
  }
  // Nobody leaves while its sums are read. The arrival orders no memory, and need not: every sum that
  // was asked for has been needed by a store above, so it has been read.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}
