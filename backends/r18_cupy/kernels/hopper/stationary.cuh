// Weight-stationary products on Hopper for 3×3 windows of stride 1: the weights stay in registers
// while tiles of pixels pass.
//
// `wgmma` reads A from registers: a warpgroup holds 64 output channels of all nine positions of the
// window, over 128 bytes of input channels, which is 144 registers of each thread. Shared memory
// delivers only the pixels, which takes half of its bandwidth.
//
// A tile is TILE_HEIGHT rows of 8 pixels. A patch is a tile's pixels and their halo, 128 bytes of
// channels each. For each position of the window the matrix B begins at another pixel of the patch:
// only the descriptor's address changes.
//
// The host packs weights as the lanes hold them (`lane_order` in
// hopper/implicit_gemm_wgmma_stationary.py).
//
// SPLIT (fp16x3): two consumer warpgroups hold a chunk of 32 channels each, high and low halves.
// Sums are promoted once for each chunk: there are no registers for more (promotion.cuh).
#pragma once
#include "common/settle.cuh"
#include "hopper/products.cuh"
#include "hopper/uniform.cuh"
#include "hopper/wgmma_stationary.cuh"

constexpr int WINDOW = 3, POSITIONS = WINDOW * WINDOW;
constexpr int WIDTH = 8, PATCH_WIDTH = WIDTH + WINDOW - 1;  // pixels of a tile, of a patch
constexpr int PATCH_BYTES = (TILE_HEIGHT + WINDOW - 1) * PATCH_WIDTH * ROW_BYTES;
constexpr int STAGE_BYTES = (PATCH_BYTES + 1023) / 1024 * 1024;
constexpr int SLAB_BYTES = TILE_N * ROW_BYTES;
constexpr int SET_BYTES = SLABS * SLAB_BYTES;  // a set of slabs: a tile's outputs, or its residual
constexpr int EIGHTS = TILE_N / 8;             // rows of a tile

static_assert(TILE_GROUPS_M == 1 && TILE_GROUPS_N == 1,
              "a warpgroup has the registers for the weights of 64 channels");
static_assert(TILE_N == TILE_HEIGHT * WIDTH, "one instruction multiplies a tile's pixels");
static_assert(SLAB_BYTES % 1024 == 0, "slabs are aligned");
static_assert(TILE_BLOCKS == 1, "two warpgroups need the registers of an SM");

// The host's `STATIONARY_SHAPE` mirrors it field by field.
struct StationaryShape {
  int tiles;                    // of pixels, in the whole problem
  int row_tiles, column_tiles;  // of an image
  int has_residual;
};

// A tile's first row, first column, and image.
struct PixelTile {
  int line0, column0, image;
  __device__ __forceinline__ void settle() { ::settle(line0, column0, image); }
};

__device__ __forceinline__ PixelTile pixel_tile_at(unsigned index, const StationaryShape& shape) {
  const unsigned columns = shape.column_tiles, rows = shape.row_tiles;
  return {(int)(index / columns % rows) * TILE_HEIGHT, (int)(index % columns) * WIDTH,
          (int)(index / columns / rows)};
}

// The tiles of a CTA: channel tile blockIdx.x, and every gridDim.y-th pixel tile from blockIdx.y
// on.
struct Share {
  int channel0, first, apart;
  __device__ __forceinline__ Share()
      : channel0(blockIdx.x * TILE_M), first(blockIdx.y), apart(gridDim.y) {}
};

// COUNT mbarriers. Each phase of each completes after `arrivals` arrivals.
template <int COUNT>
struct Mbarriers {
  unsigned first;
  int arrivals;
  __device__ __forceinline__ unsigned of(int i) const { return first + 8 * i; }
  __device__ __forceinline__ unsigned end() const { return first + 8 * COUNT; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < COUNT; ++i) mbarrier_init(of(i), arrivals);
  }
};

// -- products -------------------------------------------------------------------------------------

// The matrix B of a tile's pixels, at `address` of a patch: groups of eight pixels, a row of the
// patch apart.
__device__ __forceinline__ unsigned long long patch_descriptor(unsigned address) {
  constexpr unsigned long long ROWS = (PATCH_WIDTH - 8) * ROW_BYTES / 16;
  return swizzle_128b_descriptor(address) + (ROWS << 32);
}

// A thread's sums of a patch.
struct StationarySums {
  Accumulator main;
#ifdef SPLIT
  Accumulator cross;  // products of a high and a low half

  // The sums, after the last product has completed.
  __device__ __forceinline__ Accumulator& fold() {
    fence_registers(main);
    fence_registers(cross);
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) main[i] = fmaf(cross[i], 1 / LOW_SCALE, main[i]);
    return main;
  }
#else
  __device__ __forceinline__ Accumulator& fold() { return main; }
