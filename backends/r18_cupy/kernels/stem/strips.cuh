// How the convolutions of images with few channels, optionally fused with max-pooling (POOL),
// divide a problem into CTAs. The host side is stem/strips.py.
//
// A CTA computes TILE_N channels of some columns, down a strip of the image: two rows of the
// convolution per turn.
#pragma once
#include "common/epilogue.cuh"

constexpr int STRIDE = 2;  // of windows along a row
constexpr int ROWS = 2;    // of the convolution, per turn

// The output and its division into strips; the host's `TASK` mirrors it.
struct Task {
  int rows, columns;  // of the output
  int ph, pw;         // the pooling's padding, 0 or 1; its windows are 3×3 with stride 2
  int strip;          // turns per CTA
};

// Image rows under the windows of one turn.
__device__ __forceinline__ int patch_rows_of(const ConvShape& p) {
  return (ROWS - 1) * p.sh + p.kh;
}

// The share of one CTA.
struct Share {
  unsigned image;
  int channel0, tile;  // first channel; index of the column tile
  int strip;           // the first turn that completes an output row
  int begin, end;      // turns
  int row0;            // the convolution row that turn 0 begins with
};

// Grid: x; channel tiles innermost, then column tiles, strips, images.
//
// Pooled row t needs rows 2t − ph to 2t − ph + 2 of the convolution. Turn t computes the last two,
// the turn before it the first, so a strip begins one turn early.
__device__ __forceinline__ Share share_of(const ConvShape& p, const Task& task, int column_tiles) {
  const int channel_tiles = (p.o + TILE_N - 1) / TILE_N;
  const int turns = POOL ? task.rows : (task.rows + ROWS - 1) / ROWS;
  const int strips = (turns + task.strip - 1) / task.strip;
  unsigned block = blockIdx.x;
  Share share;
  share.channel0 = block % channel_tiles * TILE_N;
  block /= channel_tiles;
  share.tile = block % column_tiles;
  block /= column_tiles;
  share.strip = block % strips * task.strip;
  share.image = block / strips;
  share.begin = share.strip - (POOL && (share.strip > 0 || task.ph == 0) ? 1 : 0);
  share.end = min(share.strip + task.strip, turns);
  share.row0 = POOL ? 1 - task.ph : 0;
  return share;
}
