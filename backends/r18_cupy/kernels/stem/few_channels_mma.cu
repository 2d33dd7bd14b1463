// Convolution of images with few channels on tensor cores (mma.sync), optionally fused with
// max-pooling (POOL), whose input is then never stored. Reads NCHW, writes NHWC; fp16, bf16, tf32,
// or fp16x3 (TILE_SPLIT).
//
// A line is one row of a window in one channel. K runs over lines, and in each line over TAPS taps;
// taps outside of the window are masked to zero. Down a strip (strips.cuh), every turn
// 1. prefetches the next turn's patch of the image to shared memory by cp.async (two stages),
// 2. multiplies: lanes load A fragments directly from the patch, since the taps of a line are
//    adjacent in the image. Two 16-bit values are one word because the stride of 2 keeps lines at
//    even elements; adjacent outputs begin one or two words apart, so the lanes of a load touch
//    different banks or the same word,
// 3. adds the bias and writes ROWS rows, or pools in registers and writes the pooled row.
//
// A warp computes ROWS rows of WARP_COLUMNS outputs and TILE_N channels. The assignment of outputs
// to mma rows is free: rows i and i + 8 are adjacent outputs, and a lane's columns of GROUP mma
// tiles are adjacent channels, so a lane has pairs of columns to pool and writes 16 bytes at a
// time.
//
// Constraints: sm_80; horizontal stride 2; at most TAPS columns per window (7 of 16 bits with odd
// padding); weights, two patches and biases in shared memory.
#include "common/cp_async.cuh"
#include "stem/strips.cuh"
#include "mma/mma.cuh"
#include "common/pair.cuh"
#include "common/reduce.cuh"
#include "mma/split_products.cuh"
#include "common/vector.cuh"

constexpr int SIZE = sizeof(STORAGE);
constexpr int VALUES = 4 / sizeof(Operand);    // operand values per fragment register
constexpr int CHUNK = WIDTH<STORAGE>;         // elements per 16-byte copy
constexpr int TAPS = 8;                       // per line
// 16-byte runs per line, each half of an mma step.
constexpr int RUNS = TAPS * sizeof(Operand) / 16;
constexpr int STAGES = 2;  // patches in shared memory
constexpr int THREADS = 32 * TILE_WARPS;
constexpr int WARP_COLUMNS = TILE_M / (ROWS * TILE_WARPS);
constexpr int MMAS_M = WARP_COLUMNS / 16, MMAS_N = TILE_N / 8;  // mma tiles per row of the warp
// A pooling window also needs the column before its pair, which the warp to the left owns. It is
// recomputed here instead of exchanged, together with one more so that pairs stay pairs.
constexpr int ADVANCE = WARP_COLUMNS - (POOL ? 2 : 0);
constexpr int BLOCK_ADVANCE = TILE_WARPS * ADVANCE;
constexpr int BLOCK_COLUMNS = BLOCK_ADVANCE - ADVANCE + WARP_COLUMNS;
constexpr int PITCH_BYTES = PITCH * SIZE;
constexpr int CHUNKS = PITCH / CHUNK;
constexpr int GROUP = CHUNK / 2;                 // mma tiles per chunk of a lane's channels
constexpr int GROUPS = MMAS_N / GROUP;           // chunks of channels per lane
constexpr int STEP_CHUNKS = TILE_N * 2 * PARTS;  // 16-byte chunks of weights per mma step

static_assert(TILE_K * sizeof(Operand) == 32, "a step is one mma");
static_assert(TILE_M % (16 * ROWS * TILE_WARPS) == 0,
              "a warp multiplies whole mma tiles of 16 outputs");
static_assert(MMAS_N % 2 == 0, "weights of two tiles of 8 channels are loaded at once");
static_assert(MMAS_N % GROUP == 0, "a lane has whole chunks of channels");
static_assert(PITCH % CHUNK == 0, "lines are copied in whole chunks");
static_assert(PITCH >= (BLOCK_COLUMNS - 1) * STRIDE + TAPS + CHUNK - VALUES,
              "a line has the windows of every column, wherever in a chunk the first begins");

