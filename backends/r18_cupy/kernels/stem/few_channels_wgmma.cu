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
// One warpgroup multiplies and pools, row after row down a strip of the image. A turn's two rows have
// sums of their own: one is pooled while the other is multiplied. Another warpgroup brings the lines
// of the image that the next turn needs into a ring, each thread a pair of pixels of every line.
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "stem/strips.cuh"
#include "mma/mma.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"
#include "mma/split.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

#ifdef SPLIT
using Operand = __half;
constexpr int HALVES = 2;  // of a factor
#else
using Operand = STORAGE;
constexpr int HALVES = 1;
#endif
constexpr int SIZE = sizeof(Operand);
constexpr int COLUMNS = TILE_M / 2;  // of a row of the convolution
constexpr int PIXEL = 4;             // channels
constexpr int MAX_WINDOW = 8;        // columns
constexpr int CONSUMERS = 128, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
constexpr int PAIRS = COLUMNS - 1 + MAX_WINDOW / STRIDE;  // of pixels, in a line: chunks of a plane
constexpr int PLANE_BYTES = PAIRS * 16, HALF_BYTES = 2 * PLANE_BYTES;
constexpr int LINE_BYTES = HALVES * HALF_BYTES;
constexpr int CHUNK_PIXELS = SIZE == 2 ? 2 : 1;
constexpr int MATRIX_BYTES = 64 * 32, STEP_BYTES = HALVES * MATRIX_BYTES;  // of a step's weights
// With TILE_UNROLLED, windows are WINDOW by WINDOW and images have CHANNELS.
constexpr int WINDOW = 7, CHANNELS = 3;
constexpr int WINDOW_STEPS = (WINDOW * PIXEL * SIZE + 31) / 32;  // of a row of it
constexpr int AHEAD = ROWS * STRIDE;  // lines that a turn adds

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K * SIZE == 32, "a step is one wgmma");
static_assert(COLUMNS % 8 == 0, "columns come in core matrices of eight");
static_assert(PAIRS <= PRODUCERS, "a feeder has one pair of a line");
static_assert(COLUMNS <= CONSUMERS, "a multiplier writes one chunk of zeros");

static_assert(POOL, "sums are pooled, never stored");

using Accumulator = float[COLUMNS / 2];  // of a thread, see wgmma.cuh

// Registers of a thread: those that feed need few, and leave theirs to those that multiply.
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 200;
static_assert(TILE_BLOCKS == 2, "two blocks share a multiprocessor");
static_assert(PRODUCER_REGISTERS + CONSUMER_REGISTERS <= 2 * 128, "of 128 each");

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

// What a feeder brings: a pair of pixels of every line of the image.
struct Producer {
  const STORAGE* image;  // its pair in line 0 of the block's image
  int channels, plane, w, h;
  bool inside[2];   // whether its pixels are the image's
  unsigned target;  // where its pair lies in the first slot of the ring
  bool stores;      // whether a line has so many pairs
  int ring, slot;   // where the next line goes

  // Brings `count` lines from `y` on, LINES at most; `wait` before the first is stored.
  template <int LINES, typename Wait>
  __device__ __forceinline__ void bring(int y, int count, const Wait& wait) {
    PixelPair<STORAGE> pairs[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      const bool valid = (unsigned)(y + i) < (unsigned)h && i < count;
#pragma unroll
      for (int c = 0; c < PIXEL; ++c) {
        const STORAGE* const at = image + (c * plane + (y + i) * w);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          pairs[i].at[v][c] =
              valid && inside[v] && c < channels ? at[v] : from_float<STORAGE>(0.0f);
        }
      }
    }
    wait();
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      if (i >= count) break;
      if (stores) store_pair(target + slot * LINE_BYTES, pairs[i]);
      if (++slot == ring) slot = 0;
    }
  }
};

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
__device__ __forceinline__ void multiply(Accumulator& acc, Accumulator& cross, unsigned left,
                                         const StepOfWindow& step, unsigned line) {
  const unsigned long long a = no_swizzle_descriptor(left);
  const unsigned long long b = no_swizzle_descriptor(step.at(line));
  wgmma<Operand, COLUMNS>(acc, a, b);
  if constexpr (HALVES == 2) {
    wgmma<Operand, COLUMNS>(cross, a, no_swizzle_descriptor(step.at(line + HALF_BYTES)));
    wgmma<Operand, COLUMNS>(cross, no_swizzle_descriptor(left + MATRIX_BYTES / 16), b);
  }
}

