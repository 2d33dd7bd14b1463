// Convolution of images with few channels fused with max-pooling, on Hopper's tensor cores (wgmma).
// Reads NCHW, writes NHWC; fp16, bf16, tf32, or fp16x3 (SPLIT).
//
// Rows of A are 64 channels, rows of B the columns of one row of the convolution, K the positions
// of a window. A CTA works down a strip (strips.cuh):
// 1. A producer warpgroup loads the image lines that the next turn adds into a ring in shared
//    memory, one pair of pixels of every line per thread.
// 2. A consumer warpgroup multiplies the turn's two rows, each with its own accumulator. With
//    TILE_UNROLLED it pools the upper row while the lower one is multiplied.
// 3. It pools the lower row, clamps the maxima and writes them, while the SM's other CTA multiplies.
//    16-bit values are rounded before pooling, others after it.
//
// B without im2col: in shared memory a pixel has its channels padded to PIXEL, and a chunk of 16
// bytes of K holds two pixels of 16-bit values or one of float. Windows of adjacent columns begin
// two pixels apart, so the chunks of eight columns at one window position are adjacent: 128 bytes,
// a core matrix of the layout without swizzle. Matrices of neighbouring positions overlap. For
// float, even and odd pixels of a line are in separate planes.
//
// A window of odd width ends in half a chunk of 16-bit values. The pixel in the other half is
// outside of the window and may be infinite, which a zero weight would not remove. So the last
// chunk is read from a second plane, in which every odd pixel is zero.
//
// With TILE_UNROLLED and 16-bit STORAGE the weights stay in registers (STATIONARY). Shared memory then
// delivers only pixels, which leaves bandwidth for the shuffles and stores of pooling.
//
// Of a warp's 16 rows of A, rows i and i + 8 are adjacent channels. A lane has the sums of both, and
// pools and writes them as a pair.
//
// With SPLIT a line has planes of high halves followed by planes of low halves; the weights of a
// step likewise.
//
// Constraints: sm_90a; strides of 2; at most PIXEL channels and MAX_WINDOW columns; pooling 3×3
// with stride 2 and padding 1; an even number of output channels.
// TILE_UNROLLED: windows of WINDOW by WINDOW over CHANNELS channels only.
#include "common/cp_async.cuh"  // shared_address
#include "common/dependent_launch.cuh"
#include "stem/strips.cuh"
#include "mma/mma.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"
#include "mma/split.cuh"
#include "hopper/bulk.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_stationary.cuh"

#ifdef SPLIT
using Operand = __half;
constexpr int HALVES = 2;  // numbers per operand
#else
using Operand = STORAGE;
constexpr int HALVES = 1;
#endif
constexpr int SIZE = sizeof(Operand);
constexpr int COLUMNS = TILE_M / 2;  // per row of the convolution
constexpr int PIXEL = 4;             // channels
constexpr int MAX_WINDOW = 8;        // columns
constexpr int CONSUMERS = 128, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
// Pairs of pixels per line, i.e. chunks per plane.
constexpr int PAIRS = COLUMNS - 1 + MAX_WINDOW / STRIDE;
constexpr int PLANE_BYTES = PAIRS * 16, HALF_BYTES = 2 * PLANE_BYTES;
constexpr int LINE_BYTES = HALVES * HALF_BYTES;
constexpr int CHUNK_PIXELS = SIZE == 2 ? 2 : 1;
constexpr int MATRIX_BYTES = 64 * 32, STEP_BYTES = HALVES * MATRIX_BYTES;  // of one step's weights
// With TILE_UNROLLED, windows are WINDOW by WINDOW over CHANNELS channels.
constexpr int WINDOW = 7, CHANNELS = 3;
constexpr int WINDOW_STEPS = (WINDOW * PIXEL * SIZE + 31) / 32;  // K steps per row of it
constexpr int AHEAD = ROWS * STRIDE;  // lines that one turn adds
// Whether weights stay in registers instead of shared memory.
constexpr bool STATIONARY = TILE_UNROLLED && SIZE == 2 && HALVES == 1;

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K * SIZE == 32, "a step is one wgmma");
static_assert(COLUMNS % 8 == 0, "columns come in core matrices of eight");
static_assert(PAIRS <= PRODUCERS, "a producer thread loads one pair of a line");
static_assert(COLUMNS <= CONSUMERS, "a consumer thread writes one chunk of zeros");

static_assert(POOL, "this kernel always pools");

