"""How a schedule is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from r18.errors import ShapeError, UsageError, show, unknown
from r18.graph.ops import Normalize, as_int
from r18.graph.passes import FUSION_LEVELS
from r18.graph.precision import precision

MOST_IMAGES = 1 << 20
"""The most images of a run; their preprocessed pixels alone would take 600 GB."""


@dataclass(frozen=True)
class CompileOptions:
    """How to compile.

    batch:     images per run; fixed for a program.
    precision: a name of `r18.graph.precision.PRECISIONS`.
    fusion:    a level of `FUSION_LEVELS`; `r18.graph.passes` documents what each fuses.
    taps:      checkpoints or values to keep for `fetch`; the output is always kept. Taps extend
               lifetimes and change nothing else. A string is one name.
    graph:     capture the launches in a graph where the backend's streams can.
    arena:     let buffers whose lifetimes do not overlap share memory.
    kernels:   overrides, by step name or op name: a kernel id or a glob over ids. An override
               that does not apply is an error, never ignored.
    pixels:    the program takes uint8 pixels and first normalises them this way
               (`Preprocess.normalize` is ImageNet's). None: it takes preprocessed input.

    Raises `UsageError` for a value of another kind, `UnknownName` for a precision that does not
    exist.
    """

    batch: int = 1
    precision: str = "fp32"
    fusion: str = "all"
    taps: tuple[str, ...] = ()
    graph: bool = True
    arena: bool = True
    kernels: Mapping[str, str] = field(default_factory=dict)
    pixels: Normalize | None = None

    def __post_init__(self) -> None:
        try:
            batch = as_int(self.batch, "batch")
        except ShapeError as error:
            raise UsageError(str(error)) from None
        if not 1 <= batch <= MOST_IMAGES:
            raise UsageError(f"batch must be from 1 to {MOST_IMAGES:,}, got {show(batch)}")
        precision(self.precision)
        if self.fusion not in FUSION_LEVELS:
            raise unknown("fusion level", self.fusion, FUSION_LEVELS, error=UsageError)
        taps = (self.taps,) if isinstance(self.taps, str) else self.taps
        if not isinstance(taps, tuple | list) or not all(isinstance(tap, str) for tap in taps):
            raise _not("taps", "a tuple of checkpoint names", taps)
        for name in ("graph", "arena"):
            if not isinstance(getattr(self, name), bool):
                raise _not(name, "True or False", getattr(self, name))
        if not isinstance(self.kernels, Mapping) or not all(
            isinstance(part, str) for pair in self.kernels.items() for part in pair
        ):
            raise _not("kernels", "a mapping of step or op names to kernel ids", self.kernels)
        if not (self.pixels is None or isinstance(self.pixels, Normalize)):
            raise _not("pixels", "None or a Normalize (Preprocess().normalize)", self.pixels)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "taps", tuple(taps))


def _not(name: str, wanted: str, given: object) -> UsageError:
    return UsageError(f"{name} must be {wanted}, got {show(given)}")


__all__ = ["CompileOptions"]
