"""The magnitudes in the error bound of a convolution by fast Fourier transforms.

An output is one element of F⁻¹[Σ_c Fx_c ⊙ (Fw_c)*]: of every channel's pixels in a tile of t×t, and
its window, filled up with zeros. The tile's extent is the implementation's choice, so the norms are
those of the whole plane, which no tile exceeds, and the transforms as long as the plane needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from r18.backend import Array

LEAST_EXTENT = 16
"""The smallest tile of the bound: NNPACK has tiles of 8 and of 16."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """The terms of an FFT's bound; arrays are (N, O, 1, 1), over the finite values.

    magnitude: Σ_c ‖x_c‖₂·‖w_c‖₁.
    swapped:   Σ_c ‖x_c‖₁·‖w_c‖₂.
    spread:    Σ_c (‖x_c‖₁ + ‖w_c‖₁ + 1).
    reach:     the largest value that an intermediate may take: points·Σ_c ‖x_c‖₁·‖w_c‖₁ and each
               norm; infinite where the plane or the window holds an infinity or NaN.
    points:    of a transform, t². stages: doublings of the points in
               one transform, and those that part real ones.
    """

    magnitude: Array
    swapped: Array
    spread: Array
    reach: Array
    points: int
    stages: int


def sizes(x: Array, weight: Array, padding: tuple[int, int]) -> Sizes:
    """The sizes of a case; x (N,C,H,W), weight (O,C,KH,KW), float64, stride 1.

    The extent of a transform is at most the power of two that holds the plane and the window, and a
    product of numbers up to 7. Real transforms that share a complex one take one more stage on each
    axis to part them.
    """
    extents = [
        _power_of_two(image + 2 * around + window - 1)
        for image, around, window in zip(x.shape[2:], padding, weight.shape[2:], strict=True)
    ]
    points = math.prod(extents)
    stages = points.bit_length() - 1 + 2
    (x1, x2), (w1, w2) = _norms(x), _norms(weight)
    total = _over_channels(x1, w1)
    norms = np.maximum(np.max(x1, axis=1)[:, None], np.max(w1, axis=1))
    reach = np.maximum(points * total, norms)
    wild = _wild(x)[:, None] | _wild(weight)
    spread = x1.sum(axis=1)[:, None] + w1.sum(axis=1) + x.shape[1]
    return Sizes(
        _over_channels(x2, w1)[..., None, None],
        _over_channels(x1, w2)[..., None, None],
        spread[..., None, None],
        np.where(wild, np.inf, reach)[..., None, None],
        points,
        stages,
    )


def _power_of_two(extent: int) -> int:
    return max(LEAST_EXTENT, 1 << (extent - 1).bit_length())


def _norms(planes: Array) -> tuple[Array, Array]:
    """The sums of magnitudes and the Euclidean norms of planes, over their finite values."""
    size = np.where(np.isfinite(planes), np.abs(planes), 0.0)
    return size.sum(axis=(2, 3)), np.linalg.norm(size, axis=(2, 3))


def _over_channels(x: Array, w: Array) -> Array:
    """Σ_c x[n,c]·w[o,c] as (N, O)."""
    found: Array = x @ w.T
    return found


def _wild(planes: Array) -> Array:
    """Where an image or a filter holds an infinity or NaN."""
    found: Array = np.any(~np.isfinite(planes), axis=(1, 2, 3))
    return found


__all__ = ["Sizes", "sizes"]
