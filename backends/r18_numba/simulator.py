"""Makes shared arrays of Numba's simulator shared by all threads, always.

The simulator keeps a block's shared arrays in a dictionary by the line that asks for them, and
makes one where there is none. Threads that ask at the same moment are each given one of their own,
and a block's result then depends on the run.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

from r18_numba.target import numba_cuda

numba_cuda()  # the simulator must have been chosen
kernelapi: Any = import_module("numba.cuda.simulator.kernelapi")


class Allocations(dict[Any, Any]):
    """Whoever finds nothing holds up the others until it has put something there."""

    def __init__(self) -> None:
        super().__init__()
        self._making = threading.Lock()

    def get(self, place: Any, default: Any = None) -> Any:
        found = super().get(place)
        if found is None:
            self._making.acquire()
            found = super().get(place)
            if found is not None:
                self._making.release()
        return found

    def __setitem__(self, place: Any, array: Any) -> None:
        super().__setitem__(place, array)
        self._making.release()


class SharedArrays(kernelapi.FakeCUDAShared):  # type: ignore[misc]
    """The simulator's, with `Allocations`."""

    def __init__(self, dynamic_nbytes: int) -> None:
        super().__init__(dynamic_nbytes)
        self._allocations = Allocations()


def install() -> None:
    """Use it in every launch of this process from now on."""
    kernelapi.FakeCUDAShared = SharedArrays
