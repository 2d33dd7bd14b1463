// Implicit GEMM of integers on Hopper for stride 1, persistent, with all weights of 64 channels
// resident in shared memory. NHWC.
//
// A CTA computes tiles of whole output rows, all of the same 64 channels
// (bytes/hopper/resident_kernel.cuh). The epilogue requantises.
//
// Constraints: sm_90a; a 3×3 window with stride 1; C and O multiples of 16, C at most TILE_K; the
// weights of 64 channels, the slots of image rows and the slabs in shared memory, see `obstacle` in
// bytes/wgmma_halo.py.
#include "integers/hopper/requantization.cuh"
#include "bytes/hopper/resident_kernel.cuh"

// `residual_multiplier` is null without a residual.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
qconv2d_implicit_gemm_wgmma_resident(const __grid_constant__ TensorMap x,
                                     const __grid_constant__ TensorMap weight,
                                     const __grid_constant__ TensorMap residual,
                                     const __grid_constant__ TensorMap out,
                                     const int* __restrict__ bias,
                                     const float* __restrict__ multiplier,
                                     const float* __restrict__ residual_multiplier,
                                     const int residual_signed, const ConvShape p,
                                     const HaloShape shape) {
  const Factors factors{bias, multiplier, residual_multiplier, residual_signed};
  convolve_tiles(x, weight, residual, out, factors, p, shape);
}
