"""Measure every tile of the kernels that choose among several, on ResNet-18's convolutions and its
classifier with the pooling before it, and print how far each choice is from the best tile. The
estimates are fitted to these times.

python tools/measure_tiles.py [--kernels GLOB] [--precision fp16,tf32] [--batch 1,8] [--json FILE]

Needs a GPU. Tiles that do not support a problem are skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from r18.atomic import write_text
from r18.backend import Backend, Kernel
from r18.backend.registry import get_backend
from r18.bench.tuning import Range
from r18.cli.app import REFUSED
from r18.cli.options import integers, listed
from r18.errors import R18Error, UsageError
from r18.graph.all_ops import CLASSIFIERS
from r18.graph.ops import Conv2d, ConvMaxPool, ConvProjection, Problem
from r18.graph.passes import fuse, fuse_pairs
from r18.graph.quantize import quantized
from r18.graph.quantized import QuantizedConv2d
from r18.graph.resnet import network
from r18.graph.scaled import ScaledConv2d
from r18.graph.scaling import scaled
from r18.report.tables import Table

COUNT, REPEAT = 12, 5  # launches back to back, and how often
HEADS = ("kernel", "problem", "batch", "chosen", "µs", "best", "µs", "chosen / best")


class Launching(Kernel):
    """The method that this tool also needs from a kernel."""

    @abstractmethod
    def launches(self, problem: Problem) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Measured:
    """The median time of a kernel with one tile, and whether the kernel chooses that tile."""

    kernel: str
    problem: str
    batch: int
    tile: str
    microseconds: float
    chosen: bool


def with_tiles(backend: Backend) -> list[Launching]:
    """The kernels that choose among tiles. Tiles that are kernels are measured by `r18 tune`."""
    return [cast(Launching, kernel) for kernel in backend.kernels() if backend.variants(kernel)]


def function_of(kernel: Launching, problem: Problem) -> Any:
    """The device function of the kernel's first launch; each tile has its own."""
    return kernel.launches(problem)[0].entry


def problems(batches: Iterable[int]) -> list[Problem]:
    """The network's distinct convolutions in plans at fusion level `all`, with and without what
    they can be fused with, and its classifier with the pooling before it."""
    fused = fuse(network("resnet18"), "all")
    ops = (Conv2d, ConvMaxPool, ConvProjection, QuantizedConv2d, ScaledConv2d, *CLASSIFIERS)
    schedules = (fused, quantized(fused), scaled(fused))
    found = (
        problem
        for batch in batches
        for plain in schedules
        for schedule in (plain, fuse_pairs(plain))
        for problem in schedule.problems(batch).values()
        if isinstance(problem.op, ops)
    )
    return list(dict.fromkeys(found))


def candidates(backend: Backend, kernel: Kernel, problem: Problem) -> Iterator[Launching]:
    """The kernel with each of its tiles that supports the problem."""
    for one in backend.variants(kernel):
        if one.refusal(problem) is None:
            yield cast(Launching, one)


def measured(
    backend: Backend, kernels: Sequence[Launching], asked: Sequence[Problem]
) -> Iterator[Measured]:
    for problem in asked:
        place_of = cache(partial(Range, backend, problem))
        for kernel in kernels:
            for one in candidates(backend, kernel, problem):
                place = place_of(kernel.precision)
                time = place.measure(place.launches(one), COUNT, REPEAT)
                chosen = function_of(one, problem) == function_of(kernel, problem)
                about = kernel.id, str(problem), problem.batch
                yield Measured(*about, one.id.removeprefix(f"{kernel.id}/"), time, chosen)


def table(found: Iterable[Measured]) -> Table:
    """A line for each kernel and problem; the caption has the mean of the last column."""
    rows, ratios = [], []
    for about, same in groupby(found, key=lambda one: (one.kernel, one.problem, one.batch)):
        tiles = list(same)
        best = min(tiles, key=lambda one: one.microseconds)
        (chosen,) = (one for one in tiles if one.chosen)
        ratios.append(chosen.microseconds / best.microseconds)
        kernel, problem, batch = about
        times = [cell for one in (chosen, best) for cell in (one.tile, f"{one.microseconds:.2f}")]
        rows.append((kernel, problem, str(batch), *times, f"{ratios[-1]:.3f}"))
    caption = f"The choices take {fmean(ratios) - 1:.1%} longer than the best tiles, on average."
    return Table(" | ".join(HEADS), "llrlrlrr", rows, [caption])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every tile of the kernels with several.")
    parser.add_argument("--kernels", default="*wgmma*", help="a glob over ids")
    parser.add_argument("--precision", default="fp16,tf32,fp16x3")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--json", type=Path, help="also write each time to this file")
    args = parser.parse_args()
    try:
        names = listed(args.precision, "--precision")
        asked = problems(integers(args.batch, "--batch"))
        backend = get_backend("cupy")
        kernels = [
            kernel
            for kernel in with_tiles(backend)
            if kernel.precision.name in names and fnmatchcase(kernel.id, args.kernels)
        ]
        if not kernels:
            raise UsageError(f"no kernel with tiles of its own matches '{args.kernels}' in {names}")
        backend.prepare(
            (one, problem)
            for problem in asked
            for kernel in kernels
            for one in candidates(backend, kernel, problem)
        )
        found = list(measured(backend, kernels, asked))
        if not found:
            raise UsageError(f"no kernel that matches '{args.kernels}' takes a convolution")
    except R18Error as error:
        print(f"measure_tiles: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    if args.json:
        write_text(args.json, json.dumps([vars(one) for one in found], indent=1) + "\n")
    print(table(found).markdown())


if __name__ == "__main__":
    main()
