"""Winograd's F(4×4, 3×3): cache blocking, packed filters, the call. See `kernels.winograd`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem, Shape
from r18_numba_cpu.compiled import ceil_div, counters, module, most_threads, run
from r18_numba_cpu.kernels.arguments import Epilogue, Tiling
from r18_numba_cpu.packing import (
    FLOAT_NBYTES,
    PANEL,
    VECTOR,
    Arrays,
    conv,
    padded_bias,
    problem_of,
    round_up,
    to_panels,
)

MATRICES = 36
"""Elements of a transformed patch; matrix products in the batch."""

BUFFER = 2 * MATRICES * VECTOR
"""Elements that a worker needs to transform one patch."""

CACHED_NBYTES = 512 << 10
"""The part of a core's L2 cache that a worker's chunk may take, in bytes."""

FILTER_NBYTES = 4 << 20
"""Transformed filters up to this size stay in the last-level cache, for all workers to read."""

ROUND_NBYTES = 16 << 20
"""The limit for the tiles of a round where the filters are larger than that, in bytes."""


def _filter_transform() -> Array:
    """G of F(4×4, 3×3) for the points 0, ±11/16, ±3/2, ∞: rows (1, p, p²) over Π(p − q) of the
    other points q."""
    a, b = 11 / 16, 3 / 2
    of_a, of_b = 2 * a**2 * (a**2 - b**2), 2 * b**2 * (b**2 - a**2)
    rows = [[1 / (a * b) ** 2, 0, 0]]
    rows += [[1 / of_a, p / of_a, p**2 / of_a] for p in (a, -a)]
    rows += [[1 / of_b, p / of_b, p**2 / of_b] for p in (b, -b)]
    return np.array([*rows, [0, 0, 1]])


FILTER_TRANSFORM = _filter_transform()
"""With the Bᵀ and Aᵀ of `kernels.winograd`, the matrices that the error bound is derived for."""


def tiling(problem: Problem) -> Tiling:
    """The cache blocking. It affects the speed only, never the result."""
    op = conv(problem)
    n, outputs, out_h, out_w = problem.output
    rows, columns = ceil_div(out_h, 4), ceil_div(out_w, 4)
    tiles = n * rows * columns
    patch_row = round_up(op.in_channels) + VECTOR
    sum_row = round_up(outputs, PANEL) + VECTOR
    fused = MATRICES * op.in_channels * outputs * FLOAT_NBYTES <= FILTER_NBYTES
    tile_nbytes = MATRICES * (patch_row + sum_row) * FLOAT_NBYTES
    fitting = max(1, (CACHED_NBYTES if fused else ROUND_NBYTES) // tile_nbytes)
    chunks = ceil_div(tiles, fitting)
    if fused:
        chunks = round_up(chunks, most_threads())
    chunk = ceil_div(tiles, chunks)
    # NOTE: not a power of two, or all elements of a patch would share a few cache sets.
    patch_matrix, sum_matrix = chunk * patch_row + VECTOR, chunk * sum_row + VECTOR
    slot = BUFFER + fused * MATRICES * (patch_matrix + sum_matrix)
    strides = (patch_row, patch_matrix, sum_row, sum_matrix)
    return Tiling(fused, rows, columns, tiles, chunk, *strides, slot)


def workspace_nbytes(problem: Problem) -> int:
    cut = tiling(problem)
    shared = 0 if cut.fused else MATRICES * (cut.patch_matrix + cut.sum_matrix)
    return (most_threads() * cut.slot + shared) * FLOAT_NBYTES


def refuses(problem: Problem) -> str | None:
    op = conv(problem)
    if op.kernel_size != (3, 3) or op.stride != (1, 1):
        return "Winograd takes 3×3 windows of stride 1"
    return None


def pack_filters(op: Conv2d, weights: Arrays) -> Arrays:
    """G g Gᵀ in panels (36, panels, C, columns), computed in float64 and rounded once; the bias."""
    taps = weights[0].transpose(2, 3, 1, 0).reshape(9, -1).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite weights give NaN
        # NOTE: not by BLAS, whose sums may depend on its threads.
        matrices = np.einsum("ij,jk->ik", np.kron(FILTER_TRANSFORM, FILTER_TRANSFORM), taps)
        filters = to_panels(matrices.reshape(MATRICES, op.in_channels, op.out_channels))
    return filters, padded_bias(op, weights)


def winograd(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    problem, shape = problem_of(op, inputs[0].shape, out.shape)
    cut, kernels = tiling(problem), module("winograd")
    arguments = (
        *(inputs[0], *weights, inputs[-1], out, workspace.view(np.float32)),
        *(counters(), shape, cut, Epilogue(op.residual, op.relu)),
    )
    if cut.fused:
        run(kernels.winograd_fused, *arguments)
        return
    for first in range(0, cut.tiles, cut.chunk):
        run(kernels.winograd_nonfused, *arguments, first, min(cut.chunk, cut.tiles - first))


def extra_problems() -> tuple[Problem, ...]:
    """Problems that are not fused: one round of a few tiles, and two rounds.

    The first has channels at both ends of a vector. The second, on one channel, has the fewest
    filters for which a round holds only three tiles.
    """
    fewest = FILTER_NBYTES // (MATRICES * FLOAT_NBYTES) + 1  # channels times outputs
    channels = 11 * VECTOR + 1
    outputs = round_up(ceil_div(fewest, channels), PANEL)
    return (
        _with_epilogue(Conv2d(channels, outputs, (3, 3), (1, 1), (1, 1)), (2, channels, 5, 3)),
        _with_epilogue(Conv2d(1, fewest, (3, 3), (1, 1), (1, 1)), (2, 1, 1, 5)),
    )


def _with_epilogue(plain: Conv2d, shape: Shape) -> Problem:
    op = replace(plain, bias=True, residual=True, relu=True)
    return Problem(op, (shape, plain.infer(shape)))
