// Division of 31-bit numbers by a divisor known to the host, as a multiplication and a shift.
// Granlund and Montgomery, PLDI 1994, section 4: with 2^(l-1) < d <= 2^l and m = ceil(2^(31+l) / d)
// the quotient of every n < 2^31 is floor(n * m / 2^(31+l)).
#pragma once

// The host's `FAST_DIVISOR` in conv/sgemm.py mirrors it. d = 1 is encoded as multiplier 0.
struct FastDivisor {
  unsigned divisor, multiplier, shift;
};

__device__ __forceinline__ unsigned quotient(unsigned n, const FastDivisor& d) {
  return d.multiplier ? __umulhi(n, d.multiplier) >> d.shift : n;
}
