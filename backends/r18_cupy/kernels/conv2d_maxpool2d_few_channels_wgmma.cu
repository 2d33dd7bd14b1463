// Convolution of images of few channels with the max-pooling of what it makes, on Hopper's tensor
// cores. Strides of 2. Reads NCHW, as images come, and writes NHWC.
//
// Rows of A are 64 channels, rows of B the columns of a row of the convolution, K the places of a
// window. In shared memory a pixel has all its channels side by side, padded to PIXEL of them, and
// 16 bytes of K, a chunk, are two pixels of 16-bit values or one of float. Windows of adjacent
// columns begin two pixels apart. So the chunks that eight columns have at the same place of their
// windows lie side by side, 128 bytes, and are a core matrix of B as it is without permutation:
// nothing is gathered, matrices of neighbouring places overlap. For float, whose chunks are one
// pixel, even and odd pixels of a line lie apart, each in a plane.
//
// A window of odd width ends in half a chunk of 16-bit values. The pixel in its other half is none
// of the window's, and may be infinite, of which a zero weight would not rid the sum. So the last
// chunk is read from a second plane, in which every odd pixel is zero.
//
// One warpgroup multiplies and pools, row after row down a strip of the image; two warps bring the
// lines of the image that the next turn needs into a ring.
#include "async_copy.cuh"
#include "conv.cuh"
#include "dependent_launch.cuh"
#include "mma.cuh"
#include "pair.cuh"
#include "reduce.cuh"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

constexpr int SIZE = sizeof(STORAGE);
constexpr int COLUMNS = TILE_M / 2;  // of a row of the convolution
constexpr int PIXEL = 4;             // channels
constexpr int STRIDE = 2;
constexpr int MAX_WINDOW = 8;        // columns
constexpr int MULTIPLIERS = 128, FEEDERS = 64, THREADS = MULTIPLIERS + FEEDERS;
constexpr int PAIRS = COLUMNS - 1 + MAX_WINDOW / STRIDE;  // of pixels, in a line: chunks of a plane
constexpr int PLANE_BYTES = PAIRS * 16, LINE_BYTES = 2 * PLANE_BYTES;
constexpr int CHUNK_PIXELS = SIZE == 2 ? 2 : 1;
constexpr int STEP_BYTES = 64 * 32;  // of weights: 64 channels by a step of K
constexpr int AHEAD = 4;             // pairs of pixels that a feeder has on their way at once

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K * SIZE == 32, "a step is one wgmma");
static_assert(COLUMNS % 8 == 0, "columns come in core matrices of eight");

using Sums = float[COLUMNS / 2];  // of a thread, see wgmma.cuh

// What there is to do, and how it is divided; the host's side is `TASK` in
// conv_few_channels_wgmma.py.
struct Task {
  int rows, columns;  // of the result
  int strip;          // rows of the result that a block computes
  int steps;          // of K, in a line of a window
  int ring;           // lines of the image in shared memory
};

// Matrices without permutation: from eight rows to the next eight, and from 16 bytes of K to the
// next (PTX ISA, "Strides"; "Canonical layouts", K-major without swizzling).
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned next_rows,
                                                         unsigned next_chunk) {
  return (unsigned long long)(next_rows / 16) << 32 | (next_chunk & 0x3FFFF) >> 4 << 16 |
         (address & 0x3FFFF) >> 4;
}

// Two adjacent pixels with their channels.
template <typename T>
struct PixelPair {
  T at[2][PIXEL];
};

// Reads two pixels of row y of the image, from column x on; zeros outside, and for channels that
// there are not.
template <typename T>
__device__ __forceinline__ PixelPair<T> pixels_at(const T* __restrict__ image, const ConvShape& p,
                                                  int y, int x) {
  PixelPair<T> pair;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Unsigned comparisons: below zero is beyond the end.
    const bool inside = (unsigned)y < (unsigned)p.h && (unsigned)(x + i) < (unsigned)p.w;
#pragma unroll
    for (int c = 0; c < PIXEL; ++c) {
      pair.at[i][c] = inside && c < p.c ? image[(unsigned)((c * p.h + y) * p.w + x + i)]
                                        : from_float<T>(0.0f);
    }
  }
  return pair;
}

