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
// With SPLIT, factors are float numbers that are multiplied as two float16 ones each (split.cuh): a
// line has planes of high halves and, behind them, of low ones, and so have the weights of a step.
//
// One warpgroup multiplies and pools, row after row down a strip of the image; two warps bring the
// lines of the image that the next turn needs into a ring.
#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "few_channels.cuh"
#include "mma.cuh"
#include "pair.cuh"
#include "reduce.cuh"
#include "split.cuh"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

#ifdef SPLIT
using Factor = __half;
constexpr int HALVES = 2;  // of a factor
#else
using Factor = STORAGE;
constexpr int HALVES = 1;
#endif
constexpr int SIZE = sizeof(Factor);
constexpr int COLUMNS = TILE_M / 2;  // of a row of the convolution
constexpr int PIXEL = 4;             // channels
constexpr int MAX_WINDOW = 8;        // columns
constexpr int MULTIPLIERS = 128, FEEDERS = 64, THREADS = MULTIPLIERS + FEEDERS;
constexpr int PAIRS = COLUMNS - 1 + MAX_WINDOW / STRIDE;  // of pixels, in a line: chunks of a plane
constexpr int PLANE_BYTES = PAIRS * 16, HALF_BYTES = 2 * PLANE_BYTES;
constexpr int LINE_BYTES = HALVES * HALF_BYTES;
constexpr int CHUNK_PIXELS = SIZE == 2 ? 2 : 1;
constexpr int MATRIX_BYTES = 64 * 32, STEP_BYTES = HALVES * MATRIX_BYTES;  // of a step's weights
constexpr int AHEAD = 4;             // pairs of pixels that a feeder has on their way at once

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K * SIZE == 32, "a step is one wgmma");
static_assert(COLUMNS % 8 == 0, "columns come in core matrices of eight");

static_assert(POOL, "sums are pooled, never stored");

using Sums = float[COLUMNS / 2];  // of a thread, see wgmma.cuh

// Matrices without permutation: from eight rows to the next eight, and from 16 bytes of K to the
// next (PTX ISA, "Strides"; "Canonical layouts", K-major without swizzling).
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned next_rows,
                                                         unsigned next_chunk) {
  return (unsigned long long)(next_rows / 16) << 32 | (next_chunk & 0x3FFFF) >> 4 << 16 |
         (address & 0x3FFFF) >> 4;
}

// Two adjacent pixels with their channels.
template <typename T>
struct alignas(16) PixelPair {
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

__device__ __forceinline__ void store_chunk(unsigned address, const uint4& chunk) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(chunk.x),
               "r"(chunk.y), "r"(chunk.z), "r"(chunk.w)
               : "memory");
}

// Writes the chunks of a pair of pixels at `at` of each of a line's planes: of 16-bit values both
// pixels, and the first beside zeros.
__device__ __forceinline__ void store_both(unsigned at, const uint4& both) {
  store_chunk(at, both);
  store_chunk(at + PLANE_BYTES, make_uint4(both.x, both.y, 0, 0));
}

template <typename T>
__device__ __forceinline__ void store_pair(unsigned at, const PixelPair<T>& pair) {
  if constexpr (HALVES == 2) {
    SplitPair of[2 * PIXEL / 2];
#pragma unroll
    for (int i = 0; i < 2 * PIXEL / 2; ++i) {
      of[i] = split(pair.at[i / 2][i % 2 * 2], pair.at[i / 2][i % 2 * 2 + 1]);
    }
    store_both(at, make_uint4(of[0].high, of[1].high, of[2].high, of[3].high));
    store_both(at + HALF_BYTES, make_uint4(of[0].low, of[1].low, of[2].low, of[3].low));
  } else if constexpr (sizeof(T) == 2) {
    store_both(at, *reinterpret_cast<const uint4*>(&pair));
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned bits[PIXEL];  // the unit would cut off what is rounded here
#pragma unroll
      for (int c = 0; c < PIXEL; ++c) {
        bits[c] = round_operand<T>(__float_as_uint(pair.at[i][c]));
      }
      store_chunk(at + i * PLANE_BYTES, make_uint4(bits[0], bits[1], bits[2], bits[3]));
    }
  }
}

