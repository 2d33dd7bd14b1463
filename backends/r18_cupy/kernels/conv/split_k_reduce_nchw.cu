// The end of a convolution whose K was split: partial sums are added, always in the same order,
// and the epilogue follows. A thread an output. NCHW, float32.
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
#pragma unroll 8  // the reads are under way together, whatever order they are added in
  for (int i = 0; i < splits; ++i) sum += partial[i * split_size + index];
  const int channel = quotient(index, plane) % p.o;
  out[index] = epilogue<float>(p, sum, channel, index, bias, residual);
}
