"""Weights of bytes as the micro-kernels read them."""

from __future__ import annotations

import numpy as np

from r18.backend import Array
from r18.graph.quantized import QuantizedConv2d, QuantizedLinear
from r18_numba_cpu.compiled import ceil_div, module
from r18_numba_cpu.packing import Arrays, panels

FLIP = 128
"""What is added to signed bytes, so that products are of unsigned and signed ones."""


VNNI, PORTABLE = 4, 1
"""The bytes that a micro-kernel multiplies at a time: its `group`."""


def flip_of(stored: str) -> np.uint8:
    return np.uint8(FLIP if stored == "int8" else 0)


def pack(op: QuantizedConv2d | QuantizedLinear, weights: Arrays, group: int) -> Arrays:
    """Panels (panels, kh, ⌈kw·C/group⌉, columns, group), bias and multiplier padded to panels, and
    the residual's multiplier, (1,).

    Weights are int8, with zeros beyond a kernel row; portable ones are float32. The bias subtracts
    what `FLIP` adds to each sum: modulo 2³², as the kernels add, so the result is the sum itself.
    """
    weight, bias, multiplier, *residual_multiplier = weights
    count = len(weight)
    taps = weight.reshape(count, -1, *weight.shape[2:] or (1, 1)).transpose(2, 3, 1, 0)
    runs = taps.reshape(len(taps), -1, count)  # (kh, kw·C, O)
    columns = module("micro_kernel").COLUMNS
    groups = ceil_div(runs.shape[1], group)
    whole: Array = np.zeros(
        (len(runs), groups * group, panels(count) * columns),
        np.float32 if group == PORTABLE else np.int8,
    )
    whole[:, : runs.shape[1], :count] = runs
    split = whole.reshape(len(runs), groups, group, -1, columns).transpose(3, 0, 1, 4, 2)
    sums = weight.reshape(count, -1).sum(axis=1, dtype=np.int64)
    flipped = bias.astype(np.int64) - int(flip_of(op.input_storage[0])) * sums
    return (
        np.ascontiguousarray(split),
        _padded(flipped.astype(np.int32), columns),  # modulo 2³²
        _padded(multiplier, columns),
        *(residual_multiplier or [np.ones(1, np.float32)]),
    )


def _padded(channels: Array, columns: int) -> Array:
    """Zeros up to whole panels."""
    whole: Array = np.zeros(panels(len(channels)) * columns, channels.dtype)
    whole[: len(channels)] = channels
    return whole
