// Where values are computed.
#pragma once

// Computes values here and not where they are first needed. The compiler moves arithmetic across
// waits; behind one, divisions delay the first load by hundreds of cycles.
__device__ __forceinline__ void settle(int& value) { asm volatile("" : "+r"(value)); }
template <typename... Ints>
__device__ __forceinline__ void settle(int& value, Ints&... values) {
  settle(value);
  settle(values...);
}
