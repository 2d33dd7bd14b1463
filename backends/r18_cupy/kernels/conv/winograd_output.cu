// Winograd, third phase: the output transform and the epilogue.
//   out = epilogue(Aᵀ product A)
//
// 1. A thread loads the products of one tile of one channel.
// 2. It transforms columns, then rows, in registers.
// 3. It applies bias, residual and ReLU and writes rows of the tile, as vectors whose width
//    divides OW.
//
// Constraints: those of winograd_input.cu.
#include "common/dependent_launch.cuh"
#include "conv/winograd.cuh"

constexpr int EXTENT = OUTPUT_TILE + 2;  // extent of a transformed tile
constexpr int LANES = 32, CHANNELS = 4;  // CTA: neighbouring tiles in neighbouring lanes

// Neighbouring pixels, accessed as one vector.
template <int COUNT>
struct alignas(COUNT * sizeof(float)) Pixels {
  float at[COUNT];
};

// Applies the epilogue to a row of an output tile and writes the pixels that are inside the image,
// as vectors of WIDTH. OW is a multiple of WIDTH, so each vector is aligned, and no vector crosses
// the image's edge.
template <int WIDTH>
__device__ __forceinline__ void write_row(const ConvShape& p, const float (&row)[OUTPUT_TILE],
                                          int o, size_t start, int left, const float* bias,
                                          const float* residual, float* out) {
#pragma unroll
  for (int j = 0; j < OUTPUT_TILE; j += WIDTH) {
    if (left + j >= p.ow) break;
    Pixels<WIDTH> pixels = {};
    if (residual) pixels = *reinterpret_cast<const Pixels<WIDTH>*>(residual + start + j);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float* addend = residual ? pixels.at : nullptr;
      pixels.at[i] = epilogue<float>(p, row[j + i], o, i, bias, addend);
    }
    *reinterpret_cast<Pixels<WIDTH>*>(out + start + j) = pixels;
  }
}

// Eight CTAs leave a thread 64 registers; without the second bound NVRTC spills on sm_100.
extern "C" __global__ void __launch_bounds__(LANES * CHANNELS, 8)
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
      float row[OUTPUT_TILE];
      Winograd<OUTPUT_TILE>::output(m, row);
      const size_t start = (size_t)((n * p.o + o) * p.oh + top + i) * p.ow + left;
      if (p.ow % OUTPUT_TILE == 0) {
        write_row<OUTPUT_TILE>(p, row, o, start, left, bias, residual, out);
      } else if (OUTPUT_TILE > 2 && p.ow % 2 == 0) {
        write_row<2>(p, row, o, start, left, bias, residual, out);
      } else {
        write_row<1>(p, row, o, start, left, bias, residual, out);
      }
    }
  }
}
