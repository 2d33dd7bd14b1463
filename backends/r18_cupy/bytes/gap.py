"""Global average pooling of bytes, in either layout."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from r18.graph.ops import Layout, Problem
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, X, ceil_div
from r18_cupy.kernel import CudaKernel

LANES, WARPS = 32, 8  # of a block
WIDTH = 4  # channels per lane, in NHWC


@dataclass(frozen=True, eq=False)
class ByteGap(CudaKernel):
    """NCHW: one warp per plane. NHWC: eight warps per 128 channels of an image, or per 32 where
    channels are not whole words.
    """

    algorithm = "tree"

    @abstractmethod
    def entry_of(self, problem: Problem) -> Entry:
        """The function that computes a problem."""

    def multiplier(self) -> tuple[Argument, ...]:
        """The argument after the input that multiplies a sum, if the kernel has one."""
        return ()

    def ends(self, problem: Problem) -> tuple[Argument, ...]:
        """The limits at which outputs saturate, if they do."""
        return ()

    @property
    def edges(self) -> tuple[int, ...]:
        narrow = (WARPS, LANES)
        return narrow if self.layout is Layout.NCHW else (WIDTH, *narrow, LANES * WIDTH)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c, h, w = problem.inputs[0]
        if self.layout is Layout.NCHW:
            blocks, groups = ceil_div(n * c, WARPS), n * c
        else:
            blocks, groups = n * ceil_div(c, LANES * (1 if c % WIDTH else WIDTH)), c
        sizes = (np.int32(groups), np.int32(h * w), *self.ends(problem))
        return (
            GridLaunch(
                self.entry_of(problem),
                (blocks, 1, 1),
                (LANES * WARPS, 1, 1),
                (X, *self.multiplier(), OUT, *sizes),
                overlaps=True,
            ),
        )
