// Convolution of e4m3 images with few channels under 7×7 windows, fused with max-pooling, on Hopper's
// tensor cores (wgmma). The image is NCHW, in e4m3 or float32; float32 is rounded to e4m3 first
// (stem_image.cuh). Writes NHWC.
//
// Rows of A are 64 channels, rows of B the columns of one row of the convolution, K the 8 pixels
// (of 4 bytes) that a row of the window covers; the first of them is outside of the window and has
// the weight 0. So one wgmma multiplies one row of the window. A CTA works down a strip (strips.cuh):
// 1. A producer warpgroup reads the image's lines, makes e4m3 numbers of them, and writes these into
//    a ring in shared memory, four lines per stage, four pixels per thread and line.
// 2. A consumer warpgroup multiplies the turn's two rows and pools each one. Its weights stay in
//    registers, so that shared memory is read for B alone. There is no room for a second
//    accumulator: the SM's other CTA multiplies while this one pools.
// 3. Only pooled sums are scaled and stored: multipliers are positive and every step keeps order, so
//    the largest sum becomes the largest number. The numbers go through shared memory to be written
//    16 channels at a time.
//
// B without im2col: a chunk of 16 bytes of K holds four pixels. Windows of every other column begin
// four pixels apart, so the second chunk of a column is the first of the next but one. A line has
// two copies: for even columns as it is, for odd columns moved by two pixels. Rows of B are the even
// columns, then the odd ones. Eight columns are a core matrix of the layout without swizzle; a group
// has one chunk more, the second one of its last column, so that groups can be anywhere:
//
//   group of 144 bytes: chunks c, c + 1, …, c + 7 of its columns, and chunk c + 8
//
// NaN: 0 times NaN is NaN, and the pixel outside of the window would spoil the sum. So producers
// replace each pixel that has a NaN by zeros, and leave a bit of it behind the lines of the stage.
// Consumers of a marked stage make NaN of the sums whose windows hold such a pixel. Weights are
// finite, or every output of their channel is NaN anyway.
//
// Turn t makes pooled row t of rows 2t − 1 to 2t + 1 of the convolution: lines 4t − 5 to 4t + 5.
// Stage s has lines 4s + 2 to 4s + 5. So row 2t reads the last line of stage t − 2, all of t − 1 and
// half of t; row 2t + 1 all but the first line of t − 1, and all of t.
//
// Sums are not promoted: they have 7·7 products for each channel, at 13 bits of fraction.
//
// Constraints: sm_90a; windows of 7×7, stride 2, padding 3; at most 4 channels; output channels in
// sixteens; pooling 3×3 with stride 2 and padding 1.
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "float8/stem_image.cuh"
#include "float8/wgmma_registers.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/tma.cuh"
#include "mma/transposed_matrices.cuh"
#include "stem/strips.cuh"

constexpr int WINDOW = 7, PADDING = 3;
constexpr int COLUMNS = TILE_M / ROWS;   // per row of the convolution
constexpr int HALF = COLUMNS / 2;        // even columns; pooled columns
constexpr int GROUPS = HALF / 8;         // of eight even columns
constexpr int GROUP_BYTES = 9 * 16;
constexpr int ODD_BYTES = GROUPS * GROUP_BYTES;  // where the copy for odd columns begins
constexpr int LINE_BYTES = 2 * ODD_BYTES;
constexpr int STAGE_LINES = ROWS * STRIDE;
// Behind a stage's lines: for each line a byte per quad, whose bits say which pixels are NaN. The last
// bytes of the first line's are the marks: for each producer warp, whether it has set any bit.
constexpr int NANS = STAGE_LINES * LINE_BYTES, LINE_NANS = 64, MARKS = NANS + 60;
constexpr int STAGE_BYTES = NANS + STAGE_LINES * LINE_NANS;
constexpr int STAGES = 6;
constexpr int CONSUMERS = 128, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
constexpr int QUADS = HALF + 2;          // fours of pixels per line
constexpr int LINE_THREADS = 64;         // producer threads per line
constexpr int OWN_LINES = STAGE_LINES * LINE_THREADS / PRODUCERS;  // of a stage, per thread
constexpr int AHEAD = 3;                 // stages that a producer thread reads ahead of writing
// Unroll factor of the read-ahead loops. Only pixels kept in registers need constant indices;
// float32 pixels wait in shared memory.
constexpr int UNROLLED = TILE_IMAGE == IMAGE_FLOAT32 ? 1 : AHEAD;
constexpr int STORED = (GROUPS + 3) / 4 * 4;   // matrices that stmatrix writes, in fours
constexpr int STAGING_BYTES = STORED * 8 * 16;  // per warp

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K == 32, "a row of the window is one wgmma");
static_assert(HALF % 8 == 0, "columns come in core matrices of eight even or odd ones");
static_assert(QUADS <= LINE_THREADS, "a producer thread reads one quad of a line");
static_assert(QUADS + PRODUCERS / 32 <= LINE_NANS, "marks follow the bytes of a line's quads");
static_assert(POOL, "this kernel always pools");
static_assert(STAGES >= 4, "a turn reads three stages, and producers need one more");