using Accumulator = float[COLUMNS / 2];  // of a thread; layout in wgmma.cuh

// Registers per thread (setmaxnreg): producers release theirs to the consumers.
constexpr int PRODUCER_REGISTERS = STATIONARY ? 40 : 56;
constexpr int CONSUMER_REGISTERS = STATIONARY ? 216 : 200;
static_assert(TILE_BLOCKS == 2, "two CTAs share an SM");
static_assert(PRODUCER_REGISTERS + CONSUMER_REGISTERS <= 2 * 128,
              "the two warpgroups have 128 registers per thread on average");

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

// Writes a pair of 16-bit pixels at `at` of both planes of a line: both pixels, and the first with
// zeros.
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
      unsigned bits[PIXEL];  // round here: the hardware would truncate
#pragma unroll
      for (int c = 0; c < PIXEL; ++c) {
        bits[c] = round_operand<T>(__float_as_uint(pair.at[i][c]));
      }
      store_chunk(at + i * PLANE_BYTES, make_uint4(bits[0], bits[1], bits[2], bits[3]));
    }
  }
}

// A producer thread: loads a pair of pixels of every line of the image.
struct Producer {
  const STORAGE* image;  // its pair in line 0 of the CTA's image
  int channels, plane, w, h;
  bool inside[2];   // whether its pixels are inside of the image
  unsigned target;  // address of its pair in the ring's first slot
  bool stores;      // whether a line has this pair
  int ring, slot;   // slots; slot of the next line

  // Loads `count` lines from `y` on, at most LINES; calls `wait` before the first is stored.
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

// Offset in a line of chunk `chunk` of a window's row of `kw` pixels, for the first column.
__device__ __forceinline__ unsigned chunk_offset(int kw, int chunk) {
  if (SIZE == 2) return chunk * 16 + (2 * chunk + 1 == kw ? PLANE_BYTES : 0);
  return chunk / 2 * 16 + chunk % 2 * PLANE_BYTES;
}

// Descriptor (lower half) of the columns at a step of a window's row, in the line at `line`: base +
// factor · line / 16.
struct StepOfWindow {
  unsigned base, factor;
  __device__ __forceinline__ unsigned at(unsigned line) const {
    return base + factor * (line / 16);
  }
};

// A step's two chunks are as far apart as the first step's, and the next step is NEXT_STEP further.
// The last step differs: its second chunk is read from the plane with zeros, or from `zeros` if it
// is outside of the window; the distance to `zeros` shrinks as the line's address grows.
constexpr unsigned FIRST_STEP = (SIZE == 2 ? 1u : PLANE_BYTES / 16u) << 16;
constexpr unsigned NEXT_STEP = SIZE == 2 ? 2 : 1;

__device__ __forceinline__ StepOfWindow last_step(const ConvShape& p, int steps, unsigned zeros) {
  const int kw = TILE_UNROLLED ? WINDOW : p.kw, chunk = 2 * (steps - 1);
  const unsigned first = chunk_offset(kw, chunk) / 16;
  if ((chunk + 1) * CHUNK_PIXELS < kw) {
    return {(chunk_offset(kw, chunk + 1) / 16 - first) << 16 | first, 1};
  }
  return {((zeros / 16 - first) << 16) + first, 1 - (1 << 16)};
}

// The weights of a warpgroup's channels, by K steps: in registers, or in shared memory.
template <bool IN_REGISTERS>
struct Weights;

template <>
struct Weights<true> {
  uint4 steps[WINDOW * WINDOW_STEPS];

  // `first`: address of the weights in shared memory. Eight rows of a chunk are 128 bytes: lane i
  // loads word i. Registers as `wgmma_stationary` takes them.
  __device__ __forceinline__ explicit Weights(unsigned first) {
    constexpr int EIGHT_ROWS = 128, CHUNK = MATRIX_BYTES / 2;
    const unsigned own = first + threadIdx.x / 32 * 2 * EIGHT_ROWS + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < WINDOW * WINDOW_STEPS; ++i) {
      const unsigned at = own + i * STEP_BYTES;
      steps[i] = make_uint4(load(at), load(at + EIGHT_ROWS), load(at + CHUNK),
                            load(at + CHUNK + EIGHT_ROWS));
    }
  }
  // Volatile: otherwise the compiler would load them again for each turn.
  __device__ __forceinline__ static unsigned load(unsigned address) {
    unsigned word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }
  template <int COUNT>
  __device__ __forceinline__ void multiply(float (&acc)[COUNT], float (&)[COUNT], int i,
                                           const StepOfWindow& step, unsigned line) const {
    const unsigned long long b = no_swizzle_descriptor(step.at(line));
    if (i == 0) {
      wgmma_stationary_begin(Operand(), acc, steps[i], b);
    } else {
      wgmma_stationary(Operand(), acc, steps[i], b);
    }
  }
};

