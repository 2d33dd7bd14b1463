// Convolution of images with few channels on CUDA cores, optionally fused with max-pooling (POOL),
// whose input is then never stored. NCHW, float32.
//
// A line is one row of a window in one channel. A CTA works down a strip (strips.cuh), and every
// turn
// 1. copies the patch of the image under the turn's windows to shared memory by cp.async,
// 2. multiplies: a thread accumulates PIXELS adjacent outputs of CHANNELS channels in registers,
//    and loads each line and each tap's weights once,
// 3. writes ROWS rows of outputs, or their pooled maxima.
//
// The next patch is not prefetched: a turn is long enough that another CTA on the SM hides the
// copy.
//
// Constraints: sm_80; horizontal stride 2; windows of TAPS columns; all weights of the CTA's
// channels, the patch and two rows of maxima in shared memory.
#include "common/cp_async.cuh"
#include "stem/strips.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

constexpr int TAPS = TILE_K;
// Lanes of a warp along a row; its 32 / LANES groups have different channels.
constexpr int LANES = 8;
constexpr int CHANNELS = TILE_CHANNELS, PIXELS = TILE_M / (ROWS * LANES);  // per thread
constexpr int COLUMNS = LANES * PIXELS;
constexpr int WARP_CHANNELS = 32 / LANES * CHANNELS;
constexpr int WARPS_N = TILE_N / WARP_CHANNELS;
constexpr int THREADS = 32 * ROWS * WARPS_N;
// Elements of a line that a thread reads.
constexpr int SPAN = ((PIXELS - 1) * STRIDE + TAPS + 3) / 4 * 4;
constexpr int PITCH = (COLUMNS - PIXELS) * STRIDE + SPAN;
constexpr int WINDOWS = PIXELS / 2;  // pooling windows per thread
// Padded so that adjacent channels' rows of maxima begin in different banks.
constexpr int POOLED_COLUMNS = COLUMNS / 2, POOLED_PITCH = POOLED_COLUMNS + 1;
// A pooling window also needs the column before its pair. The CTA to the left owns it unless it is
// padding, so this CTA recomputes one pair of columns.
constexpr int ADVANCE = COLUMNS - (POOL ? 2 : 0);

static_assert(TILE_M % (2 * ROWS * LANES) == 0, "a thread pools whole pairs of columns");
static_assert(TILE_N % WARP_CHANNELS == 0, "a warp has whole groups of channels");
static_assert(CHANNELS == 2 || CHANNELS == 4, "weights are loaded at once");
static_assert(PIXELS * STRIDE % 4 == 0, "a thread's part of a line is aligned to 16 bytes");
static_assert(PIXELS * STRIDE / 4 % 2 == 1, "LANES parts of a line begin in different banks");

// Copies the patch, one warp per line: `rows` rows of every channel, from row `top` and column
// `left`, zeros outside of the image. Element by element, since lines need not be aligned.
__device__ __forceinline__ void fetch(const float* image, const ConvShape& p, unsigned rows,
                                      int top, int left, float* patch) {
#pragma unroll 1
  for (unsigned line = threadIdx.x / 32; line < p.c * rows; line += THREADS / 32) {
    const int y = top + line % rows;
    // Wraps around where it is out of bounds.
    const unsigned source = (line / rows * p.h + y) * p.w + left;
#pragma unroll 4
    for (int at = threadIdx.x % 32; at < PITCH; at += 32) {
      // Unsigned comparisons reject negative indices too.
      const bool inside = (unsigned)y < (unsigned)p.h && (unsigned)(left + at) < (unsigned)p.w;
      cp_async<4>(shared_address(patch + line * PITCH + at),
                  inside ? image + (source + at) : image, inside);
    }
  }
}

using Taps = Run<float, CHANNELS>;

// Multiplies pixel `at` of the thread's part of a line by every tap that meets it, in all channels.
__device__ __forceinline__ void multiply_pixel(float (&acc)[PIXELS][CHANNELS], int at, float pixel,
                                               const Taps (&taps)[TAPS]) {
#pragma unroll
  for (int s = TAPS - 1; s >= 0; --s) {
    if (at < s || (at - s) % STRIDE || (at - s) / STRIDE >= PIXELS) continue;
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) acc[(at - s) / STRIDE][k] += pixel * taps[s].at[k];
  }
}

