// Implicit GEMM on CUDA cores with split-K across a cluster. NCHW, float32.
//
// 1. Each CTA multiplies its share of K, as conv/implicit_gemm.cu does.
// 2. The CTAs store their sums in shared memory. Each adds up its share of the channels over all
//    CTAs, in the order of the splits, applies bias, residual and ReLU, and writes them.
//
// Compared to split-K in conv/implicit_gemm.cu there is no second launch, and partial sums do not
// cross the L2.
//
// Constraints: sm_90; those of sgemm.cuh; gridDim.z = TILE_PARTS, at most 8, the portable size of a
// cluster.
#include "common/dependent_launch.cuh"
#include "conv/gathered_columns.cuh"
#include "hopper/cluster.cuh"

constexpr int kPitch = TILE_N + kVector;          // eight lanes store to two rows, 16 banks apart
constexpr int kVectors = TILE_N / kVector;        // of pixels, in a row of sums
constexpr int kRows = kThreads / kVectors;        // channels that a CTA writes at a time
constexpr int kRounds = (TILE_M / kRows + TILE_PARTS - 1) / TILE_PARTS;

static_assert(kThreads % kVectors == 0 && TILE_M % kRows == 0, "all threads write");

union ClusterShared {
  Shared own;
  float sums[TILE_M][kPitch];
};
static_assert(sizeof(ClusterShared) <= 48 * 1024, "static shared memory");

__device__ __forceinline__ void store_sums(const Accumulator& acc, float (*sums)[kPitch]) {
#pragma unroll
  for (int i = 0; i < TILE_TM; ++i) {
    const int row = acc.m + i / kVector * kLanesM * kVector + i % kVector;
#pragma unroll
    for (int j = 0; j < TILE_TN; j += kVector) {
      *(float4*)&sums[row][acc.n + j * kLanesN] = *(const float4*)&acc.sum[i][j];
    }
  }
}

// Adds the sums at the place of `own` in all CTAs, in the order of the splits.
__device__ __forceinline__ float4 sum_parts(const float* own) {
  float4 part[TILE_PARTS];  // all loads are issued before the first is needed
#pragma unroll
  for (int i = 0; i < TILE_PARTS; ++i) {
    part[i] = cluster_load(cluster_address(shared_address(own), i));
  }
  float4 sum = part[0];
#pragma unroll
  for (int i = 1; i < TILE_PARTS; ++i) {
    sum.x += part[i].x, sum.y += part[i].y, sum.z += part[i].z, sum.w += part[i].w;
  }
  return sum;
}

// Grid: x, tiles of pixels and, innermost, of channels; z, the splits of K, one cluster.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
__cluster_dims__(1, 1, TILE_PARTS)
conv2d_implicit_gemm_cluster(const float* __restrict__ x, const float* __restrict__ weight,
                             const float* __restrict__ bias, const float* residual, float* out,
                             const ConvShape p, const GemmShape g) {
  wait_for_previous_launch();
  __shared__ ClusterShared shared;
  const BlockTile block(g);
  {
    WeightTiles weights(weight, g, block);
    GatheredColumns columns(x, p, g, block);
    Accumulator acc;
    multiply_tiles(acc, shared.own, weights, columns, block.k_count);
    __syncthreads();  // the sums overlay tiles that are still being multiplied
    store_sums(acc, shared.sums);
  }
  cluster_arrive();
  const int column = threadIdx.x % kVectors * kVector;
  const unsigned plane = g.plane.divisor, first = g.first_pixel + block.n + column;
  unsigned starts[kVector];  // the places of the pixels in the first channel
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    const unsigned image = quotient(first + v, g.plane);
    starts[v] = image * p.o * plane + (first + v - image * plane);
  }
  __syncwarp();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int row = ((int)blockIdx.z + i * TILE_PARTS) * kRows + threadIdx.x / kVectors;
    const int channel = block.m_tile * TILE_M + row;
    if (row >= TILE_M || channel >= p.o) break;
    const float4 four = sum_parts(&shared.sums[row][column]);
    const float sums[kVector] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const unsigned index = starts[v] + channel * plane;
      if (first + v < (unsigned)g.pixels) {
        out[index] = epilogue<float>(p, sums[v], channel, index, bias, residual);
      }
    }
  }
  // No CTA may exit while others read its sums. The arrival need not order memory: each sum that was
  // loaded has been used above, so it has been read. NOTE: past the last pixel no store uses it, only
  // the addition, which the compiler leaves ahead of the branch.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}