// Copies the patch's lines: `rows` rows of each channel, from row `top` and element `left`, with
// zeros outside of the image. By cp.async if image rows are whole chunks; otherwise chunks are
// neither aligned nor entirely inside or outside, and elements are loaded one at a time.
__device__ __forceinline__ void fetch(const STORAGE* image, const ConvShape& p, int rows, int top,
                                      int left, unsigned char* patch) {
  int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  int c = line / rows, row = line % rows;
  while (c < p.c) {
    const int y = top + row, z = left + chunk * CHUNK;
    // Unsigned comparisons: below zero is beyond the end.
    const bool inside = (unsigned)y < (unsigned)p.h;
    const unsigned source = (unsigned)(c * p.h + y) * p.w + z;  // wraps where it is not inside
    unsigned char* target = patch + line * PITCH_BYTES + chunk * 16;
    if (p.w % CHUNK == 0) {
      const bool valid = inside && (unsigned)z < (unsigned)p.w;
      cp_async<16>(shared_address(target), valid ? image + source : image, valid);
    } else {
      Run<STORAGE, CHUNK> run;
#pragma unroll
      for (int v = 0; v < CHUNK; ++v) {
        const bool valid = inside && (unsigned)(z + v) < (unsigned)p.w;
        run.at[v] = valid ? image[source + v] : from_float<STORAGE>(0.0f);
      }
      *reinterpret_cast<Run<STORAGE, CHUNK>*>(target) = run;
    }
    // Advance by steps, cheaper than dividing.
    line += THREADS / CHUNKS, row += THREADS / CHUNKS, chunk += THREADS % CHUNKS;
    if (chunk >= CHUNKS) chunk -= CHUNKS, ++line, ++row;
    for (; row >= rows; row -= rows) ++c;
  }
}

// All ones where the window has this tap of a line, else 0. The pixel next to the window may be
// infinite, so a zero weight alone would not remove it from the accumulator.
__device__ __forceinline__ unsigned tap_mask(const ConvShape& p, int lead, int tap) {
  return (unsigned)(tap - (lead - p.pw)) < (unsigned)p.kw ? 0xffffffffu : 0u;
}

// A lane's fragment addresses and masks.
struct Operands {
  const unsigned char* patch;  // at the lane's first output and tap
  const uint4* weights;        // [step][part][MMAS_N / 2][lane], at the lane
  const int2* runs;            // per step: offsets of its two runs in the patch
  unsigned low, high;          // masks of the runs' taps
};

// Fragment register i of A, for each half of the operands.
__device__ __forceinline__ void load(unsigned (&left)[PARTS][4], int i, const unsigned char* at,
                                     unsigned mask) {
  if constexpr (TILE_SPLIT) {
    const float2 pixels = *reinterpret_cast<const float2*>(at);
    const SplitPair pair = split(pixels.x, pixels.y);
    left[0][i] = pair.high & mask;
    left[PARTS - 1][i] = pair.low & mask;
  } else {
    left[0][i] = round_operand<STORAGE>(*reinterpret_cast<const unsigned*>(at) & mask);
  }
}

using Accumulator = float[ROWS][MMAS_M][MMAS_N][4];
constexpr int ACCUMULATORS = ROWS * MMAS_M * MMAS_N * 4;
constexpr int NEXT = STRIDE * SIZE;  // bytes of the patch from one output to the next

__device__ __forceinline__ void clear(Accumulator& acc) {
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; ++i) (&acc[0][0][0][0])[i] = 0.0f;
}

