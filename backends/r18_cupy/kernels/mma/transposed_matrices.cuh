// Transposing ldmatrix and stmatrix: 8×8 matrices of 16-bit elements between registers and shared
// memory. Lane i gives the shared memory address of row i % 8 of matrix i / 8, and holds, of each
// matrix, column i / 4, rows 2·(i % 4) and the next. sm_90 and later (PTX ISA, "ldmatrix",
// "stmatrix").
#pragma once

__device__ __forceinline__ void load_transposed(unsigned (&pairs)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

// Two matrices; the addresses of lanes 16 to 31 are ignored.
__device__ __forceinline__ void load_transposed_pair(unsigned (&pairs)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(pairs[0]), "=r"(pairs[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_transposed(unsigned address, const unsigned (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

__device__ __forceinline__ void store_transposed_pair(unsigned address,
                                                      const unsigned (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(pairs[0]), "r"(pairs[1])
               : "memory");
}

// Exchanges rows and columns of an 8×8 matrix of 16-bit elements in registers: lane i has elements
// 2·(i % 4) and the next of row i / 4 (PTX ISA, "movmatrix"). All lanes of a warp together.
__device__ __forceinline__ unsigned transposed(unsigned pair) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
