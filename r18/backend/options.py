"""How a schedule is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from r18.errors import UsageError, show
from r18.graph.ops import Normalize

MOST_IMAGES = 1 << 20
"""The most images of a run; their preprocessed pixels alone would take 600 GB."""


@dataclass(frozen=True)
class CompileOptions:
    """How to compile.

    batch:     images per run; fixed for a program.
    precision: a name of `r18.graph.precision.PRECISIONS`.
    fusion:    a level of `FUSION_LEVELS`; `r18.graph.passes` documents what each fuses.
    taps:      checkpoints or values to keep for `fetch`; the output is always kept. Taps extend
               lifetimes and change nothing else.
    graph:     capture the launches in a graph where the backend's streams can.
    arena:     let buffers whose lifetimes do not overlap share memory.
    kernels:   overrides, by step name or op name: a kernel id or a glob over ids. An override
               that does not apply is an error, never ignored.
    pixels:    the program takes uint8 pixels and first normalises them this way
               (`Preprocess.normalize` is ImageNet's). None: it takes preprocessed input.
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
        if not 1 <= self.batch <= MOST_IMAGES:
            raise UsageError(f"batch must be from 1 to {MOST_IMAGES:,}, got {show(self.batch)}")


__all__ = ["CompileOptions"]
