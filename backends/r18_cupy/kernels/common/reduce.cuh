// Reductions over the lanes of a warp in a fixed order, so results are bitwise reproducible.
#pragma once

// The identity of max.
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The larger value; NaN where either is NaN, unlike fmaxf.
__device__ __forceinline__ float max_nan(float a, float b) { return b > a || b != b ? b : a; }

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  __device__ float operator()(float a, float b) const { return max_nan(a, b); }
};

// Butterfly reduction: every lane of each group of LANES adjacent lanes gets the combined value.
// Both partners add the same pair, so by commutativity all lanes agree to the bit. All lanes of the
// warp must call it.
template <int LANES, typename Combine>
__device__ __forceinline__ float reduce_lanes(float value, Combine combine) {
  static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32, "a butterfly of at most a warp");
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}