// acc = A·B from row FIRST on; `down` is the distance between rows in bytes of the patch.
template <int FIRST>
__device__ __forceinline__ void multiply(Accumulator& acc, const Operands& from, int steps,
                                         int down) {
  Accumulator cross;  // fp16x3: the cross products
  clear(acc);
  if constexpr (TILE_SPLIT) clear(cross);
  int2 next = from.runs[0];
#pragma unroll(TILE_SPLIT ? 1 : 2)
  for (int step = 0; step < steps; ++step) {
    const int2 run = next;
    next = from.runs[step + 1];  // past the last step: loaded, never used
    uint4 right[PARTS][MMAS_N / 2];
#pragma unroll
    for (int i = 0; i < PARTS * MMAS_N / 2; ++i) {
      (&right[0][0])[i] = from.weights[(step * (PARTS * MMAS_N / 2) + i) * 32];
    }
#pragma unroll
    for (int j = FIRST; j < ROWS; ++j) {
      const unsigned char* low = from.patch + j * down + run.x;
      const unsigned char* high = from.patch + j * down + run.y;
#pragma unroll
      for (int i = 0; i < MMAS_M; ++i, low += 16 * NEXT, high += 16 * NEXT) {
        unsigned left[PARTS][4];
        load(left, 0, low, from.low);
        load(left, 1, low + NEXT, from.low);
        load(left, 2, high, from.high);
        load(left, 3, high + NEXT, from.high);
        // Issue one product for all channels before the next: successive additions to the same
        // accumulator would stall.
#pragma unroll
        for (int product = 0; product < PRODUCTS; ++product) {
          const unsigned (&half)[4] = left[product / 2];
#pragma unroll
          for (int n = 0; n < MMAS_N; n += 2) {
            const uint4& pair = right[product % 2][n / 2];
            add_product(product, acc[j][i][n], cross[j][i][n], half, pair.x, pair.y);
            add_product(product, acc[j][i][n + 1], cross[j][i][n + 1], half, pair.z, pair.w);
          }
        }
      }
    }
  }
  if constexpr (TILE_SPLIT) add_cross<ACCUMULATORS>(&acc[0][0][0][0], &cross[0][0][0][0]);
}

// A lane's outputs: columns `column` + 16·i and the next for mma tile i; CHUNK channels from
// `channel`, and again every 4·CHUNK.
struct Lane {
  int index, column, channel;
  const float* bias;  // in shared memory, at `channel`
};

struct alignas(16) Chunk {
  Pair<STORAGE> at[GROUP];
};

// Two channels of an output, in columns of mma tile n, with their bias.
__device__ __forceinline__ Pair<STORAGE> finished(const float* acc, const Lane& lane, int n) {
  const float* at = lane.bias + n / GROUP * 4 * CHUNK + n % GROUP * 2;
  const float2 bias = *reinterpret_cast<const float2*>(at);
  return pair_of<STORAGE>(acc[0] + bias.x, acc[1] + bias.y);
}

// ReLU, rounding and store of a chunk of an output's channels, as far as they exist. Both are
// monotonic, so they may follow pooling.
__device__ __forceinline__ void write(const ConvShape& p, Chunk chunk, STORAGE* out, int channel) {
  if (p.relu) {
#pragma unroll
    for (int v = 0; v < GROUP; ++v) {
      chunk.at[v] = larger(chunk.at[v], pair_of<STORAGE>(0.0f, 0.0f));
    }
  }
#pragma unroll
  for (int v = 0; v < GROUP; ++v) chunk.at[v] = to_output(chunk.at[v]);
  if (p.o % CHUNK == 0) {
    if (channel < p.o) *reinterpret_cast<Chunk*>(out + channel) = chunk;
  } else {
#pragma unroll
    for (int v = 0; v < CHUNK; ++v) {
      if (channel + v < p.o) out[channel + v] = reinterpret_cast<const STORAGE*>(&chunk)[v];
    }
  }
}

// Writes rows of the convolution, from `row` on, without pooling; `image` is where the output's
// image begins.
__device__ __forceinline__ void write_rows(const Accumulator& acc, const ConvShape& p,
                                           const Lane& lane, int row, STORAGE* image) {
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    if (row + j >= p.oh) return;
#pragma unroll
    for (int i = 0; i < 2 * MMAS_M; ++i) {
      const int column = lane.column + i / 2 * 16 + i % 2;
      if (column >= p.ow) continue;
      STORAGE* at = image + (unsigned)((row + j) * p.ow + column) * p.o;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        Chunk chunk;
#pragma unroll
        for (int v = 0; v < GROUP; ++v) {
          const int n = group * GROUP + v;
          chunk.at[v] = finished(acc[j][i / 2][n] + i % 2 * 2, lane, n);
        }
        write(p, chunk, at, lane.channel + group * 4 * CHUNK);
      }
    }
  }
}

