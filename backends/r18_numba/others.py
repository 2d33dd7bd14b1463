"""Every op other than convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from r18.backend import Array
from r18.graph.ops import (
    Add,
    BatchNorm,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Normalize,
    Problem,
    ReLU,
    Softmax,
)
from r18_numba.kernel import THREADS, Arrays, NumbaKernel, ceil_div, elements, grid_stride, reducing

LINEAR_TILES = ((16, 32), (4, 16))
"""Side and depth of a block's tile. The simulator runs the smallest."""

MOST_BLOCKS = 65535
"""Largest grid on the second axis."""


class BatchNormKernel(NumbaKernel):
    """(x − mean)·factor + bias, with factor = weight / √(var + eps) computed in float64."""

    op = BatchNorm
    algorithm = "elementwise"
    arithmetic = "batchnorm"

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        assert isinstance(problem.op, BatchNorm)
        weight, bias, mean, var = (w.astype(np.float32).astype(np.float64) for w in weights)
        with np.errstate(invalid="ignore"):  # a negative variance gives NaN
            factor = weight / np.sqrt(var + problem.op.eps)
        return tuple(array.astype(np.float32) for array in (mean, factor, bias))

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import elementwise

        _, channels, height, width = problem.output
        count = elements(problem.output)
        stream.launch(
            elementwise.build_batchnorm(self.storage),
            *grid_stride(count),
            arrays.inputs[0],
            *(arrays.weight(place, np.float32) for place in range(3)),
            *(arrays.out, channels, height * width, count),
        )


class ReluKernel(NumbaKernel):
    op = ReLU
    algorithm = "elementwise"
    arithmetic = "exact"
    in_place = True

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import elementwise

        count = elements(problem.output)
        relu = elementwise.build_relu(self.storage)
        stream.launch(relu, *grid_stride(count), arrays.inputs[0], arrays.out, count)


class AddKernel(NumbaKernel):
    op = Add
    algorithm = "elementwise"
    arithmetic = "elementwise"
    in_place = True

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import elementwise

        assert isinstance(problem.op, Add)
        count = elements(problem.output)
        add = elementwise.build_add(self.storage)
        clamp = int(problem.op.relu)
        stream.launch(add, *grid_stride(count), *arrays.inputs, arrays.out, clamp, count)


class MaxPoolKernel(NumbaKernel):
    op = MaxPool2d
    algorithm = "direct"
    arithmetic = "exact"

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import pooling

        op, count = problem.op, elements(problem.output)
        assert isinstance(op, MaxPool2d)
        stream.launch(
            pooling.build_maxpool(self.storage),
            *grid_stride(count),
            *(arrays.inputs[0], arrays.out, *problem.inputs[0][2:], *problem.output[2:]),
            *(*op.kernel_size, *op.stride, *op.padding, count),
        )


class GapKernel(NumbaKernel):
    """One block per plane, a tree over at most `THREADS` threads."""

    op = GlobalAvgPool
    algorithm = "tree"
    arithmetic = "mean"

    @property
    def edges(self) -> tuple[int, ...]:
        return (2, THREADS)

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import pooling

        samples, channels, height, width = problem.inputs[0]
        stream.launch(
            pooling.build_gap(self.storage),
            (samples * channels, 1, 1),
            reducing(height * width),
            *(arrays.inputs[0], arrays.out, height * width),
        )


@dataclass(frozen=True, eq=False)
class LinearKernel(NumbaKernel):
    """Square tiles of outputs, one output per thread."""

    op = Linear
    algorithm = "tiled"
    arithmetic = "sum"

    side: int
    depth: int

    @property
    def id(self) -> str:
        return f"{super().id}/m{self.side}n{self.side}k{self.depth}"

    @property
    def edges(self) -> tuple[int, ...]:
        return (self.side, self.depth)

    @property
    def simulates(self) -> bool:
        return (self.side, self.depth) == min(LINEAR_TILES)

    def objection(self, problem: Problem) -> str | None:
        if ceil_div(problem.batch, self.side) > MOST_BLOCKS:
            return f"more than {MOST_BLOCKS:,} tiles of rows"
        return None

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import linear

        (rows, features), (_, outputs) = problem.inputs[0], problem.output
        stream.launch(
            linear.build(self.side, self.depth, self.storage),
            (ceil_div(outputs, self.side), ceil_div(rows, self.side), 1),
            (self.side, self.side, 1),
            *(arrays.inputs[0], arrays.weight(0), arrays.weight(1, np.float32)),
            *(arrays.out, rows, features, outputs),
        )


class SoftmaxKernel(NumbaKernel):
    """One block per row, trees over at most `THREADS` threads."""

    op = Softmax
    algorithm = "tree"
    arithmetic = "softmax"

    @property
    def edges(self) -> tuple[int, ...]:
        return (2, THREADS)

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import softmax

        rows, features = problem.inputs[0]
        stream.launch(
            softmax.build(self.storage),
            (rows, 1, 1),
            reducing(features),
            *(arrays.inputs[0], arrays.out, features),
        )


class NormalizeKernel(NumbaKernel):
    """x·scale + shift, with both factors float32 from float64; bytes NHWC in, NCHW out."""

    op = Normalize
    algorithm = "scale_shift"
    arithmetic = "normalize"

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        assert isinstance(problem.op, Normalize)
        return tuple(np.array(values, np.float32) for values in problem.op.scale_shift)

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.ops import elementwise

        _, channels, height, width = problem.output
        count = elements(problem.output)
        stream.launch(
            elementwise.build_normalize(self.storage),
            *grid_stride(count),
            *(arrays.inputs[0], arrays.weight(0, np.float32), arrays.weight(1, np.float32)),
            *(arrays.out, channels, height * width, count),
        )
