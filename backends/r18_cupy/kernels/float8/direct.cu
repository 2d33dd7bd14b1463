// Direct convolution of e4m3 numbers: one thread per output loops over its window. The slow, plain
// baseline, in either layout.
//
// 1. A thread derives its output's image, channel, row and column from its index.
// 2. It adds the products of its window in float32. The window is clipped to the image: padding is 0.
// 3. Epilogue: multiplier, bias, residual, ReLU, and the nearest e4m3 number.
//
// Constraints: none beyond 32-bit indices.
#include "common/dependent_launch.cuh"
#include "common/epilogue.cuh"
#include "float8/e4m3.cuh"

// Where an output is.
struct Place {
  int n, o, i, j;
};

// Distances between neighbours of an image's pixels and of a filter's taps: to the next channel,
// row and column.
struct Strides {
  unsigned channel, row, column;
};

__device__ __forceinline__ float window_sum(const unsigned char* image, const unsigned char* filter,
                                            const ConvShape& p, const Place& at,
                                            const Strides& of_x, const Strides& of_filter) {
  const int top = at.i * p.sh - p.ph, left = at.j * p.sw - p.pw;
  const int last_row = min(p.kh, p.h - top), last_column = min(p.kw, p.w - left);
  float sum = 0.0f;
  for (int r = max(0, -top); r < last_row; ++r) {
    for (int s = max(0, -left); s < last_column; ++s) {
      const unsigned char* pixel = image + (top + r) * of_x.row + (left + s) * of_x.column;
      const unsigned char* tap = filter + r * of_filter.row + s * of_filter.column;
      for (int c = 0; c < p.c; ++c, pixel += of_x.channel, tap += of_filter.channel) {
        sum = fmaf(from_e4m3(*pixel), from_e4m3(*tap), sum);
      }
    }
  }
  return sum;
}

// index: the output's place in memory, and the residual's.
__device__ __forceinline__ unsigned char stored(float sum, const ConvShape& p, int channel,
                                                unsigned index, const float* bias,
                                                const float* multiplier,
                                                const unsigned char* residual,
                                                const float* residual_multiplier) {
  const float added = residual ? from_e4m3(residual[index]) : 0.0f;
  const float by = residual ? *residual_multiplier : 0.0f;
  return to_e4m3(finished(sum, multiplier[channel], bias[channel], added, by, p.relu != 0));
}

// weight: OIHW.
//
// NOTE: without the second launch bound, ptxas aims at 32 registers on some architectures and spills.
extern "C" __global__ void __launch_bounds__(256, 4)
sconv2d_direct_nchw(const unsigned char* __restrict__ x, const unsigned char* __restrict__ weight,
                    const float* __restrict__ bias, const float* __restrict__ multiplier,
                    const unsigned char* __restrict__ residual,
                    const float* __restrict__ residual_multiplier,
                    unsigned char* __restrict__ out, const ConvShape p) {
  wait_for_previous_launch();
  // Tensors have fewer than 2^31 elements (the host refuses others), and 32-bit division is faster.
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned row = index / p.ow, plane = row / p.oh, n = plane / p.o;
  if (n >= p.n) return;
  const Place at{(int)n, (int)(plane % p.o), (int)(row % p.oh), (int)(index % p.ow)};
  const unsigned area = p.h * p.w, taps = p.kh * p.kw;
  const float sum = window_sum(x + n * p.c * area, weight + at.o * p.c * taps, p, at,
                               {area, (unsigned)p.w, 1}, {taps, (unsigned)p.kw, 1});
  out[index] = stored(sum, p, at.o, index, bias, multiplier, residual, residual_multiplier);
}

// weight: HWIO, so that neighbouring threads, of neighbouring channels, read neighbouring bytes.
extern "C" __global__ void __launch_bounds__(256, 4)
sconv2d_direct_nhwc(const unsigned char* __restrict__ x, const unsigned char* __restrict__ weight,
                    const float* __restrict__ bias, const float* __restrict__ multiplier,
                    const unsigned char* __restrict__ residual,
                    const float* __restrict__ residual_multiplier,
                    unsigned char* __restrict__ out, const ConvShape p) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned pixel = index / p.o, row = pixel / p.ow, n = row / p.oh;
  if (n >= p.n) return;
  const Place at{(int)n, (int)(index % p.o), (int)(row % p.oh), (int)(pixel % p.ow)};
  const unsigned c = p.c, o = p.o;
  const float sum = window_sum(x + n * p.h * p.w * c, weight + at.o, p, at, {1, p.w * c, c},
                               {o, p.kw * c * o, c * o});
  out[index] = stored(sum, p, at.o, index, bias, multiplier, residual, residual_multiplier);
}
