// Implicit GEMM on tensor cores (mma.sync). NHWC; fp16, bf16, tf32, or fp16x3 (TILE_SPLIT).
//
// Rows of A are output pixels, rows of B output channels. K runs over the window's rows, and in
// each over the `row` elements that the window covers of an image row. In NHWC these are adjacent,
// so a position (r, e) of K is found without dividing by C. `row` is kw·C padded to whole 16-byte
// chunks; weights are packed the same way, [O][depth].
//
// 1. Tile t + TILE_STAGES − 1 is copied to shared memory by cp.async (or through registers with
//    GATHER) while tile t is multiplied. A row of a tile is 128 bytes of K.
// 2. Warps load fragments by ldmatrix and accumulate in float32 registers.
// 3. Accumulators go through shared memory so that rows are written in 16-byte chunks, with the
//    epilogue. With split-K (blockIdx.y) each split writes bare sums, which split_k_reduce.cu adds.
//
// Swizzle: chunk c of row i is stored at c ^ i % 8, so both ldmatrix (chunk c of eight rows) and a
// quarter-warp's store (eight chunks of a row) touch all 32 banks once.
//
// TILE_SPLIT: lanes split the float32 pixels that they load. A row of weights holds the high halves
// of the tile's operands, then the low halves, in the order in which ldmatrix delivers pixels: see
// `load_pixels`.
//
// Constraints: sm_80; C a multiple of a chunk unless GATHER; any O.
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"
#include "mma/mma.cuh"
#include "mma/split_products.cuh"
#include "common/vector.cuh"

constexpr int CHUNK = WIDTH<STORAGE>;  // elements per 16-byte copy
constexpr int CHUNKS = 8;              // chunks per row of a tile
constexpr int ROW_BYTES = CHUNKS * 16;
constexpr int STEPS = ROW_BYTES / 32 / PARTS;  // mma steps per tile
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
// Two steps at once would spill registers.
constexpr int STEPS_AT_ONCE = TILE_SPLIT && (GATHER || MMAS_M * MMAS_N > 8) ? 1 : STEPS;
constexpr int BATCH = 4;                    // residual chunks that a thread loads at once

static_assert(TILE_K == CHUNKS * CHUNK, "a row of a tile is 128 bytes, all 32 banks");
static_assert(TILE_M % (16 * TILE_WARPS_M) == 0, "a warp multiplies whole mma tiles of 16 pixels");
static_assert(TILE_N % (16 * TILE_WARPS_N) == 0,
              "ldmatrix loads two mma tiles of 8 channels at once");