#endif
};

// A thread's weights: of each position of the window, 128 bytes of channels.
struct StationaryWeights {
  static constexpr int COUNT = POSITIONS * STEPS;
  static constexpr int MAIN_STEPS = SPLITS ? STEPS / 2 : STEPS;  // the others are of low halves
  uint4 steps[COUNT];

  // `packed`: the warpgroup's weights. Volatile: otherwise the compiler would load them again for
  // each tile.
  __device__ __forceinline__ explicit StationaryWeights(const uint4* packed) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(steps[i].x), "=r"(steps[i].y), "=r"(steps[i].z), "=r"(steps[i].w)
                   : "l"(packed + i * CONSUMERS + threadIdx.x % CONSUMERS));
    }
  }

  // Multiplies a patch by the weights; the sums begin at zero. Calls `almost` when only the
  // products of the last position are in flight: products that another warpgroup then issues queue
  // behind them. On return the patch has been read.
  template <typename Almost>
  __device__ __forceinline__ void multiply(StationarySums& sums, unsigned patch,
                                           const Almost& almost) const {
    const unsigned long long corner = patch_descriptor(patch);
    wgmma_fence();
#pragma unroll
    for (int position = 0; position < POSITIONS; ++position) {
      const int shift = position / WINDOW * PATCH_WIDTH + position % WINDOW;
      if (position == POSITIONS - 1) wgmma_commit();
#pragma unroll
      for (int step = 0; step < MAIN_STEPS; ++step) {
        const int i = position * STEPS + step;
        const unsigned long long b = corner + shift * ROW_BYTES / 16 + step * K_STEP;
        if (i == 0) {
          wgmma_stationary_begin(Operand(), sums.main, steps[i], b);
        } else {
          wgmma_stationary(Operand(), sums.main, steps[i], b);
        }
#ifdef SPLIT
        if (i == 0) {
          wgmma_stationary_begin(Operand(), sums.cross, steps[i], b + MAIN_STEPS * K_STEP);
        } else {
          wgmma_stationary(Operand(), sums.cross, steps[i], b + MAIN_STEPS * K_STEP);
        }
        wgmma_stationary(Operand(), sums.cross, steps[i + MAIN_STEPS], b);
#endif
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    almost();
    wgmma_wait<0>();
  }
};

// Splits a patch in place, eight pixels at a time. All threads of a consumer warpgroup. The last
// group may include up to seven rows past the end, which belong to no pixel.
__device__ __forceinline__ void split_patch(unsigned patch) {
  constexpr int WARPS = CONSUMERS / 32, AT_ONCE = 2;
  constexpr int GROUPS = (PATCH_BYTES + 1023) / 1024;
  for (int first = threadIdx.x % CONSUMERS / 32; first < GROUPS; first += AT_ONCE * WARPS) {
    const auto rows_at = [&](int i) { return patch + (first + i * WARPS) * 1024; };
    split_eights<AT_ONCE>(rows_at, (GROUPS - first + WARPS - 1) / WARPS);
  }
}

// -- copies ---------------------------------------------------------------------------------------

// A producer thread: loads the patches of all tiles of the CTA, `chunks` of 128 bytes of channels
// of each, as far ahead as the stages reach. A tile is found before it is needed, because divisions
// take a thread hundreds of cycles; the first ends behind the wait all the same (settle.cuh).
__device__ __forceinline__ void load_patches(const Pipeline& pipeline, unsigned stages,
                                             const TensorMap& x, const ConvShape& p,
                                             const StationaryShape& shape, const Share& share,
                                             int chunks) {
  PipelineState state;
  int used = 0;  // stages
  PixelTile at = pixel_tile_at(share.first, shape);
  at.settle();
  wait_for_previous_launch();
  for (int index = share.first; index < shape.tiles; index += share.apart) {
    for (int chunk = 0; chunk < chunks; ++chunk, state.advance(TILE_STAGES)) {
      const unsigned full = pipeline.full(state.stage);
      if (used++ >= TILE_STAGES) mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, PATCH_BYTES);
      tma_load_patch(stages + state.stage * STAGE_BYTES, x, full, chunk * TILE_K,
                     at.column0 - p.pw, at.line0 - p.ph, at.image);
    }
    at = pixel_tile_at(index + share.apart, shape);
  }
}

// Stores a box of pixels of an NHWC image. Elements past its borders are not written.
__device__ __forceinline__ void tma_store_patch(const TensorMap& map, int c, int w, int h, int n,
                                                unsigned source) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
          &map),
      "r"(c), "r"(w), "r"(h), "r"(n), "r"(source)
      : "memory");
}

