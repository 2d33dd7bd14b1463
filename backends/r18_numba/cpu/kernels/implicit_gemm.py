"""Convolution as a matrix product whose left side is read from the image itself.

A band of the padded image is copied, so that no tap looks for the image's edge; then each group of
neighbouring outputs of a row is a tile of the product: pixels times taps, by taps times channels.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba.cpu.kernels.jit import kernel, part
from r18_numba.cpu.kernels.product import COLUMNS, ROWS, group, multiply
from r18_numba.cpu.kernels.vector import LANES, finish, load, take


@part
def copy_planes(
    x, sample, top, rows, padded_w, height, width, channels, kernel_h, stride_h, pad_w, band, at
):  # fmt: skip
    """As `copy_band`, from an image (N, C, H, W)."""
    length = padded_w * channels
    columns = min(width, padded_w - pad_w)
    for row in range(rows):
        if row % stride_h >= kernel_h:
            continue
        to = at + row * length
        band[to : to + length] = np.float32(0)
        if top + row >= 0 and top + row < height:
            for c in range(channels):
                source = ((sample * channels + c) * height + top + row) * width
                for j in range(columns):
                    band[to + (pad_w + j) * channels + c] = x[source + j]


@part
def copy_band(
    x, sample, top, rows, padded_w, height, width, channels, kernel_h, stride_h, pad_w, band, at
):  # fmt: skip
    """Rows `top` … of the padded image into band[at :], (rows, padded_w, channels).

    Rows that lie between windows are not read by any tap, and are left out.
    """
    length = padded_w * channels
    left = min(pad_w * channels, length)  # a narrow window may see of the padding alone
    right = left + min(width * channels, length - left)
    for row in range(rows):
        if row % stride_h >= kernel_h:
            continue
        to = at + row * length
        if top + row < 0 or top + row >= height:
            band[to : to + length] = np.float32(0)
            continue
        source = ((sample * height + top + row) * width) * channels
        band[to : to + left] = np.float32(0)
        band[to + left : to + right] = x[source : source + right - left]
        band[to + right : to + length] = np.float32(0)


@part
def finish_tile(
    sums, at, bias, residual, out, pixel, count, channel, outputs, has_residual, has_relu
):  # fmt: skip
    """The epilogue of a tile: `count` pixels from `pixel` on, COLUMNS channels from `channel`."""
    for p in range(count):
        for v in range(0, COLUMNS, LANES):
            here = channel + v
            if here >= outputs:
                break
            value, shift = load(sums, at + p * COLUMNS + v), load(bias, here)
            to, lanes = (pixel + p) * outputs + here, min(LANES, outputs - here)
            finish(value, shift, residual, out, to, lanes, has_residual, has_relu)


@kernel
def implicit_gemm(
    x, weight, bias, residual, out, scratch, workers, slot,
    samples, channels, height, width, outputs, out_h, out_w,
    kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w,
    band_rows, panels, planes, has_residual, has_relu,
):  # fmt: skip
    """out (N, OH, OW, O) from x (N, H, W, C), flat; weight in panels (⌈O/COLUMNS⌉, taps, COLUMNS).

    planes: x is (N, C, H, W).

    Workers take one block after another: `band_rows` rows of outputs of a sample, in `panels`
    panels of channels. Each has `slot` elements of scratch: a tile's sums and a band.
    """
    padded_w = (out_w - 1) * stride_w + kernel_w
    depth = kernel_h * kernel_w * channels
    all_panels = (outputs + COLUMNS - 1) // COLUMNS
    splits = (all_panels + panels - 1) // panels
    bands = (out_h + band_rows - 1) // band_rows
    blocks = samples * bands * splits
    across = group(out_w, ROWS)
    tickets = np.zeros(1, np.int64)
    for worker in prange(workers):
        sums = worker * slot
        band = sums + ROWS * COLUMNS
        block = take(tickets)
        while block < blocks:
            split = block % splits
            first_row = block // splits % bands * band_rows
            sample = block // splits // bands
            rows = min(band_rows, out_h - first_row)
            top, seen = first_row * stride_h - pad_h, (rows - 1) * stride_h + kernel_h
            if planes:
                copy_planes(
                    x, sample, top, seen, padded_w, height, width, channels,
                    kernel_h, stride_h, pad_w, scratch, band,
                )  # fmt: skip
            else:
                copy_band(
                    x, sample, top, seen, padded_w, height, width, channels,
                    kernel_h, stride_h, pad_w, scratch, band,
                )  # fmt: skip
            for panel in range(split * panels, min(all_panels, (split + 1) * panels)):
                for row in range(rows):
                    for column in range(0, out_w, across):
                        count = min(across, out_w - column)
                        start = band + (row * stride_h * padded_w + column * stride_w) * channels
                        multiply(
                            count, scratch, start, stride_w * channels,
                            weight, panel * depth * COLUMNS, scratch, sums, COLUMNS,
                            kernel_h, 1, kernel_w * channels, padded_w * channels, 0,
                        )  # fmt: skip
                        pixel = (sample * out_h + first_row + row) * out_w + column
                        finish_tile(
                            scratch, sums, bias, residual, out, pixel, count,
                            panel * COLUMNS, outputs, has_residual, has_relu,
                        )  # fmt: skip
            block = take(tickets)
