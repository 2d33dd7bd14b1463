// Weight-stationary implicit GEMM on Hopper for 3×3 windows of stride 1 (stationary.cuh). NHWC;
// fp16, bf16, tf32, fp16x3.
//
// One CTA per SM computes tiles of pixels by 64 channels:
// 1. One producer thread loads patches into a ring of stages, another one loads residuals into a
//    ring of sets of slabs, as far ahead as the rings reach.
// 2. Two consumer warpgroups multiply in turn. Warpgroup i takes patches i, i + 2, i + 4, … in the
//    order of loading.
//    TILE_GROUPS_K = 1: each holds all weights, and a tile is one patch.
//    TILE_GROUPS_K = 2: each holds the weights of one chunk of 128 bytes of channels, and a tile is
//    two patches.
//    SPLIT: before its turn a warpgroup splits its patch.
// 3. Epilogue, while the other warpgroup multiplies: bias, residual and ReLU, then a TMA store from
//    slabs. With TILE_GROUPS_K = 2 warpgroup 0 adds bias and residual and passes its sums on to
//    warpgroup 1, which adds its own, applies ReLU and writes the outputs.
//
// Constraints: sm_90a; 3×3 windows, stride 1; C has exactly TILE_GROUPS_K chunks of TILE_K, the
// last one perhaps only in part; C and O multiples of 16 bytes.
#include "hopper/stationary.cuh"

constexpr int TURNS = 2;  // consumer warpgroups, CONSUMERS threads each
constexpr int ALL_THREADS = (TURNS + 1) * CONSUMERS;
constexpr int WRITERS = TURNS / TILE_GROUPS_K;  // warpgroups that write outputs: the last ones
constexpr int RESIDUALS = 2;                    // sets of slabs in their ring
constexpr int PASSED_BYTES = TILE_GROUPS_K > 1 ? TILE_N / 2 * CONSUMERS * sizeof(float) : 0;
// Registers of a thread, by setmaxnreg: 168 at the launch; the producers' warpgroup gives most of
// its own to the consumers.
constexpr int FEW_REGISTERS = 24, MANY_REGISTERS = 240;

static_assert(TILE_GROUPS_K == 1 || TILE_GROUPS_K == TURNS, "each warpgroup has weights");
static_assert(!SPLITS || TILE_GROUPS_K == TURNS, "a warpgroup splits what it alone multiplies");

// Barrier of one consumer warpgroup. The numbers are literals: the compiler would otherwise reserve
// all sixteen.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

// -- sums that warpgroup 0 passes on --------------------------------------------------------------

// Their mbarriers: each thread of warpgroup 0 arrives at WRITTEN after it has written its sums,
// each thread of warpgroup 1 at READ after it has read them. NOTE: not `bar.arrive`, which
// racecheck does not follow.
enum Passing { WRITTEN, READ, PASSINGS };

// Where a thread leaves the sums of eight pixels for the thread at its place in warpgroup 1.
__device__ __forceinline__ unsigned sums_address(unsigned passed, int eight) {
  return passed + (eight * CONSUMERS + threadIdx.x % CONSUMERS) * 16;
}

__device__ __forceinline__ void pass_on(const Accumulator& sums, unsigned passed) {
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
    const float* four = sums + 4 * eight;
    shared_store(sums_address(passed, eight), __float_as_uint(four[0]), __float_as_uint(four[1]),
                 __float_as_uint(four[2]), __float_as_uint(four[3]));
  }
}

__device__ __forceinline__ void add_passed_on(Accumulator& sums, unsigned passed) {
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
    const float4 four = shared_load(sums_address(passed, eight));
    float* to = sums + 4 * eight;
    to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
  }
}

// -- the kernel -----------------------------------------------------------------------------------

