// Where values are computed.
#pragma once

// Keeps the compiler from computing values only where they are first needed: behind a wait,
// divisions delay the first load by hundreds of cycles. NOTE: the assembler does not see an empty
// `asm`. Within a basic block it still moves divisions behind `griddepcontrol.wait`.
__device__ __forceinline__ void settle(int& value) { asm volatile("" : "+r"(value)); }
template <typename... Ints>
__device__ __forceinline__ void settle(int& value, Ints&... values) {
  settle(value);
  settle(values...);
}
