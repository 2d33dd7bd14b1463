// Implicit GEMM of integers on tensor cores (mma.sync). NHWC; uint8 or int8 images (IMAGE), weights
// of 8, 4 or 2 bits (BITS).
//
// Rows of A are output pixels, rows of B output channels. K runs over the window's rows, and in
// each over the `row` bytes that the window covers of an image row. In NHWC these are adjacent, so
// a position (r, e) of K is found without dividing by C. `row` is kw·C padded to whole 16-byte
// chunks; weights are packed the same way, [O][depth].
//
// 1. Tile t + TILE_STAGES − 1 is copied to shared memory by cp.async while tile t is multiplied. A
//    row of a tile is 128 bytes of K. Weights of 4 and 2 bits go through registers, where they
//    become bytes, as pixels do with GATHER.
// 2. Warps load fragments by ldmatrix and accumulate in int32 registers.
// 3. Accumulators go through shared memory so that rows are written in 16-byte chunks, with the
//    epilogue.
//
// The weights of the first stages are copied before the previous launch has ended.
//
// Swizzle: chunk c of row i is stored at c ^ i % 8, so both ldmatrix (chunk c of eight rows) and a
// quarter-warp's store (eight chunks of a row) touch all 32 banks once.
//
// Constraints: sm_80; C a multiple of 16 unless GATHER; O a multiple of 16.
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/epilogue.cuh"
#include "common/vector.cuh"
#include "integers/epilogue.cuh"
#include "integers/mma.cuh"
#include "integers/narrow_weights.cuh"
#include "mma/mma.cuh"

constexpr int CHUNK = 16;  // bytes per copy
constexpr int CHUNKS = 8;  // per row of a tile
constexpr int ROW_BYTES = CHUNKS * CHUNK;
constexpr int STEPS = ROW_BYTES / 32;  // mma steps per tile
constexpr int THREADS = 32 * TILE_WARPS_M * TILE_WARPS_N;
constexpr int WARP_M = TILE_M / TILE_WARPS_M, WARP_N = TILE_N / TILE_WARPS_N;
constexpr int MMAS_M = WARP_M / 16, MMAS_N = WARP_N / 8;  // mma tiles per warp
constexpr int LANES = THREADS / CHUNKS;                   // rows that the CTA copies at once
constexpr int ROWS_A = TILE_M / LANES, ROWS_B = TILE_N / LANES;
constexpr int BYTES_A = TILE_M * ROW_BYTES, STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES;
// Eight columns of padding: the rows of an mma tile begin 8 banks apart when accumulators are
// stored.
constexpr int PITCH = TILE_N + 8;
constexpr int GROUPS = TILE_N / CHUNK;      // chunks per row of outputs
constexpr int ROWS_OUT = THREADS / GROUPS;  // rows that the CTA writes at once
constexpr int ROUNDS = (TILE_M + ROWS_OUT - 1) / ROWS_OUT;
constexpr int BATCH = ROUNDS < 4 ? ROUNDS : 4;  // residual chunks that a thread loads at once

static_assert(BITS == 8 || BITS == 4 || BITS == 2, "weights have 8, 4 or 2 bits");
static_assert(TILE_K == ROW_BYTES, "a row of a tile is 128 bytes, all 32 banks");
static_assert(TILE_M % (16 * TILE_WARPS_M) == 0, "a warp multiplies whole mma tiles of 16 pixels");
static_assert(TILE_N % (16 * TILE_WARPS_N) == 0,
              "ldmatrix loads two mma tiles of 8 channels at once");
static_assert(TILE_M % LANES == 0 && TILE_N % LANES == 0, "each thread copies whole chunks");
static_assert(LANES % 8 == 0, "a thread's rows share their place in the swizzle");
static_assert(TILE_STAGES >= 2, "one tile is copied while another is multiplied");
static_assert(THREADS % GROUPS == 0, "a thread writes the same channels of each of its pixels");
static_assert(TILE_M * PITCH * sizeof(int) <= TILE_STAGES * STAGE_BYTES,
              "the accumulators reuse the memory of the stages");

// The rows of A that a thread copies.
struct PixelRows {
  unsigned first[ROWS_A];  // the window's first byte in x; wraps around where out of bounds
  int top[ROWS_A];         // its row in the image
  int left[ROWS_A];        // its offset in that row, in bytes
};

