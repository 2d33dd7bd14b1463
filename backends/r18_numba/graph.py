"""CUDA graphs through the driver API, because Numba cannot capture a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver


class GraphError(Exception):
    """The driver could not capture the work, or not instantiate the graph."""


class Graph:
    """A CUDA graph of the work that `work` enqueues into a stream (a handle): captured once,
    launched many times.

    Raises `GraphError` if the driver cannot capture it. Exceptions of `work` propagate.
    """

    def __init__(self, stream: int, work: Callable[[], None]) -> None:
        self._stream = driver.CUstream(stream)
        # Relaxed mode allows the other calls of a launch, such as deferred frees.
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
        """Enqueue the graph."""
        _checked(driver.cuGraphLaunch(self._runnable, self._stream))

    def __del__(self) -> None:
        if hasattr(self, "_runnable"):
            driver.cuGraphExecDestroy(self._runnable)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises `GraphError` for any status but success."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GraphError(f"the CUDA driver answered {status}")
    return values[0] if values else None
