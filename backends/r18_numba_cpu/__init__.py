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

from r18.backend import Backend as BackendBase
from r18.backend import DeviceInfo, Fastest, Kernel, Preferred
from r18.graph.ops import Problem
from r18_numba_cpu import conv
from r18_numba_cpu.compiled import NAME, most_threads, vector
from r18_numba_cpu.others import other_kernels


class Backend(BackendBase):
    """Kernels that Numba compiles for the machine it runs on."""

    name = NAME

    def probe(self) -> DeviceInfo:
        lanes, threads = vector().LANES, most_threads()
        details = {"numba": version("numba"), "lanes": str(lanes), "threads": str(threads)}
        words = f"{threads} thread{'s' * (threads != 1)}, vectors of {lanes}"
        name = f"CPU ({platform.machine()}), Numba {details['numba']}, {words}"
        return DeviceInfo("cpu", name, details)

    def kernels(self) -> tuple[Kernel, ...]:
        return _kernels()

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        """Winograd where it pays; see `r18_numba_cpu.conv`."""
        kernel = conv.fastest(problem) if precision == "fp32" else None
        return None if kernel is None else Preferred(kernel)


@cache
def _kernels() -> tuple[Kernel, ...]:
    return (*conv.conv_kernels(), *other_kernels())


__all__ = ["Backend"]