template <>
struct Weights<false> {
  unsigned first;  // address

  __device__ __forceinline__ explicit Weights(unsigned first) : first(first) {}

  // Issues weights · columns of K step `i`, and the cross products with SPLIT.
  __device__ __forceinline__ void multiply(Accumulator& acc, Accumulator& cross, int i,
                                           const StepOfWindow& step, unsigned line) const {
    const unsigned left = (first / 16 | MATRIX_BYTES / 2 / 16 << 16) + i * (STEP_BYTES / 16);
    const unsigned long long a = no_swizzle_descriptor(left);
    const unsigned long long b = no_swizzle_descriptor(step.at(line));
    wgmma<Operand, COLUMNS>(acc, a, b);
    if constexpr (HALVES == 2) {
      wgmma<Operand, COLUMNS>(cross, a, no_swizzle_descriptor(step.at(line + HALF_BYTES)));
      wgmma<Operand, COLUMNS>(cross, no_swizzle_descriptor(left + MATRIX_BYTES / 16), b);
    }
  }
};

// Makes the compiler treat the accumulators as read and written here. It does not know that `wgmma`
// writes them asynchronously, and would move reads ahead of the wait.
__device__ __forceinline__ void fence_accumulator(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// The operands of a row of products, except its lines.
struct RowOperands {
  Weights<STATIONARY> weights;
  unsigned lines;  // in shared memory
  int kh, steps, ring;
  StepOfWindow last;
  float biases[2];  // of the lane's two channels
};

// Initialises a row's accumulators with the bias. With STATIONARY it does nothing: the first product
// overwrites the accumulators, and `end_row` adds the bias.
__device__ __forceinline__ void start(Accumulator& acc, Accumulator& cross, const RowOperands& of) {
  if constexpr (!STATIONARY) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      acc[i] = of.biases[i / 2 % 2];
      cross[i] = 0.0f;
    }
    fence_accumulator(acc);
    if constexpr (HALVES == 2) fence_accumulator(cross);
  }
}

// Issues the products of the row whose windows begin in the line at `slot`, as one group. If
// unrolled, they stay in flight on return. `cross` is used with SPLIT only.
__device__ __forceinline__ void issue_row(Accumulator& acc, Accumulator& cross,
                                          const RowOperands& of, int slot) {
  const int kh = TILE_UNROLLED ? WINDOW : of.kh, steps = TILE_UNROLLED ? WINDOW_STEPS : of.steps;
  // Else the compiler could write accumulators between the fence and the products.
  __builtin_assume(kh > 0);
  if constexpr (!STATIONARY) fence_accumulator(acc);
  if constexpr (HALVES == 2) fence_accumulator(cross);
  wgmma_fence();
#pragma unroll(TILE_UNROLLED ? WINDOW : 1)
  for (int r = 0; r < kh; ++r, ++slot) {
    if (slot >= of.ring) slot -= of.ring;
    const unsigned line = of.lines + slot * LINE_BYTES;
    StepOfWindow next{FIRST_STEP, 1};
#pragma unroll(TILE_UNROLLED ? WINDOW_STEPS : 1)
    for (int step = 0; step < steps - 1; ++step, next.base += NEXT_STEP) {
      of.weights.multiply(acc, cross, r * steps + step, next, line);
    }
    of.weights.multiply(acc, cross, r * steps + steps - 1, of.last, line);
  }
  wgmma_commit();
  // NOTE: in loops the compiler inserts groups of its own, so counting groups does not work.
  if constexpr (!TILE_UNROLLED) wgmma_wait<0>();
}

// Finishes a row after its products have completed. Columns from `columns` on are outside of the
// convolution and never win.
__device__ __forceinline__ void end_row(Accumulator& acc, Accumulator& cross,
                                        const RowOperands& of, int column0, int columns) {
  fence_accumulator(acc);
  if constexpr (STATIONARY) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc[i] += of.biases[i / 2 % 2];
  }
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

