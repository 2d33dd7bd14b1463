// The image of a stem, four adjacent pixels of a line at a time, as integers: int8 as they are, pixels
// through a table, float32 divided by a scale.
//
// Reads are begun some stages before they are needed. Bytes wait in registers. Four float32 pixels are
// four times as much: `cp.async` copies them into shared memory that no other thread reads.
//
// The including file defines TILE_IMAGE.
#pragma once
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"

// Values of TILE_IMAGE, as `Image` in integers/stem_wgmma.py has them.
#define IMAGE_INT8 1
#define IMAGE_PIXELS 2
#define IMAGE_FLOAT32 3

constexpr int MAX_CHANNELS = 4;
constexpr int SHADES = 256;  // of a byte: the table's entries per channel

// Four adjacent pixels of a line: a word per pixel, a byte per channel.
using Quad = unsigned[4];

#if TILE_IMAGE == IMAGE_FLOAT32
struct RawQuad {};  // in shared memory
#else
// As it was read. Pixels: three words if lines can be read in words, else a word per pixel. int8: a
// word per channel.
struct RawQuad {
  unsigned word[4];
};
#endif

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

// A thread's quad of every line: AHEAD stages of LINES lines are read ahead by each of THREADS.
template <int AHEAD, int LINES, int THREADS>
struct ImageReader {
  const unsigned char* image;  // the CTA's image
  unsigned memory;  // in shared memory: the table of pixels, or the thread's first float32 quad
  Divisor by;       // of float32
  int channels, h, w;
  int first;   // column of its first pixel
  bool words;  // whether a quad is inside of the image or outside, and its words are aligned

  __device__ __forceinline__ ImageReader(const unsigned char* x, const void* weight, unsigned memory,
                                         int index, const ConvShape& p, int first, int thread)
      : memory(memory),
        by(TILE_IMAGE == IMAGE_FLOAT32 ? *static_cast<const float*>(weight) : 1.0f),
        channels(p.c),
        h(p.h),
        w(p.w),
        first(first),
        words(p.w % 4 == 0) {
    const size_t elements = (size_t)index * p.c * p.h * p.w;
#if TILE_IMAGE == IMAGE_FLOAT32
    image = x + elements * sizeof(float);
    this->memory += thread * 16;
#else
    image = x + elements;
#if TILE_IMAGE == IMAGE_PIXELS
    words = words && p.c == 3;
    const unsigned* const table = static_cast<const unsigned*>(weight);
    for (int i = thread; i < MAX_CHANNELS * SHADES / 4; i += THREADS) {
      const unsigned four = i < p.c * SHADES / 4 ? table[i] : 0;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(memory + i * 4), "r"(four) : "memory");
    }
#endif
#endif
  }

  __device__ __forceinline__ bool has(int y, int i) const {
    return (unsigned)y < (unsigned)h && (unsigned)(first + i) < (unsigned)w;
  }

  // Before the first `convert`.
  __device__ __forceinline__ void begin() const {
#if TILE_IMAGE == IMAGE_PIXELS
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");  // the table has been written
#endif
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
  __device__ __forceinline__ void convert(Quad& pixels, const RawQuad&, int slot, int) const {
    if (channels == 3 && by.ordinary) {
      divide_three(pixels, slot);
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

  __device__ __forceinline__ void divide_three(Quad& pixels, int slot) const {
    int integers[3][4];
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      float four[4];
      load(four, slot, c);
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
    for (int c = 0; c < channels; ++c) {
      float four[4];
      load(four, slot, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int integer = __float2int_rn(__fdiv_rn(four[i], by.scale));
        pixels[i] |= (unsigned)(min(max(integer, -128), 127) & 255) << 8 * c;
      }
    }
  }
#elif TILE_IMAGE == IMAGE_PIXELS
  __device__ __forceinline__ void read(RawQuad& raw, int, int y) const {
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

  __device__ __forceinline__ void convert(Quad& pixels, const RawQuad& raw, int, int y) const {
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

  __device__ __forceinline__ void convert(Quad& pixels, const RawQuad& raw, int, int) const {
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
