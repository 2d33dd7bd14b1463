// The float32 GEMM behind convolutions: M output channels by N output pixels.
//
// A CTA computes TILE_M × TILE_N outputs over TILE_K products per step, from a ring of TILE_STAGES
// tile pairs in shared memory. A thread keeps TILE_TM × TILE_TN accumulators in registers. Kernels
// differ only in where the N side comes from: a gather, or a stored matrix. In both, columns 2·i
// and 2·i + 1 of the N side are swapped; `Accumulator::multiply` says why.
#pragma once
#include "common/epilogue.cuh"
#include "common/fast_divide.cuh"
#include "common/staged_copy.cuh"
#include "conv/swapped_columns.cuh"

// A warp is 4 × 8 lanes (M × N), and a thread's accumulators are 4 × 4 squares, a warp's width
// apart: a warp then reads 64 and 128 contiguous bytes of shared memory at a time.
constexpr int kLanesM = 4, kLanesN = 8, kVector = 4;
constexpr int kWarpM = kLanesM * TILE_TM, kWarpN = kLanesN * TILE_TN;
constexpr int kWarpsN = TILE_N / kWarpN;
constexpr int kThreads = TILE_M / kWarpM * kWarpsN * 32;

// 128 registers per thread; all of 255 before sm_80, where values in flight take more.
#if __CUDA_ARCH__ >= 800
constexpr int kResidentThreads = 512;
#else
constexpr int kResidentThreads = 256;
#endif
constexpr int kBlocksPerMultiprocessor = kResidentThreads / kThreads;

static_assert(TILE_TM % kVector == 0 && TILE_TN % kVector == 0,
              "accumulators are kept in 4 x 4 squares");
static_assert(TILE_M % kWarpM == 0 && TILE_N % kWarpN == 0, "warps must fill the tile");
static_assert(TILE_TM * TILE_TN <= 64, "accumulators must leave registers for the operands");
static_assert(kThreads <= 256, "more than 256 threads leave a thread too few registers");
static_assert(TILE_STAGES >= 2, "one tile is multiplied while another arrives");
static_assert(TILE_K % 2 == 0, "operands alternate between two sets of registers");

// The GEMM of a launch; the host's `GEMM_SHAPE` in conv/sgemm.py mirrors it field by field.
struct GemmShape {
  int pixels;       // N of the whole problem: n * oh * ow
  int depth;        // K without padding
  int k_tiles;      // K tiles of the packed weights
  int split_tiles;  // K tiles per split; blockIdx.z is the split
  int m_tiles;
  int first_pixel;               // first pixel of the launch, a multiple of TILE_N
  size_t split_size;             // elements from one split to the next
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
  float slabs[2][kSlabRows][TILE_N];  // outputs on their way to global memory
  float4 alignment;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// A CTA's output tile and its share of K.
struct BlockTile {
  int m_tile;
  unsigned n;  // first column
  int k_begin, k_count;  // in tiles

  // Consecutive CTAs share a tile of pixels; the weights are in L2 anyway.
  __device__ __forceinline__ explicit BlockTile(const GemmShape& g)
      : m_tile(blockIdx.x % g.m_tiles),
        n(blockIdx.x / g.m_tiles * TILE_N),
        k_begin(blockIdx.z * g.split_tiles),
        k_count(min(g.split_tiles, g.k_tiles - k_begin)) {}
};

// The M side: weights, packed by the host as [m_tiles][K][TILE_M] with zero padding.
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

// A thread's share of one of TILE_K products: its rows of the M side, its columns of the N side.
struct Operands {
  float left[TILE_TM], right[TILE_TN];

  __device__ __forceinline__ void load(const float* a, const float* b) {
#pragma unroll
    for (int i = 0; i < TILE_TM; i += kVector) {
      *(float4*)(left + i) = *(const float4*)(a + i * kLanesM);
    }
#pragma unroll
    for (int j = 0; j < TILE_TN; j += kVector) {
      *(float4*)(right + j) = *(const float4*)(b + j * kLanesN);
    }
  }
};

// A thread's accumulators and their place in the tile.
struct Accumulator {
  float sum[TILE_TM][TILE_TN] = {};
  int m, n;  // the first square's corner

  __device__ __forceinline__ Accumulator() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // NOTE: lanes 2i and 2i + 1 share a column, neighbouring pairs a row. A 128-bit read of shared
    // memory then takes two cycles instead of four, for both operands.
    m = warp / kWarpsN * kWarpM + (lane / 16 * 2 + lane % 2) * kVector;
    n = warp % kWarpsN * kWarpN + lane / 2 % kLanesN * kVector;
  }

