"""A convolution whose workspace has a limit, so that large problems take several rounds: faults of
the last round, which no problem within the limit shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faults.conv import column, row, zero_outside
from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.graph.ops import Conv2d, Problem

Arrays = tuple[Array, ...]
LIMIT = 8 << 20
"""Bytes of the workspace: more than any drawn problem needs, or any convolution of ResNet-18 for
one image."""


def width(op: Conv2d, pixels: int) -> int:
    """Output pixels per round: as many as there are columns in the workspace."""
    return min(pixels, LIMIT // (4 * op.depth))


def scratch(problem: Problem) -> int:
    """Bytes of the columns of one round. Pure."""
    n, _, oh, ow = problem.output
    assert isinstance(problem.op, Conv2d)
    return 4 * problem.op.depth * width(problem.op, n * oh * ow)


def own_pitch(columns: Array, count: int) -> Array:
    """The rows of the matrix of columns, with this round's number of pixels as their pitch."""
    return columns.reshape(-1)[: len(columns) * count].reshape(len(columns), count)


def own_pixels(flat: Array, first: int, count: int) -> Array:
    """The residual (O, pixels) of one round."""
    return flat[:, first : first + count]


@dataclass(frozen=True)
class Rounds:
    """im2col for one run of output pixels after another. A fault replaces one of its parts.

    read:     the matrix (depth, pixels) that is multiplied, from the workspace.
    residual: its part for a round.
    """

    read: Callable[[Array, int], Array] = own_pitch
    residual: Callable[[Array, int, int], Array] = own_pixels

    def __call__(
        self, op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        n, o, oh, ow = out.shape
        pixels = n * oh * ow
        full = width(op, pixels)
        columns = workspace.view(np.float32).reshape(op.depth, full)
        residual = inputs[1] if op.residual else np.zeros_like(out)
        bias = weights[1] if op.bias else np.zeros(o, out.dtype)
        added = residual.transpose(1, 0, 2, 3).reshape(o, -1)
        result = np.empty((o, pixels), out.dtype)
        image = self._taps(op, inputs[0], oh, ow).reshape(op.depth, pixels)
        for first in range(0, pixels, full):
            count = min(full, pixels - first)
            last = first + count
            own_pitch(columns, count)[...] = image[:, first:last]
            y = weights[0].reshape(o, -1) @ self.read(columns, count) + bias[:, None]
            y += self.residual(added, first, count)
            result[:, first:last] = np.maximum(y, 0) if op.relu else y
        out[...] = result.reshape(o, n, oh, ow).transpose(1, 0, 2, 3)

    def _taps(self, op: Conv2d, x: Array, oh: int, ow: int) -> Array:
        """The taps (C, kh, kw, N, OH, OW) of an image."""
        i, j = np.arange(oh), np.arange(ow)
        (kh, kw), (h, w) = op.kernel_size, x.shape[2:]
        columns = [column(op, j, s, w) for s in range(kw)]
        taps = [
            [zero_outside(x, rows, columns[s]) for s in range(kw)]
            for rows in (row(op, i, r, h) for r in range(kh))
        ]
        found: Array = np.array(taps).transpose(3, 0, 1, 2, 4, 5)
        return found


RIGHT = Rounds()


def rounds(name: str, wrong: str, checks: str, **pieces: Any) -> Fault:
    return fault(Conv2d, name, wrong, checks, replace(RIGHT, **pieces), scratch=scratch)


FAULTS = (
    rounds(
        "rest_at_full_pitch",
        "the last round reads its columns at the pitch of a full round",
        "exact",
        read=lambda columns, count: columns[:, :count],
    ),
    rounds(
        "residual_of_the_first_round",
        "every round adds the residual of the first",
        "exact",
        residual=lambda flat, first, count: flat[:, :count],
    ),
)
TWINS = (kernel("twin", Conv2d, "rounds", RIGHT, scratch=scratch),)
