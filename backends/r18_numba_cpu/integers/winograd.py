"""Winograd's F(2×2, 3×3) of bytes: cache blocking, packed filters, the call. See `kernels`."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem, Shape
from r18.graph.quantized import QuantizedConv2d
from r18_numba_cpu.compiled import ceil_div, counters, module, most_threads, run
from r18_numba_cpu.integers.gemm import INT_NBYTES, conv_shape, requantization
from r18_numba_cpu.integers.packing import BANDS, WORDS, epilogue_weights
from r18_numba_cpu.kernels.arguments import CACHE_LINE, ConvShape
from r18_numba_cpu.packing import PANEL, VECTOR, Arrays, panels, round_up

MATRICES = 16
WORD = np.dtype(BANDS[WORDS])
DEPTH = 2**29 // (255 * 128 * 9)
"""The most channels for which four times any sum is an int32."""

PATCHES_NBYTES = 256 << 10
"""Transformed patches of about this size stay in a core's L2 cache, next to a panel's filters."""

BLOCKS = 4
"""Blocks for each thread, at least: they take unequal times."""

TWICE_G = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]])


class Tiling(NamedTuple):
    """Cache blocking, which affects the speed only; in the order that `kernels` unpacks.

    rows:    of tiles in a block, counted through the batch. panels: of outputs in a block.
    patch_row, patch_matrix: words from a tile's channels to the next one's, and between matrices.
    sums:    int32 of a worker. slot: words of a worker.
    """

    rows: int
    panels: int
    patch_row: int
    patch_matrix: int
    sums: int
    slot: int


def tiling(shape: ConvShape) -> Tiling:
    threads = most_threads()
    columns, high = ceil_div(shape.out_w, 2), ceil_div(shape.out_h, 2)
    patch_row = round_up(shape.channels, PANEL) + CACHE_LINE // WORD.itemsize
    fitting = PATCHES_NBYTES // (MATRICES * columns * patch_row * WORD.itemsize)
    all_rows = shape.samples * high
    rows = ceil_div(all_rows, ceil_div(all_rows, max(1, fitting)))
    patch_matrix = rows * columns * patch_row
    parts = ceil_div(all_rows, rows)
    splits = min(panels(shape.outputs), ceil_div(BLOCKS * threads, parts))
    width = int(module("micro_kernel").COLUMNS)
    sums = (MATRICES * rows * columns + 4 * columns) * width
    buffer = 4 * (2 * columns + 2) * int(module("integers.words").SPAN)
    slot = round_up(buffer + MATRICES * patch_matrix, CACHE_LINE)
    return Tiling(
        rows, ceil_div(panels(shape.outputs), splits), patch_row, patch_matrix, sums, slot
    )


def workspace_nbytes(problem: Problem) -> int:
    assert isinstance(problem.op, QuantizedConv2d)
    (n, c, h, w), (_, o, out_h, out_w) = problem.inputs[0], problem.output
    cut = tiling(conv_shape(problem.op, (n, h, w, c), (n, out_h, out_w, o)))
    return most_threads() * (cut.sums * INT_NBYTES + cut.slot * WORD.itemsize)


def refuses(problem: Problem) -> str | None:
    assert isinstance(problem.op, QuantizedConv2d)
    conv = problem.op.conv
    if conv.kernel_size != (3, 3) or conv.stride != (1, 1):
        return "Winograd takes 3×3 windows of stride 1"
    if conv.in_channels > DEPTH:
        return f"four times a sum of more than {DEPTH:,} channels may leave int32"
    return None


def pack_filters(op: QuantizedConv2d, weights: Arrays) -> Arrays:
    """2G g 2Gᵀ as int16 (panels, 16, ⌈C/2⌉, columns, 2), and the epilogue's operands."""
    weight = weights[0].astype(np.int32)
    outputs, channels = weight.shape[:2]
    columns = module("micro_kernel").COLUMNS
    shape = (MATRICES, round_up(channels, WORDS), panels(outputs) * columns)
    whole: Array = np.zeros(shape, np.int16)
    transformed = np.einsum("ik,ockl,jl->ijco", TWICE_G, weight, TWICE_G)
    whole[:, :channels, :outputs] = transformed.reshape(MATRICES, channels, outputs)
    split = whole.reshape(MATRICES, -1, WORDS, panels(outputs), columns)
    packed = np.ascontiguousarray(split.transpose(3, 0, 1, 4, 2))
    return packed, *epilogue_weights(op, weights, WORDS)


@lru_cache(maxsize=1024)
def numbers(op: QuantizedConv2d, read: Shape, written: Shape) -> Array:
    """The kernel's arguments that are not arrays, as int64. Cached: every run needs them."""
    shape = conv_shape(op, read, written)
    return np.array((*shape, *map(int, requantization(op, WORDS)), *tiling(shape)), np.int64)


def winograd(
    op: QuantizedConv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    filters, bias, multiplier, residual_multiplier = weights
    arguments = numbers(op, inputs[0].shape, out.shape)
    x, residual, written = (array.view(np.uint8) for array in (inputs[0], inputs[-1], out))
    sums = most_threads() * int(arguments[-2]) * INT_NBYTES
    run(
        module("integers.winograd").winograd,
        *(x, filters, bias, multiplier, residual, residual_multiplier, written),
        *(workspace[:sums].view(np.int32), workspace[sums:].view(WORD), arguments, counters()),
    )


def pays(problem: Problem) -> bool:
    """Whether it is faster than implicit GEMM where both multiply by `vpmaddwd`."""
    op = problem.op
    if not isinstance(op, QuantizedConv2d) or op.extras or refuses(problem) is not None:
        return False
    return min(op.conv.in_channels, op.conv.out_channels) >= VECTOR


def extra_problems() -> tuple[Problem, ...]:
    """A problem with the most channels that it takes."""
    deepest = Conv2d(DEPTH, 3, (3, 3), (1, 1), (1, 1), bias=True)
    return (Problem(QuantizedConv2d(deepest, ("uint8",)), ((1, DEPTH, 3, 5),)),)
