"""Kernels that choose among tiles, with one of them alone, for the oracle to look at; see
`r18.backend.Choosing`."""

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
def choices_of(kernel: CudaKernel) -> tuple[CudaKernel, ...]:
    """One for each tile that the kernel chooses from, if there are several; without those that are
    listed as kernels of their own."""
    tiles = tiles_of(kernel)
    if len(tiles) < 2:
        return ()
    listed = {one.id for one in all_kernels()}
    named = zip(tiles, labels(tiles), strict=True)
    found = (with_one_tile(kernel, tile, label) for tile, label in named)
    return tuple(one for one in found if one.id not in listed)


def choice_of(kernel: CudaKernel, problem: Problem) -> CudaKernel | None:
    """Of its choices, and of the kernels that are listed as the kernel with another tile, the one
    that launches the same functions for the problem."""

    def functions(one: CudaKernel) -> list[Entry]:
        return [launch.entry for launch in launches_of(one, problem)]

    wanted = functions(kernel)
    listed = (
        one
        for one in all_kernels()  # `…/nhwc` is the same in another layout, not with a tile
        if one.id.rpartition("/")[0] == kernel.id and one.layout is kernel.layout
    )
    for one in (*choices_of(kernel), *listed):
        if one.refusal(problem) is None and functions(one) == wanted:
            return one
    return None


def tiles_of(kernel: CudaKernel) -> Sequence[TileConfig]:
    """Its own, or those of the kernel that computes its `product`."""
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
    """Their names; of tiles that share one, `m224n64k16+unrolled` with the flags that are set."""
    names = [tile.name for tile in tiles]
    for tile in tiles:
        flags = (field.name for field in fields(tile) if getattr(tile, field.name) is True)
        yield "+".join((tile.name, *flags)) if names.count(tile.name) > 1 else tile.name
