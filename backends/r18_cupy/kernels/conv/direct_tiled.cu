// Direct convolution through shared memory. NCHW. A CTA computes TILE_H × TILE_W pixels of TILE_O
// channels, for a few input channels at a time:
// 1. Load the weights of these channels and the input tile with its halo to shared memory as
//    float32.
// 2. Each thread accumulates kPixels × kChannels outputs in registers.
// 3. After the last channels: epilogue and store.
//
// Constraints: weights and halo of at least one window row of one channel fit in 48 KB of shared
// memory; the host's `choose_staging` decides how many.
#include "common/epilogue.cuh"

constexpr int kPixels = 4, kChannels = 8;  // per thread: rows kRowStep apart, adjacent channels
constexpr int kRowStep = TILE_H / kPixels;
constexpr int kGroups = TILE_O / kChannels;
constexpr int kThreads = kRowStep * TILE_W * kGroups;

static_assert(TILE_H % kPixels == 0, "threads must fill the tile's rows");
static_assert(TILE_O % kChannels == 0 && kChannels % 4 == 0, "weights are read four at a time");

// `channels` input channels and `window_rows` rows of the window are in shared memory at a time:
// either all rows, or one channel. NOTE: without the second launch bound, ptxas takes 72 registers
// on sm_100 and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
conv2d_direct_tiled(const STORAGE* __restrict__ x, const STORAGE* __restrict__ weight,
                    const float* __restrict__ bias, const STORAGE* residual, STORAGE* out,
                    const ConvShape p, int channels, int window_rows) {
  extern __shared__ float4 shared[];  // float4 aligns the weights, which come first
  float* const weights = (float*)shared;
  float* const halo = weights + channels * window_rows * p.kw * TILE_O;
  const int halo_w = (TILE_W - 1) * p.sw + p.kw;
  const int halo_h = (TILE_H - 1) * p.sh + window_rows;

  // blockIdx.x: column tiles, row tiles, channel tiles, images.
  const int tiles_w = (p.ow + TILE_W - 1) / TILE_W, tiles_h = (p.oh + TILE_H - 1) / TILE_H;
  const int tiles_o = (p.o + TILE_O - 1) / TILE_O;
  unsigned tile = blockIdx.x;
  const int first_j = tile % tiles_w * TILE_W;
  tile /= tiles_w;
  const int first_i = tile % tiles_h * TILE_H;
  tile /= tiles_h;
  const int tile_o = tile % tiles_o;
  const int n = tile / tiles_o;

  const int tx = threadIdx.x % TILE_W, ty = threadIdx.x / TILE_W % kRowStep;
  const int group = threadIdx.x / (TILE_W * kRowStep);
  float sum[kPixels][kChannels] = {};

  for (int c0 = 0; c0 < p.c; c0 += channels) {
    const int here = min(channels, p.c - c0);
    for (int r0 = 0; r0 < p.kh; r0 += window_rows) {
      const int rows = min(window_rows, p.kh - r0);
      __syncthreads();  // the previous tiles have been read
      // Weights are packed as [tile of O][c][r][s][TILE_O], so a step's weights are contiguous.
      const STORAGE* from =
          weight + (((size_t)tile_o * p.c + c0) * p.kh + r0) * p.kw * TILE_O;
      for (int t = threadIdx.x; t < here * rows * p.kw * TILE_O; t += kThreads) {
        weights[t] = to_float(from[t]);
      }
      const int top = first_i * p.sh - p.ph + r0, left = first_j * p.sw - p.pw;
      for (int t = threadIdx.x; t < here * halo_h * halo_w; t += kThreads) {
        const int row = t / halo_w;
        const int c = row / halo_h, y = top + row % halo_h, z = left + t % halo_w;
        const bool inside = 0 <= y && y < p.h && 0 <= z && z < p.w;
        // NOTE: pixels outside of the image count as zero and are not skipped: an infinite weight
        // times zero is NaN.
        halo[t] = inside ? to_float(x[((n * p.c + c0 + c) * p.h + y) * p.w + z]) : 0.0f;
      }
      __syncthreads();

      for (int c = 0; c < here; ++c) {
        for (int r = 0; r < rows; ++r) {
          const float* pixels = halo + (c * halo_h + ty * p.sh + r) * halo_w + tx * p.sw;
          const float* window = weights + (c * rows + r) * p.kw * TILE_O + group * kChannels;
          for (int s = 0; s < p.kw; ++s) {
            float right[kChannels];
#pragma unroll
            for (int q = 0; q < kChannels; q += 4) {
              *(float4*)(right + q) = *(const float4*)(window + s * TILE_O + q);
            }
#pragma unroll
            for (int i = 0; i < kPixels; ++i) {
              const float pixel = pixels[i * kRowStep * p.sh * halo_w + s];
#pragma unroll
              for (int q = 0; q < kChannels; ++q) sum[i][q] = fmaf(right[q], pixel, sum[i][q]);
            }
          }
        }
      }
    }
  }

  const int j = first_j + tx;
#pragma unroll
  for (int q = 0; q < kChannels; ++q) {
    const int o = tile_o * TILE_O + group * kChannels + q;
#pragma unroll
    for (int k = 0; k < kPixels; ++k) {
      const int i = first_i + ty + k * kRowStep;
      if (o < p.o && i < p.oh && j < p.ow) {
        const unsigned index = ((n * p.o + o) * p.oh + i) * p.ow + j;
        out[index] = epilogue<STORAGE>(p, sum[k][q], o, index, bias, residual);
      }
    }
  }
}
