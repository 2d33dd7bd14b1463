// NCHW to NHWC and back: each image is a matrix (channels × pixels, or pixels × channels) that is
// transposed.
// 1. A CTA copies a tile to shared memory in the order of the source.
// 2. It writes the tile in the order of the target, so both sides coalesce.
//
// Constraints: elements are moved as bits, of 2 or 4 bytes. A tile is square, or covers a narrow
// side (at most NARROW) entirely.

constexpr int THREADS = 256;
constexpr int CAPACITY = NARROW_LENGTH * (NARROW + 1);
static_assert(TILE * (TILE + 1) <= CAPACITY, "a square tile fits");
static_assert(NARROW * (NARROW_LENGTH + 1) <= CAPACITY, "a flat tile fits");

// `count` matrices of rows × columns, in tiles of tile_rows × tile_columns: square, or a narrow
// side entirely by a length of the other.
struct TransposeShape {
  int count, rows, columns, tile_rows, tile_columns;
};

// NOTE: the constant case first: whole tiles then need no division, which costs more than the copy.
__device__ __forceinline__ int line_of(int t, int width) {
  return width == TILE ? t / TILE : t / width;
}

extern "C" __global__ void __launch_bounds__(THREADS)
relayout_transpose(const BITS* __restrict__ x, BITS* __restrict__ out, const TransposeShape p) {
  __shared__ BITS tile[CAPACITY];
  const unsigned across = (p.columns + p.tile_columns - 1) / p.tile_columns;
  const unsigned down = (p.rows + p.tile_rows - 1) / p.tile_rows;
  const unsigned row0 = blockIdx.x / across % down * p.tile_rows;
  const unsigned column0 = blockIdx.x % across * p.tile_columns;
  const int height = min(p.tile_rows, p.rows - row0);
  const int width = min(p.tile_columns, p.columns - column0);
  const int stride = p.tile_columns + 1;  // odd where the tile is square: no bank conflicts
  const unsigned matrix = blockIdx.x / across / down * p.rows * p.columns;

  // Threads traverse the tile in memory order on each side, so both sides coalesce even where a
  // line of the tile has three elements.
  for (int t = threadIdx.x; t < height * width; t += THREADS) {
    const int row = line_of(t, width), column = t - row * width;
    tile[row * stride + column] = x[matrix + (row0 + row) * p.columns + column0 + column];
  }
  __syncthreads();
  for (int t = threadIdx.x; t < height * width; t += THREADS) {
    const int column = line_of(t, height), row = t - column * height;
    out[matrix + (column0 + column) * p.rows + row0 + row] = tile[row * stride + column];
  }
}
