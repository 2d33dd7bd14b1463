"""Kernels that choose among tiles, restricted to one tile; see `r18.backend.Backend.variants`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from r18.graph.ops import Problem
from r18_cupy.catalogue import all_kernels
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.tile import TileConfig
from r18_cupy.kernel import CudaKernel, launches_of


@cache
def variants_of(kernel: CudaKernel) -> tuple[CudaKernel, ...]:
    """A variant for each of the kernel's tiles, if it has several; without those listed as
    kernels."""
    tiles = tiles_of(kernel)
    if len(tiles) < 2:
        return ()
    listed = {one.id for one in all_kernels()}
    named = zip(tiles, labels(tiles), strict=True)
    found = (with_one_tile(kernel, tile, label) for tile, label in named)
    return tuple(one for one in found if one.id not in listed)


def variant_for(kernel: CudaKernel, problem: Problem) -> CudaKernel | None:
    """The variant, or the listed kernel with one tile, that launches the same functions."""

    def functions(one: CudaKernel) -> list[Entry]:
        return [launch.entry for launch in launches_of(one, problem)]

    wanted = functions(kernel)
    listed = (one for one in all_kernels() if one.variant_of == kernel.id)
    for one in (*variants_of(kernel), *listed):
        if one.refusal(problem) is None and functions(one) == wanted:
            return one
    return None


def tiles_of(kernel: CudaKernel) -> Sequence[TileConfig]:
    """The kernel's own tiles, or those of the kernel that computes its `product`."""
    tiles: Sequence[TileConfig] = getattr(getattr(kernel, "product", kernel), "tiles", ())
    return tiles


def with_one_tile(kernel: CudaKernel, tile: TileConfig, label: str) -> CudaKernel:
    """The kernel as it would be if this tile were all it had to choose from."""
    kind: Any = type(kernel)
    members: dict[str, Any] = {"__module__": kind.__module__, "tile": label}
    if hasattr(kernel, "product"):
        members["product"] = with_one_tile(kernel.product, tile, label)
    else:
        members |= {name: (tile,) for name in ("tiles", "all_tiles") if hasattr(kernel, name)}
    values = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    one: CudaKernel = type(kind.__name__, (kind,), members)(**values)
    return one


def labels(tiles: Sequence[TileConfig]) -> Iterator[str]:
    """The tiles' names; of tiles that share one, `m224n64k16+unrolled` with the flags that are
    set."""
    names = [tile.name for tile in tiles]
    for tile in tiles:
        flags = (field.name for field in fields(tile) if getattr(tile, field.name) is True)
        yield "+".join((tile.name, *flags)) if names.count(tile.name) > 1 else tile.name