__device__ __forceinline__ PixelRows pixel_rows(const ConvShape& p, unsigned pixel,
                                                unsigned pixels) {
  PixelRows rows;
  unsigned column = pixel % p.ow, line = pixel / p.ow % p.oh, n = pixel / p.ow / p.oh;
#pragma unroll
  for (int i = 0; i < ROWS_A; ++i, pixel += LANES) {
    // A row past the last pixel is above every image, whatever is added to it.
    rows.top[i] = pixel < pixels ? (int)line * p.sh - p.ph : (int)0x80000000;
    rows.left[i] = ((int)column * p.sw - p.pw) * p.c;
    rows.first[i] = (n * p.h + (unsigned)rows.top[i]) * p.w * p.c + (unsigned)rows.left[i];
    // Advance by steps: few unless an image is narrow, and cheaper than dividing.
    for (column += LANES; column >= (unsigned)p.ow; column -= p.ow) {
      if (++line == (unsigned)p.oh) line = 0, ++n;
    }
  }
  return rows;
}

// A position of K: byte e of window row r.
struct Position {
  int r, e;
  __device__ __forceinline__ void advance(int row) {
    for (e += TILE_K; e >= row; e -= row) ++r;
  }
};

using Chunk = Run<unsigned char, CHUNK>;

// The thread's share of a tile of A, by cp.async. With GATHER, where C is not a multiple of 16 and
// chunks are neither aligned nor entirely inside of the image, byte by byte through registers.
__device__ __forceinline__ void fetch_pixels(const IMAGE* x, const ConvShape& p,
                                             const PixelRows& rows, Position at, unsigned target,
                                             Chunk (&gathered)[ROWS_A]) {
  const unsigned width = (unsigned)p.w * p.c;
#pragma unroll
  for (int i = 0; i < ROWS_A; ++i) {
    // Unsigned comparisons reject negative indices too. Past the window's last row only padding of
    // the weights follows.
    const bool inside = at.r < p.kh && (unsigned)(rows.top[i] + at.r) < (unsigned)p.h;
    const unsigned left = rows.left[i] + at.e;
    const unsigned source = rows.first[i] + at.r * width + at.e;
    if constexpr (GATHER) {
#pragma unroll
      for (int v = 0; v < CHUNK; ++v) {
        const bool valid = inside && at.e + v < p.kw * p.c && left + v < width;
        gathered[i].at[v] = valid ? (unsigned char)x[source + v] : 0;
      }
    } else {
      const bool valid = inside && left < width;
      cp_async<CHUNK>(target + i * LANES * ROW_BYTES, valid ? x + source : x, valid);
    }
  }
}

__device__ __forceinline__ void store_gathered(const Chunk (&gathered)[ROWS_A],
                                               unsigned char* target) {
#pragma unroll
  for (int i = 0; i < ROWS_A; ++i) {
    *reinterpret_cast<Chunk*>(target + i * LANES * ROW_BYTES) = gathered[i];
  }
}

// The thread's share of a tile of B: chunk k of every LANES-th channel.
__device__ __forceinline__ void fetch_weights(const unsigned char* weight, int channel,
                                              int channels, int depth, int k, unsigned target,
                                              NarrowWeights (&narrow)[ROWS_B]) {
#pragma unroll
  for (int i = 0; i < ROWS_B; ++i, channel += LANES) {
    const bool valid = channel < channels;
    const size_t at = valid ? ((size_t)channel * depth + k) * BITS / 8 : 0;
    if constexpr (BITS == 8) {
      cp_async<CHUNK>(target + i * LANES * ROW_BYTES, weight + at, valid);
    } else {
      narrow[i] = NarrowWeights{};
      if (valid) narrow[i] = *reinterpret_cast<const NarrowWeights*>(weight + at);
    }
  }
}

__device__ __forceinline__ void store_widened(const NarrowWeights (&narrow)[ROWS_B],
                                              unsigned char* target) {
#pragma unroll
  for (int i = 0; i < ROWS_B; ++i) {
    *reinterpret_cast<uint4*>(target + i * LANES * ROW_BYTES) = widened(narrow[i]);
  }
}

using Accumulator = int[MMAS_M][MMAS_N][4];

