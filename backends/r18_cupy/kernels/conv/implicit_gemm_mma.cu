// Convolution as a matrix product on tensor cores. NHWC.
//
// Rows of A are output pixels, rows of B output channels. K runs over the window's rows, and in
// each over the `row` elements that the window covers of an image row: in NHWC these lie side by
// side, so that a position (r, e) of K is found without dividing by the channels. `row` is kw·C,
// padded with zeros to whole chunks; weights come packed the same way, [O][depth].
//
// A block keeps several tiles of A and B in shared memory, 128 bytes of K to a row, and copies tile
// t + TILE_STAGES − 1 while it multiplies tile t. The 16-byte chunks of a row are permuted (chunk
// c of row i lies at c ^ i % 8): so eight rows' chunk c, which ldmatrix reads at once, and one
// row's eight chunks, which a quarter of a warp writes at once, each touch all 32 banks once.
//
// With TILE_SPLIT pixels are float32, and lanes split what they load. Of a row of weights the first
// half has the first parts of the tile's factors and the second half the second parts, in the order
// in which ldmatrix brings pixels, four bytes a lane: see `load_pixels`.
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"
#include "mma/mma.cuh"
#include "mma/split_products.cuh"
#include "common/vector.cuh"

constexpr int CHUNK = WIDTH<STORAGE>;  // elements of one copy
constexpr int CHUNKS = 8;              // of a tile's row
constexpr int ROW_BYTES = CHUNKS * 16;
constexpr int STEPS = ROW_BYTES / 32 / PARTS;  // mma steps of a tile
constexpr int THREADS = 32 * TILE_WARPS_M * TILE_WARPS_N;
constexpr int WARP_M = TILE_M / TILE_WARPS_M, WARP_N = TILE_N / TILE_WARPS_N;
constexpr int MMAS_M = WARP_M / 16, MMAS_N = WARP_N / 8;  // mma tiles of a warp
constexpr int LANES = THREADS / CHUNKS;                   // rows that the block copies at once
constexpr int ROWS_A = TILE_M / LANES, ROWS_B = TILE_N / LANES;
constexpr int BYTES_A = TILE_M * ROW_BYTES, STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES;
// Eight columns of padding: the rows of an mma tile begin 8 banks apart when they are laid down.
constexpr int PITCH = TILE_N + 8;
constexpr int GROUPS = TILE_N / CHUNK;      // chunks of a row of outputs
constexpr int ROWS_OUT = THREADS / GROUPS;  // rows that the block writes at once
constexpr int BATCH = 4;                    // chunks of the residual that a thread asks for at once

