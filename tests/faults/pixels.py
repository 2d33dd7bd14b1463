"""Pixels normalised for a network, wrong in one place each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.backend.host import HostFunction
from r18.graph.ops import Normalize

Arrays = tuple[Array, ...]
Formula = Callable[[Array, Array, Array], Array]


def normalize(x: Array, mean: Array, std: Array) -> Array:
    """Normalisation as the op defines it, of (N, H, W, C) in float32."""
    y: Array = (x / np.float32(255) - mean) / std
    return y


def of_pixels(formula: Formula = normalize) -> HostFunction:
    """`out = formula(x, mean, std)`, in NHWC; out is NCHW."""

    def run(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        mean, std = (np.array(values, np.float32) for values in (op.mean, op.std))
        out[...] = formula(inputs[0], mean, std).transpose(0, 3, 1, 2)

    return run


def _padded_rows(x: Array) -> Array:
    """Pixels read as if each row began at a multiple of four bytes; zeros after the image."""
    n, h, w, c = x.shape
    row = -(-w * c // 4) * 4
    flat = np.zeros((n, h * row), x.dtype)
    flat[:, : h * w * c] = x.reshape(n, -1)
    return flat.reshape(n, h, row)[..., : w * c].reshape(x.shape)


def _without_the_last(x: Array, mean: Array, std: Array) -> Array:
    y = normalize(x, mean, std)
    y.reshape(len(x), -1, x.shape[3])[:, -1] = 0
    return y


def _fault(name: str, wrong: str, formula: Formula) -> Fault:
    return fault(Normalize, name, wrong, "impulse bound", of_pixels(formula))


FAULTS = (
    _fault(
        "not_divided",
        "does not divide by 255",
        lambda x, m, s: normalize(x * np.float32(255), m, s),
    ),
    _fault(
        "divided_by_256",
        "divides by 256",
        lambda x, m, s: normalize(x * np.float32(255 / 256), m, s),
    ),
    _fault(
        "mean_in_bytes",
        "takes the mean off before it divides by 255",
        lambda x, m, s: (x - m) / np.float32(255) / s,
    ),
    _fault("mean_missing", "does not take the mean off", lambda x, m, s: normalize(x, 0 * m, s)),
    _fault("std_missing", "does not divide by std", lambda x, m, s: normalize(x, m, s / s)),
    _fault(
        "mean_of_another_channel",
        "takes the mean of the channel before",
        lambda x, m, s: normalize(x, np.roll(m, 1), s),
    ),
    _fault(
        "std_of_another_channel",
        "takes the deviation of the channel before",
        lambda x, m, s: normalize(x, m, np.roll(s, 1)),
    ),
    _fault(
        "bgr",
        "the first channel is taken for the last",
        lambda x, m, s: normalize(x[..., ::-1], m, s),
    ),
    _fault(
        "channels_first",
        "the bytes are read as NCHW",
        lambda x, m, s: normalize(
            x.reshape(len(x), x.shape[3], *x.shape[1:3]).transpose(0, 2, 3, 1), m, s
        ),
    ),
    _fault(
        "signed", "bytes from 128 on are negative", lambda x, m, s: normalize(x.view(np.int8), m, s)
    ),
    _fault(
        "padded_rows",
        "rows are read as if padded to four bytes",
        lambda x, m, s: normalize(_padded_rows(x), m, s),
    ),
    _fault("last_pixel", "the last pixel of an image becomes 0", _without_the_last),
    _fault(
        "clamped",
        "what is below the mean becomes 0",
        lambda x, m, s: np.maximum(normalize(x, m, s), 0),
    ),
)
TWINS = (kernel("twin", Normalize, "as_written", of_pixels(), batch_invariant=True),)
