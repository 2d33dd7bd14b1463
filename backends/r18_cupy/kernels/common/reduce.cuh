// Reductions over the lanes of a warp, in one fixed order: the same bits on every run.
#pragma once

// Below every number: what a maximum begins with.
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The larger value, or NaN where either is NaN, which fmaxf would not give.
__device__ __forceinline__ float max_nan(float a, float b) { return b > a || b != b ? b : a; }

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  __device__ float operator()(float a, float b) const { return max_nan(a, b); }
};

// All of every LANES adjacent lanes get their combined value: a butterfly, whose two sides add the
// same pairs, so that commutativity makes the lanes agree to the bit. The whole warp must call it.
template <int LANES, typename Combine>
__device__ __forceinline__ float reduce_lanes(float value, Combine combine) {
  static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32, "a butterfly of at most a warp");
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}
