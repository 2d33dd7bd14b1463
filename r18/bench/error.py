"""How exact a timed program is, and how exact next to PyTorch in the run that timed both.

The error is ‖ŷ − y‖₂ / ‖y‖₂ over all outputs ŷ of several seeded images, the norm of the
checkpoints' `relative`: the rms of the difference over the rms of the reference. y is computed in
float64 from the weights and images before anything rounds them. An int8 program's y is the output
that its specification gives in integers, so the error of a right one is 0.

Divided by the error of `PEER` (torchvision's module in eager mode on the same device, precision and
batch, with the same images) it says what a program's speed costs. PyTorch runs in the precision
itself: with TF32 allowed for tf32, with a module in half precision for fp16 and bf16, and in
float32 for fp16x3. r18's core has no reference; the oracle's hook `output_judge` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from r18.backend import Array

FLOAT64, INTEGERS = "float64", "integers"
"""The references."""
NONE = "—"
"""In a table: not measured, or nothing to compare with."""
EXACT = "exact"
"""In a table: an int8 program's output is the specification's, bit for bit."""
WORSE = "worse"
"""In a table: faster than PyTorch, with a larger error than PyTorch's."""


@dataclass(frozen=True)
class Error:
    """The error of a program's output.

    relative:  see above; infinite if a value is not finite.
    images:    different ones.
    reference: `FLOAT64` or `INTEGERS`.
    """

    relative: float
    images: int
    reference: str = FLOAT64

    def over(self, peer: Error) -> float | None:
        """Relative to a peer's error; None where it has none, or another reference."""
        if self.reference != FLOAT64 or peer.reference != FLOAT64 or not peer.relative:
            return None
        ratio = self.relative / peer.relative
        return ratio if math.isfinite(ratio) else None

    def to_json(self) -> dict[str, Any]:
        """Every field; infinity as text, since JSON has none."""
        finite = math.isfinite(self.relative)
        return asdict(self) | {"relative": self.relative if finite else "inf"}


def relative(got: Array, expected: Array) -> float:
    """‖got − expected‖₂ / ‖expected‖₂, in float64; infinite if a value is not finite.

    0 for equal arrays, infinite for others where the reference is 0.
    """
    wide = got.astype(np.float64)
    if not np.isfinite(wide).all():
        return float(np.inf)
    lost = float(np.linalg.norm(wide - expected))
    if lost == 0:
        return 0.0
    size = float(np.linalg.norm(expected))
    return lost / size if size else float(np.inf)


def is_worse(row: Mapping[str, Any]) -> bool:
    """Whether a row, as JSON has it, is faster than PyTorch and less exact, to two digits."""
    time, error, ratio = row.get("ratio"), row.get("error"), row.get("error_ratio")
    if time is None or time >= 1 or error is None:
        return False
    return math.isinf(float(error["relative"])) or (ratio is not None and round(ratio, 2) > 1)


def error_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """A row's error and its ratio to PyTorch's, as tables show them."""
    error, ratio = row.get("error"), row.get("error_ratio")
    if error is None:
        return NONE, NONE
    relative = float(error["relative"])
    if error["reference"] == INTEGERS and relative == 0:
        return EXACT, EXACT
    said = NONE if ratio is None else f"{ratio:.2f}"
    return f"{relative:.1e}", f"{said} ({WORSE})" if is_worse(row) else said


def worse_words(row: Mapping[str, Any]) -> str:
    """The sentence about a row that `is_worse`."""
    ratio = row["error_ratio"]
    lost = "no finite output" if ratio is None else f"{ratio:.2f} times its error against float64"
    return (
        f"{row['backend']}, {row['precision']}, batch {row['batch']}: "
        f"{row['ratio']:.2f} of PyTorch's time, but {lost}"
    )


__all__ = [
    "EXACT",
    "FLOAT64",
    "INTEGERS",
    "NONE",
    "WORSE",
    "Error",
    "error_cells",
    "is_worse",
    "relative",
    "worse_words",
]
