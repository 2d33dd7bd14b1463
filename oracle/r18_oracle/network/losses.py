"""A program's end-to-end error against float64, and the error that it is allowed.

A derived bound is useless over a whole network: worst cases multiply, and after some layers any
value would be allowed. The yardstick is therefore measured. It is the error of PyTorch's own
arithmetic in the same precision (`r18_oracle.network.reference_runs.pytorch_run`), on the same
weights and images, at the same checkpoint. In integers nothing may be lost, and the yardstick is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from r18.backend import Array
from r18.evaluate.margins import Allowance
from r18.graph.precision import INT8, Precision

NOTHING = Allowance(0.0, 0.0)


@dataclass(frozen=True)
class Loss:
    """The propagated error of one checkpoint over all images.

    max_abs, rms, cosine: infinite, infinite and NaN if a value is not finite.
    relative:  rms / rms of the reference.
    own_rms, own_max, own_relative: PyTorch's own error, in float32 for an fp64 program.
    allowed_rms, allowed_max: the program's allowed error.
    ratio:     the larger of rms/allowed_rms and max_abs/allowed_max; above 1 is a fault.
    nonfinite: how many values are NaN or infinite.
    coordinate, got, expected: the element of max_abs; its first index counts all images.
    """

    max_abs: float
    rms: float
    relative: float
    cosine: float
    own_rms: float
    own_max: float
    own_relative: float
    allowed_rms: float
    allowed_max: float
    ratio: float
    nonfinite: int
    coordinate: tuple[int, ...]
    got: float
    expected: float

    @property
    def ok(self) -> bool:
        return self.nonfinite == 0 and self.ratio <= 1

    def reason(self) -> str:
        """The error and the allowed error, in words."""
        if self.nonfinite:
            return f"{self.nonfinite} of its values are NaN or infinite"
        if self.allowed_max == 0:
            return (
                f"differs from the reference's integers, by up to {self.max_abs:.3g}: they are "
                "specified to the bit, and nothing may be lost"
            )
        return (
            f"loses {self.ratio:.3g} times what it may (rms {self.rms:.3g} of "
            f"{self.allowed_rms:.3g}, max {self.max_abs:.3g} of {self.allowed_max:.3g})"
        )


@dataclass
class LossSums:
    """The sums of a loss over batches: scalars, no arrays."""

    count: int = 0
    squares: float = 0.0
    largest: float = -1.0
    own_squares: float = 0.0
    own_largest: float = 0.0
    expected_squares: float = 0.0
    expected_largest: float = 0.0
    got_squares: float = 0.0
    products: float = 0.0
    nonfinite: int = 0
    coordinate: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0

    def add_own(self, own: Array, expected: Array) -> None:
        """Add a batch of PyTorch's values, which are finite, and the reference's."""
        error = np.abs(own.astype(np.float64) - expected)
        self.own_squares += float(np.square(error).sum())
        self.own_largest = max(self.own_largest, float(error.max()))

    def add(self, got: Array, expected: Array, first_image: int) -> None:
        """Add a batch of the program's values and the reference's, which are finite."""
        wide = got.astype(np.float64)
        bad = ~np.isfinite(wide)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(wide - expected)
            error[bad] = np.inf
            self.squares += float(np.square(error).sum())
            self.got_squares += float(np.square(wide).sum())
            self.products += float((wide * expected).sum())
        self.expected_squares += float(np.square(expected).sum())
        self.expected_largest = max(self.expected_largest, float(np.abs(expected).max()))
        self.count += error.size
        self.nonfinite += int(bad.sum())
        at = np.unravel_index(int(np.argmax(error)), error.shape)
        if error[at] > self.largest:
            self.largest = float(error[at])
            self.coordinate = (first_image + int(at[0]), *(int(i) for i in at[1:]))
            self.got, self.expected = float(wide[at]), float(expected[at])

    def loss(self, allowance: Allowance) -> Loss:
        """The loss over the batches so far."""
        rms, size, own = (
            math.sqrt(squares / self.count)
            for squares in (self.squares, self.expected_squares, self.own_squares)
        )
        allowed_rms = allowance.most(own, size)
        allowed_max = allowance.most(self.own_largest, self.expected_largest)
        lengths = math.sqrt(self.got_squares) * math.sqrt(self.expected_squares)
        return Loss(
            max_abs=self.largest,
            rms=rms,
            relative=_ratio(rms, size),
            cosine=self.products / lengths if lengths else float(self.squares == 0),
            own_rms=own,
            own_max=self.own_largest,
            own_relative=_ratio(own, size),
            allowed_rms=allowed_rms,
            allowed_max=allowed_max,
            ratio=max(_ratio(rms, allowed_rms), _ratio(self.largest, allowed_max)),
            nonfinite=self.nonfinite,
            coordinate=self.coordinate,
            got=self.got,
            expected=self.expected,
        )


def allowance_of(precision: Precision, multiple: float) -> Allowance:
    """A program's allowed loss against its reference: nothing in integers, whatever the multiple.

    Raises as `Allowance.of`.
    """
    return NOTHING if precision == INT8 else Allowance.of(precision, multiple)


def _ratio(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


__all__ = ["Loss", "LossSums", "allowance_of"]
