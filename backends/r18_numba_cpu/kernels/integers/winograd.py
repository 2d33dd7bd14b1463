"""Winograd's F(2×2, 3×3) of bytes, exact: Aᵀ[(2G g 2Gᵀ) ⊙ (Bᵀ d B)]A is four times the sums.

Lavin and Gray, arXiv:1509.09308, with the points 0, ±1, ∞. G has halves, so 2G has integers. A
transformed patch of uint8 is between −510 and 1020, a transformed filter of int8 within ±1152: both
are int16. Products are added in int32, modulo 2³²; so are the transformed sums. Four times the sum
of fewer than 1828 channels is an int32, so the end is right whatever came between.

A worker takes rows of tiles (2×2 outputs each), counted through the batch, and panels of outputs:

1. It transforms the patches of the rows to 16 matrices (tiles, channels).
2. For each panel, 16 matrix products give 16 matrices of sums (tiles, COLUMNS).
3. It transforms the sums to two rows of outputs, and requantises them.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import ConvShape, Depth, Requantization, Terms, Tile
from r18_numba_cpu.kernels.blocks import begin_count, take_block
from r18_numba_cpu.kernels.integers.dots import WORDS
from r18_numba_cpu.kernels.integers.epilogue import store_tile
from r18_numba_cpu.kernels.integers.register_tile import multiply_into
from r18_numba_cpu.kernels.integers.words import (
    SPAN,
    load_integers,
    load_pixel,
    load_whole,
    load_words,
    quarter,
    store_lanes,
)
from r18_numba_cpu.kernels.jit import function, kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, tile_rows
from r18_numba_cpu.kernels.vector import LANES

MATRICES = 16
"""Elements of a transformed patch; matrix products of a panel."""

GROUP = WORDS.group


@function
def store_transformed(scratch, to, step, d0, d1, d2, d3):
    """Bᵀ times four vectors, `step` elements apart."""
    store_lanes(scratch, to, d0 - d2)
    store_lanes(scratch, to + step, d1 + d2)
    store_lanes(scratch, to + 2 * step, d2 - d1)
    store_lanes(scratch, to + 3 * step, d1 - d3)


@function
def transform_patches(x, flip, shape, row, scratch, to, patch_row, patch_matrix):
    """Phase 1 of a row of tiles: its matrices begin at scratch[to:].

    scratch begins with room for 4 vectors of each column that the row's patches have.
    """
    rows, columns = (shape.out_h + 1) // 2, (shape.out_w + 1) // 2
    top = 2 * (row % rows) - shape.pad_h
    first = (row // rows * shape.height + top) * shape.width
    line = shape.width * shape.channels
    whole = top >= 0 and top + 3 < shape.height
    for channel in range(0, shape.channels, SPAN):
        lanes = min(SPAN, shape.channels - channel)
        for column in range(2 * columns + 2):
            w = column - shape.pad_w
            within = w >= 0 and w < shape.width
            at = (first + w) * shape.channels + channel
            if whole and within and lanes == SPAN:
                d0, d1 = load_whole(x, at, flip), load_whole(x, at + line, flip)
                d2, d3 = load_whole(x, at + 2 * line, flip), load_whole(x, at + 3 * line, flip)
            else:
                ends = -top, shape.height - top  # of the image, in rows of the patch
                d0 = load_pixel(x, at, within and ends[0] <= 0 < ends[1], lanes, flip)
                d1 = load_pixel(x, at + line, within and ends[0] <= 1 < ends[1], lanes, flip)
                d2 = load_pixel(x, at + 2 * line, within and ends[0] <= 2 < ends[1], lanes, flip)
                d3 = load_pixel(x, at + 3 * line, within and ends[0] <= 3 < ends[1], lanes, flip)
            store_transformed(scratch, 4 * column * SPAN, SPAN, d0, d1, d2, d3)
        for tile in range(columns):
            for i in range(4):
                at = (8 * tile + i) * SPAN
                store_transformed(
                    scratch, to + tile * patch_row + channel + 4 * i * patch_matrix, patch_matrix,
                    load_words(scratch, at), load_words(scratch, at + 4 * SPAN),
                    load_words(scratch, at + 8 * SPAN), load_words(scratch, at + 12 * SPAN),
                )  # fmt: skip


@function
def multiply_panel(
    scratch, patches, patch_row, patch_matrix, filters, panel, tiles, sums, groups
):  # fmt: skip
    """Phase 2 of a panel: sums[(16, tiles, COLUMNS)], flat.

    filters: (panels, 16, groups, COLUMNS, GROUP).
    """
    most = tile_rows(tiles, ROWS)
    depth = Depth(1, groups, 0)
    for matrix in range(MATRICES):
        a = patches + matrix * patch_matrix
        b = (panel * MATRICES + matrix) * groups * COLUMNS * GROUP
        for t in range(0, tiles, most):
            multiply_into(
                min(most, tiles - t), scratch, a + t * patch_row, patch_row, filters, b, depth,
                sums, (matrix * tiles + t) * COLUMNS,
            )  # fmt: skip


@function
def transform_sums(sums, at, step, out, to, row):
    """Phase 3 of a tile: sums[at + k·step:] of its 16 matrices to out[to:], 2×2 outputs.

    out: pixels of COLUMNS int32. row: elements from a row of outputs to the next.
    """
    for v in range(0, COLUMNS, LANES):
        here = at + v
        m0, m1 = load_integers(sums, here), load_integers(sums, here + step)
        m2, m3 = load_integers(sums, here + 2 * step), load_integers(sums, here + 3 * step)
        n0, n1 = load_integers(sums, here + 4 * step), load_integers(sums, here + 5 * step)
        n2, n3 = load_integers(sums, here + 6 * step), load_integers(sums, here + 7 * step)
        o0, o1 = load_integers(sums, here + 8 * step), load_integers(sums, here + 9 * step)
        o2, o3 = load_integers(sums, here + 10 * step), load_integers(sums, here + 11 * step)
        above0, above1 = m0 + n0 + o0, m1 + n1 + o1
        above2, above3 = m2 + n2 + o2, m3 + n3 + o3
        store_lanes(out, to + v, quarter(above0 + above1 + above2))
        store_lanes(out, to + v + COLUMNS, quarter(above1 - above2 - above3))
        p0, p1 = load_integers(sums, here + 12 * step), load_integers(sums, here + 13 * step)
        p2, p3 = load_integers(sums, here + 14 * step), load_integers(sums, here + 15 * step)
        below0, below1 = n0 - o0 - p0, n1 - o1 - p1
        below2, below3 = n2 - o2 - p2, n3 - o3 - p3
        store_lanes(out, to + v + row, quarter(below0 + below1 + below2))
        store_lanes(out, to + v + row + COLUMNS, quarter(below1 - below2 - below3))


@function
def finish_panel(sums, tiles, shape, first, rows, channel, terms):
    """Phase 3 of a panel, and the epilogue of `rows` rows of tiles from `first` on.

    Behind the sums is room for two rows of outputs.
    """
    high, columns = (shape.out_h + 1) // 2, (shape.out_w + 1) // 2
    outputs, line = MATRICES * tiles * COLUMNS, 2 * columns * COLUMNS
    for r in range(rows):
        for t in range(columns):
            at = (r * columns + t) * COLUMNS
            transform_sums(sums, at, tiles * COLUMNS, sums, outputs + 2 * t * COLUMNS, line)
        sample, top = (first + r) // high, 2 * ((first + r) % high)
        for i in range(min(2, shape.out_h - top)):
            pixel = (sample * shape.out_h + top + i) * shape.out_w
            tile = Tile(pixel, channel, shape.outputs)
            store_tile(shape.out_w, sums, outputs + i * line, tile, terms)


@kernel
def winograd(
    x, filters, bias, multiplier, residual, residual_multiplier, out, sums, scratch, numbers,
    counters,
):  # fmt: skip
    """out (N, OH, OW, O) of x (N, H, W, C), bytes as uint8, of either sign; all are flat.

    filters: int16 (⌈O/COLUMNS⌉, 16, ⌈C/GROUP⌉, COLUMNS, GROUP). bias, multiplier: padded to panels.
    sums: int32, scratch: uint16; slots of both for each worker. numbers: as int64, a `ConvShape`, a
    `Requantization`, and rows, panels, patch_row, patch_matrix, and the elements of both slots.
    """
    # NOTE: made here, because `prange` takes a named tuple only from where it is made.
    n = numbers
    shape = ConvShape(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12]
    )
    how = Requantization(
        np.uint8(n[13]), n[14] != 0, n[15] != 0, np.float32(n[16]), np.float32(n[17])
    )
    most, together, patch_row, patch_matrix = n[18], n[19], n[20], n[21]
    columns = (shape.out_w + 1) // 2
    all_rows = shape.samples * ((shape.out_h + 1) // 2)
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    groups = (shape.channels + GROUP - 1) // GROUP
    splits = (panels + together - 1) // together
    blocks = (all_rows + most - 1) // most * splits
    patches = 4 * (2 * columns + 2) * SPAN
    workers = begin_count(counters)
    for worker in prange(workers):
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        terms = Terms(bias, multiplier, residual, residual_multiplier, out, how)
        slot = scratch[worker * n[23] : (worker + 1) * n[23]]
        found = sums[worker * n[22] : (worker + 1) * n[22]]
        transformed = -1
        block = take_block(counters, worker, blocks)
        while block < blocks:
            split, part = block % splits, block // splits
            first = part * most
            rows = min(most, all_rows - first)
            for r in range(rows if part != transformed else 0):
                to = patches + r * columns * patch_row
                transform_patches(x, how.flip, shape, first + r, slot, to, patch_row, patch_matrix)
            transformed = part
            for panel in range(split * together, min(panels, (split + 1) * together)):
                multiply_panel(
                    slot, patches, patch_row, patch_matrix, filters, panel, rows * columns, found,
                    groups,
                )  # fmt: skip
                finish_panel(found, rows * columns, shape, first, rows, panel * COLUMNS, terms)
            block = take_block(counters, worker, blocks)
