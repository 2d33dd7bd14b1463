"""Numba's CUDA kernels: `R18_BACKEND=numba`. Without a GPU they run in Numba's CUDA simulator.

`target`     chooses GPU or simulator, and imports `numba.cuda`
`device`     memory, streams and events; `graph` CUDA graphs
`simulator`  how a simulated block runs; `races` what it finds in shared memory
`tile`       tile sizes of the matrix products
`kernel`     what all kernels share
`conv`, `others`, `integers`   the kernels: refusals, packed weights, launches
`catalogue`  the list of kernels, and which tile fills a GPU
`kernels/`   device code

Importing this package contacts no device and does not import Numba. `probe` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r18.backend import (
    Array,
    CompileOptions,
    DeviceInfo,
    Fastest,
    Kernel,
    Preferred,
    Program,
    Stream,
    Table,
    find_table,
)
from r18.backend import Backend as BackendBase
from r18.errors import BackendUnavailable
from r18.graph.ops import Problem
from r18_numba.catalogue import all_kernels, filling, simulated_kernels
from r18_numba.target import NAME, known_simulated, numba_cuda, simulated

if TYPE_CHECKING:
    from r18.graph.schedule import Schedule

TUNED = Path(__file__).parent / "tuned"  # one table per measured device


class Backend(BackendBase):
    """CUDA kernels on Numba's current device, or in its simulator."""

    name = NAME

    def __init__(self) -> None:
        # Set by `probe`.
        self._device: DeviceInfo | None = None
        self._multiprocessors = 0
        self._tuned: Table | None = None

    @cached_property
    def memory(self) -> Any:
        numba_cuda()
        from r18_numba.device import NumbaMemory

        return NumbaMemory()

    def simulates(self) -> bool:
        return simulated()

    def probe(self) -> DeviceInfo:
        if self._device is None:
            cuda = numba_cuda()
            self._device = self._simulator() if simulated() else self._gpu(cuda)
        return self._device

    def _simulator(self) -> DeviceInfo:
        import_module("r18_numba.simulator")  # raises where greenlet is missing
        return DeviceInfo("cuda", "CUDA simulator (no GPU)", _versions(), simulated=True)

    def _gpu(self, cuda: Any) -> DeviceInfo:
        try:
            device = cuda.get_current_device()
            name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
            major, minor = device.compute_capability
            self._multiprocessors = device.MULTIPROCESSOR_COUNT
        except Exception as error:  # the driver raises errors of several classes
            raise BackendUnavailable(
                self.name, f"Numba reaches no CUDA device: {error}", "Check with nvidia-smi."
            ) from error
        self._compiles()
        details = {
            **_versions(),
            "compute capability": f"{major}.{minor}",
            "multiprocessors": str(self._multiprocessors),
        }
        info = DeviceInfo("cuda", f"{name} (sm_{major}{minor})", details)
        self._tuned = find_table(self.name, info, TUNED)
        return info

    def _compiles(self) -> None:
        """Raises `BackendUnavailable` if Numba's compiler does not support the installed NumPy.

        Otherwise the first kernel would raise: Numba loads its compiler only then.
        """
        try:
            import_module("numba.cuda.cudaimpl")
        except Exception as error:
            versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
            raise BackendUnavailable(
                self.name,
                f"{versions} and NumPy {np.__version__} are incompatible: {error}",
                "Install the NumPy that Numba requires: pip install --upgrade numba numba-cuda",
            ) from error

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel; with the simulator in use, only those that it runs in good time."""
        return simulated_kernels() if known_simulated() else all_kernels()

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        """From the device's tuning table, else by how tiles fill a GPU. None in the simulator."""
        measured = self._tuned.best(problem, precision) if self._tuned else None
        if measured is not None or not self._multiprocessors:
            return measured
        kernel = filling(problem, precision, self._multiprocessors)
        return None if kernel is None else Preferred(kernel)

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Program:
        """Compile as by default, once the device is known."""
        self.probe()  # the plan may name only what the device runs
        return super().compile(schedule, weights, options)

    def stream(self) -> Stream:
        numba_cuda()
        from r18_numba.device import NumbaStream

        return NumbaStream()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in ("numba", "numba-cuda")}


__all__ = ["Backend"]
