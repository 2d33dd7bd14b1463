// Split-K within a cluster: each CTA accumulates its share of K, then the cluster adds them.
// 1. Every CTA stores its accumulators to its own shared memory, where the stages were.
// 2. Each CTA reads a share of the tile's pixels from the shared memory of all CTAs, adds them in
//    the order of the splits, applies the epilogue and writes the outputs. Bias and residual are
//    loaded while the CTAs wait for each other.
//
// The including file defines TILE_*, STAGE_BYTES and a `WarpgroupTile` with
// store_accumulators(tile), which writes [TILE_N pixels][PITCH].
#pragma once
#include "hopper/cluster.cuh"
#include "common/vector.cuh"
#include "hopper/pipeline.cuh"

// Channels per thread and access, for every storage type. Wider chunks would serialise more loads.
constexpr int CHUNK = 4;
// Four channels of padding spread a warp's accumulators, 8 channels of every second pixel, over all
// 32 banks.
constexpr int PITCH = TILE_M + 4;
constexpr int CHUNKS = TILE_M / CHUNK;                         // chunks per pixel
constexpr int ROWS_OUT = CONSUMERS / CHUNKS;                   // pixels per iteration
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a CTA writes
constexpr int ITERATIONS = (SHARE + ROWS_OUT - 1) / ROWS_OUT;     

static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the accumulators reuse the memory of the stages");
static_assert(CONSUMERS % CHUNKS == 0, "a thread writes the same channels of each pixel");

using Chunk = Run<STORAGE, CHUNK>;

// Adds one chunk of accumulators, at shared memory address `place` of every CTA, over the splits.
__device__ __forceinline__ float4 sum_splits(unsigned place) {
  float4 part[TILE_PARTS];  // all loads are issued before the first is needed
#pragma unroll
  for (int i = 0; i < TILE_PARTS; ++i) part[i] = cluster_load(cluster_address(place, i));
  float4 sum = part[0];
#pragma unroll
  for (int i = 1; i < TILE_PARTS; ++i) {
    sum.x += part[i].x, sum.y += part[i].y, sum.z += part[i].z, sum.w += part[i].w;
  }
  return sum;
}

// The split-K reduction and epilogue. All consumer threads, once all stages have been read; the
// producers may have exited.
template <typename WarpgroupTile>
__device__ __forceinline__ void reduce_split_k(WarpgroupTile& warpgroup_tile, float* tile,
                                               const ConvShape& p, unsigned pixel0, int channel0,
                                               const float* bias, const STORAGE* residual,
                                               STORAGE* out) {
  warpgroup_tile.store_accumulators(tile);
  __syncwarp();
  cluster_arrive();

  const int share = (int)blockIdx.y * SHARE, chunk = threadIdx.x % CHUNKS * CHUNK;
  const int channel = channel0 + chunk, row0 = share + threadIdx.x / CHUNKS;
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const int rows = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
  const int end = channel < p.o ? rows : 0;
  const size_t start = (size_t)(pixel0 + row0) * p.o + channel, stride = (size_t)ROWS_OUT * p.o;
  // Zeros where there is no bias. A pointer that may be null would keep the array in local memory.
  float bias_values[CHUNK] = {};
  if (bias && channel < p.o) load(bias_values, bias + channel);
  Chunk residual_values[ITERATIONS];
  wait_for_previous_launch();
  if (residual) {
#pragma unroll
    for (int i = 0; i < ITERATIONS; ++i) {
      if (row0 + i * ROWS_OUT >= end) break;
      residual_values[i] = *reinterpret_cast<const Chunk*>(residual + (start + i * stride));
    }
  }
  __syncwarp();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < ITERATIONS; ++i) {
    const int row = row0 + i * ROWS_OUT;
    if (row >= end) break;
    const float4 sum = sum_splits(shared_address(tile + row * PITCH + chunk));
    const float acc[CHUNK] = {sum.x, sum.y, sum.z, sum.w};
    Chunk result;
#pragma unroll
    for (int v = 0; v < CHUNK; ++v) {
      result.at[v] = epilogue<STORAGE>(p, acc[v], v, v, bias_values,
                                       residual ? residual_values[i].at : nullptr);
    }
    *reinterpret_cast<Chunk*>(out + (start + i * stride)) = result;
  }
  // No CTA may exit while others read its accumulators. The arrival need not order memory: each
  // value that was loaded has been used by a store above, so it has been read.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}