// Accumulates the lines of all windows; `patch` points to the thread's first window.
//
// NOTE: Pixel by pixel, not tap by tap, to avoid bank conflicts. Registers are in two banks, odd and
// even, and each gives one operand a cycle. Consecutive FMAs with the same pixel reuse it and read
// only a tap and a sum, which the assembler can place in different banks. Tap by tap it cannot: with
// a stride of 2 a tap's pixels are all in one bank, and their sums are in both.
__device__ __forceinline__ void multiply(float (&acc)[PIXELS][CHANNELS], const ConvShape& p,
                                         int rows, const float* patch, const float* weights) {
#pragma unroll 1
  for (int c = 0; c < p.c; ++c, patch += rows * PITCH) {
    const float* line = patch;
#pragma unroll 1
    for (int r = 0; r < p.kh; ++r, line += PITCH, weights += TAPS * TILE_N) {
      Taps taps[TAPS];
#pragma unroll
      for (int s = 0; s < TAPS; ++s) {
        taps[s] = *reinterpret_cast<const Taps*>(weights + s * TILE_N);
      }
#pragma unroll
      for (int i = 0; i < SPAN; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(line + i);
        multiply_pixel(acc, i, four.x, taps);
        multiply_pixel(acc, i + 1, four.y, taps);
        multiply_pixel(acc, i + 2, four.z, taps);
        multiply_pixel(acc, i + 3, four.w, taps);
      }
    }
  }
}

__device__ __forceinline__ void add_bias(float (&acc)[PIXELS][CHANNELS], const ConvShape& p,
                                         const float* bias, int channel) {
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
    const float held = bias && channel + k < p.o ? bias[channel + k] : 0.0f;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) acc[i][k] += held;
  }
}

// Pools one row across: each window's pair of columns and the column before. Columns beyond the
// output never win.
__device__ __forceinline__ void pool(float (&acc)[PIXELS][CHANNELS], const ConvShape& p,
                                     int column, float (&best)[WINDOWS][CHANNELS]) {
  const int first = column - threadIdx.x % LANES * PIXELS;
  if (first < 0 || first + COLUMNS > p.ow) {
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) {
        if ((unsigned)(column + i) >= (unsigned)p.ow) acc[i][k] = minus_infinity();
      }
    }
  }
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
    float before = __shfl_up_sync(0xffffffffu, acc[PIXELS - 1][k], 1, LANES);
    // Padding, or a window that the CTA to the left writes.
    if (threadIdx.x % LANES == 0) before = minus_infinity();
#pragma unroll
    for (int j = 0; j < WINDOWS; ++j) {
      best[j][k] = larger(before, larger(acc[2 * j][k], acc[2 * j + 1][k]));
      before = acc[2 * j + 1][k];
    }
  }
}

// ReLU and store without pooling, from the thread's first column on.
//
// NOTE: Copies are stored, which is why `relu` is not applied in place: a float2 store of two sums
// would force them into adjacent registers, and the conflicts that `multiply` avoids would be back.
__device__ __forceinline__ void write_row(const float (&acc)[PIXELS][CHANNELS], const ConvShape& p,
                                          int channel, int column, float* line) {
  const float least = p.relu ? 0.0f : minus_infinity();
  const auto at_least = [=](float sum) { return sum < least ? least : sum; };  // keeps NaN
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k, line += p.oh * p.ow) {
    if (channel + k >= p.o) return;
    if (p.ow % 2 == 0) {  // pairs are aligned, and entirely in the row or not
#pragma unroll
      for (int i = 0; i < PIXELS; i += 2) {
        if (column + i < p.ow) {
          *reinterpret_cast<float2*>(line + i) =
              make_float2(at_least(acc[i][k]), at_least(acc[i + 1][k]));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < PIXELS; ++i) {
        if (column + i < p.ow) line[i] = at_least(acc[i][k]);
      }
    }
  }
}

// A thread's maxima, [WINDOWS][CHANNELS]; in shared memory [channel][POOLED_PITCH].
using Maxima = float[WINDOWS][CHANNELS];

__device__ __forceinline__ void clear(Maxima& best) {
#pragma unroll
  for (int i = 0; i < WINDOWS * CHANNELS; ++i) best[i / CHANNELS][i % CHANNELS] = minus_infinity();
}

__device__ __forceinline__ void put(const Maxima& best, float* at) {
#pragma unroll
  for (int i = 0; i < WINDOWS * CHANNELS; ++i) {
    at[i % CHANNELS * POOLED_PITCH + i / CHANNELS] = best[i / CHANNELS][i % CHANNELS];
  }
}

__device__ __forceinline__ void take(Maxima& best, const float* at) {
#pragma unroll
  for (int i = 0; i < WINDOWS * CHANNELS; ++i) {
    float& mine = best[i / CHANNELS][i % CHANNELS];
    mine = larger(mine, at[i % CHANNELS * POOLED_PITCH + i / CHANNELS]);
  }
}

