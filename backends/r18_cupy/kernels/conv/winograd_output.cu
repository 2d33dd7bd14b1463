// Winograd, third phase: the output transform and the epilogue.
//   out = epilogue(Aᵀ product A)
//
// 1. A thread loads the products of one tile of one channel.
// 2. It transforms columns, then rows, in registers.
// 3. It applies bias, residual and ReLU and writes rows of the tile, as vectors where OW is a
//    multiple of OUTPUT_TILE.
//
// Constraints: those of winograd_input.cu.
#include "common/dependent_launch.cuh"
#include "conv/winograd.cuh"

constexpr int EXTENT = OUTPUT_TILE + 2;  // extent of a transformed tile
constexpr int LANES = 32, CHANNELS = 4;  // CTA: neighbouring tiles in neighbouring lanes

// A row of an output tile, accessed as one vector.
struct alignas(OUTPUT_TILE * sizeof(float)) Row {
  float pixel[OUTPUT_TILE];
};

extern "C" __global__ void __launch_bounds__(LANES * CHANNELS)
winograd_output(const float* __restrict__ product, const float* __restrict__ bias,
                const float* residual, float* out, const ConvShape p, const WinogradSpan span) {
  wait_for_previous_launch();
  const int k = blockIdx.x * LANES + threadIdx.x;
  if (k >= span.count) return;
  const unsigned tile = span.first + k;
  const int left = tile % span.columns * OUTPUT_TILE;
  const int top = tile / span.columns % span.rows * OUTPUT_TILE;
  const int n = tile / span.columns / span.rows;
  const size_t position_stride = (size_t)span.o_padded * span.width;
  // Every tile is then complete in width, and its rows are aligned.
  const bool whole_rows = p.ow % OUTPUT_TILE == 0;

  for (int o = blockIdx.y * CHANNELS + threadIdx.y; o < p.o; o += gridDim.y * CHANNELS) {
    const float* in = product + (size_t)o * span.width + k;
    float half[EXTENT][OUTPUT_TILE];  // Aᵀ m, transposed
#pragma unroll
    for (int s = 0; s < EXTENT; ++s) {
      float m[EXTENT];
#pragma unroll
      for (int r = 0; r < EXTENT; ++r) m[r] = in[(r * EXTENT + s) * position_stride];
      Winograd<OUTPUT_TILE>::output(m, half[s]);
    }
#pragma unroll
    for (int i = 0; i < OUTPUT_TILE; ++i) {
      if (top + i >= p.oh) break;
      float m[EXTENT];
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) m[s] = half[s][i];
      Row row;
      Winograd<OUTPUT_TILE>::output(m, row.pixel);
      const size_t start = (size_t)((n * p.o + o) * p.oh + top + i) * p.ow + left;
      if (whole_rows) {
        Row addend = {};
        if (residual) addend = *reinterpret_cast<const Row*>(residual + start);
#pragma unroll
        for (int j = 0; j < OUTPUT_TILE; ++j) {
          const float* add = residual ? addend.pixel : nullptr;
          row.pixel[j] = epilogue<float>(p, row.pixel[j], o, j, bias, add);
        }
        *reinterpret_cast<Row*>(out + start) = row;
      } else {
#pragma unroll
        for (int j = 0; j < OUTPUT_TILE; ++j) {
          if (left + j < p.ow) {
            out[start + j] = epilogue<float>(p, row.pixel[j], o, start + j, bias, residual);
          }
        }
      }
    }
  }
}
