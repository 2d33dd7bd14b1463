"""A case: a problem with the exact values that a kernel gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from r18.backend import Array, Kernel
from r18.errors import UsageError
from r18.graph.ops import Problem, parts_of
from r18.graph.precision import E4M3, Precision, as_stored
from r18.graph.scaled import ScaledConvMaxPool


@dataclass(frozen=True, eq=False)
class Case:
    """A problem and its arrays, in logical shapes (NCHW, OIHW) and the kernel's formats.

    The reference starts from the same values, so rounding to storage is not part of the error.
    """

    problem: Problem
    precision: Precision
    inputs: tuple[Array, ...]
    weights: tuple[Array, ...]

    @classmethod
    def of(
        cls, kernel: Kernel, problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]
    ) -> Case:
        """Round float64 values as the core's upload and `prepare` round them for the kernel.

        Integers are not rounded: raises `UsageError` for inputs that their format does not hold,
        and what `Precision.stored` does for weights.
        """
        precision = kernel.precision
        given = precision.input_dtypes(problem.op)
        return cls(
            problem,
            precision,
            tuple(map(_stored, inputs, given)),
            tuple(map(precision.stored, weights, problem.op.weights())),
        )

    @property
    def output_dtype(self) -> np.dtype[np.generic]:
        return self.precision.output_dtype(self.problem.op)

    def of_convolution(self) -> Case:
        """The convolution of a `ConvMaxPool`, with the same values; of a `ScaledConvMaxPool`, with
        the image in e4m3."""
        if not isinstance(self.problem.op, ScaledConvMaxPool):
            return replace(self, problem=parts_of(self.problem)[0])
        *image, conv, _ = parts_of(self.problem)
        if not image:
            return replace(self, problem=conv)
        (x,), (*weights, scale) = self.wide()
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = as_stored(x / scale, E4M3)
        return replace(self, problem=conv, inputs=(numbers,), weights=self.weights[: len(weights)])

    def wide(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Inputs and weights widened exactly to float64; the same arrays each time, to be read.

        A kernel gets copies of them, since it may write to what it is given (`handed`).
        """
        return self._wide

    def handed(self) -> tuple[Array, ...]:
        """The weights in float64, for a kernel to prepare: new arrays each time."""
        return tuple(a.astype(np.float64) for a in self.weights)

    @cached_property
    def _wide(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return (
            tuple(a.astype(np.float64) for a in self.inputs),
            tuple(a.astype(np.float64) for a in self.weights),
        )


def _stored(array: Array, dtype: np.dtype[np.generic]) -> Array:
    """An input in its format. A float that is too large becomes infinity, or saturates in e4m3; an
    integer never wraps, because a kernel would then be judged on other values than were meant."""
    stored = as_stored(array, dtype)
    if dtype.kind in "iu" and not np.array_equal(stored, array):
        wrong = array[stored != array].flat[0]
        raise UsageError(
            f"an input of the case holds {wrong}, which {dtype} cannot represent: draw integers "
            "that it holds"
        )
    return stored