// The running maxima of a row of pooling windows: [columns of tile i][channels of tile n].
struct Pooled {
  Pair<STORAGE> at[MMAS_M * MMAS_N];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < MMAS_M * MMAS_N; ++i) {
      at[i] = pair_of<STORAGE>(minus_infinity(), minus_infinity());
    }
  }

  __device__ __forceinline__ void take(const Pooled& other) {
#pragma unroll
    for (int i = 0; i < MMAS_M * MMAS_N; ++i) at[i] = larger(at[i], other.at[i]);
  }

  // Merges a row of accumulators: for each window the lane's two columns and the one before.
  // Columns beyond the output never win.
  __device__ __forceinline__ void take(const float (&acc)[MMAS_M][MMAS_N][4], const ConvShape& p,
                                       const Lane& lane) {
    const Pair<STORAGE> lowest = pair_of<STORAGE>(minus_infinity(), minus_infinity());
#pragma unroll
    for (int n = 0; n < MMAS_N; ++n) {
      Pair<STORAGE> last = lowest;  // the second column of tile i − 1
#pragma unroll
      for (int i = 0; i < MMAS_M; ++i) {
        const unsigned column = lane.column + i * 16;  // below zero is beyond the end
        Pair<STORAGE> even = finished(acc[i][n], lane, n);
        Pair<STORAGE> odd = finished(acc[i][n] + 2, lane, n);
        if (column >= (unsigned)p.ow) even = lowest;
        if (column + 1 >= (unsigned)p.ow) odd = lowest;
        // Pass the odd column to the lane with the next columns, 4 lanes up. The last lanes pass to
        // the first ones, which hold columns of the next tile. The first lanes of tile 0 receive
        // nothing valid; their windows are not written.
        const Pair<STORAGE> given = i > 0 && lane.index >= 28 ? last : odd;
        const Pair<STORAGE> before = from_lane(given, (lane.index + 28) % 32);
        Pair<STORAGE>& best = at[i * MMAS_N + n];
        best = larger(best, larger(larger(even, odd), before));
        last = odd;
      }
    }
  }
};

// Writes an output row of `columns` columns that begins at `line`; the lane's first column is
// `column`.
__device__ __forceinline__ void write_pooled(const Pooled& pooled, const ConvShape& p,
                                             const Lane& lane, int columns, int column,
                                             STORAGE* line) {
#pragma unroll
  for (int i = 0; i < MMAS_M; ++i) {
    // The warp's first window lacks its left column; the warp to the left writes it.
    if (column + 8 * i >= columns || i == 0 && lane.index < 4) continue;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      Chunk chunk;
#pragma unroll
      for (int v = 0; v < GROUP; ++v) chunk.at[v] = pooled.at[i * MMAS_N + group * GROUP + v];
      write(p, chunk, line + (unsigned)(column + 8 * i) * p.o, lane.channel + group * 4 * CHUNK);
    }
  }
}

