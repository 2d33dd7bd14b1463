// The GEMM after im2col: packed weights times the column matrix, with the convolution's epilogue.
// NCHW, float32, CUDA cores.
//
// 1. Tiles of weights and columns are copied to shared memory ahead of use (sgemm.cuh).
// 2. Threads accumulate TILE_TM × TILE_TN outputs in registers.
// 3. Epilogue: bias, residual, ReLU.
//
// Constraints: those of sgemm.cuh; `columns` is a multiple of TILE_N.
#include "common/dependent_launch.cuh"
#include "conv/sgemm.cuh"

// The N side, `columns` floats per row: a multiple of TILE_N, so every vector is aligned and no
// tile is ragged.
class StoredColumns {
 public:
  __device__ __forceinline__ StoredColumns(const float* matrix, int columns,
                                           const BlockTile& block)
      : next_(matrix + ((size_t)block.k_begin * TILE_K + row(0)) * columns + block.n + place()),
        columns_(columns) {}

  __device__ __forceinline__ void fetch(float (*tile)[TILE_N]) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copies_[i].fetch((float4*)&tile[row(i)][place()],
                       (const float4*)(next_ + (size_t)(i * kRowStep) * columns_), true);
    }
    next_ += (size_t)TILE_K * columns_;
  }

  __device__ __forceinline__ void land(float (*tile)[TILE_N]) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copies_[i].land((float4*)&tile[row(i)][place()]);
  }

 private:
  static constexpr int kRowVectors = TILE_N / kVector;
  static constexpr int kRowStep = kThreads / kRowVectors, kCopies = TILE_K / kRowStep;
  static_assert(kThreads % kRowVectors == 0, "threads must fill whole rows of a tile");
  static_assert(TILE_K % kRowStep == 0, "threads must fill the tile's rows");

  static __device__ __forceinline__ int row(int i) {
    return threadIdx.x / kRowVectors + i * kRowStep;
  }
  static __device__ __forceinline__ int place() {
    return threadIdx.x % kRowVectors * kVector;
  }

  const float* next_;
  int columns_;
  StagedCopy<float4> copies_[kCopies];
};

// One CTA per SM less than fits: at 128 registers ptxas spills on sm_120.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor - 1)
sgemm_tiled(const float* __restrict__ matrix, const float* __restrict__ weight,
            const float* __restrict__ bias, const float* residual, float* out,
            const ConvShape p, const GemmShape g, int columns) {
  wait_for_previous_launch();
  __shared__ Shared shared;
  const BlockTile block(g);
  WeightTiles weights(weight, g, block);
  StoredColumns stored(matrix, columns, block);
  Accumulator acc;
  multiply_tiles(acc, shared, weights, stored, block.k_count);
  store(acc, shared, p, g, block, bias, residual, out);
}
