// The image of a stem as bytes, four adjacent pixels of a line at a time.
//
// Reads are begun some stages before they are needed. Bytes wait in registers. Four float32 pixels
// are four times as much: `cp.async` copies them into shared memory that no other thread reads.
//
// integers/stem_image.cuh and float8/stem_image.cuh make an `ImageReader` of these for each kind of
// image, from an image's index, a weight (null for bytes), shared memory of its own, the column of
// its thread's first pixel, and the thread's number. A reader also has
// - Raw: a quad as it was read.
// - read(raw, slot, y): begins to read the quad of line y. `slot`: stage and line.
// - convert(pixels, raw, slot, y): makes bytes of it. Outside of the image are zeros.
#pragma once
#include "common/cp_async.cuh"
#include "common/epilogue.cuh"

constexpr int MAX_CHANNELS = 4;

// Four adjacent pixels of a line: a word per pixel, a byte per channel.
using Quad = unsigned[4];

// Where a thread's quads are: the same columns of every line.
struct QuadColumns {
  int channels, h, w;
  int first;   // column of the first pixel
  bool words;  // whether a quad is inside of the image or outside, and its words are aligned

  __device__ __forceinline__ QuadColumns(const ConvShape& p, int first)
      : channels(p.c), h(p.h), w(p.w), first(first), words(p.w % 4 == 0) {}

  __device__ __forceinline__ bool has(int y, int i) const {
    return (unsigned)y < (unsigned)h && (unsigned)(first + i) < (unsigned)w;
  }

  // Before the first `convert`; after the reads of a stage; until the oldest stage of those that
  // are read ahead is there.
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void commit() const {}
  __device__ __forceinline__ void wait() const {}
};

// An image that is bytes already, in NCHW.
struct ByteReader : QuadColumns {
  // A word per channel.
  struct Raw {
    unsigned word[4];
  };

  const unsigned char* image;

  __device__ __forceinline__ ByteReader(const unsigned char* x, const void*, unsigned, int index,
                                        const ConvShape& p, int first, int)
      : QuadColumns(p, first), image(x + (size_t)index * p.c * p.h * p.w) {}

  __device__ __forceinline__ void read(Raw& raw, int, int y) const {
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
  __device__ __forceinline__ void convert(Quad& pixels, const Raw& raw, int, int) const {
    const unsigned low = __byte_perm(raw.word[0], raw.word[1], 0x5140);
    const unsigned high = __byte_perm(raw.word[0], raw.word[1], 0x7362);
    const unsigned more_low = __byte_perm(raw.word[2], raw.word[3], 0x5140);
    const unsigned more_high = __byte_perm(raw.word[2], raw.word[3], 0x7362);
    pixels[0] = __byte_perm(low, more_low, 0x5410), pixels[1] = __byte_perm(low, more_low, 0x7632);
    pixels[2] = __byte_perm(high, more_high, 0x5410);
    pixels[3] = __byte_perm(high, more_high, 0x7632);
  }
};

// An image of float32 in NCHW. Each of THREADS reads AHEAD stages ahead.
template <int AHEAD, int THREADS>
struct FloatReader : QuadColumns {
  struct Raw {};  // in shared memory

  const unsigned char* image;
  unsigned memory;  // in shared memory: the thread's first quad

  __device__ __forceinline__ FloatReader(const unsigned char* x, unsigned memory, int index,
                                         const ConvShape& p, int first, int thread)
      : QuadColumns(p, first),
        image(x + (size_t)index * p.c * p.h * p.w * sizeof(float)),
        memory(memory + thread * 16) {}

  __device__ __forceinline__ void commit() const { cp_async_commit(); }
  __device__ __forceinline__ void wait() const { cp_async_wait<AHEAD - 1>(); }

  // The address of channel c of a quad. `slot`: stage and line.
  __device__ __forceinline__ unsigned place(int slot, int c) const {
    return memory + (slot * MAX_CHANNELS + c) * THREADS * 16;
  }

  __device__ __forceinline__ void read(Raw&, int slot, int y) const {
    // NOTE: cast here. If the member were a float pointer, NVRTC would branch around addresses that
    // it now selects.
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

  __device__ __forceinline__ void load(float (&four)[4], int slot, int c) const {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                 : "r"(place(slot, c))
                 : "memory");
  }
};
