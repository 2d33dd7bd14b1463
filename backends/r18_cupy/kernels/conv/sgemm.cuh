// The float32 matrix product that convolutions become: M output channels by N output pixels.
//
// A block computes TILE_M x TILE_N outputs, TILE_K products of each a step, out of a ring of
// TILE_STAGES pairs of tiles in shared memory. A thread keeps TILE_TM x TILE_TN sums in registers.
// Only where the N side comes from (a gather, or a column matrix) differs between kernels.
#pragma once
#include "common/epilogue.cuh"
#include "common/fast_divide.cuh"
#include "common/staged_copy.cuh"

// A warp is 4 x 8 lanes (M x N), and a thread's sums lie in squares of 4 x 4, a warp's width apart:
// a warp then reads 64 and 128 contiguous bytes of shared memory at a time.
constexpr int kLanesM = 4, kLanesN = 8, kVector = 4;
constexpr int kWarpM = kLanesM * TILE_TM, kWarpN = kLanesN * TILE_TN;
constexpr int kWarpsN = TILE_N / kWarpN;
constexpr int kThreads = TILE_M / kWarpM * kWarpsN * 32;

// 128 registers a thread; before sm_80 copies on their way take some more.
#if __CUDA_ARCH__ >= 800
constexpr int kBlocksPerMultiprocessor = 512 / kThreads;
#else
constexpr int kBlocksPerMultiprocessor = 256 / kThreads;
#endif

static_assert(TILE_TM % kVector == 0 && TILE_TN % kVector == 0, "sums are kept in 4 x 4 squares");
static_assert(TILE_M % kWarpM == 0 && TILE_N % kWarpN == 0, "warps must fill the tile");
static_assert(kThreads <= 256, "more than 256 threads leave a thread too few registers");
static_assert(TILE_STAGES >= 2, "one tile is multiplied while another arrives");

// The matrix product of a launch; the host's `GEMM_SHAPE` in gemm.py mirrors it field by field.
struct GemmShape {
  int pixels;       // N of the whole problem: n * oh * ow
  int depth;        // K, without what pads it
  int k_tiles;      // of the packed weights
  int split_tiles;  // how many of them a block takes: blockIdx.z counts the splits
  int m_tiles;
  int first_pixel;               // of the launch, a multiple of TILE_N
  size_t split_size; // elements from one split's output to the next's
  FastDivisor plane;             // oh * ow
  FastDivisor row;               // ow
  FastDivisor window;            // kh * kw
  FastDivisor window_row;        // kw
};

constexpr int kSlabRows = TILE_M / TILE_TM;  // one row of each thread's

union Shared {
  struct {
    float a[TILE_STAGES][TILE_K][TILE_M];
    float b[TILE_STAGES][TILE_K][TILE_N];
  } tiles;
  float slabs[2][kSlabRows][TILE_N];  // of sums, on their way out
  float4 alignment;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// A block's tile of the output, and its share of K.
struct BlockTile {
  int m_tile;
  unsigned n;  // first column
  int k_begin, k_count;  // in tiles

  // Blocks that follow each other share a tile of pixels, the side that is not in L2 already.
  __device__ __forceinline__ explicit BlockTile(const GemmShape& g)
      : m_tile(blockIdx.x % g.m_tiles),
        n(blockIdx.x / g.m_tiles * TILE_N),
        k_begin(blockIdx.z * g.split_tiles),
        k_count(min(g.split_tiles, g.k_tiles - k_begin)) {}
};

// The M side: weights, which the host has packed as [m_tiles][K][TILE_M] with zeros as padding.
class WeightTiles {
 public:
  __device__ __forceinline__ WeightTiles(const float* weight, const GemmShape& g,
                                         const BlockTile& block)
      : next_((const float4*)weight +
              ((size_t)block.m_tile * g.k_tiles + block.k_begin) * kVectors + threadIdx.x) {}

  __device__ __forceinline__ void fetch(float (*tile)[TILE_M]) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (mine(i)) copies_[i].fetch((float4*)tile + threadIdx.x + i * kThreads,
                                    next_ + i * kThreads, true);
    }
    next_ += kVectors;
  }

  __device__ __forceinline__ void land(float (*tile)[TILE_M]) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (mine(i)) copies_[i].land((float4*)tile + threadIdx.x + i * kThreads);
    }
  }

 private:
  static constexpr int kVectors = TILE_K * TILE_M / kVector;
  static constexpr int kCopies = (kVectors + kThreads - 1) / kThreads;

  static __device__ __forceinline__ bool mine(int i) {
    return kVectors % kThreads == 0 || (int)threadIdx.x + i * kThreads < kVectors;
  }

  const float4* next_;
  StagedCopy<float4> copies_[kCopies];
};

// A thread's sums and where they lie in the tile.
struct Accumulator {
  float sum[TILE_TM][TILE_TN] = {};
  int m, n;  // the first square's corner