// acc += A·Bᵀ over one tile; `a` and `b` are where the lane's ldmatrix begins. A step takes chunks
// 2·step and 2·step + 1; the swizzle allows XORing them into bits 4 to 6 of the address.
__device__ __forceinline__ void multiply(Accumulator& acc, unsigned a, unsigned b) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    unsigned left[MMAS_M][4], right[MMAS_N / 2][4];
#pragma unroll
    for (int i = 0; i < MMAS_M; ++i) {
      load_matrices(left[i], (a ^ step * 32) + i * 16 * ROW_BYTES);
    }
#pragma unroll
    for (int j = 0; j < MMAS_N / 2; ++j) {
      load_matrices(right[j], (b ^ step * 32) + j * 16 * ROW_BYTES);
    }
#pragma unroll
    for (int i = 0; i < MMAS_M; ++i) {
#pragma unroll
      for (int j = 0; j < MMAS_N; ++j) {
        const unsigned* pair = right[j / 2] + j % 2 * 2;
        multiply_add_bytes<IMAGE>(acc[i][j], left[i], pair[0], pair[1]);
      }
    }
  }
}

// Stores accumulators to shared memory, [TILE_M][PITCH], so that rows can be written contiguously.
__device__ __forceinline__ void store_accumulators(const Accumulator& acc, int* tile) {
#pragma unroll
  for (int i = 0; i < MMAS_M; ++i) {
#pragma unroll
    for (int j = 0; j < MMAS_N; ++j) {
      const int* d = acc[i][j];
      int* at = tile + i * 16 * PITCH + j * 8;
      *reinterpret_cast<int2*>(at) = make_int2(d[0], d[1]);
      *reinterpret_cast<int2*>(at + 8 * PITCH) = make_int2(d[2], d[3]);
    }
  }
}

// A thread's outputs: 16 channels from `channel` of every ROWS_OUT-th pixel, starting at `row`.
struct Outputs {
  const int* acc;  // [TILE_M][PITCH], at `channel`
  unsigned pixel0, pixels;
  int row, channel;
};

__device__ __forceinline__ void write_chunks(const ConvShape& p, const Outputs& from,
                                             const Epilogue& to, unsigned char* out) {
  int bias[CHUNK];
  float multiplier[CHUNK];
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) {
    bias[v] = to.bias[from.channel + v];
    multiplier[v] = to.multiplier[from.channel + v];
  }
  const float residual_multiplier = to.residual ? *to.residual_multiplier : 0.0f;
  const int sign = sign_of(to);
#pragma unroll 1
  for (int first = from.row; first < TILE_M; first += BATCH * ROWS_OUT) {
    Chunk added[BATCH];  // all loads are issued before the first is needed
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int row = first + j * ROWS_OUT;
      const unsigned pixel = from.pixel0 + row;
      if (to.residual && row < TILE_M && pixel < from.pixels) {
        const size_t at = (size_t)pixel * p.o + from.channel;
        added[j] = *reinterpret_cast<const Chunk*>(to.residual + at);
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int row = first + j * ROWS_OUT;
      const unsigned pixel = from.pixel0 + row;
      if (row >= TILE_M || pixel >= from.pixels) break;
      Chunk result;
#pragma unroll
      for (int v = 0; v < CHUNK; ++v) {
        const int sum = (from.acc[row * PITCH + v] >> WEIGHT_SHIFT) + bias[v];
        float number = scaled(sum, multiplier[v]);
        if (to.residual) {
          number = plus_residual(number, number_of(added[j].at[v], sign), residual_multiplier);
        }
        result.at[v] = saturated(number, to.low, to.high);
      }
      *reinterpret_cast<Chunk*>(out + (size_t)pixel * p.o + from.channel) = result;
    }
  }
}

