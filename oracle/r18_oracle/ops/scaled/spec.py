"""The base of the specs of scaled ops: problems of the float op, with drawn factors."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Op, Problem, Shape
from r18.graph.precision import E4M3, E4M3_LARGEST
from r18_oracle.ops.integers.spec import QuantizedSpec
from r18_oracle.ops.spec import Rng

O = TypeVar("O", bound=Op)  # noqa: E741


class ScaledSpec(QuantizedSpec[O]):
    """A scaled op with the problems of another op, which is the one that it scales."""

    algorithms = ("scaled_sum",)

    def exact(self, problem: Problem, algorithm: str) -> bool:
        """Powers of two for factors keep integers exact."""
        return algorithm == "scaled_sum"


def saturated(numbers: torch.Tensor) -> torch.Tensor:
    """Where e4m3 saturates, before it rounds; NaN stays NaN."""
    return torch.clamp(numbers, -E4M3_LARGEST, E4M3_LARGEST)


NUMBERS = np.arange(1, 127, dtype=np.uint8).view(E4M3).astype(np.float64)
"""Every positive e4m3 number, in order."""
PERIOD = 113
"""Different numbers in a row: a prime, which divides no usual extent."""


def counted(shape: Shape) -> Array:
    """Different e4m3 numbers in turn, from 2⁻⁵ on."""
    count = math.prod(shape)
    found: Array = NUMBERS[len(NUMBERS) - PERIOD + np.arange(count) % PERIOD]
    return found.reshape(shape)


def multipliers(rng: Rng, shape: Shape, depth: int) -> Array:
    """Multipliers that bring sums of products of ordinary size to e4m3's range, and some beyond."""
    drawn = np.exp2(rng.uniform(-4, 6, shape)) / math.sqrt(depth)
    found: Array = drawn.astype(np.float32).astype(np.float64)
    return found


def powers(rng: Rng, shape: Shape) -> Array:
    """Multipliers that keep integers exact: 1/2, 1 and 2."""
    found: Array = np.exp2(rng.integers(-1, 2, shape).astype(np.float64))
    return found


__all__ = ["NUMBERS", "ScaledSpec", "counted", "multipliers", "powers", "saturated"]
