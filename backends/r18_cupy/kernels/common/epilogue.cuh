// The shape of a convolution, and its epilogue.
#pragma once
#include "common/storage.cuh"

// Extents and strides; the host's `CONV_SHAPE` in conv/base.py mirrors it field by field.
struct ConvShape {
  int n, c, h, w;      // input
  int o, oh, ow;       // output
  int kh, kw;          // window
  int sh, sw, ph, pw;  // strides, padding
  int relu;            // clamp at zero
};

// Bias, residual, ReLU, in this order, then one rounding; `bias` and `residual` may be null. `index`
// is the output element's place in memory, and the residual's.
template <typename T>
__device__ __forceinline__ T epilogue(const ConvShape& p, float sum, int channel, size_t index,
                                      const float* bias, const T* residual) {
  if (bias) sum += bias[channel];
  if (residual) sum += to_float(residual[index]);
  if (p.relu) sum = relu(sum);
  return from_float<T>(to_output(sum));
}
