// Linear for large batches: a tiled GEMM on CUDA cores, with operands of 16-byte chunks.
// 1. A CTA copies BLOCK_M samples and BLOCK_N features, BLOCK_K of K at a time, to shared memory;
//    the next tile is loaded to registers at the same time.
// 2. Each thread accumulates THREAD_M × THREAD_N outputs in registers.
//
// The including file defines
// - Number, of a sum.
// - CHUNK, the features of a chunk in shared memory, and CHUNKS, of a row of a tile.
// - plus_products(a, b, sum), of two chunks.
//
// Constraints: BLOCK_M and BLOCK_N are multiples of the rows that the CTA copies at once.
#pragma once
#include "common/dependent_launch.cuh"
#include "ops/linear.cuh"

constexpr int BLOCK_K = CHUNKS * CHUNK;
constexpr int SIDE = 16;  // threads along each side of a CTA's tile
constexpr int THREADS = SIDE * SIDE;
constexpr int AT_ONCE = THREADS / CHUNKS;  // rows that the CTA copies at once
constexpr int THREAD_M = BLOCK_M / SIDE;
constexpr int THREAD_N = BLOCK_N / SIDE;
// An odd number of chunks: eight lanes that read a chunk of eight rows touch all 32 banks once.
constexpr int STRIDE = CHUNKS + 1;
static_assert(STRIDE % 2 == 1, "rows begin at different banks");
static_assert(BLOCK_M % SIDE == 0 && BLOCK_N % SIDE == 0, "threads share a tile evenly");
static_assert(BLOCK_M % AT_ONCE == 0 && BLOCK_N % AT_ONCE == 0, "each thread copies whole chunks");

// Rows [first, first + ROWS) of a matrix, features [k, k + BLOCK_K), on their way to a tile.
//
// Matrix::fetch(row, k) loads a chunk as Matrix::Raw, zeros beyond the matrix; chunk_of(raw) is the
// chunk in shared memory. Outputs of extra rows are not written.
template <int ROWS, typename Matrix>
struct Stage {
  static constexpr int COUNT = ROWS / AT_ONCE;
  typename Matrix::Raw value[COUNT];

  __device__ __forceinline__ void fetch(const Matrix& matrix, int first, int k) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      value[i] = matrix.fetch(first + i * AT_ONCE + threadIdx.x / CHUNKS,
                              k + (int)(threadIdx.x % CHUNKS) * CHUNK);
    }
  }

  __device__ __forceinline__ void put(uint4 (*tile)[STRIDE]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      tile[i * AT_ONCE + threadIdx.x / CHUNKS][threadIdx.x % CHUNKS] = Matrix::chunk_of(value[i]);
    }
  }
};

// `finished(sum, o)` makes an output of a whole sum. Weights may be read before the previous launch
// has ended.
template <typename Samples, typename Weights, typename Finished>
__device__ __forceinline__ void multiply_tiles(const Samples& x, const Weights& weight, float* out,
                                               const LinearShape& p, const Finished& finished) {
  __shared__ uint4 samples[BLOCK_M][STRIDE];
  __shared__ uint4 factors[BLOCK_N][STRIDE];
  const unsigned across = (p.out_features + BLOCK_N - 1) / BLOCK_N;
  const int n0 = blockIdx.x / across * BLOCK_M;
  const int o0 = blockIdx.x % across * BLOCK_N;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;

  Number sum[THREAD_M][THREAD_N] = {};
  Stage<BLOCK_M, Samples> from_x;
  Stage<BLOCK_N, Weights> from_weight;
  from_weight.fetch(weight, o0, 0);
  wait_for_previous_launch();
  from_x.fetch(x, n0, 0);
  for (int k = 0; k < p.features; k += BLOCK_K) {
    __syncthreads();  // the previous tile has been read
    from_x.put(samples);
    from_weight.put(factors);
    __syncthreads();
    // Load the next tile while this one is multiplied; zeros after the last.
    from_x.fetch(x, n0, k + BLOCK_K);
    from_weight.fetch(weight, o0, k + BLOCK_K);
#pragma unroll
    for (int q = 0; q < CHUNKS; ++q) {
      uint4 a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a[i] = samples[i * SIDE + ty][q];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b[j] = factors[j * SIDE + tx][q];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] = plus_products(a[i], b[j], sum[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int n = n0 + i * SIDE + ty, o = o0 + j * SIDE + tx;
      if (n < p.n && o < p.out_features) {
        out[(size_t)n * p.out_features + o] = finished(sum[i][j], o);
      }
    }
  }
}
