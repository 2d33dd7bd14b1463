"""Tiles as data: the constants that a kernel is compiled with, and the name they give it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TileConfig:
    """The tile of a block: `m` by `n` outputs, over `k` products per step.

    A subclass adds the other constants of its kernel, as integers and flags. Every field is a macro
    of the device code; `name` is the last part of the kernel's id.
    """

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"a tile's {field.name} must be at least 1, got {self}")

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros: `TILE_M`, `TILE_N`, `TILE_K`, and `TILE_<FIELD>` for each added field."""
        names = (field.name for field in fields(self))
        return tuple((f"TILE_{name.upper()}", int(getattr(self, name))) for name in names)

    @property
    def name(self) -> str:
        """`m128n128k16`: the last part of the kernel's id."""
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def edges(self) -> tuple[int, ...]:
        """The sizes at which a tile is full, without duplicates."""
        return tuple(sorted({self.m, self.n, self.k}))
