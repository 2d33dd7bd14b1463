// im2col: the column matrix of a run of output pixels, row (c, r, s), column pixel. NCHW, float32.
//
// 1. A thread owns one column and finds its window.
// 2. It writes the window's pixels, zeros outside of the image; grid y strides over the channels.
//    Columns 2·i and 2·i + 1 are swapped, because the GEMM reads its N side so (conv/sgemm.cuh).
// 3. Padding rows and columns are written as zeros, so the GEMM after it needs no bounds checks.
//
// Constraints: `columns` is a multiple of the GEMM's TILE_N, `rows` of its TILE_K.
#include "common/epilogue.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_divide.cuh"
#include "conv/swapped_columns.cuh"

// `rows`: K, padded. `columns`: whole tiles of pixels.
extern "C" __global__ void __launch_bounds__(256)
im2col(const float* __restrict__ x, float* __restrict__ matrix, const ConvShape p,
       const FastDivisor plane, const FastDivisor row, int first_pixel, int columns, int rows) {
  wait_for_previous_launch();
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const unsigned pixel = (unsigned)first_pixel + column;
  const unsigned image = quotient(pixel, plane);
  const unsigned place = pixel - image * plane.divisor;
  const int i = quotient(place, row), j = place - i * p.ow;
  const int top = i * p.sh - p.ph, left = j * p.sw - p.pw;
  const bool exists = image < (unsigned)p.n;

  for (int c = blockIdx.y; c < p.c; c += gridDim.y) {
    const float* from = x + (exists ? ((size_t)image * p.c + c) * p.h * p.w : 0);
    float* to = matrix + (size_t)c * p.kh * p.kw * columns + swapped_column(column);
    for (int r = 0; r < p.kh; ++r) {
      const int y = top + r;
      for (int s = 0; s < p.kw; ++s, to += columns) {
        const int z = left + s;
        const bool inside = exists && 0 <= y && y < p.h && 0 <= z && z < p.w;
        *to = inside ? from[y * p.w + z] : 0.0f;
      }
    }
  }
  if (blockIdx.y == 0) {
    for (int k = p.c * p.kh * p.kw; k < rows; ++k) matrix[(size_t)k * columns + column] = 0.0f;
  }
}
