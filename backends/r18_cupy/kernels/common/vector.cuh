// Vectors of adjacent elements as floats, in one access where they are aligned.
#pragma once
#include "common/storage.cuh"

// Elements of a storage format in 16 bytes, the widest access of a thread.
template <typename T>
constexpr int WIDTH = 16 / sizeof(T);

template <typename T, int W>
struct alignas(sizeof(T) * W) Run {
  static_assert(sizeof(T) * W <= 16, "a thread accesses at most 16 bytes at once");
  T at[W];
};

// `x` is aligned to W elements, all in bounds.
template <int W, typename T>
__device__ __forceinline__ void load(float (&value)[W], const T* x) {
  const Run<T, W> run = *reinterpret_cast<const Run<T, W>*>(x);
#pragma unroll
  for (int i = 0; i < W; ++i) value[i] = to_float(run.at[i]);
}

template <int W, typename T>
__device__ __forceinline__ void store(T* out, const float (&value)[W]) {
  Run<T, W> run;
#pragma unroll
  for (int i = 0; i < W; ++i) run.at[i] = from_float<T>(value[i]);
  *reinterpret_cast<Run<T, W>*>(out) = run;
}

// The same where only `left` elements are in bounds: the others are not accessed and read as zero.
template <int W, typename T>
__device__ __forceinline__ void load_some(float (&value)[W], const T* x, unsigned left) {
  if (left >= W) return load(value, x);
#pragma unroll
  for (int i = 0; i < W; ++i) value[i] = i < left ? to_float(x[i]) : 0.0f;
}

template <int W, typename T>
__device__ __forceinline__ void store_some(T* out, const float (&value)[W], unsigned left) {
  if (left >= W) return store(out, value);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (i < left) out[i] = from_float<T>(value[i]);
  }
}