  // The slab's row of sum[i] of this thread, and the row of the tile that it holds.
  __device__ __forceinline__ int slab_row() const {
    return m / kWarpM * kLanesM + m % kWarpM / kVector;
  }
  static __device__ __forceinline__ int row_of(int slab_row, int i) {
    const int corner = slab_row / kLanesM * kWarpM + slab_row % kLanesM * kVector;
    return corner + i / kVector * kLanesM * kVector + i % kVector;
  }

  // sum += the product of one column of the M side and one row of the N side.
  //
  // Registers are in two banks, odd and even, and each gives one operand a cycle. The third comes
  // from the product before, if both have it in the same place. So the walk goes up and down a pair
  // of rows, and each product shares a factor with the one before it. Sums are in vectors along N,
  // as they are stored, and columns are swapped pairwise in shared memory, so that a column and its
  // sums are in different banks.
  __device__ __forceinline__ void multiply(const Operands& operands) {
#pragma unroll
    for (int i = 0; i < TILE_TM; i += 2) {
#pragma unroll
      for (int q = 0; q < TILE_TN; ++q) {
        const int j = i % 4 ? TILE_TN - 1 - q : q;  // back and forth
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = i + (half ^ q % 2);
          sum[row][j] = fmaf(operands.left[row], operands.right[swapped_column(j)], sum[row][j]);
        }
      }
    }
  }
};

// The main loop over a CTA's share of K. `Columns` provides the N side's tiles in order by
// fetch(tile) and land(tile), like `WeightTiles`.
template <typename Columns>
__device__ __forceinline__ void multiply_tiles(Accumulator& acc, Shared& shared,
                                               WeightTiles& weights, Columns& columns, int count) {
  auto& tiles = shared.tiles;
#pragma unroll
  for (int stage = 0; stage < TILE_STAGES - 1; ++stage) {
    if (stage < count) {
      weights.fetch(tiles.a[stage]);
      columns.fetch(tiles.b[stage]);
      weights.land(tiles.a[stage]);
      columns.land(tiles.b[stage]);
    }
    commit_copies();  // empty groups keep the group count equal to the tile count
  }
  await_copies<TILE_STAGES - 2>();
  __syncthreads();  // the first tile has arrived for all threads
  int here = 0, free = TILE_STAGES - 1;
  Operands operands[2];  // those of the next product arrive while this one is computed
  operands[0].load(&tiles.a[0][0][acc.m], &tiles.b[0][0][acc.n]);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    const bool more = t + TILE_STAGES - 1 < count;
    if (more) {
      weights.fetch(tiles.a[free]);
      columns.fetch(tiles.b[free]);
    }
    commit_copies();
#pragma unroll
    for (int k = 0; k < TILE_K; ++k) {
      if (k == TILE_K - 1) {
        if (more) {
          weights.land(tiles.a[free]);
          columns.land(tiles.b[free]);
        }
        free = here;
        here = here + 1 == TILE_STAGES ? 0 : here + 1;
        await_copies<TILE_STAGES - 2>();
        // The next tile has arrived for all threads, and this one has been read: its stage is free.
        __syncthreads();
      }
      const int next = (k + 1) % TILE_K;  // beyond the last tile it reads a stage in vain
      operands[(k + 1) % 2].load(&tiles.a[here][next][acc.m], &tiles.b[here][next][acc.n]);
      acc.multiply(operands[k % 2]);
    }
  }
}

// Epilogue and store to NCHW. `out` is the split's output.
//
// Accumulators go through shared memory, one row of every thread per pass: a thread then keeps to
// one pixel, and a warp writes 32 contiguous pixels whatever the plane's size.
__device__ __forceinline__ void store(const Accumulator& acc, Shared& shared, const ConvShape& p,
                                      const GemmShape& g, const BlockTile& block,
                                      const float* bias, const float* residual, float* out) {
  constexpr int kRowStep = kThreads / TILE_N;
  static_assert(kThreads % TILE_N == 0, "a thread keeps to one pixel");
  const int column = threadIdx.x % TILE_N;
  const unsigned pixel = g.first_pixel + block.n + column;
  const unsigned image = quotient(pixel, g.plane);
  const unsigned plane = g.plane.divisor;
  const unsigned start = image * p.o * plane + (pixel - image * plane);
  const bool exists = pixel < (unsigned)g.pixels;

  __syncthreads();  // the slabs overlay tiles that are still being multiplied
#pragma unroll
  for (int i = 0; i < TILE_TM; ++i) {
    float(*slab)[TILE_N] = shared.slabs[i % 2];
#pragma unroll
    for (int j = 0; j < TILE_TN; j += kVector) {
      *(float4*)&slab[acc.slab_row()][acc.n + j * kLanesN] = *(const float4*)&acc.sum[i][j];
    }
    // One barrier per pass suffices: the next pass fills the other slab, which was read before this
    // barrier.
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