static_assert(TILE_M % LANES == 0 && TILE_N % LANES == 0, "each thread copies whole chunks");
static_assert(LANES % 8 == 0, "a thread's rows share their place in the swizzle");
static_assert(TILE_STAGES >= 2, "one tile is copied while another is multiplied");
static_assert(THREADS % GROUPS == 0, "a thread writes the same channels of each of its pixels");
static_assert(TILE_M % (BATCH * ROWS_OUT) == 0, "each thread writes whole batches of pixels");
static_assert(TILE_M * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the accumulators reuse the memory of the stages");

// The rows of A that a thread copies.
struct PixelRows {
  unsigned first[ROWS_A];  // the window's first element in x; wraps around where out of bounds
  int top[ROWS_A];         // its row in the image
  int left[ROWS_A];        // its offset in that row, in elements
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

// A position of K: element e of window row r.
struct Position {
  int r, e;
  __device__ __forceinline__ void advance(int row) {
    for (e += TILE_K; e >= row; e -= row) ++r;
  }
};

using Chunk = Run<STORAGE, CHUNK>;

// The thread's share of a tile of A, by cp.async. With GATHER, where C is not a multiple of CHUNK
// and chunks are neither aligned nor entirely inside of the image, element by element through
// registers.
__device__ __forceinline__ void fetch_pixels(const STORAGE* x, const ConvShape& p,
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
        gathered[i].at[v] = valid ? x[source + v] : from_float<STORAGE>(0.0f);
      }
    } else {
      const bool valid = inside && left < width;
      cp_async<16>(target + i * LANES * ROW_BYTES, valid ? x + source : x, valid);
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

__device__ __forceinline__ void fetch_weights(const STORAGE* weight, int channel, int channels,
                                              int depth, int k, unsigned target) {
#pragma unroll
  for (int i = 0; i < ROWS_B; ++i, channel += LANES) {
    const bool valid = channel < channels;
    cp_async<16>(target + i * LANES * ROW_BYTES,
                 valid ? weight + (size_t)channel * depth + k : weight, valid);
  }
}

// A's fragments of one step for mma tile `i`. A step takes chunks 2·step and 2·step + 1; the
// swizzle allows XORing them into bits 4 to 6 of the address. fp16x3: a step takes four chunks of
// float32 pixels. ldmatrix gives lane l elements l % 4 of each, and those of two adjacent chunks
// make a register. So element 4·i + q of 16 is at position 2·q + i of eight, or 8 + 2·q + i − 2
// from the third chunk on; `pack_split` orders the weights alike.
__device__ __forceinline__ void load_pixels(unsigned (&left)[PARTS][4], unsigned a, int step,
                                            int i) {
  if constexpr (TILE_SPLIT) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned loaded[4];
      load_matrices(loaded, (a ^ (step * 64 + half * 32)) + i * 16 * ROW_BYTES);
#pragma unroll
      for (int rows = 0; rows < 2; ++rows) {
        const SplitPair pair =
            split(__uint_as_float(loaded[rows]), __uint_as_float(loaded[rows + 2]));
        left[0][half * 2 + rows] = pair.high;
        left[PARTS - 1][half * 2 + rows] = pair.low;
      }
    }
  } else {
    load_matrices(left[0], (a ^ step * 32) + i * 16 * ROW_BYTES);
#pragma unroll
    for (int v = 0; v < 4; ++v) left[0][v] = round_operand<STORAGE>(left[0][v]);
  }
}

using Accumulator = float[MMAS_M][MMAS_N][4];

// acc += A·Bᵀ over one tile, and with TILE_SPLIT the cross products to `cross`; `a` and `b` are
// where the lane's ldmatrix begins.
__device__ __forceinline__ void multiply(Accumulator& acc, Accumulator& cross, unsigned a,
                                         unsigned b) {
#pragma unroll(STEPS_AT_ONCE)
  for (int step = 0; step < STEPS; ++step) {
    unsigned left[MMAS_M][PARTS][4], right[PARTS][MMAS_N / 2][4];
#pragma unroll
    for (int i = 0; i < MMAS_M; ++i) load_pixels(left[i], a, step, i);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int j = 0; j < MMAS_N / 2; ++j) {
        load_matrices(right[part][j], (b ^ (part * 64 + step * 32)) + j * 16 * ROW_BYTES);
      }
    }
#pragma unroll
    for (int i = 0; i < MMAS_M; ++i) {
#pragma unroll
      for (int product = 0; product < PRODUCTS; ++product) {
#pragma unroll
        for (int j = 0; j < MMAS_N; ++j) {
          const unsigned* pair = right[product % 2][j / 2] + j % 2 * 2;
          add_product(product, acc[i][j], cross[i][j], left[i][product / 2], pair[0], pair[1]);
        }
      }
    }
  }
}

// Stores accumulators to shared memory, [TILE_M][PITCH], so that rows can be written contiguously.
__device__ __forceinline__ void store_accumulators(const Accumulator& acc, float* tile) {
#pragma unroll
  for (int i = 0; i < MMAS_M; ++i) {
#pragma unroll
    for (int j = 0; j < MMAS_N; ++j) {
      const float* d = acc[i][j];
      float* at = tile + i * 16 * PITCH + j * 8;
      *reinterpret_cast<float2*>(at) = make_float2(d[0], d[1]);
      *reinterpret_cast<float2*>(at + 8 * PITCH) = make_float2(d[2], d[3]);
    }
  }
}

