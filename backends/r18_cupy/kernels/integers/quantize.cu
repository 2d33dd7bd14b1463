// float32 to int8: the nearest integer to x / scale, saturated. See bytes/quantize.cuh.
#include "bytes/quantize.cuh"
#include "integers/requantize.cuh"

struct Nearest {
  static __device__ __forceinline__ int of(float x, float scale) {
    return saturated(__fdiv_rn(x, scale), -128, 127);
  }
};

extern "C" __global__ void __launch_bounds__(256)
quantize_elements(const float* __restrict__ x, const float* __restrict__ scale,
                  signed char* __restrict__ out, const unsigned count) {
  elements<Nearest, 16>(x, scale, out, count);
}

extern "C" __global__ void __launch_bounds__(256)
quantize_rgb_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                     signed char* __restrict__ out, const unsigned threads, const unsigned runs) {
  rgb_to_nhwc<Nearest>(x, scale, out, threads, runs);
}

extern "C" __global__ void __launch_bounds__(256)
quantize_any_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                     signed char* __restrict__ out, const unsigned count, const unsigned area,
                     const unsigned channels) {
  any_to_nhwc<Nearest>(x, scale, out, count, area, channels);
}