using Sums = float[COLUMNS / 2];  // of a thread; layout in hopper/wgmma.cuh

// Registers per thread (setmaxnreg): producers release theirs to the consumers.
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 184;
static_assert(TILE_BLOCKS == 2, "two CTAs share an SM");
static_assert(PRODUCER_REGISTERS + CONSUMER_REGISTERS <= 2 * 128,
              "the two warpgroups have 128 registers per thread on average");

// Loses against every sum.
__device__ __forceinline__ float least() { return __int_as_float(0xFF800000); }

// The larger number; NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}

// A place in the ring of stages.
struct Place {
  int slot = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};

// -- producers ---------------------------------------------------------------------------------

__device__ __forceinline__ void store_words(unsigned address, unsigned a, unsigned b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_words(unsigned address, unsigned a, unsigned b, unsigned c,
                                            unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Where a chunk is stored: in its group, and also at the end of the group before it if it is the
// first of a group.
struct ChunkPlace {
  unsigned offset;
  bool own, before;

  __device__ __forceinline__ explicit ChunkPlace(int chunk)
      : offset(chunk / 8 * GROUP_BYTES + chunk % 8 * 16),
        own(chunk >= 0 && chunk < HALF),
        before(chunk > 0 && chunk <= HALF && chunk % 8 == 0) {}
};

// Writes a quad into both copies of the line at `line`. Half of it is in the odd columns' chunk of
// the same index, half in the chunk before.
__device__ __forceinline__ void store_quad(unsigned line, const Quad& pixels,
                                           const ChunkPlace& even, const ChunkPlace& odd) {
  const unsigned at = line + even.offset, left = line + ODD_BYTES + odd.offset + 8;
  if (even.own) {
    store_words(at, pixels[0], pixels[1], pixels[2], pixels[3]);
    store_words(at + ODD_BYTES, pixels[2], pixels[3]);
  }
  if (even.before) {
    store_words(at - 16, pixels[0], pixels[1], pixels[2], pixels[3]);
    store_words(at + ODD_BYTES - 16, pixels[2], pixels[3]);
  }
  if (odd.own) store_words(left, pixels[0], pixels[1]);
  if (odd.before) store_words(left - 16, pixels[0], pixels[1]);
}

__device__ __forceinline__ void store_byte(unsigned address, unsigned byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}

// -- consumers ---------------------------------------------------------------------------------

// Descriptor of a line's columns: 144 bytes from one group of eight to the next, 16 from one chunk of
// K to the next. `line`: its address in units of 16 bytes.
__device__ __forceinline__ unsigned long long columns_at(unsigned line) {
  return (unsigned long long)(GROUP_BYTES / 16) << 32 | 1u << 16 | line;
}

// Makes the compiler treat the sums as read and written here. It does not know that `wgmma` writes
// them asynchronously, and would move reads ahead of the wait.
__device__ __forceinline__ void touch_sums(Sums& sums) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

constexpr unsigned LINE = LINE_BYTES / 16;

// A line of the ring: its stage, as descriptors have addresses, and its number in it.
struct Line {
  unsigned stage;
  int number;
};

__device__ __forceinline__ unsigned load_pair(unsigned address) {
  unsigned short found;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(address) : "memory");
  return found;
}

// Makes NaN of the sums of windows that hold a NaN. Column 2e reads of quad e all pixels but the
// first, and quad e + 1; column 2e + 1 of quad e the last, e + 1, and of e + 2 the first two.
__device__ __forceinline__ void spread_nans(Sums& sums, const Line (&lines)[WINDOW]) {
  const int lane = threadIdx.x % 32;
  unsigned pair = 0;  // of quads 2·lane and the next, a byte each
#pragma unroll
  for (int r = 0; r < WINDOW; ++r) {
    pair |= load_pair(lines[r].stage * 16 + NANS + lines[r].number * LINE_NANS + 2 * lane);
  }
  const float nan = __int_as_float(0x7FFFFFFF);
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    const int from = 4 * j + lane % 4;
    const unsigned low = __shfl_sync(0xffffffffu, pair, from);
    const unsigned high = __shfl_sync(0xffffffffu, pair, from + 1);
    const unsigned quads = low & 0xFFFF | high << 16;
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) {
      const int next = i % 2 * 8;  // bits of a quad
      if (quads & 0x0F0Eu << next) sums[i] = nan;
      if (quads & 0x030F08u << next) sums[i + 4 * GROUPS] = nan;
    }
  }
}

