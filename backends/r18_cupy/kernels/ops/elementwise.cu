// BatchNorm, ReLU and Add, any shape.
// 1. A thread loads 16 bytes of adjacent elements as float.
// 2. It computes, and rounds once.
// 3. It stores them to the same place.
//
// Constraints: fewer than 2^31 elements. NOTE: no pointer to an activation is __restrict__, since
// the output may alias the first input. A thread reads its elements before it writes them, and
// reads no others.
#include "common/vector.cuh"

constexpr int W = WIDTH<STORAGE>;

// The thread's first element.
__device__ __forceinline__ unsigned first_element() {
  return (blockIdx.x * blockDim.x + threadIdx.x) * W;
}

extern "C" __global__ void __launch_bounds__(256)
elementwise_relu(const STORAGE* x, STORAGE* out, const unsigned count) {
  const unsigned first = first_element();
  if (first >= count) return;
  float value[W];
  load_some(value, x + first, count - first);
#pragma unroll
  for (int i = 0; i < W; ++i) value[i] = relu(value[i]);
  store_some(out + first, value, count - first);
}

extern "C" __global__ void __launch_bounds__(256)
elementwise_add(const STORAGE* a, const STORAGE* b, STORAGE* out, const unsigned count,
                const int with_relu) {
  const unsigned first = first_element();
  if (first >= count) return;
  float value[W], other[W];
  load_some(value, a + first, count - first);
  load_some(other, b + first, count - first);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    value[i] += other[i];
    if (with_relu) value[i] = relu(value[i]);
  }
  store_some(out + first, value, count - first);
}

// Loads W adjacent parameters, from a multiple of W.
__device__ __forceinline__ void load_parameters(float (&value)[W], const float* parameters) {
  static_assert(W % 4 == 0, "parameters are loaded by fours");
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    float four[4];
    load(four, parameters + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) value[i + j] = four[j];
  }
}

// (x - mean) * scale + bias; the host computes scale = weight / sqrt(var + eps). `run`: adjacent
// elements of one channel, height * width in NCHW, 1 in NHWC.
extern "C" __global__ void __launch_bounds__(256)
elementwise_batchnorm(const STORAGE* x, const float* __restrict__ mean,
                      const float* __restrict__ scale, const float* __restrict__ bias,
                      STORAGE* out, const unsigned count, const unsigned channels,
                      const unsigned run) {
  const unsigned first = first_element();
  if (first >= count) return;
  float value[W], m[W], s[W], b[W];
  load_some(value, x + first, count - first);
  unsigned channel = first / run % channels;
  if (run == 1 && channels % W == 0) {
    load_parameters(m, mean + channel);
    load_parameters(s, scale + channel);
    load_parameters(b, bias + channel);
  } else {
    // Division is slow: divide once for the first element's channel, then count.
    unsigned left = run - first % run;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      m[i] = mean[channel];
      s[i] = scale[channel];
      b[i] = bias[channel];
      if (--left == 0) {
        left = run;
        if (++channel == channels) channel = 0;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < W; ++i) value[i] = fmaf(value[i] - m[i], s[i], b[i]);
  store_some(out + first, value, count - first);
}
