"""Images into int8: float32 by division, pixels by a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from r18.graph.ops import Layout, Normalize, Problem
from r18.graph.quantized import Quantize, QuantizePixels
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.integers.kernel import IntegerKernel

THREADS = 256
RGB = 3
RUN = 16  # bytes per thread and access
RGB_PIXELS = 4  # per thread, of float32
MOST_CHANNELS = 16  # whose tables are in shared memory


@dataclass(frozen=True, eq=False)
class QuantizeKernel(IntegerKernel):
    """Reads NCHW, as images are given. To NCHW: 16 elements per thread.

    To NHWC: four pixels of RGB per thread; images with other channels, or whose planes are not
    whole vectors, one element per thread. Where both layouts have one order, as for NCHW.
    """

    op = Quantize
    algorithm = "divide"

    @property
    def reads(self) -> Layout | None:
        return Layout.NCHW

    @property
    def edges(self) -> tuple[int, ...]:
        return (RUN, THREADS) if self.layout is Layout.NCHW else (RGB, RGB_PIXELS, RUN, THREADS)

    def entries(self) -> tuple[Entry, ...]:
        symbols = ["quantize_elements"]
        if self.layout is Layout.NHWC:
            symbols += ["quantize_rgb_to_nhwc", "quantize_any_to_nhwc"]
        return tuple(Entry("integers/quantize", symbol) for symbol in symbols)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """RGB in planes of whole vectors."""
        return (Problem(Quantize(), ((2, RGB, 3, RGB_PIXELS),)),)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        shape, count = problem.output, math.prod(problem.output)
        elements, *to_nhwc = self.entries()
        if not to_nhwc or len(shape) != 4 or 1 in (shape[1], shape[2] * shape[3]):
            return (_launch(elements, ceil_div(count, RUN), Pointer(Role.WEIGHT), (count,)),)
        rgb, any_channels = to_nhwc
        n, c, h, w = shape
        if c == RGB and h * w % RGB_PIXELS == 0:
            runs = h * w // RGB_PIXELS
            return (_launch(rgb, n * runs, Pointer(Role.WEIGHT), (n * runs, runs)),)
        return (_launch(any_channels, count, Pointer(Role.WEIGHT), (count, h * w, c)),)


@dataclass(frozen=True, eq=False)
class QuantizePixelsKernel(IntegerKernel):
    """Bytes in NHWC. To NHWC: 16 bytes per thread. To NCHW: 16 pixels of RGB per thread.

    More channels than there is shared memory for, and in NCHW other channels than RGB or planes
    that are not whole vectors: one thread per element.
    """

    op = QuantizePixels
    algorithm = "table"

    @property
    def edges(self) -> tuple[int, ...]:
        return (RGB, RUN, MOST_CHANNELS, THREADS)

    def entries(self) -> tuple[Entry, ...]:
        whole = "rgb_to_nchw" if self.layout is Layout.NCHW else "nhwc"
        defines = (("MOST_CHANNELS", MOST_CHANNELS),)
        return tuple(
            Entry("integers/quantize_pixels", f"quantize_pixels_{way}", defines)
            for way in (whole, "any")
        )

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """RGB in planes of whole vectors, and more channels than there is shared memory for."""
        shapes = ((2, RGB, 3, RUN), (2, MOST_CHANNELS + 1, 3, 2))
        return tuple(
            Problem(QuantizePixels(Normalize((0.5,) * shape[1], (0.25,) * shape[1])), (shape,))
            for shape in shapes
        )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c, h, w = problem.output
        count, area = math.prod(problem.output), h * w
        whole, any_channels = self.entries()
        table = Pointer(Role.WEIGHT)
        if self.layout is Layout.NHWC:
            if c <= MOST_CHANNELS:
                return (_launch(whole, ceil_div(count, RUN), table, (count, c)),)
            return (_launch(any_channels, count, table, (count, c, 1)),)
        if c == RGB and area % RUN == 0:
            runs = area // RUN
            return (_launch(whole, n * runs, table, (n * runs, runs)),)
        return (_launch(any_channels, count, table, (count, c, area)),)


def _launch(entry: Entry, threads: int, factor: Pointer, sizes: tuple[int, ...]) -> GridLaunch:
    return GridLaunch(
        entry,
        (ceil_div(threads, THREADS), 1, 1),
        (THREADS, 1, 1),
        (X, factor, OUT, *map(np.uint32, sizes)),
        overlaps=True,
    )
