"""Convolution and linear of bytes as an implicit GEMM: cache blocking, the call. See `kernels`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem, Shape
from r18.graph.quantized import QuantizedConv2d, QuantizedLinear
from r18_numba_cpu.compiled import ceil_div, module, most_threads, run, workers
from r18_numba_cpu.integers.packing import flip_of, pack
from r18_numba_cpu.kernels.arguments import Bands, ConvShape, Requantization
from r18_numba_cpu.packing import Arrays, panels, problem_of, round_up, tile_size

VNNI = "vnni"
"""What the algorithms for it end in."""

GROUP = 4
"""Bytes of a product by VNNI; a group of one is a float32."""

BAND_NBYTES = 128 << 10
"""A band of the padded image of about this size stays in a core's L2 cache."""

INT_NBYTES = FLOAT_NBYTES = 4
ALIGNMENT = 64

Sum = QuantizedConv2d | QuantizedLinear


class Gemm:
    """The functions of a kernel for one micro-kernel. group: bytes that it multiplies at a time."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.nbytes = FLOAT_NBYTES if group == 1 else 1  # of an element of scratch

    def pack_conv(self, op: QuantizedConv2d, weights: Arrays) -> Arrays:
        return pack(op, weights, op.stored[0], self.group)

    def pack_linear(self, op: QuantizedLinear, weights: Arrays) -> Arrays:
        return pack(op, weights, op.stored, self.group)

    def workspace_nbytes(self, problem: Problem) -> int:
        """For each worker a register tile of sums, and its slot."""
        shape = _shape(problem)
        slot = self.bands(shape, most_threads()).slot * self.nbytes
        return most_threads() * (tile_size() * INT_NBYTES + slot)

    def bands(self, shape: ConvShape, threads: int) -> Bands:
        """The cache blocking. It affects the speed only, never the result."""
        length = ((shape.out_w - 1) * shape.stride_w + shape.kernel_w) * shape.channels
        fitting = BAND_NBYTES // (self.nbytes * length)
        rows = max(1, min(shape.out_h, (fitting - shape.kernel_h) // shape.stride_h + 1))
        rows = ceil_div(shape.out_h, ceil_div(shape.out_h, rows))
        blocks = shape.samples * ceil_div(shape.out_h, rows)
        splits = min(panels(shape.outputs), ceil_div(2 * threads, blocks))
        seen = (rows - 1) * shape.stride_h + shape.kernel_h
        slot = round_up(tile_size() + seen * length + self.group, ALIGNMENT)
        return Bands(rows, ceil_div(panels(shape.outputs), splits), slot)

    def conv(
        self, op: QuantizedConv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        _, shape = problem_of(op.conv, inputs[0].shape, out.shape)
        limits = np.iinfo(out.dtype)
        how = Requantization(
            flip_of(op.stored[0]),
            op.conv.residual,
            op.stored[-1] == "int8",
            np.float32(limits.min),
            np.float32(limits.max),
        )
        self._run(shape, inputs, weights, out.view(np.uint8), workspace, how)

    def linear(
        self, op: QuantizedLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        """The 1×1 convolution of an image with a pixel for each sample."""
        how = Requantization(flip_of(op.stored), False, False, np.float32(0), np.float32(0))
        self._run(_line(len(out), op), inputs, weights, out, workspace, how)

    def _run(
        self,
        shape: ConvShape,
        inputs: Arrays,
        weights: Arrays,
        out: Array,
        workspace: Array,
        how: Requantization,
    ) -> None:
        weight, bias, multiplier, residual_multiplier = weights
        x, residual = inputs[0].view(np.uint8), inputs[-1].view(np.uint8)
        sums = most_threads() * tile_size() * INT_NBYTES
        scratch = workspace[sums:].view(np.float32 if self.group == 1 else np.uint8)
        run(
            module("integers.implicit_gemm").implicit_gemm,
            *(x, weight, bias, multiplier, residual, residual_multiplier, out),
            *(workspace[:sums].view(np.int32), scratch, workers(), shape),
            *(self.bands(shape, most_threads()), how),
        )


def _shape(problem: Problem) -> ConvShape:
    op = problem.op
    if isinstance(op, QuantizedLinear):
        return _line(problem.output[0], op)
    assert isinstance(op, QuantizedConv2d)
    n, channels, height, width = problem.inputs[0]
    return problem_of(op.conv, (n, height, width, channels), _last(problem.output))[1]


def _last(shape: Shape) -> Shape:
    n, channels, height, width = shape
    return n, height, width, channels


@lru_cache(maxsize=64)
def _line(samples: int, op: QuantizedLinear) -> ConvShape:
    conv = Conv2d(op.linear.in_features, op.linear.out_features, (1, 1))
    read = (1, 1, samples, op.linear.in_features)
    return problem_of(conv, read, (1, 1, samples, op.linear.out_features))[1]
