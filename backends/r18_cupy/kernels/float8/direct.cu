// Direct convolution of e4m3 numbers, in either layout: sums in float32. See bytes/direct.cuh.
#include "float8/e4m3.cuh"

using Number = float;

__device__ __forceinline__ float plus_product(float sum, unsigned char x, unsigned char w) {
  return fmaf(from_e4m3(x), from_e4m3(w), sum);
}

#include "bytes/direct.cuh"

// `residual` and `residual_multiplier` may be null.
struct Epilogue {
  const float *bias, *multiplier;
  const unsigned char* residual;
  const float* residual_multiplier;
  bool relu;

  __device__ __forceinline__ unsigned char operator()(float sum, int channel,
                                                      unsigned index) const {
    const float added = residual ? from_e4m3(residual[index]) : 0.0f;
    const float by = residual ? *residual_multiplier : 0.0f;
    return to_e4m3(finished(sum, multiplier[channel], bias[channel], added, by, relu));
  }
};

// NOTE: without the second launch bound, ptxas aims at 32 registers on some architectures and
// spills.
extern "C" __global__ void __launch_bounds__(256, 4)
sconv2d_direct_nchw(const unsigned char* __restrict__ x, const unsigned char* __restrict__ weight,
                    const float* __restrict__ bias, const float* __restrict__ multiplier,
                    const unsigned char* __restrict__ residual,
                    const float* __restrict__ residual_multiplier,
                    unsigned char* __restrict__ out, const ConvShape p) {
  const Epilogue to{bias, multiplier, residual, residual_multiplier, p.relu != 0};
  convolve_nchw(x, weight, p, [&](float sum, int channel, unsigned index) {
    out[index] = to(sum, channel, index);
  });
}

extern "C" __global__ void __launch_bounds__(256, 4)
sconv2d_direct_nhwc(const unsigned char* __restrict__ x, const unsigned char* __restrict__ weight,
                    const float* __restrict__ bias, const float* __restrict__ multiplier,
                    const unsigned char* __restrict__ residual,
                    const float* __restrict__ residual_multiplier,
                    unsigned char* __restrict__ out, const ConvShape p) {
  const Epilogue to{bias, multiplier, residual, residual_multiplier, p.relu != 0};
  convolve_nhwc(x, weight, p, [&](float sum, int channel, unsigned index) {
    out[index] = to(sum, channel, index);
  });
}
