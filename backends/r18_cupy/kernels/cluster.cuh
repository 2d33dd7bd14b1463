// Thread block clusters: blocks that run side by side and write each other's shared memory. sm_90
// and later (PTX ISA, "barrier.cluster", "mapa", "st.async").
#pragma once

// Every thread of every block of the cluster. Of what was written before nothing is known after, and
// nobody waits until it has arrived in the device's memory.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ unsigned cluster_address(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Four sums to an address of another block, whose barrier counts their bytes. Nobody waits for them but
// at that barrier.
__device__ __forceinline__ void cluster_send(unsigned there, unsigned barrier, const float* sums) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
      "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3]), "r"(barrier)
      : "memory");
}

// Returns once the phase of that parity of this block's barrier has ended; what other blocks sent
// in it is seen.
__device__ __forceinline__ void barrier_wait_for_cluster(unsigned barrier, unsigned parity) {
  unsigned ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!ended);
}