// Running maxima of a row of pooling windows, for the lane's two channels: windows 4·j + i % 4 of
// lane i. 16-bit pairs are rounded before pooling; rounding and ReLU are monotonic, so the order does
// not change the result.
using Maxima = Pair<STORAGE>;
using Pooled = Maxima[COLUMNS / 8];

// Below every value.
__device__ __forceinline__ Maxima least_maxima() {
  return pair_of<STORAGE>(minus_infinity(), minus_infinity());
}

// Pools a row across: `take` gets j, and the maxima of the lane's two columns and the one before.
template <typename Take>
__device__ __forceinline__ void pool_across(const Accumulator& acc, const Take& take) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  Maxima last = least_maxima();  // the odd column of the previous eight
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const Maxima even = pair_of<STORAGE>(acc[4 * j], acc[4 * j + 2]);
    const Maxima odd = pair_of<STORAGE>(acc[4 * j + 1], acc[4 * j + 3]);
    // Pass the odd column to the lane with the next two columns; the last of four passes to the
    // first, which has columns of the next eight.
    const Maxima given = quarter == 3 ? last : odd;
    const Maxima before = from_lane(given, lane - quarter + (quarter + 3) % 4);
    last = odd;
    take(j, larger(larger(even, odd), before));
  }
}

// Writes a lane's windows.
template <typename T>
struct Writer {
  T* first;      // the lane's first window of output row 0, at its first channel
  int room;      // output columns from there on; 0 for a channel that does not exist
  bool shared;   // whether the tile to the left writes the first window
  float least;   // zero for ReLU, else −∞

  __device__ __forceinline__ Writer(const ConvShape& p, const Task& task, const Share& share,
                                    int column0, int channel, T* out) {
    const int lane = threadIdx.x % 32, column = column0 / 2 + lane % 4;
    const size_t pixel = (size_t)share.image * task.rows * task.columns + column;
    first = out + pixel * p.o + channel;
    room = channel < p.o ? task.columns - column : 0;
    shared = column0 > 0 && lane % 4 == 0;
    least = p.relu ? 0.0f : minus_infinity();
  }

  // Writes window j of the lane at `pixel`.
  __device__ __forceinline__ void write(T* pixel, int room, int j, const Maxima& maxima) const {
    const Maxima clamped = to_output(larger(maxima, pair_of<T>(least, least)));
    if (4 * j < room && (j > 0 || !shared)) *reinterpret_cast<Maxima*>(pixel) = clamped;
  }
};

