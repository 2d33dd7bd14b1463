"""CUDA graphs by the driver's own API: Numba has no call to capture a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver


class GraphError(Exception):
    """The driver refused to capture, or to make what was captured runnable."""


class Graph:
    """What `work` enqueues into a stream (its handle), recorded once and launched many times.

    Raises `GraphError` where that cannot be; what `work` raises goes through.
    """

    def __init__(self, stream: int, work: Callable[[], None]) -> None:
        self._stream = driver.CUstream(stream)
        # Relaxed: the other calls that launching makes (as frees that were put off) may go on.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _checked(driver.cuStreamBeginCapture(self._stream, mode))
        try:
            work()
        finally:
            ended = driver.cuStreamEndCapture(self._stream)
        graph = _checked(ended)
        try:
            self._runnable = _checked(driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self) -> None:
        """Enqueue it all."""
        _checked(driver.cuGraphLaunch(self._runnable, self._stream))

    def __del__(self) -> None:
        if hasattr(self, "_runnable"):
            driver.cuGraphExecDestroy(self._runnable)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; `GraphError` for any status but success."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GraphError(f"the CUDA driver answered {status}")
    return values[0] if values else None
