// Sending to the shared memory of other CTAs of a cluster, where an mbarrier counts the bytes.
// sm_90 and later (PTX ISA, "st.async").
//
// No CTA waits at a barrier of the cluster after it has written. A barrier that releases waits for
// all writes of its threads (MEMBAR.ALL.GPU). If CTAs read each other's memory instead, they would
// also need a second barrier before they exit.
#pragma once
#include "hopper/cluster.cuh"
#include "hopper/mbarrier.cuh"

// Stores four numbers to shared memory of any CTA; `mbarrier` is of the same CTA. Both are
// `cluster_address`es. NOTE: takes the numbers as they are. The compiler could move a conversion to
// bits ahead of the wait for the `wgmma` that writes them.
__device__ __forceinline__ void cluster_send(unsigned address, const float (&four)[4],
                                             unsigned mbarrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(address), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(mbarrier)
      : "memory");
}
__device__ __forceinline__ void cluster_send(unsigned address, const int (&four)[4],
                                             unsigned mbarrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(address), "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3]), "r"(mbarrier)
      : "memory");
}

// The mbarrier of all that others send to this CTA, `nbytes` in one phase. They may send once they
// have passed a barrier of the cluster at which this CTA arrived after `init` and a barrier of its
// own threads.
struct Arrivals {
  unsigned mbarrier;
  int nbytes;

  // Where memory after the mbarrier begins, aligned to 16 bytes.
  __device__ __forceinline__ unsigned end() const { return mbarrier + 16; }
  // One thread, once. The phase cannot end before this arrival, whenever the bytes arrive.
  __device__ __forceinline__ void init() const {
    mbarrier_init(mbarrier, 1);
    mbarrier_arrive_expect_tx(mbarrier, nbytes);
  }
  // What others have sent is visible after it.
  __device__ __forceinline__ void wait() const {
    unsigned ended;
    do {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(ended)
          : "r"(mbarrier)
          : "memory");
    } while (!ended);
  }
};
