"""Winograd convolutions F(4×4, 3×3) that are wrong in one place each.

Integers are not exact in them, so the impulses have to show where an index is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from faults.fault import Fault, fault, kernel
from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import BF16
from r18_oracle.judge.winograd import MATRICES

Arrays = tuple[Array, ...]
M = 4
"""The rows and columns of an output tile; an input tile has two more."""

CONTRACT = RoundingContract("winograd_f4x4", "float32", "float32")


def refuses(problem: Problem) -> str | None:
    op = problem.op
    assert isinstance(op, Conv2d)
    fits = (op.kernel_size, op.stride) == ((3, 3), (1, 1))
    return None if fits else "takes windows of 3×3 with a stride of 1"


@dataclass(frozen=True)
class Winograd:
    """The convolution as a `HostFunction` with replaceable parts.

    taps: changes each kernel's 3×3 before the transform. tile: changes each
    tile of the output after it. shift: the wrong offset of the input's tiles.
    filters: changes transformed kernels.
    """

    taps: Callable[[Array], Array] = lambda g: g
    tile: Callable[[Array], Array] = lambda y: y
    shift: int = 0
    filters: Callable[[Array], Array] = lambda u: u

    def __call__(
        self, op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        bt, g, at = (matrix.astype(np.float32) for matrix in MATRICES[M])
        oh, ow = out.shape[2:]
        rows, columns = -(-oh // M), -(-ow // M)
        x = np.zeros((*inputs[0].shape[:2], M * rows + 2, M * columns + 2), np.float32)
        h, w = (
            min(a, b) for a, b in zip(x.shape[2:], _padded(op, inputs[0]).shape[2:], strict=True)
        )
        x[:, :, :h, :w] = _padded(op, inputs[0])[:, :, :h, :w]
        u = self.filters(g @ self.taps(weights[0].astype(np.float32)) @ g.T)  # (O, C, 6, 6)
        y = np.empty((*out.shape[:2], M * rows, M * columns), np.float32)
        for i, j in product(range(0, M * rows, M), range(0, M * columns, M)):
            left = max(0, j - self.shift)
            v = bt @ x[:, :, i : i + M + 2, left : left + M + 2] @ bt.T  # (N, C, 6, 6)
            products = np.einsum("ocij,ncij->noij", u, v)
            y[:, :, i : i + M, j : j + M] = self.tile(at @ products @ at.T)
        y = y[:, :, :oh, :ow]
        y = y + weights[1][:, None, None] if op.bias else y
        y = y + inputs[1].astype(np.float32) if op.residual else y
        out[...] = np.maximum(y, 0) if op.relu else y


def _padded(op: Conv2d, x: Array) -> Array:
    (ph, pw) = op.padding
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))


WINOGRAD = Winograd()
_OPTIONS: dict[str, Any] = {"contract": CONTRACT, "refuses": refuses, "edges": (M,)}
_WIDE: dict[str, Any] = _OPTIONS | {
    "contract": replace(CONTRACT, output="bfloat16", factors="float32"),
    "precision": BF16,
}
"""Options for bfloat16 activations, with transformed factors in float32."""


def _winograd(name: str, wrong: str, **pieces: Any) -> Fault:
    return fault(
        Conv2d, f"winograd_{name}", wrong, "impulse bound", replace(WINOGRAD, **pieces), **_OPTIONS
    )


def _without_last_tap(g: Array) -> Array:
    taps = g.copy()
    taps[:, -1, -1, -1] = 0
    return taps


FAULTS = (
    _winograd(
        "tile_transposed",
        "tiles are stored column by column",
        tile=lambda y: y.swapaxes(2, 3),
    ),
    _winograd(
        "kernel_transposed",
        "kernels are read column by column",
        taps=lambda g: g.swapaxes(2, 3),
    ),
    _winograd("tile_shifted", "tiles but the first begin one pixel too far left", shift=1),
    fault(
        Conv2d,
        "winograd_narrow_filters",
        "transformed kernels are rounded to bfloat16, and float32 is declared",
        "impulse bound",
        replace(WINOGRAD, filters=lambda u: u.astype(BF16.dtype).astype(np.float32)),
        **_WIDE,
    ),
    _winograd("dropped_tap", "the last weight of each kernel is not used", taps=_without_last_tap),
)
TWINS = (
    kernel("twin", Conv2d, "winograd_f4x4", WINOGRAD, **_OPTIONS),
    kernel("twin", Conv2d, "winograd_f4x4", WINOGRAD, **_WIDE),
)
"""The same kernels without a fault."""
