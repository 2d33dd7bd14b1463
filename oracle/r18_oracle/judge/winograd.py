"""The matrices of Winograd's minimal filtering, and the magnitudes in its error bound.

F(m×m, 3×3) computes an m×m tile of outputs from an (m+2)×(m+2) tile d of inputs as
Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A (Lavin and Gray, arXiv:1509.09308, equations 8 and 13). F(6×6) uses the
points 0, ±1, ±2, ±½, ∞, as NNPACK does. F(4×4) uses 0, ±11/16, ±3/2, ∞: with Lavin and Gray's 0,
±1, ±2, ∞ rounding errors are more than twice as large (`growth`). All entries of Bᵀ and Aᵀ are
exact in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from r18.backend import Array
from r18_oracle.threads import threads_for


def _of_points(*points: Fraction) -> tuple[Array, Array, Array]:
    """Bᵀ, G and Aᵀ for these points and ∞, by Toom and Cook.

    With N_i = Π_{j≠i}(p_i − p_j), row i of G is (1, p, p²)/N_i, column i of Aᵀ (1, p, p², …), and
    row i of Bᵀ the coefficients of Π_{j≠i}(x − p_j), the lowest first; those of ∞ are the highest
    powers, and Π(x − p_j).
    """
    count = len(points) + 1
    b, g, a = (np.zeros((count, length)) for length in (count, 3, count - 2))
    for i, p in enumerate(points):
        others = (*points[:i], *points[i + 1 :])
        norm = math.prod(p - q for q in others)
        b[i, :-1] = _coefficients(others)
        g[i] = [float(p**k / norm) for k in range(3)]
        a[i] = [float(p**k) for k in range(count - 2)]
    b[-1], g[-1, -1], a[-1, -1] = _coefficients(points), 1, 1
    return b, g, a.T


def _coefficients(roots: Sequence[Fraction]) -> list[float]:
    """The coefficients of Π(x − root), the lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        found = [low - root * high for low, high in pairwise((Fraction(0), *found, Fraction(0)))]
    return [float(number) for number in found]


MATRICES: dict[int, tuple[Array, Array, Array]] = {
    2: (
        np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float64),
        np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float64),
        np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float64),
    ),
    4: _of_points(*(Fraction(n, 16) for n in (0, 11, -11, 24, -24))),
    6: (
        np.array(
            [
                [1, 0, -21 / 4, 0, 21 / 4, 0, -1, 0],
                [0, 1, 1, -17 / 4, -17 / 4, 1, 1, 0],
                [0, -1, 1, 17 / 4, -17 / 4, -1, 1, 0],
                [0, 1 / 2, 1 / 4, -5 / 2, -5 / 4, 2, 1, 0],
                [0, -1 / 2, 1 / 4, 5 / 2, -5 / 4, -2, 1, 0],
                [0, 2, 4, -5 / 2, -5, 1 / 2, 1, 0],
                [0, -2, 4, 5 / 2, -5, -1 / 2, 1, 0],
                [0, -1, 0, 21 / 4, 0, -21 / 4, 0, 1],
            ],
            np.float64,
        ),
        np.array(
            [
                [1, 0, 0],
                [-2 / 9, -2 / 9, -2 / 9],
                [-2 / 9, 2 / 9, -2 / 9],
                [1 / 90, 1 / 45, 2 / 45],
                [1 / 90, -1 / 45, 2 / 45],
                [32 / 45, 16 / 45, 8 / 45],
                [32 / 45, -16 / 45, 8 / 45],
                [0, 0, 1],
            ],
            np.float64,
        ),
        np.array(
            [
                [1, 1, 1, 1, 1, 1, 1, 0],
                [0, 1, -1, 2, -2, 1 / 2, -1 / 2, 0],
                [0, 1, 1, 4, 4, 1 / 4, 1 / 4, 0],
                [0, 1, -1, 8, -8, 1 / 8, -1 / 8, 0],
                [0, 1, 1, 16, 16, 1 / 16, 1 / 16, 0],
                [0, 1, -1, 32, -32, 1 / 32, -1 / 32, 1],
            ],
            np.float64,
        ),
    ),
}
"""Tile m → (Bᵀ, G, Aᵀ)."""


def growth(tile: int) -> Array:
    """How many times the rounding errors of products grow in F(m×m, 3×3) over those of a plain sum.

    (m, m), by place in a tile: √(s_p·s_q/9) with s_p = Σ_i A_pi²·|G_i|²·|B_i|², for random data
    (see `r18.evaluate.margins.ALGORITHM_MULTIPLE`).
    """
    b, g, a = (np.square(matrix) for matrix in MATRICES[tile])
    s = a @ (g.sum(axis=1) * b.sum(axis=1))
    grown: Array = np.sqrt(np.outer(s, s)) / 3
    return grown


