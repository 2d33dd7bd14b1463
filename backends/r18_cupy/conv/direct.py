"""Direct convolution, one thread per output: the plain baseline. NCHW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from r18.graph.ops import Conv2d, Problem
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div

THREADS = 256


@dataclass(frozen=True, eq=False)
class Direct(ConvKernel):
    """One thread per output: slow and plain."""

    algorithm = "direct"

    @property
    def entry(self) -> Entry:
        return Entry("conv/direct", "conv2d_direct", (self.storage,))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(Conv2d, problem.op)
        blocks = ceil_div(math.prod(problem.output), THREADS)
        arguments = (X, Pointer(Role.WEIGHT), *bias_and_residual(op), OUT, conv_shape(problem))
        return (GridLaunch(self.entry, (blocks, 1, 1), (THREADS, 1, 1), arguments),)
