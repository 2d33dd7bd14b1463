// Implicit GEMM of e4m3 numbers on Hopper for stride 1, with the input tile and its halo resident
// in shared memory: each pixel is loaded once per tile. NHWC.
//
// A CTA computes one tile of whole output rows by 64 channels (bytes/hopper/halo_kernel.cuh): image
// rows stay, and weights stream through a ring of stages. Every RUN positions it adds the sum to
// float32 registers (finishing.cuh). Epilogue: multiplier, bias, residual and ReLU.
//
// Constraints: sm_90a; stride 1; C and O multiples of 16; at least one output row in a tile's
// pixels and the image rows in shared memory, see `obstacle` in bytes/wgmma_halo.py.
#include "float8/hopper/finishing.cuh"
#include "bytes/hopper/halo.cuh"

__device__ __forceinline__ void mainloop(Sums& sums, const Ring& ring, const Ring& slot_ring,
                                         unsigned stages, unsigned slots, const ConvShape& p,
                                         const HaloShape& shape) {
  const int chunks = (p.c + TILE_K - 1) / TILE_K, count = chunks * p.kh * p.kw;
  const bool elected = threadIdx.x % 32 == 0;
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) sums[i] = 0.0f;
  Sums part;
  RingState state, slot_state;
  int r = 0, s = 0, slot_before = -1;  // window position; the slot that its products still read
  for (int k = 0; k < count;) {
    int before = -1;  // the stage of the run's previous position
    for (const int last = min(k + RUN, count); k < last; ++k, state.advance(TILE_STAGES)) {
      if (r + s == 0) mbarrier_wait(slot_ring.full(slot_state.stage), slot_state.phase);
      const unsigned pixels = slots + slot_state.stage * shape.patch_pitch;
      mbarrier_wait(ring.full(state.stage), state.phase);
      wgmma_fence();
      multiply(part, row_descriptor<TILE_K>(stages + state.stage * WEIGHT_BYTES),
               row_descriptor<TILE_K>(pixels + (r * shape.padded + s) * TILE_K), before < 0);
      wgmma_commit();
      wgmma_wait<1>();  // all but these products have read their operands
      if (elected && before >= 0) mbarrier_arrive(ring.empty(before));
      if (elected && slot_before >= 0) mbarrier_arrive(slot_ring.empty(slot_before));
      before = state.stage, slot_before = -1;
      if (++s == p.kw) s = 0, ++r;
      if (r == p.kh) {
        r = 0, slot_before = slot_state.stage;
        slot_state.advance(shape.slots);
      }
    }
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(ring.empty(before));
    promote(sums, part);
  }
}

#include "bytes/hopper/halo_kernel.cuh"

// `residual_multiplier` is null without a residual.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
sconv2d_implicit_gemm_wgmma_halo(const __grid_constant__ TensorMap x,
                                 const __grid_constant__ TensorMap weight,
                                 const __grid_constant__ TensorMap residual,
                                 const __grid_constant__ TensorMap out,
                                 const float* __restrict__ bias,
                                 const float* __restrict__ multiplier,
                                 const float* __restrict__ residual_multiplier,
                                 const ConvShape p,
                                 const HaloShape shape) {
  const Factors factors{bias, multiplier, residual_multiplier};
  convolve_rows(x, weight, residual, out, factors, p, shape);
}
