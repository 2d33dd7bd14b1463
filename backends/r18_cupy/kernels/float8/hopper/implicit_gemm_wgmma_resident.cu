// Implicit GEMM of e4m3 numbers on Hopper for stride 1, persistent, with all weights of 64 channels
// resident in shared memory. NHWC.
//
// A CTA computes tiles of whole output rows, all of the same 64 channels
// (bytes/hopper/resident_kernel.cuh). Sums are not promoted: they have at most 9·TILE_K products,
// and a second set of registers would halve the tile. Epilogue: multiplier, bias, residual and
// ReLU.
//
// Constraints: sm_90a; a 3×3 window with stride 1; C and O multiples of 16, C at most TILE_K; the
// weights of 64 channels, the slots of image rows and the slabs in shared memory, see `obstacle` in
// bytes/wgmma_halo.py.
#include "float8/hopper/finishing.cuh"
#include "bytes/hopper/resident_kernel.cuh"

// `residual_multiplier` is null without a residual.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
sconv2d_implicit_gemm_wgmma_resident(const __grid_constant__ TensorMap x,
                                     const __grid_constant__ TensorMap weight,
                                     const __grid_constant__ TensorMap residual,
                                     const __grid_constant__ TensorMap out,
                                     const float* __restrict__ bias,
                                     const float* __restrict__ multiplier,
                                     const float* __restrict__ residual_multiplier,
                                     const ConvShape p,
                                     const HaloShape shape) {
  const Factors factors{bias, multiplier, residual_multiplier};
  convolve_tiles(x, weight, residual, out, factors, p, shape);
}
