// `wgmma` of e4m3: D = A·Bᵀ + D in float32 registers, with A (weights) and B (activations) in shared
// memory. sm_90a only. One instruction multiplies 32 bytes of K of each row.
//
// Matrices and accumulators lie as in integers/hopper/wgmma.cuh.
//
// NOTE: the unit adds at 13 bits of fraction, whatever the registers hold. Sums of more than a K
// tile are promoted: see hopper/tile.cuh.
#pragma once
#include "float8/e4m3.cuh"
#include "integers/hopper/wgmma.cuh"

#define WGMMA_OF_E4M3(N, COUNT, A, B)                                        \
  WGMMA(wgmma, 1, E4m3, N, "k32.f32.e4m3.e4m3", COUNT, A, B, "")             \
  WGMMA(wgmma_begin, 0, E4m3, N, "k32.f32.e4m3.e4m3", COUNT, A, B, "")

WGMMA_OF_E4M3(64, 32, 32, 33)
WGMMA_OF_E4M3(96, 48, 48, 49)
WGMMA_OF_E4M3(112, 56, 56, 57)
WGMMA_OF_E4M3(128, 64, 64, 65)
