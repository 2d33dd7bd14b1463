// Split-K of e4m3 convolutions within a cluster: each CTA adds up its share of K, then the cluster
// adds the shares in float32, in their order.
// 1. Every CTA stores its sums to its own shared memory, where the stages were.
// 2. Each CTA reads a share of the tile's pixels from the shared memory of all CTAs, finishes their
//    sums and writes the outputs. The residual is loaded while the CTAs wait for each other.
//
// The including file includes tile.cuh and defines `Part` and STAGE_BYTES.
#pragma once
#include "hopper/cluster.cuh"

constexpr int CHUNK = 4;  // channels per thread and access: 16 bytes of sums
// Four channels of padding spread a warp's sums over all banks.
constexpr int PITCH = TILE_M + 4;
constexpr int CHUNKS = TILE_M / CHUNK;                         // per pixel
constexpr int ROWS_OUT = CONSUMERS / CHUNKS;                   // pixels per iteration
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a CTA writes
constexpr int ITERATIONS = (SHARE + ROWS_OUT - 1) / ROWS_OUT;

static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums reuse the memory of the stages");
static_assert(CONSUMERS % CHUNKS == 0, "a thread writes the same channels of each pixel");

// Transposed to [pixel][channel], channels in their own order.
__device__ __forceinline__ void store_sums(const Numbers& sums, const Part& part, float* tile) {
  float* at = tile + (part.n + threadIdx.x % 4 * 2) * PITCH + channel_of(part.m);
#pragma unroll
  for (int j = 0; j < GROUP_N / 8; ++j) {
    float* pixel = at + 8 * j * PITCH;
    *reinterpret_cast<float2*>(pixel) = {sums[4 * j], sums[4 * j + 2]};
    *reinterpret_cast<float2*>(pixel + PITCH) = {sums[4 * j + 1], sums[4 * j + 3]};
  }
}

// One chunk of sums, at shared memory address `place` of every CTA, added over the splits.
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

// The reduction and epilogue. All consumer threads, once all stages have been read; the producer
// warp may have exited.
__device__ __forceinline__ void reduce_split_k(const Numbers& sums, const Part& part, float* tile,
                                               const ConvShape& p, unsigned pixel0, int channel0,
                                               const float* bias, const float* multiplier,
                                               const unsigned char* residual,
                                               const float* residual_multiplier,
                                               unsigned char* out) {
  store_sums(sums, part, tile);
  __syncwarp();
  cluster_arrive();

  const int share = (int)blockIdx.y * SHARE, chunk = threadIdx.x % CHUNKS * CHUNK;
  const int channel = channel0 + chunk, row0 = share + threadIdx.x / CHUNKS;
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const int rows = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
  const int end = channel < p.o ? rows : 0;
  const size_t start = (size_t)(pixel0 + row0) * p.o + channel, stride = (size_t)ROWS_OUT * p.o;
  float4 by{}, biases{};
  if (channel < p.o) {
    by = *reinterpret_cast<const float4*>(multiplier + channel);
    biases = *reinterpret_cast<const float4*>(bias + channel);
  }
  const float residual_by = residual ? *residual_multiplier : 0.0f;
  const bool clamps = p.relu != 0;
  unsigned residuals[ITERATIONS] = {};  // four bytes each
  wait_for_previous_launch();
  if (residual) {
#pragma unroll
    for (int i = 0; i < ITERATIONS; ++i) {
      if (row0 + i * ROWS_OUT >= end) break;
      residuals[i] = *reinterpret_cast<const unsigned*>(residual + (start + i * stride));
    }
  }
  __syncwarp();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < ITERATIONS; ++i) {
    const int row = row0 + i * ROWS_OUT;
    if (row >= end) break;
    const float4 sum = sum_splits(shared_address(tile + row * PITCH + chunk));
    const float2 low = from_e4m3_pair(residuals[i]), high = from_e4m3_pair(residuals[i] >> 16);
    const unsigned lower =
        to_e4m3_pair(finished(sum.x, by.x, biases.x, low.x, residual_by, clamps),
                     finished(sum.y, by.y, biases.y, low.y, residual_by, clamps));
    const unsigned upper =
        to_e4m3_pair(finished(sum.z, by.z, biases.z, high.x, residual_by, clamps),
                     finished(sum.w, by.w, biases.w, high.y, residual_by, clamps));
    *reinterpret_cast<unsigned*>(out + (start + i * stride)) = lower | upper << 16;
  }
  // No CTA may exit while others read its sums. The arrival need not order memory: each value that
  // was loaded has been used by a store above, so it has been read.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}
