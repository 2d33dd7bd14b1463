// The share of a thread of a grouped convolution: four output channels of one group, a slot, at
// PIXELS output pixels. NCHW or NHWC.
//
// Where a group's outputs are no multiple of four, its last slot has channels that do not exist.
#pragma once
#include "common/epilogue.cuh"

constexpr int kThreads = 128, kOutputs = 4;
constexpr int kBlocksPerMultiprocessor = PIXELS > 2 ? 3 : 8;  // 168 and 64 registers per thread

// The host's `GROUPS` in conv/direct_grouped.py mirrors it field by field.
struct Groups {
  int channels, outputs;      // of a group
  int slots, slots_of_group;  // of all groups, of one
  int dilation_h, dilation_w;
};

// The slot and the pixels of a thread.
struct Share {
  unsigned pixels;  // of the whole output
  unsigned slot, first, step;
  int group, offset;  // of the slot in its group, in channels

  __device__ __forceinline__ Share(const ConvShape& p, const Groups& groups)
      : pixels((unsigned)p.n * p.oh * p.ow) {
#if NHWC  // neighbouring threads: neighbouring slots; a thread's pixels are neighbours
    const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
    slot = thread % groups.slots;
    first = thread / groups.slots * PIXELS;
    step = 1;
#else  // neighbouring threads: neighbouring pixels
    slot = blockIdx.x % groups.slots;
    first = blockIdx.x / groups.slots * (PIXELS * kThreads) + threadIdx.x;
    step = kThreads;
#endif
    group = slot / groups.slots_of_group;
    offset = (slot - group * groups.slots_of_group) * kOutputs;
  }

  __device__ __forceinline__ unsigned pixel(int k) const { return first + k * step; }
  __device__ __forceinline__ int first_output(const Groups& groups) const {
    return group * groups.outputs + offset;
  }
};

// The windows of a thread's pixels. Where a pixel does not exist, its window is above the image.
struct Windows {
  unsigned image[PIXELS];  // of the first element that its group reads
  int top[PIXELS], left[PIXELS];

  __device__ __forceinline__ Windows(const Share& share, const ConvShape& p, const Groups& groups) {
    const unsigned plane = p.h * p.w, channel = share.group * groups.channels;
#pragma unroll
    for (int k = 0; k < PIXELS; ++k) {
      const unsigned pixel = share.pixel(k), row = pixel / p.ow, n = row / p.oh;
      const bool exists = pixel < share.pixels;
      top[k] = exists ? (int)(row - n * p.oh) * p.sh - p.ph : -(1 << 30);
      left[k] = (int)(pixel - row * p.ow) * p.sw - p.pw;
      const unsigned first = NHWC ? n * plane * p.c + channel : (n * p.c + channel) * plane;
      image[k] = exists ? first : 0;
    }
  }

  // Whether the k-th window's tap (r, s) is inside of the image.
  __device__ __forceinline__ bool inside(int k, int r, int s, const ConvShape& p,
                                         const Groups& groups) const {
    const int y = top[k] + r * groups.dilation_h, z = left[k] + s * groups.dilation_w;
    return 0 <= y && y < p.h && 0 <= z && z < p.w;
  }

  // The element of the group's first channel there.
  __device__ __forceinline__ unsigned element(int k, int r, int s, const ConvShape& p,
                                              const Groups& groups) const {
    const int y = top[k] + r * groups.dilation_h, z = left[k] + s * groups.dilation_w;
    const unsigned place = (unsigned)y * p.w + z;
    return image[k] + (NHWC ? place * p.c : place);
  }
};
