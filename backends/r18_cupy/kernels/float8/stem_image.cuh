// The image of a stem, four adjacent pixels of a line at a time, as e4m3 numbers: e4m3 as it is,
// float32 times the reciprocal of a scale.
//
// Reads are begun some stages before they are needed. Bytes wait in registers. Four float32 pixels are
// four times as much: `cp.async` copies them into shared memory that no other thread reads.
//
// The including file defines TILE_IMAGE.
#pragma once
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"
#include "float8/e4m3.cuh"

// Values of TILE_IMAGE, as `Image` in float8/stem_wgmma.py has them.
#define IMAGE_E4M3 1
#define IMAGE_FLOAT32 2

constexpr int MAX_CHANNELS = 4;

// Four adjacent pixels of a line: a word per pixel, a byte per channel.
using Quad = unsigned[4];

#if TILE_IMAGE == IMAGE_FLOAT32
struct RawQuad {};  // in shared memory
#else
// As it was read: a word per channel.
struct RawQuad {
  unsigned word[4];
};
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

// -- reading -------------------------------------------------------------------------------------

// A thread's quad of every line: AHEAD stages of LINES lines are read ahead by each of THREADS.
template <int AHEAD, int LINES, int THREADS>
struct ImageReader {
  const unsigned char* image;  // the CTA's image
  unsigned memory;             // in shared memory: the thread's first float32 quad
  float scale, reciprocal;     // of float32
  bool ordinary;               // the reciprocal is neither subnormal nor infinite
  int channels, h, w;
  int first;   // column of its first pixel
  bool words;  // whether a quad is inside of the image or outside, and its words are aligned

  __device__ __forceinline__ ImageReader(const unsigned char* x, const float* scale, unsigned memory,
                                         int index, const ConvShape& p, int first, int thread)
      : memory(memory + thread * 16),
        scale(TILE_IMAGE == IMAGE_FLOAT32 ? *scale : 1.0f),
        channels(p.c),
        h(p.h),
        w(p.w),
        first(first),
        words(p.w % 4 == 0) {
    constexpr int SIZE = TILE_IMAGE == IMAGE_FLOAT32 ? sizeof(float) : 1;
    image = x + (size_t)index * p.c * p.h * p.w * SIZE;
    reciprocal = __frcp_rn(this->scale);
    ordinary = this->scale > 0x1p-126f && this->scale < 0x1p126f;
  }

  __device__ __forceinline__ bool has(int y, int i) const {
    return (unsigned)y < (unsigned)h && (unsigned)(first + i) < (unsigned)w;
  }

  // After the reads of a stage.
  __device__ __forceinline__ void commit() const {
#if TILE_IMAGE == IMAGE_FLOAT32
    cp_async_commit();
#endif
  }

  // Until the oldest stage of those that are read ahead is there.
  __device__ __forceinline__ void wait() const {
#if TILE_IMAGE == IMAGE_FLOAT32
    cp_async_wait<AHEAD - 1>();
#endif
  }

#if TILE_IMAGE == IMAGE_FLOAT32
  // Of channel c of a quad. `slot`: stage and line.
  __device__ __forceinline__ unsigned place(int slot, int c) const {
    return memory + (slot * MAX_CHANNELS + c) * THREADS * 16;
  }

  __device__ __forceinline__ void read(RawQuad&, int slot, int y) const {
    const float* const numbers = reinterpret_cast<const float*>(image);
#pragma unroll
    for (int c = 0; c < MAX_CHANNELS; ++c) {
      if (c >= channels) break;
      const float* const at = numbers + ((c * h + y) * w + first);
      if (words) {
        cp_async<16>(place(slot, c), has(y, 0) ? at : numbers, has(y, 0));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          cp_async<4>(place(slot, c) + 4 * i, has(y, i) ? at + i : numbers, has(y, i));
        }
      }
    }
  }

  // Outside of the image are zeros. NOTE: only images of three channels get unrolled code. A launch
  // finds the instruction cache cold, and at batch 1 fetching code takes longer than dividing.
  __device__ __forceinline__ void convert(Quad& pixels, const RawQuad&, int slot) const {
    if (channels == 3 && ordinary) {
      scale_three(pixels, slot);
    } else {
      divide_each(pixels, slot);
    }
  }

  __device__ __forceinline__ void load(float (&four)[4], int slot, int c) const {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                 : "r"(place(slot, c))
                 : "memory");
  }

  __device__ __forceinline__ void scale_three(Quad& pixels, int slot) const {
    float x[3][4];
#pragma unroll
    for (int c = 0; c < 3; ++c) load(x[c], slot, c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned two = to_e4m3_pair(x[0][i] * reciprocal, x[1][i] * reciprocal);
      pixels[i] = two | to_e4m3_pair(x[2][i] * reciprocal, 0.0f) << 16;
    }
  }

  __device__ __forceinline__ void divide_each(Quad& pixels, int slot) const {
    pixels[0] = pixels[1] = pixels[2] = pixels[3] = 0;
#pragma unroll 1
    for (int c = 0; c < channels; ++c) {
      float four[4];
      load(four, slot, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pixels[i] |= (unsigned)to_e4m3(__fdiv_rn(four[i], scale)) << 8 * c;
      }
    }
  }
#else
  __device__ __forceinline__ void read(RawQuad& raw, int, int y) const {
    raw.word[0] = raw.word[1] = raw.word[2] = raw.word[3] = 0;
    if (words && !has(y, 0)) return;
#pragma unroll
    for (int c = 0; c < MAX_CHANNELS; ++c) {
      if (c >= channels) break;
      const unsigned char* const at = image + ((c * h + y) * w + first);
      if (words) {
        raw.word[c] = *reinterpret_cast<const unsigned*>(at);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (has(y, i)) raw.word[c] |= (unsigned)at[i] << 8 * i;
        }
      }
    }
  }

  // From a word per channel to a word per pixel.
  __device__ __forceinline__ void convert(Quad& pixels, const RawQuad& raw, int) const {
    const unsigned low = __byte_perm(raw.word[0], raw.word[1], 0x5140);
    const unsigned high = __byte_perm(raw.word[0], raw.word[1], 0x7362);
    const unsigned more_low = __byte_perm(raw.word[2], raw.word[3], 0x5140);
    const unsigned more_high = __byte_perm(raw.word[2], raw.word[3], 0x7362);
    pixels[0] = __byte_perm(low, more_low, 0x5410), pixels[1] = __byte_perm(low, more_low, 0x7632);
    pixels[2] = __byte_perm(high, more_high, 0x5410);
    pixels[3] = __byte_perm(high, more_high, 0x7632);
  }
#endif
};