// Grid: channel tiles by the CTAs that share the pixel tiles of each; one CTA per SM if there are
// tiles enough.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, TILE_BLOCKS)
conv2d_implicit_gemm_wgmma_stationary(const __grid_constant__ TensorMap x,
                                      const uint4* __restrict__ weight,
                                      const __grid_constant__ TensorMap residual,
                                      const __grid_constant__ TensorMap out,
                                      const float* __restrict__ bias, const ConvShape p,
                                      const StationaryShape shape) {
  extern __shared__ unsigned char dynamic[];
  const unsigned stages = shared_address(aligned_stages(dynamic));
  const unsigned outputs = stages + TILE_STAGES * STAGE_BYTES;  // a set of slabs for each writer
  const unsigned residuals = outputs + WRITERS * SET_BYTES;
  const unsigned passed = residuals + RESIDUALS * SET_BYTES;
  const Pipeline pipeline{passed + PASSED_BYTES, TILE_STAGES};  // of patches
  const ResidualRing<RESIDUALS> ring(residuals, pipeline.end());
  const Mbarriers<TURNS> turn{ring.read.end(), CONSUMERS / 32};  // may multiply
  const Mbarriers<PASSINGS> passing{turn.end(), CONSUMERS};
  const int warpgroup = warpgroup_index();
  const Share share;

  begin_block(pipeline, ring, turn, passing);

  if (warpgroup == TURNS) {
    release_registers<FEW_REGISTERS>();
    const int warp = threadIdx.x / 32 - TURNS * CONSUMERS / 32;
    if (warp == 0 && elect_one()) {
      prefetch_tensor_map(x);
      load_patches(pipeline, stages, x, p, shape, share, TILE_GROUPS_K);
    } else if (warp == 1 && shape.has_residual && elect_one()) {
      prefetch_tensor_map(residual);
      ring.load(residual, shape, share);
    }
    return;
  }

  acquire_registers<MANY_REGISTERS>();
  const bool elected = threadIdx.x % 32 == 0;
  const bool writing = warpgroup >= TURNS - WRITERS;
  const bool storing = writing && threadIdx.x % CONSUMERS == 0;  // the thread that stores outputs
  const int nth_writer = WRITERS > 1 ? warpgroup : 0;
  const unsigned set = outputs + nth_writer * SET_BYTES;
  const int chunk = WRITERS > 1 ? 0 : warpgroup;
  const StationaryWeights weights(weight + (blockIdx.x * TILE_GROUPS_K + chunk) *
                                               (StationaryWeights::COUNT * CONSUMERS));
  const LaneBias kept_bias(bias, p, share.channel0);
  if (storing) prefetch_tensor_map(out);
  const int first = share.first + nth_writer * share.apart, apart = WRITERS * share.apart;
  int turns = 0;  // that the warpgroup has had
  for (int index = first; index < shape.tiles; index += apart, ++turns) {
    StationarySums products;
    PixelTile at;
    if (storing) {  // before the products: divisions take hundreds of cycles
      at = pixel_tile_at(index, shape);
      settle(at.line0, at.column0, at.image);
    }
    __syncwarp();
    const int used = turns * TURNS + warpgroup, stage = used % TILE_STAGES;
    mbarrier_wait(pipeline.full(stage), used / TILE_STAGES & 1);
    if constexpr (SPLITS) {
      split_patch(stages + stage * STAGE_BYTES);
      fence_async_proxy();
      warpgroup_barrier(warpgroup);
    }
    // Warpgroup 0 has the first turn from the start.
    if (turns + warpgroup > 0) mbarrier_wait(turn.of(warpgroup), (turns - 1 + warpgroup) & 1);
    weights.multiply(products, stages + stage * STAGE_BYTES, [&] {
      if (elected) mbarrier_arrive(turn.of(1 - warpgroup));
    });
    if (elected) mbarrier_arrive(pipeline.empty(stage));

    Accumulator& sums = products.fold();
    const auto add_bias_and_residual = [&](const LaneBias& lane_bias) {
      if (shape.has_residual) ring.add_to(sums, turns * WRITERS + nth_writer);
      lane_bias.add_to(sums);
    };
    if constexpr (TILE_GROUPS_K == 1) {
      add_bias_and_residual(kept_bias);
    } else if (warpgroup == 0) {
      // Loads the bias again for each tile: there are no registers left to keep it in.
      add_bias_and_residual(LaneBias(bias, p, share.channel0));
      if (turns > 0) mbarrier_wait(passing.of(READ), (turns - 1) & 1);
      pass_on(sums, passed);
      mbarrier_arrive(passing.of(WRITTEN));
      continue;
    } else {
      mbarrier_wait(passing.of(WRITTEN), turns & 1);
      add_passed_on(sums, passed);
      mbarrier_arrive(passing.of(READ));
    }
    if (storing) tma_store_wait();  // the last outputs have been read
    warpgroup_barrier(warpgroup);
    fill_pixels(sums, set, p.relu);
    fence_async_proxy();
    warpgroup_barrier(warpgroup);
    if (storing) {
      if (turns == 0) wait_for_previous_launch();
      store_outputs(out, set, share.channel0, at, p);
    }
    __syncwarp();
  }
  if (storing) tma_store_wait();
}
