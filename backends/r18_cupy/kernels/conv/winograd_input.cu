// Winograd, first phase of three: the input transform.
//   transformed[t][c][k ^ 1] = (Bᵀ d B)[t] of channel c of the span's tile k,
//   where t = EXTENT·row + column.
// Neighbouring tiles are swapped because the GEMM reads its N side so (conv/sgemm.cuh).
//
// 1. A thread loads one EXTENT × EXTENT input tile of one channel, zeros outside of the image.
// 2. It transforms columns, then rows, in registers.
// 3. It writes position by position; neighbouring threads write neighbouring tiles.
//
// Constraints: stride 1, windows of 3×3.
#include "common/dependent_launch.cuh"
#include "conv/swapped_columns.cuh"
#include "conv/winograd.cuh"

constexpr int EXTENT = OUTPUT_TILE + 2;  // extent of an input tile
constexpr int LANES = 32, CHANNELS = 4;  // CTA: neighbouring tiles in neighbouring lanes

extern "C" __global__ void __launch_bounds__(LANES * CHANNELS)
winograd_input(const float* __restrict__ x, float* __restrict__ transformed, const ConvShape p,
               const WinogradSpan span) {
  wait_for_previous_launch();
  const int k = blockIdx.x * LANES + threadIdx.x;
  if (k >= span.width) return;
  const bool real = k < span.count;
  // Padding of the span must be written as zero: the workspace holds stale values.
  const unsigned tile = real ? span.first + k : 0;
  const int left = tile % span.columns * OUTPUT_TILE - p.pw;
  const int top = tile / span.columns % span.rows * OUTPUT_TILE - p.ph;
  const int n = tile / span.columns / span.rows;
  const size_t position_stride = (size_t)span.c_padded * span.width;

  for (int c = blockIdx.y * CHANNELS + threadIdx.y; c < span.c_padded;
       c += gridDim.y * CHANNELS) {
    const bool present = real && c < p.c;
    const float* plane = x + (present ? (n * p.c + c) * p.h * p.w : 0);
    float half[EXTENT][EXTENT];  // Bᵀ d, transposed
#pragma unroll
    for (int s = 0; s < EXTENT; ++s) {
      const int z = left + s;
      const bool column_inside = present && 0 <= z && z < p.w;
      float d[EXTENT];
#pragma unroll
      for (int r = 0; r < EXTENT; ++r) {
        const int y = top + r;
        d[r] = column_inside && 0 <= y && y < p.h ? plane[y * p.w + z] : 0.0f;
      }
      Winograd<OUTPUT_TILE>::input(d, half[s]);
    }
    float* out = transformed + (size_t)c * span.width + swapped_column(k);
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      float d[EXTENT], v[EXTENT];
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) d[s] = half[s][r];
      Winograd<OUTPUT_TILE>::input(d, v);
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) out[(r * EXTENT + s) * position_stride] = v[s];
    }
  }
}
