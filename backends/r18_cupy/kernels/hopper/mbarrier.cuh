// mbarriers: barriers in shared memory that count arriving threads and arriving bytes. sm_90 and
// later (PTX ISA, "mbarrier").
#pragma once

// A phase completes when `count` threads have arrived and all expected bytes have. Waits name a
// phase by its parity; the first is 0.
__device__ __forceinline__ void mbarrier_init(unsigned mbarrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}

// After the last `mbarrier_init`, before the CTA barrier that publishes the mbarriers.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

// Arrives, and keeps the phase open until `nbytes` more bytes have arrived.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned mbarrier, int nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(nbytes)
               : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(unsigned mbarrier, unsigned phase) {
  unsigned ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(mbarrier), "r"(phase)
        : "memory");
  } while (!ended);
}
