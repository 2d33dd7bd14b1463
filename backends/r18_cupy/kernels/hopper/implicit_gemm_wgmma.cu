// Convolution as a matrix product on Hopper's tensor cores, of pixels gathered from the image. NHWC.
#include "hopper/products.cuh"
#include "hopper/gather.cuh"

// What a warpgroup does of a tile: its 64 channels, from `m`, of its pixels, from `n`.
struct Group {
  const unsigned tiles;
  const int m, n;
  Products products;

  __device__ __forceinline__ Group(unsigned tiles, int warpgroup)
      : tiles(tiles),
        m(warpgroup / TILE_GROUPS_N * 64),
        n(warpgroup % TILE_GROUPS_N * GROUP_N) {}

  // Where factors are split, those of a tile of K are while the products of the one before are under
  // way.
  __device__ __forceinline__ Turn multiply_all(const Ring& ring, int count) {
    const unsigned a = tiles + m * ROW_BYTES, b = tiles + BYTES_A + n * ROW_BYTES;
    const bool speaks = threadIdx.x % 32 == 0;  // of its warp
    Turn turn;
    int before = 0;  // the stage of the tile before
    for (int k = 0; k < count; ++k, turn.advance(TILE_STAGES)) {
      barrier_wait(ring.full(turn.stage), turn.parity);
      if constexpr (SPLITS) split_pixels<TILE_N>(tiles + turn.stage * STAGE_BYTES + BYTES_A);
      multiply(products, a + turn.stage * STAGE_BYTES, b + turn.stage * STAGE_BYTES);
      wgmma_commit();
      wgmma_wait<1>();  // all but these products have read their stage
      if (k > 0 && speaks) barrier_arrive(ring.empty(before));
      before = turn.stage;
    }
    wgmma_wait<0>();
    if (count > 0 && speaks) barrier_arrive(ring.empty(before));
    products.fold();
    return turn;
  }

  __device__ __forceinline__ void add_bias(const ConvShape& p, const float* bias, int channel0) {
    ::add_bias(products.main, p, bias, channel0 + m);
  }

  __device__ __forceinline__ void add_slab(int slab, unsigned at) {
    const int warp = threadIdx.x % 128 / 32;
    // A slab holds the channels of a warpgroup, or of two of its warps.
    if (slab != m / 64 * SLABS_GROUP + warp * SLABS_GROUP / 4) return;
    add_residual(products.main, at + n * ROW_BYTES, 0, [](int place) { return place; });
  }

  __device__ __forceinline__ void fill_slabs(unsigned slabs, bool relu) {
    ::fill_slabs(products.main, slabs + m / 64 * SLABS_GROUP * BYTES_B + n * ROW_BYTES, BYTES_B,
                 [](int place) { return place; }, relu);
  }

#if TILE_PARTS > 1
  // Transposed, so that a pixel's channels lie side by side.
  __device__ __forceinline__ void lay_down(float* tile) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    float* at = tile + (n + lane % 4 * 2) * PITCH + m + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) {
      float* pixel = at + 8 * j * PITCH;
      pixel[0] = products.main[4 * j], pixel[PITCH] = products.main[4 * j + 1];
      pixel[8] = products.main[4 * j + 2], pixel[PITCH + 8] = products.main[4 * j + 3];
    }
  }
#endif
};

#include "hopper/gather_kernel.cuh"
