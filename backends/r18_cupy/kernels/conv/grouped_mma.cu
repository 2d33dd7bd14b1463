// Convolution of narrow groups by 3×3 windows on tensor cores (mma.sync). NHWC, fp16 or bf16.
//
// A warp computes 16 output channels. The groups have WIDTH channels, 4, 8, 16 or 32. Of 16 or 32 a
// product reads one group. Of 8 it takes half the K, and reads one group too. Of 4 it reads two
// groups, and the pixels of one are replaced by zeros: zero weights alone would not do, since an
// infinite pixel of the other group times zero is NaN. So each of the two has accumulators of its
// own, and uses half of them.
//
// 1. The CTA copies 64 channels of the input under TILE × TILE outputs to shared memory.
// 2. Warps load pixels by ldmatrix, tap by tap, and accumulate in float32 registers. Weights stay
//    in registers, packed by the host in the order of fragments: see conv/grouped_mma.py.
// 3. Epilogue: bias, residual, ReLU, one rounding; a lane stores two channels of each pixel.
//
// Swizzle: chunk c (16 bytes) of the pixel in column z of the copy is stored at c ^ z / stride % 8.
// So the eight neighbouring outputs that ldmatrix loads at once touch all 32 banks once.
//
// Constraints: sm_80; as many output as input channels, a multiple of 64; the copy fits in 48 KB of
// shared memory.
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/epilogue.cuh"
#include "mma/mma.cuh"
#include "mma/narrow.cuh"

constexpr int TILE = 8;                    // rows and columns of outputs
constexpr int CHANNELS = 64, WARPS = 4;    // of a CTA
constexpr int kThreads = 32 * WARPS;
constexpr int CHUNKS = CHANNELS / 8;       // 16-byte chunks of a pixel
constexpr int PIXEL_BYTES = CHUNKS * 16;
constexpr int TAPS = 9, WINDOW = 3;
constexpr int STEPS = WIDTH == 32 ? 2 : 1;  // of a tap, over 16 input channels
constexpr int SETS = WIDTH == 4 ? 2 : 1;   // of accumulators
constexpr int MMAS_M = TILE * TILE / 16, MMAS_N = 2;  // of a warp: two rows of outputs; 8 channels

static_assert(WIDTH == 4 || WIDTH == 8 || WIDTH == 16 || WIDTH == 32, "a group in whole products");

// A lane's share of the weights of 8 output channels: over 8 or 16 input channels.
#if WIDTH <= 8
using Weights = unsigned;
#else
using Weights = uint2;
#endif

using Accumulator = float[SETS][MMAS_N][4];

// acc += two rows of outputs' pixels, in 16 channels, times the weights of 16 output channels.
__device__ __forceinline__ void multiply(Accumulator& acc, const unsigned (&left)[4],
                                         const Weights (&right)[MMAS_N]) {
#pragma unroll
  for (int j = 0; j < MMAS_N; ++j) {
#if WIDTH <= 8
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      const bool mine = SETS == 1 || threadIdx.x % 4 / 2 == set;  // this lane's channels
      multiply_add_narrow<STORAGE>(acc[set][j], mine ? left[2 * j] : 0, mine ? left[2 * j + 1] : 0,
                                   right[j]);
    }
#else
    multiply_add<STORAGE>(acc[0][j], left, right[j].x, right[j].y);
#endif
  }
}

// The input under the CTA's outputs.
struct Halo {
  int top, left;  // its corner in the image
  int rows, columns;
  unsigned inverse;  // of the stride, in units of 2^-16

  // The number that the swizzle combines with the chunks of a pixel of this column. Any number is
  // right, if it is the same where a pixel is written and where it is read.
  __device__ __forceinline__ unsigned key(unsigned column) const {
    return (column * inverse >> 16) % CHUNKS;
  }
};

