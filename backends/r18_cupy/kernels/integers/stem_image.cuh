// The image of an integer stem: int8 as it is, pixels through a table, float32 divided by a scale.
// See bytes/stem_image.cuh.
//
// The including file defines TILE_IMAGE.
#pragma once
#include "bytes/stem_image.cuh"

// Values of TILE_IMAGE, as `Image` in integers/stem_wgmma.py has them.
#define IMAGE_INT8 1
#define IMAGE_PIXELS 2
#define IMAGE_FLOAT32 3

#if TILE_IMAGE == IMAGE_FLOAT32
// Divides by one scale, rounded as a division is, if the scale is ordinary. CUDA's division
// branches per quotient, which serialises them; here several are in flight.
struct Divisor {
  float scale, reciprocal, limit;
  bool ordinary;  // no step below underflows or overflows

  __device__ __forceinline__ explicit Divisor(float scale)
      : scale(scale),
        reciprocal(__frcp_rn(scale)),
        limit(256 * scale),  // quotients beyond saturate anyway
        ordinary(scale > 0x1p-90f && scale < 0x1p90f) {}

  // A quotient within one unit in the last place, corrected by its exact remainder, is the rounded
  // one if the reciprocal is rounded to nearest (Markstein, IBM J. Res. Dev. 34, 1990). The first
  // correction brings it there.
  __device__ __forceinline__ float quotient(float x) const {
    const float number = fminf(fmaxf(x, -limit), limit);
    float found = __fmul_rn(number, reciprocal);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found = __fmaf_rn(__fmaf_rn(-found, scale, number), reciprocal, found);
    }
    return found;
  }
};

template <int AHEAD, int THREADS>
struct ImageReader : FloatReader<AHEAD, THREADS> {
  using Base = FloatReader<AHEAD, THREADS>;
  using typename Base::Raw;
  Divisor by;

  __device__ __forceinline__ ImageReader(const unsigned char* x, const void* scale, unsigned memory,
                                         int index, const ConvShape& p, int first, int thread)
      : Base(x, memory, index, p, first, thread), by(*static_cast<const float*>(scale)) {}

  // NOTE: only images of three channels get unrolled code. A launch finds the instruction cache
  // cold, and at batch 1 fetching code takes longer than dividing.
  __device__ __forceinline__ void convert(Quad& pixels, const Raw&, int slot, int) const {
    if (this->channels == 3 && by.ordinary) {
      divide_three(pixels, slot);
    } else {
      divide_each(pixels, slot);
    }
  }

  __device__ __forceinline__ void divide_three(Quad& pixels, int slot) const {
    int integers[3][4];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      float four[4];
      this->load(four, slot, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) integers[c][i] = __float2int_rn(by.quotient(four[i]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned upper;
      asm("cvt.pack.sat.s8.s32.b32 %0, 0, %1, 0;" : "=r"(upper) : "r"(integers[2][i]));
      asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
          : "=r"(pixels[i])
          : "r"(integers[1][i]), "r"(integers[0][i]), "r"(upper));
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
        const int integer = __float2int_rn(__fdiv_rn(four[i], by.scale));
        pixels[i] |= (unsigned)(min(max(integer, -128), 127) & 255) << 8 * c;
      }
    }
  }
};
#elif TILE_IMAGE == IMAGE_PIXELS
constexpr int SHADES = 256;  // of a byte: the table's entries per channel

// Bytes in NHWC.
template <int AHEAD, int THREADS>
struct ImageReader : QuadColumns {
  // Three words if lines can be read in words, else a word per pixel.
  struct Raw {
    unsigned word[4];
  };

  const unsigned char* image;
  unsigned memory;  // in shared memory: the table

  __device__ __forceinline__ ImageReader(const unsigned char* x, const void* table, unsigned memory,
                                         int index, const ConvShape& p, int first, int thread)
      : QuadColumns(p, first), image(x + (size_t)index * p.c * p.h * p.w), memory(memory) {
    words = words && p.c == 3;
    for (int i = thread; i < MAX_CHANNELS * SHADES / 4; i += THREADS) {
      const unsigned four = i < p.c * SHADES / 4 ? static_cast<const unsigned*>(table)[i] : 0;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(memory + i * 4), "r"(four) : "memory");
    }
  }

  __device__ __forceinline__ void begin() const {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");  // the table has been written
  }

  __device__ __forceinline__ void read(Raw& raw, int, int y) const {
    raw.word[0] = raw.word[1] = raw.word[2] = raw.word[3] = 0;
    if (words) {
      if (!has(y, 0)) return;
      const unsigned* const at = reinterpret_cast<const unsigned*>(image + (y * w + first) * 3);
      raw.word[0] = at[0], raw.word[1] = at[1], raw.word[2] = at[2];
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!has(y, i)) continue;
#pragma unroll
      for (int c = 0; c < MAX_CHANNELS; ++c) {
        if (c >= channels) break;
        raw.word[i] |= (unsigned)image[(y * w + first + i) * channels + c] << 8 * c;
      }
    }
  }

  __device__ __forceinline__ unsigned shade(int channel, unsigned byte) const {
    unsigned found;
    asm volatile("ld.shared.u8 %0, [%1];"
                 : "=r"(found)
                 : "r"(memory + channel * SHADES + byte)
                 : "memory");
    return found;
  }

  __device__ __forceinline__ void convert(Quad& pixels, const Raw& raw, int, int y) const {
    Quad bytes = {raw.word[0], raw.word[1], raw.word[2], raw.word[3]};
    if (words) {
      bytes[1] = __byte_perm(raw.word[0], raw.word[1], 0x6543);
      bytes[2] = __byte_perm(raw.word[1], raw.word[2], 0x5432);
      bytes[3] = raw.word[2] >> 8;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned found = shade(0, bytes[i] & 255) | shade(1, bytes[i] >> 8 & 255) << 8 |
                       shade(2, bytes[i] >> 16 & 255) << 16;
      if (channels == MAX_CHANNELS) found |= shade(3, bytes[i] >> 24) << 24;
      pixels[i] = has(y, i) ? found : 0;
    }
  }
};
#else
template <int, int>
using ImageReader = ByteReader;
#endif
