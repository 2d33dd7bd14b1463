"""Convolution by im2col, group by group: windows are copied, so that taps may be apart.

1. A worker takes a row of outputs and a group. It copies the windows of a register tile's pixels,
   of the group's channels only, to its scratch, as float32; taps outside of the image are zeros.
2. The micro-kernel multiplies them by the group's panels of filters: pixels × K times K × channels.
3. The epilogue adds bias and residual, applies ReLU and stores the register tile.

Every window is copied, where `implicit_gemm` reads the image itself: this is for the convolutions
that `implicit_gemm` does not take.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.kernels.blocks import begin_count
from r18_numba_cpu.kernels.jit import function, kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS, multiply, tile_rows
from r18_numba_cpu.kernels.vector import LANES, fetch_add, load, put_run, store_output


@function
def copy_window(x, sample, row, column, channel, shape, grouped, scratch, to):
    """Copy the window of an output, of the group's channels from `channel` on, to scratch[to:]."""
    length = grouped.channels
    for r in range(shape.kernel_h):
        y = row * shape.stride_h - shape.pad_h + r * grouped.dilation_h
        for s in range(shape.kernel_w):
            z = column * shape.stride_w - shape.pad_w + s * grouped.dilation_w
            if y < 0 or y >= shape.height or z < 0 or z >= shape.width:
                scratch[to : to + length] = np.float32(0)
            else:
                pixel = (sample * shape.height + y) * shape.width + z
                source = pixel * shape.channels + channel
                put_run(x, source, scratch, to, length)
            to += length


@function
def store_group_tile(
    scratch, sums, bias, bias_at, residual, out, pixel, count, channel, left, outputs, epilogue
):  # fmt: skip
    """Apply the epilogue to `count` pixels from `pixel` on, and to as many as `left` channels from
    `channel` on, whose biases begin at `bias_at`."""
    for p in range(count):
        for v in range(0, COLUMNS, LANES):
            if v >= left:
                break
            value, shift = load(scratch, sums + p * COLUMNS + v), load(bias, bias_at + v)
            to, lanes = (pixel + p) * outputs + channel + v, min(LANES, left - v)
            store_output(value, shift, residual, out, to, lanes, epilogue)


@kernel
def im2col(x, weight, bias, residual, out, scratch, counters, shape, grouped, epilogue):
    """out (N, OH, OW, O) of x (N, H, W, C), float32, or bfloat16 as uint16; all are flat.

    weight: panels (groups, ⌈O/groups/COLUMNS⌉, K, COLUMNS), with K = kh·kw·C/groups. bias: of each
    group, padded to whole panels. grouped: `Groups`.
    """
    depth = shape.kernel_h * shape.kernel_w * grouped.channels
    run = Depth(1, depth, depth)
    panels = (grouped.outputs + COLUMNS - 1) // COLUMNS
    lines = shape.samples * shape.out_h
    blocks = lines * grouped.groups
    most = tile_rows(shape.out_w, ROWS)
    workers = begin_count(counters)
    for worker in prange(workers):
        sums = worker * grouped.slot
        windows = sums + ROWS * COLUMNS
        block = fetch_add(counters, 0)
        while block < blocks:
            group, line = block % grouped.groups, block // grouped.groups
            sample, row = line // shape.out_h, line % shape.out_h
            for column in range(0, shape.out_w, most):
                count = min(most, shape.out_w - column)
                for p in range(count):
                    copy_window(
                        x, sample, row, column + p, group * grouped.channels,
                        shape, grouped, scratch, windows + p * depth,
                    )  # fmt: skip
                for panel in range(panels):
                    at = group * panels + panel
                    multiply(
                        count, scratch, windows, depth,
                        weight, at * depth * COLUMNS, scratch, sums, COLUMNS, run,
                    )  # fmt: skip
                    first = panel * COLUMNS
                    store_group_tile(
                        scratch, sums, bias, at * COLUMNS, residual, out,
                        line * shape.out_w + column, count, group * grouped.outputs + first,
                        grouped.outputs - first, shape.outputs, epilogue,
                    )  # fmt: skip
            block = fetch_add(counters, 0)
