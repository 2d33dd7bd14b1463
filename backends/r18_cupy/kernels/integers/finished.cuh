// A whole sum as the integer that is stored. For kernels that finish one output at a time.
#pragma once
#include "integers/epilogue.cuh"

// index: the output's place in memory, and the residual's.
__device__ __forceinline__ int finished(const Epilogue& to, int sum, int channel, unsigned index) {
  float number = scaled(sum + to.bias[channel], to.multiplier[channel]);
  if (to.residual) {
    const int residual = number_of(to.residual[index], sign_of(to));
    number = plus_residual(number, residual, *to.residual_multiplier);
  }
  return saturated(number, to.low, to.high);
}
