// Softmax over rows: one CTA per row, which it reads three times.
// 1. The row's maximum.
// 2. The sum of exp(x − maximum).
// 3. The quotients, rounded once.
//
// Constraints: none. NaN and infinities need no special case. NaN wins the maximum and makes every
// difference NaN; +Inf makes its own difference Inf - Inf = NaN, and with it the sum; -Inf gives
// exp(-Inf) = 0 unless it is the maximum too, which is Inf - Inf again.
#include "common/reduce.cuh"
#include "common/storage.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;

// Every thread gets the block's combined value; all threads must call it.
template <typename Combine>
__device__ __forceinline__ float reduce_block(float value, Combine combine, float* partial) {
  value = reduce_lanes<32>(value, combine);
  __syncthreads();  // the previous reduction's values have been read
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_lanes<WARPS>(partial[threadIdx.x % WARPS], combine);
}

extern "C" __global__ void __launch_bounds__(THREADS)
softmax_rows(const STORAGE* __restrict__ x, STORAGE* __restrict__ out, const int features) {
  __shared__ float partial[WARPS];
  const STORAGE* row = x + blockIdx.x * (unsigned)features;
  STORAGE* target = out + blockIdx.x * (unsigned)features;

  float largest = minus_infinity();
  for (int i = threadIdx.x; i < features; i += THREADS) {
    largest = max_nan(largest, to_float(row[i]));
  }
  largest = reduce_block(largest, Max(), partial);

  float sum = 0.0f;
  for (int i = threadIdx.x; i < features; i += THREADS) sum += expf(to_float(row[i]) - largest);
  sum = reduce_block(sum, Sum(), partial);

  for (int i = threadIdx.x; i < features; i += THREADS) {
    target[i] = from_float<STORAGE>(expf(to_float(row[i]) - largest) / sum);
  }
}