// A consumer thread's share of the weights.
using Weights = unsigned[WINDOW][4];

// Sums of a row of the convolution, without bias. Columns from `columns` on are outside of it and
// never win. `marked`: whether a stage of the lines has NaN.
__device__ __forceinline__ void multiply_row(Sums& sums, const Weights& weights,
                                             const Line (&lines)[WINDOW], bool marked, int column0,
                                             int columns) {
  const auto columns_of = [&](int r) {
    return columns_at(lines[r].stage + lines[r].number * LINE);
  };
  touch_sums(sums);
  wgmma_fence();
  e4m3_registers_begin<COLUMNS>(sums, weights[0], columns_of(0));
#pragma unroll
  for (int r = 1; r < WINDOW; ++r) e4m3_registers<COLUMNS>(sums, weights[r], columns_of(r));
  wgmma_commit();
  wgmma_wait<0>();
  touch_sums(sums);
  if (marked) spread_nans(sums, lines);
  if (column0 + COLUMNS <= columns) return;
  const int own = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const int row = i / 4 * 8 + i % 2 + own;  // of B
    const int column = row < HALF ? 2 * row : 2 * (row - HALF) + 1;
    if (column0 + column >= columns) sums[i] = least();
  }
}

// Row 2t, of stages t − 2 to t.
__device__ __forceinline__ void multiply_upper(Sums& sums, const Weights& weights, unsigned first,
                                               unsigned second, unsigned third, bool marked,
                                               int column0, int columns) {
  const Line lines[WINDOW] = {{first, 3},  {second, 0}, {second, 1}, {second, 2},
                              {second, 3}, {third, 0},  {third, 1}};
  multiply_row(sums, weights, lines, marked, column0, columns);
}

// Row 2t + 1, of stages t − 1 and t.
__device__ __forceinline__ void multiply_lower(Sums& sums, const Weights& weights, unsigned second,
                                               unsigned third, bool marked, int column0,
                                               int columns) {
  const Line lines[WINDOW] = {{second, 1}, {second, 2}, {second, 3}, {third, 0},
                              {third, 1},  {third, 2},  {third, 3}};
  multiply_row(sums, weights, lines, marked, column0, columns);
}

// The largest sums of a lane's windows 8·j + 2·(i % 4) and the next, for its two channels:
// [j][channel][window].
using Windows = float[GROUPS][2][2];

