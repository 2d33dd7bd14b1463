// Winograd's minimal filtering F(m×m, 3×3): one side of each transform (Lavin and Gray,
// arXiv:1509.09308), with points 0, ±1, ∞ for m = 2 and 0, ±11/16, ±3/2, ∞ for m = 4, whose rounding
// errors are less than half of those with ±1 and ±2. The host transforms the filters; conv/winograd.py
// has G.
#pragma once
#include "common/epilogue.cuh"

// The output tiles of a launch and the extents in the workspace. Tiles are counted over all images,
// row by row: (n · rows + row) · columns + column. The host's `SPAN` in conv/winograd.py mirrors it
// field by field.
struct WinogradSpan {
  int rows, columns;    // of tiles in an image
  int first, count;     // tiles
  int width;            // `count` rounded up to whole tiles of the product
  int c_padded, o_padded;
};

template <int M>
struct Winograd;

template <>
struct Winograd<2> {
  // v = Bᵀ d
  static __device__ __forceinline__ void input(const float (&d)[4], float (&v)[4]) {
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[1] - d[3];
  }
  // y = Aᵀ m
  static __device__ __forceinline__ void output(const float (&m)[4], float (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] - m[3];
  }
};

// NOTE: the error bound counts roundings: 4 per side in `input`, 4 in `output`. Sharing
// subexpressions between rows, as here, stays within that, because no shared sum has a term that
// its rows lack.
// All constants are exact in float32: powers of the points 11/16 and 3/2, and of their squares the
// product and the sum.
template <>
struct Winograd<4> {
  static __device__ __forceinline__ void input(const float (&d)[6], float (&v)[6]) {
    const float even = d[4] - 2.25f * d[2], odd = d[3] - 2.25f * d[1];
    const float near = d[4] - 0.47265625f * d[2], far = d[3] - 0.47265625f * d[1];
    v[0] = 1.0634765625f * d[0] + (d[4] - 2.72265625f * d[2]);
    v[1] = even + 0.6875f * odd;
    v[2] = even - 0.6875f * odd;
    v[3] = near + 1.5f * far;
    v[4] = near - 1.5f * far;
    v[5] = 1.0634765625f * d[1] + (d[5] - 2.72265625f * d[3]);
  }
  static __device__ __forceinline__ void output(const float (&m)[6], float (&y)[4]) {
    const float sum1 = m[1] + m[2], difference1 = m[1] - m[2];
    const float sum2 = m[3] + m[4], difference2 = m[3] - m[4];
    y[0] = m[0] + sum1 + sum2;
    y[1] = 0.6875f * difference1 + 1.5f * difference2;
    y[2] = 0.47265625f * sum1 + 2.25f * sum2;
    y[3] = 0.324951171875f * difference1 + (3.375f * difference2 + m[5]);
  }
};
