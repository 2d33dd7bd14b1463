// Direct convolution with groups and dilation, in float32 on CUDA cores. NCHW or NHWC.
//
// 1. A thread takes four output channels of one group and PIXELS output pixels, and finds the
//    corners of their windows.
// 2. Tap by tap it accumulates them in float32. A weight is read once for all its pixels, a pixel
//    once for its four outputs.
// 3. Epilogue: bias, residual, ReLU, one rounding.
//
// Weights are float32, packed by the host as [tap][channel of the group][slot][4].
//
// Constraints: with CHANNELS 4, input and output channels of a group are multiples of four, and the
// layout is NHWC.
#include "common/dependent_launch.cuh"
#include "conv/groups.cuh"

struct alignas(kOutputs * sizeof(STORAGE)) Four {
  STORAGE at[kOutputs];
};

// CHANNELS neighbouring channels of a pixel; zeros where it is outside of the image.
__device__ __forceinline__ void load(float (&pixel)[CHANNELS], const STORAGE* from, bool inside) {
#if CHANNELS == 1
  pixel[0] = inside ? to_float(*from) : 0.0f;
#else
  Four found = {};
  if (inside) found = *(const Four*)from;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) pixel[c] = to_float(found.at[c]);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
conv2d_direct_grouped(const STORAGE* __restrict__ x, const float4* __restrict__ weight,
                      const float* __restrict__ bias, const STORAGE* __restrict__ residual,
                      STORAGE* __restrict__ out, const ConvShape p, const Groups groups) {
  wait_for_previous_launch();
  const Share share(p, groups);
  if (share.first >= share.pixels) return;
  const Windows windows(share, p, groups);

  float sum[PIXELS][kOutputs] = {};
  const float4* weights = weight + share.slot;
  for (int r = 0; r < p.kh; ++r) {
    for (int s = 0; s < p.kw; ++s) {
      const STORAGE* at[PIXELS];
      bool inside[PIXELS];
#pragma unroll
      for (int k = 0; k < PIXELS; ++k) {
        inside[k] = windows.inside(k, r, s, p, groups);
        at[k] = inside[k] ? x + windows.element(k, r, s, p, groups) : x;
      }
      for (int c = 0; c < groups.channels; c += CHANNELS) {
        float4 right[CHANNELS];
#pragma unroll
        for (int q = 0; q < CHANNELS; ++q, weights += groups.slots) right[q] = *weights;
#pragma unroll
        for (int k = 0; k < PIXELS; ++k) {
          // NOTE: pixels outside of the image count as zero and are not skipped: an infinite weight
          // times zero is NaN.
          float pixel[CHANNELS];
          load(pixel, at[k], inside[k]);
          at[k] += NHWC ? CHANNELS : p.h * p.w;
#pragma unroll
          for (int q = 0; q < CHANNELS; ++q) {
            sum[k][0] = fmaf(right[q].x, pixel[q], sum[k][0]);
            sum[k][1] = fmaf(right[q].y, pixel[q], sum[k][1]);
            sum[k][2] = fmaf(right[q].z, pixel[q], sum[k][2]);
            sum[k][3] = fmaf(right[q].w, pixel[q], sum[k][3]);
          }
        }
      }
    }
  }

  const int first_output = share.first_output(groups);
#pragma unroll
  for (int k = 0; k < PIXELS; ++k) {
    const unsigned pixel = share.pixel(k);
    if (pixel >= share.pixels) continue;
#if CHANNELS == 1
    const unsigned plane = p.oh * p.ow, n = pixel / plane;
#pragma unroll
    for (int v = 0; v < kOutputs; ++v) {
      if (share.offset + v >= groups.outputs) break;
      const int o = first_output + v;
      const size_t index =
          NHWC ? (size_t)pixel * p.o + o : (size_t)(n * p.o + o) * plane + (pixel - n * plane);
      out[index] = epilogue<STORAGE>(p, sum[k][v], o, index, bias, residual);
    }
#else
    const size_t index = (size_t)pixel * p.o + first_output;
    Four results;
#pragma unroll
    for (int v = 0; v < kOutputs; ++v) {
      results.at[v] =
          epilogue<STORAGE>(p, sum[k][v], first_output + v, index + v, bias, residual);
    }
    *(Four*)(out + index) = results;
#endif
  }
}
