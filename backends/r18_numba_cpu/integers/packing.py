"""Weights of bytes as the micro-kernels read them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d
from r18.graph.quantized import QuantizedConv2d, QuantizedLinear
from r18_numba_cpu.compiled import module
from r18_numba_cpu.integers import tiles
from r18_numba_cpu.packing import Arrays, panels, round_up

FLIP = 128
"""Added to an image's signed bytes, so that unsigned bytes are multiplied by signed ones."""


AMX, VNNI, WORDS, PORTABLE = 64, 4, 2, 1
"""The elements of K that a micro-kernel multiplies at a time: its `group`. For AMX an upper limit;
its operands are packed as for VNNI."""

PACKED = {AMX: np.int8, VNNI: np.int8, WORDS: np.int16, PORTABLE: np.float32}
BANDS = {AMX: np.uint8, VNNI: np.uint8, WORDS: np.uint16, PORTABLE: np.float32}
"""The dtypes of packed weights and of bands of the image, by `group`."""


def flip_of(stored: str, group: int = VNNI) -> np.uint8:
    """The value that flips an image's bytes. AMX multiplies bytes of either sign as they are."""
    return np.uint8(FLIP if stored == "int8" and group != AMX else 0)


@lru_cache(maxsize=1024)
def plain(conv: Conv2d) -> Conv2d:
    """The convolution of one group without dilation that makes the same integers.

    Its further weights are 0, and a product of integers with 0 adds nothing to a sum.
    """
    (down, right), (kh, kw) = conv.dilation, conv.kernel_size
    span = (1 + down * (kh - 1), 1 + right * (kw - 1))
    return replace(conv, kernel_size=span, groups=1, dilation=(1, 1))


def plain_weight(conv: Conv2d, weight: Array) -> Array:
    """The weight (O, C/groups, kh, kw) as that of `plain`, (O, C, span of rows, of columns)."""
    whole = plain(conv)
    found: Array = np.zeros((whole.out_channels, whole.in_channels, *whole.kernel_size), np.int8)
    down, right = conv.dilation
    outputs, channels = conv.out_channels // conv.groups, conv.group_channels
    for group in range(conv.groups):
        rows = slice(group * outputs, (group + 1) * outputs)
        reads = slice(group * channels, (group + 1) * channels)
        found[rows, reads, ::down, ::right] = weight[rows]
    return found


def stack_of(conv: Conv2d, group: int) -> int:
    """How many rows of an image a band has in one, for a convolution fused with its pooling."""
    if group != AMX:
        return 1
    whole = plain(conv)
    return tiles.stack(*whole.kernel_size, whole.in_channels, whole.stride[0])


def pack(
    op: QuantizedConv2d | QuantizedLinear, weights: Arrays, group: int, stack: int = 1
) -> Arrays:
    """Panels (panels, kh, ⌈kw·C/group⌉, columns, group), and the epilogue's operands.

    Weights are `PACKED`, with zeros beyond a kernel row. AMX's are groups of four in whole steps of
    K, as int32, in the order of `tiles.in_order`. stack: see `tiles.stacked`; kh and C are those of
    the stacked rows, (C, stack).
    """
    weight = weights[0]
    if isinstance(op, QuantizedConv2d) and op.extras:
        weight = plain_weight(op.conv, weight)
    count = len(weight)
    taps = weight.reshape(count, -1, *weight.shape[2:] or (1, 1)).transpose(2, 3, 1, 0)
    taps = np.pad(taps, ((0, -len(taps) % stack), *3 * ((0, 0),)))  # (kh, kw, C, O)
    rows = taps.reshape(-1, stack, *taps.shape[1:]).transpose(0, 2, 3, 1, 4)
    runs = rows.reshape(len(rows), -1, count)  # (kh, kw·C, O) of stacked rows
    columns = module("micro_kernel").COLUMNS
    together = min(group, VNNI)
    length = tiles.padded(runs.shape[1]) if group == AMX else round_up(runs.shape[1], together)
    whole: Array = np.zeros((len(runs), length, panels(count) * columns), PACKED[group])
    whole[:, : runs.shape[1], :count] = runs
    split = whole.reshape(len(runs), -1, together, panels(count), columns)
    packed = np.ascontiguousarray(split.transpose(3, 0, 1, 4, 2))
    if group == AMX:
        packed = tiles.in_order(packed.view(np.int32), tiles.step(runs.shape[1]))
    return packed, *epilogue_weights(op, weights, group)


def epilogue_weights(op: QuantizedConv2d | QuantizedLinear, weights: Arrays, group: int) -> Arrays:
    """Bias and multiplier padded to panels, and the residual's multiplier, (1,).

    The bias subtracts what `FLIP` adds to each sum: modulo 2³², as the kernels add, so the result
    is the sum itself.
    """
    weight, bias, multiplier, *residual_multiplier = weights
    sums = weight.reshape(len(weight), -1).sum(axis=1, dtype=np.int64)
    flipped = bias.astype(np.int64) - int(flip_of(op.input_storage[0], group)) * sums
    columns = module("micro_kernel").COLUMNS
    return (
        _padded(flipped.astype(np.int32), columns),  # modulo 2³²
        _padded(multiplier, columns),
        *(residual_multiplier or [np.ones(1, np.float32)]),
    )


def _padded(channels: Array, columns: int) -> Array:
    """Zeros up to whole panels."""
    whole: Array = np.zeros(panels(len(channels)) * columns, channels.dtype)
    whole[: len(channels)] = channels
    return whole
