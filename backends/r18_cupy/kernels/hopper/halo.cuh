// Implicit GEMM for stride 1 with the input tile and its halo resident in shared memory, so each
// pixel is loaded once per tile instead of once per window position.
//
// A tile is whole output rows. The image rows under them, padding included, form one run of pixels:
// rows of `padded` = W + 2·pw pixels. For window position (r, s), the matrix B of a run of output
// places is this run shifted by r·padded + s pixels: only the descriptor's address changes. The
// last kw − 1 places of each row are windows that straddle two rows; they are computed and not
// written.
//
// Constraints: stride 1; one consumer warpgroup; the image rows under a tile fit in shared memory.
#pragma once
#include "common/settle.cuh"
#include "hopper/products.cuh"
#include "hopper/uniform.cuh"

constexpr int STAGE_BYTES = TILE_M * ROW_BYTES;  // of weights

static_assert(TILE_GROUPS_M == 1 && TILE_GROUPS_N == 1, "one warpgroup multiplies");

// The host's `HALO_SHAPE` mirrors it field by field.
struct HaloShape {
  int tiles;         // in the whole problem
  int rows, padded;  // output rows per tile; pixels per image row, with padding
  int per_place;     // ⌈2¹⁶ / padded⌉: finds a place's row without dividing
  int has_residual;
  int patch_nbytes;  // bytes of one channel chunk of the image rows
  int slab_pitch;    // bytes from one output slab to the next, a multiple of 1024; a row per place
  int slots;         // slots for chunks of image rows, later for slabs
  int slot_pitch;    // bytes from one slot to the next, a multiple of 1024
  int slots_nbytes;  // bytes of all slots; the weights follow
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

// Maps a place of the tile to its row in a slab of outputs, which holds no padding.
//
// Places that are not outputs need rows too. SPARE, for a slab that is written: they get rows of
// their own behind the outputs, so no two threads write the same bytes; nothing reads those rows.
// For a slab that is read, they all map to row 0, and the value is discarded.
template <bool SPARE>
struct RowOf {
  const ConvShape& p;
  const HaloShape& shape;
  int per_place;
  __device__ __forceinline__ int operator()(int place) const {
    const int line = place * per_place >> 16, column = place - line * shape.padded;
    if (line < shape.rows && column < p.ow) return line * p.ow + column;
    // After the places before it and the outputs still to come.
    return SPARE ? place + max(shape.rows - 1 - line, 0) * p.ow : 0;
  }
};

// Splits a chunk of image rows, eight pixels at a time. All consumer threads; `operands_ready`
// follows. The last group may include up to seven rows past the end, which belong to no pixel.
__device__ __forceinline__ void split_patch(unsigned patch, const HaloShape& shape) {
  constexpr int WARPS = CONSUMERS / 32, AT_ONCE = 2;  // limited by registers
  const int eights = (shape.patch_nbytes + 8 * ROW_BYTES - 1) / (8 * ROW_BYTES);
  for (int first = threadIdx.x / 32; first < eights; first += AT_ONCE * WARPS) {
    const auto rows_at = [&](int i) { return patch + (first + i * WARPS) * 8 * ROW_BYTES; };
    split_eights<AT_ONCE>(rows_at, (eights - first + WARPS - 1) / WARPS);
  }
}