// Here the compiler must take sums as read and as written. It does not know that the unit writes
// them, and would move what reads them ahead of the wait for it.
__device__ __forceinline__ void fence_accumulator(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// What the products of a row need, but for its lines.
struct RowOperands {
  unsigned weights, lines;  // in shared memory
  int kh, steps, ring;
  StepOfWindow last;
  float biases[2];  // of the lane's two channels
};

// What a row's sums begin with.
__device__ __forceinline__ void start(Accumulator& acc, Accumulator& cross, const RowOperands& of) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    acc[i] = of.biases[i / 2 % 2];
    cross[i] = 0.0f;
  }
  fence_accumulator(acc);
  if constexpr (HALVES == 2) fence_accumulator(cross);
}

// Begins the products of the row whose windows begin in the line at `slot`, as one group: where
// they are written out they go on while the threads do. `cross` is of split factors alone.
__device__ __forceinline__ void issue_row(Accumulator& acc, Accumulator& cross, const RowOperands& of, int slot) {
  const int kh = TILE_UNROLLED ? WINDOW : of.kh, steps = TILE_UNROLLED ? WINDOW_STEPS : of.steps;
  __builtin_assume(kh > 0);  // or sums would change between the fence and products
  unsigned left = of.weights / 16 | MATRIX_BYTES / 2 / 16 << 16;
  fence_accumulator(acc);
  if constexpr (HALVES == 2) fence_accumulator(cross);
  wgmma_fence();
#pragma unroll(TILE_UNROLLED ? WINDOW : 1)
  for (int r = 0; r < kh; ++r, ++slot) {
    if (slot >= of.ring) slot -= of.ring;
    const unsigned line = of.lines + slot * LINE_BYTES;
    StepOfWindow next{FIRST_STEP, 1};
#pragma unroll(TILE_UNROLLED ? WINDOW_STEPS : 1)
    for (int step = 1; step < steps; ++step) {
      multiply(acc, cross, left, next, line);
      next.base += NEXT_STEP, left += STEP_BYTES / 16;
    }
    multiply(acc, cross, left, of.last, line);
    left += STEP_BYTES / 16;
  }
  wgmma_commit();
  // In loops the compiler closes groups of its own: it cannot tell which of them are to end.
  if constexpr (!TILE_UNROLLED) wgmma_wait<0>();
}

// What a row of products left, once they have ended. Columns from `columns` on are none of the
// convolution's, and never win.
__device__ __forceinline__ void end_row(Accumulator& acc, Accumulator& cross, int column0, int columns) {
  fence_accumulator(acc);
  if constexpr (HALVES == 2) {
    fence_accumulator(cross);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = fmaf(cross[i], 1 / LOW_SCALE, acc[i]);
  }
  if (column0 + COLUMNS <= columns) return;
  const int own = column0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    if (own + i / 4 * 8 + i % 2 >= columns) acc[i] = minus_infinity();
  }
}

// Of a row of pooling windows, the largest so far, of the lane's two channels: windows 4·j + i % 4
// of lane i.
using Pooled = float[COLUMNS / 8][2];

// Pools a row across: `take` gets j, and of either channel the largest of the lane's two columns
// and the one before them.
template <typename Take>
__device__ __forceinline__ void pool_across(const Accumulator& acc, const Take& take) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  float last[2] = {minus_infinity(), minus_infinity()};  // the odd column of eight before
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    float found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even = acc[4 * j + 2 * half], odd = acc[4 * j + 2 * half + 1];
      // To the lane that has the next two columns; from the last of four to the first, which has
      // columns of the next eight.
      const float given = quarter == 3 ? last[half] : odd;
      const float before = __shfl_sync(0xffffffffu, given, lane - quarter + (quarter + 3) % 4);
      last[half] = odd;
      found[half] = larger(larger(even, odd), before);
    }
    take(j, found[0], found[1]);
  }
}

