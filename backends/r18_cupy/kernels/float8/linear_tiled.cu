// Linear of float32 means and e4m3 weights for large batches, to float32 logits: a tiled GEMM
// (bytes/linear_tiled.cuh). Weights become float32 on their way to shared memory. Multiplier and
// bias make a logit of each sum.
//
// Sums of a sample are added in the same order whatever the batch is.
#include "float8/e4m3.cuh"

using Number = float;
constexpr int CHUNK = 4, CHUNKS = 16;

__device__ __forceinline__ float plus_products(const uint4& a, const uint4& b, float sum) {
  sum = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), sum);
  sum = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), sum);
  sum = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), sum);
  return fmaf(__uint_as_float(a.w), __uint_as_float(b.w), sum);
}

#include "bytes/linear_tiled.cuh"
#include "common/vector.cuh"

// Four features of a row, from k on; zeros past its end.
template <typename T>
__device__ __forceinline__ Run<T, CHUNK> four_of(const T* matrix, int rows, int features, int row,
                                                 int k) {
  Run<T, CHUNK> found = {};
  if (row >= rows || k >= features) return found;
  const T* at = matrix + (size_t)row * features + k;
  if (features % CHUNK == 0) return *reinterpret_cast<const Run<T, CHUNK>*>(at);  // aligned
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    if (k + i < features) found.at[i] = at[i];
  }
  return found;
}

struct Means {
  using Raw = Run<float, CHUNK>;
  const float* matrix;
  int rows, features;

  __device__ __forceinline__ Raw fetch(int row, int k) const {
    return four_of(matrix, rows, features, row, k);
  }

  static __device__ __forceinline__ uint4 chunk_of(const Raw& raw) {
    return make_uint4(__float_as_uint(raw.at[0]), __float_as_uint(raw.at[1]),
                      __float_as_uint(raw.at[2]), __float_as_uint(raw.at[3]));
  }
};

struct Weights {
  using Raw = Run<unsigned char, CHUNK>;
  const unsigned char* matrix;
  int rows, features;

  __device__ __forceinline__ Raw fetch(int row, int k) const {
    return four_of(matrix, rows, features, row, k);
  }

  static __device__ __forceinline__ uint4 chunk_of(const Raw& raw) {
    const float2 low = from_e4m3_pair(raw.at[0] | raw.at[1] << 8);
    const float2 high = from_e4m3_pair(raw.at[2] | raw.at[3] << 8);
    return make_uint4(__float_as_uint(low.x), __float_as_uint(low.y), __float_as_uint(high.x),
                      __float_as_uint(high.y));
  }
};

// NOTE: without the second launch bound, ptxas aims at 80 registers on sm_80 and spills.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
slinear_tiled(const float* __restrict__ x, const unsigned char* __restrict__ weight,
              const float* __restrict__ bias, const float* __restrict__ multiplier,
              float* __restrict__ out, const LinearShape p) {
  const Means samples{x, p.n, p.features};
  const Weights features{weight, p.out_features, p.features};
  multiply_tiles(samples, features, out, p,
                 [&](float sum, int o) { return fmaf(sum, multiplier[o], bias[o]); });
}
