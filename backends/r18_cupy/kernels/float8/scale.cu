// float32 to e4m3: the nearest number to x / scale, saturated. See bytes/quantize.cuh.
#include "bytes/quantize.cuh"
#include "float8/e4m3.cuh"

struct Nearest {
  static __device__ __forceinline__ unsigned char of(float x, float scale) {
    return to_e4m3(__fdiv_rn(x, scale));
  }
};

extern "C" __global__ void __launch_bounds__(256)
scale_elements(const float* __restrict__ x, const float* __restrict__ scale,
               unsigned char* __restrict__ out, const unsigned count) {
  elements<Nearest, 4>(x, scale, out, count);
}

extern "C" __global__ void __launch_bounds__(256)
scale_rgb_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                  unsigned char* __restrict__ out, const unsigned threads, const unsigned runs) {
  rgb_to_nhwc<Nearest>(x, scale, out, threads, runs);
}

extern "C" __global__ void __launch_bounds__(256)
scale_any_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                  unsigned char* __restrict__ out, const unsigned count, const unsigned area,
                  const unsigned channels) {
  any_to_nhwc<Nearest>(x, scale, out, count, area, channels);
}
