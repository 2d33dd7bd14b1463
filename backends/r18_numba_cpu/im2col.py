"""Convolution by im2col, for groups and dilation: packed filters, the call. See `kernels`."""

from __future__ import annotations

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18_numba_cpu.compiled import counters, module, most_threads, run
from r18_numba_cpu.kernels.arguments import Epilogue, Groups
from r18_numba_cpu.packing import (
    FLOAT_NBYTES,
    TILE_ROWS,
    Arrays,
    conv,
    panels,
    problem_of,
    round_up,
    tile_size,
    to_panels,
)


def groups_of(op: Conv2d) -> Groups:
    """A worker's slot holds a register tile, and the windows of as many pixels."""
    slot = round_up(tile_size() + max(TILE_ROWS) * op.depth)
    return Groups(op.groups, op.group_channels, op.out_channels // op.groups, *op.dilation, slot)


def workspace_nbytes(problem: Problem) -> int:
    return most_threads() * groups_of(conv(problem)).slot * FLOAT_NBYTES


def pack_filters(op: Conv2d, weights: Arrays) -> Arrays:
    """Filters (groups, panels, kh·kw·C/groups, columns), and each group's bias in whole panels."""
    outputs = op.out_channels // op.groups
    taps = weights[0].reshape(op.groups, outputs, op.group_channels, *op.kernel_size)
    matrices = taps.transpose(0, 3, 4, 2, 1).reshape(op.groups, op.depth, outputs)
    columns = panels(outputs) * module("micro_kernel").COLUMNS
    bias: Array = np.zeros((op.groups, columns), np.float32)
    if op.bias:
        bias[:, :outputs] = weights[1].reshape(op.groups, outputs)
    return to_panels(matrices), bias


def im2col(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    _, shape = problem_of(op, inputs[0].shape, out.shape)
    run(
        module("im2col").im2col,
        *(inputs[0], *weights, inputs[-1], out, workspace.view(np.float32)),
        *(counters(), shape, groups_of(op), Epilogue(op.residual, op.relu)),
    )
