"""Max-pooling of bytes, in either layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.graph.ops import Layout, Problem
from r18.graph.quantized import QuantizedMaxPool2d
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div, struct
from r18_cupy.integers.kernel import BYTES, IntegerKernel
from r18_cupy.ops.maxpool2d import POOL_SHAPE

THREADS = 256
WIDTH = 16  # channels per thread, in NHWC


@dataclass(frozen=True, eq=False)
class QuantizedMaxPool(IntegerKernel):
    """Each window independently. NCHW: one thread per output. NHWC: one thread per 16 channels.

    NHWC with channels that are not whole vectors: one thread per channel.
    """

    op = QuantizedMaxPool2d
    algorithm = "direct"

    @property
    def edges(self) -> tuple[int, ...]:
        return (THREADS,) if self.layout is Layout.NCHW else (WIDTH, THREADS)

    def entry(self, stored: str) -> Entry:
        symbol = f"qmaxpool2d_{self.layout.value}"
        return Entry("integers/maxpool2d", symbol, (("BYTE", BYTES[stored]),))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(QuantizedMaxPool2d, problem.op)
        pool, (n, c, h, w) = op.pool, problem.inputs[0]
        _, _, oh, ow = problem.output
        fields = (n, c, h, w, oh, ow, *pool.kernel_size, *pool.stride, *pool.padding)
        shape = struct(np.array([fields], POOL_SHAPE))
        width = WIDTH if self.layout is Layout.NHWC and c % WIDTH == 0 else 1
        blocks = ceil_div(math.prod(problem.output) // width, THREADS)
        widths = (np.uint32(width),) if self.layout is Layout.NHWC else ()
        return (
            GridLaunch(
                self.entry(op.stored),
                (blocks, 1, 1),
                (THREADS, 1, 1),
                (X, OUT, shape, *widths),
                overlaps=True,
            ),
        )
