"""Winograd's F(4×4, 3×3): Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A on 6×6 patches d that give 4×4 outputs.

Lavin and Gray, arXiv:1509.09308, with the points 0, ±11/16, ±3/2, ∞, whose rounding errors are less
than half of those with ±1 and ±2. Three phases:

1. Transform the patches: Bᵀ d B.
2. Sum over channels: a batch of 36 matrix products, one for each element of a transformed patch.
3. Transform the sums, Aᵀ m A, and apply the epilogue.

In `winograd_fused`, each worker runs all three phases on a chunk of tiles, which stays in its
cache. In `winograd_nonfused`, all workers share each phase of many tiles, so transformed filters
that are larger than the caches are read once.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.kernels.blocks import begin_count
from r18_numba_cpu.kernels.jit import function, kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, multiply, tile_rows
from r18_numba_cpu.kernels.vector import (
    LANES,
    broadcast,
    fetch_add,
    load,
    load_lanes,
    store,
    store_output,
)

MATRICES = 36
"""Elements of a transformed patch; matrix products in the batch."""

NEAR, FAR = np.float32(11 / 16), np.float32(3 / 2)
NEAR_2, FAR_2 = NEAR * NEAR, FAR * FAR
NEAR_3, FAR_3 = NEAR_2 * NEAR, FAR_2 * FAR
SUM_2, PRODUCT_2 = NEAR_2 + FAR_2, NEAR_2 * FAR_2
"""The points and the factors of the transforms, all exact in float32."""


@function
def load_pixel(x, at, inside, lanes):
    """Some channels of a pixel; zeros outside the image and beyond the channels."""
    if inside:
        return load_lanes(x, at, lanes)
    return broadcast(np.float32(0))


@function
def transform_patch_row(d, stride, at, to, out, out_stride):
    """Bᵀ times six vectors of d, from `at` on and `stride` apart, into out."""
    near, far, near_2, far_2 = (
        broadcast(NEAR), broadcast(FAR), broadcast(NEAR_2), broadcast(FAR_2),
    )  # fmt: skip
    both, product = broadcast(SUM_2), broadcast(PRODUCT_2)
    d0, d1, d2 = load(d, at), load(d, at + stride), load(d, at + 2 * stride)
    d3, d4, d5 = load(d, at + 3 * stride), load(d, at + 4 * stride), load(d, at + 5 * stride)
    store(out, to, product * d0 + (d4 - both * d2))
    even, odd = d4 - far_2 * d2, near * (d3 - far_2 * d1)
    store(out, to + out_stride, even + odd)
    store(out, to + 2 * out_stride, even - odd)
    even, odd = d4 - near_2 * d2, far * (d3 - near_2 * d1)
    store(out, to + 3 * out_stride, even + odd)
    store(out, to + 4 * out_stride, even - odd)
    store(out, to + 5 * out_stride, product * d1 + (d5 - both * d3))


@function
def transform_patches(x, scratch, patches, buffer, shape, tiling, tile, count, channel):
    """Phase 1: Bᵀ d B of `count` tiles from `tile` on, for LANES channels from `channel` on.

    scratch[patches:] holds the matrices, scratch[buffer:] has room for 2·36 vectors.
    """
    lanes = min(LANES, shape.channels - channel)
    half = buffer + MATRICES * LANES  # Bᵀ d
    for t in range(count):
        sample = (tile + t) // (tiling.rows * tiling.columns)
        down = (tile + t) // tiling.columns % tiling.rows
        top, left = 4 * down - shape.pad_h, 4 * ((tile + t) % tiling.columns) - shape.pad_w
        for i in range(6):
            for j in range(6):
                row, column = top + i, left + j
                inside = row >= 0 and row < shape.height and column >= 0 and column < shape.width
                pixel = (sample * shape.height + row) * shape.width + column
                at = pixel * shape.channels + channel
                store(scratch, buffer + (6 * i + j) * LANES, load_pixel(x, at, inside, lanes))
        for j in range(6):
            at = buffer + j * LANES
            transform_patch_row(scratch, 6 * LANES, at, half + j * LANES, scratch, 6 * LANES)
        to = patches + t * tiling.patch_row + channel
        for i in range(6):
            at = half + 6 * i * LANES
            stride = tiling.patch_matrix
            transform_patch_row(scratch, LANES, at, to + 6 * i * stride, scratch, stride)


@function
def multiply_matrices(filters, scratch, patches, sums, shape, tiling, count, first, last):
    """Phase 2 of `count` tiles: panels first … last − 1 of the 36·⌈O/COLUMNS⌉ panels of filters.

    filters: (36, ⌈O/COLUMNS⌉, C, COLUMNS).
    """
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    most = tile_rows(count, ROWS)
    depth = Depth(1, shape.channels, 0)
    for number in range(first, last):
        matrix, panel = number // panels, number % panels
        a = patches + matrix * tiling.patch_matrix
        c = sums + matrix * tiling.sum_matrix + panel * COLUMNS
        for t in range(0, count, most):
            multiply(
                min(most, count - t), scratch, a + t * tiling.patch_row, tiling.patch_row,
                filters, number * shape.channels * COLUMNS,
                scratch, c + t * tiling.sum_row, tiling.sum_row, depth,
            )  # fmt: skip


@function
def transform_sum_row(m, stride, at, to):
    """Aᵀ times six vectors of m, from `at` on and `stride` apart, into four from `to` on."""
    near, far, near_2, far_2 = (
        broadcast(NEAR), broadcast(FAR), broadcast(NEAR_2), broadcast(FAR_2),
    )  # fmt: skip
    near_3, far_3 = broadcast(NEAR_3), broadcast(FAR_3)
    m1, m2 = load(m, at + stride), load(m, at + 2 * stride)
    m3, m4 = load(m, at + 3 * stride), load(m, at + 4 * stride)
    inner, outer = m1 + m2, m3 + m4
    store(m, to, load(m, at) + inner + outer)
    store(m, to + 2 * LANES, near_2 * inner + far_2 * outer)
    inner, outer = m1 - m2, m3 - m4
    store(m, to + LANES, near * inner + far * outer)
    store(m, to + 3 * LANES, near_3 * inner + (far_3 * outer + load(m, at + 5 * stride)))


@function
def transform_sums(
    scratch, sums, buffer, bias, residual, out, shape, tiling, epilogue, tile, count, channel
):  # fmt: skip
    """Phase 3: Aᵀ m A of `count` tiles from `tile` on, LANES channels from `channel` on.

    scratch[sums:] holds the matrices, scratch[buffer:] has room for 6·4 and 4·4 vectors.
    """
    lanes = min(LANES, shape.outputs - channel)
    whole = buffer + 24 * LANES
    shift = load(bias, channel)
    for t in range(count):
        sample = (tile + t) // (tiling.rows * tiling.columns)
        top = 4 * ((tile + t) // tiling.columns % tiling.rows)
        left = 4 * ((tile + t) % tiling.columns)
        at = sums + t * tiling.sum_row + channel
        stride = tiling.sum_matrix
        for j in range(6):  # each column of m becomes a row of four vectors
            transform_sum_row(scratch, 6 * stride, at + j * stride, buffer + 4 * j * LANES)
        for i in range(4):
            transform_sum_row(scratch, 4 * LANES, buffer + i * LANES, whole + 4 * i * LANES)
        for i in range(min(4, shape.out_h - top)):
            for j in range(min(4, shape.out_w - left)):
                pixel = (sample * shape.out_h + top + i) * shape.out_w + left + j
                value = load(scratch, whole + (4 * i + j) * LANES)
                to = pixel * shape.outputs + channel
                store_output(value, shift, residual, out, to, lanes, epilogue)


@kernel
def winograd_fused(
    x, filters, bias, residual, out, scratch, counters, shape, tiling, epilogue
):  # fmt: skip
    """Workers take one chunk of tiles after another and run all three phases on it.

    out (N, OH, OW, O) from x (N, H, W, C), flat; filters: (36, ⌈O/COLUMNS⌉, C, COLUMNS).
    A worker's slot of scratch holds a buffer, transformed patches and sums.
    """
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    workers = begin_count(counters)
    for worker in prange(workers):
        buffer = worker * tiling.slot
        patches = buffer + 2 * MATRICES * LANES
        sums = patches + MATRICES * tiling.patch_matrix
        tile = fetch_add(counters, 0) * tiling.chunk
        while tile < tiling.tiles:
            count = min(tiling.chunk, tiling.tiles - tile)
            for c in range(0, shape.channels, LANES):
                transform_patches(x, scratch, patches, buffer, shape, tiling, tile, count, c)
            multiply_matrices(
                filters, scratch, patches, sums, shape, tiling, count, 0, MATRICES * panels
            )
            for o in range(0, shape.outputs, LANES):
                transform_sums(
                    scratch, sums, buffer, bias, residual, out, shape, tiling, epilogue,
                    tile, count, o,
                )  # fmt: skip
            tile = fetch_add(counters, 0) * tiling.chunk


@kernel
def winograd_nonfused(
    x, filters, bias, residual, out, scratch, counters, shape, tiling, epilogue, tile, count
):  # fmt: skip
    """All workers share each phase of `count` tiles from `tile` on.

    The other arguments are those of `winograd_fused`. A worker's slot of scratch holds a buffer;
    transformed patches and sums follow the slots.
    """
    workers = begin_count(counters)
    patches = workers * tiling.slot
    sums = patches + MATRICES * tiling.patch_matrix
    products = MATRICES * ((shape.outputs + COLUMNS - 1) // COLUMNS)
    for worker in prange(workers):
        t = fetch_add(counters, 0)
        while t < count:
            row = patches + t * tiling.patch_row
            for c in range(0, shape.channels, LANES):
                transform_patches(
                    x, scratch, row, worker * tiling.slot, shape, tiling, tile + t, 1, c
                )
            t = fetch_add(counters, 0)
    for _ in prange(workers):
        item = fetch_add(counters, 1)
        while item < products:
            multiply_matrices(filters, scratch, patches, sums, shape, tiling, count, item, item + 1)
            item = fetch_add(counters, 1)
    for worker in prange(workers):
        t = fetch_add(counters, 2)
        while t < count:
            row = sums + t * tiling.sum_row
            for o in range(0, shape.outputs, LANES):
                transform_sums(
                    scratch, row, worker * tiling.slot, bias, residual, out, shape, tiling,
                    epilogue, tile + t, 1, o,
                )  # fmt: skip
            t = fetch_add(counters, 2)
