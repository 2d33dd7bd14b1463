"""Controls: correct kernels that compute in odd ways, on which the oracle never raises an alarm.

Every op and every derivation of `r18_oracle.judge.bounds` has some: sums in odd orders, in several
precisions, with and without FMA, cut off as tensor cores do; Winograd; BatchNorm in both forms.
They are slow, and exist to be judged: see tests/check/test_controls.py and
tests/judge/test_bounds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from faults import odd_ops as odd
from faults import scaled
from faults import summations as sums
from faults.odd_ops import Arrays, Compute
from faults.summations import Products, Rounding, Summation
from r18.backend import Array, DeviceInfo, RoundingContract
from r18.backend import Backend as BackendBase
from r18.backend.host import HostFunction, HostKernel, HostMemory, HostStream
from r18.graph.ops import (
    Add,
    AvgPoolLinear,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Layout,
    Linear,
    MatMul,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.precision import BF16, FP16, FP16X3, FP32, FP64, TF32, Precision, dtype_of
from r18_oracle.judge import winograd

FLUSHED = replace(FP32, flush_to_zero=True)
FLUSHED_BF16 = replace(BF16, flush_to_zero=True)
EVERY_PRODUCT = 1 << 30
"""As many blocks as products, so that sums are pairwise from the start."""


class ControlBackend(BackendBase):
    """The controls as a backend on host memory; no entry point names it."""

    name = "control"

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "controls of the oracle")

    def kernels(self) -> tuple[HostKernel, ...]:
        return controls()

    def stream(self) -> HostStream:
        return HostStream()


def controls() -> tuple[HostKernel, ...]:
    """Every control, grouped by op."""
    return (
        *convolutions(),
        *winograds(),
        *transforms(),
        *linears(),
        *matmuls(),
        *batchnorms(),
        *others(),
        *normalizations(),
        *convolutions_pooled(),
        *convolutions_projected(),
        *classifiers(),
        *scaled.CONTROLS,
    )


def control(
    op: type[Op],
    algorithm: str,
    precision: Precision,
    compute: Compute,
    contract: str = "sum",
    *,
    truncates: bool = False,
    blocks: int = 1,
    stored_sum: bool = False,
    output: str = "",
    promoted: int = 0,
    **options: Any,
) -> HostKernel:
    """A control kernel: widens its arrays, computes, flushes if declared, stores."""
    rounding = RoundingContract(
        contract,
        precision.accumulate,
        output or precision.storage,
        truncates=truncates,
        blocks=blocks,
        stored_sum=stored_sum,
        promoted=promoted,
    )
    layout = options.get("layout", Layout.NCHW)
    reads = Layout.NHWC if op is Normalize else layout
    run = _runner(precision, compute, reads, layout)
    return HostKernel("control", op, algorithm, precision, rounding, run, **options)


def _runner(precision: Precision, compute: Compute, reads: Layout, writes: Layout) -> HostFunction:
    accumulate = dtype_of(precision.accumulate)
    tiny = np.finfo(precision.accumulate).tiny

    def logical(array: Array, layout: Layout) -> Array:
        channels_last = layout is Layout.NHWC and array.ndim == 4
        return array.transpose(0, 3, 1, 2) if channels_last else array

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        wide = tuple(np.ascontiguousarray(logical(a, reads), accumulate) for a in inputs)
        y = compute(op, wide, tuple(w.astype(accumulate) for w in weights))
        if precision.flush_to_zero:
            y = np.where(np.abs(y) < tiny, y.dtype.type(0), y)
        logical(out, writes)[...] = y.astype(out.dtype)

    return run


# -- convolutions and linears ------------------------------------------------------------------


def leaving(rounding: Rounding, compute: Compute) -> Compute:
    """The same computation with outputs rounded at the very end."""
    return lambda op, inputs, weights: rounding(compute(op, inputs, weights))


def summed(
    total: Summation,
    *,
    factors: Rounding | None = None,
    stored: Precision | None = None,
    bias_first: bool = False,
) -> Compute:
    """A convolution, linear, or convolution with its projection, whose products are summed by
    `total`.

    factors: the rounding of factors. stored: the precision that the sum is stored in before the
    epilogue. bias_first: begin with bias and residual instead of ending with them.
    """

    def compute(op: Any, inputs: Arrays, weights: Arrays) -> Array:
        x, w, taps, shape = _products(op, inputs, weights)
        if factors is not None:
            x, w = factors(x), factors(w)
        addends = _addends(op, inputs, weights)
        products = Products(x, w, taps)
        if bias_first:
            products = replace(products, start=sum(addends, np.zeros((), x.dtype)))
        y = total(products)
        if stored is not None:
            y = y.astype(stored.dtype).astype(x.dtype)
        for addend in () if bias_first else addends:
            y = y + addend
        if isinstance(op, Linear | MatMul):
            return y.T
        y = y.reshape(-1, *shape).transpose(1, 0, 2, 3)
        return np.maximum(y, 0) if op.relu else y

    return compute


Sum = Conv2d | ConvProjection | Linear | MatMul


def _products(
    op: Sum, inputs: Arrays, weights: Arrays
) -> tuple[Array, Array, int, tuple[int, ...]]:
    """The inputs of each output (K, P), its weights (O, K), the taps a channel, and P's shape:
    (N, OH, OW) or (N,). A projection's inputs and weights follow the convolution's.
    """
    if isinstance(op, ConvProjection):
        count = len(op.conv.weights())
        x, w, _, shape = _products(op.conv, inputs[:1], weights)
        z, v, _, _ = _products(op.projection, inputs[1:], weights[count:])
        return np.concatenate([x, z]), np.concatenate([w, v], axis=1), 1, shape
    w = weights[0].reshape(len(weights[0]), -1)
    if isinstance(op, Linear | MatMul):
        return np.ascontiguousarray(inputs[0].T), w, 1, (len(inputs[0]),)
    found = odd.windows(op, inputs[0], 0.0)
    n, _, oh, ow, kh, kw = found.shape
    x = found.transpose(1, 4, 5, 0, 2, 3).reshape(op.depth, -1)
    return x, w, kh * kw, (n, oh, ow)


def _addends(op: Sum, inputs: Arrays, weights: Arrays) -> Arrays:
    """Biases (O, 1) and residual (O, P), if there are any."""
    if isinstance(op, MatMul):
        return ()
    if isinstance(op, ConvProjection):
        return tuple(weight[:, None] for weight in weights if weight.ndim == 1)
    bias = (weights[1][:, None],) if isinstance(op, Linear) or op.bias else ()
    if isinstance(op, Conv2d) and op.residual:
        return (*bias, inputs[1].transpose(1, 0, 2, 3).reshape(op.out_channels, -1))
    return bias


ODD_SUMS: dict[str, tuple[Compute, dict[str, Any]]] = {
    "sum_forward": (summed(sums.in_order(sums.forward)), {}),
    "sum_reversed": (summed(sums.in_order(sums.backward)), {}),
    "sum_shuffled": (summed(sums.in_order(sums.shuffled)), {}),
    "sum_outside_in": (summed(sums.in_order(sums.outside_in)), {}),
    "sum_bias_first": (summed(sums.in_order(sums.forward), bias_first=True), {}),
    "sum_ascending": (summed(sums.by_magnitude(descending=False)), {}),
    "sum_descending": (summed(sums.by_magnitude(descending=True)), {}),
    "sum_signs_apart": (summed(sums.signs_apart), {}),
    "kahan": (summed(sums.kahan), {}),
    "pairwise": (summed(sums.pairwise), {"blocks": EVERY_PRODUCT}),
    "blocked_2": (summed(sums.blocked(2, sums.in_order(sums.backward))), {"blocks": 2}),
    "blocked_8": (summed(sums.blocked(8, sums.in_order(sums.forward))), {"blocks": 8}),
    "blocked_64": (summed(sums.blocked(64, sums.in_order(sums.forward))), {"blocks": 64}),
    "split_k_4": (summed(sums.blocked(4, sums.fused(sums.forward))), {"blocks": 4}),
    "lanes_8": (summed(sums.interleaved(8)), {"blocks": 8}),
    "fma_forward": (summed(sums.fused(sums.forward)), {}),
    "fma_reversed": (summed(sums.fused(sums.backward)), {}),
    "fma_pairs": (summed(sums.fused_pairs), {}),
    "float64_inside": (summed(sums.in_float64), {}),
}
"""Algorithm → computation and contract in fp32, for convolution and linear alike."""


_UNIT = sums.tensor_core(16, 2)

SPLIT_SUMS: dict[str, tuple[Compute, dict[str, Any]]] = {
    "sum_forward": (summed(sums.in_order(sums.forward)), {}),
    "split_forward": (summed(sums.split(sums.in_order(sums.forward))), {}),
    "split_reversed": (
        summed(sums.split(sums.in_order(sums.backward), sums.in_order(sums.shuffled))),
        {},
    ),
    "split_pairwise": (summed(sums.split(sums.pairwise)), {"blocks": EVERY_PRODUCT}),
    "split_ascending": (
        summed(sums.split(sums.by_magnitude(descending=False), paired=True)),
        {},
    ),
    "split_tensor_core_4": (summed(sums.split(sums.tensor_core(4))), {"truncates": True}),
    "split_tensor_core_8": (
        summed(sums.split(sums.tensor_core(8, 1), paired=True), bias_first=True),
        {"truncates": True},
    ),
    "split_tensor_core_16": (summed(sums.split(_UNIT, paired=True)), {"truncates": True}),
    "split_promoted": (
        summed(sums.split(sums.promoted(32, _UNIT), _UNIT, paired=True)),
        {"truncates": True, "promoted": 32},
    ),
    "split_k_4": (
        summed(sums.blocked(4, sums.split(_UNIT))),
        {"truncates": True, "blocks": 4},
    ),
    "split_blocked_8": (
        summed(sums.split(sums.blocked(8, sums.tensor_core(4)), sums.blocked(8, _UNIT))),
        {"truncates": True, "blocks": 8},
    ),
    "split_unfused": (
        summed(sums.split(_UNIT), stored=FP16X3),
        {"truncates": True, "stored_sum": True},
    ),
}
"""Algorithm → computation and contract in fp16x3, for convolution and linear alike."""


def convolutions() -> tuple[HostKernel, ...]:
    """Convolutions as sums of products."""
    conv = partial(control, Conv2d, edges=(4, 8, 16))
    steady = partial(conv, batch_invariant=True)
    forward = sums.in_order(sums.forward)
    narrow = [
        kernel
        for p in (FP16, BF16)
        for kernel in (
            steady("sum_forward", p, summed(forward)),
            steady("sum_reversed", p, summed(sums.in_order(sums.backward))),
            steady("pairwise", p, summed(sums.pairwise), blocks=EVERY_PRODUCT),
            steady("fma_forward", p, summed(sums.fused(sums.forward))),
            steady("unfused", p, summed(forward, stored=p), stored_sum=True),
            steady("tensor_core_4", p, summed(sums.tensor_core(4)), truncates=True),
            steady("tensor_core_8", p, summed(sums.tensor_core(8, 1)), truncates=True),
            steady("tensor_core_16", p, summed(sums.tensor_core(16, 2)), truncates=True),
            steady(
                "tensor_core_split_k",
                p,
                summed(sums.blocked(4, sums.tensor_core(8)), stored=p),
                truncates=True,
                blocks=4,
                stored_sum=True,
            ),
        )
    ]
    return (
        *(steady(name, FP32, run, **how) for name, (run, how) in ODD_SUMS.items()),
        steady("sum_tap_major", FP32, summed(sums.in_order(sums.tap_major))),
        steady("channel_by_channel", FP32, summed(sums.channel_by_channel)),
        steady("tap_by_tap", FP32, summed(sums.tap_by_tap)),
        steady("unfused", FP32, summed(forward, stored=FP32), stored_sum=True),
        conv("matrix_product_nhwc", FP32, summed(sums.matrix_product), layout=Layout.NHWC),
        steady("sum_flushed", FLUSHED, summed(sums.flushed)),
        steady("sum_flushed", FLUSHED_BF16, summed(sums.flushed)),
        steady("flushed_pairs", FLUSHED_BF16, summed(sums.flushed_pairs)),
        steady("flushed_tiles_4", FLUSHED_BF16, summed(sums.flushed_tiles(4))),
        steady("flushed_tiles_32", FLUSHED_BF16, summed(sums.flushed_tiles(32))),
        steady("sum_reversed", FP64, summed(sums.in_order(sums.backward))),
        steady("kahan", FP64, summed(sums.kahan)),
        steady("blocked_8", FP64, summed(sums.blocked(8, forward)), blocks=8),
        *narrow,
        steady("sum_forward", TF32, summed(forward, factors=sums.tf32_nearest)),
        steady("sum_reversed", TF32, summed(sums.in_order(sums.backward), factors=sums.tf32_away)),
        steady(
            "tensor_core_4",
            TF32,
            summed(sums.tensor_core(4), factors=sums.tf32_cut),
            truncates=True,
        ),
        steady(
            "tensor_core_8",
            TF32,
            summed(sums.tensor_core(8, 1), factors=sums.tf32_nearest),
            truncates=True,
        ),
        steady(
            "sum_to_tf32",
            TF32,
            leaving(sums.tf32_away, summed(forward, factors=sums.tf32_nearest)),
            output="tf32",
        ),
        steady(
            "tensor_core_to_tf32",
            TF32,
            leaving(sums.tf32_away, summed(_UNIT, factors=sums.tf32_cut)),
            truncates=True,
            output="tf32",
        ),
        *(steady(name, FP16X3, run, **how) for name, (run, how) in SPLIT_SUMS.items()),
    )


def linears() -> tuple[HostKernel, ...]:
    """Linear layers as sums of products."""
    linear = partial(control, Linear, batch_invariant=True, edges=(4, 8, 16))
    names = ("sum_reversed", "sum_bias_first", "kahan", "pairwise", "split_k_4", "fma_forward")
    forward = sums.in_order(sums.forward)
    return (
        *(linear(name, FP32, ODD_SUMS[name][0], **ODD_SUMS[name][1]) for name in names),
        linear("sum_flushed", FLUSHED, summed(sums.flushed)),
        linear("flushed_pairs", FLUSHED_BF16, summed(sums.flushed_pairs)),
        linear("flushed_tiles_32", FLUSHED_BF16, summed(sums.flushed_tiles(32))),
        linear("sum_reversed", FP64, summed(sums.in_order(sums.backward))),
        linear("pairwise", FP16, summed(sums.pairwise), blocks=EVERY_PRODUCT),
        linear("unfused", FP16, summed(forward, stored=FP16), stored_sum=True),
        linear("tensor_core_16", BF16, summed(sums.tensor_core(16, 2)), truncates=True),
        linear(
            "tensor_core_4",
            TF32,
            summed(sums.tensor_core(4), factors=sums.tf32_cut),
            truncates=True,
        ),
        *(
            linear(name, FP16X3, SPLIT_SUMS[name][0], **SPLIT_SUMS[name][1])
            for name in ("sum_forward", "split_pairwise", "split_tensor_core_16", "split_k_4")
        ),
    )


def matmuls() -> tuple[HostKernel, ...]:
    """Matrix products, which are linear layers without a bias, as sums of products."""
    matmul = partial(control, MatMul, batch_invariant=True, edges=(4, 8, 16))
    return (
        matmul("sum_reversed", FP32, summed(sums.in_order(sums.backward))),
        matmul("pairwise", FP16, summed(sums.pairwise), blocks=EVERY_PRODUCT),
        matmul("tensor_core_16", BF16, summed(sums.tensor_core(16, 2)), truncates=True),
    )


# -- Winograd ----------------------------------------------------------------------------------


def winograds() -> tuple[HostKernel, ...]:
    """F(2×2, 3×3) and F(4×4, 3×3): whole, channel by channel, and with float16 factors."""
    return tuple(
        control(
            Conv2d,
            f"winograd_f{m}x{m}{suffix}",
            precision,
            _winograd(m, convolve),
            f"winograd_f{m}x{m}",
            edges=(m, m + 2),
            refuses=_not_winograd,
        )
        for m in (2, 4)
        for suffix, precision, convolve in (
            ("", FP32, winograd.convolve),
            ("", FP64, winograd.convolve),
            ("_by_channel", FP32, _winograd_by_channel),
            ("", FP16, _winograd_of_halves),
        )
    )


def _not_winograd(problem: Problem) -> str | None:
    op = problem.op
    if isinstance(op, Conv2d) and (op.kernel_size != (3, 3) or op.stride != (1, 1)):
        return "Winograd takes 3×3 windows of stride 1"
    return None


Convolve = Callable[[int, Array, Array, tuple[int, int]], Array]


def _winograd(tile: int, convolve: Convolve) -> Compute:
    return _with_epilogue(lambda op, x, weight: convolve(tile, x, weight, op.padding))


def _with_epilogue(sums: Callable[[Conv2d, Array, Array], Array]) -> Compute:
    def compute(op: Conv2d, inputs: Arrays, weights: Arrays) -> Array:
        y = sums(op, inputs[0], weights[0])
        if op.bias:
            y = y + weights[1][:, None, None]
        if op.residual:
            y = y + inputs[1]
        return np.maximum(y, 0) if op.relu else y

    return compute


def _winograd_by_channel(tile: int, x: Array, weight: Array, padding: tuple[int, int]) -> Array:
    """Winograd with each channel transformed back by itself; the last channel comes first."""
    channels = range(x.shape[1] - 1, -1, -1)
    parts = [
        winograd.convolve(tile, x[:, c : c + 1], weight[:, c : c + 1], padding) for c in channels
    ]
    y: Array = np.add.accumulate(np.stack(parts), axis=0)[-1]
    return y


def _winograd_of_halves(tile: int, x: Array, weight: Array, padding: tuple[int, int]) -> Array:
    """Winograd with transformed values rounded to float16 before they are multiplied."""
    return winograd.convolve(tile, x, weight, padding, factors=np.dtype(np.float16))


# -- the transforms that a library chooses -----------------------------------------------------


def transforms() -> tuple[HostKernel, ...]:
    """FFTs of whole planes and of tiles of 16×16, and F(6×6, 3×3)."""
    return tuple(
        control(
            Conv2d,
            name,
            precision,
            compute,
            "transforms",
            edges=edges,
            refuses=refuses,
        )
        for precision in (FP32, FP64)
        for name, compute, edges, refuses in (
            ("fft", _with_epilogue(_by_fft), (8, 16), _not_fft),
            ("fft_of_tiles", _with_epilogue(_by_fft_of_tiles), (10, 16), _not_fft_of_tiles),
            ("winograd_f6x6", _winograd(6, winograd.convolve), (6, 8), _not_winograd),
        )
    )


def _not_fft(problem: Problem) -> str | None:
    op = problem.op
    return "strided" if isinstance(op, Conv2d) and op.stride != (1, 1) else None


def _not_fft_of_tiles(problem: Problem) -> str | None:
    op = problem.op
    if isinstance(op, Conv2d) and max(op.kernel_size) > 8:
        return "windows larger than 8 leave few outputs of a tile"
    return _not_fft(problem)


def _by_fft(op: Conv2d, x: Array, weight: Array) -> Array:
    (ph, pw), (kh, kw) = op.padding, op.kernel_size
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    oh, ow = x.shape[2] - kh + 1, x.shape[3] - kw + 1
    extents = [1 << (extent - 1).bit_length() for extent in x.shape[2:]]
    return _correlated(x, weight, extents)[:, :, :oh, :ow]


def _by_fft_of_tiles(op: Conv2d, x: Array, weight: Array) -> Array:
    """A convolution by FFTs of overlapping 16×16 tiles, whose outputs are adjacent."""
    (ph, pw), (kh, kw) = op.padding, op.kernel_size
    oh, ow = x.shape[2] + 2 * ph - kh + 1, x.shape[3] + 2 * pw - kw + 1
    th, tw = 17 - kh, 17 - kw
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph + 16), (pw, pw + 16)))
    y = np.empty((len(x), len(weight), oh, ow), x.dtype)
    for top in range(0, oh, th):
        for left in range(0, ow, tw):
            tile = _correlated(x[:, :, top : top + 16, left : left + 16], weight, [16, 16])
            part = y[:, :, top : top + th, left : left + tw]
            part[...] = tile[:, :, : part.shape[2], : part.shape[3]]
    return y


def _correlated(x: Array, weight: Array, extents: list[int]) -> Array:
    """The circular correlation over these extents, in the format of the arrays."""
    image = torch.fft.rfft2(torch.from_numpy(np.ascontiguousarray(x)), s=extents)
    window = torch.fft.rfft2(torch.from_numpy(weight), s=extents)
    product = torch.einsum("nchw,ochw->nohw", image, window.conj())
    y: Array = torch.fft.irfft2(product, s=extents).numpy()
    return y


# -- BatchNorm ---------------------------------------------------------------------------------


def batchnorms() -> tuple[HostKernel, ...]:
    """BatchNorm in both forms, with factors in several orders, and scale and shift from float64."""
    forms: tuple[tuple[str, str, Compute], ...] = (
        ("as_written", "batchnorm", odd.as_written),
        ("reciprocal_root", "batchnorm", odd.reciprocal_root),
        ("weight_first", "batchnorm", odd.weight_first),
        ("scale_shift", "scale_shift", odd.scale_shift),
        ("scale_shift_fma", "scale_shift", odd.scale_shift_fma),
        ("scale_shift_float64", "scale_shift", odd.scale_shift_float64),
    )
    batchnorm = partial(control, BatchNorm, batch_invariant=True)
    return (
        *(
            batchnorm(name, precision, compute, contract, in_place=in_place)
            for name, contract, compute in forms
            for precision, in_place in ((FP32, True), (FP64, False), (FP16, True), (BF16, False))
            if precision is FP32 or name in ("as_written", "scale_shift")
        ),
        batchnorm("as_written_flushed", FLUSHED, odd.as_written, "batchnorm"),
    )


# -- the others --------------------------------------------------------------------------------


def others() -> tuple[HostKernel, ...]:
    """Pooling, softmax, additions, and ops that only move data."""
    gap = partial(control, GlobalAvgPool, contract="mean", batch_invariant=True)
    softmax = partial(control, Softmax, contract="softmax")
    moving = partial(control, contract="exact", batch_invariant=True)
    add = partial(control, Add, contract="elementwise", batch_invariant=True)
    return (
        gap("sequential", FP32, odd.gap_sequential),
        gap("pairwise", FP32, odd.gap_pairwise, blocks=EVERY_PRODUCT),
        gap("reciprocal", FP32, odd.gap_reciprocal),
        gap("divided_first", FP32, odd.gap_divided_first),
        gap("sequential", FP64, odd.gap_sequential),
        gap("sequential", FP16, odd.gap_sequential),
        gap("reciprocal", BF16, odd.gap_reciprocal, layout=Layout.NHWC),
        gap("sequential_flushed", FLUSHED, odd.gap_sequential),
        softmax("exp", FP32, odd.softmax(np.exp)),
        softmax("exp2", FP32, odd.softmax(odd.exp_by_exp2)),
        softmax("reciprocal", FP32, odd.softmax_reciprocal),
        softmax("exp2", FP64, odd.softmax(odd.exp_by_exp2)),
        softmax("exp", FP16, odd.softmax(np.exp)),
        softmax("exp2", BF16, odd.softmax(odd.exp_by_exp2)),
        softmax("exp_flushed", FLUSHED, odd.softmax(np.exp)),
        moving(MaxPool2d, "reversed", FP32, odd.maxpool_reversed),
        moving(MaxPool2d, "tree", FP32, odd.maxpool_tree, layout=Layout.NHWC),
        moving(MaxPool2d, "tree", BF16, odd.maxpool_tree),
        moving(ReLU, "select", FP32, odd.relu_select, in_place=True),
        moving(ReLU, "select", FP16, odd.relu_select),
        add("swapped", FP32, odd.add_swapped, in_place=True),
        add("swapped", BF16, odd.add_swapped),
        add("swapped_flushed", FLUSHED, odd.add_swapped),
        HostKernel(
            "control",
            Relayout,
            "by_channel",
            FP32,
            RoundingContract("exact", "float32", "float32"),
            odd.relayout_by_channel,
            batch_invariant=True,
        ),
    )


def normalizations() -> tuple[HostKernel, ...]:
    """Normalisation as written, by reciprocals, scaled to bytes, as scale and shift, by a table."""
    normalize = partial(control, Normalize, contract="normalize", batch_invariant=True)
    return (
        normalize("as_written", FP32, odd.normalize_as_written),
        normalize("reciprocals", FP32, odd.normalize_reciprocals, layout=Layout.NHWC),
        normalize("of_whole", FP32, odd.normalize_of_whole),
        normalize("scale_shift", FP32, odd.normalize_scale_shift),
        normalize("table", FP32, odd.normalize_table),
        normalize("as_written", FP64, odd.normalize_as_written),
        normalize("scale_shift", FP16, odd.normalize_scale_shift),
        normalize("reciprocals", BF16, odd.normalize_reciprocals),
        normalize("as_written_flushed", FLUSHED, odd.normalize_as_written),
    )


def convolutions_pooled() -> tuple[HostKernel, ...]:
    """Convolutions in odd orders, pooled in odd orders, before or after order-preserving steps."""
    fused = partial(control, ConvMaxPool, batch_invariant=True, edges=(4, 7))
    forward, backward = sums.in_order(sums.forward), sums.in_order(sums.backward)
    rows, back, tree = odd.maxpool_rows_first, odd.maxpool_reversed, odd.maxpool_tree

    def stored(precision: Precision, total: Summation = forward) -> Compute:
        """Sums rounded to storage before the maximum, as with a tile in shared memory."""
        return summed(total, stored=precision)

    return (
        fused("rows_first", FP32, odd.pooled(summed(backward), rows)),
        fused("kahan_reversed", FP32, odd.pooled(summed(sums.kahan), back)),
        fused("tap_by_tap_tree", FP32, odd.pooled(summed(sums.tap_by_tap), tree)),
        fused("fma_epilogue_last", FP32, odd.epilogue_last(summed(sums.fused(sums.forward)), rows)),
        fused("started_at_zero", FP32, odd.started_at_zero(summed(forward))),
        fused("pairwise", FP32, odd.pooled(summed(sums.pairwise), tree), blocks=EVERY_PRODUCT),
        fused(
            "blocked_8",
            FP32,
            odd.epilogue_last(summed(sums.blocked(8, forward)), back),
            blocks=8,
            layout=Layout.NHWC,
        ),
        fused("rows_first_flushed", FLUSHED, odd.pooled(summed(sums.flushed), rows)),
        fused("rows_first", FP64, odd.pooled(summed(backward), rows)),
        fused("reversed", FP16, odd.pooled(summed(backward), back)),
        fused("unfused", FP16, odd.pooled(stored(FP16), rows), stored_sum=True),
        fused(
            "tensor_core_16",
            FP16,
            odd.epilogue_last(summed(sums.tensor_core(16, 2)), rows),
            truncates=True,
        ),
        fused("tensor_core_4", BF16, odd.pooled(summed(sums.tensor_core(4)), tree), truncates=True),
        fused(
            "tensor_core_8",
            TF32,
            odd.pooled(summed(sums.tensor_core(8, 1), factors=sums.tf32_nearest), rows),
            truncates=True,
        ),
        fused(
            "tensor_core_to_tf32",
            TF32,
            leaving(sums.tf32_away, odd.pooled(summed(_UNIT, factors=sums.tf32_cut), rows)),
            truncates=True,
            output="tf32",
        ),
        fused("split_reversed", FP16X3, odd.pooled(SPLIT_SUMS["split_reversed"][0], back)),
        fused(
            "split_tensor_core_16",
            FP16X3,
            odd.epilogue_last(summed(sums.split(_UNIT)), rows),
            truncates=True,
        ),
    )


def convolutions_projected() -> tuple[HostKernel, ...]:
    """Convolutions and the projections of their residuals in one sum, or in two."""
    fused = partial(control, ConvProjection, batch_invariant=True, edges=(4, 8, 16))
    forward, backward = sums.in_order(sums.forward), sums.in_order(sums.backward)
    names = ("sum_shuffled", "sum_bias_first", "sum_ascending", "kahan", "pairwise", "blocked_8")
    return (
        *(fused(name, FP32, ODD_SUMS[name][0], **ODD_SUMS[name][1]) for name in names),
        fused("two_sums", FP32, odd.projected(summed(sums.fused(sums.forward)), summed(backward))),
        fused(
            "one_after_the_other",
            FP32,
            odd.projected(summed(forward), summed(backward, bias_first=True)),
            layout=Layout.NHWC,
        ),
        fused("unfused", FP32, summed(backward, stored=FP32), stored_sum=True),
        fused("sum_flushed", FLUSHED, summed(sums.flushed)),
        fused("flushed_pairs", FLUSHED_BF16, summed(sums.flushed_pairs)),
        fused("sum_reversed", FP64, summed(backward)),
        fused("sum_shuffled", FP16, summed(sums.in_order(sums.shuffled))),
        fused("two_sums", FP16, odd.projected(summed(backward), summed(sums.pairwise))),
        fused("unfused", FP16, summed(forward, stored=FP16), stored_sum=True),
        fused("tensor_core_16", FP16, summed(_UNIT), truncates=True),
        fused("tensor_core_4", BF16, summed(sums.tensor_core(4), bias_first=True), truncates=True),
        fused(
            "tensor_core_split_k",
            BF16,
            summed(sums.blocked(4, sums.tensor_core(8))),
            truncates=True,
            blocks=4,
        ),
        fused("sum_forward", TF32, summed(forward, factors=sums.tf32_nearest)),
        fused(
            "tensor_core_8",
            TF32,
            summed(sums.tensor_core(8, 1), factors=sums.tf32_cut),
            truncates=True,
        ),
        fused(
            "tensor_core_to_tf32",
            TF32,
            leaving(sums.tf32_away, summed(_UNIT, factors=sums.tf32_cut)),
            truncates=True,
            output="tf32",
        ),
        *(
            fused(name, FP16X3, SPLIT_SUMS[name][0], **SPLIT_SUMS[name][1])
            for name in ("split_reversed", "split_tensor_core_16", "split_promoted", "split_k_4")
        ),
    )


def classifiers() -> tuple[HostKernel, ...]:
    """Means and products in odd orders, with means kept wide or stored in between."""
    whole = partial(control, AvgPoolLinear, contract="mean_sum", batch_invariant=True, edges=(4, 8))
    stored = partial(whole, contract="stored_mean_sum")
    forward, backward = sums.in_order(sums.forward), sums.in_order(sums.backward)
    return (
        whole("sequential", FP32, odd.classified(odd.gap_sequential, summed(forward))),
        whole("divided_first", FP32, odd.classified(odd.gap_divided_first, summed(backward))),
        whole("kahan", FP32, odd.classified(odd.gap_reciprocal, summed(sums.kahan))),
        whole("fma", FP32, odd.classified(odd.gap_pairwise, summed(sums.fused(sums.forward)))),
        whole(
            "lanes_8",
            FP32,
            odd.classified(odd.gap_sequential, summed(sums.interleaved(8))),
            blocks=8,
            layout=Layout.NHWC,
        ),
        whole("flushed", FLUSHED, odd.classified(odd.gap_sequential, summed(sums.flushed))),
        whole("sequential", FP64, odd.classified(odd.gap_sequential, summed(forward))),
        whole("reversed", FP16, odd.classified(odd.gap_reciprocal, summed(backward))),
        stored("stored", FP16, odd.classified(odd.gap_sequential, summed(forward), FP16)),
        stored("stored", BF16, odd.classified(odd.gap_reciprocal, summed(backward), BF16)),
        stored(
            "tensor_core_16",
            FP16,
            odd.classified(odd.gap_sequential, summed(sums.tensor_core(16, 2)), FP16),
            truncates=True,
        ),
        whole(
            "tensor_core_8",
            TF32,
            odd.classified(
                odd.gap_sequential, summed(sums.tensor_core(8, 1), factors=sums.tf32_nearest)
            ),
            truncates=True,
        ),
        whole("split", FP16X3, odd.classified(odd.gap_sequential, SPLIT_SUMS["split_reversed"][0])),
    )