template <typename T>
__device__ __forceinline__ void store_chunk(unsigned address, const T (&values)[16 / sizeof(T)]) {
  const uint4 chunk = *reinterpret_cast<const uint4*>(values);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(chunk.x),
               "r"(chunk.y), "r"(chunk.z), "r"(chunk.w)
               : "memory");
}

// Writes pair `index` of a line that begins at `line`.
template <typename T>
__device__ __forceinline__ void store_pair(unsigned line, int index, const PixelPair<T>& pair) {
  const unsigned at = line + index * 16;
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) {
    alignas(16) T chunk[16 / sizeof(T)];
#pragma unroll
    for (int c = 0; c < PIXEL; ++c) {
      if constexpr (sizeof(T) == 2) {
        chunk[c] = pair.at[0][c];
        chunk[PIXEL + c] = plane == 0 ? pair.at[1][c] : from_float<T>(0.0f);
      } else {
        // The unit would cut off what is rounded here.
        const unsigned bits = __float_as_uint(pair.at[plane][c]);
        chunk[c] = __uint_as_float(round_operand<T>(bits));
      }
    }
    store_chunk<T>(at + plane * PLANE_BYTES, chunk);
  }
}

// Where chunk `chunk` of a window's row lies in a line, for the first column. What is beyond the
// window lies at `zeros`.
__device__ __forceinline__ unsigned chunk_address(const ConvShape& p, unsigned line, int chunk,
                                                  unsigned zeros) {
  if (chunk * CHUNK_PIXELS >= p.kw) return zeros;
  if constexpr (SIZE == 2) {
    return line + chunk * 16 + (2 * chunk + 1 == p.kw ? PLANE_BYTES : 0);
  } else {
    return line + chunk / 2 * 16 + chunk % 2 * PLANE_BYTES;
  }
}

// Of a row of pooling windows, the largest so far, of the lane's two channels: columns 4·j + i % 4
// of lane i.
using Pooled = float[COLUMNS / 8][2];

// The sums of a row with their bias, pooled across: of each window the lane's two columns and the
// one before them. Columns that the convolution does not have never win.
__device__ __forceinline__ void pool_across(const Sums& sums, const float (&bias)[2], int column0,
                                            int columns, Pooled& row) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  float last[2] = {minus_infinity(), minus_infinity()};  // the odd column of eight before
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const int column = column0 + 8 * j + 2 * quarter;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = sums[4 * j + 2 * half] + bias[half];
      const float second = sums[4 * j + 2 * half + 1] + bias[half];
      const float even = column < columns ? first : minus_infinity();
      const float odd = column + 1 < columns ? second : minus_infinity();
      // To the lane that has the next two columns; from the last of four to the first, which has
      // columns of the next eight.
      const float given = quarter == 3 ? last[half] : odd;
      const float before = __shfl_sync(0xffffffffu, given, lane - quarter + (quarter + 3) % 4);
      last[half] = odd;
      row[j][half] = larger(larger(even, odd), before);
    }
  }
}

__device__ __forceinline__ void take(Pooled& best, const Pooled& row) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    best[j][0] = larger(best[j][0], row[j][0]);
    best[j][1] = larger(best[j][1], row[j][1]);
  }
}

