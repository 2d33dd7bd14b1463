// Direct convolution of bytes: one thread per output loops over its window. The slow, plain
// baseline, in either layout.
//
// 1. A thread derives its output's image, channel, row and column from its index.
// 2. It adds the products of its window. The window is clipped to the image: padding is 0.
// 3. It hands the sum to the epilogue, with the output's channel and index, which is also the
//    residual's.
//
// The including file defines Number, the type of a sum, and plus_product(sum, x, w).
//
// Constraints: none beyond 32-bit indices.
#pragma once
#include "common/dependent_launch.cuh"
#include "common/epilogue.cuh"

// Where an output is.
struct Place {
  int n, o, i, j;
};

// Distances between neighbours of an image's pixels and of a filter's taps: to the next channel,
// row and column.
struct Strides {
  unsigned channel, row, column;
};

template <typename T, typename W>
__device__ __forceinline__ Number window_sum(const T* image, const W* filter, const ConvShape& p,
                                             const Place& at, const Strides& of_x,
                                             const Strides& of_filter) {
  const int top = at.i * p.sh - p.ph, left = at.j * p.sw - p.pw;
  const int last_row = min(p.kh, p.h - top), last_column = min(p.kw, p.w - left);
  Number sum = 0;
  for (int r = max(0, -top); r < last_row; ++r) {
    for (int s = max(0, -left); s < last_column; ++s) {
      const T* pixel = image + (top + r) * of_x.row + (left + s) * of_x.column;
      const W* tap = filter + r * of_filter.row + s * of_filter.column;
      for (int c = 0; c < p.c; ++c, pixel += of_x.channel, tap += of_filter.channel) {
        sum = plus_product(sum, *pixel, *tap);
      }
    }
  }
  return sum;
}

// weight: OIHW.
template <typename T, typename W, typename Epilogue>
__device__ __forceinline__ void convolve_nchw(const T* x, const W* weight, const ConvShape& p,
                                              const Epilogue& epilogue) {
  wait_for_previous_launch();
  // Tensors have fewer than 2^31 elements (the host refuses others), and 32-bit division is faster.
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned row = index / p.ow, plane = row / p.oh, n = plane / p.o;
  if (n >= p.n) return;
  const Place at{(int)n, (int)(plane % p.o), (int)(row % p.oh), (int)(index % p.ow)};
  const unsigned area = p.h * p.w, taps = p.kh * p.kw;
  const Number sum = window_sum(x + n * p.c * area, weight + at.o * p.c * taps, p, at,
                                {area, (unsigned)p.w, 1}, {taps, (unsigned)p.kw, 1});
  epilogue(sum, at.o, index);
}

// weight: HWIO, so that neighbouring threads, of neighbouring channels, read neighbouring bytes.
template <typename T, typename W, typename Epilogue>
__device__ __forceinline__ void convolve_nhwc(const T* x, const W* weight, const ConvShape& p,
                                              const Epilogue& epilogue) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned pixel = index / p.o, row = pixel / p.ow, n = row / p.oh;
  if (n >= p.n) return;
  const Place at{(int)n, (int)(index % p.o), (int)(row % p.oh), (int)(pixel % p.ow)};
  const unsigned c = p.c, o = p.o;
  const Number sum = window_sum(x + n * p.h * p.w * c, weight + at.o, p, at, {1, p.w * c, c},
                                {o, p.kw * c * o, c * o});
  epilogue(sum, at.o, index);
}
