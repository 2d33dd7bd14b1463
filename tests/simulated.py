"""Small kernels that show how a simulated block runs; of a process that uses the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18_numba.target import numba_cuda

cuda = numba_cuda()
THREADS = 4


@cuda.jit  # type: ignore[untyped-decorator]
def noting(turns: Any) -> None:
    """Each thread notes its number where it comes by: turns[0] counts, the notes follow."""
    for phase in range(3):
        if phase:
            cuda.syncthreads()
        turns[0] += 1
        turns[turns[0]] = cuda.threadIdx.x


@cuda.jit  # type: ignore[untyped-decorator]
def passing_on(out: Any, step: int, waits: int) -> None:
    """Each thread takes what the one `step` beside it has left; right only if it waits."""
    left = cuda.shared.array(THREADS, np.float32)
    thread = cuda.threadIdx.x
    left[thread] = thread
    if waits:
        cuda.syncthreads()
    out[cuda.blockIdx.x * THREADS + thread] = left[(thread + step) % THREADS]


@cuda.jit  # type: ignore[untyped-decorator]
def adding(out: Any, waits: int) -> None:
    """Thread after thread adds to one element; all of them at once if they do not wait."""
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
    """What shared and local memory hold at first; then the shared array is written to."""
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
