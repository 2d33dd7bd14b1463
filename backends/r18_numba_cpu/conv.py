"""The convolution kernels, and which one a plan prefers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from r18.backend import RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import EXTRAS, Conv2d, Layout, Problem
from r18.graph.precision import FP32
from r18_numba_cpu import im2col, implicit_gemm, winograd
from r18_numba_cpu.compiled import NAME
from r18_numba_cpu.packing import FLOAT_NBYTES, PANEL, TILE_ROWS, VECTOR

RESIDENT_NBYTES = 12 << 20
"""Transformed filters up to this size are worth reading for a single image."""

SHARING_TILES = 8
"""Larger filters are worth reading for at least this many tiles."""


@cache
def conv_kernels() -> tuple[HostKernel, ...]:
    """Implicit GEMM, Winograd, and implicit GEMM from NCHW, which saves a plan the relayout; im2col
    for groups and dilation."""
    gemm = HostKernel(
        NAME,
        Conv2d,
        "implicit_gemm",
        FP32,
        RoundingContract("sum", FP32.accumulate, FP32.storage),
        implicit_gemm.implicit_gemm,
        layout=Layout.NHWC,
        edges=(*TILE_ROWS, VECTOR, PANEL),
        batch_invariant=True,
        scratch=implicit_gemm.workspace_nbytes,
        pack=implicit_gemm.pack_filters,
    )
    winograd_f4x4 = replace(
        gemm,
        algorithm="winograd_f4x4",
        contract=RoundingContract("winograd_f4x4", FP32.accumulate, FP32.storage),
        run=winograd.winograd,
        edges=(4, 6, *gemm.edges),
        extra_problems=winograd.extra_problems(),
        refuses=winograd.refuses,
        scratch=winograd.workspace_nbytes,
        pack=winograd.pack_filters,
    )
    from_nchw = replace(
        gemm,
        run=implicit_gemm.implicit_gemm_from_nchw,
        reads=Layout.NCHW,
        refuses=implicit_gemm.from_nchw_refuses,
    )
    by_im2col = replace(
        gemm,
        algorithm="im2col",
        run=im2col.im2col,
        extras=EXTRAS,
        scratch=im2col.workspace_nbytes,
        pack=im2col.pack_filters,
    )
    return gemm, winograd_f4x4, from_nchw, by_im2col


def fastest(problem: Problem) -> str | None:
    """The id of the kernel that a plan prefers for a convolution; None for other ops."""
    if not isinstance(problem.op, Conv2d):
        return None
    gemm, winograd_f4x4, _, by_im2col = conv_kernels()
    if problem.op.extras:
        return by_im2col.id
    return winograd_f4x4.id if winograd_pays(problem) else gemm.id


def winograd_pays(problem: Problem) -> bool:
    """Whether F(4×4, 3×3) is faster than implicit GEMM, both in float32.

    It multiplies a quarter as often and reads four times as many filter elements, so it pays if
    enough tiles share them.
    """
    op = problem.op
    if not isinstance(op, Conv2d) or op.extras or winograd.refuses(problem) is not None:
        return False
    if min(op.in_channels, op.out_channels) < VECTOR:
        return False
    filters = winograd.MATRICES * op.in_channels * op.out_channels * FLOAT_NBYTES
    return filters <= RESIDENT_NBYTES or winograd.tiling(problem).tiles >= SHARING_TILES