// Pools a row across: `take` gets j and the largest sums of both windows for both channels.
template <typename Take>
__device__ __forceinline__ void pool_across(const Sums& sums, const Take& take) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  float last[2] = {least(), least()};  // the last column of the previous sixteen
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    float found[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Four adjacent columns.
      const int i = 4 * j + 2 * half, odd = i + 4 * GROUPS;
      const float c0 = sums[i], c1 = sums[odd], c2 = sums[i + 1], c3 = sums[odd + 1];
      // Pass the last one to the lane with the next four; the last lane of four passes to the first,
      // which has columns of the next sixteen.
      const float given = quarter == 3 ? last[half] : c3;
      const float before = __shfl_sync(0xffffffffu, given, lane - quarter + (quarter + 3) % 4);
      last[half] = c3;
      found[half][0] = larger(larger(before, c0), c1);
      found[half][1] = larger(larger(c1, c2), c3);
    }
    take(j, found);
  }
}

// Scales and writes the pooled rows of a warp: 16 channels of up to HALF windows. The lane has
// channels 2·(i / 4) and the next of them.
struct Writer {
  unsigned staging;       // in shared memory, 16 bytes per window
  unsigned char* first;   // the lane's window of output row 0; its second one is 32 further
  int windows;            // of the tile that are inside of the output; 0 if the channels are not
  int begin;              // 1 if the tile to the left writes the first window
  size_t row;             // bytes of an output row
  int advance;            // bytes of 32 windows
  float multiplier[2], bias[2];
  bool clamps;

  __device__ __forceinline__ float number(float sum, int channel) const {
    const float found = fmaf(sum, multiplier[channel], bias[channel]);
    return clamps ? relu(found) : found;
  }

  // Both windows of both channels, as two rows of 16-bit elements.
  __device__ __forceinline__ unsigned pack(const float (&sums)[2][2]) const {
    const unsigned one = to_e4m3_pair(number(sums[0][0], 0), number(sums[1][0], 1));
    const unsigned two = to_e4m3_pair(number(sums[0][1], 0), number(sums[1][1], 1));
    return one | two << 16;
  }

  __device__ __forceinline__ void write(const unsigned (&packed)[STORED], int turn) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the lanes have read the row before
#pragma unroll
    for (int j = 0; j < STORED; j += 4) {
      const unsigned four[4] = {packed[j], packed[j + 1], packed[j + 2], packed[j + 3]};
      store_transposed(staging + (j * 8 + lane) * 16, four);
    }
    // wgmma reads none of this, but orders by proxy are stated for all of shared memory.
    fence_async_proxy();
    __syncwarp();
    unsigned char* const at = first + turn * row;
#pragma unroll
    for (int i = 0; i < (HALF + 31) / 32; ++i) {
      const int window = lane + 32 * i;
      if (window >= begin && window < windows) {
        uint4 channels;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(channels.x), "=r"(channels.y), "=r"(channels.z), "=r"(channels.w)
                     : "r"(staging + window * 16)
                     : "memory");
        *reinterpret_cast<uint4*>(at + i * advance) = channels;
      }
    }
  }
};

