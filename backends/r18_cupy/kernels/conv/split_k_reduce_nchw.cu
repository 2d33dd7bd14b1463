// The second launch of a split-K GEMM, NCHW, float32: one thread per output
// 1. adds the splits in their order, so results are reproducible,
// 2. applies bias, residual and ReLU.
//
// Constraints: none.
#include "common/epilogue.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_divide.cuh"

extern "C" __global__ void __launch_bounds__(256)
split_k_reduce_nchw(const float* __restrict__ partial, const float* __restrict__ bias,
                    const float* residual, float* out, const ConvShape p, const FastDivisor plane,
                    size_t split_size, int splits) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= (unsigned)p.n * p.o * plane.divisor) return;
  float sum = 0.0f;
#pragma unroll 8  // overlaps the loads; the order of addition stays
  for (int i = 0; i < splits; ++i) sum += partial[i * split_size + index];
  const int channel = quotient(index, plane) % p.o;
  out[index] = epilogue<float>(p, sum, channel, index, bias, residual);
}
