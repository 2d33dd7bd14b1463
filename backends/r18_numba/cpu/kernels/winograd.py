"""Winograd's F(4×4, 3×3): Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A on 6×6 patches d that give 4×4 outputs.

Lavin and Gray, arXiv:1509.09308, with the points 0, ±1, ±2, ∞. The sums over channels are 36
matrix products, one for each place in a transformed patch. Either each worker does all of it for
some tiles at a time, which stay in its cache, or all workers share each of the three phases of
many tiles, so that the transformed filters, larger than the caches, are read once.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba.cpu.kernels.jit import kernel, part
from r18_numba.cpu.kernels.product import COLUMNS, ROWS, group, multiply
from r18_numba.cpu.kernels.vector import (
    LANES,
    broadcast,
    finish,
    load,
    read,
    store,
    take,
)

PLACES = 36
"""Places in a transformed patch."""


@part
def pixel(x, at, inside, lanes):
    """Some channels of a pixel, zeros outside the image and beyond the channels."""
    if inside:
        return read(x, at, lanes)
    return broadcast(np.float32(0))


@part
def patch_row(d, stride, at, to, out, out_stride):
    """Bᵀ times six vectors of d, from `at` on and `stride` apart, into out."""
    two, four = broadcast(np.float32(2)), broadcast(np.float32(4))
    d0, d1, d2 = load(d, at), load(d, at + stride), load(d, at + 2 * stride)
    d3, d4, d5 = load(d, at + 3 * stride), load(d, at + 4 * stride), load(d, at + 5 * stride)
    even, odd = d4 - four * d2, d3 - four * d1
    store(out, to, four * (d0 - d2) + (d4 - d2))
    store(out, to + out_stride, even + odd)
    store(out, to + 2 * out_stride, even - odd)
    even, odd = d4 - d2, two * (d3 - d1)
    store(out, to + 3 * out_stride, even + odd)
    store(out, to + 4 * out_stride, even - odd)
    store(out, to + 5 * out_stride, four * (d1 - d3) + (d5 - d3))


@part
def transform_patches(
    x, patches, patches_at, place, stride, tile, count, channels, channel,
    height, width, pad_h, pad_w, tiles_h, tiles_w, corner, corner_at,
):  # fmt: skip
    """Bᵀ d B of `count` tiles from `tile` on, for LANES channels from `channel` on.

    patches: (36, count, stride), places `place` elements apart, from patches_at on.
    corner: a scratch of 2·36 vectors, from corner_at on.
    """
    lanes = min(LANES, channels - channel)
    turned = corner_at + PLACES * LANES
    for t in range(count):
        sample = (tile + t) // (tiles_h * tiles_w)
        down = (tile + t) // tiles_w % tiles_h
        top, left = 4 * down - pad_h, 4 * ((tile + t) % tiles_w) - pad_w
        for i in range(6):
            for j in range(6):
                row, column = top + i, left + j
                inside = row >= 0 and row < height and column >= 0 and column < width
                at = ((sample * height + row) * width + column) * channels + channel
                store(corner, corner_at + (6 * i + j) * LANES, pixel(x, at, inside, lanes))
        for j in range(6):
            here = corner_at + j * LANES
            patch_row(corner, 6 * LANES, here, turned + j * LANES, corner, 6 * LANES)
        to = patches_at + t * stride + channel
        for i in range(6):
            patch_row(corner, LANES, turned + 6 * i * LANES, to + 6 * i * place, patches, place)


@part
def multiply_places(
    filters, patches, patches_at, place, stride, sums, sums_at, sums_place, sums_stride,
    count, channels, panels, first, last,
):  # fmt: skip
    """The products numbered first … last − 1 of the 36·panels of `count` tiles.

    sums: (36, count, sums_stride), places sums_place apart. filters: (36, panels, C, COLUMNS).
    """
    across = group(count, ROWS)
    for number in range(first, last):
        z, panel = number // panels, number % panels
        for t in range(0, count, across):
            multiply(
                min(across, count - t),
                patches, patches_at + z * place + t * stride, stride,
                filters, number * channels * COLUMNS,
                sums, sums_at + z * sums_place + t * sums_stride + panel * COLUMNS, sums_stride,
                1, 1, channels, 0, 0,
            )  # fmt: skip


@part
def sums_row(m, stride, at, to, out):
    """Aᵀ times six vectors of m, from `at` on and `stride` apart, into four of out."""
    two, four = broadcast(np.float32(2)), broadcast(np.float32(4))
    eight = broadcast(np.float32(8))
    m1, m2 = load(m, at + stride), load(m, at + 2 * stride)
    m3, m4 = load(m, at + 3 * stride), load(m, at + 4 * stride)
    near, far = m1 + m2, m3 + m4
    store(out, to, load(m, at) + near + far)
    store(out, to + 2 * LANES, near + four * far)
    near, far = m1 - m2, m3 - m4
    store(out, to + LANES, near + two * far)
    store(out, to + 3 * LANES, near + eight * far + load(m, at + 5 * stride))


@part
def transform_sums(
    sums, sums_at, place, stride, bias, residual, out, tile, count, outputs, channel,
    out_h, out_w, tiles_h, tiles_w, corner, corner_at, has_residual, has_relu,
):  # fmt: skip
    """Aᵀ m A of `count` tiles from `tile` on, LANES channels from `channel`, and the epilogue.

    corner: a scratch of 6·4 and of 4·4 vectors, from corner_at on.
    """
    lanes = min(LANES, outputs - channel)
    turned = corner_at + 24 * LANES
    shift = load(bias, channel)
    for t in range(count):
        sample = (tile + t) // (tiles_h * tiles_w)
        top = 4 * ((tile + t) // tiles_w % tiles_h)
        left = 4 * ((tile + t) % tiles_w)
        at = sums_at + t * stride + channel
        for j in range(6):  # columns of m, each into a row of four
            sums_row(sums, 6 * place, at + j * place, corner_at + 4 * j * LANES, corner)
        for i in range(4):
            here = corner_at + i * LANES
            sums_row(corner, 4 * LANES, here, turned + 4 * i * LANES, corner)
        for i in range(min(4, out_h - top)):
            for j in range(min(4, out_w - left)):
                to = ((sample * out_h + top + i) * out_w + left + j) * outputs + channel
                value = load(corner, turned + (4 * i + j) * LANES)
                finish(value, shift, residual, out, to, lanes, has_residual, has_relu)


@kernel
def by_tiles(
    x, filters, bias, residual, out, scratch, workers, slot, chunk,
    channels, height, width, outputs, out_h, out_w, pad_h, pad_w, tiles_h, tiles_w, tiles,
    place, stride, sums_place, sums_stride, has_residual, has_relu,
):  # fmt: skip
    """Workers take `chunk` tiles after another, and do all there is to do for them.

    out (N, OH, OW, O) from x (N, H, W, C), flat; filters in panels (36, ⌈O/COLUMNS⌉, C, COLUMNS).
    slot: elements of scratch a worker has, for a corner, transformed patches and sums.
    """
    panels = (outputs + COLUMNS - 1) // COLUMNS
    tickets = np.zeros(1, np.int64)
    for worker in prange(workers):
        corner = worker * slot
        patches = corner + 2 * PLACES * LANES
        sums = patches + PLACES * place
        tile = take(tickets) * chunk
        while tile < tiles:
            count = min(chunk, tiles - tile)
            for c in range(0, channels, LANES):
                transform_patches(
                    x, scratch, patches, place, stride, tile, count, channels, c,
                    height, width, pad_h, pad_w, tiles_h, tiles_w, scratch, corner,
                )  # fmt: skip
            multiply_places(
                filters, scratch, patches, place, stride, scratch, sums, sums_place, sums_stride,
                count, channels, panels, 0, PLACES * panels,
            )  # fmt: skip
            for o in range(0, outputs, LANES):
                transform_sums(
                    scratch, sums, sums_place, sums_stride, bias, residual, out, tile, count,
                    outputs, o, out_h, out_w, tiles_h, tiles_w, scratch, corner,
                    has_residual, has_relu,
                )  # fmt: skip
            tile = take(tickets) * chunk


@kernel
def by_places(
    x, filters, bias, residual, out, scratch, workers, slot, tile, count,
    channels, height, width, outputs, out_h, out_w, pad_h, pad_w, tiles_h, tiles_w,
    place, stride, sums_place, sums_stride, has_residual, has_relu,
):  # fmt: skip
    """All workers share each phase of the `count` tiles from `tile` on; else as `by_tiles`.

    slot: elements of scratch a worker has, for a corner; patches and sums lie behind them all.
    """
    panels = (outputs + COLUMNS - 1) // COLUMNS
    patches = workers * slot
    sums = patches + PLACES * place
    products = PLACES * panels
    tickets = np.zeros(3, np.int64)
    for worker in prange(workers):
        t = take(tickets[0:1])
        while t < count:
            for c in range(0, channels, LANES):
                transform_patches(
                    x, scratch, patches + t * stride, place, stride, tile + t, 1, channels, c,
                    height, width, pad_h, pad_w, tiles_h, tiles_w, scratch, worker * slot,
                )  # fmt: skip
            t = take(tickets[0:1])
    for _ in prange(workers):
        item = take(tickets[1:2])
        while item < products:
            multiply_places(
                filters, scratch, patches, place, stride, scratch, sums, sums_place, sums_stride,
                count, channels, panels, item, item + 1,
            )  # fmt: skip
            item = take(tickets[1:2])
    for worker in prange(workers):
        t = take(tickets[2:3])
        while t < count:
            for o in range(0, outputs, LANES):
                transform_sums(
                    scratch, sums + t * sums_stride, sums_place, sums_stride, bias, residual, out,
                    tile + t, 1, outputs, o, out_h, out_w, tiles_h, tiles_w,
                    scratch, worker * slot, has_residual, has_relu,
                )  # fmt: skip
            t = take(tickets[2:3])
