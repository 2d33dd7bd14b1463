// Implicit GEMM of integers on Hopper for stride 1, with the input tile and its halo resident in
// shared memory: each pixel is loaded once per tile. NHWC.
//
// A CTA computes one tile of whole output rows by 64 channels (bytes/hopper/halo_kernel.cuh): image
// rows stay, and weights stream through a ring of stages. The epilogue requantises.
//
// Constraints: sm_90a; stride 1; C and O multiples of 16; at least one output row in a tile's
// pixels and the image rows in shared memory, see `obstacle` in bytes/wgmma_halo.py.
#include "integers/hopper/requantization.cuh"
#include "bytes/hopper/halo.cuh"

__device__ __forceinline__ void mainloop(Sums& sums, const Ring& ring, const Ring& slot_ring,
                                         unsigned stages, unsigned slots, const ConvShape& p,
                                         const HaloShape& shape) {
  const int chunks = (p.c + TILE_K - 1) / TILE_K;
  const bool elected = threadIdx.x % 32 == 0;
  RingState state, slot_state;
  int before = 0, slot_before = 0;  // stages of the previous position and the previous chunk
  for (int chunk = 0; chunk < chunks; ++chunk, slot_state.advance(shape.slots)) {
    const unsigned pixels = slots + slot_state.stage * shape.patch_pitch;
    mbarrier_wait(slot_ring.full(slot_state.stage), slot_state.phase);
    for (int r = 0; r < p.kh; ++r) {
      for (int s = 0; s < p.kw; ++s, state.advance(TILE_STAGES)) {
        mbarrier_wait(ring.full(state.stage), state.phase);
        wgmma_fence();
        multiply(sums, row_descriptor<TILE_K>(stages + state.stage * WEIGHT_BYTES),
                 row_descriptor<TILE_K>(pixels + (r * shape.padded + s) * TILE_K),
                 chunk + r + s == 0);
        wgmma_commit();
        wgmma_wait<1>();  // all but these products have read their operands
        if (elected && chunk + r + s > 0) mbarrier_arrive(ring.empty(before));
        if (elected && chunk > 0 && r + s == 0) mbarrier_arrive(slot_ring.empty(slot_before));
        before = state.stage;
      }
    }
    slot_before = slot_state.stage;
  }
  wgmma_wait<0>();
}

#include "bytes/hopper/halo_kernel.cuh"

// `residual_multiplier` is null without a residual.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
qconv2d_implicit_gemm_wgmma_halo(const __grid_constant__ TensorMap x,
                                 const __grid_constant__ TensorMap weight,
                                 const __grid_constant__ TensorMap residual,
                                 const __grid_constant__ TensorMap out,
                                 const int* __restrict__ bias,
                                 const float* __restrict__ multiplier,
                                 const float* __restrict__ residual_multiplier,
                                 const int residual_signed, const ConvShape p,
                                 const HaloShape shape) {
  const Factors factors{bias, multiplier, residual_multiplier, residual_signed};
  convolve_rows(x, weight, residual, out, factors, p, shape);
}
