"""Quantised ops other than convolution and linear."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from r18.graph.ops import Layout, Problem
from r18.graph.quantized import (
    Quantize,
    QuantizedGlobalAvgPool,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18_numba.integers.kernel import IntegerKernel, ends
from r18_numba.kernel import THREADS, Arrays, elements, grid_stride, reducing


class QuantizedMaxPoolKernel(IntegerKernel):
    op = QuantizedMaxPool2d
    algorithm = "direct"

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import others

        assert isinstance(problem.op, QuantizedMaxPool2d)
        pool, count = problem.op.pool, elements(problem.output)
        stream.launch(
            others.qmaxpool,
            *grid_stride(count),
            *(arrays.inputs[0], arrays.out, *problem.inputs[0][2:], *problem.output[2:]),
            *(*pool.kernel_size, *pool.stride, *pool.padding, count),
        )


class QuantizedGapKernel(IntegerKernel):
    """One block per plane, a tree over at most `THREADS` threads."""

    op = QuantizedGlobalAvgPool
    algorithm = "tree"

    @property
    def edges(self) -> tuple[int, ...]:
        return (2, THREADS)

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import others

        samples, channels, height, width = problem.inputs[0]
        stream.launch(
            others.qgap,
            (samples * channels, 1, 1),
            reducing(height * width),
            *(arrays.inputs[0], arrays.weight(0, np.float32), arrays.out),
            *(height * width, *ends(problem)),
        )


class QuantizeKernel(IntegerKernel):
    op = Quantize
    algorithm = "divide"

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import others

        count = elements(problem.output)
        scale = arrays.weight(0, np.float32)
        stream.launch(
            others.quantize, *grid_stride(count), arrays.inputs[0], scale, arrays.out, count
        )


class QuantizePixelsKernel(IntegerKernel):
    """Bytes NHWC in, NCHW out."""

    op = QuantizePixels
    algorithm = "table"

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import others

        _, channels, height, width = problem.output
        count = elements(problem.output)
        stream.launch(
            others.quantize_pixels,
            *grid_stride(count),
            *(arrays.inputs[0], arrays.weight(0, np.int8), arrays.out),
            *(channels, height * width, count),
        )


class QuantizedRelayoutKernel(IntegerKernel):
    """A transposition of each sample."""

    op = QuantizedRelayout
    algorithm = "transpose"

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import others

        assert isinstance(problem.op, QuantizedRelayout)
        _, channels, *pixels = problem.output
        sizes = (channels, prod(pixels))
        if problem.op.source is problem.op.target:
            sizes = (1, prod(sizes))
        elif problem.op.source is Layout.NHWC:
            sizes = sizes[::-1]
        count = elements(problem.output)
        stream.launch(
            others.transpose, *grid_stride(count), arrays.inputs[0], arrays.out, *sizes, count
        )
