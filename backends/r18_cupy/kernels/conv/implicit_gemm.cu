// Implicit GEMM on CUDA cores: the column matrix is never written; its tiles are gathered from the
// image into shared memory. NCHW, float32.
//
// 1. While one tile is multiplied, later tiles of weights and pixels are copied to shared memory
//    (cp.async from sm_80 on); each thread gathers one pixel's column.
// 2. Threads accumulate TILE_TM × TILE_TN outputs in registers (sgemm.cuh).
// 3. Epilogue: bias, residual, ReLU. With split-K (blockIdx.z) each split writes bare sums, which
//    split_k_reduce_nchw.cu adds.
//
// Constraints: those of sgemm.cuh. TILE_BLOCKED pads C to a multiple of TILE_K.
#include "common/dependent_launch.cuh"
#include "conv/gathered_columns.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
conv2d_implicit_gemm(const float* __restrict__ x, const float* __restrict__ weight,
                     const float* __restrict__ bias, const float* residual, float* out,
                     const ConvShape p, const GemmShape g) {
  wait_for_previous_launch();
  __shared__ Shared shared;
  const BlockTile block(g);
  WeightTiles weights(weight, g, block);
  GatheredColumns columns(x, p, g, block);
  Accumulator acc;
  multiply_tiles(acc, shared, weights, columns, block.k_count);
  store(acc, shared, p, g, block, bias, residual, out + blockIdx.z * g.split_size);
}