// Two 16-bit values by their bits.
__device__ __forceinline__ unsigned bits_of(__half2 pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned bits_of(__nv_bfloat162 pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Writes columns `first` to `end` of a row of the result that begins at `at`, but for the first of
// a tile that has one to the left; `channel0` is the warp's first channel. Rounding and ReLU keep
// order: they may come after pooling.
template <typename T>
__device__ __forceinline__ void write_row(const Pooled& best, const ConvShape& p, int first,
                                          int end, int channel0, T* at) {
  const int lane = threadIdx.x % 32, group = lane / 4;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    float low = best[j][0], high = best[j][1];
    if (p.relu) low = larger(low, 0.0f), high = larger(high, 0.0f);
    const int column = first + 4 * j + lane % 4;
    // The first window of a tile lacks a column that the tile to the left has.
    const bool wanted = column < end && (j > 0 || first == 0 || lane % 4 > 0);
    T* const pixel = at + (unsigned)(column * p.o);
    if constexpr (sizeof(T) == 2) {
      // Channels i and i + 8 become two adjacent ones, with the lane that has the others.
      const unsigned own = bits_of(pair_of<T>(low, high));
      const unsigned other = __shfl_xor_sync(0xffffffffu, own, 4);
      const unsigned both =
          group % 2 ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
      const int channel = channel0 + (group % 2 ? 7 + group : group);
      if (wanted && channel < p.o) *reinterpret_cast<unsigned*>(pixel + channel) = both;
    } else {
      const int channel = channel0 + group;
      if (wanted && channel < p.o) pixel[channel] = low;
      if (wanted && channel + 8 < p.o) pixel[channel + 8] = high;
    }
  }
}

// Grid: x, tiles of channels, innermost; of columns; strips of rows; images.
// `weight`: [channel tiles][kh][steps] of two core columns of 64 channels by 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_maxpool2d_few_channels_wgmma(const STORAGE* __restrict__ x,
                                    const STORAGE* __restrict__ weight,
                                    const float* __restrict__ bias, STORAGE* __restrict__ out,
                                    const ConvShape p, const Task task) {
  extern __shared__ __align__(128) unsigned char shared[];
  // Barriers: of each parity of turns, `full` when its lines are there, `empty` when all warps have
  // read what only turns so far needed.
  const unsigned barriers = shared_address(shared);
  const unsigned weights = barriers + 128;
  const unsigned lines = weights + p.kh * task.steps * STEP_BYTES;
  const unsigned zeros = lines + task.ring * LINE_BYTES;  // COLUMNS chunks
  const auto full = [&](int turn) { return barriers + turn % 2 * 16; };
  const auto empty = [&](int turn) { return barriers + turn % 2 * 16 + 8; };

  const int channel_tiles = (p.o + TILE_N - 1) / TILE_N;
  const int advance = COLUMNS - 2;  // columns from a tile to the next, of the convolution
  const int column_tiles = max((2 * task.columns - 2 + advance - 1) / advance, 1);
  const int strips = (task.rows + task.strip - 1) / task.strip;
  unsigned block = blockIdx.x;
  const int channel0 = block % channel_tiles * TILE_N;
  block /= channel_tiles;
  const int column0 = block % column_tiles * advance;
  block /= column_tiles;
  const int strip = block % strips * task.strip;
  const unsigned n = block / strips;
  // Pooled row t has rows 2t − 1 to 2t + 1: the last two are computed in turn t, the first in the
  // turn before, for which a strip begins one earlier.
  const int begin = max(strip - 1, 0), end = min(strip + task.strip, task.rows);
  const int window_lines = STRIDE + p.kh;  // of a turn

  let_next_launch_begin();
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; ++turn) {
      barrier_init(full(turn), FEEDERS);
      barrier_init(empty(turn), MULTIPLIERS / 32);
    }
    barrier_init_done();
  }
  const int weight_chunks = p.kh * task.steps * (STEP_BYTES / 16);
  const uint4* const packed =
      reinterpret_cast<const uint4*>(weight) + (size_t)(channel0 / TILE_N) * weight_chunks;
  for (int i = threadIdx.x; i < weight_chunks; i += THREADS) {
    copy_async<16>(weights + i * 16, packed + i, true);
  }
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(zeros + i * 16), "r"(0)
                 : "memory");
  }
  copy_async_commit();
  copy_async_wait<0>();
  store_fence();  // the unit reads them
  __syncthreads();

  if (threadIdx.x >= MULTIPLIERS) {
    wait_for_launch_before();
    const STORAGE* const image = x + (size_t)n * p.c * p.h * p.w;
    const int left = column0 * STRIDE - p.pw, top0 = begin * 2 * STRIDE - p.ph;
    int slot0 = 0;  // where the first of a turn's new lines goes
    for (int turn = 0; turn < end - begin; ++turn) {
      const int known = turn == 0 ? 0 : p.kh - STRIDE;  // lines of the turn that are there
      const int top = top0 + turn * 2 * STRIDE + known, count = window_lines - known;
      // New lines go where those of two turns ago lay.
      if (turn > 1) barrier_wait(empty(turn), (turn / 2 - 1) & 1);
      int line = 0, index = threadIdx.x - MULTIPLIERS;
      while (line < count) {
        PixelPair<STORAGE> pairs[AHEAD];
        unsigned targets[AHEAD];
        int indices[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          for (; index >= PAIRS; index -= PAIRS) ++line;
          int slot = slot0 + line;
          if (slot >= task.ring) slot -= task.ring;
          targets[i] = line < count ? lines + slot * LINE_BYTES : 0;
          indices[i] = index;
          // Past the last line there is nothing to read.
          pairs[i] = pixels_at(image, p, line < count ? top + line : -1, left + 2 * index);
          index += FEEDERS;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (targets[i]) store_pair(targets[i], indices[i], pairs[i]);
        }
        for (; index >= PAIRS; index -= PAIRS) ++line;
      }
      slot0 += count;
      if (slot0 >= task.ring) slot0 -= task.ring;
      store_fence();  // the unit reads them
      barrier_arrive(full(turn));
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = channel0 + warp * 16 + lane / 4;
  const float biases[2] = {bias && channel < p.o ? bias[channel] : 0.0f,
                           bias && channel + 8 < p.o ? bias[channel + 8] : 0.0f};
  STORAGE* const result = out + (size_t)n * task.rows * task.columns * p.o;
  Pooled best;  // of the row of windows that the next turn ends
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) best[j][0] = best[j][1] = minus_infinity();
  int slot0 = 0;  // of the turn's first line
#pragma unroll 1
  for (int turn = 0; turn < end - begin; ++turn) {
    const int row = (begin + turn) * 2;  // of the convolution
    barrier_wait(full(turn), turn / 2 & 1);
    Pooled below;
#pragma unroll 1
    for (int half = begin + turn < strip ? 1 : 0; half < 2; ++half) {
      Sums sums = {};
      unsigned left = weights;
      int slot = slot0 + half * STRIDE;
      wgmma_fence();
      for (int r = 0; r < p.kh; ++r, ++slot) {
        if (slot >= task.ring) slot -= task.ring;
        const unsigned line = lines + slot * LINE_BYTES;
        for (int step = 0; step < task.steps; ++step, left += STEP_BYTES) {
          const unsigned first = chunk_address(p, line, 2 * step, zeros);
          const unsigned second = chunk_address(p, line, 2 * step + 1, zeros);
          wgmma<STORAGE, COLUMNS>(sums, descriptor(left, 128, STEP_BYTES / 2),
                                  descriptor(first, 128, second - first));
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (half == 1 && lane == 0) barrier_arrive(empty(turn));
      if (half == 0) {
        pool_across(sums, biases, column0, p.ow, below);
        take(best, below);
      } else {
        pool_across(sums, biases, column0, row + 1 < p.oh ? p.ow : 0, below);
      }
    }
    if (begin + turn >= strip) {
      take(best, below);
      if (begin + turn == strip) wait_for_launch_before();
      write_row(best, p, column0 / 2, task.columns, channel0 + warp * 16,
                result + (size_t)(begin + turn) * task.columns * p.o);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      best[j][0] = below[j][0], best[j][1] = below[j][1];
    }
    // On to the lines of the next turn.
    slot0 += 2 * STRIDE;
    if (slot0 >= task.ring) slot0 -= task.ring;
  }
}
