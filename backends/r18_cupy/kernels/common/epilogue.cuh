// What every convolution is told, and how each of its outputs ends.
#pragma once
#include "common/storage.cuh"

// Extents and steps of a convolution; the host's `CONV_SHAPE` in conv.py mirrors it field by field.
struct ConvShape {
  int n, c, h, w;      // input
  int o, oh, ow;       // output
  int kh, kw;          // window
  int sh, sw, ph, pw;  // strides, padding
  int relu;            // clamp at zero
};

// bias, residual, ReLU, in this order; `bias` and `residual` may be null. `index` is that of the
// output element in memory, where the residual's lies too.
template <typename T>
__device__ __forceinline__ T epilogue(const ConvShape& p, float sum, int channel, size_t index,
                                      const float* bias, const T* residual) {
  if (bias) sum += bias[channel];
  if (residual) sum += to_float(residual[index]);
  if (p.relu) sum = relu(sum);
  return from_float<T>(sum);
}
