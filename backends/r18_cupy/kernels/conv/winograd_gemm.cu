// Winograd, second phase of three: one GEMM for each position t of a transformed tile (blockIdx.y).
//   product[t][o][k] = Σ_c filters[t][c][o] · transformed[t][c][k]
//
// 1. Tiles of filters and transformed inputs are copied to shared memory ahead of use (sgemm.cuh).
// 2. Threads accumulate in registers and write to the workspace.
//
// Constraints: the host and the first phase pad every extent to whole tiles, so there are no bounds
// checks. Padded channels are zero in both operands; padded rows and columns are never read.
#include "common/dependent_launch.cuh"
#include "conv/sgemm.cuh"
#include "conv/winograd.cuh"

// The N side: rows of transformed tiles, one channel each.
class TransformedTiles {
 public:
  __device__ __forceinline__ TransformedTiles(const float* transformed, int width)
      : next_((const float4*)(transformed + (size_t)(threadIdx.x / kRowVectors) * width) +
              threadIdx.x % kRowVectors),
        row_(width / kVector) {}

  __device__ __forceinline__ void fetch(float (*tile)[TILE_N]) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copies_[i].fetch((float4*)tile + threadIdx.x + i * kThreads, next_ + i * kRowStep * row_,
                       true);
    }
    next_ += TILE_K * row_;
  }

  __device__ __forceinline__ void land(float (*tile)[TILE_N]) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copies_[i].land((float4*)tile + threadIdx.x + i * kThreads);
  }

 private:
  static constexpr int kRowVectors = TILE_N / kVector;
  static constexpr int kRowStep = kThreads / kRowVectors;  // rows that the CTA copies at once
  static constexpr int kCopies = TILE_K / kRowStep;
  static_assert(kThreads % kRowVectors == 0, "a thread keeps to its columns");
  static_assert(TILE_K % kRowStep == 0, "each thread copies the same number of vectors");

  const float4* next_;
  const int row_;  // vectors from one channel to the next
  StagedCopy<float4> copies_[kCopies];
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
winograd_gemm(const float* __restrict__ filters, const float* __restrict__ transformed,
              float* __restrict__ product, const WinogradSpan span) {
  wait_for_previous_launch();
  __shared__ Shared shared;
  GemmShape g = {};
  g.k_tiles = g.split_tiles = span.c_padded / TILE_K;
  g.m_tiles = span.o_padded / TILE_M;
  const BlockTile block(g);
  const size_t t = blockIdx.y;

  WeightTiles weights(filters + t * span.c_padded * span.o_padded, g, block);
  TransformedTiles columns(transformed + t * span.c_padded * span.width + block.n, span.width);
  Accumulator acc;
  multiply_tiles(acc, shared, weights, columns, block.k_count);

  const int row = block.m_tile * TILE_M + acc.m;
  product += (t * span.o_padded + row) * span.width + block.n + acc.n;
#pragma unroll
  for (int i = 0; i < TILE_TM; ++i) {
    float* out = product + (size_t)(i / kVector * kLanesM * kVector + i % kVector) * span.width;
#pragma unroll
    for (int j = 0; j < TILE_TN; j += kVector) {
      *(float4*)(out + j * kLanesN) = *(const float4*)&acc.sum[i][j];
    }
  }
}
