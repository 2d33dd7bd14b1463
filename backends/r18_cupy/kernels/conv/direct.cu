// Direct convolution: one thread per output loops over its window. NCHW; the slow, plain baseline.
//
// 1. A thread derives its output's image, channel, row and column from its index.
// 2. It accumulates its window in float32.
// 3. Epilogue: bias, residual, ReLU, one rounding.
//
// Constraints: none beyond 32-bit indices.
#include "common/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256)
conv2d_direct(const STORAGE* __restrict__ x, const STORAGE* __restrict__ weight,
              const float* __restrict__ bias, const STORAGE* residual, STORAGE* out,
              const ConvShape p) {
  // Tensors have fewer than 2^31 elements (the host refuses others), and 32-bit division is faster.
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned plane_size = p.oh * p.ow;
  if (index >= (unsigned)p.n * p.o * plane_size) return;
  const int j = index % p.ow;
  const int i = index % plane_size / p.ow;
  const int o = index / plane_size % p.o;
  const int n = index / plane_size / p.o;

  float sum = 0.0f;
  for (int c = 0; c < p.c; ++c) {
    const STORAGE* plane = x + (n * p.c + c) * p.h * p.w;
    const STORAGE* window = weight + (o * p.c + c) * p.kh * p.kw;
    for (int r = 0; r < p.kh; ++r) {
      const int y = i * p.sh - p.ph + r;
      for (int s = 0; s < p.kw; ++s) {
        const int z = j * p.sw - p.pw + s;
        // NOTE: pixels outside of the image count as zero and are not skipped: an infinite weight
        // times zero is NaN.
        const bool inside = 0 <= y && y < p.h && 0 <= z && z < p.w;
        const float pixel = inside ? to_float(plane[y * p.w + z]) : 0.0f;
        sum = fmaf(to_float(window[r * p.kw + s]), pixel, sum);
      }
    }
  }
  out[index] = epilogue<STORAGE>(p, sum, o, index, bias, residual);
}