// Two 16-bit values by their bits.
__device__ __forceinline__ unsigned bits_of(__half2 pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned bits_of(__nv_bfloat162 pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Where a lane writes its windows.
template <typename T>
struct Writer {
  T* first;      // the lane's first window of row 0 of the result, at its channel
  int rooms[2];  // columns of the result from there on; none for a channel that is not there
  bool shared;   // whether the first window is the last of the tile to the left, which has it whole
  float least;   // zero for ReLU
  size_t row;    // elements
  int advance;   // elements from a lane's window to its next

  __device__ __forceinline__ Writer(const ConvShape& p, const Task& task, const Share& share,
                                    int column0, int warp_channel, T* out) {
    const int lane = threadIdx.x % 32, group = lane / 4, column = column0 / 2 + lane % 4;
    // Of 16 bits a lane writes two adjacent channels.
    const int channel = warp_channel + (sizeof(T) == 2 && group % 2 ? 7 + group : group);
    row = (size_t)task.columns * p.o, advance = 4 * p.o;
    first = out + (size_t)share.image * task.rows * row + ((size_t)column * p.o + channel);
    const int room = task.columns - column;
    rooms[0] = channel < p.o ? room : 0, rooms[1] = channel + 8 < p.o ? room : 0;
    shared = column0 > 0 && lane % 4 == 0;
    least = p.relu ? 0.0f : minus_infinity();
  }

  // Window j of the lane, at `pixel`. Rounding and ReLU keep order: they may come after pooling.
  __device__ __forceinline__ void write(T* pixel, const int (&rooms)[2], int j, float low,
                                        float high) const {
    const bool own = j > 0 || !shared;
    if constexpr (sizeof(T) == 2) {
      // Channels i and i + 8 become two adjacent ones, with the lane that has the others.
      const unsigned mine = bits_of(larger(pair_of<T>(low, high), pair_of<T>(least, least)));
      const unsigned other = __shfl_xor_sync(0xffffffffu, mine, 4);
      const unsigned both = threadIdx.x / 4 % 2 ? __byte_perm(other, mine, 0x7632)
                                                : __byte_perm(mine, other, 0x5410);
      if (own && 4 * j < rooms[0]) *reinterpret_cast<unsigned*>(pixel) = both;
    } else {
      if (own && 4 * j < rooms[0]) pixel[0] = larger(low, least);
      if (own && 4 * j < rooms[1]) pixel[8] = larger(high, least);
    }
  }
};

// `x` is not __restrict__: what the launch before still writes must not be read ahead of the wait.
// `steps`: of K, in a row of a window. `ring`: lines of the image in shared memory.
// `weight`: [channel tiles][kh][steps][halves] of two core columns of 64 channels by 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_maxpool2d_few_channels_wgmma(const STORAGE* x,
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

  launch_dependents();
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; ++turn) {
      mbarrier_init(full(turn), PRODUCERS);
      mbarrier_init(empty(turn), CONSUMERS / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMERS) {
    // The feeder's pair of pixels: below zero is beyond the end.
    const int index = threadIdx.x - CONSUMERS, left = column0 * STRIDE - p.pw + 2 * index;
    const bool inside[2] = {(unsigned)left < (unsigned)p.w, (unsigned)(left + 1) < (unsigned)p.w};
    Producer producer{x + (size_t)share.image * p.c * p.h * p.w + left,
                  TILE_UNROLLED ? CHANNELS : p.c,
                  p.h * p.w,
                  p.w,
                  p.h,
                  {inside[0], inside[1]},
                  lines + index * 16,
                  index < PAIRS,
                  ring,
                  0};
    const int top = share.begin * ROWS * STRIDE - p.ph, window_lines = patch_rows_of(p);
    wait_for_previous_launch();
    // The first turn's lines, at once if registers suffice: those that multiply wait for them, and
    // for the registers.
    constexpr int AT_ONCE = TILE_UNROLLED ? WINDOW + STRIDE : AHEAD;
    for (int line = 0; line < window_lines; line += AT_ONCE) {
      producer.bring<AT_ONCE>(top + line, window_lines - line, [] {});
    }
    fence_async_proxy();  // the unit reads them
    mbarrier_arrive(full(0));
    release_registers<PRODUCER_REGISTERS>();
    for (int turn = 1; turn < turns; ++turn) {
      const int known = window_lines + (turn - 1) * AHEAD;  // lines
      producer.bring<AHEAD>(top + known, AHEAD, [&] {
        // They go where those of two turns ago lay.
        if (turn > 1) mbarrier_wait(empty(turn), (turn / 2 - 1) & 1);
      });
      fence_async_proxy();
      mbarrier_arrive(full(turn));
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_channel = share.channel0 + warp * 16, channel = warp_channel + lane / 4;
  const RowOperands of{weights,
                    lines,
                    p.kh,
                    steps,
                    ring,
                    last_step(p, steps, zeros),
                    {bias && channel < p.o ? bias[channel] : 0.0f,
                     bias && channel + 8 < p.o ? bias[channel + 8] : 0.0f}};
  const int weight_chunks = p.kh * steps * (STEP_BYTES / 16);
  const uint4* const packed =
      reinterpret_cast<const uint4*>(weight) + (size_t)(share.channel0 / TILE_N) * weight_chunks;
  for (int i = threadIdx.x; i < weight_chunks; i += CONSUMERS) {
    cp_async<16>(weights + i * 16, packed + i, true);
  }
  if (threadIdx.x < COLUMNS) store_chunk(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_proxy();  // the unit reads them
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  acquire_registers<CONSUMER_REGISTERS>();

  Writer<STORAGE> writer(p, task, share, column0, warp_channel, out);
  Pooled best;  // of the row of windows that the next turn ends
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) best[j][0] = best[j][1] = minus_infinity();
  // A turn's two rows. While the one is multiplied, the other is pooled.
  Accumulator upper, upper_cross, lower, lower_cross;
  // Columns of the convolution in a row of it: none below its last.
  const auto columns_of = [&](int row) { return row < p.oh ? p.ow : 0; };
  // The lower row of the turn before `at`, which ends a row of the result, but for the first.
  const auto pool_lower = [&](int at) {
    end_row(lower, lower_cross, column0, columns_of(at * ROWS - 1));
    STORAGE* pixel = writer.first + (at - 1) * (long long)writer.row;
    // Not known beforehand, or as many predicates as windows would be kept over all turns.
    int rooms[2] = {at > share.strip ? writer.rooms[0] : 0, at > share.strip ? writer.rooms[1] : 0};
    asm volatile("" : "+r"(rooms[0]), "+r"(rooms[1]));
    pool_across(lower, [&](int j, float low, float high) {
      writer.write(pixel, rooms, j, larger(best[j][0], low), larger(best[j][1], high));
      pixel += writer.advance;
      best[j][0] = low, best[j][1] = high;
    });
  };

  wait_for_previous_launch();  // which may still read what lies in `out`
  int turn = 0, slot0 = 0;  // of the turn's first line
  mbarrier_wait(full(0), 0);
  if (share.begin < share.strip) {
    start(lower, lower_cross, of);
    issue_row(lower, lower_cross, of, STRIDE);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(empty(0));
    mbarrier_wait(full(1), 0);
    turn = 1, slot0 = ROWS * STRIDE % ring;
  } else {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) lower[i] = minus_infinity(), lower_cross[i] = 0.0f;
  }
  start(upper, upper_cross, of);
#pragma unroll 1
  for (; turn < turns; ++turn) {
    const int at = share.begin + turn;  // in the image
    issue_row(upper, upper_cross, of, slot0);
    pool_lower(at);
    start(lower, lower_cross, of);
    issue_row(lower, lower_cross, of, slot0 + STRIDE);
    wgmma_wait<1>();  // for the upper row
    end_row(upper, upper_cross, column0, columns_of(at * ROWS));
    pool_across(upper, [&](int j, float low, float high) {
      best[j][0] = larger(best[j][0], low), best[j][1] = larger(best[j][1], high);
    });
    start(upper, upper_cross, of);
    if (turn + 1 < turns) mbarrier_wait(full(turn + 1), (turn + 1) / 2 & 1);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(empty(turn));
    // On to the lines of the next turn.
    slot0 += ROWS * STRIDE;
    if (slot0 >= ring) slot0 -= ring;
  }
  pool_lower(share.end);
}
