"""Numbers into e4m3, in units of a scale."""

from __future__ import annotations

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Problem, ReLU
from r18.graph.scaled import Scale
from r18_oracle.ops import relu
from r18_oracle.ops.scaled.spec import NUMBERS, ScaledSpec, counted, powers, saturated
from r18_oracle.ops.spec import Arrays, Draw, Numbers, Rng, Tensors


class ScaleSpec(ScaledSpec[Scale]):
    """The spec of `Scale`, with the problems of a ReLU: any shape."""

    op = Scale
    algorithms = ("scale",)
    inner = relu.SPEC

    def part(self, op: Scale) -> ReLU:
        return ReLU()

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        return Problem(Scale(), problem.inputs)

    def reference(self, op: Scale, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return saturated(inputs[0] / weights[0])

    def exact(self, problem: Problem, algorithm: str) -> bool:
        return algorithm == "scale"

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        """Scales like those of images, and some with which most values saturate."""
        return (np.exp2(rng.uniform(-12, -6, (1,))),)

    def exact_inputs(
        self, op: Scale, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        """Numbers of the format, ties and near ties; beyond 448 too."""
        x = rng.choice(_numbers(), inputs[0].shape) * rng.choice([-1.0, 1.0], inputs[0].shape)
        scale = powers(rng, (1,))
        return (x * scale,), (scale,)

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        if kind != "impulse":
            return None
        return (counted(problem.inputs[0]) / 64,), (np.array([1 / 64]),)


def _numbers() -> Array:
    """Every e4m3 number from 0 to 448, the middle of each two, what is next to it in float32, and
    what saturates."""
    numbers = np.array([0.0, *NUMBERS])
    middles = (numbers[1:] + numbers[:-1]) / 2
    below, above = (np.nextafter(middles.astype(np.float32), end) for end in (0, np.float32(500)))
    return np.concatenate([numbers, middles, below, above, [456.0, 464.0, 480.0, 1e5]])


SPEC = ScaleSpec()
