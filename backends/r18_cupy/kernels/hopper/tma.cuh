// TMA: one thread issues the copy of a box of a tensor to or from shared memory, and an mbarrier
// counts the bytes that have arrived. sm_90 and later (PTX ISA, "cp.async.bulk.tensor").
#pragma once
#include "hopper/mbarrier.cuh"

// A TMA descriptor, encoded by the host: see cuda/tensor_map.py.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// Prefetches the descriptor ahead of the first copy that uses it.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// -- copies ---------------------------------------------------------------------------------------

// Loads a box of a matrix, from element `column` of row `row`. Rows past the last arrive as zeros.
__device__ __forceinline__ void tma_load(unsigned target, const TensorMap& map, unsigned mbarrier,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
      "l"(&map), "r"(mbarrier), "r"(column), "r"(row)
      : "memory");
}

// The same for a batch of matrices.
__device__ __forceinline__ void tma_load(unsigned target, const TensorMap& map, unsigned mbarrier,
                                         int column, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(&map), "r"(mbarrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// Loads a box of pixels of an NHWC image, channels from `c`, rows from `h`, columns from `w`.
// Pixels outside of the image arrive as zeros.
__device__ __forceinline__ void tma_load_patch(unsigned target, const TensorMap& map,
                                               unsigned mbarrier, int c, int w, int h, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(&map), "r"(mbarrier), "r"(c), "r"(w), "r"(h), "r"(n)
      : "memory");
}

// The first pixel of an output pixel's window, in the coordinates of an NHWC image.
struct WindowCorner {
  int w, h, n;
};

// Loads position (r, s) of the windows of a run of output pixels, channels from `c` (TMA's im2col
// mode). `corner` is where the first output's window begins; the run continues across rows and
// images. Pixels outside of the images arrive as zeros.
__device__ __forceinline__ void tma_load_im2col(unsigned target, const TensorMap& map,
                                                unsigned mbarrier, int c,
                                                const WindowCorner& corner, int r, int s) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(target),
      "l"(&map), "r"(mbarrier), "r"(c), "r"(corner.w), "r"(corner.h), "r"(corner.n),
      "h"((unsigned short)s), "h"((unsigned short)r)
      : "memory");
}

// -- stores ---------------------------------------------------------------------------------------

// Makes the thread's writes to shared memory visible to the async proxy, through which TMA and
// `wgmma` read. Issue it before the barrier that precedes the store or the products.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores a box of a matrix. Elements past its last row or column are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, int column, int row,
                                          unsigned source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   &map),
               "r"(column), "r"(row), "r"(source)
               : "memory");
}

// The same for a batch of matrices.
__device__ __forceinline__ void tma_store(const TensorMap& map, int column, int row, int matrix,
                                          unsigned source) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(column), "r"(row), "r"(matrix), "r"(source)
      : "memory");
}

// Commits the thread's stores so far to a group, for `tma_store_wait`.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the thread's committed stores have read shared memory, which may then be reused.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