// Grid: see `share_of`. `steps`: K steps. `weight`: [channel tiles][steps][PARTS][MMAS_N / 2][32]
// chunks, in fragment order.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_few_channels_mma(const STORAGE* __restrict__ x, const Operand* __restrict__ weight,
                        const float* __restrict__ bias, STORAGE* __restrict__ out,
                        const ConvShape p, const Task task, const int steps,
                        const int patch_nbytes) {
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const weights = shared + STAGES * patch_nbytes;
  int2* const runs = reinterpret_cast<int2*>(weights + steps * STEP_CHUNKS * 16);
  float* const biases = reinterpret_cast<float*>(runs + (steps + 1) / 2 * 2);

  const int column_tiles = (task.columns * (POOL ? 2 : 1) + BLOCK_ADVANCE - 1) / BLOCK_ADVANCE;
  const Share share = share_of(p, task, column_tiles);
  // The column of the first accumulators.
  const int column0 = share.tile * BLOCK_ADVANCE - (POOL ? 1 + task.pw : 0);

  // Lines begin at an even element, or one before it, in a patch that begins at a whole chunk.
  const int lead = p.pw + p.pw % VALUES;
  const int left = (column0 * STRIDE - lead) & ~(CHUNK - 1);
  const int patch_rows = patch_rows_of(p);
  const STORAGE* const image = x + (size_t)share.image * p.c * p.h * p.w;
  const auto fetch_turn = [&](int turn, int stage) {
    const int top = (turn * ROWS + share.row0) * p.sh - p.ph;
    fetch(image, p, patch_rows, top, left, shared + stage * patch_nbytes);
  };

  const uint4* const packed = reinterpret_cast<const uint4*>(weight) +
                              (size_t)(share.channel0 / TILE_N) * steps * STEP_CHUNKS;
  for (int i = threadIdx.x; i < steps * STEP_CHUNKS; i += THREADS) {
    cp_async<16>(shared_address(weights + i * 16), packed + i, true);
  }
  fetch_turn(share.begin, 0);
  cp_async_commit();
  // Offsets of the runs of K in a patch; runs past the last line read the zeros behind the patch.
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < 2 * steps; i += THREADS) {
    const unsigned line = i / RUNS, c = line / p.kh, r = line % p.kh;
    const int at = c < p.c ? c * patch_rows + r : p.c * patch_rows;
    reinterpret_cast<int*>(runs)[i] = at * PITCH_BYTES + i % RUNS * 16;
  }
  for (int i = threadIdx.x; i < TILE_N; i += THREADS) {
    biases[i] = bias && share.channel0 + i < p.o ? bias[share.channel0 + i] : 0.0f;
  }
  const int lines_nbytes = p.c * patch_rows * PITCH_BYTES;
  for (int i = threadIdx.x * 16 + lines_nbytes; i < patch_nbytes; i += THREADS * 16) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      *reinterpret_cast<uint4*>(shared + stage * patch_nbytes + i) = make_uint4(0, 0, 0, 0);
    }
  }

  const int warp = threadIdx.x / 32, index = threadIdx.x % 32;
  const int across = warp * ADVANCE + index / 4 * 2;  // the lane's first column in the CTA
  const int channel = index % 4 * CHUNK;
  const Lane lane{index, column0 + across, share.channel0 + channel, biases + channel};
  const int shift = column0 * STRIDE - lead - left;
  const int at = (across * STRIDE + shift) * SIZE + index % 4 * VALUES * SIZE;
  Operands from{nullptr, reinterpret_cast<const uint4*>(weights) + index, runs};
  if constexpr (VALUES == 2) {
    const int tap = index % 4 * 2;
    from.low = tap_mask(p, lead, tap) & 0xffffu | tap_mask(p, lead, tap + 1) & 0xffff0000u;
    from.high = from.low;  // the same taps of the next line
  } else {
    from.low = tap_mask(p, lead, index % 4);
    from.high = tap_mask(p, lead, index % 4 + 4);
  }

  STORAGE* const result = out + (size_t)share.image * task.rows * task.columns * p.o;
  const int down = p.sh * PITCH_BYTES;
  Accumulator acc;
  Pooled best;  // of the row of windows that the next turn completes
  best.clear();
#pragma unroll 1
  for (int turn = share.begin; turn < share.end; ++turn) {
    const int stage = (turn - share.begin) % STAGES;
    cp_async_wait<0>();
    __syncthreads();  // this patch has arrived, the other one has been read
    if (turn + 1 < share.end) fetch_turn(turn + 1, 1 - stage);
    cp_async_commit();
    from.patch = shared + stage * patch_nbytes + at;
    const int row = turn * ROWS + share.row0;
    if constexpr (POOL) {
      Pooled below;
      below.clear();
      if (turn < share.strip) {
        multiply<1>(acc, from, steps, down);
      } else {
        multiply<0>(acc, from, steps, down);
        best.take(acc[0], p, lane);
      }
      if (row + 1 < p.oh) below.take(acc[1], p, lane);
      if (turn >= share.strip) {
        best.take(below);
        const int column = (share.tile * BLOCK_ADVANCE + across) / 2 - 1;
        STORAGE* const line = result + (unsigned)(turn * task.columns) * p.o;
        write_pooled(best, p, lane, task.columns, column, line);
      }
      best = below;
    } else {
      multiply<0>(acc, from, steps, down);
      write_rows(acc, p, lane, row, result);
    }
  }
}
