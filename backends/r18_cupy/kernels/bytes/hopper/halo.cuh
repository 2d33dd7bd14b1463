// Implicit GEMM of bytes for stride 1 with the input tile and its halo resident in shared
// memory, so each pixel is loaded once per tile instead of once per window position.
//
// A tile is whole output rows by 64 channels. The image rows under them, padding included, form one
// run of pixels: rows of `padded` = W + 2·pw pixels. For window position (r, s), the matrix B of a
// run of output places is this run shifted by r·padded + s pixels: only the descriptor's address
// changes. The last kw − 1 places of each row are windows that straddle two rows; they are computed
// and not written.
//
// The including file includes the header of its numbers first (tile.cuh).
#pragma once
#include "bytes/hopper/tile.cuh"

constexpr int WEIGHT_BYTES = TILE_M * TILE_K;  // of one window position and chunk of channels

static_assert(TILE_GROUPS_M == 1, "a warpgroup multiplies all of a tile's channels");

// The host's `HALO_SHAPE` mirrors it field by field.
struct HaloShape {
  int tiles;         // in the whole problem
  int rows, padded;  // output rows per tile; pixels per image row, with padding
  int per_place;     // ⌈2¹⁶ / padded⌉: finds a place's row without dividing
  int patch_nbytes;  // bytes of one chunk of TILE_K channels of the image rows
  int patch_pitch;   // bytes from one such chunk to the next, a multiple of 1024
  int slots;         // of shared memory for chunks
  int slabs;         // slabs of shared memory, for tiles in turn
  int slab_pitch;    // bytes from one slab to the next, a multiple of 1024
};

// A tile's first channel, output row and image.
struct Tile {
  int channel0, line0, image;
};

// Tile index: image, then row tile, then channel tile (innermost).
__device__ __forceinline__ Tile tile_at(unsigned index, const ConvShape& p, int rows) {
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned row_tiles = (p.oh + rows - 1) / rows;
  return {(int)(index % channel_tiles) * TILE_M, (int)(index / channel_tiles % row_tiles) * rows,
          (int)(index / channel_tiles / row_tiles)};
}

// Maps a place of the tile to its row in the slab, which holds no padding. Places that are not
// outputs have rows of their own behind the outputs, so no two threads write the same bytes;
// nothing reads those rows.
struct RowOf {
  const ConvShape& p;
  const HaloShape& shape;
  int per_place;
  __device__ __forceinline__ int operator()(int place) const {
    const int line = place * per_place >> 16, column = place - line * shape.padded;
    if (line < shape.rows && column < p.ow) return line * p.ow + column;
    // After the places before it and the outputs still to come.
    return place + max(shape.rows - 1 - line, 0) * p.ow;
  }
};
