"""What kernels of quantised ops share."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from r18.backend import Buffer, Stream
from r18.graph.ops import Problem
from r18.graph.precision import INT8
from r18_numba.kernel import Arrays, NumbaKernel


class IntegerArrays(Arrays):
    """A call's buffers, each in its own storage format."""

    def __init__(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
    ) -> None:
        from r18_numba.device import numba_buffer

        stored = INT8.output_dtype(problem.op).type
        super().__init__((), weights, output, workspace, stored, None)
        self.inputs = tuple(
            numba_buffer(buffer).as_array(dtype.type)
            for buffer, dtype in zip(inputs, INT8.input_dtypes(problem.op), strict=True)
        )


class IntegerKernel(NumbaKernel):
    """A kernel of a quantised op."""

    arithmetic: ClassVar[str] = "integer"

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        from r18_numba.device import NumbaStream

        if not isinstance(stream, NumbaStream):
            raise TypeError(f"a Numba kernel was given a {type(stream).__name__}")
        arrays = IntegerArrays(problem, inputs, weights, output, workspace)
        self.launch(problem, arrays, stream)


def ends(problem: Problem) -> tuple[int, int]:
    """What the output saturates at."""
    limits = np.iinfo(problem.op.output_storage)
    return int(limits.min), int(limits.max)
