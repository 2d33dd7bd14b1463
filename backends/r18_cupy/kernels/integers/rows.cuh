// Rows of bytes, sixteen at a time: the operands of a linear layer.
#pragma once
#include "common/vector.cuh"

constexpr int CHUNK = 16;  // bytes of an access, and of `dot16`

// Bytes [k, k + 16) of a row of `features`; zeros past its end, or nothing but zeros if the row
// does not exist. whole: rows consist of whole chunks, so they are aligned.
template <typename T>
__device__ __forceinline__ uint4 chunk_of(const T* row, int k, int features, bool exists,
                                          bool whole) {
  if (!exists || k >= features) return make_uint4(0, 0, 0, 0);
  if (whole) return *reinterpret_cast<const uint4*>(row + k);
  Run<T, CHUNK> found;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) found.at[i] = k + i < features ? row[k + i] : T(0);
  return *reinterpret_cast<const uint4*>(&found);
}
