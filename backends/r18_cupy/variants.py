"""Kernels that choose among tiles, with one of them alone: what the oracle looks at, and what
`tools/measure_tiles.py` measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from r18_cupy.catalogue import all_kernels
from r18_cupy.kernel import CudaKernel
from r18_cupy.tile import TileConfig


@lru_cache(maxsize=256)
def variants_of(kernel: CudaKernel) -> tuple[CudaKernel, ...]:
    """See `r18.backend.Choosing`: one for each of the kernel's `tiles`, if there are several."""
    tiles: Sequence[TileConfig] = getattr(kernel, "tiles", ())
    if len(tiles) < 2:
        return ()
    listed = {one.id for one in all_kernels()}
    found = (
        with_one_tile(kernel, tile, label) for tile, label in zip(tiles, labels(tiles), strict=True)
    )
    return tuple(one for one in found if one.id not in listed)


def with_one_tile(kernel: CudaKernel, tile: TileConfig, label: str) -> CudaKernel:
    """The kernel as it would be if this tile were all it had to choose from."""
    kind: Any = type(kernel)
    members = {"__module__": kind.__module__, "tiles": (tile,), "tile": label}
    values = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    one: CudaKernel = type(kind.__name__, (kind,), members)(**values)
    return one


def labels(tiles: Sequence[TileConfig]) -> Iterator[str]:
    """Their names; of tiles that share one, `m224n64k16+unrolled` with the flags that are set."""
    names = [tile.name for tile in tiles]
    for tile in tiles:
        flags = (field.name for field in fields(tile) if getattr(tile, field.name) is True)
        yield "+".join((tile.name, *flags)) if names.count(tile.name) > 1 else tile.name
