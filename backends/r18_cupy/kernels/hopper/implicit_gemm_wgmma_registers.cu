// Implicit GEMM on Hopper for fp16x3, with A in registers: the small tiles of implicit_gemm_wgmma.
// NHWC; float32 operands are multiplied as two float16 numbers each (mma/split.cuh).
//
// Rows of A are output pixels, rows of B output channels:
// 1. The producer thread loads K tiles as in implicit_gemm_wgmma.cu.
// 2. Each consumer thread reads the pixels that it multiplies, splits them, and passes them to
//    `wgmma` in registers. No barrier between threads is needed, which shortens the latency of a
//    problem with few tiles.
// 3. Epilogue as in implicit_gemm_wgmma.cu.
//
// Constraints: sm_90a; float32 storage; TILE_M ≤ 64, since accumulators (promotion.cuh) and two
// buffers of operands are in registers. The host packs weights as 32 high halves, then 32 low
// halves in 128 bytes.
#include "mma/split.cuh"
#include "hopper/gather.cuh"
#include "hopper/promotion.cuh"

constexpr int HALF_STEPS = STEPS / 2;  // K steps of high halves; as many of low ones follow
constexpr int BUFFERS = 2;  // one K tile is split while the previous one is multiplied

static_assert(sizeof(STORAGE) == 4, "only float32 is split");
static_assert(TILE_GROUPS_M == 1 && TILE_N == 64 * TILE_GROUPS_N, "a warpgroup has 64 pixels");
static_assert(TILE_M <= 64, "accumulators and two operand buffers are in registers");
static_assert(PROMOTED == HALF_STEPS, "the products of a K tile are promoted");

// A thread's pixels of a K tile in `wgmma`'s layout: for each step, rows i and i + 8 at columns 2·q
// and the next, and at 8 more, for lane 4·i + q.
struct OperandRegisters {
  unsigned high[HALF_STEPS][4], low[HALF_STEPS][4];
};

// The products of one K tile for `multiply_promoted`; `weights` is their descriptor.
struct TileProducts {
  const OperandRegisters& a;
  const unsigned long long weights;

  __device__ __forceinline__ void add_cross(float (&cross)[TILE_M / 2], int step) const {
    wgmma_registers<TILE_M>(cross, a.high[step], weights + (HALF_STEPS + step) * K_STEP);
    wgmma_registers<TILE_M>(cross, a.low[step], weights + step * K_STEP);
  }

  template <int FIRST, int COUNT>
  __device__ __forceinline__ void add_main(float (&part)[COUNT / 2], int step) const {
    const unsigned long long b = weights + FIRST * ROW_BYTES / 16 + step * K_STEP;
    if (step == 0) {
      wgmma_registers_begin<COUNT>(part, a.high[step], b);
    } else {
      wgmma_registers<COUNT>(part, a.high[step], b);
    }
  }
};

__device__ __forceinline__ float2 load_pair(unsigned address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}

__device__ __forceinline__ void store_pair(unsigned address, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y)
               : "memory");
}

// A warpgroup's 64 pixels, 16 per warp. Matrix rows are pixels in a permuted order: the lanes of
// one access phase take every second pixel, so that their 32 bytes touch all 32 banks.
struct WarpgroupTile {
  const unsigned tiles;
  const int pixel;        // the lane's first pixel of the tile; its second is 8 more
  const unsigned places;  // offset of the lane's first two channels in a row of 128 bytes
  PromotedAccumulators<TILE_M> accumulators;
  OperandRegisters factors[BUFFERS];

  __device__ __forceinline__ WarpgroupTile(unsigned tiles, int warpgroup)
      : tiles(tiles),
        pixel(warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + row()),
        places((threadIdx.x % 4 / 2 ^ row()) * 16 + threadIdx.x % 2 * 8) {}

  // The pixel's row modulo 8, which determines its swizzle.
  static __device__ __forceinline__ int row() {
    const int i = threadIdx.x % 32 / 4;
    return i % 4 * 2 + i / 4;
  }

  // The address of the lane's channels 8·eight + 2·q and the next of its first pixel.
  __device__ __forceinline__ unsigned place(unsigned rows, int eight) const {
    return rows + pixel * ROW_BYTES + (places ^ eight * 32);
  }

