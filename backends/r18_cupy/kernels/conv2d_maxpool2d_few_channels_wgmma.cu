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
// One warpgroup multiplies and pools, row after row down a strip of the image; another brings the
// lines of the image that the next turn needs into a ring, each thread a pair of pixels of every
// line.
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
constexpr int MULTIPLIERS = 128, FEEDERS = 128, THREADS = MULTIPLIERS + FEEDERS;
constexpr int PAIRS = COLUMNS - 1 + MAX_WINDOW / STRIDE;  // of pixels, in a line: chunks of a plane
constexpr int PLANE_BYTES = PAIRS * 16, HALF_BYTES = 2 * PLANE_BYTES;
constexpr int LINE_BYTES = HALVES * HALF_BYTES;
constexpr int CHUNK_PIXELS = SIZE == 2 ? 2 : 1;
constexpr int MATRIX_BYTES = 64 * 32, STEP_BYTES = HALVES * MATRIX_BYTES;  // of a step's weights
constexpr int AHEAD = ROWS * STRIDE;  // lines that a turn adds

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K * SIZE == 32, "a step is one wgmma");
static_assert(COLUMNS % 8 == 0, "columns come in core matrices of eight");
static_assert(PAIRS <= FEEDERS, "a feeder has one pair of a line");

static_assert(POOL, "sums are pooled, never stored");

using Sums = float[COLUMNS / 2];  // of a thread, see wgmma.cuh

// Registers of a thread. Two blocks share a multiprocessor: those that feed need few, and leave
// theirs to those that multiply. A block alone has enough for all.
constexpr int FEEDER_REGISTERS = TILE_BLOCKS == 2 ? 56 : 0;
constexpr int MULTIPLIER_REGISTERS = TILE_BLOCKS == 2 ? 200 : 0;
static_assert(FEEDER_REGISTERS + MULTIPLIER_REGISTERS <= 2 * 128, "of 128 each");

// Two adjacent pixels with their channels.
template <typename T>
struct alignas(16) PixelPair {
  T at[2][PIXEL];
};

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

// Where chunk `chunk` of a window's row lies in a line, for the first column.
__device__ __forceinline__ unsigned chunk_offset(const ConvShape& p, int chunk) {
  if (SIZE == 2) return chunk * 16 + (2 * chunk + 1 == p.kw ? PLANE_BYTES : 0);
  return chunk / 2 * 16 + chunk % 2 * PLANE_BYTES;
}

// Descriptors of the columns at a step of a window's row, in the line at `line`:
// base + factor · line / 16.
struct StepOfWindow {
  unsigned base, factor;
  __device__ __forceinline__ unsigned at(unsigned line) const { return base + factor * (line / 16); }
};

// A step's two chunks lie as far apart as those of the first, and the next step's NEXT_STEP further
// on. But for the last step: its second chunk is read from the plane with zeros; or it is none of
// the window's, and lies at `zeros`, at a distance that shrinks as the line's address grows.
constexpr unsigned FIRST_STEP = (SIZE == 2 ? 1u : PLANE_BYTES / 16u) << 16;
constexpr unsigned NEXT_STEP = SIZE == 2 ? 2 : 1;

__device__ __forceinline__ StepOfWindow last_step(const ConvShape& p, int steps, unsigned zeros) {
  const int chunk = 2 * (steps - 1);
  const unsigned first = chunk_offset(p, chunk) / 16;
  if ((chunk + 1) * CHUNK_PIXELS < p.kw) {
    return {(chunk_offset(p, chunk + 1) / 16 - first) << 16 | first, 1};
  }
  return {((zeros / 16 - first) << 16) + first, 1 - (1 << 16)};
}

// sums += weights · columns, and cross of split factors, at one step. `left`: the weights'
// descriptor.
__device__ __forceinline__ void multiply(Sums& sums, Sums& cross, unsigned left,
                                         const StepOfWindow& step, unsigned line) {
  const unsigned long long right = descriptor(step.at(line));
  wgmma<Factor, COLUMNS>(sums, descriptor(left), right);
  if constexpr (HALVES == 2) {
    wgmma<Factor, COLUMNS>(cross, descriptor(left), descriptor(step.at(line + HALF_BYTES)));
    wgmma<Factor, COLUMNS>(cross, descriptor(left + MATRIX_BYTES / 16), right);
  }
}

