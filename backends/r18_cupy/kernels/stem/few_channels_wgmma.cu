// Convolution of images with few channels fused with max-pooling, on Hopper's tensor cores (wgmma).
// Reads NCHW, writes NHWC; fp16, bf16, tf32, or fp16x3 (SPLIT).
//
// Rows of A are 64 channels, rows of B the columns of one row of the convolution, K the positions
// of a window. A CTA works down a strip (strips.cuh):
// 1. A producer warpgroup loads the image lines that the next turn adds into a ring in shared
//    memory, one pair of pixels of every line per thread.
// 2. A consumer warpgroup multiplies the turn's two rows, each with its own accumulator, and pools
//    one row while the other is multiplied.
// 3. Pooled rows are rounded, clamped and written.
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
// With SPLIT a line has planes of high halves followed by planes of low halves; the weights of a
// step likewise.
//
// Constraints: sm_90a; strides of 2; at most PIXEL channels and MAX_WINDOW columns; pooling 3×3
// with stride 2 and padding 1; 16-bit storage needs an even number of output channels.
// TILE_UNROLLED: windows of WINDOW by WINDOW over CHANNELS channels only.
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

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K * SIZE == 32, "a step is one wgmma");
static_assert(COLUMNS % 8 == 0, "columns come in core matrices of eight");
static_assert(PAIRS <= PRODUCERS, "a producer thread loads one pair of a line");
static_assert(COLUMNS <= CONSUMERS, "a consumer thread writes one chunk of zeros");

static_assert(POOL, "this kernel always pools");

using Accumulator = float[COLUMNS / 2];  // of a thread; layout in wgmma.cuh

// Registers per thread (setmaxnreg): producers release theirs to the consumers.
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 200;
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

// Offset in a line of chunk `chunk` of a window's row, for the first column.
__device__ __forceinline__ unsigned chunk_offset(const ConvShape& p, int chunk) {
  if (SIZE == 2) return chunk * 16 + (2 * chunk + 1 == p.kw ? PLANE_BYTES : 0);
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
  const int chunk = 2 * (steps - 1);
  const unsigned first = chunk_offset(p, chunk) / 16;
  if ((chunk + 1) * CHUNK_PIXELS < p.kw) {
    return {(chunk_offset(p, chunk + 1) / 16 - first) << 16 | first, 1};
  }
  return {((zeros / 16 - first) << 16) + first, 1 - (1 << 16)};
}

// Issues weights · columns at one step, and the cross products with SPLIT. `left`: the weights'
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

// Makes the compiler treat the accumulators as read and written here. It does not know that `wgmma`
// writes them asynchronously, and would move reads ahead of the wait.
__device__ __forceinline__ void fence_accumulator(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// The operands of a row of products, except its lines.
struct RowOperands {
  unsigned weights, lines;  // in shared memory
  int kh, steps, ring;
  StepOfWindow last;
  float biases[2];  // of the lane's two channels
};

// Initialises a row's accumulators with the bias.
__device__ __forceinline__ void start(Accumulator& acc, Accumulator& cross, const RowOperands& of) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    acc[i] = of.biases[i / 2 % 2];
    cross[i] = 0.0f;
  }
  fence_accumulator(acc);
  if constexpr (HALVES == 2) fence_accumulator(cross);
}

// Issues the products of the row whose windows begin in the line at `slot`, as one group. If
// unrolled, they stay in flight on return. `cross` is used with SPLIT only.
__device__ __forceinline__ void issue_row(Accumulator& acc, Accumulator& cross,
                                          const RowOperands& of, int slot) {
  const int kh = TILE_UNROLLED ? WINDOW : of.kh, steps = TILE_UNROLLED ? WINDOW_STEPS : of.steps;
  // Else the compiler could write accumulators between the fence and the products.
  __builtin_assume(kh > 0);
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
  // NOTE: in loops the compiler inserts groups of its own, so counting groups does not work.
  if constexpr (!TILE_UNROLLED) wgmma_wait<0>();
}

// Finishes a row after its products have completed. Columns from `columns` on are outside of the
// convolution and never win.
__device__ __forceinline__ void end_row(Accumulator& acc, Accumulator& cross, int column0,
                                        int columns) {
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

// Running maxima of a row of pooling windows, for the lane's two channels: windows 4·j + i % 4 of
// lane i.
using Pooled = float[COLUMNS / 8][2];

// Pools a row across: `take` gets j, and for both channels the maximum of the lane's two columns
// and the one before.
template <typename Take>
__device__ __forceinline__ void pool_across(const Accumulator& acc, const Take& take) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  float last[2] = {minus_infinity(), minus_infinity()};  // the odd column of the previous eight
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    float found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even = acc[4 * j + 2 * half], odd = acc[4 * j + 2 * half + 1];
      // Pass the odd column to the lane with the next two columns; the last of four passes to the
      // first, which has columns of the next eight.
      const float given = quarter == 3 ? last[half] : odd;
      const float before = __shfl_sync(0xffffffffu, given, lane - quarter + (quarter + 3) % 4);
      last[half] = odd;
      found[half] = larger(larger(even, odd), before);
    }
    take(j, found[0], found[1]);
  }
}