// NOTE: `x` is not __restrict__, or the compiler could read what the previous launch still writes
// ahead of the wait. `weight`: [channel tiles][rows of the window][threads][registers].
// `scale`: of float32, else null.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
sconv2d_maxpool2d_few_channels_wgmma(const unsigned char* x, const uint4* __restrict__ weight,
                                     const float* __restrict__ bias,
                                     const float* __restrict__ multiplier,
                                     const float* __restrict__ scale,
                                     unsigned char* __restrict__ out, const ConvShape p,
                                     const Task task) {
  extern __shared__ __align__(128) unsigned char shared[];
  // mbarriers, a full/empty pair per slot of the ring: `full` when a stage has been written, `empty`
  // when all consumer warps have read it.
  const unsigned barriers = shared_address(shared);
  // NOTE: memcheck takes an operand of `wgmma` for one piece. Behind the lines there must be memory.
  const unsigned lines = barriers + 128;
  const unsigned staging = lines + STAGES * STAGE_BYTES;
  const unsigned image_memory = staging + CONSUMERS / 32 * STAGING_BYTES;  // of the image's reader
  const auto full = [&](int slot) { return barriers + slot * 16; };
  const auto empty = [&](int slot) { return barriers + slot * 16 + 8; };

  constexpr int ADVANCE = COLUMNS - 2;  // columns of the convolution from one tile to the next
  const int column_tiles = max((2 * task.columns - 2 + ADVANCE - 1) / ADVANCE, 1);
  const Share share = share_of(p, task, column_tiles);
  const int column0 = share.tile * ADVANCE;

  launch_dependents();
  for (int i = threadIdx.x; i < STAGES * STAGE_LINES * LINE_NANS / 4; i += THREADS) {
    constexpr int WORDS = STAGE_LINES * LINE_NANS / 4;  // of a stage: nothing is NaN yet
    const unsigned at = lines + i / WORDS * STAGE_BYTES + NANS + i % WORDS * 4;
    asm volatile("st.shared.b32 [%0], 0;" ::"r"(at) : "memory");
  }
  // wgmma reads none of them, but orders by proxy are stated for all of shared memory.
  fence_async_proxy();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(full(slot), PRODUCERS);
      mbarrier_init(empty(slot), CONSUMERS / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMERS) {
    release_registers<PRODUCER_REGISTERS>();
    const int index = threadIdx.x - CONSUMERS;
    const int quad = index % LINE_THREADS, line0 = index / LINE_THREADS;
    const ImageReader<AHEAD, OWN_LINES, PRODUCERS> reader(
        x, scale, image_memory, share.image, p, column0 * STRIDE - (PADDING + 1) + 4 * quad,
        index);
    const ChunkPlace even(quad), odd(quad - 1);
    // The first stage is two before that of the first turn. A thread has every other line.
    const int stages = share.end - share.strip + 2;
    const int top = (share.strip - 2) * STAGE_LINES + STRIDE + line0;
    const auto line_of = [&](int stage, int i) {
      return top + stage * STAGE_LINES + i * (STAGE_LINES / OWN_LINES);
    };
    RawQuad raw[AHEAD][OWN_LINES];
    const auto read = [&](int ahead, int stage) {
      if (quad < QUADS && stage < stages) {
#pragma unroll
        for (int i = 0; i < OWN_LINES; ++i) {
          reader.read(raw[ahead][i], ahead * OWN_LINES + i, line_of(stage, i));
        }
      }
      reader.commit();
    };
    wait_for_previous_launch();
#pragma unroll UNROLLED
    for (int i = 0; i < AHEAD; ++i) read(i, i);
    const int producer_warp = index / 32;
    unsigned dirty = 0;  // a bit for each slot in which this warp has left bits of NaN
    Place place;
#pragma unroll 1
    for (int stage0 = 0; stage0 < stages; stage0 += AHEAD) {
#pragma unroll UNROLLED
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        const int stage = stage0 + ahead;
        if (stage >= stages) break;
        if (stage >= STAGES) mbarrier_wait(empty(place.slot), place.phase ^ 1);
        reader.wait();
        const unsigned to = lines + place.slot * STAGE_BYTES;
        const auto own_line = [&](int i) { return line0 + i * (STAGE_LINES / OWN_LINES); };
        Quad pixels[OWN_LINES] = {};
        bool nan = false;
        if (quad < QUADS) {
#pragma unroll
          for (int i = 0; i < OWN_LINES; ++i) {
            reader.convert(pixels[i], raw[ahead][i], ahead * OWN_LINES + i);
            nan = nan || has_nan(pixels[i]);
          }
        }
        const bool marks = __any_sync(0xffffffffu, nan);
        if (marks || (dirty >> place.slot & 1)) {
          dirty = dirty & ~(1u << place.slot) | (unsigned)marks << place.slot;
          if (quad < QUADS) {
#pragma unroll
            for (int i = 0; i < OWN_LINES; ++i) {
              store_byte(to + NANS + own_line(i) * LINE_NANS + quad, take_nan(pixels[i]));
            }
          }
          if (index % 32 == 0) store_byte(to + MARKS + producer_warp, marks);
        }
        if (quad < QUADS) {
#pragma unroll
          for (int i = 0; i < OWN_LINES; ++i) {
            store_quad(to + own_line(i) * LINE_BYTES, pixels[i], even, odd);
          }
        }
        fence_async_proxy();  // wgmma reads them
        mbarrier_arrive(full(place.slot));
        read(ahead, stage + AHEAD);
        place.advance();
      }
    }
    return;
  }

  acquire_registers<CONSUMER_REGISTERS>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_channel = share.channel0 + warp * 16;
  Weights weights;
