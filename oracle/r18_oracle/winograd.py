"""The matrices of Winograd's minimal filtering, and the magnitudes its error bound is made of.

F(m×m, 3×3) computes an m×m tile of outputs from an (m+2)×(m+2) tile d of inputs as
Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A (Lavin and Gray, arXiv:1509.09308, equations 8 and 13). F(4×4) uses the
points 0, ±1, ±2, ∞.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from r18.backend import Array

MATRICES: dict[int, tuple[Array, Array, Array]] = {
    2: (
        np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float64),
        np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float64),
        np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float64),
    ),
    4: (
        np.array(
            [
                [4, 0, -5, 0, 1, 0],
                [0, -4, -4, 1, 1, 0],
                [0, 4, -4, -1, 1, 0],
                [0, -2, -1, 2, 1, 0],
                [0, 2, -1, -2, 1, 0],
                [0, 4, 0, -5, 0, 1],
            ],
            np.float64,
        ),
        np.array(
            [
                [1 / 4, 0, 0],
                [-1 / 6, -1 / 6, -1 / 6],
                [-1 / 6, 1 / 6, -1 / 6],
                [1 / 24, 1 / 12, 1 / 6],
                [1 / 24, -1 / 12, 1 / 6],
                [0, 0, 1],
            ],
            np.float64,
        ),
        np.array(
            [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
            np.float64,
        ),
    ),
}
"""Tile m → (Bᵀ, G, Aᵀ)."""


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
    tile: int, x: Array, weight: Array, padding: tuple[int, int], absolute: bool = False
) -> Array:
    """F(m×m, 3×3) in the dtype of its inputs; with `absolute`, over absolute values everywhere.

    x (N,C,H,W), weight (O,C,3,3), stride 1; returns (N,O,OH,OW). `absolute` gives the M of the
    bound: |Aᵀ|[Σ_c (|G||g||Gᵀ|) ⊙ (|Bᵀ||d||B|)]|A|.
    """
    bt, g, at = (m.astype(x.dtype) for m in MATRICES[tile])
    if absolute:
        bt, g, at, x, weight = (np.abs(m) for m in (bt, g, at, x, weight))
    d, (oh, ow) = tiles(tile, x, padding)
    v = bt @ d @ bt.T
    u = g @ weight @ g.T
    product = np.einsum("ocij,nctsij->notsij", u, v, optimize=True)
    y = at @ product @ at.T
    n, o, th, tw = y.shape[:4]
    whole = y.transpose(0, 1, 2, 4, 3, 5).reshape(n, o, th * tile, tw * tile)
    return np.ascontiguousarray(whole[:, :, :oh, :ow])


def magnitude(tile: int, x: Array, weight: Array, padding: tuple[int, int]) -> Array:
    """M of the Winograd bound; see `convolve`."""
    return convolve(tile, x, weight, padding, absolute=True)
