"""Images into int8: float32 by division, pixels by a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from r18.graph.ops import Layout, Normalize, Problem
from r18.graph.quantized import Quantize, QuantizePixels
from r18_cupy.bytes.quantize import RGB, THREADS, ByteQuantize, per_thread
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import GridLaunch, ceil_div
from r18_cupy.integers.kernel import IntegerKernel

RUN = 16  # bytes per thread and access
MOST_CHANNELS = 16  # whose tables are in shared memory


@dataclass(frozen=True, eq=False)
class QuantizeKernel(IntegerKernel, ByteQuantize):
    """See kernels/integers/quantize.cu."""

    op = Quantize
    source = "integers/quantize"
    run = RUN


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
        """RGB in planes of whole vectors, and more channels than shared memory has room for."""
        shapes = ((2, RGB, 3, RUN), (2, MOST_CHANNELS + 1, 3, 2))
        return tuple(
            Problem(QuantizePixels(Normalize((0.5,) * shape[1], (0.25,) * shape[1])), (shape,))
            for shape in shapes
        )

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c, h, w = problem.output
        count, area = math.prod(problem.output), h * w
        whole, any_channels = self.entries()
        if self.layout is Layout.NHWC:
            if c <= MOST_CHANNELS:
                return (per_thread(whole, ceil_div(count, RUN), (count, c)),)
            return (per_thread(any_channels, count, (count, c, 1)),)
        if c == RGB and area % RUN == 0:
            runs = area // RUN
            return (per_thread(whole, n * runs, (n * runs, runs)),)
        return (per_thread(any_channels, count, (count, c, area)),)