__device__ __forceinline__ void copy(unsigned shared, const STORAGE* image, const ConvShape& p,
                                     const Halo& halo) {
  constexpr int PIXELS = kThreads / CHUNKS;  // that are copied at once
  const unsigned chunk = threadIdx.x % CHUNKS;
  int row = 0, column = threadIdx.x / CHUNKS;
  for (int pixel = column; pixel < halo.rows * halo.columns; pixel += PIXELS, column += PIXELS) {
    for (; column >= halo.columns; column -= halo.columns) ++row;  // cheaper than dividing
    const int y = halo.top + row, z = halo.left + column;
    const bool inside = 0 <= y && y < p.h && 0 <= z && z < p.w;
    const unsigned place = ((unsigned)y * p.w + z) * p.c + chunk * 8;
    cp_async<16>(shared + pixel * PIXEL_BYTES + (chunk ^ halo.key(column)) * 16,
                 inside ? image + place : image, inside);
  }
  cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
conv2d_grouped_mma(const STORAGE* __restrict__ x, const Weights* __restrict__ weight,
                   const float* __restrict__ bias, const STORAGE* residual, STORAGE* out,
                   const ConvShape p, const int dilation_h, const int dilation_w) {
  extern __shared__ uint4 copied[];  // uint4 aligns the chunks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // blockIdx.x: channels, column tiles, row tiles, images.
  const int blocks = p.c / CHANNELS;
  const int tiles_w = (p.ow + TILE - 1) / TILE, tiles_h = (p.oh + TILE - 1) / TILE;
  unsigned tile = blockIdx.x;
  const int block = tile % blocks;
  tile /= blocks;
  const int first_j = tile % tiles_w * TILE;
  tile /= tiles_w;
  const int first_i = tile % tiles_h * TILE;
  const unsigned n = tile / tiles_h;

  Weights right[TAPS][STEPS][MMAS_N];  // weights may be read before the launch before has ended
  const Weights* packed = weight + (block * WARPS + warp) * (TAPS * STEPS * MMAS_N * 32) + lane;
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int j = 0; j < MMAS_N; ++j, packed += 32) right[tap][step][j] = *packed;
    }
  }

  wait_for_previous_launch();
  const Halo halo{first_i * p.sh - p.ph, first_j * p.sw - p.pw,
                  (TILE - 1) * p.sh + (WINDOW - 1) * dilation_h + 1,
                  (TILE - 1) * p.sw + (WINDOW - 1) * dilation_w + 1,
                  (65536u + p.sw - 1) / p.sw};
  const unsigned shared = shared_address(copied);
  copy(shared, x + n * p.h * p.w * p.c + block * CHANNELS, p, halo);
  cp_async_wait<0>();
  __syncthreads();

  // Lane i gives ldmatrix the address of output i % 8 in row i / 8 % 2 of two; lanes from 16 on
  // that of the second eight channels.
  const unsigned output = lane % 8, row = lane / 8 % 2;
  const unsigned first_chunk = warp / STEPS * STEPS * 2 + lane / 16;
  const unsigned two_rows = 2 * p.sh * halo.columns * PIXEL_BYTES;
  Accumulator acc[MMAS_M] = {};
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) {
    const unsigned y = row * p.sh + tap / WINDOW * dilation_h;
    const unsigned z = output * p.sw + tap % WINDOW * dilation_w;
    const unsigned pixel = shared + (y * halo.columns + z) * PIXEL_BYTES, key = halo.key(z);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const unsigned from = pixel + ((first_chunk + 2 * step) ^ key) * 16;
#pragma unroll
      for (int i = 0; i < MMAS_M; ++i) {
        unsigned left[4];
        load_matrices(left, from + i * two_rows);
        multiply(acc[i], left, right[tap][step]);
      }
    }
  }

  const int j = first_j + lane / 4;
#pragma unroll
  for (int i = 0; i < 2 * MMAS_M; ++i) {  // rows of outputs
    if (first_i + i >= p.oh || j >= p.ow) continue;
    const size_t pixel = ((size_t)n * p.oh + first_i + i) * p.ow + j;
#pragma unroll
    for (int eight = 0; eight < MMAS_N; ++eight) {
      // With two sets, that of this lane's outputs.
      const auto& sets = acc[i / 2];
      const bool second = SETS == 2 && lane % 4 / 2;
      const int o = block * CHANNELS + warp * 16 + eight * 8 + lane % 4 * 2;
      const size_t index = pixel * p.o + o;
      struct alignas(2 * sizeof(STORAGE)) { STORAGE at[2]; } pair;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int at = i % 2 * 2 + v;
        const float sum = second ? sets[SETS - 1][eight][at] : sets[0][eight][at];
        pair.at[v] = epilogue<STORAGE>(p, sum, o + v, index + v, bias, residual);
      }
      *(decltype(pair)*)(out + index) = pair;
    }
  }
}
