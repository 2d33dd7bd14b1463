"""The NumPy backend: the readable CPU reference, in float32, float64, fp8 and int8.

`conv`     direct and im2col convolution; `taps` what one tap of a window reads
`blocks`   cache blocking of im2col; `threads` runs the blocks
`others`   every other op; `quantized` those of integers, `scaled` those of e4m3 numbers;
           `conv_maxpool` what these two share; `classifier` pooling and linear as one
`conv_projection` a convolution and the projection of its residual as one
"""

from __future__ import annotations

import platform
from functools import cache

import numpy as np

from r18.backend import Apart, DeviceInfo, Fastest, Kernel
from r18.backend import Backend as BackendBase
from r18.graph.all_ops import CLASSIFIERS, SHORTCUTS, STEMS
from r18.graph.ops import Problem
from r18.graph.precision import FP32, FP64
from r18_numpy.classifier import classifier_kernels
from r18_numpy.conv import conv_kernels
from r18_numpy.conv_projection import projection_kernels
from r18_numpy.others import other_kernels
from r18_numpy.quantized import quantized_kernels
from r18_numpy.scaled import scaled_kernels


class Backend(BackendBase):
    """Kernels over NumPy arrays. Matrix products use the BLAS that NumPy was built with."""

    name = "numpy"

    def probe(self) -> DeviceInfo:
        name = f"CPU ({platform.machine()}), NumPy {np.__version__}"
        return DeviceInfo("cpu", name, {"numpy": np.__version__})

    def kernels(self) -> tuple[Kernel, ...]:
        return _kernels()

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        """Pairs of ops save nothing here: plans that do not ask for them keep every value."""
        pairs = (*STEMS, *SHORTCUTS, *CLASSIFIERS)
        return Apart() if isinstance(problem.op, pairs) else None


@cache
def _kernels() -> tuple[Kernel, ...]:
    precisions = (FP32, FP64)
    floats = tuple(
        kernel
        for precision in precisions
        for kernel in (
            *conv_kernels(precision),
            *projection_kernels(precision),
            *other_kernels(precision),
        )
    )
    return (*floats, *quantized_kernels(), *scaled_kernels(), *classifier_kernels(precisions))


__all__ = ["Backend"]
