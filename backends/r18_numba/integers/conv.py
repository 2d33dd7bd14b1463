"""Convolution of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import Array
from r18.graph.ops import EXTRAS, Problem
from r18.graph.quantized import QuantizedConv2d
from r18_numba.conv import ImplicitGemm
from r18_numba.integers.kernel import IntegerKernel, ends
from r18_numba.kernel import Arrays, NumbaKernel, ceil_div, elements, grid_stride


class DirectQuantizedConv(IntegerKernel):
    """One thread per output."""

    op = QuantizedConv2d
    algorithm = "direct"
    extras = EXTRAS

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
            *(conv.group_channels, outputs // conv.groups),
            *(*conv.kernel_size, *conv.stride, *conv.padding, *conv.dilation, count),
            *(int(conv.residual), *ends(problem)),
        )


class QuantizedImplicitGemm(IntegerKernel, ImplicitGemm):
    """Implicit GEMM in int32: the table of taps as for floats, and weights (padded taps, padded
    outputs)."""

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
    """The weights with a residual's multiplier, so that there are as many with and without a
    residual."""
    return weights if len(weights) == 4 else (*weights, np.ones(1, np.float32))


def _quantized(problem: Problem) -> QuantizedConv2d:
    assert isinstance(problem.op, QuantizedConv2d)  # `refusal` has checked it
    return problem.op


def _of_floats(problem: Problem) -> Problem:
    return Problem(_quantized(problem).conv, problem.inputs)
