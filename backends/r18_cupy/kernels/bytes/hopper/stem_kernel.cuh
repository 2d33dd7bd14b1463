// The kernel of a stem over the layout of stem.cuh. Rows of A are 64 channels, rows of B the
// columns of one row of the convolution, K the 8 pixels (of 4 bytes) that a row of the window
// covers; the first of them is outside of the window and has the weight 0. So one wgmma multiplies
// one row of the window. A CTA works down a strip (strips.cuh):
// 1. A producer warpgroup reads the image's lines, makes bytes of them (stem_image.cuh), and writes
//    these into a ring in shared memory, four lines per stage, four pixels per thread and line.
// 2. A consumer warpgroup multiplies the turn's two rows and pools each one. Its weights stay in
//    registers, so that shared memory is read for B only. There is no room for a second
//    accumulator: the SM's other CTA multiplies while this one pools.
// 3. Only pooled sums are finished: multipliers are positive and every step keeps order, so the
//    largest sum becomes the largest number. The numbers go through shared memory to be written
//    16 channels at a time.
//
// Turn t makes pooled row t of rows 2t − 1 to 2t + 1 of the convolution: lines 4t − 5 to 4t + 5.
// Stage s has lines 4s + 2 to 4s + 5. So row 2t reads the last line of stage t − 2, all of t − 1
// and half of t; row 2t + 1 all but the first line of t − 1, and all of t.
//
// The including file defines
// - ImageReader, see bytes/stem_image.cuh.
// - Number, of a sum; Sums, a thread's; least(), which loses against every sum; larger(a, b).
// - Channels(p, bias, multiplier, channel): the epilogue's operands for a lane's two channels.
//   pack(sums): bytes of both channels of two windows, [channel][window], as two rows of 16-bit
//   elements.
// - multiply_lines(sums, weights, by, lines, noted): the products of a row.
// - Notes(index), of a producer thread: marks that a stage keeps for its pixels. clear(lines)
//   removes them before the first stage. take(pixels, stage, slot) marks a thread's quads, and may
//   change the pixels. any(stage) tells consumers whether a stage has marks.
#pragma once
#include "bytes/hopper/stem.cuh"
#include "bytes/stem_image.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "hopper/mbarrier.cuh"
#include "hopper/tma.cuh"
#include "mma/transposed_matrices.cuh"

// Unroll factor of the read-ahead loops. Only pixels kept in registers need constant indices;
// float32 pixels wait in shared memory.
constexpr int UNROLLED = TILE_IMAGE == IMAGE_FLOAT32 ? 1 : AHEAD;

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

// -- consumers ---------------------------------------------------------------------------------

// Sums of a row of the convolution. Columns from `columns` on are outside of it and never win.
__device__ __forceinline__ void multiply_row(Sums& sums, const Weights& weights, const Channels& by,
                                             const Line (&lines)[WINDOW], bool noted, int column0,
                                             int columns) {
  multiply_lines(sums, weights, by, lines, noted);
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
__device__ __forceinline__ void multiply_upper(Sums& sums, const Weights& weights,
                                               const Channels& by, unsigned first, unsigned second,
                                               unsigned third, bool noted, int column0,
                                               int columns) {
  const Line lines[WINDOW] = {{first, 3},  {second, 0}, {second, 1}, {second, 2},
                              {second, 3}, {third, 0},  {third, 1}};
  multiply_row(sums, weights, by, lines, noted, column0, columns);
}

// Row 2t + 1, of stages t − 1 and t.
__device__ __forceinline__ void multiply_lower(Sums& sums, const Weights& weights,
                                               const Channels& by, unsigned second, unsigned third,
                                               bool noted, int column0, int columns) {
  const Line lines[WINDOW] = {{second, 1}, {second, 2}, {second, 3}, {third, 0},
                              {third, 1},  {third, 2},  {third, 3}};
  multiply_row(sums, weights, by, lines, noted, column0, columns);
}

// The largest sums of a lane's windows 8·j + 2·(i % 4) and the next, for its two channels:
// [j][channel][window].
using Windows = Number[GROUPS][2][2];

// Pools a row across: `take` gets j and the largest sums of both windows for both channels.
template <typename Take>
__device__ __forceinline__ void pool_across(const Sums& sums, const Take& take) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  Number last[2] = {least(), least()};  // the last column of the previous sixteen
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    Number found[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Four adjacent columns.
      const int i = 4 * j + 2 * half, odd = i + 4 * GROUPS;
      const Number c0 = sums[i], c1 = sums[odd], c2 = sums[i + 1], c3 = sums[odd + 1];
      // Pass the last one to the lane with the next four; the last lane of four passes to the
      // first, which has columns of the next sixteen.
      const Number given = quarter == 3 ? last[half] : c3;
      const Number before = __shfl_sync(0xffffffffu, given, lane - quarter + (quarter + 3) % 4);
      last[half] = c3;
      found[half][0] = larger(larger(before, c0), c1);
      found[half][1] = larger(larger(c1, c2), c3);
    }
    take(j, found);
  }
}