// The bits of a pair of 16-bit values.
__device__ __forceinline__ unsigned bits_of(__half2 pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned bits_of(__nv_bfloat162 pair) {
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Writes a lane's windows.
template <typename T>
struct Writer {
  T* first;      // the lane's first window of output row 0, at its channel
  int rooms[2];  // output columns from there on; 0 for a channel that does not exist
  bool shared;   // whether the tile to the left writes the first window
  float least;   // zero for ReLU, else −∞
  size_t row;    // elements
  int advance;   // elements from a lane's window to its next

  __device__ __forceinline__ Writer(const ConvShape& p, const Task& task, const Share& share,
                                    int column0, int warp_channel, T* out) {
    const int lane = threadIdx.x % 32, group = lane / 4, column = column0 / 2 + lane % 4;
    // In 16-bit storage a lane writes two adjacent channels.
    const int channel = warp_channel + (sizeof(T) == 2 && group % 2 ? 7 + group : group);
    row = (size_t)task.columns * p.o, advance = 4 * p.o;
    first = out + (size_t)share.image * task.rows * row + ((size_t)column * p.o + channel);
    const int room = task.columns - column;
    rooms[0] = channel < p.o ? room : 0, rooms[1] = channel + 8 < p.o ? room : 0;
    shared = column0 > 0 && lane % 4 == 0;
    least = p.relu ? 0.0f : minus_infinity();
  }

  // Writes window j of the lane at `pixel`. Rounding and ReLU are monotonic, so they may follow
  // pooling.
  __device__ __forceinline__ void write(T* pixel, const int (&rooms)[2], int j, float low,
                                        float high) const {
    const bool own = j > 0 || !shared;
    if constexpr (sizeof(T) == 2) {
      // Exchange with a neighbour: channels i and i + 8 become two adjacent channels.
      const unsigned mine = bits_of(larger(pair_of<T>(low, high), pair_of<T>(least, least)));
      const unsigned other = __shfl_xor_sync(0xffffffffu, mine, 4);
      const unsigned both = threadIdx.x / 4 % 2 ? __byte_perm(other, mine, 0x7632)
                                                : __byte_perm(mine, other, 0x5410);
      if (own && 4 * j < rooms[0]) *reinterpret_cast<unsigned*>(pixel) = both;
    } else {
      if (own && 4 * j < rooms[0]) pixel[0] = to_output(larger(low, least));
      if (own && 4 * j < rooms[1]) pixel[8] = to_output(larger(high, least));
    }
  }
};

// NOTE: `x` is not __restrict__, or the compiler could read what the previous launch still writes
// ahead of the wait. `steps`: K steps per window row. `ring`: lines of the image in shared memory.
// `weight`: [channel tiles][kh][steps][halves] of two core-matrix columns of 64 channels by 16
// bytes.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_maxpool2d_few_channels_wgmma(const STORAGE* x,
                                    const STORAGE* __restrict__ weight,
                                    const float* __restrict__ bias, STORAGE* __restrict__ out,
                                    const ConvShape p, const Task task, const int steps,
                                    const int ring) {
  extern __shared__ __align__(128) unsigned char shared[];
  // mbarriers, a full/empty pair for even and one for odd turns: `full` when the turn's lines have
  // been written, `empty` when all consumer warps have read the lines that only turns so far
  // needed.
  const unsigned barriers = shared_address(shared);
  const unsigned weights = barriers + 128;
  const unsigned lines = weights + p.kh * steps * STEP_BYTES;
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
    mbarrier_init_fence();
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
  fence_async_proxy();  // wgmma reads them
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  acquire_registers<CONSUMER_REGISTERS>();

  Writer<STORAGE> writer(p, task, share, column0, warp_channel, out);
  Pooled best;  // of the row of windows that the next turn completes
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) best[j][0] = best[j][1] = minus_infinity();
  // A turn's two rows: one is pooled while the other is multiplied.
  Accumulator upper, upper_cross, lower, lower_cross;
  // Valid columns in a row of the convolution: none past its last row.
  const auto columns_of = [&](int row) { return row < p.oh ? p.ow : 0; };
  // Pools the lower row of the turn before `at`, which completes an output row except for the first
  // turn.
  const auto pool_lower = [&](int at) {
    end_row(lower, lower_cross, column0, columns_of(at * ROWS - 1));
    STORAGE* pixel = writer.first + (at - 1) * (long long)writer.row;
    // Hidden from the compiler, which would otherwise keep one predicate per window across all
    // turns.
    int rooms[2] = {at > share.strip ? writer.rooms[0] : 0, at > share.strip ? writer.rooms[1] : 0};
    asm volatile("" : "+r"(rooms[0]), "+r"(rooms[1]));
    pool_across(lower, [&](int j, float low, float high) {
      writer.write(pixel, rooms, j, larger(best[j][0], low), larger(best[j][1], high));
      pixel += writer.advance;
      best[j][0] = low, best[j][1] = high;
    });
  };

  wait_for_previous_launch();  // which may still read the memory of `out`
  int turn = 0, slot0 = 0;  // slot of the turn's first line
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
    const int at = share.begin + turn;  // turn within the image
    issue_row(upper, upper_cross, of, slot0);
    pool_lower(at);
    start(lower, lower_cross, of);
    issue_row(lower, lower_cross, of, slot0 + STRIDE);
    wgmma_wait<1>();  // the upper row has completed
    end_row(upper, upper_cross, column0, columns_of(at * ROWS));
    pool_across(upper, [&](int j, float low, float high) {
      best[j][0] = larger(best[j][0], low), best[j][1] = larger(best[j][1], high);
    });
    start(upper, upper_cross, of);
    if (turn + 1 < turns) mbarrier_wait(full(turn + 1), (turn + 1) / 2 & 1);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(empty(turn));
    // Advance to the lines of the next turn.
    slot0 += ROWS * STRIDE;
    if (slot0 >= ring) slot0 -= ring;
  }
  pool_lower(share.end);
}
