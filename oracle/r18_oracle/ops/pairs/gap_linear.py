"""Global average pooling and the linear layer of its means, as one op."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import AvgPoolLinear, Linear, Problem, Shape
from r18.runtime.arena import aligned
from r18_oracle.generate.sizes import (
    BATCHES,
    BEYOND_GRID,
    BEYOND_INDEX,
    MULTIPLES,
    Sizes,
    along,
    extents,
)
from r18_oracle.ops import gap, linear
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Rng, Tensors, pick, shape_of


class AvgPoolLinearSpec(OpSpec[AvgPoolLinear]):
    op = AvgPoolLinear
    algorithms = ("mean_sum", "stored_mean_sum")
    products = True
    indexed = True

    def reference(self, op: AvgPoolLinear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        pooling, layer = op.parts
        means = gap.SPEC.reference(pooling, inputs, ())  # type: ignore[arg-type]
        return linear.SPEC.reference(layer, (means,), weights)  # type: ignore[arg-type]

    def pytorch(self, op: AvgPoolLinear, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        pooling, layer = op.parts
        means = gap.SPEC.pytorch(pooling, inputs, ())  # type: ignore[arg-type]
        return linear.SPEC.pytorch(layer, (means,), weights)  # type: ignore[arg-type]

    def depth(self, op: AvgPoolLinear) -> int:
        return op.linear.in_features

    # -- problems ------------------------------------------------------------------------------

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most, macs)

    def corners(self) -> Iterator[Problem]:
        for n, c, h, w, o in (
            (2, 3, 5, 7, 4),
            (3, 17, 1, 1, 13),
            (5, 1, 2, 3, 1),
            (2, 64, 4, 8, 20),  # a power of two of pixels, whose means are exact
            (1, 80, 7, 7, 10),
            (1, 1040, 2, 1, 3),
            (2, 16, 1, 9, 1021),
            (1, 8208, 1, 1, 2),  # more channels than a CTA keeps
        ):
            yield _joined((n, c, h, w), o)

    def many(self) -> Iterator[Problem]:
        yield _joined((1, 1, 1, 1), BEYOND_GRID)
        yield _joined((1, BEYOND_GRID, 1, 1), 1)
        yield _joined((BEYOND_GRID, 1, 1, 1), 1)
        # Enough channels that a thread adds few pixels at a time.
        yield _joined((1, 4096, 3, 5), 3)

    def vast(self) -> Iterator[Problem]:
        yield from super().vast()
        # The activations are small enough, and the weights are not.
        yield _joined((1, 1024, 1, 1), BEYOND_INDEX // 1024)

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for n, c, h, w, o in along(size, 2, 3, 2, 3, 2, full=(1, 4)):
            yield _joined((n, c, h, w), o)

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        """Channels and features rounded up to what a kernel may require."""
        n, c, h, w = problem.inputs[0]
        for multiple in MULTIPLES:
            yield _joined((n, aligned(c, multiple), h, w), aligned(problem.output[1], multiple))

    def numbers(self, problem: Problem) -> Numbers:
        return dict(zip("nchw", problem.inputs[0], strict=True)) | {"o": problem.output[1]}

    def rebuild(self, op: AvgPoolLinear, numbers: Numbers) -> Problem:
        return _joined(shape_of(numbers), numbers["o"])

    # -- inputs --------------------------------------------------------------------------------

    def exact(self, problem: Problem, algorithm: str) -> bool:
        """Whether results are exact: only where the divisor is a power of two."""
        count = self.terms(problem)
        return algorithm in self.algorithms and count & (count - 1) == 0

    def terms(self, problem: Problem) -> int:
        return math.prod(problem.inputs[0][2:])

    def exact_inputs(
        self, op: AvgPoolLinear, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        """Smaller integers, because a mean of P pixels has a last bit of 1/P.

        Given |x| ≤ a and |w| ≤ b with K·a·b products within the accumulator's integers, these have
        |x| ≤ a' and |w| ≤ b' with P·a'·b' ≤ a·b, unless both are 1 already.
        """
        x, (weight, *bias) = inputs[0], weights
        pixels = math.prod(x.shape[2:])
        most = int(np.abs(x).max()), int(np.abs(weight).max())
        of_x = max(1, most[0] // pixels)
        of_weight = max(1, min(most[1], most[0] * most[1] // (pixels * of_x)))
        return (np.fmod(x, of_x + 1),), (np.fmod(weight, of_weight + 1), *bias)

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        n, o = pick(rng, problem.output)
        c, h, w = pick(rng, problem.inputs[0][1:])
        return (n, c, h, w), (o, c)

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        return linear.SPEC.cancelling(inputs, weights)


def _joined(shape: Shape, outputs: int) -> Problem:
    return Problem(AvgPoolLinear(Linear(shape[1], outputs)), (shape,))


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    wide = sizes.also(10, 127, 512, 1000)
    axes = {"n": BATCHES, "c": wide, "h": sizes, "w": sizes, "o": wide}
    drawn = draw(extents(axes, [(macs, "nco"), (most, "nchw"), (most, "no"), (most, "co")]))
    return _joined((drawn["n"], drawn["c"], drawn["h"], drawn["w"]), drawn["o"])


SPEC = AvgPoolLinearSpec()
