"""All kernels of quantised ops, and the calls of those other than convolution and linear."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, cast

import numpy as np

from r18.backend import Array, Kernel, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import EXTRAS, Conv2d, Layout, Op, Problem
from r18.graph.precision import INT8
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18_numba_cpu.blocking import several_samples
from r18_numba_cpu.compiled import NAME, counters, module, most_threads, run
from r18_numba_cpu.integers import conv_maxpool, winograd
from r18_numba_cpu.integers.gemm import INT_NBYTES, gemm, workspace_nbytes
from r18_numba_cpu.integers.packing import AMX, PORTABLE, VNNI, WORDS, flip_of, pack
from r18_numba_cpu.others import POOL, moved, pool
from r18_numba_cpu.packing import PANEL, TILE_ROWS, VECTOR, Arrays, round_up

BY_AMX, BY_VNNI, BY_WORDS = "_amx/int8", "_vnni/int8", "_avx2/int8"
"""The ends of `algorithm/precision` for kernels that need AMX, VNNI, or products of int16."""

WINOGRAD = f"winograd_f2x2{BY_WORDS.removesuffix(f'/{INT8}')}"

SPAN = 1024
"""Pixels that a thread processes at a time."""


@cache
def integer_kernels() -> tuple[HostKernel, ...]:
    """All kernels: by AMX first, then by VNNI, by AVX2, then portable ones; one for each other
    op."""
    contract = RoundingContract("integer", INT8.accumulate, INT8.storage)

    def kernel(op: type[Op], algorithm: str, run: HostFunction, **options: Any) -> HostKernel:
        options = {"edges": (VECTOR, PANEL), "layout": Layout.NHWC, **options}
        return HostKernel(NAME, op, algorithm, INT8, contract, run, batch_invariant=True, **options)

    def products(ending: str, group: int) -> tuple[HostKernel, ...]:
        suffix = ending.removesuffix(f"/{INT8}")
        options: dict[str, Any] = {
            "run": partial(gemm, group=group),
            "pack": partial(pack, group=group),
            "scratch": partial(workspace_nbytes, group=group),
            "edges": (VECTOR, PANEL, AMX) if group == AMX else (*TILE_ROWS, VECTOR, PANEL),
        }
        of_floats = several_samples(channels=2048)
        several = Problem(QuantizedConv2d(cast(Conv2d, of_floats.op), ("uint8",)), of_floats.inputs)
        conv = {"extras": EXTRAS, "extra_problems": (several,), **options}
        pooled = {
            **options,
            "run": partial(conv_maxpool.conv_maxpool, group=group),
            "pack": partial(conv_maxpool.pack, group=group),
            "scratch": partial(conv_maxpool.workspace_nbytes, group=group),
            "reads": Layout.NCHW,
            "extras": EXTRAS,
        }
        return (
            kernel(QuantizedConv2d, f"implicit_gemm{suffix}", **conv),
            kernel(QuantizedConvMaxPool, f"implicit_gemm{suffix}", **pooled),
            kernel(QuantizedLinear, f"tiled{suffix}", **options),
        )

    return (
        *products(BY_AMX, AMX),
        *products(BY_VNNI, VNNI),
        *products(BY_WORDS, WORDS),
        kernel(
            QuantizedConv2d,
            WINOGRAD,
            winograd.winograd,
            edges=(2, 4, *TILE_ROWS, VECTOR, PANEL),
            extra_problems=winograd.extra_problems(),
            refuses=winograd.refuses,
            scratch=winograd.workspace_nbytes,
            pack=winograd.pack_filters,
        ),
        *products("", PORTABLE),
        kernel(QuantizedMaxPool2d, "direct", maxpool, **POOL),
        kernel(QuantizedGlobalAvgPool, "sum", gap, scratch=_gap_nbytes),
        kernel(Quantize, "divide", quantize, reads=Layout.NCHW, scratch=_rows_nbytes),
        kernel(QuantizePixels, "table", quantize_pixels),
        kernel(QuantizedRelayout, "copy", relayout, edges=()),
    )


def fastest(problem: Problem, listed: tuple[Kernel, ...]) -> str | None:
    """The id of the kernel that a plan prefers for a convolution; None for the first listed.

    listed: those of the CPU. VNNI and AMX multiply bytes at two and eight times the rate of
    `vpmaddwd` or more, and Winograd multiplies at most 2.25 times less often.
    """
    convs = [kernel for kernel in listed if kernel.op is QuantizedConv2d]
    if not convs or not convs[0].algorithm.endswith(BY_WORDS.removesuffix(f"/{INT8}")):
        return None
    (found,) = (kernel.id for kernel in convs if kernel.algorithm == WINOGRAD)
    return found if winograd.pays(problem) else None


def maxpool(
    op: QuantizedMaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    pool(op.pool, inputs[0], out, workspace, int(flip_of(op.stored)))


def gap(
    op: QuantizedGlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    n, height, width, channels = inputs[0].shape
    limits = np.iinfo(out.dtype)
    _run(
        "mean",
        *(inputs[0].view(np.uint8), *weights, out.view(np.uint8), workspace.view(np.int32)),
        *(n, height * width, channels, op.stored == "int8"),
        *(np.float32(limits.min), np.float32(limits.max)),
    )


def _gap_nbytes(problem: Problem) -> int:
    """An int32 for each output, in whole vectors."""
    samples, channels = problem.output
    return samples * round_up(channels) * INT_NBYTES


def _rows_nbytes(problem: Problem) -> int:
    """A span of bytes for each worker."""
    return most_threads() * SPAN


def quantize(op: Quantize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Images (N, C, H, W) to (N, H, W, C); of other shapes, element by element."""
    x = inputs[0]
    samples, channels, *pixels = x.shape if x.ndim == 4 else (1, 1, x.size)
    sizes = samples, channels, math.prod(pixels), counters(), SPAN
    _run("quantize", x, *weights, out.view(np.uint8), workspace, *sizes)


def quantize_pixels(
    op: QuantizePixels, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """(N, H, W, C) of bytes in, (N, H, W, C) out."""
    channels = op.normalize.channels
    _run("look_up", inputs[0], *weights, out, out.size // channels, channels, SPAN)


def relayout(
    op: QuantizedRelayout, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Bytes of either sign are moved by the same code; images are float32."""
    if op.stored == "float32":
        moved(op, inputs[0], out)
    else:
        moved(op, inputs[0].view(np.uint8), out.view(np.uint8))


def _run(name: str, *arguments: Any) -> None:
    run(getattr(module("integers.others"), name), *arguments)
