// Bulk copies without a tensor map: one thread issues the copy of contiguous bytes to shared
// memory, and an mbarrier counts the bytes that have arrived. sm_90 and later (PTX ISA,
// "cp.async.bulk").
#pragma once
#include "hopper/mbarrier.cuh"

// Loads `nbytes` bytes. Both addresses and `nbytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(unsigned target, const void* source, int nbytes,
                                          unsigned mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(nbytes), "r"(mbarrier)
      : "memory");
}
