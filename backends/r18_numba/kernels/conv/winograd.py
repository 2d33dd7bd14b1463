"""Winograd's F(2×2, 3×3): Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A on 4×4 patches d that give 2×2 outputs.

Lavin and Gray, arXiv:1509.09308, equation 8. Three launches:

1. `build_input`: transform the patches.
2. `build_sums`: sum over channels, a batch of 16 matrix products, one for each element of a
   transformed patch.
3. `build_output`: transform the sums and apply the epilogue.

Transformed patches and sums are float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.conv.tile_product import build_tile_product
from r18_numba.kernels.jit import ALIGNMENT, kernel
from r18_numba.target import numba_cuda
from r18_numba.tile import Tile

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build_input(storage: Any) -> Any:
    """Bᵀ d B of every patch: patches (16, padded channels, padded tiles) from x (N, C, H, W).

    Padded channels and padded tiles are written as zeros.
    """

    @kernel()
    def winograd_input(  # type: ignore[no-untyped-def]
        x, patches, channels, padded_channels, height, width,
        pad_h, pad_w, tiles_h, tiles_w, tiles, padded_tiles,
    ):  # fmt: skip
        d = cuda.local.array((4, 4), f32)
        t = cuda.local.array((4, 4), f32)
        area = tiles_h * tiles_w
        plane = index(padded_channels) * padded_tiles
        for at in range(cuda.grid(1), plane, cuda.gridsize(1)):
            c = at // padded_tiles
            tile = at - c * padded_tiles
            sample = tile // area
            down = (tile - sample * area) // tiles_w
            top = 2 * down - pad_h
            left = 2 * (tile - sample * area - down * tiles_w) - pad_w
            corner = ((index(sample) * channels + c) * height + top) * width + left
            real = c < channels and tile < tiles
            for i in range(4):
                for j in range(4):
                    d[i, j] = f32(0)
                    if (
                        real
                        and top + i >= 0
                        and top + i < height
                        and left + j >= 0
                        and left + j < width
                    ):
                        d[i, j] = f32(x[np.uint64(corner + i * width + j)])
            for j in range(4):
                t[0, j] = d[0, j] - d[2, j]
                t[1, j] = d[1, j] + d[2, j]
                t[2, j] = d[2, j] - d[1, j]
                t[3, j] = d[1, j] - d[3, j]
            for i in range(4):
                to = 4 * i * plane + at
                patches[np.uint64(to)] = t[i, 0] - t[i, 2]
                patches[np.uint64(to + plane)] = t[i, 1] + t[i, 2]
                patches[np.uint64(to + 2 * plane)] = t[i, 2] - t[i, 1]
                patches[np.uint64(to + 3 * plane)] = t[i, 1] - t[i, 3]

    return winograd_input


@cache
def build_sums(tile: Tile) -> Any:
    """products[z, o, t] = Σ_c filters[z, c, o]·patches[z, c, t], z = blockIdx.z.

    Every extent is padded to the tile, so there are no edge checks.
    """
    m, n, k_extent, rows, columns = tile.m, tile.n, tile.k, tile.rows, tile.columns
    row_vector, column_vector = tile.row_vector, tile.column_vector
    across, down = n // columns, m // rows
    row_gap, column_gap = row_vector * down, column_vector * across
    threads, row_step = tile.threads, tile.row_step
    loads_a, loads_b = m * k_extent // threads, k_extent // row_step
    registers = rows * columns
    multiply = build_tile_product(tile, f32)

    @kernel(tile.registers)
    def winograd_sums(  # type: ignore[no-untyped-def]
        filters, patches, products, padded_channels, padded_outputs, padded_tiles
    ):
        stage_a = cuda.shared.array((2, k_extent, m), f32, alignment=ALIGNMENT)
        stage_b = cuda.shared.array((2, k_extent, n), f32, alignment=ALIGNMENT)
        sums = cuda.local.array(registers, f32)
        next_a = cuda.local.array(loads_a, f32)
        next_b = cuda.local.array(loads_b, f32)

        thread = cuda.threadIdx.x & 1023  # see `implicit_gemm`, also for the pipeline
        row = thread // across * row_vector
        column = thread % across * column_vector
        lane, lane_row = thread % n, thread // n
        z = index(cuda.blockIdx.z)
        filter_at = z * padded_channels * padded_outputs + cuda.blockIdx.y * m
        patch_at = z * padded_channels * padded_tiles + index(cuda.blockIdx.x) * n + lane
        steps = padded_channels // k_extent
        for i in range(rows):
            for j in range(columns):
                sums[i * columns + j] = f32(0)
        for step in range(steps + 1):
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    c = step * k_extent + at // m
                    next_a[i] = filters[np.uint64(filter_at + index(c) * padded_outputs + at % m)]
                for i in range(loads_b):
                    c = step * k_extent + lane_row + i * row_step
                    next_b[i] = patches[np.uint64(patch_at + index(c) * padded_tiles)]
            if step > 0:
                multiply(stage_a, stage_b, (step - 1) & 1, row, column, sums)
            if step < steps:
                for i in range(loads_a):
                    at = thread + i * threads
                    stage_a[step & 1, at // m, at % m] = next_a[i]
                for i in range(loads_b):
                    stage_b[step & 1, lane_row + i * row_step, lane] = next_b[i]
                cuda.syncthreads()
        first = (z * padded_outputs + cuda.blockIdx.y * m + row) * padded_tiles
        first += index(cuda.blockIdx.x) * n + column
        for i in range(rows):
            down_at = first + index(i // row_vector * row_gap + i % row_vector) * padded_tiles
            for j in range(columns):
                aside = j // column_vector * column_gap + j % column_vector
                products[np.uint64(down_at + aside)] = sums[i * columns + j]

    return winograd_sums


@cache
def build_output(storage: Any) -> Any:
    """Aᵀ m A of every tile's sums, then bias, residual and ReLU: out (N, O, OH, OW).

    bias (padded outputs) float32. fused: bit 1 adds the residual, bit 2 applies ReLU.
    """

    @kernel()
    def winograd_output(  # type: ignore[no-untyped-def]
        products, bias, residual, out, outputs, padded_outputs, out_height, out_width,
        tiles_h, tiles_w, tiles, padded_tiles, fused,
    ):  # fmt: skip
        t = cuda.local.array((2, 4), f32)
        y = cuda.local.array((2, 2), f32)
        area = tiles_h * tiles_w
        plane = index(padded_outputs) * padded_tiles
        for at in range(cuda.grid(1), index(outputs) * tiles, cuda.gridsize(1)):
            o = at // tiles
            tile = at - o * tiles
            sample = tile // area
            down = (tile - sample * area) // tiles_w
            left = 2 * (tile - sample * area - down * tiles_w)
            source = o * padded_tiles + tile
            for j in range(4):
                one = products[np.uint64(source + j * plane)]
                two = products[np.uint64(source + (4 + j) * plane)]
                three = products[np.uint64(source + (8 + j) * plane)]
                four = products[np.uint64(source + (12 + j) * plane)]
                t[0, j] = one + two + three
                t[1, j] = two - three - four
            for i in range(2):
                y[i, 0] = t[i, 0] + t[i, 1] + t[i, 2]
                y[i, 1] = t[i, 1] - t[i, 2] - t[i, 3]
            shift = bias[np.uint64(o)]
            corner = ((index(sample) * outputs + o) * out_height + 2 * down) * out_width + left
            for i in range(2):
                for j in range(2):
                    if 2 * down + i < out_height and left + j < out_width:
                        to = np.uint64(corner + i * out_width + j)
                        value = y[i, j] + shift
                        if fused & 1:
                            value += f32(residual[to])
                        if fused & 2 and value <= f32(0):  # not NaN
                            value = f32(0)
                        out[to] = storage(value)

    return winograd_output
