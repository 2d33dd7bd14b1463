"""Numba's CPU kernels: `R18_BACKEND=numba-cpu`. float32, channels last, on all of Numba's threads.

`compiled`       loads the compiled code on first use
`panels`         packs weights for the micro-kernel
`implicit_gemm`  convolution as a matrix product: cache blocking, arguments
`winograd`       convolution by F(4×4, 3×3): the same
`conv`           the convolution kernels, and which one a plan prefers
`others`         every other op
`kernels/`       the code that Numba compiles

Importing this package does not import Numba. `probe` does.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

from r18.backend import BackendBase, DeviceInfo, Kernel
from r18.backend.host import HostMemory, HostStream
from r18.graph.ops import Problem
from r18_numba_cpu import conv
from r18_numba_cpu.compiled import NAME, most_threads, vector
from r18_numba_cpu.others import other_kernels


class Backend(BackendBase):
    """Kernels that Numba compiles for the machine it runs on."""

    name = NAME

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        lanes, threads = vector().LANES, most_threads()
        details = {"numba": version("numba"), "lanes": str(lanes), "threads": str(threads)}
        words = f"{threads} thread{'s' * (threads != 1)}, vectors of {lanes}"
        name = f"CPU ({platform.machine()}), Numba {details['numba']}, {words}"
        return DeviceInfo("cpu", name, details)

    def kernels(self) -> tuple[Kernel, ...]:
        return _kernels()

    def fastest(self, problem: Problem, precision: str) -> str | None:
        """Winograd where it pays; see `r18_numba_cpu.conv`."""
        return conv.fastest(problem) if precision == "fp32" else None

    def stream(self) -> HostStream:
        return HostStream()


@cache
def _kernels() -> tuple[Kernel, ...]:
    return (*conv.conv_kernels(), *other_kernels())


__all__ = ["Backend"]
