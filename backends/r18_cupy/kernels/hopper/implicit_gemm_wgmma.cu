// Convolution as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x). NHWC; fp16, bf16,
// tf32, or fp16x3 (SPLIT).
//
// 1. A producer thread loads K tiles into a ring of stages: weights by TMA, pixels by TMA in im2col
//    mode.
// 2. Consumer warpgroups multiply the stages with `wgmma` and accumulate in float32 registers.
// 3. Epilogue: bias, residual, ReLU, and TMA stores. With TILE_PARTS > 1 the CTAs of a cluster
//    divide K and add their accumulators first (split-K).
//
// Constraints: sm_90a; C and O multiples of 16 bytes; what TMA's im2col mode encodes (stride ≤ 8,
// window ≤ 256); tiles as `tiles_of` in hopper/implicit_gemm_wgmma.py lists them.
#include "hopper/products.cuh"
#include "hopper/gather.cuh"

// A warpgroup's share of the tile: 64 channels from `m` by GROUP_N pixels from `n`.
struct WarpgroupTile {
  const unsigned tiles;
  const int m, n;
  Accumulators accumulators;

  __device__ __forceinline__ WarpgroupTile(unsigned tiles, int warpgroup)
      : tiles(tiles),
        m(warpgroup / TILE_GROUPS_N * 64),
        n(warpgroup % TILE_GROUPS_N * GROUP_N) {}

  // With SPLIT, a K tile is split while the products of the previous one are in flight.
  __device__ __forceinline__ PipelineState mainloop(const Pipeline& pipeline, int count) {
    const unsigned a = tiles + m * ROW_BYTES, b = tiles + BYTES_A + n * ROW_BYTES;
    const bool elected = threadIdx.x % 32 == 0;
    PipelineState state;
    int before = 0;  // the stage of the previous tile
    for (int k = 0; k < count; ++k, state.advance(TILE_STAGES)) {
      mbarrier_wait(pipeline.full(state.stage), state.phase);
      if constexpr (SPLITS) split_pixels<TILE_N>(tiles + state.stage * STAGE_BYTES + BYTES_A);
      const int at = state.stage * STAGE_BYTES;
      multiply_next(accumulators, a + at, b + at, [&] {
        if (k > 0 && elected) mbarrier_arrive(pipeline.empty(before));
      });
      before = state.stage;
    }
    wgmma_wait<0>();
    if (count > 0 && elected) mbarrier_arrive(pipeline.empty(before));
    accumulators.fold();
    return state;
  }

  __device__ __forceinline__ void add_bias(const ConvShape& p, const float* bias, int channel0) {
    ::add_bias(accumulators.main, p, bias, channel0 + m);
  }

  __device__ __forceinline__ void add_residual_slab(int slab, unsigned at) {
    const int warp = threadIdx.x % 128 / 32;
    // A slab holds the channels of a warpgroup, or of two of its warps.
    if (slab != m / 64 * SLABS_GROUP + warp * SLABS_GROUP / 4) return;
    add_residual(accumulators.main, at + n * ROW_BYTES, 0, [](int place) { return place; });
  }

  __device__ __forceinline__ void fill_slabs(unsigned slabs, bool relu) {
    ::fill_slabs(accumulators.main, slabs + m / 64 * SLABS_GROUP * BYTES_B + n * ROW_BYTES, BYTES_B,
                 [](int place) { return place; }, relu);
  }

#if TILE_PARTS > 1
  static constexpr int BLOCKS = GROUP_N / 8;  // of eight pixels
  static constexpr bool LOADS_EARLY = !SPLITS;

  // A thread's outputs of a block, 64 channels by eight pixels. Storage of 16 bits is accessed in
  // pairs of channels of one pixel, and transposed between registers.
  struct Outputs {
    static constexpr bool PAIRS = sizeof(STORAGE) == 2;
    static constexpr int ACCESSES = PAIRS ? 2 : 4;

    size_t first;  // place of the first access
    bool valid[ACCESSES];
    unsigned residuals[ACCESSES];
    float biases[2];  // of the channels of the sums, the second of the last two

    // From the place of the first access.
    static __device__ __forceinline__ int pixel(int access) { return PAIRS ? 0 : access % 2; }
    static __device__ __forceinline__ int channel(int access) {
      return PAIRS ? 8 * access : access / 2 * 8;
    }

    // Loads what is added to the sums, zeros where that is null.
    __device__ __forceinline__ void load(const WarpgroupTile& tile, const ConvShape& p,
                                         unsigned pixel0, int channel0, int block,
                                         const float* bias, const STORAGE* residual) {
      const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
      const int row = channel0 + tile.m + warp * 16, of_sums = row + lane / 4;
      const int o = PAIRS ? row + lane % 4 * 2 : of_sums;
      const unsigned n = pixel0 + tile.n + 8 * block + (PAIRS ? lane / 4 : lane % 4 * 2);
      const unsigned pixels = block < BLOCKS ? (unsigned)p.n * p.oh * p.ow : 0;
      first = (size_t)n * p.o + o;
#pragma unroll
      for (int i = 0; i < ACCESSES; ++i) {
        valid[i] = n + pixel(i) < pixels && o + channel(i) < p.o;
        residuals[i] = 0;
        if (residual && valid[i]) {
          residuals[i] = *reinterpret_cast<const unsigned*>(residual + place(p, i));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        biases[i] = bias && of_sums + 8 * i < p.o ? bias[of_sums + 8 * i] : 0.0f;
      }
    }

    // Finishes the sums and writes them.
    template <typename T>
    __device__ __forceinline__ void write(const ConvShape& p, const float (&sums)[4],
                                          T* out) const {
      const auto finish = [&](float sum, int i, float residual) {
        return epilogue<float>(p, sum, i, 0, biases, &residual);
      };
      if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 added = unpack<T>(transposed(residuals[i]));
          const float first = finish(sums[2 * i], i, added.x);
          const float second = finish(sums[2 * i + 1], i, added.y);
          const unsigned pair = transposed(pack<T>(first, second));
          if (valid[i]) *reinterpret_cast<unsigned*>(out + place(p, i)) = pair;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!valid[i]) continue;
          out[place(p, i)] = finish(sums[i], i / 2, __uint_as_float(residuals[i]));
        }
      }
    }

    __device__ __forceinline__ size_t place(const ConvShape& p, int access) const {
      return first + pixel(access) * p.o + channel(access);
    }
  };
#endif
};

#include "hopper/gather_kernel.cuh"