// Where chunk `chunk` of a window's row lies in a line, for the first column. What is beyond the
// window lies at `zeros`.
__device__ __forceinline__ unsigned chunk_address(const ConvShape& p, unsigned line, int chunk,
                                                  unsigned zeros) {
  if (chunk * CHUNK_PIXELS >= p.kw) return zeros;
  if (SIZE == 2) {
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

// `steps`: of K, in a row of a window. `ring`: lines of the image in shared memory.
// `weight`: [channel tiles][kh][steps][halves] of two core columns of 64 channels by 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_maxpool2d_few_channels_wgmma(const STORAGE* __restrict__ x,
                                    const STORAGE* __restrict__ weight,
                                    const float* __restrict__ bias, STORAGE* __restrict__ out,
                                    const ConvShape p, const Task task, const int steps,
                                    const int ring) {
  extern __shared__ __align__(128) unsigned char shared[];
  // Barriers: of each parity of turns, `full` when its lines are there, `empty` when all warps have
  // read what only turns so far needed.
  const unsigned barriers = shared_address(shared);
  const unsigned weights = barriers + 128;
  const unsigned lines = weights + p.kh * steps * STEP_BYTES;
  const unsigned zeros = lines + ring * LINE_BYTES;  // COLUMNS chunks
  const auto full = [&](int turn) { return barriers + turn % 2 * 16; };
  const auto empty = [&](int turn) { return barriers + turn % 2 * 16 + 8; };

  constexpr int ADVANCE = COLUMNS - 2;  // columns of the convolution from a tile to the next
  const int column_tiles = max((2 * task.columns - 2 + ADVANCE - 1) / ADVANCE, 1);
  const Share share = share_of(p, task, column_tiles);
  const int column0 = share.tile * ADVANCE, turns = share.end - share.begin;
  const int window_lines = patch_rows_of(p);  // of a turn

  let_next_launch_begin();
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; ++turn) {
      barrier_init(full(turn), FEEDERS);
      barrier_init(empty(turn), MULTIPLIERS / 32);
    }
    barrier_init_done();
  }
  const int weight_chunks = p.kh * steps * (STEP_BYTES / 16);
  const uint4* const packed =
      reinterpret_cast<const uint4*>(weight) + (size_t)(share.channel0 / TILE_N) * weight_chunks;
  for (int i = threadIdx.x; i < weight_chunks; i += THREADS) {
    copy_async<16>(weights + i * 16, packed + i, true);
  }
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(zeros + i * 16), "r"(0)
                 : "memory");
  }
  copy_async_commit();
  copy_async_wait<0>();
  async_fence();  // the unit reads them
  __syncthreads();

  if (threadIdx.x >= MULTIPLIERS) {
    wait_for_launch_before();
    const STORAGE* const image = x + (size_t)share.image * p.c * p.h * p.w;
    const int left = column0 * STRIDE - p.pw, top0 = share.begin * ROWS * STRIDE - p.ph;
    int slot0 = 0;  // where the first of a turn's new lines goes
    for (int turn = 0; turn < turns; ++turn) {
      const int known = turn == 0 ? 0 : p.kh - STRIDE;  // lines of the turn that are there
      const int top = top0 + turn * ROWS * STRIDE + known, count = window_lines - known;
      // New lines go where those of two turns ago lay.
      if (turn > 1) barrier_wait(empty(turn), (turn / 2 - 1) & 1);
      int line = 0, index = threadIdx.x - MULTIPLIERS;
      while (line < count) {
        PixelPair<STORAGE> pairs[AHEAD];
        unsigned targets[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          for (; index >= PAIRS; index -= PAIRS) ++line;
          int slot = slot0 + line;
          if (slot >= ring) slot -= ring;
          targets[i] = line < count ? lines + slot * LINE_BYTES + index * 16 : 0;
          // Past the last line there is nothing to read.
          pairs[i] = pixels_at(image, p, line < count ? top + line : -1, left + 2 * index);
          index += FEEDERS;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (targets[i]) store_pair(targets[i], pairs[i]);
        }
        for (; index >= PAIRS; index -= PAIRS) ++line;
      }
      slot0 += count;
      if (slot0 >= ring) slot0 -= ring;
      async_fence();  // the unit reads them
      barrier_arrive(full(turn));
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_channel = share.channel0 + warp * 16, channel = warp_channel + lane / 4;
  const float biases[2] = {bias && channel < p.o ? bias[channel] : 0.0f,
                           bias && channel + 8 < p.o ? bias[channel + 8] : 0.0f};
  STORAGE* const result = out + (size_t)share.image * task.rows * task.columns * p.o;
  Pooled best;  // of the row of windows that the next turn ends
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) best[j][0] = best[j][1] = minus_infinity();
  int slot0 = 0;  // of the turn's first line
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int at = share.begin + turn;  // in the image
    barrier_wait(full(turn), turn / 2 & 1);
    Pooled below;
#pragma unroll 1
    for (int half = at < share.strip ? 1 : 0; half < ROWS; ++half) {
      Sums sums = {};
#ifdef SPLIT
      Sums cross = {};
#endif
      unsigned left = weights;
      int slot = slot0 + half * STRIDE;
      for (int r = 0; r < p.kh; ++r, ++slot) {
        if (slot >= ring) slot -= ring;
        const unsigned line = lines + slot * LINE_BYTES;
        wgmma_fence();
        for (int step = 0; step < steps; ++step, left += STEP_BYTES) {
          const unsigned first = chunk_address(p, line, 2 * step, zeros);
          const unsigned second = chunk_address(p, line, 2 * step + 1, zeros);
          const unsigned long long high = descriptor(left, 128, MATRIX_BYTES / 2);
          const unsigned long long right = descriptor(first, 128, second - first);
          wgmma<Factor, COLUMNS>(sums, high, right);
#ifdef SPLIT
          const unsigned low_second = second == zeros ? zeros : second + HALF_BYTES;
          const unsigned low_first = first + HALF_BYTES;
          wgmma<Factor, COLUMNS>(cross, high, descriptor(low_first, 128, low_second - low_first));
          wgmma<Factor, COLUMNS>(cross, high + MATRIX_BYTES / 16, right);
#endif
        }
        wgmma_commit();
      }
      wgmma_wait<0>();
#ifdef SPLIT
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = fmaf(cross[i], 1 / LOW_SCALE, sums[i]);
#endif
      if (half == 1 && lane == 0) barrier_arrive(empty(turn));
      if (half == 0) {
        pool_across(sums, biases, column0, p.ow, below);
        take(best, below);
      } else {
        pool_across(sums, biases, column0, at * ROWS + 1 < p.oh ? p.ow : 0, below);
      }
    }
    if (at >= share.strip) {
      take(best, below);
      if (at == share.strip) wait_for_launch_before();
      write_row(best, p, column0 / 2, task.columns, warp_channel,
                result + (size_t)at * task.columns * p.o);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      best[j][0] = below[j][0], best[j][1] = below[j][1];
    }
    // On to the lines of the next turn.
    slot0 += ROWS * STRIDE;
    if (slot0 >= ring) slot0 -= ring;
  }
}
