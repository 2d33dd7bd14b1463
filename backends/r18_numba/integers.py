"""Quantised ops, exact to the bit: refusals, packed weights, launches."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np

from r18.backend import Array, Buffer, Stream
from r18.graph.ops import Layout, Problem
from r18.graph.precision import INT8
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18_numba.conv import ImplicitGemm
from r18_numba.kernel import THREADS, Arrays, NumbaKernel, ceil_div, elements, grid_stride, reducing
from r18_numba.others import LinearKernel


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


# -- convolution -------------------------------------------------------------------------------


class DirectQuantizedConv(IntegerKernel):
    """One thread per output."""

    op = QuantizedConv2d
    algorithm = "direct"

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        return with_residual_multiplier(super().packed(problem, weights))

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import direct

        op, (_, channels, height, width) = _quantized(problem), problem.inputs[0]
        _, outputs, out_height, out_width = problem.output
        conv, count = op.conv, elements(problem.output)
        stream.launch(
            direct.direct_qconv,
            *grid_stride(count),
            *(arrays.inputs[0], arrays.weight(0, np.int8), arrays.weight(1, np.int32)),
            *(arrays.weight(2, np.float32), arrays.inputs[-1], arrays.weight(3, np.float32)),
            *(arrays.out, channels, height, width, outputs, out_height, out_width),
            *(*conv.kernel_size, *conv.stride, *conv.padding, count),
            *(int(conv.residual), *ends(problem)),
        )


class QuantizedImplicitGemm(IntegerKernel, ImplicitGemm):
    """As of floats, in int32: the table of taps, and weights (padded taps, padded outputs)."""

    op = QuantizedConv2d  # type: ignore[assignment]  # `ImplicitGemm` sees the op's `conv`

    def objection(self, problem: Problem) -> str | None:
        return super().objection(_of_floats(problem))

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Filters, taps, bias, multiplier, and that of the residual; zeros beyond the outputs."""
        weight, *factors = with_residual_multiplier(NumbaKernel.packed(self, problem, weights))
        bias, multiplier, residual_multiplier = factors
        conv = _quantized(problem).conv
        count, padded = conv.out_channels, self.padded_outputs(conv)
        depth = ceil_div(conv.depth, self.tile.k) * self.tile.k
        filters: Array = np.zeros((depth, padded), np.int8)
        filters[: conv.depth, :count] = weight.reshape(count, -1).T
        more = (0, padded - count)
        taps = self._taps(_of_floats(problem), depth)
        return filters, taps, np.pad(bias, more), np.pad(multiplier, more), residual_multiplier

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import implicit_gemm

        conv, (samples, channels, height, width) = _quantized(problem).conv, problem.inputs[0]
        _, outputs, out_height, out_width = problem.output
        padded, pixels = self.padded_outputs(conv), samples * out_height * out_width
        stream.launch(
            implicit_gemm.build(self.tile),
            (ceil_div(pixels, self.tile.n), padded // self.tile.m, 1),
            (self.tile.threads, 1, 1),
            *(arrays.inputs[0], arrays.weight(0, np.int8), arrays.weight(1, np.int32)),
            *(arrays.weight(2, np.int32), arrays.weight(3, np.float32)),
            *(arrays.inputs[-1], arrays.weight(4, np.float32), arrays.out),
            *(channels, height, width, outputs, padded, out_height, out_width),
            *(*conv.stride, *conv.padding, pixels, ceil_div(conv.depth, self.tile.k)),
            *(int(conv.residual), *ends(problem)),
        )


def with_residual_multiplier(weights: tuple[Array, ...]) -> tuple[Array, ...]:
    """The same number of weights with and without a residual."""
    return weights if len(weights) == 4 else (*weights, np.ones(1, np.float32))


def _quantized(problem: Problem) -> QuantizedConv2d:
    assert isinstance(problem.op, QuantizedConv2d)  # `refusal` has checked it
    return problem.op


def _of_floats(problem: Problem) -> Problem:
    return Problem(_quantized(problem).conv, problem.inputs)


# -- the others --------------------------------------------------------------------------------


class QuantizedLinearKernel(IntegerKernel, LinearKernel):
    """Square tiles of outputs, one output per thread."""

    op = QuantizedLinear  # type: ignore[assignment]  # its sizes are those of the problem

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import linear

        (rows, features), (_, outputs) = problem.inputs[0], problem.output
        stream.launch(
            linear.build(self.side, self.depth),
            (ceil_div(outputs, self.side), ceil_div(rows, self.side), 1),
            (self.side, self.side, 1),
            *(arrays.inputs[0], arrays.weight(0, np.int8), arrays.weight(1, np.int32)),
            *(arrays.weight(2, np.float32), arrays.out, rows, features, outputs),
        )


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
