// What the convolutions of images of few channels share, alone or with their max-pooling (POOL):
// how they are divided among blocks of TILE_N channels and some columns. Their host's side is in
// few_channels.py.
#pragma once
#include "common/epilogue.cuh"

constexpr int STRIDE = 2;  // of windows along a row
constexpr int ROWS = 2;    // of the convolution, a turn

// What there is to do, and how it is divided; the host's side is `TASK`.
struct Task {
  int rows, columns;  // of the result
  int ph, pw;         // the pooling's padding, 0 or 1: its windows are 3×3, their stride 2
  int strip;          // turns of a block
};

// Rows of the image under the windows of a turn.
__device__ __forceinline__ int patch_rows_of(const ConvShape& p) {
  return (ROWS - 1) * p.sh + p.kh;
}

// What of it a block does.
struct Share {
  unsigned image;
  int channel0, tile;  // its first channel, and which tile of columns it has
  int strip;           // the first turn that ends a row of the result
  int begin, end;      // turns
  int row0;            // of the convolution, that turn 0 begins with
};

// Grid: x, tiles of channels, innermost; of columns; strips of rows; images.
//
// Pooled row t has rows 2t − ph to 2t − ph + 2 of the convolution: the last two are computed in
// turn t, the first in the turn before, for which a strip begins one earlier.
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