// A thread's outputs: CHUNK channels from `channel` of every ROWS_OUT-th pixel, starting at `row`.
struct Outputs {
  const float* acc;  // [TILE_M][PITCH], at `channel`
  unsigned pixel0, pixels;
  int row, channel;
};

// Epilogue and store in chunks: O is a multiple of CHUNK.
__device__ __forceinline__ void write_chunks(const ConvShape& p, const Outputs& to,
                                             const float* bias, const STORAGE* residual,
                                             STORAGE* out) {
  // Zeros where there is no bias. A pointer that may be null would keep the array in local memory.
  float held[CHUNK];
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) held[v] = bias ? bias[to.channel + v] : 0.0f;
#pragma unroll 1
  for (int first = to.row; first < TILE_M; first += BATCH * ROWS_OUT) {
    Chunk added[BATCH];  // all loads are issued before the first is needed
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const unsigned pixel = to.pixel0 + first + j * ROWS_OUT;
      if (residual && pixel < to.pixels) {
        added[j] = *reinterpret_cast<const Chunk*>(residual + (size_t)pixel * p.o + to.channel);
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int row = first + j * ROWS_OUT;
      const unsigned pixel = to.pixel0 + row;
      if (pixel >= to.pixels) break;
      Chunk result;
#pragma unroll
      for (int v = 0; v < CHUNK; ++v) {
        result.at[v] = epilogue<STORAGE>(p, to.acc[row * PITCH + v], v, v, held,
                                         residual ? added[j].at : nullptr);
      }
      *reinterpret_cast<Chunk*>(out + (size_t)pixel * p.o + to.channel) = result;
    }
  }
}

// Epilogue and store element by element: any O.
__device__ __forceinline__ void write_elements(const ConvShape& p, const Outputs& to,
                                               const float* bias, const STORAGE* residual,
                                               STORAGE* out) {
#pragma unroll 1
  for (int row = to.row; row < TILE_M && to.pixel0 + row < to.pixels; row += ROWS_OUT) {
    const size_t index = (size_t)(to.pixel0 + row) * p.o + to.channel;
#pragma unroll 1
    for (int v = 0; v < CHUNK && to.channel + v < p.o; ++v) {
      out[index + v] = epilogue<STORAGE>(p, to.acc[row * PITCH + v], to.channel + v, index + v,
                                         bias, residual);
    }
  }
}

// Split-K: bare sums of one split, which split_k_reduce.cu adds.
__device__ __forceinline__ void write_partial(const ConvShape& p, const Outputs& to,
                                              float* partial) {
#pragma unroll 1
  for (int row = to.row; row < TILE_M && to.pixel0 + row < to.pixels; row += ROWS_OUT) {
    float* at = partial + (size_t)(to.pixel0 + row) * p.o + to.channel;
    const float* from = to.acc + row * PITCH;
#pragma unroll
    for (int v = 0; v < CHUNK; v += 4) {
      if (p.o % 4 == 0) {
        if (to.channel + v < p.o) {
          *reinterpret_cast<float4*>(at + v) = *reinterpret_cast<const float4*>(from + v);
        }
      } else {
        for (int i = v; i < v + 4 && to.channel + i < p.o; ++i) at[i] = from[i];
      }
    }
  }
}