// Grid: tiles of pixels and, innermost, of channels.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
qconv2d_implicit_gemm_mma(const IMAGE* __restrict__ x, const unsigned char* __restrict__ weight,
                          const int* __restrict__ bias, const float* __restrict__ multiplier,
                          const unsigned char* __restrict__ residual,
                          const float* __restrict__ residual_multiplier,
                          const int residual_is_signed, unsigned char* __restrict__ out,
                          const ConvShape p, const int low, const int high, const int row,
                          const int depth) {
  extern __shared__ __align__(128) unsigned char shared[];
  launch_dependents();
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const unsigned channel_tiles = (p.o + TILE_N - 1) / TILE_N;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_M;
  const int channel0 = blockIdx.x % channel_tiles * TILE_N;
  const int tiles = depth / TILE_K;

  // The thread copies chunk `chunk` of rows `lane_row`, + LANES, ...
  const int chunk = threadIdx.x % CHUNKS, lane_row = threadIdx.x / CHUNKS;
  const int place = lane_row * ROW_BYTES + (chunk ^ lane_row % 8) * CHUNK;
  const unsigned base = shared_address(shared);
  NarrowWeights narrow[ROWS_B];
  const auto fetch_b = [&](int tile, int stage) {
    fetch_weights(weight, channel0 + lane_row, p.o, depth, tile * TILE_K + chunk * CHUNK,
                  base + stage * STAGE_BYTES + place + BYTES_A, narrow);
  };
  const auto store_b = [&](int stage) {
    if constexpr (BITS < 8) store_widened(narrow, shared + stage * STAGE_BYTES + place + BYTES_A);
  };
#pragma unroll
  for (int stage = 0; stage < TILE_STAGES - 1; ++stage) {
    if (stage < tiles) {
      fetch_b(stage, stage);
      store_b(stage);
    }
  }

  const PixelRows rows = pixel_rows(p, pixel0 + lane_row, pixels);
  Position at{chunk * CHUNK / row, chunk * CHUNK % row};
  Chunk gathered[ROWS_A];
  const auto fetch_a = [&](int stage) {
    fetch_pixels(x, p, rows, at, base + stage * STAGE_BYTES + place, gathered);
    at.advance(row);
  };
  const auto store_a = [&](int stage) {
    if constexpr (GATHER) store_gathered(gathered, shared + stage * STAGE_BYTES + place);
  };

  // The lane's ldmatrix addresses. A: 16 rows, low 16 bytes of a step, then high ones. B: 8 rows
  // low, the same high, then the next 8. Rows are lane % 8 in the swizzle.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / TILE_WARPS_N * WARP_M, warp_n = warp % TILE_WARPS_N * WARP_N;
  const int row_a = warp_m + lane % 16, row_b = warp_n + lane / 16 * 8 + lane % 8;
  const unsigned a = base + row_a * ROW_BYTES + (lane / 16 ^ lane % 8) * CHUNK;
  const unsigned b = base + BYTES_A + row_b * ROW_BYTES + (lane / 8 % 2 ^ lane % 8) * CHUNK;

  wait_for_previous_launch();
  Accumulator acc = {};
#pragma unroll
  for (int stage = 0; stage < TILE_STAGES - 1; ++stage) {
    if (stage < tiles) {
      fetch_a(stage);
      store_a(stage);
    }
    cp_async_commit();  // the first group has the weights of all of these stages
  }
  int stage = 0, next = TILE_STAGES - 1;
  for (int t = 0; t < tiles; ++t) {
    // One group per tile, empty ones at the end: tile t has arrived when TILE_STAGES − 2 are in
    // flight.
    cp_async_wait<TILE_STAGES - 2>();
    __syncthreads();  // for all threads, and tile t − 1 has been read
    const bool more = t + TILE_STAGES - 1 < tiles;
    if (more) {
      fetch_a(next);
      fetch_b(t + TILE_STAGES - 1, next);
    }
    cp_async_commit();
    multiply(acc, a + stage * STAGE_BYTES, b + stage * STAGE_BYTES);
    if (more) {  // after the product, which hides the latency of loads to registers
      store_a(next);
      store_b(next);
    }
    stage = stage + 1 < TILE_STAGES ? stage + 1 : 0;
    next = next + 1 < TILE_STAGES ? next + 1 : 0;
  }

  cp_async_wait<0>();
  __syncthreads();
  int* tile = reinterpret_cast<int*>(shared);
  store_accumulators(acc, tile + (warp_m + lane / 4) * PITCH + warp_n + lane % 4 * 2);
  __syncthreads();
  const int group = threadIdx.x % GROUPS * CHUNK;
  const Outputs from{tile + group, pixel0, pixels, (int)threadIdx.x / GROUPS, channel0 + group};
  if (from.channel >= p.o) return;
  const Epilogue to{bias, multiplier, residual, residual_multiplier, residual_is_signed, low, high};
  write_chunks(p, from, to, out);
}
