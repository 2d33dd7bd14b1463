// Convolution of e4m3 images of few channels on tensor cores: the stem. NHWC.
//
// A CTA computes ROWS rows of COLUMNS outputs, 64 channels of each; a warp a row.
// 1. All threads copy the pixels under the CTA's windows to shared memory, four bytes each:
//    channels that do not exist are zeros. So are pixels outside of the image. They copy the
//    weights too.
// 2. K is a row of the window at a time: eight taps of four channels are the 32 bytes of one
//    `mma.m16n8k32`. Weights and pixels of taps and channels that do not exist are zeros. A word of
//    A is a pixel, so a fragment needs no alignment beyond that.
// 3. Epilogue: multiplier, bias, ReLU; numbers go through shared memory to be stored as vectors.
//
// Constraints: sm_89 or later; at most 4 channels and windows of 8 × 8; O a multiple of 16; no
// residual.
#include "common/dependent_launch.cuh"
#include "common/epilogue.cuh"
#include "float8/e4m3.cuh"

constexpr int ROWS = 4, COLUMNS = 32, CHANNELS = 64;  // outputs of a CTA
constexpr int THREADS = 32 * ROWS;
constexpr int TAPS = 8;                               // of a row of the window, with zeros
constexpr int M = COLUMNS / 16, N = CHANNELS / 8;     // tiles of `mma` that a warp computes
constexpr int ROW_WORDS = CHANNELS * TAPS;            // weights of a row of the window
constexpr int VECTOR = 16;                            // channels of a store

static_assert(CHANNELS % VECTOR == 0 && COLUMNS % 16 == 0, "whole tiles and vectors");

// D = A·B + D of 16 pixels by 8 channels over 32 bytes of K. Lane i holds of A rows i / 4 and 8
// more, bytes 4·(i % 4) of both, then these bytes + 16; of B column i / 4 likewise; of D row i / 4,
// columns 2·(i % 4) and the next, then 8 rows more.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The CTA's part of the output: image, first row, column and channel.
struct Part {
  int n, row0, column0, channel0;
};

// The pixel at (row, column) of image n as a word; 0 outside.
__device__ __forceinline__ unsigned pixel_at(const unsigned char* x, const ConvShape& p, int n,
                                             int row, int column) {
  if (row < 0 || row >= p.h || column < 0 || column >= p.w) return 0;
  const unsigned char* at = x + ((size_t)(n * p.h + row) * p.w + column) * p.c;
  unsigned word = 0;
  for (int c = 0; c < p.c; ++c) word |= (unsigned)at[c] << 8 * c;
  return word;
}

// weight: packed by the host to [channel tile][row of the window][half][64 channels][4 taps] words;
// the halves are taps 0 … 3 and 4 … 7, so that a warp's reads cover all banks.
extern "C" __global__ void __launch_bounds__(THREADS)
sconv2d_few_channels_mma(const unsigned char* __restrict__ x, const unsigned* __restrict__ weight,
                         const float* __restrict__ bias, const float* __restrict__ multiplier,
                         unsigned char* __restrict__ out, const ConvShape p) {
  extern __shared__ unsigned words[];
  const int width = (COLUMNS - 1) * p.sw + TAPS, height = (ROWS - 1) * p.sh + p.kh;
  unsigned* weights = words;
  unsigned* pixels = words + p.kh * ROW_WORDS;

  const unsigned across = (p.ow + COLUMNS - 1) / COLUMNS, down = (p.oh + ROWS - 1) / ROWS;
  const unsigned tile = blockIdx.x;
  const Part part{(int)(tile / across / down), (int)(tile / across % down) * ROWS,
                  (int)(tile % across) * COLUMNS, (int)blockIdx.y * CHANNELS};

  const unsigned* mine = weight + (size_t)blockIdx.y * p.kh * ROW_WORDS;
  for (int i = threadIdx.x; i < p.kh * ROW_WORDS; i += THREADS) weights[i] = mine[i];
  wait_for_previous_launch();
  const int top = part.row0 * p.sh - p.ph, left = part.column0 * p.sw - p.pw;
  for (int i = threadIdx.x; i < height * width; i += THREADS) {
    pixels[i] = pixel_at(x, p, part.n, top + i / width, left + i % width);
  }
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quarter = lane % 4;
  // Pixels beyond the window are taken for zeros: a weight of zero times NaN would be NaN.
  const bool near = quarter < p.kw, far = quarter + 4 < p.kw;
  float sums[M][N][4] = {};
  for (int r = 0; r < p.kh; ++r) {
    const unsigned* line = pixels + (warp * p.sh + r) * width;
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const unsigned* first = line + (16 * m + group) * p.sw + quarter;
      const unsigned* second = first + 8 * p.sw;
      a[m][0] = near ? first[0] : 0, a[m][1] = near ? second[0] : 0;
      a[m][2] = far ? first[4] : 0, a[m][3] = far ? second[4] : 0;
    }
    const unsigned* taps = weights + r * ROW_WORDS + group * 4 + quarter;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const unsigned b0 = taps[n * 32], b1 = taps[n * 32 + ROW_WORDS / 2];
#pragma unroll
      for (int m = 0; m < M; ++m) mma_e4m3(sums[m][n], a[m], b0, b1);
    }
  }
  __syncthreads();  // all warps have read the pixels and weights: outputs take their place

  // Pairs of channels.
  unsigned short* tile_out =
      reinterpret_cast<unsigned short*>(words) + warp * COLUMNS * CHANNELS / 2;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int channel = part.channel0 + 8 * n + 2 * quarter;
    float2 by{}, add{};
    if (channel < p.o) {
      by = *reinterpret_cast<const float2*>(multiplier + channel);
      add = *reinterpret_cast<const float2*>(bias + channel);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = finished(sums[m][n][2 * half], by.x, add.x, 0.0f, 0.0f, p.relu != 0);
        const float second =
            finished(sums[m][n][2 * half + 1], by.y, add.y, 0.0f, 0.0f, p.relu != 0);
        const int pixel = 16 * m + 8 * half + group;
        tile_out[pixel * (CHANNELS / 2) + 4 * n + quarter] = to_e4m3_pair(first, second);
      }
    }
  }
  __syncwarp();

  const int row = part.row0 + warp;
  if (row >= p.oh) return;
  constexpr int VECTORS = CHANNELS / VECTOR;  // of a pixel
  const uint4* vectors = reinterpret_cast<const uint4*>(tile_out);
  for (int i = lane; i < COLUMNS * VECTORS; i += 32) {
    const int column = part.column0 + i / VECTORS, channel = part.channel0 + i % VECTORS * VECTOR;
    if (column < p.ow && channel < p.o) {
      const size_t at = ((size_t)(part.n * p.oh + row) * p.ow + column) * p.o + channel;
      *reinterpret_cast<uint4*>(out + at) = vectors[i];
    }
  }
}