  __device__ __forceinline__ void load_operands(OperandRegisters& made, unsigned pixels) const {
#pragma unroll
    for (int eight = 0; eight < 2 * HALF_STEPS; ++eight) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const float2 pair = load_pair(place(pixels, eight) + second * 8 * ROW_BYTES);
        const SplitPair halves = split(pair.x, pair.y);
        made.high[eight / 2][eight % 2 * 2 + second] = halves.high;
        made.low[eight / 2][eight % 2 * 2 + second] = halves.low;
      }
    }
  }

  __device__ __forceinline__ PipelineState mainloop(const Pipeline& pipeline, int count) {
    const bool elected = threadIdx.x % 32 == 0;
    PipelineState state;
    int before = -1;  // the stage whose products are in flight
    const auto next = [&](OperandRegisters& made) {
      mbarrier_wait(pipeline.full(state.stage), state.phase);
      load_operands(made, tiles + state.stage * STAGE_BYTES + BYTES_A);
      const TileProducts products{made, swizzle_128b_descriptor(tiles + state.stage * STAGE_BYTES)};
      // The tile before has been read: its stage, and the registers that the next tile gets.
      multiply_promoted(accumulators, products, [&] {
        if (before >= 0 && elected) mbarrier_arrive(pipeline.empty(before));
      });
      before = state.stage;
      state.advance(TILE_STAGES);
    };
    for (int k = 0; k < count / BUFFERS; ++k) {
#pragma unroll
      for (int i = 0; i < BUFFERS; ++i) next(factors[i]);
    }
    if (count % BUFFERS) next(factors[0]);
    wgmma_wait<0>();
    if (before >= 0 && elected) mbarrier_arrive(pipeline.empty(before));
    accumulators.fold();
    return state;
  }

  __device__ __forceinline__ void add_bias(const ConvShape& p, const float* bias, int channel0) {
#pragma unroll
    for (int j = 0; j < TILE_M / 8; ++j) {
      const int channel = channel0 + 8 * j + threadIdx.x % 4 * 2;
      if (channel >= p.o) break;  // O is a multiple of 4
      const float2 pair = *reinterpret_cast<const float2*>(bias + channel);
      float* acc = accumulators.main + 4 * j;
      acc[0] += pair.x, acc[1] += pair.y, acc[2] += pair.x, acc[3] += pair.y;
    }
  }

  // `visit(two accumulators, address)` for the lane's channels in a slab.
  template <typename Visit>
  __device__ __forceinline__ void visit_slab(int slab, unsigned at, const Visit& visit) {
#pragma unroll
    for (int eight = 0; eight < SLAB_CHANNELS / 8; ++eight) {
      float* acc = accumulators.main + 4 * (slab * SLAB_CHANNELS / 8 + eight);
      visit(acc, place(at, eight));
      visit(acc + 2, place(at, eight) + 8 * ROW_BYTES);
    }
  }

  __device__ __forceinline__ void add_residual_slab(int slab, unsigned at) {
#pragma unroll
    for (int i = 0; i < SLABS; ++i) {  // registers need a compile-time index
      if (i != slab) continue;
      visit_slab(i, at, [](float* acc, unsigned address) {
        const float2 pair = load_pair(address);
        acc[0] += pair.x, acc[1] += pair.y;
      });
    }
  }

  __device__ __forceinline__ void fill_slabs(unsigned slabs, bool relu) {
#pragma unroll
    for (int i = 0; i < SLABS; ++i) {
      visit_slab(i, slabs + i * BYTES_B, [=](float* acc, unsigned address) {
        float2 pair{acc[0], acc[1]};
        if (relu) pair = {::relu(pair.x), ::relu(pair.y)};
        store_pair(address, pair);
      });
    }
  }

#if TILE_PARTS > 1
  static constexpr int BLOCKS = TILE_M / 8;   // of eight channels
  static constexpr bool LOADS_EARLY = false;  // products take all registers

  // A thread's outputs of a block, 64 pixels by eight channels: two pairs of channels.
  struct Outputs {
    size_t first;  // place of the first pair; the second is eight pixels on
    bool valid[2];
    float2 residuals[2], biases;

    // Loads what is added to the sums, zeros where that is null.
    __device__ __forceinline__ void load(const WarpgroupTile& tile, const ConvShape& p,
                                         unsigned pixel0, int channel0, int block,
                                         const float* bias, const float* residual) {
      const int channel = channel0 + 8 * block + threadIdx.x % 4 * 2;  // O is a multiple of 4
      const unsigned n = pixel0 + tile.pixel, pixels = (unsigned)p.n * p.oh * p.ow;
      first = (size_t)n * p.o + channel;
      biases = {};
      const bool within = block < BLOCKS && channel < p.o;
      if (bias && within) biases = *reinterpret_cast<const float2*>(bias + channel);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        valid[i] = n + 8 * i < pixels && within;
        residuals[i] = {};
        if (!residual || !valid[i]) continue;
        residuals[i] = *reinterpret_cast<const float2*>(residual + first + 8 * i * p.o);
      }
    }

    // Finishes the sums and writes them.
    __device__ __forceinline__ void write(const ConvShape& p, const float (&sums)[4],
                                          float* out) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto finish = [&](float sum, float bias, float residual) {
          return epilogue<float>(p, sum, 0, 0, &bias, &residual);
        };
        const float2 pair{finish(sums[2 * i], biases.x, residuals[i].x),
                          finish(sums[2 * i + 1], biases.y, residuals[i].y)};
        if (valid[i]) *reinterpret_cast<float2*>(out + first + 8 * i * p.o) = pair;
      }
    }
  };
#endif
};

#include "hopper/gather_kernel.cuh"
