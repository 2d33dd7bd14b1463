"""The convolutions: refusals, packed weights, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from r18.backend import Array
from r18.graph.ops import EXTRAS, Conv2d, Problem
from r18_numba.kernel import MOST_ELEMENTS, Arrays, NumbaKernel, ceil_div, elements, grid_stride
from r18_numba.tile import LARGE, SMALL, TINY, WIDE, Tile

RESIDUAL, RELU = 1, 2
"""Bits of `fused`: what the epilogue does after adding the bias."""

MOST_EXTENT = 2**15 - 1
"""Largest extent of a padded image: the row and the column of a tap have 16 bits each."""

MOST_BLOCKS = 65535
"""Largest grid on the second axis."""


class Convolution(NumbaKernel):
    """A conv2d kernel. Its bias is float32, padded with zeros, and zero if the op has none."""

    op = Conv2d
    arithmetic: ClassVar[str] = "sum"

    def fused(self, op: Conv2d) -> int:
        return RESIDUAL * op.residual + RELU * op.relu

    def bias(self, problem: Problem, weights: tuple[Array, ...], padded: int) -> Array:
        op = _conv(problem)
        bias: Array = np.zeros(padded, np.float32)
        if op.bias:
            bias[: op.out_channels] = weights[1]
        return bias


class DirectConv(Convolution):
    """One thread per output."""

    algorithm = "direct"
    extras = EXTRAS

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        filters = np.ascontiguousarray(weights[0], self.precision.dtype)
        return (filters, self.bias(problem, weights, _conv(problem).out_channels))

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.conv import direct

        op, (_, channels, height, width) = _conv(problem), problem.inputs[0]
        _, outputs, out_height, out_width = problem.output
        count = elements(problem.output)
        stream.launch(
            direct.build(self.storage),
            *grid_stride(count),
            *(arrays.inputs[0], arrays.weight(0), arrays.weight(1, np.float32)),
            *(arrays.inputs[-1], arrays.out),
            *(channels, height, width, outputs, out_height, out_width),
            *(op.group_channels, outputs // op.groups),
            *(*op.kernel_size, *op.stride, *op.padding, *op.dilation, count, self.fused(op)),
        )


@dataclass(frozen=True, eq=False)
class TiledConv(Convolution):
    """A convolution by matrix products in register tiles."""

    tile: Tile

    @property
    def id(self) -> str:
        return f"{super().id}/{self.tile}"

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(sorted({self.tile.m, self.tile.n, self.tile.k}))

    @property
    def simulates(self) -> bool:
        return self.tile is TINY

    def padded_outputs(self, op: Conv2d) -> int:
        return ceil_div(op.out_channels, self.tile.m) * self.tile.m

    def objection(self, problem: Problem) -> str | None:
        if self.padded_outputs(_conv(problem)) // self.tile.m > MOST_BLOCKS:
            return f"more than {MOST_BLOCKS:,} tiles of output channels"
        return None


class ImplicitGemm(TiledConv):
    """out[o, q] = Σ_k w[k, o]·x[pixel q, tap k], gathered through a table of taps."""

    algorithm = "implicit_gemm"

    def objection(self, problem: Problem) -> str | None:
        op, (_, _, height, width) = _conv(problem), problem.inputs[0]
        extents = (height + 2 * op.padding[0], width + 2 * op.padding[1], *op.kernel_size)
        if max(extents) > MOST_EXTENT:
            return f"an extent of the padded image is more than {MOST_EXTENT:,}"
        return super().objection(problem)

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Filters (padded taps, padded outputs), the table of taps, and the bias."""
        op, padded = _conv(problem), self.padded_outputs(_conv(problem))
        depth = ceil_div(op.depth, self.tile.k) * self.tile.k
        filters: Array = np.zeros((depth, padded), self.precision.dtype)
        with np.errstate(over="ignore"):  # too large a weight becomes infinity
            filters[: op.depth, : op.out_channels] = weights[0].reshape(op.out_channels, -1).T
        return filters, self._taps(problem, depth), self.bias(problem, weights, padded)

    def _taps(self, problem: Problem, depth: int) -> Array:
        """(depth, 2) int32: offset from the window's corner, and row << 16 | column in the window.

        The rows of taps beyond the last one are outside every image.
        """
        op, (_, _, height, width) = _conv(problem), problem.inputs[0]
        c, r, s = np.indices((op.in_channels, *op.kernel_size)).reshape(3, -1)
        taps = np.full((depth, 2), (0, MOST_EXTENT << 16), np.int32)
        taps[: op.depth, 0] = (c * height + r) * width + s
        taps[: op.depth, 1] = r << 16 | s
        return taps

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.conv import implicit_gemm

        op, (samples, channels, height, width) = _conv(problem), problem.inputs[0]
        _, outputs, out_height, out_width = problem.output
        padded, pixels = self.padded_outputs(op), samples * out_height * out_width
        stream.launch(
            implicit_gemm.build(self.tile, self.storage),
            (ceil_div(pixels, self.tile.n), padded // self.tile.m, 1),
            (self.tile.threads, 1, 1),
            *(arrays.inputs[0], arrays.weight(0), arrays.weight(1, np.int32)),
            *(arrays.weight(2, np.float32), arrays.inputs[-1], arrays.out),
            *(channels, height, width, outputs, padded, out_height, out_width),
            *(*op.stride, *op.padding, pixels, ceil_div(op.depth, self.tile.k), self.fused(op)),
        )


FILTER = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
"""G of Winograd's F(2×2, 3×3)."""


class Winograd(TiledConv):
    """F(2×2, 3×3) in three launches; see `r18_numba.kernels.conv.winograd`.

    Transformed filters, patches and products are float32 in every precision. Filters are
    transformed in float64 and rounded once.
    """

    algorithm = "winograd_f2x2"
    arithmetic = "winograd_f2x2"

    def objection(self, problem: Problem) -> str | None:
        op = _conv(problem)
        if op.kernel_size != (3, 3) or op.stride != (1, 1):
            return "takes 3×3 windows of stride 1 only"
        if max(self._sizes(problem)) > MOST_ELEMENTS:
            return f"its patches or products have more than {MOST_ELEMENTS:,} elements"
        return super().objection(problem)

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """G g Gᵀ as (16, padded channels, padded outputs), and the bias."""
        op, padded = _conv(problem), self.padded_outputs(_conv(problem))
        with np.errstate(over="ignore"):  # too large a weight becomes infinity
            stored = np.asarray(weights[0], self.precision.dtype).astype(np.float64)
        filters: Array = np.zeros((16, self._channels(op), padded), np.float32)
        filters[:, : op.in_channels, : op.out_channels] = np.einsum(
            "ir,ocrs,js->ijco", FILTER, stored, FILTER
        ).reshape(16, op.in_channels, op.out_channels)
        return filters, self.bias(problem, weights, padded)

    def workspace(self, problem: Problem) -> int:
        return 4 * sum(self._sizes(problem))

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.conv import winograd

        op, (_, channels, height, width) = _conv(problem), problem.inputs[0]
        _, outputs, out_height, out_width = problem.output
        tiles_h, tiles_w, tiles, padded_tiles = self._tiles(problem)
        padded_channels, padded_outputs = self._channels(op), self.padded_outputs(op)
        sizes = self._sizes(problem)
        patches, products = arrays.scratch(*sizes)
        stream.launch(
            winograd.build_input(self.storage),
            *grid_stride(sizes[0] // 16),
            *(arrays.inputs[0], patches, channels, padded_channels, height, width),
            *(*op.padding, tiles_h, tiles_w, tiles, padded_tiles),
            phase="input transform",
        )
        stream.launch(
            winograd.build_sums(self.tile),
            (padded_tiles // self.tile.n, padded_outputs // self.tile.m, 16),
            (self.tile.threads, 1, 1),
            *(arrays.weight(0, np.float32), patches, products),
            *(padded_channels, padded_outputs, padded_tiles),
            phase="sums",
        )
        stream.launch(
            winograd.build_output(self.storage),
            *grid_stride(outputs * tiles),
            *(products, arrays.weight(1, np.float32), arrays.inputs[-1], arrays.out),
            *(outputs, padded_outputs, out_height, out_width),
            *(tiles_h, tiles_w, tiles, padded_tiles, self.fused(op)),
            phase="output transform",
        )

    def _channels(self, op: Conv2d) -> int:
        return ceil_div(op.in_channels, self.tile.k) * self.tile.k

    def _tiles(self, problem: Problem) -> tuple[int, int, int, int]:
        """Tiles down and across an image, of the batch, and padded to whole block tiles."""
        samples, _, out_height, out_width = problem.output
        tiles_h, tiles_w = ceil_div(out_height, 2), ceil_div(out_width, 2)
        tiles = samples * tiles_h * tiles_w
        return tiles_h, tiles_w, tiles, ceil_div(tiles, self.tile.n) * self.tile.n

    def _sizes(self, problem: Problem) -> tuple[int, int]:
        """float32 elements of the transformed patches, and of the products."""
        op, padded_tiles = _conv(problem), self._tiles(problem)[3]
        return 16 * self._channels(op) * padded_tiles, 16 * self.padded_outputs(op) * padded_tiles


def _conv(problem: Problem) -> Conv2d:
    assert isinstance(problem.op, Conv2d)  # `refusal` has checked it
    return problem.op


IMPLICIT_GEMM_TILES = (LARGE, WIDE, SMALL, TINY)
WINOGRAD_TILES = (LARGE, WIDE, SMALL, TINY)
