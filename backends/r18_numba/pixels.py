"""Pixels into what networks take."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import Array
from r18.graph.ops import Normalize, Problem
from r18_numba.kernel import Arrays, NumbaKernel, elements, over


class NormalizeKernel(NumbaKernel):
    """x·scale + shift, both float32 and made in float64; bytes NHWC in, NCHW out."""

    op = Normalize
    algorithm = "scale_shift"
    arithmetic = "normalize"

    @property
    def taken(self) -> Any:
        return np.uint8

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        assert isinstance(problem.op, Normalize)
        return tuple(np.array(values, np.float32) for values in problem.op.scale_shift)

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels import pixels

        _, channels, height, width = problem.output
        count = elements(problem.output)
        stream.launch(
            pixels.build_normalize(self.storage),
            *over(count),
            *(arrays.inputs[0], arrays.weight(0, np.float32), arrays.weight(1, np.float32)),
            *(arrays.out, channels, height * width, count),
        )
