"""All kernels in bfloat16, and the calls of those other than convolution and linear."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from r18.backend import Array, Kernel, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import (
    EXTRAS,
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.precision import BF16, FP32
from r18_numba_cpu import conv, im2col, others, winograd
from r18_numba_cpu.bfloat16 import conv_maxpool
from r18_numba_cpu.bfloat16.products import (
    FLUSHED,
    PAIRS,
    multiply,
    pack,
    several_slices,
    workspace_nbytes,
)
from r18_numba_cpu.blocking import several_samples
from r18_numba_cpu.compiled import NAME, ceil_div, module, run
from r18_numba_cpu.implicit_gemm import from_nchw_refuses
from r18_numba_cpu.integers.packing import AMX, PORTABLE
from r18_numba_cpu.packing import FLOAT_NBYTES, PANEL, TILE_ROWS, VECTOR, Arrays

BY_AMX, BY_PAIRS = "_amx/bf16", "_avx512_bf16/bf16"
"""The ends of `algorithm/precision` for kernels with AMX and with `vdpbf16ps`."""


@cache
def bfloat16_kernels() -> tuple[HostKernel, ...]:
    """All kernels: by AMX first, then by `vdpbf16ps`, then portable ones; one kernel for each other
    op."""

    def kernel(
        op: type[Op], algorithm: str, contract: str, run: HostFunction, **options: Any
    ) -> HostKernel:
        rounding = RoundingContract(
            contract, BF16.accumulate, BF16.storage, factors=options.pop("factors", "")
        )
        given = {"precision": BF16, "edges": (VECTOR, PANEL), "layout": Layout.NHWC, **options}
        return HostKernel(
            NAME, op, algorithm, contract=rounding, run=run, batch_invariant=True, **given
        )

    def products(ending: str, group: int) -> tuple[HostKernel, ...]:
        suffix = ending.removesuffix(f"/{BF16}")
        options: dict[str, Any] = {
            "precision": BF16 if group == PORTABLE else FLUSHED,
            "pack": partial(pack, group=group),
            "scratch": partial(workspace_nbytes, group=group),
            "edges": (VECTOR, PANEL, AMX // PAIRS) if group == AMX else (*TILE_ROWS, VECTOR, PANEL),
        }
        named = f"implicit_gemm{suffix}", "sum"
        sliced = group == AMX
        here = partial(multiply, group=group, sliced=sliced)
        planes = partial(multiply, group=group, from_nchw=True)
        several = (several_samples(channels=1024),)
        conv = options | {
            "pack": partial(pack, group=group, sliced=sliced),
            "extra_problems": (*several, several_slices()) if sliced else several,
        }
        of_planes = options | {
            "reads": Layout.NCHW,
            "refuses": from_nchw_refuses,
            "extra_problems": several,
        }
        pooled = options | {
            "pack": partial(conv_maxpool.pack, group=group),
            "scratch": partial(conv_maxpool.workspace_nbytes, group=group),
        }
        pooling, pooling_planes = (
            partial(conv_maxpool.conv_maxpool, group=group, from_nchw=way) for way in (False, True)
        )
        return (
            kernel(Conv2d, *named, here, **conv),
            kernel(Conv2d, *named, planes, **of_planes),
            kernel(ConvMaxPool, *named, pooling, **pooled),
            kernel(ConvMaxPool, *named, pooling_planes, reads=Layout.NCHW, **pooled),
            kernel(Linear, f"tiled{suffix}", "sum", here, **options),
        )

    winograd_f4x4 = kernel(
        Conv2d,
        "winograd_f4x4",
        "winograd_f4x4",
        as_bits(winograd.winograd),
        factors=FP32.multiply,
        edges=(4, 6, *TILE_ROWS, VECTOR, PANEL),
        extra_problems=winograd.extra_problems(),
        refuses=winograd.refuses,
        scratch=winograd.workspace_nbytes,
        pack=winograd.pack_filters,
    )
    by_im2col = kernel(
        Conv2d,
        "im2col",
        "sum",
        as_bits(im2col.im2col),
        edges=(*TILE_ROWS, VECTOR, PANEL),
        extras=EXTRAS,
        scratch=im2col.workspace_nbytes,
        pack=pack_as_floats,
    )
    return (
        *products(BY_AMX, AMX),
        *products(BY_PAIRS, PAIRS),
        *products("", PORTABLE),
        winograd_f4x4,
        by_im2col,
        kernel(BatchNorm, "scale_shift", "scale_shift", as_bits(others.batchnorm), in_place=True),
        kernel(ReLU, "maximum", "exact", as_bits(others.relu), in_place=True),
        kernel(Add, "elementwise", "elementwise", as_bits(others.add), in_place=True),
        kernel(MaxPool2d, "direct", "exact", as_bits(others.maxpool), **others.POOL),
        kernel(GlobalAvgPool, "mean", "mean", as_bits(others.gap)),
        kernel(Softmax, "shifted", "softmax", softmax, edges=(VECTOR,), scratch=_two_rows_nbytes),
        kernel(Relayout, "copy", "exact", as_bits(others.relayout), edges=()),
        kernel(Normalize, "scale_shift", "normalize", normalize, edges=(), scratch=_wide_nbytes),
    )


def fastest(problem: Problem, listed: tuple[Kernel, ...]) -> str | None:
    """The id of the kernel that a plan prefers for a convolution; None for the first listed.

    listed: those of the CPU. AMX comes first. Winograd multiplies a quarter as often, in float32,
    at half the rate of `vdpbf16ps` (measured once on an AMD Zen 4, in no record); transforms take
    the rest unless a core does all phases in its cache. Without either, it pays where it pays in
    float32.
    """
    ways = {
        f"{kernel.algorithm}/{kernel.precision}".removeprefix("implicit_gemm"): kernel
        for kernel in listed
        if kernel.op is Conv2d and kernel.precision.name == BF16.name and kernel.reads is None
    }
    if BY_AMX in ways or not conv.winograd_pays(problem):
        return None
    if BY_PAIRS in ways and not winograd.tiling(problem).fused:
        return None
    return ways[f"winograd_f4x4/{BF16}"].id


def as_bits(function: HostFunction) -> HostFunction:
    """A function of `r18_numba_cpu.others` with activations as the bits of bfloat16: what its
    kernel loads is widened, and what it stores is rounded."""

    def of_bits(op: Op, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        bits = tuple(array.view(np.uint16) for array in inputs)
        function(op, bits, weights, out.view(np.uint16), workspace)

    return of_bits


def pack_as_floats(op: Conv2d, weights: Arrays) -> Arrays:
    """The filters of `im2col`, which bfloat16 holds, in float32: it multiplies in that."""
    return im2col.pack_filters(op, tuple(array.astype(np.float32) for array in weights))


def softmax(op: Softmax, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    terms = workspace.view(np.float32)
    _run("softmax", inputs[0].view(np.uint16), out.view(np.uint16), terms, *out.shape)


def _two_rows_nbytes(problem: Problem) -> int:
    """Two rows of float32 for each sample."""
    samples, classes = problem.output
    return 2 * samples * classes * FLOAT_NBYTES


def normalize(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift: bytes (N, H, W, C) in, bfloat16 in the same order out."""
    scale, shift = (np.array(values, np.float32) for values in op.scale_shift)
    pixels = out.size // op.channels
    spans = ceil_div(pixels, module("others").SPAN)
    terms = workspace.view(np.float32)
    arrays = (inputs[0], scale, shift, out.view(np.uint16), terms)
    _run("normalize", *arrays, pixels, op.channels, spans)


def _wide_nbytes(problem: Problem) -> int:
    """A float32 for each output."""
    return FLOAT_NBYTES * int(np.prod(problem.output))


def _run(name: str, *arguments: Any) -> None:
    run(getattr(module("bfloat16.others"), name), *arguments)