// Grid: x, tiles of pixels and, innermost, of channels; y, the splits of K, `k_tiles` tiles each.
// `partial`, [splits][pixels][O], takes the sums of the splits; null: there is one, written to
// `out`.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_mma(const STORAGE* __restrict__ x, const STORAGE* __restrict__ weight,
                         const float* __restrict__ bias, const STORAGE* __restrict__ residual,
                         STORAGE* __restrict__ out, float* __restrict__ partial,
                         const ConvShape p, const int row, const int depth, const int k_tiles) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const unsigned channel_tiles = (p.o + TILE_N - 1) / TILE_N;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_M;
  const int channel0 = blockIdx.x % channel_tiles * TILE_N;
  const int first = blockIdx.y * k_tiles;
  const int tiles = min(k_tiles, depth / TILE_K - first);

  // The thread copies chunk `chunk` of rows `lane_row`, + LANES, ...
  const int chunk = threadIdx.x % CHUNKS, lane_row = threadIdx.x / CHUNKS;
  const PixelRows rows = pixel_rows(p, pixel0 + lane_row, pixels);
  int k = first * TILE_K + chunk * CHUNK;
  Position at{k / row, k % row};
  const int place = lane_row * ROW_BYTES + (chunk ^ lane_row % 8) * 16;
  const unsigned base = shared_address(shared);
  Chunk gathered[ROWS_A];
  const auto fetch = [&](int stage) {
    const unsigned target = base + stage * STAGE_BYTES + place;
    fetch_pixels(x, p, rows, at, target, gathered);
    fetch_weights(weight, channel0 + lane_row, p.o, depth, k, target + BYTES_A);
    at.advance(row);
    k += TILE_K;
  };
  const auto store = [&](int stage) {
    if constexpr (GATHER) store_gathered(gathered, shared + stage * STAGE_BYTES + place);
  };

  // The lane's ldmatrix addresses. A: 16 rows, low 16 bytes of a step, then high ones. B: 8 rows
  // low, the same high, then the next 8. Rows are lane % 8 in the swizzle.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / TILE_WARPS_N * WARP_M, warp_n = warp % TILE_WARPS_N * WARP_N;
  const int row_a = warp_m + lane % 16, row_b = warp_n + lane / 16 * 8 + lane % 8;
  const unsigned a = base + row_a * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
  const unsigned b = base + BYTES_A + row_b * ROW_BYTES + (lane / 8 % 2 ^ lane % 8) * 16;

  Accumulator acc = {}, cross = {};
#pragma unroll
  for (int stage = 0; stage < TILE_STAGES - 1; ++stage) {
    if (stage < tiles) {
      fetch(stage);
      store(stage);
    }
    cp_async_commit();
  }
  int stage = 0, next = TILE_STAGES - 1;
  for (int t = 0; t < tiles; ++t) {
    // One group per tile, empty ones at the end: tile t has arrived when TILE_STAGES − 2 are in
    // flight.
    cp_async_wait<TILE_STAGES - 2>();
    __syncthreads();  // for all threads, and tile t − 1 has been read
    const bool more = t + TILE_STAGES - 1 < tiles;
    if (more) fetch(next);
    cp_async_commit();
    multiply(acc, cross, a + stage * STAGE_BYTES, b + stage * STAGE_BYTES);
    if (more) store(next);  // after the product, which hides the latency of gathering
    stage = stage + 1 < TILE_STAGES ? stage + 1 : 0;
    next = next + 1 < TILE_STAGES ? next + 1 : 0;
  }

  cp_async_wait<0>();
  __syncthreads();
  if constexpr (TILE_SPLIT) add_cross<MMAS_M * MMAS_N * 4>(&acc[0][0][0], &cross[0][0][0]);
  float* tile = reinterpret_cast<float*>(shared);
  store_accumulators(acc, tile + (warp_m + lane / 4) * PITCH + warp_n + lane % 4 * 2);
  __syncthreads();
  const int group = threadIdx.x % GROUPS * CHUNK;
  const Outputs to{tile + group, pixel0, pixels, (int)threadIdx.x / GROUPS, channel0 + group};
  if (to.channel >= p.o) return;
  if (partial) {
    write_partial(p, to, partial + (size_t)blockIdx.y * pixels * p.o);
  } else if (p.o % CHUNK == 0) {
    write_chunks(p, to, bias, residual, out);
  } else {
    write_elements(p, to, bias, residual, out);
  }
}
