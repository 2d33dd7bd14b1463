// Weights of 4 and 2 bits, packed two and four to a byte, as bytes.
//
// A weight is unpacked into the highest bits of its byte, so its byte is 2^WEIGHT_SHIFT times the
// weight and no sign has to be extended. A sum is 2^WEIGHT_SHIFT times the sum, still within int32:
// 7·16 and 1·64 are less than 127. In a word of packed weights, bits i·BITS to (i + 1)·BITS − 1 of
// its four bytes are the weights 4·i to 4·i + 3; `pack_narrow` in integers/implicit_gemm_mma.py
// packs them so.
#pragma once

constexpr int WEIGHT_SHIFT = 8 - BITS;

// Sixteen packed weights. As a whole they are aligned to their size.
struct alignas(2 * BITS) NarrowWeights {
  unsigned at[BITS / 2];
};

// The weights as the words of sixteen bytes.
__device__ __forceinline__ uint4 widened(const NarrowWeights& packed) {
  constexpr unsigned MASK = (0xffu << WEIGHT_SHIFT & 0xffu) * 0x01010101u;
  constexpr int GROUPS_PER_WORD = 8 / BITS;
  unsigned bytes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = packed.at[i / GROUPS_PER_WORD];
    bytes[i] = word << (WEIGHT_SHIFT - i % GROUPS_PER_WORD * BITS) & MASK;
  }
  return make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
}
