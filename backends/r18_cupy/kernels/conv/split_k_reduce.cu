// The second launch of a split-K GEMM, NHWC: one thread per output
// 1. adds the splits in their order, so results are reproducible,
// 2. applies bias, residual and ReLU, and rounds once.
//
// Constraints: none.
#include "common/epilogue.cuh"
#include "common/dependent_launch.cuh"

// `partial`: [splits][n·oh·ow][o], float.
extern "C" __global__ void __launch_bounds__(256)
split_k_reduce(const float* __restrict__ partial, const float* __restrict__ bias,
               const STORAGE* __restrict__ residual, STORAGE* __restrict__ out, const ConvShape p,
               const int parts) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned outputs = (unsigned)p.n * p.o * p.oh * p.ow;
  if (index >= outputs) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) sum += partial[(size_t)part * outputs + index];
  out[index] = epilogue<STORAGE>(p, sum, index % p.o, index, bias, residual);
}
