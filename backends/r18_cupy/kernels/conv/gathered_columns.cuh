// The N side of an implicit GEMM on CUDA cores: columns gathered from the image into shared memory.
// NCHW, float32. TILE_BLOCKED pads C to a multiple of TILE_K.
#pragma once
#include "conv/sgemm.cuh"

// The N side: a thread gathers every kRowStep-th row of one pixel's column.
class GatheredColumns {
 public:
  __device__ __forceinline__ GatheredColumns(const float* x, const ConvShape& p,
                                             const GemmShape& g, const BlockTile& block)
      : p_(p), g_(g) {
    const unsigned pixel = g.first_pixel + block.n + column();
    const unsigned image = quotient(pixel, g.plane);
    const unsigned place = pixel - image * g.plane.divisor;
    const int i = quotient(place, g.row), j = place - i * p.ow;
    const bool exists = pixel < (unsigned)g.pixels;
    image_ = x + (exists ? (size_t)image * p.c * p.h * p.w : 0);
    top_ = exists ? i * p.sh - p.ph : kNowhere;
    left_ = j * p.sw - p.pw;
#if TILE_BLOCKED
    // K order: block of TILE_K channels, r, s, channel within the block.
    const unsigned positions = g.window.divisor;
    const unsigned channels = quotient(block.k_begin, g.window);
    const unsigned position = block.k_begin - channels * positions;
    remaining_ = p.c - channels * TILE_K;
    r_ = quotient(position, g.window_row);
    s_ = position - r_ * p.kw;
    y_ = top_ + r_;
    z_ = left_ + s_;
    // Wraps around outside of the image, where it is not used.
    offset_ = ((channels * TILE_K + first_row()) * p.h + y_) * p.w + z_;
#else
    k_ = block.k_begin * TILE_K;
#endif
  }

  __device__ __forceinline__ void fetch(float (*tile)[TILE_N]) {
#if TILE_BLOCKED
    // A whole tile covers one window position: one bounds check, and channels a plane apart.
    const bool inside = (unsigned)y_ < (unsigned)p_.h && (unsigned)z_ < (unsigned)p_.w;
    const unsigned plane = p_.h * p_.w;
    const float* from = image_ + (inside ? offset_ : 0);
    if (remaining_ >= TILE_K) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        copies_[i].fetch(&tile[first_row() + i * kRowStep][place()],
                         from + (size_t)(i * kRowStep) * plane, inside);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const bool exists = inside && first_row() + i * kRowStep < remaining_;
        copies_[i].fetch(&tile[first_row() + i * kRowStep][place()],
                         exists ? from + (size_t)(i * kRowStep) * plane : image_, exists);
      }
    }
    ++z_, ++offset_;
    if (++s_ == p_.kw) {
      s_ = 0, z_ -= p_.kw, ++y_, offset_ += p_.w - p_.kw;
      if (++r_ == p_.kh) {
        r_ = 0, y_ -= p_.kh, offset_ += TILE_K * plane - p_.kh * p_.w;
        remaining_ -= TILE_K;
      }
    }
#else
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // K order: channel, r, s. Past its end the weights are zero, and the pixels must be zero too:
      // infinity times zero is NaN.
      const unsigned k = k_ + first_row() + i * kRowStep;
      const unsigned channel = quotient(k, g_.window);
      const unsigned position = k - channel * g_.window.divisor;
      const unsigned r = quotient(position, g_.window_row);
      const int y = top_ + (int)r, z = left_ + (int)(position - r * p_.kw);
      const bool inside = k < (unsigned)g_.depth && (unsigned)y < (unsigned)p_.h &&
                          (unsigned)z < (unsigned)p_.w;
      const unsigned offset = (channel * p_.h + y) * p_.w + z;
      copies_[i].fetch(&tile[first_row() + i * kRowStep][place()],
                       image_ + (inside ? offset : 0), inside);
    }
    k_ += TILE_K;
#endif
  }

  __device__ __forceinline__ void land(float (*tile)[TILE_N]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      copies_[i].land(&tile[first_row() + i * kRowStep][place()]);
    }
  }

 private:
  static constexpr int kRowStep = kThreads / TILE_N, kRows = TILE_K / kRowStep;
  static constexpr int kNowhere = -(1 << 30);  // above every image, whatever r is added
  static_assert(kThreads % TILE_N == 0, "a thread keeps to one pixel");
  static_assert(TILE_K % kRowStep == 0, "threads must fill the tile's rows");

  static __device__ __forceinline__ int column() { return threadIdx.x % TILE_N; }
  static __device__ __forceinline__ int place() { return swapped_column(column()); }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / TILE_N; }

  const ConvShape& p_;
  const GemmShape& g_;
  const float* image_;
  int top_, left_;  // the window's corner
#if TILE_BLOCKED
  int remaining_;       // channels from the tile's first on
  int r_, s_;           // the window position of the tile
  int y_, z_;           // the pixel's row and column there
  unsigned offset_;     // its place in the image, in this thread's first channel
#else
  unsigned k_;
#endif
  StagedCopy<float> copies_[kRows];
};
