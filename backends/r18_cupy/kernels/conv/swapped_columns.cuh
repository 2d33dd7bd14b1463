// Where a column of the float32 GEMM's N side stands in memory: 2·i and 2·i + 1 change places.
// `Accumulator::multiply` (conv/sgemm.cuh) says why.
#pragma once

__device__ __forceinline__ constexpr int swapped_column(int column) { return column ^ 1; }
