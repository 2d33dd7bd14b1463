"""The NumPy backend: the CPU reference, plain and readable, in float32 and float64."""

from __future__ import annotations

import platform
from functools import cache

import numpy as np

from r18.backend import Backend as BackendBase
from r18.backend import DeviceInfo, Kernel
from r18.graph.precision import FP32, FP64
from r18_numpy.conv import conv_kernels
from r18_numpy.others import other_kernels
from r18_numpy.pixels import pixel_kernels


class Backend(BackendBase):
    """Kernels over NumPy arrays; matrix products in whatever BLAS NumPy was built with."""

    name = "numpy"

    def probe(self) -> DeviceInfo:
        name = f"CPU ({platform.machine()}), NumPy {np.__version__}"
        return DeviceInfo("cpu", name, {"numpy": np.__version__})

    def kernels(self) -> tuple[Kernel, ...]:
        return _kernels()


@cache
def _kernels() -> tuple[Kernel, ...]:
    return tuple(
        kernel
        for precision in (FP32, FP64)
        for kernel in (
            *conv_kernels(precision),
            *other_kernels(precision),
            *pixel_kernels(precision),
        )
    )


__all__ = ["Backend"]
