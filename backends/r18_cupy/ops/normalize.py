"""uint8 pixels to a network's input: the host side of kernels/ops/normalize.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Normalize, Problem
from r18.graph.precision import Precision
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.elementwise import vector_width

THREADS = 256
RGB = 3


@dataclass(frozen=True, eq=False)
class NormalizeKernel(CudaKernel):
    """x·scale + shift in one float32 FMA; bytes in NHWC, stored in NCHW, as stems read it.

    RGB: a thread takes as many adjacent pixels as make 16 bytes of each channel. Other channel
    counts, or images whose planes are not whole vectors: one thread per element.
    """

    op = Normalize
    algorithm = "scale_shift"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("normalize", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        return (RGB, self.run, THREADS)

    @property
    def run(self) -> int:
        """Pixels per thread."""
        return vector_width(self.precision)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(
            Entry("ops/normalize", symbol, (self.storage,))
            for symbol in ("normalize_rgb", "normalize_any")
        )

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Scale and shift: (C,) each, float32."""
        op = cast(Normalize, problem.op)
        with np.errstate(over="ignore"):  # overflow to infinity is intended
            return tuple(np.array(values).astype(np.float32) for values in op.scale_shift)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c, h, w = problem.inputs[0]
        area = h * w
        rgb, any_channels = self.entries()
        whole = c == RGB and area % self.run == 0
        threads = n * area // self.run if whole else math.prod(problem.output)
        parameters = (Pointer(Role.WEIGHT, 0), Pointer(Role.WEIGHT, 1))
        sizes = (np.uint32(threads), np.uint32(area // self.run if whole else area))
        return (
            GridLaunch(
                rgb if whole else any_channels,
                (ceil_div(threads, THREADS), 1, 1),
                (THREADS, 1, 1),
                (X, *parameters, OUT, *sizes, *(() if whole else (np.uint32(c),))),
            ),
        )


def normalize_kernels(precisions: tuple[Precision, ...]) -> tuple[NormalizeKernel, ...]:
    return tuple(NormalizeKernel(precision) for precision in precisions)
