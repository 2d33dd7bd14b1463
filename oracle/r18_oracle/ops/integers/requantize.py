"""Requantisation as `r18.graph.quantized` specifies it, and as implementations get it wrong.

The reference computes with integers and float32 of its own. The variations are the arithmetic of
libraries and of hasty kernels: where an output is wrong, `explained` says which of them gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

RANGES = {"uint8": (0, 255), "int8": (-128, 127)}


@dataclass(frozen=True)
class Sums:
    """Exact sums with their bias, and the operands of their requantisation.

    total: int64. multiplier, and that of the residual: float32, of shapes that broadcast over it.
    stored: the output's storage format.
    """

    total: torch.Tensor
    multiplier: torch.Tensor
    stored: str
    residual: torch.Tensor | None = None
    residual_multiplier: torch.Tensor | None = None
    relu: bool = False

    @property
    def added(self) -> torch.Tensor | float:
        """The summand of step 2, in float32."""
        if self.residual is None or self.residual_multiplier is None:
            return 0.0
        return self.residual.float() * self.residual_multiplier


def requantized(sums: Sums) -> torch.Tensor:
    """Steps 1 to 4, as float64."""
    return saturated(torch.round(rectified(sums, scaled(sums))), sums.stored)


def scaled(sums: Sums) -> torch.Tensor:
    """Steps 1 and 2, in float32. PyTorch rounds each operation by itself."""
    numbers = sums.total.float() * sums.multiplier
    return numbers if sums.residual is None else numbers + sums.added


def rectified(sums: Sums, numbers: torch.Tensor) -> torch.Tensor:
    return torch.clamp(numbers, min=0) if sums.relu else numbers


def saturated(integers: torch.Tensor, stored: str, low: int | None = None) -> torch.Tensor:
    least, most = RANGES[stored]
    return torch.clamp(integers, least if low is None else low, most).double()


# -- as others do it ---------------------------------------------------------------------------


def _away(numbers: torch.Tensor) -> torch.Tensor:
    return torch.sign(numbers) * torch.floor(torch.abs(numbers.double()) + 0.5)


def _with(round_: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Sums], torch.Tensor]:
    """The specified steps with another rounding in step 4."""
    return lambda sums: saturated(round_(rectified(sums, scaled(sums)).double()), sums.stored)


def _fused(sums: Sums) -> torch.Tensor:
    """Steps 1 and 2 with one rounding, as a fused multiply-add has."""
    if sums.residual is None:
        return requantized(sums)
    numbers = sums.total.float().double() * sums.multiplier.double() + sums.added
    return saturated(torch.round(rectified(sums, numbers.float())), sums.stored)


def _fused_residual(sums: Sums) -> torch.Tensor:
    """The product of the residual is not rounded before it is added: the other way to contract."""
    if sums.residual is None or sums.residual_multiplier is None:
        return requantized(sums)
    added = sums.residual.double() * sums.residual_multiplier.double()
    numbers = (sums.total.float() * sums.multiplier).double() + added
    return saturated(torch.round(rectified(sums, numbers.float())), sums.stored)


def _converted_first(sums: Sums) -> torch.Tensor:
    """To int32 before it is saturated: beyond it, processors give the least one."""
    integers = torch.round(rectified(sums, scaled(sums)).double())
    return saturated(torch.where(integers.abs() < 2.0**31, integers, -(2.0**31)), sums.stored)


def _unconverted(sums: Sums) -> torch.Tensor:
    """The sum is multiplied before it is rounded to float32."""
    numbers = (sums.total.double() * sums.multiplier.double()).float() + sums.added
    return saturated(torch.round(rectified(sums, numbers)), sums.stored)


def _wide(sums: Sums) -> torch.Tensor:
    """Everything in float64."""
    numbers = sums.total.double() * sums.multiplier.double()
    if sums.residual is not None and sums.residual_multiplier is not None:
        numbers = numbers + sums.residual.double() * sums.residual_multiplier.double()
    return saturated(torch.round(rectified(sums, numbers)), sums.stored)


def _residual_in_integers(sums: Sums) -> torch.Tensor:
    """Sum and residual are each rounded to integers, and then added."""
    numbers = torch.round(sums.total.float() * sums.multiplier)
    if sums.residual is not None:
        numbers = numbers + torch.round(torch.as_tensor(sums.added))
    return saturated(rectified(sums, numbers), sums.stored)


def _residual_after_saturation(sums: Sums) -> torch.Tensor:
    """The sum is saturated to int8 before the residual is added."""
    numbers = saturated(torch.round(sums.total.float() * sums.multiplier), "int8")
    return saturated(rectified(sums, torch.round(numbers + sums.added)), sums.stored)


def _saturated_before_relu(sums: Sums) -> torch.Tensor:
    numbers = saturated(torch.round(scaled(sums)), "int8")
    return saturated(rectified(sums, numbers), sums.stored)


def _symmetric(sums: Sums) -> torch.Tensor:
    """−127 is the least, as of weights."""
    low = -127 if sums.stored == "int8" else None
    return saturated(torch.round(rectified(sums, scaled(sums))), sums.stored, low)


def _wrapped(sums: Sums) -> torch.Tensor:
    """The last eight bits, without saturation."""
    integers = torch.round(rectified(sums, scaled(sums))).to(torch.int64)
    low, _ = RANGES[sums.stored]
    return ((integers - low) % 256 + low).double()


def _relu_before_residual(sums: Sums) -> torch.Tensor:
    numbers = torch.clamp(sums.total.float() * sums.multiplier, min=0) + sums.added
    return saturated(torch.round(numbers if sums.relu else scaled(sums)), sums.stored)


FUSED = "a fused multiply-add leaves out a rounding"
FUSED_RESIDUAL = "a fused multiply-add takes the residual's product"
UNCONVERTED = "the sum is multiplied before it is rounded to float32"
WIDE = "it is computed in float64"

VARIATIONS: dict[str, Callable[[Sums], torch.Tensor]] = {
    "ties are rounded away from zero": _with(_away),
    "ties are rounded up": _with(lambda numbers: torch.floor(numbers + 0.5)),
    "the result is rounded towards zero": _with(torch.trunc),
    "the result is rounded down": _with(torch.floor),
    FUSED: _fused,
    FUSED_RESIDUAL: _fused_residual,
    "it is converted to int32 before it is saturated": _converted_first,
    UNCONVERTED: _unconverted,
    WIDE: _wide,
    "the residual is added in integers": _residual_in_integers,
    "the sum is saturated before the residual is added": _residual_after_saturation,
    "the result is saturated before ReLU": _saturated_before_relu,
    "ReLU comes before the residual": _relu_before_residual,
    "it saturates to −127, not −128": _symmetric,
    "it wraps and does not saturate": _wrapped,
}
"""Variations of an implementation, in words that complete 'as if'. Omitting ReLU is not among them:
the output is then uint8, which saturates at 0."""

SUBTLE = (FUSED, FUSED_RESIDUAL, UNCONVERTED, WIDE)
"""Variations that differ in the last bit of a float32, and so in one output of a million."""


def explained(
    sums: Sums,
    got: np.ndarray,
    then: Callable[[torch.Tensor], torch.Tensor] = lambda integers: integers,
) -> str:
    """The variations that give this output (float64), in a sentence. then: makes it of integers."""
    right = then(requantized(sums)).numpy()
    wrong = got != right
    if not wrong.any():
        return ""
    found = [
        name
        for name, variation in VARIATIONS.items()
        if np.array_equal(then(variation(sums)).numpy()[wrong], got[wrong])
    ]
    if found:
        return f"every wrong element is as if {' or '.join(found)}"
    if np.abs(got - right).max() <= 1:
        return "off by one, and no known variation of the requantisation gives it"
    return "no variation of the requantisation gives it: a sum or an index is wrong"
