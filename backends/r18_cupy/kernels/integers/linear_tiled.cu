// Linear of integers for large batches, a tiled GEMM of dp4a (bytes/linear_tiled.cuh). Bias and
// multiplier make a float32 of each sum.
//
// Rows of the weight are padded with zeros to `pitch` bytes, whole chunks of 16.
#include "integers/dot.cuh"
#include "integers/requantize.cuh"
#include "integers/rows.cuh"

using Number = int;
constexpr int CHUNKS = 8;

__device__ __forceinline__ int plus_products(const uint4& a, const uint4& b, int sum) {
  return dot16<BYTE>(a, b, sum);
}

#include "bytes/linear_tiled.cuh"

// Row-major, `pitch` bytes from one row to the next.
template <typename T>
struct Matrix {
  using Raw = uint4;
  const T* matrix;
  int rows, columns, pitch;

  __device__ __forceinline__ Raw fetch(int row, int k) const {
    const bool exists = row < rows;
    return ::chunk_of(matrix + (exists ? (size_t)row * pitch : 0), k, columns, exists,
                      pitch % CHUNK == 0);
  }

  static __device__ __forceinline__ uint4 chunk_of(const Raw& raw) { return raw; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
qlinear_tiled(const BYTE* __restrict__ x, const signed char* __restrict__ weight,
              const int* __restrict__ bias, const float* __restrict__ multiplier,
              float* __restrict__ out, const LinearShape p, const int pitch) {
  const Matrix<BYTE> samples{x, p.n, p.features, p.features};
  const Matrix<signed char> features{weight, p.out_features, pitch, pitch};
  multiply_tiles(samples, features, out, p,
                 [&](int sum, int o) { return scaled(sum + bias[o], multiplier[o]); });
}
