"""Pixels into what networks take."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import Array, Buffer, Stream
from r18.ops import Normalize, Problem
from r18_numba.kernel import Arrays, NumbaKernel, elements, over


class NormalizeKernel(NumbaKernel):
    """x·scale + shift, both float32 and made in float64; bytes NHWC in, NCHW out."""

    op = Normalize
    algorithm = "scale_shift"
    arithmetic = "normalize"

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        assert isinstance(problem.op, Normalize)
        return tuple(np.array(values, np.float32) for values in problem.op.scale_shift)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        from r18_numba.device import NumbaStream, numba_buffer

        if not isinstance(stream, NumbaStream):
            raise TypeError(f"a Numba kernel was given a {type(stream).__name__}")
        arrays = Arrays((), weights, output, workspace, self.storage)
        arrays.inputs = tuple(numba_buffer(buffer).as_array(np.uint8) for buffer in inputs)
        self.launch(problem, arrays, stream)

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
