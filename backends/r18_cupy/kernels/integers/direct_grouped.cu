// Direct convolution of integers with groups and dilation. NHWC.
//
// 1. A thread takes four output channels of one group and PIXELS output pixels, and finds the
//    corners of their windows.
// 2. Tap by tap it adds products of four channels at a time (dp4a). A weight is read once for all
//    its pixels, a pixel once for its four outputs.
// 3. Epilogue: bias, multiplier, residual, and the nearest integer.
//
// Weights are packed by the host as [tap][four channels of the group][slot][4 outputs][4 channels],
// with zeros for channels that do not exist.
//
// Constraints: with CHANNELS 4, input channels of a group are a multiple of four.
#include "common/dependent_launch.cuh"
#include "conv/groups.cuh"
#include "integers/dot.cuh"
#include "integers/finished.cuh"

constexpr int kChannels = 4;  // of a word

// The word of a pixel's next four channels: the first `existing` ones, zeros for the others.
__device__ __forceinline__ unsigned load(const IMAGE* from, int existing) {
#if CHANNELS == 4
  return *(const unsigned*)from;
#else
  unsigned word = 0;
  for (int c = 0; c < min(kChannels, existing); ++c) word |= (unsigned char)from[c] << 8 * c;
  return word;
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
qconv2d_direct_grouped(const IMAGE* __restrict__ x, const uint4* __restrict__ weight,
                       const int* __restrict__ bias, const float* __restrict__ multiplier,
                       const unsigned char* __restrict__ residual,
                       const float* __restrict__ residual_multiplier, const int residual_is_signed,
                       unsigned char* __restrict__ out, const ConvShape p, const int low,
                       const int high, const Groups groups) {
  wait_for_previous_launch();
  const Share share(p, groups);
  if (share.first >= share.pixels) return;
  const Windows windows(share, p, groups);

  int sum[PIXELS][kOutputs] = {};
  const uint4* weights = weight + share.slot;
  for (int r = 0; r < p.kh; ++r) {
    for (int s = 0; s < p.kw; ++s) {
      const IMAGE* at[PIXELS];  // null outside of the image: padding is 0
#pragma unroll
      for (int k = 0; k < PIXELS; ++k) {
        const bool inside = windows.inside(k, r, s, p, groups);
        at[k] = inside ? x + windows.element(k, r, s, p, groups) : nullptr;
      }
      for (int c = 0; c < groups.channels; c += kChannels, weights += groups.slots) {
        const uint4 right = *weights;
#pragma unroll
        for (int k = 0; k < PIXELS; ++k) {
          const unsigned pixel = at[k] ? load(at[k] + c, groups.channels - c) : 0;
          sum[k][0] = dot4<IMAGE>(pixel, right.x, sum[k][0]);
          sum[k][1] = dot4<IMAGE>(pixel, right.y, sum[k][1]);
          sum[k][2] = dot4<IMAGE>(pixel, right.z, sum[k][2]);
          sum[k][3] = dot4<IMAGE>(pixel, right.w, sum[k][3]);
        }
      }
    }
  }

  const Epilogue to{bias, multiplier, residual, residual_multiplier, residual_is_signed, low, high};
#pragma unroll
  for (int k = 0; k < PIXELS; ++k) {
    if (share.pixel(k) >= share.pixels) continue;
#pragma unroll
    for (int v = 0; v < kOutputs; ++v) {
      if (share.offset + v >= groups.outputs) break;
      const int o = share.first_output(groups) + v;
      const unsigned index = share.pixel(k) * p.o + o;
      out[index] = finished(to, sum[k][v], o, index);
    }
  }
}
