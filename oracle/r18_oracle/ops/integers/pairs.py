"""Sums of products as CPUs without VNNI add them: pairs, saturated to int16.

AVX2 and AVX-512 without VNNI multiply 32 or 64 bytes at a time by `vpmaddubsw`: uint8 activations
by int8 weights, two neighbouring products in a sum that saturates to −32,768 … 32,767. These sums
are added exactly. Which products are neighbours depends on the order in which a library holds its
activations and weights, so each order that libraries use has a name here:

- `WINDOW`: a window as one row, channels last (ONNX Runtime's im2col).
- `CHANNELS`: the channels of one pixel, to which a zero is added if they are odd (oneDNN, as
  OpenVINO has it).

Where the channels of a group are even both are the same, `EITHER`. int8 activations become uint8 by
adding 128, in the padding too, and 128 times the sum of the weights is subtracted at the end: more
pairs saturate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from r18.backend import Array
from r18.graph.ops import Conv2d

WINDOW = "pairs of a window"
CHANNELS = "pairs of channels"
EITHER = "pairs of products"

LIMITS = (-(2**15), 2**15 - 1)
LARGEST = 255
"""The largest uint8."""
OFFSET = 128
"""Added to int8 activations."""


def corrections(conv: Conv2d | None, image: Array, weight: Array) -> Mapping[str, Array]:
    """The change of a layer's exact sums by saturation, for each order of its pairs.

    conv: of the layer; None for a linear one. image: (N, C, H, W), or (N, K) of a linear layer, in
    uint8 or int8. weight: int8, (O, C / groups, R, S) or (O, K). The corrections are float64, of
    the output's shape; orders that saturate nothing are left out.
    """
    offset = OFFSET if image.dtype == np.int8 else 0
    shifted = image.astype(np.int32) + offset
    if conv is None:
        shifted, weight = shifted[:, :, None, None], weight[:, :, None, None]
    several = weight.shape[1] % 2 and weight[0, 0].size > 1
    found = {}
    for order in (WINDOW, CHANNELS) if several else (EITHER,):
        made = _corrections(conv, shifted, weight, offset, order)
        if made.any():
            found[order] = made if image.ndim == 4 else made[:, :, 0, 0]
    return found


def _corrections(
    conv: Conv2d | None, image: Array, weight: Array, offset: int, order: str
) -> Array:
    """The corrections of one order, (N, O, H', W')."""
    windows = _windows(conv, image, offset)
    factors = _pairs(weight.astype(np.int32), order)
    high = np.maximum(factors, 0).sum(axis=2) * LARGEST
    low = np.minimum(factors, 0).sum(axis=2) * LARGEST
    may = (high > LIMITS[1]) | (low < LIMITS[0])
    groups = conv.groups if conv is not None else 1
    count, per_group = windows.shape[0], len(weight) // groups
    found = np.zeros((count, len(weight), *windows.shape[2:4]))
    for n in range(count if may.any() else 0):  # windows take R·S times an image's memory
        for group, held in enumerate(np.split(windows[n], groups)):
            values = _pairs(held.transpose(1, 2, 0, 3, 4).reshape(-1, *weight.shape[1:]), order)
            for o in range(group * per_group, (group + 1) * per_group):
                sums = (values[:, may[o]] * factors[o, may[o]]).sum(axis=2)
                extra = (np.clip(sums, *LIMITS) - sums).sum(axis=1)
                found[n, o] = extra.reshape(windows.shape[2:4])
    return found


def _windows(conv: Conv2d | None, image: Array, fill: int) -> Array:
    """(N, C, H', W', R, S): the window of each output; padding has the value `fill`."""
    if conv is None:
        return image[..., None, None]
    (ph, pw), (sh, sw), (dh, dw) = conv.padding, conv.stride, conv.dilation
    padded = np.pad(image, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=fill)
    span = tuple(1 + d * (k - 1) for d, k in zip((dh, dw), conv.kernel_size, strict=True))
    return sliding_window_view(padded, span, axis=(2, 3))[:, :, ::sh, ::sw, ::dh, ::dw]


def _pairs(rows: Array, order: str) -> Array:
    """(M, C, R, S) as (M, pairs, 2), in an order; a zero stands where a product has no other."""
    if order == CHANNELS and rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1), (0, 0), (0, 0)))
    flat = rows.transpose(0, 2, 3, 1).reshape(len(rows), -1)
    if flat.shape[1] % 2:
        flat = np.pad(flat, ((0, 0), (0, 1)))
    return flat.reshape(len(flat), -1, 2)


__all__ = ["CHANNELS", "EITHER", "WINDOW", "corrections"]