// Of a row of pooling windows, the largest so far, of the lane's two channels: columns 4·j + i % 4
// of lane i.
using Pooled = float[COLUMNS / 8][2];

// The sums of a row, pooled across: of each window the lane's two columns and the one before them.
// MASKED: columns from `columns` on are none of the convolution's, and never win.
template <bool MASKED>
__device__ __forceinline__ void pool_across(const Sums& sums, int column0, int columns,
                                            Pooled& row) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  float last[2] = {minus_infinity(), minus_infinity()};  // the odd column of eight before
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const int column = column0 + 8 * j + 2 * quarter;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = sums[4 * j + 2 * half], odd = sums[4 * j + 2 * half + 1];
      if (MASKED && column >= columns) even = minus_infinity();
      if (MASKED && column + 1 >= columns) odd = minus_infinity();
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
    give_registers_back<FEEDER_REGISTERS>();
    wait_for_launch_before();
    // The feeder's pair of pixels: below zero is beyond the end.
    const int index = threadIdx.x - MULTIPLIERS, left = column0 * STRIDE - p.pw + 2 * index;
    const bool inside[2] = {(unsigned)left < (unsigned)p.w, (unsigned)(left + 1) < (unsigned)p.w};
    const STORAGE* const image = x + (size_t)share.image * p.c * p.h * p.w + left;
    const int top0 = share.begin * ROWS * STRIDE - p.ph, plane = p.h * p.w;
    int slot = 0;  // where the next line goes
    for (int turn = 0; turn < turns; ++turn) {
      const int known = turn == 0 ? 0 : p.kh - STRIDE;  // lines of the turn that are there
      const int top = top0 + turn * ROWS * STRIDE + known, count = window_lines - known;
      for (int line0 = 0; line0 < count; line0 += AHEAD) {
        PixelPair<STORAGE> pairs[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int y = top + line0 + i;
          const bool valid = (unsigned)y < (unsigned)p.h && line0 + i < count;
#pragma unroll
          for (int c = 0; c < PIXEL; ++c) {
            const STORAGE* const at = image + (c * plane + y * p.w);
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              pairs[i].at[v][c] =
                  valid && inside[v] && c < p.c ? at[v] : from_float<STORAGE>(0.0f);
            }
          }
        }
        // Lines go where those of two turns ago lay.
        if (turn > 1 && line0 == 0) barrier_wait(empty(turn), (turn / 2 - 1) & 1);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (line0 + i >= count) break;
          if (index < PAIRS) store_pair(lines + slot * LINE_BYTES + index * 16, pairs[i]);
          if (++slot == ring) slot = 0;
        }
      }
      async_fence();  // the unit reads them
      barrier_arrive(full(turn));
    }
    return;
  }
  take_registers<MULTIPLIER_REGISTERS>();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_channel = share.channel0 + warp * 16, channel = warp_channel + lane / 4;
  const float biases[2] = {bias && channel < p.o ? bias[channel] : 0.0f,
                           bias && channel + 8 < p.o ? bias[channel + 8] : 0.0f};
  const StepOfWindow last = last_step(p, steps, zeros);
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
      Sums sums, cross = {};  // `cross` of split factors alone
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = biases[i / 2 % 2];
      unsigned left = weights / 16 | MATRIX_BYTES / 2 / 16 << 16;
      int slot = slot0 + half * STRIDE;
      for (int r = 0; r < p.kh; ++r, ++slot) {
        if (slot >= ring) slot -= ring;
        const unsigned line = lines + slot * LINE_BYTES;
        StepOfWindow next{FIRST_STEP, 1};
        wgmma_fence();
        for (int step = 1; step < steps; ++step) {
          multiply(sums, cross, left, next, line);
          next.base += NEXT_STEP, left += STEP_BYTES / 16;
        }
        multiply(sums, cross, left, last, line);
        left += STEP_BYTES / 16;
        wgmma_commit();
      }
      wgmma_wait<0>();
      if constexpr (HALVES == 2) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = fmaf(cross[i], 1 / LOW_SCALE, sums[i]);
      }
      if (half == 1 && lane == 0) barrier_arrive(empty(turn));
      const int columns = at * ROWS + half < p.oh ? p.ow : 0;
      if (column0 + COLUMNS <= columns) {
        pool_across<false>(sums, column0, columns, below);
      } else {
        pool_across<true>(sums, column0, columns, below);
      }
      if (half == 0) take(best, below);
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