// Writes the pooled rows of a warp: 16 channels of up to HALF windows. The lane has
// channels 2·(i / 4) and the next of them.
struct Writer {
  unsigned staging;       // in shared memory, 16 bytes per window
  unsigned char* first;   // the lane's window of output row 0; its second one is 32 further
  int windows;            // of the tile that are inside of the output; 0 if the channels are not
  int begin;              // 1 if the tile to the left writes the first window
  size_t row;             // bytes of an output row
  int advance;            // bytes of 32 windows

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
// `image_weight`: the table or scale of its reader, or null.
__device__ __forceinline__ void convolve_and_pool(const unsigned char* x, const uint4* weight,
                                                  const Number* bias, const float* multiplier,
                                                  const void* image_weight, unsigned char* out,
                                                  const ConvShape& p, const Task& task) {
  extern __shared__ __align__(128) unsigned char shared[];
  // mbarriers, a full/empty pair per slot of the ring: `full` when a stage has been written,
  // `empty` when all consumer warps have read it.
  const unsigned barriers = shared_address(shared);
  // NOTE: memcheck takes an operand of `wgmma` for one piece. Behind the lines there must be
  // memory.
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
  Notes::clear(lines);
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
    using Reader = ImageReader<AHEAD, PRODUCERS>;
    const Reader reader(
        x, image_weight, image_memory, share.image, p, column0 * STRIDE - (PADDING + 1) + 4 * quad,
        index);
    const ChunkPlace even(quad), odd(quad - 1);
    // The first stage is two before that of the first turn. A thread has every other line.
    const int stages = share.end - share.strip + 2;
    const int top = (share.strip - 2) * STAGE_LINES + STRIDE + line0;
    const auto line_of = [&](int stage, int i) {
      return top + stage * STAGE_LINES + i * (STAGE_LINES / OWN_LINES);
    };
    Reader::Raw raw[AHEAD][OWN_LINES];
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
    reader.begin();
    Notes notes(index);
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
        Quad pixels[OWN_LINES] = {};
        if (quad < QUADS) {
#pragma unroll
          for (int i = 0; i < OWN_LINES; ++i) {
            reader.convert(pixels[i], raw[ahead][i], ahead * OWN_LINES + i, line_of(stage, i));
          }
        }
        notes.take(pixels, to, place.slot);
        if (quad < QUADS) {
#pragma unroll
          for (int i = 0; i < OWN_LINES; ++i) {
            const int line = line0 + i * (STAGE_LINES / OWN_LINES);
            store_quad(to + line * LINE_BYTES, pixels[i], even, odd);
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
  const Channels by(p, bias, multiplier, warp_channel + 2 * (lane / 4));
  wait_for_previous_launch();  // which may still read the memory of `out`

  Sums sums;
  Windows best;  // of the output row that the next lower row completes
  // Valid columns in a row of the convolution: none past its last row.
  const auto columns_of = [&](int row) { return row < p.oh ? p.ow : 0; };
  Place arriving, leaving;
  unsigned recent = 0;  // the last bits: whether these stages have notes
  // The address of the next stage in units of 16 bytes, as descriptors have it.
  const auto next_stage = [&] {
    mbarrier_wait(full(arriving.slot), arriving.phase);
    const unsigned address = lines + arriving.slot * STAGE_BYTES;
    recent = recent << 1 | Notes::any(address);
    arriving.advance();
    return (address & 0x3FFFF) / 16;
  };
  unsigned first = next_stage(), second = next_stage();
  if (share.strip > 0) {
    multiply_lower(sums, weights, by, first, second, recent & 3, column0,
                   columns_of(share.strip * ROWS - 1));
  } else {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = least();
  }
  const auto keep = [&](int j, const Number(&found)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) best[j][i / 2][i % 2] = found[i / 2][i % 2];
  };
  pool_across(sums, keep);
#pragma unroll 1
  for (int turn = share.strip; turn < share.end; ++turn) {
    const unsigned third = next_stage();
    multiply_upper(sums, weights, by, first, second, third, recent & 7, column0,
                   columns_of(turn * ROWS));
    if (lane == 0) mbarrier_arrive(empty(leaving.slot));  // only the upper row reads the first
    leaving.advance();
    const auto largest_of = [&](int j, const Number(&found)[2][2], Number(&largest)[2][2]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest[i / 2][i % 2] = larger(best[j][i / 2][i % 2], found[i / 2][i % 2]);
      }
    };
    pool_across(sums, [&](int j, const Number(&found)[2][2]) { largest_of(j, found, best[j]); });
    multiply_lower(sums, weights, by, second, third, recent & 3, column0,
                   columns_of(turn * ROWS + 1));
    unsigned packed[STORED];
    pool_across(sums, [&](int j, const Number(&found)[2][2]) {
      Number largest[2][2];
      largest_of(j, found, largest);
      packed[j] = by.pack(largest);
      keep(j, found);
    });
#pragma unroll
    for (int j = GROUPS; j < STORED; ++j) packed[j] = 0;
    writer.write(packed, turn);
    first = second, second = third;
  }
}
