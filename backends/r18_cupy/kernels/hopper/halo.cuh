// Convolution of stride 1 by whole output rows: what the kernels share that copy each pixel once.
//
// A tile is whole output rows. The image rows under them are in shared memory, padding included, as
// one run of pixels: row after row of `padded` = W + 2·pw pixels. What lies at (r, s) in the windows
// of a run of output places is then the same run, r·padded + s pixels further on: the matrix begins
// there, and nothing is gathered. The last kw − 1 places of a row are windows that straddle two
// rows; they are computed and not written.
#pragma once
#include "hopper/products.cuh"

constexpr int STAGE_BYTES = TILE_M * ROW_BYTES;  // of weights

static_assert(TILE_GROUPS_M == 1 && TILE_GROUPS_N == 1, "one warpgroup multiplies");

// The host's `ROWS_SHAPE` mirrors it field by field.
struct RowsShape {
  int tiles;         // of the problem
  int rows, padded;  // of output a tile; image pixels a row, padding included
  int per_place;     // ⌈2¹⁶ / padded⌉: a place's row without dividing
  int has_residual;
  int patch_nbytes;  // of a chunk of image rows
  int slab_pitch;    // bytes from one slab of outputs to the next, a multiple of 1024: a row for each
                     // of the tile's places
  int slots;         // of chunks of image rows, and of slabs after them
  int slot_pitch;    // bytes from one to the next, a multiple of 1024
  int slots_nbytes;  // of all, before the weights
};

// Where a tile lies.
struct Tile {
  int channel0, line0, image;
};

// Tiles are numbered by images, in them by rows and, innermost, by channels.
__device__ __forceinline__ Tile tile_at(unsigned index, const ConvShape& p, int rows) {
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned row_tiles = (p.oh + rows - 1) / rows;
  return {(int)(index % channel_tiles) * TILE_M, (int)(index / channel_tiles % row_tiles) * rows,
          (int)(index / channel_tiles / row_tiles)};
}

// A place's row in a slab, which begins with the outputs and no padding.
//
// What is no output is computed like the others. SPARE, in a slab that is written: it goes behind
// the outputs, each place to a row of its own, so that no two threads write the same bytes; all
// TILE_N places fill the slab's rows from the first to the last. Nobody reads those rows. In a slab
// that is read there are no such rows: it is given the first, of which nothing comes.
template <bool SPARE>
struct RowOf {
  const ConvShape& p;
  const RowsShape& shape;
  int per_place;
  __device__ __forceinline__ int operator()(int place) const {
    const int line = place * per_place >> 16, column = place - line * shape.padded;
    if (line < shape.rows && column < p.ow) return line * p.ow + column;
    // Behind the places before it, and the outputs that are yet to come.
    return SPARE ? place + max(shape.rows - 1 - line, 0) * p.ow : 0;
  }
};

// Splits a chunk of image rows that has arrived, eight pixels at a time. All multiplying threads,
// who meet at `factors_made` after it. The last eight are up to seven more than there are: those
// rows are nobody's.
__device__ __forceinline__ void split_patch(unsigned patch, const RowsShape& shape) {
  constexpr int WARPS = MULTIPLIERS / 32, AT_ONCE = 2;  // as many as there are registers for
  const int eights = (shape.patch_nbytes + 8 * ROW_BYTES - 1) / (8 * ROW_BYTES);
  for (int first = threadIdx.x / 32; first < eights; first += AT_ONCE * WARPS) {
    const auto rows_at = [&](int i) { return patch + (first + i * WARPS) * 8 * ROW_BYTES; };
    split_eights<AT_ONCE>(rows_at, (eights - first + WARPS - 1) / WARPS);
  }
}