  __device__ __forceinline__ Accumulator() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // NOTE: neighbours in a pair share a column, neighbouring pairs a row. A 128-bit read of
    // shared memory takes two cycles then instead of four, for both factors.
    m = warp / kWarpsN * kWarpM + (lane / 16 * 2 + lane % 2) * kVector;
    n = warp % kWarpsN * kWarpN + lane / 2 % kLanesN * kVector;
  }

  // The rows of sum[i], of all threads, by number, and which rows of the tile they are.
  __device__ __forceinline__ int slab_row() const {
    return m / kWarpM * kLanesM + m % kWarpM / kVector;
  }
  static __device__ __forceinline__ int row_of(int slab_row, int i) {
    const int corner = slab_row / kLanesM * kWarpM + slab_row % kLanesM * kVector;
    return corner + i / kVector * kLanesM * kVector + i % kVector;
  }

  __device__ __forceinline__ void multiply(const float (*a)[TILE_M], const float (*b)[TILE_N]) {
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
      float left[TILE_TM], right[TILE_TN];
#pragma unroll
      for (int i = 0; i < TILE_TM; i += kVector) {
        *(float4*)(left + i) = *(const float4*)&a[k][m + i * kLanesM];
      }
#pragma unroll
      for (int j = 0; j < TILE_TN; j += kVector) {
        *(float4*)(right + j) = *(const float4*)&b[k][n + j * kLanesN];
      }
#pragma unroll
      for (int i = 0; i < TILE_TM; ++i) {
#pragma unroll
        for (int j = 0; j < TILE_TN; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
      }
    }
  }
};

// The loop over a block's share of K. `Columns` brings the N side's tiles, one after the other:
// fetch(tile) and land(tile), as `WeightTiles` does.
template <typename Columns>
__device__ __forceinline__ void multiply_tiles(Accumulator& acc, Shared& shared, WeightTiles& weights,
                                               Columns& columns, int count) {
  auto& tiles = shared.tiles;
#pragma unroll
  for (int stage = 0; stage < TILE_STAGES - 1; ++stage) {
    if (stage < count) {
      weights.fetch(tiles.a[stage]);
      columns.fetch(tiles.b[stage]);
      weights.land(tiles.a[stage]);
      columns.land(tiles.b[stage]);
    }
    commit_copies();  // an empty group, too, keeps the count of groups even with that of tiles
  }
  int here = 0, free = TILE_STAGES - 1;
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    await_copies<TILE_STAGES - 2>();
    // Tile t is here for all threads, and all are done with tile t - 1, whose place is free.
    __syncthreads();
    const bool more = t + TILE_STAGES - 1 < count;
    if (more) {
      weights.fetch(tiles.a[free]);
      columns.fetch(tiles.b[free]);
    }
    commit_copies();
    acc.multiply(tiles.a[here], tiles.b[here]);
    if (more) {
      weights.land(tiles.a[free]);
      columns.land(tiles.b[free]);
    }
    here = here + 1 == TILE_STAGES ? 0 : here + 1;
    free = free + 1 == TILE_STAGES ? 0 : free + 1;
  }
}

// Bias, residual, ReLU, and the way to NCHW. `out` is the split's.
//
// Sums go through shared memory, a row of every thread's a pass: then a thread keeps to one pixel,
// and a warp writes 32 pixels in a row whatever the plane's size.
__device__ __forceinline__ void store(const Accumulator& acc, Shared& shared, const ConvShape& p,
                                      const GemmShape& g, const BlockTile& block,
                                      const float* bias, const float* residual, float* out) {
  constexpr int kRowStep = kThreads / TILE_N;
  static_assert(kThreads % TILE_N == 0, "a thread stays with one pixel");
  const int column = threadIdx.x % TILE_N;
  const unsigned pixel = g.first_pixel + block.n + column;
  const unsigned image = quotient(pixel, g.plane);
  const unsigned plane = g.plane.divisor;
  const unsigned start = image * p.o * plane + (pixel - image * plane);
  const bool exists = pixel < (unsigned)g.pixels;

  __syncthreads();  // the slabs lie where tiles are still being multiplied
#pragma unroll
  for (int i = 0; i < TILE_TM; ++i) {
    float(*slab)[TILE_N] = shared.slabs[i % 2];
#pragma unroll
    for (int j = 0; j < TILE_TN; j += kVector) {
      *(float4*)&slab[acc.slab_row()][acc.n + j * kLanesN] = *(const float4*)&acc.sum[i][j];
    }
    // The only barrier of a pass: the next one fills the other slab, read before this barrier.
    __syncthreads();
#pragma unroll
    for (int row = threadIdx.x / TILE_N; row < kSlabRows; row += kRowStep) {
      const int channel = block.m_tile * TILE_M + Accumulator::row_of(row, i);
      const unsigned index = start + channel * plane;
      if (exists && channel < p.o) {
        out[index] = epilogue<float>(p, slab[row][column], channel, index, bias, residual);
      }
    }
  }
}