def tiles(tile: int, x: Array, padding: tuple[int, int]) -> tuple[Array, tuple[int, int]]:
    """Input tiles (N, C, TH, TW, m+2, m+2) of a stride-1 3×3 convolution, and its output extent.

    The image is padded with zeros to whole tiles.
    """
    (ph, pw), (h, w) = padding, x.shape[2:]
    oh, ow = h + 2 * ph - 2, w + 2 * pw - 2
    rest_h, rest_w = -oh % tile, -ow % tile
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph + rest_h), (pw, pw + rest_w)))
    windows = sliding_window_view(padded, (tile + 2, tile + 2), axis=(2, 3))
    return windows[:, :, ::tile, ::tile], (oh, ow)


def convolve(
    tile: int,
    x: Array,
    weight: Array,
    padding: tuple[int, int],
    absolute: bool = False,
    factors: np.dtype[Any] | None = None,
) -> Array:
    """F(m×m, 3×3) in the dtype of its inputs; with `absolute`, over absolute values everywhere.

    x (N,C,H,W), weight (O,C,3,3), stride 1; returns (N,O,OH,OW). `absolute` gives the M of the
    bound: |Aᵀ|[Σ_c (|G||g||Gᵀ|) ⊙ (|Bᵀ||d||B|)]|A|. factors: a narrower dtype that transformed
    values are rounded to before they are multiplied.
    """
    bt, g, at = (m.astype(x.dtype) for m in MATRICES[tile])
    if absolute:
        bt, g, at, x, weight = (np.abs(m) for m in (bt, g, at, x, weight))
    d, extent = tiles(tile, x, padding)
    v = bt @ d @ bt.T
    u = g @ weight @ g.T
    if factors is not None:
        u, v = (a.astype(factors).astype(x.dtype) for a in (u, v))
    return _assemble(at @ _products(u, v) @ at.T, extent)


def magnitude(tile: int, x: Array, weight: Array, padding: tuple[int, int]) -> Array:
    """M of the Winograd bound; see `convolve`."""
    return convolve(tile, x, weight, padding, absolute=True)


@dataclass(frozen=True, eq=False)
class Sizes:
    """The terms of the Winograd bound, each (N,O,OH,OW), over the finite values.

    magnitude: M; see `convolve`.
    spread:    the effect on an output of an error of 1 in every transformed value and product:
               |Aᵀ|[Σ_c (|G||g||Gᵀ| + |Bᵀ||d||B| + 1)]|A|.
    reach:     the largest value that any intermediate of an output's tile may take; infinite
               where the tile holds an infinity or NaN.
    """

    magnitude: Array
    spread: Array
    reach: Array


def sizes(tile: int, x: Array, weight: Array, padding: tuple[int, int]) -> Sizes:
    """The sizes of a case; x (N,C,H,W), weight (O,C,3,3), float64."""
    bt, g, at = (np.abs(m) for m in MATRICES[tile])
    d, extent = tiles(tile, np.where(np.isfinite(x), np.abs(x), 0.0), padding)
    filters = np.where(np.isfinite(weight), np.abs(weight), 0.0)
    v = bt @ d @ bt.T
    u = g @ filters @ g.T
    m = at @ _products(u, v) @ at.T
    errors = v.sum(axis=1)[:, None] + u.sum(axis=1)[:, None, None] + x.shape[1]
    # |G||g||Gᵀ| can be smaller than |g| itself, which the sums of one side consist of.
    of_filters = np.maximum(u.max(axis=(1, 2, 3)), 2.25 * filters.max(axis=(1, 2, 3)))
    of_filters = np.where(np.isfinite(weight).all(axis=(1, 2, 3)), of_filters, np.inf)
    wild = tiles(tile, (~np.isfinite(x)).astype(np.float64), padding)[0].max(axis=(1, 4, 5)) > 0
    of_tiles = np.where(wild, np.inf, v.max(axis=(1, 4, 5)))
    reach = np.maximum(m.max(axis=(4, 5)), of_tiles[:, None])
    reach = np.maximum(reach, of_filters[:, None, None])[..., None, None]
    return Sizes(
        _assemble(m, extent),
        _assemble(at @ errors @ at.T, extent),
        _assemble(np.broadcast_to(reach, m.shape), extent),
    )


def _products(u: Array, v: Array) -> Array:
    """Σ_c u[o,c,i,j]·v[n,c,t,s,i,j] as (N, O, TH, TW, i, j). By PyTorch, whose threads sleep while
    they wait; those of NumPy's BLAS spin, and take several times as long on busy cores."""
    with torch.inference_mode(), threads_for(u.size + v.size):
        product = torch.einsum("ocij,nctsij->notsij", torch.from_numpy(u), torch.from_numpy(v))
        y: Array = product.numpy()
    return y


def _assemble(y: Array, extent: tuple[int, int]) -> Array:
    """Output tiles (N, O, TH, TW, m, m) as images (N, O, OH, OW), cut to the extent."""
    n, o, th, tw, tile = y.shape[:5]
    whole = y.transpose(0, 1, 2, 4, 3, 5).reshape(n, o, th * tile, tw * tile)
    return np.ascontiguousarray(whole[:, :, : extent[0], : extent[1]])
