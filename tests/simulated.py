"""Small kernels that show how a simulated block runs, for a process that uses the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18_numba.target import numba_cuda

cuda = numba_cuda()
THREADS = 4


@cuda.jit  # type: ignore[untyped-decorator]
def noting(turns: Any) -> None:
    """Each thread appends its number: turns[0] is the count, the numbers follow."""
    for phase in range(3):
        if phase:
            cuda.syncthreads()
        turns[0] += 1
        turns[turns[0]] = cuda.threadIdx.x


@cuda.jit  # type: ignore[untyped-decorator]
def passing_on(out: Any, step: int, waits: int) -> None:
    """Each thread reads the element of the thread `step` further on; right only with a barrier."""
    left = cuda.shared.array(THREADS, np.float32)
    thread = cuda.threadIdx.x
    left[thread] = thread
    if waits:
        cuda.syncthreads()
    out[cuda.blockIdx.x * THREADS + thread] = left[(thread + step) % THREADS]


@cuda.jit  # type: ignore[untyped-decorator]
def adding(out: Any, waits: int) -> None:
    """Threads add to one element in turn, or all at once without barriers."""
    total = cuda.shared.array(1, np.float32)
    thread = cuda.threadIdx.x
    if thread == 0:
        total[0] = 0
    cuda.syncthreads()
    for turn in range(THREADS):
        if turn == thread:
            total[0] += thread
        if waits:
            cuda.syncthreads()
    if thread == THREADS - 1:
        out[cuda.blockIdx.x] = total[0]


@cuda.jit  # type: ignore[untyped-decorator]
def overwriting(out: Any, waits: int) -> None:
    """All threads read one element, and the first one overwrites it."""
    kept = cuda.shared.array((1, 1), np.float32)
    thread = cuda.threadIdx.x
    if thread == 0:
        kept[0, 0] = 1
    cuda.syncthreads()
    out[thread] = kept[0, 0]
    if waits:
        cuda.syncthreads()
    if thread == 0:
        kept[0, 0] = 2


@cuda.jit  # type: ignore[untyped-decorator]
def leaving_early(out: Any) -> None:
    """All but the first thread leave before the barrier."""
    thread = cuda.threadIdx.x
    out[thread] = thread
    if thread:
        return
    cuda.syncthreads()
    out[0] = out[1] + out[2] + out[3]


@cuda.jit  # type: ignore[untyped-decorator]
def unwritten(out: Any) -> None:
    """Reads shared and local memory before any write, and then writes to the shared array."""
    shared = cuda.shared.array(1, np.float32)
    local = cuda.local.array((1, 1), np.int32)
    if cuda.threadIdx.x:
        return
    out[2 * cuda.blockIdx.x] = shared[0]
    out[2 * cuda.blockIdx.x + 1] = local[0, 0]
    shared[0] = 1


@cuda.jit  # type: ignore[untyped-decorator]
def failing(out: Any) -> None:
    """The second thread raises, while one waits at a barrier and two have not begun."""
    if cuda.threadIdx.x == 1:
        raise ZeroDivisionError("on purpose")
    cuda.syncthreads()
    out[0] = 1
