"""Max-pooling of bytes, in either layout."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from r18.graph.ops import Layout, MaxPool2d, Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, X, ceil_div, struct
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.maxpool2d import POOL_SHAPE

THREADS = 256
WIDTH = 16  # channels per thread, in NHWC


@dataclass(frozen=True, eq=False)
class ByteMaxPool(CudaKernel):
    """Each window independently. NCHW: one thread per output. NHWC: one thread per 16 channels.

    NHWC with channels that are not whole vectors: one thread per channel.
    """

    algorithm = "direct"

    @abstractmethod
    def entry_of(self, problem: Problem) -> Entry:
        """The function that computes a problem."""

    @abstractmethod
    def pool_of(self, problem: Problem) -> MaxPool2d:
        """The max-pooling that the problem's op computes on bytes."""

    @property
    def edges(self) -> tuple[int, ...]:
        return (THREADS,) if self.layout is Layout.NCHW else (WIDTH, THREADS)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        pool, (n, c, h, w) = self.pool_of(problem), problem.inputs[0]
        _, _, oh, ow = problem.output
        fields = (n, c, h, w, oh, ow, *pool.kernel_size, *pool.stride, *pool.padding)
        shape = struct(np.array([fields], POOL_SHAPE))
        width = WIDTH if self.layout is Layout.NHWC and c % WIDTH == 0 else 1
        blocks = ceil_div(math.prod(problem.output) // width, THREADS)
        widths = (np.uint32(width),) if self.layout is Layout.NHWC else ()
        return (
            GridLaunch(
                self.entry_of(problem),
                (blocks, 1, 1),
                (THREADS, 1, 1),
                (X, OUT, shape, *widths),
                overlaps=True,
            ),
        )