#pragma unroll
  for (int r = 0; r < WINDOW; ++r) {
    const uint4 four = weight[(share.channel0 / TILE_N * WINDOW + r) * CONSUMERS + threadIdx.x];
    weights[r][0] = four.x, weights[r][1] = four.y;
    weights[r][2] = four.z, weights[r][3] = four.w;
  }
  Writer writer;
  writer.staging = staging + warp * STAGING_BYTES;
  writer.row = (size_t)task.columns * p.o;
  writer.first = out + (size_t)share.image * task.rows * writer.row +
                 (size_t)(column0 / 2 + lane) * p.o + warp_channel;
  writer.windows = warp_channel < p.o ? min(task.columns - column0 / 2, HALF) : 0;
  writer.begin = column0 > 0;
  writer.advance = 32 * p.o;
  writer.clamps = p.relu;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int channel = warp_channel + 2 * (lane / 4) + i;
    writer.bias[i] = channel < p.o ? bias[channel] : 0.0f;
    writer.multiplier[i] = channel < p.o ? multiplier[channel] : 0.0f;
  }
  wait_for_previous_launch();  // which may still read the memory of `out`

  Sums sums;
  Windows best;  // of the output row that the next lower row completes
  // Valid columns in a row of the convolution: none past its last row.
  const auto columns_of = [&](int row) { return row < p.oh ? p.ow : 0; };
  Place arriving, leaving;
  unsigned recent = 0;  // the last bits: whether these stages have NaN
  // The address of the next stage in units of 16 bytes, as descriptors have it.
  const auto next_stage = [&] {
    mbarrier_wait(full(arriving.slot), arriving.phase);
    const unsigned address = lines + arriving.slot * STAGE_BYTES;
    unsigned marks;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(marks) : "r"(address + MARKS) : "memory");
    recent = recent << 1 | (marks != 0);
    arriving.advance();
    return (address & 0x3FFFF) / 16;
  };
  unsigned first = next_stage(), second = next_stage();
  if (share.strip > 0) {
    multiply_lower(sums, weights, first, second, recent & 3, column0,
                   columns_of(share.strip * ROWS - 1));
  } else {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = least();
  }
  const auto keep = [&](int j, const float(&found)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) best[j][i / 2][i % 2] = found[i / 2][i % 2];
  };
  pool_across(sums, keep);
#pragma unroll 1
  for (int turn = share.strip; turn < share.end; ++turn) {
    const unsigned third = next_stage();
    multiply_upper(sums, weights, first, second, third, recent & 7, column0,
                   columns_of(turn * ROWS));
    if (lane == 0) mbarrier_arrive(empty(leaving.slot));  // only the upper row reads the first
    leaving.advance();
    const auto largest_of = [&](int j, const float(&found)[2][2], float(&largest)[2][2]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest[i / 2][i % 2] = larger(best[j][i / 2][i % 2], found[i / 2][i % 2]);
      }
    };
    pool_across(sums, [&](int j, const float(&found)[2][2]) { largest_of(j, found, best[j]); });
    multiply_lower(sums, weights, second, third, recent & 3, column0,
                   columns_of(turn * ROWS + 1));
    unsigned packed[STORED];
    pool_across(sums, [&](int j, const float(&found)[2][2]) {
      float largest[2][2];
      largest_of(j, found, largest);
      packed[j] = writer.pack(largest);
      keep(j, found);
    });
#pragma unroll
    for (int j = GROUPS; j < STORED; ++j) packed[j] = 0;
    writer.write(packed, turn);
    first = second, second = third;
  }
}
