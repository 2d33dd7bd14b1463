"""Global average pooling of bytes, in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.graph.ops import Layout, Problem
from r18.graph.quantized import QuantizedGlobalAvgPool
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div
from r18_cupy.integers.kernel import BYTES, IntegerKernel, ends

LANES, WARPS = 32, 8  # of kernels/integers/gap.cu
WIDTH = 4  # channels per lane, in NHWC


@dataclass(frozen=True, eq=False)
class QuantizedGap(IntegerKernel):
    """Sums in int32. NCHW: one warp per plane. NHWC: eight warps per 128 channels of an image.

    NHWC with channels that are not whole words: eight warps per 32 channels.
    """

    op = QuantizedGlobalAvgPool
    algorithm = "tree"

    @property
    def edges(self) -> tuple[int, ...]:
        narrow = (WARPS, LANES)
        return narrow if self.layout is Layout.NCHW else (WIDTH, *narrow, LANES * WIDTH)

    def entry(self, stored: str) -> Entry:
        return Entry("integers/gap", f"qgap_{self.layout.value}", (("BYTE", BYTES[stored]),))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op = cast(QuantizedGlobalAvgPool, problem.op)
        n, c, h, w = problem.inputs[0]
        if self.layout is Layout.NCHW:
            blocks, groups = ceil_div(n * c, WARPS), n * c
        else:
            blocks, groups = n * ceil_div(c, LANES * (1 if c % WIDTH else WIDTH)), c
        sizes = (np.int32(groups), np.int32(h * w), *ends(op.output_storage))
        return (
            GridLaunch(
                self.entry(op.stored),
                (blocks, 1, 1),
                (LANES * WARPS, 1, 1),
                (X, Pointer(Role.WEIGHT), OUT, *sizes),
                overlaps=True,
            ),
        )
