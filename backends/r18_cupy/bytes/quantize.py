"""float32 images into bytes, by division by a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from r18.graph.ops import Layout, Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.kernel import CudaKernel

THREADS = 256
RGB = 3
RGB_PIXELS = 4  # per thread


@dataclass(frozen=True, eq=False)
class ByteQuantize(CudaKernel):
    """Reads NCHW, as images are given. To NCHW: `run` elements per thread.

    To NHWC: four pixels of RGB per thread; images with other channels, or whose planes are not
    whole vectors, one element per thread. Where both layouts have one order, as for NCHW. See
    kernels/bytes/quantize.cuh.
    """

    algorithm = "divide"
    source: ClassVar[str]  # see `Entry`
    run: ClassVar[int]

    @property
    def reads(self) -> Layout | None:
        return Layout.NCHW

    @property
    def edges(self) -> tuple[int, ...]:
        whole = () if self.layout is Layout.NCHW else (RGB, RGB_PIXELS)
        return tuple(sorted({*whole, self.run, THREADS}))

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """RGB in planes of whole vectors."""
        return (Problem(self.op(), ((2, RGB, 3, RGB_PIXELS),)),)

    def entries(self) -> tuple[Entry, ...]:
        ways = ["elements"]
        if self.layout is Layout.NHWC:
            ways += ["rgb_to_nhwc", "any_to_nhwc"]
        return tuple(Entry(self.source, f"{self.op.name}_{way}") for way in ways)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        shape, count = problem.output, math.prod(problem.output)
        elements, *to_nhwc = self.entries()
        if not to_nhwc or len(shape) != 4 or 1 in (shape[1], shape[2] * shape[3]):
            return (per_thread(elements, ceil_div(count, self.run), (count,)),)
        rgb, any_channels = to_nhwc
        n, c, h, w = shape
        if c == RGB and h * w % RGB_PIXELS == 0:
            runs = h * w // RGB_PIXELS
            return (per_thread(rgb, n * runs, (n * runs, runs)),)
        return (per_thread(any_channels, count, (count, h * w, c)),)


def per_thread(entry: Entry, threads: int, sizes: tuple[int, ...]) -> GridLaunch:
    """A launch of `threads` threads, in whole blocks, of a function of a weight and sizes."""
    return GridLaunch(
        entry,
        (ceil_div(threads, THREADS), 1, 1),
        (THREADS, 1, 1),
        (X, Pointer(Role.WEIGHT), OUT, *map(np.uint32, sizes)),
        overlaps=True,
    )
