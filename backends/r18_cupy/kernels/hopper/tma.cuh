// TMA: one thread has a box of a tensor copied to shared memory, while all go on; a barrier in
// shared memory counts the bytes that have arrived. sm_90 and later (PTX ISA, "cp.async.bulk.tensor"
// and "mbarrier").
#pragma once

// What the copy engine knows of a tensor: made by the host, see tensor_map.py.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// The engine will soon be told of that: it fetches it ahead of the first copy.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// -- barriers -------------------------------------------------------------------------------------

// A barrier's phase ends when `count` threads have arrived and all expected bytes have. Phases are
// told apart by their parity: the first is 0.
__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After the last `barrier_init`, before the barrier of the block that shows them to all.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and holds the phase open until so many bytes have come.
__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, int nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes)
               : "memory");
}

// Returns once the phase of that parity has ended.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  unsigned ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!ended);
}

// -- copies ---------------------------------------------------------------------------------------

// A box of a matrix, from element `column` of row `row`. Rows past the last arrive as zeros.
__device__ __forceinline__ void copy_box(unsigned target, const TensorMap& map, unsigned barrier,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same of a stack of matrices.
__device__ __forceinline__ void copy_box(unsigned target, const TensorMap& map, unsigned barrier,
                                         int column, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// Channels from `c` of a box of pixels of an NHWC image, from row `h` and column `w`. Outside of the
// image is zero.
__device__ __forceinline__ void copy_patch(unsigned target, const TensorMap& map,
                                           unsigned barrier, int c, int w, int h, int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n)
      : "memory");
}

// Where an output pixel's window begins, in the coordinates of an NHWC image.
struct WindowCorner {
  int w, h, n;
};

// Channels from `c` of the pixels that lie at (r, s) in their windows: a run of output pixels from
// the one whose window begins at `corner`, across rows and images. Outside of the images is zero.
__device__ __forceinline__ void copy_pixels(unsigned target, const TensorMap& map,
                                            unsigned barrier, int c, const WindowCorner& corner,
                                            int r, int s) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c), "r"(corner.w), "r"(corner.h), "r"(corner.n),
      "h"((unsigned short)s), "h"((unsigned short)r)
      : "memory");
}

// -- from shared memory ---------------------------------------------------------------------------

// Before a barrier that precedes a store, or products: what the thread has written is seen by the
// copy engine and the tensor cores.
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A box of a matrix; what lies past its last row or column is not written.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row,
                                          unsigned source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   &map),
               "r"(column), "r"(row), "r"(source)
               : "memory");
}

// The same of a stack of matrices.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row, int matrix,
                                          unsigned source) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(column), "r"(row), "r"(matrix), "r"(source)
      : "memory");
}

// Closes the thread's stores so far, for `store_wait`.
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns once the thread's closed stores have read their source, which may go.
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
