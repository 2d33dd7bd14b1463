// The epilogue of a sum: bias, multiplier, residual, and the integer that is stored.
#pragma once
#include "integers/requantize.cuh"

// A convolution's epilogue. The host gives the first five fields (`epilogue` in
// integers/kernel.py), and the limits at which the output saturates (`ends`).
struct Epilogue {
  const int* bias;                   // (O,)
  const float* multiplier;           // (O,)
  const unsigned char* residual;     // like the output; null: none
  const float* residual_multiplier;  // (1,); null without a residual
  int residual_is_signed;
  int low, high;
};

// A byte as the number that it stands for. sign: 256 where bytes are signed, else 0.
__device__ __forceinline__ int number_of(int byte, int sign) { return byte - (byte << 1 & sign); }

__device__ __forceinline__ int sign_of(const Epilogue& to) {
  return to.residual_is_signed ? 256 : 0;
}