// Grid: see `share_of`. `weight`: [channel tiles][C·kh][TAPS][TILE_N], zeros for channels beyond
// the last.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_few_channels(const float* __restrict__ x, const float* __restrict__ weight,
                    const float* __restrict__ bias, float* __restrict__ out, const ConvShape p,
                    const Task task) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int weights_size = p.c * p.kh * TAPS * TILE_N;
  const int patch_rows = patch_rows_of(p);
  float* const weights = reinterpret_cast<float*>(shared);
  float* const patch = weights + weights_size;
  // [TILE_N][POOLED_PITCH] each. above: maxima of the previous turn's second row and this turn's
  // first. below: those of this turn's second row, which the next turn needs too.
  float* const above = patch + p.c * patch_rows * PITCH;
  float* const below = above + TILE_N * POOLED_PITCH;

  // With padding the first CTA has one more window.
  const int column_tiles = POOL ? max((2 * (task.columns - task.pw) + ADVANCE - 1) / ADVANCE, 1)
                                : (task.columns + ADVANCE - 1) / ADVANCE;
  const Share share = share_of(p, task, column_tiles);
  const int column0 = share.tile * ADVANCE - (POOL ? 1 - task.pw : 0);  // of the first accumulators
  const float* const image = x + (size_t)share.image * p.c * p.h * p.w;
  const auto fetch_turn = [&](int turn) {
    const int top = (turn * ROWS + share.row0) * p.sh - p.ph;
    fetch(image, p, patch_rows, top, column0 * STRIDE - p.pw, patch);
    cp_async_commit();
  };

  const float* const packed = weight + (size_t)(share.channel0 / TILE_N) * weights_size;
  for (int i = threadIdx.x * 4; i < weights_size; i += THREADS * 4) {
    cp_async<16>(shared_address(weights + i), packed + i, true);
  }
  fetch_turn(share.begin);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES;
  const int j = warp / WARPS_N;  // the warp's row
  const int k0 = warp % WARPS_N * WARP_CHANNELS + threadIdx.x % 32 / LANES * CHANNELS;
  const int column = column0 + lane * PIXELS;
  const float* const own = patch + j * p.sh * PITCH + lane * PIXELS * STRIDE;
  const int place = k0 * POOLED_PITCH + lane * WINDOWS;
  float best[WINDOWS][CHANNELS];
  clear(best);
  if (POOL && j == 1) put(best, below + place);

#pragma unroll 1
  for (int turn = share.begin; turn < share.end; ++turn) {
    cp_async_wait<0>();
    __syncthreads();  // the patch has arrived for all threads
    const int row = turn * ROWS + share.row0 + j;
    const bool whole = turn >= share.strip;  // not the turn before the strip
    clear(best);
    if (row < p.oh && (whole || j == 1)) {
      float acc[PIXELS][CHANNELS] = {};
      multiply(acc, p, patch_rows, own, weights + k0);
      add_bias(acc, p, bias, share.channel0 + k0);
      if constexpr (POOL) {
        pool(acc, p, column, best);
      } else {
        const unsigned plane = share.image * p.o + share.channel0 + k0;
        float* const line = out + ((size_t)plane * p.oh + row) * p.ow + column;
        write_row(acc, p, share.channel0 + k0, column, line);
      }
    }
    if (POOL && j == 0 && whole) {
      take(best, below + place);
      put(best, above + place);
    }
    __syncthreads();  // the patch and the last turn's maxima have been read
    if (turn + 1 < share.end) fetch_turn(turn + 1);
    if constexpr (POOL) {
      if (j == 1) put(best, below + place);
      if (!whole) continue;
      __syncthreads();
      const int skipped = share.tile > 0 || !task.pw;  // the CTA to the left writes that window
      const int window0 = (column0 + task.pw - 1) / 2;
      for (int k = warp; k < TILE_N && share.channel0 + k < p.o; k += THREADS / 32) {
        const unsigned plane = share.image * p.o + share.channel0 + k;
        float* const line = out + ((size_t)plane * task.rows + turn) * task.columns + window0;
        const int end_of_line = min(POOLED_COLUMNS, task.columns - window0);
        for (int w = skipped + threadIdx.x % 32; w < end_of_line; w += 32) {
          const int at = k * POOLED_PITCH + w;
          const float value = larger(above[at], below[at]);
          line[w] = p.relu ? relu(value) : value;
        }
      }
    }
  }
}