static_assert(TILE_K == CHUNKS * CHUNK, "a row of a tile is 128 bytes, once around the banks");
static_assert(TILE_M % (16 * TILE_WARPS_M) == 0, "a warp multiplies whole tiles of 16 pixels");
static_assert(TILE_N % (16 * TILE_WARPS_N) == 0, "ldmatrix brings two tiles of 8 channels at once");
static_assert(TILE_M % LANES == 0 && TILE_N % LANES == 0, "each thread copies whole chunks");
static_assert(LANES % 8 == 0, "a thread's rows share their place in the permutation");
static_assert(TILE_STAGES >= 2, "one tile is copied while another is multiplied");
static_assert(THREADS % GROUPS == 0, "a thread writes the same channels of each of its pixels");
static_assert(TILE_M % (BATCH * ROWS_OUT) == 0, "each thread writes whole batches of pixels");
static_assert(TILE_M * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums are laid down where the tiles were");

// The rows of A that a thread copies.
struct PixelRows {
  unsigned first[ROWS_A];  // the window's first element in x; wraps where that is no pixel
  int top[ROWS_A];         // its row in the image
  int left[ROWS_A];        // its place in that row, in elements
};

__device__ __forceinline__ PixelRows pixel_rows(const ConvShape& p, unsigned pixel,
                                                unsigned pixels) {
  PixelRows rows;
  unsigned column = pixel % p.ow, line = pixel / p.ow % p.oh, n = pixel / p.ow / p.oh;
#pragma unroll
  for (int i = 0; i < ROWS_A; ++i, pixel += LANES) {
    // A row past the last pixel lies above every image, whatever is added to it.
    rows.top[i] = pixel < pixels ? (int)line * p.sh - p.ph : (int)0x80000000;
    rows.left[i] = ((int)column * p.sw - p.pw) * p.c;
    rows.first[i] = (n * p.h + (unsigned)rows.top[i]) * p.w * p.c + (unsigned)rows.left[i];
    // On to the next row by steps: few, where an image is not narrow, and cheaper than dividing.
    for (column += LANES; column >= (unsigned)p.ow; column -= p.ow) {
      if (++line == (unsigned)p.oh) line = 0, ++n;
    }
  }
  return rows;
}

// A position of K: element e of the window's row r.
struct Position {
  int r, e;
  __device__ __forceinline__ void advance(int row) {
    for (e += TILE_K; e >= row; e -= row) ++r;
  }
};

using Chunk = Run<STORAGE, CHUNK>;

// The thread's share of a tile of A, by cp.async; or, where C is no multiple of CHUNK, so that
// chunks are neither aligned nor wholly inside or outside of the image, element by element into
// registers (GATHER).
__device__ __forceinline__ void fetch_pixels(const STORAGE* x, const ConvShape& p,
                                             const PixelRows& rows, Position at, unsigned target,
                                             Chunk (&gathered)[ROWS_A]) {
  const unsigned width = (unsigned)p.w * p.c;
#pragma unroll
  for (int i = 0; i < ROWS_A; ++i) {
    // Unsigned comparisons: below zero is beyond the end. Past the window's last row only the
    // weights' padding follows.
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

// A's fragments of a step in mma tile `i`. A step takes chunks 2·step and 2·step + 1: the
// permutation lets it be flipped into the address, whose bits 4 to 6 are the chunk. Of float32
// pixels to be split it takes four chunks: ldmatrix brings lane l elements l % 4 of each, and those
// of two chunks side by side make a register. So element 4·i + q of 16 is in place 2·q + i of eight,
// or 8 + 2·q + i − 2 from the third chunk on.
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

// sums += A·Bᵀ over one tile, and to `cross` what split factors make besides; `a` and `b` are where
// the lane's ldmatrix begins.
__device__ __forceinline__ void multiply(Accumulator& acc, Accumulator& cross, unsigned a, unsigned b) {
#pragma unroll
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
        float (&to)[MMAS_N][4] = product == 0 ? acc[i] : cross[i];
#pragma unroll
        for (int j = 0; j < MMAS_N; ++j) {
          const unsigned* pair = right[product % 2][j / 2] + j % 2 * 2;
          multiply_add<Operand>(to[j], left[i][product / 2], pair[0], pair[1]);
        }
      }
    }
  }
}

// From fragments to shared memory, [TILE_M][PITCH], so that rows can be written out in a piece.
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

// Where a thread writes: CHUNK channels from `channel` of every ROWS_OUT-th pixel, `row` first.
struct Outputs {
  const float* acc;  // [TILE_M][PITCH], at `channel`
  unsigned pixel0, pixels;
  int row, channel;
};

// Epilogue and store, where O is a multiple of CHUNK.
__device__ __forceinline__ void write_chunks(const ConvShape& p, const Outputs& to,
                                             const float* bias, const STORAGE* residual,
                                             STORAGE* out) {
  float held[CHUNK];  // an absent bias is a zero here: a pointer that may be null would keep the
                      // array in memory, not in registers
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) held[v] = bias ? bias[to.channel + v] : 0.0f;
#pragma unroll 1
  for (int first = to.row; first < TILE_M; first += BATCH * ROWS_OUT) {
    Chunk added[BATCH];  // all loaded before the first is needed: one wait for a batch
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

// Epilogue and store, one element at a time: of any O.
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

// The bare sums: of a part of K, which another launch adds to the others.
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

// Grid: x, tiles of pixels and, innermost, of channels; y, parts of K, of `k_tiles` tiles each.
// `partial`, [parts][pixels][O], takes the sums of the parts; null: there is one, written to `out`.
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

  // What the thread copies: chunk `chunk` of rows `lane_row`, + LANES, ...
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

  // What the lane hands to ldmatrix. A: 16 rows, low halves of a step, then high ones. B: 8 rows
  // low, the same high, then the next 8. Rows are i % 8 = lane % 8 in the permutation.
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
    // One group a tile, empty ones at the end: tile t is there when TILE_STAGES − 2 are pending.
    cp_async_wait<TILE_STAGES - 2>();
    __syncthreads();  // ... for all threads, and all have done with tile t − 1, overwritten now
    const bool more = t + TILE_STAGES - 1 < tiles;
    if (more) fetch(next);
    cp_async_commit();
    multiply(acc, cross, a + stage * STAGE_BYTES, b + stage * STAGE_BYTES);
    if (more) store(next);  // after the product, so that gathering waits for memory meanwhile
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
