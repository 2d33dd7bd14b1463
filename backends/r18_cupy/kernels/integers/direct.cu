// Direct convolution of integers, in either layout: sums in int32. See bytes/direct.cuh.
#include "integers/finished.cuh"

using Number = int;

__device__ __forceinline__ int plus_product(int sum, IMAGE x, signed char w) {
  return sum + (int)x * (int)w;
}

#include "bytes/direct.cuh"

// NOTE: without the second launch bound, ptxas aims at 32 registers on some architectures and
// spills.
extern "C" __global__ void __launch_bounds__(256, 4)
qconv2d_direct_nchw(const IMAGE* __restrict__ x, const signed char* __restrict__ weight,
                    const int* __restrict__ bias, const float* __restrict__ multiplier,
                    const unsigned char* __restrict__ residual,
                    const float* __restrict__ residual_multiplier, const int residual_is_signed,
                    unsigned char* __restrict__ out, const ConvShape p, const int low,
                    const int high) {
  const Epilogue to{bias, multiplier, residual, residual_multiplier, residual_is_signed, low, high};
  convolve_nchw(x, weight, p, [&](int sum, int channel, unsigned index) {
    out[index] = finished(to, sum, channel, index);
  });
}

extern "C" __global__ void __launch_bounds__(256, 4)
qconv2d_direct_nhwc(const IMAGE* __restrict__ x, const signed char* __restrict__ weight,
                    const int* __restrict__ bias, const float* __restrict__ multiplier,
                    const unsigned char* __restrict__ residual,
                    const float* __restrict__ residual_multiplier, const int residual_is_signed,
                    unsigned char* __restrict__ out, const ConvShape p, const int low,
                    const int high) {
  const Epilogue to{bias, multiplier, residual, residual_multiplier, residual_is_signed, low, high};
  convolve_nhwc(x, weight, p, [&](int sum, int channel, unsigned index) {
    out[index] = finished(to, sum, channel, index);
  });
}
