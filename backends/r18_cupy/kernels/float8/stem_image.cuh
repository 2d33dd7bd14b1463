// The image of an e4m3 stem: e4m3 as it is, float32 times the reciprocal of a scale. See
// bytes/stem_image.cuh.
//
// The including file defines TILE_IMAGE.
#pragma once
#include "bytes/stem_image.cuh"
#include "float8/e4m3.cuh"

// Values of TILE_IMAGE, as `Image` in float8/stem_wgmma.py has them.
#define IMAGE_E4M3 1
#define IMAGE_FLOAT32 2

#if TILE_IMAGE == IMAGE_FLOAT32
template <int AHEAD, int THREADS>
struct ImageReader : FloatReader<AHEAD, THREADS> {
  using Base = FloatReader<AHEAD, THREADS>;
  using typename Base::Raw;
  float scale, reciprocal;
  bool ordinary;  // the reciprocal is neither subnormal nor infinite

  __device__ __forceinline__ ImageReader(const unsigned char* x, const void* scale, unsigned memory,
                                         int index, const ConvShape& p, int first, int thread)
      : Base(x, memory, index, p, first, thread), scale(*static_cast<const float*>(scale)) {
    reciprocal = __frcp_rn(this->scale);
    ordinary = this->scale > 0x1p-126f && this->scale < 0x1p126f;
  }

  // NOTE: only images of three channels get unrolled code. A launch finds the instruction cache
  // cold, and at batch 1 fetching code takes longer than dividing.
  __device__ __forceinline__ void convert(Quad& pixels, const Raw&, int slot, int) const {
    if (this->channels == 3 && ordinary) {
      scale_three(pixels, slot);
    } else {
      divide_each(pixels, slot);
    }
  }

  __device__ __forceinline__ void scale_three(Quad& pixels, int slot) const {
    float x[3][4];
#pragma unroll
    for (int c = 0; c < 3; ++c) this->load(x[c], slot, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned two = to_e4m3_pair(x[0][i] * reciprocal, x[1][i] * reciprocal);
      pixels[i] = two | to_e4m3_pair(x[2][i] * reciprocal, 0.0f) << 16;
    }
  }

  __device__ __forceinline__ void divide_each(Quad& pixels, int slot) const {
    pixels[0] = pixels[1] = pixels[2] = pixels[3] = 0;
#pragma unroll 1
    for (int c = 0; c < this->channels; ++c) {
      float four[4];
      this->load(four, slot, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pixels[i] |= (unsigned)to_e4m3(__fdiv_rn(four[i], scale)) << 8 * c;
      }
    }
  }
};
#else
template <int, int>
using ImageReader = ByteReader;
#endif

// -- NaN -----------------------------------------------------------------------------------------

// The highest bit of each byte that is NaN, of either sign.
__device__ __forceinline__ unsigned nan_bytes(unsigned pixel) {
  return (pixel & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u;
}

__device__ __forceinline__ bool has_nan(const Quad& pixels) {
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) found |= (pixels[i] & 0x7F7F7F7Fu) + 0x01010101u;
  return found & 0x80808080u;
}

// Replaces pixels with a NaN by zeros; returns which they were, a bit each.
__device__ __forceinline__ unsigned take_nan(Quad& pixels) {
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!nan_bytes(pixels[i])) continue;
    found |= 1u << i;
    pixels[i] = 0;
  }
  return found;
}