// NOTE: `x` is not __restrict__, or the compiler could read what the previous launch still writes
// ahead of the wait. `steps`: K steps per window row. `ring_lines`: lines of the image in shared
// memory. `weight`: [channel tiles][kh][steps][halves] of two core-matrix columns of 64 rows by 16
// bytes; `channel_of_row` in stem/few_channels_wgmma.py gives a row's channel.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_maxpool2d_few_channels_wgmma(const STORAGE* x,
                                    const unsigned char* __restrict__ weight,
                                    const float* __restrict__ bias, STORAGE* __restrict__ out,
                                    const ConvShape p, const Task task, const int steps,
                                    const int ring_lines) {
  extern __shared__ __align__(128) unsigned char shared[];
  // mbarriers, a full/empty pair for even and one for odd turns: `full` when the turn's lines have
  // been written, `empty` when all consumer warps have read the lines that only turns so far
  // needed; and one for the weights.
  const unsigned barriers = shared_address(shared), arrived = barriers + 32;
  const unsigned weights = barriers + 128;
  const unsigned lines = weights + p.kh * steps * STEP_BYTES;
  const int ring = TILE_UNROLLED ? STRIDE + WINDOW + AHEAD : ring_lines;
  const unsigned zeros = lines + ring * LINE_BYTES;  // COLUMNS chunks
  const auto full = [&](int turn) { return barriers + turn % 2 * 16; };
  const auto empty = [&](int turn) { return barriers + turn % 2 * 16 + 8; };

  constexpr int ADVANCE = COLUMNS - 2;  // columns of the convolution from one tile to the next
  const int column_tiles = max((2 * task.columns - 2 + ADVANCE - 1) / ADVANCE, 1);
  const Share share = share_of(p, task, column_tiles);
  const int column0 = share.tile * ADVANCE, turns = share.end - share.begin;

  launch_dependents();
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; ++turn) {
      mbarrier_init(full(turn), PRODUCERS);
      mbarrier_init(empty(turn), CONSUMERS / 32);
    }
    mbarrier_init(arrived, 1);
    mbarrier_init_fence();
    // They do not depend on the previous launch.
    const int nbytes = p.kh * steps * STEP_BYTES;
    mbarrier_arrive_expect_tx(arrived, nbytes);
    bulk_load(weights, weight + (size_t)(share.channel0 / TILE_N) * nbytes, nbytes, arrived);
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMERS) {
    // The producer thread's pair of pixels. Unsigned comparisons reject negative indices too.
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
    // The first turn's lines, all at once if registers suffice: the consumers wait for them, and
    // for the registers that the producers release.
    constexpr int AT_ONCE = TILE_UNROLLED ? WINDOW + STRIDE : AHEAD;
    for (int line = 0; line < window_lines; line += AT_ONCE) {
      producer.bring<AT_ONCE>(top + line, window_lines - line, [] {});
    }
    fence_async_proxy();  // wgmma reads them
    mbarrier_arrive(full(0));
    release_registers<PRODUCER_REGISTERS>();
    for (int turn = 1; turn < turns; ++turn) {
      const int known = window_lines + (turn - 1) * AHEAD;  // lines
      producer.bring<AHEAD>(top + known, AHEAD, [&] {
        // They overwrite the lines of two turns ago.
        if (turn > 1) mbarrier_wait(empty(turn), (turn / 2 - 1) & 1);
      });
      fence_async_proxy();
      mbarrier_arrive(full(turn));
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = share.channel0 + warp * 16 + lane / 4 * 2;  // and the next one
  if (threadIdx.x < COLUMNS) store_chunk(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
  fence_async_proxy();  // wgmma reads them
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  mbarrier_wait(arrived, 0);
  acquire_registers<CONSUMER_REGISTERS>();
  const RowOperands of{Weights<STATIONARY>(weights),
                       lines,
                       p.kh,
                       steps,
                       ring,
                       last_step(p, TILE_UNROLLED ? WINDOW_STEPS : steps, zeros),
                       {bias && channel < p.o ? bias[channel] : 0.0f,
                        bias && channel + 1 < p.o ? bias[channel + 1] : 0.0f}};

  Writer<STORAGE> writer(p, task, share, column0, channel, out);
  Pooled best;  // of the row of windows that the next lower row completes
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) best[j] = least_maxima();
  const auto take_larger = [&](int j, const Maxima& maxima) { best[j] = larger(best[j], maxima); };
  Accumulator upper, upper_cross, lower, lower_cross;  // a turn's two rows
  // Valid columns in a row of the convolution: none past its last row.
  const auto columns_of = [&](int row) { return row < p.oh ? p.ow : 0; };
  int turn = 0, slot0 = 0;  // slot of the turn's first line
  const auto advance = [&] {
    slot0 += ROWS * STRIDE;
    if (slot0 >= ring) slot0 -= ring;
    ++turn;
  };
  wait_for_previous_launch();  // which may still read the memory of `out`
  if (share.begin < share.strip) {
    start(lower, lower_cross, of);
    mbarrier_wait(full(0), 0);
    issue_row(lower, lower_cross, of, STRIDE);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(empty(0));
    end_row(lower, lower_cross, of, column0, columns_of(share.begin * ROWS + 1));
    pool_across(lower, take_larger);
    advance();
  }
  // Where the next output row begins, for the lane.
  STORAGE* row = writer.first + (size_t)share.strip * task.columns * p.o;
#pragma unroll 1
  while (turn < turns) {
    const int upper_row = (share.begin + turn) * ROWS;
    start(upper, upper_cross, of);
    start(lower, lower_cross, of);
    mbarrier_wait(full(turn), turn / 2 & 1);
    issue_row(upper, upper_cross, of, slot0);
    issue_row(lower, lower_cross, of, slot0 + STRIDE);
    wgmma_wait<1>();  // the upper row has completed
    end_row(upper, upper_cross, of, column0, columns_of(upper_row));
    pool_across(upper, take_larger);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(empty(turn));
    end_row(lower, lower_cross, of, column0, columns_of(upper_row + 1));
    STORAGE* pixel = row;
    // Hidden from the compiler, which would otherwise keep one predicate per window across all
    // turns.
    int room = writer.room;
    asm volatile("" : "+r"(room));
    pool_across(lower, [&](int j, const Maxima& maxima) {
      writer.write(pixel, room, j, larger(best[j], maxima));
      pixel += 4 * p.o;
      best[j] = maxima;
    });
    row += (long long)task.columns * p.o;
    advance();
  }
}