// Stores the outputs of a tile. One thread, after a barrier of those that wrote them.
__device__ __forceinline__ void store_outputs(const TensorMap& out, unsigned slabs, int channel0,
                                              const PixelTile& at, const ConvShape& p) {
  for (int slab = 0; slab < SLABS; ++slab) {
    const int channel = channel0 + slab * SLAB_CHANNELS;
    if (channel < p.o) {
      tma_store_patch(out, channel, at.column0, at.line0, at.image, slabs + slab * SLAB_BYTES);
    }
  }
  tma_store_commit();
}

// -- epilogue -------------------------------------------------------------------------------------

// The bias of the lane's two channels.
struct LaneBias {
  float low, high;

  __device__ __forceinline__ LaneBias(const float* bias, const ConvShape& p, int channel0) {
    const int channel = channel0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    low = bias && channel < p.o ? bias[channel] : 0.0f;
    high = bias && channel + 8 < p.o ? bias[channel + 8] : 0.0f;
  }
  __device__ __forceinline__ void add_to(Accumulator& sums) const {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; ++i) sums[i] += i % 4 < 2 ? low : high;
  }
};

// Visits the accumulators with their addresses in the tile's slabs, which have a row for each
// pixel; `visit` as in `visit_slabs`. Eight pixels further is 1024 bytes further, whatever the
// swizzle.
template <typename Visit>
__device__ __forceinline__ void visit_pixels(Accumulator& sums, unsigned slabs,
                                             const Visit& visit) {
  constexpr int EIGHT_ROWS = 8 * ROW_BYTES;
  // Recompute addresses for each tile: keeping them would spill registers.
  int thread = threadIdx.x % 128;
  asm volatile("" : "+r"(thread));
  const int warp = thread / 32, lane = thread % 32;
  if constexpr (sizeof(STORAGE) == 2) {
    const int row = lane / 16 * 8 + lane % 8;
    const unsigned first = slab_address(slabs, row, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < EIGHTS; i += 2) {  // a last row without a pair: two matrices
      visit(sums + 4 * i, i + 1 < EIGHTS ? 4 : 2, first + i * EIGHT_ROWS);
    }
  } else {
    const int row = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
    const unsigned slab = slabs + warp / 2 * SLAB_BYTES + lane / 4 % 4 * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // two pixels of two channels
      const unsigned first = slab_address(slab, row + k % 2, chunk + k / 2 * 2);
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i) visit(sums + 4 * i + k, 1, first + i * EIGHT_ROWS);
    }
  }
}

// The ring of residuals: sets of slabs. Every thread that has read a set arrives itself, so that
// its reads precede the next load.
template <int COUNT>
struct ResidualRing {
  const unsigned sets;
  const Mbarriers<COUNT> full, read;

  __device__ __forceinline__ ResidualRing(unsigned sets, unsigned mbarriers)
      : sets(sets), full{mbarriers, 1}, read{full.end(), CONSUMERS} {}
  __device__ __forceinline__ void init() const { full.init(), read.init(); }

  // Another producer thread: loads the residuals of all tiles of the CTA.
  __device__ __forceinline__ void load(const TensorMap& residual, const StationaryShape& shape,
                                       const Share& share) const {
    int nth = 0;
    PixelTile at = pixel_tile_at(share.first, shape);
    at.settle();
    wait_for_previous_launch();
    for (int index = share.first; index < shape.tiles; index += share.apart, ++nth) {
      const int place = nth % COUNT;
      if (nth >= COUNT) mbarrier_wait(read.of(place), nth / COUNT - 1 & 1);
      mbarrier_arrive_expect_tx(full.of(place), SET_BYTES);
      for (int slab = 0; slab < SLABS; ++slab) {
        tma_load_patch(sets + place * SET_BYTES + slab * SLAB_BYTES, residual, full.of(place),
                       share.channel0 + slab * SLAB_CHANNELS, at.column0, at.line0, at.image);
      }
      at = pixel_tile_at(index + share.apart, shape);
    }
  }

  // Adds the residual of the CTA's tile number `nth`. All threads of a consumer warpgroup.
  __device__ __forceinline__ void add_to(Accumulator& sums, int nth) const {
    const int place = nth % COUNT;
    mbarrier_wait(full.of(place), nth / COUNT & 1);
    visit_pixels(sums, sets + place * SET_BYTES, add_stored<STORAGE>);
    mbarrier_arrive(read.of(place));
  }
};

// Writes the outputs in storage format to a set of slabs.
__device__ __forceinline__ void fill_pixels(Accumulator& sums, unsigned set, bool relu) {
  const auto fill = [&](bool clamps) {
    visit_pixels(sums, set, [=](float* some, int matrices, unsigned address) {
      store_rounded<STORAGE>(some, matrices, address, clamps);
    });
  };
  if (relu) {
    fill(true);
  } else {
    fill(false);
  }
}
