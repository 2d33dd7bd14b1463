"""Global average pooling and the linear layer of its means, one after the other in one kernel."""

from __future__ import annotations

from functools import partial

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import AvgPoolLinear, Problem
from r18.graph.precision import FP8, INT8, Precision
from r18.graph.quantized import QuantizedAvgPoolLinear
from r18.graph.scaled import ScaledAvgPoolLinear
from r18_numpy import others, quantized, scaled

Arrays = tuple[Array, ...]


def classifier_kernels(precisions: tuple[Precision, ...]) -> tuple[HostKernel, ...]:
    """One kernel for each precision of floats, one of integers, and one of e4m3 numbers."""
    floats = (
        HostKernel(
            "numpy",
            AvgPoolLinear,
            "parts",
            precision,
            RoundingContract("mean_sum", precision.accumulate, precision.storage),
            avgpool_linear,
            scratch=partial(_nbytes, precision),
        )
        for precision in precisions
    )
    integers = HostKernel(
        "numpy",
        QuantizedAvgPoolLinear,
        "parts",
        INT8,
        RoundingContract("integer", INT8.accumulate, INT8.storage),
        quantized_avgpool_linear,
        batch_invariant=True,
        scratch=_means,
        pack=quantized.pack,
    )
    numbers = HostKernel(
        "numpy",
        ScaledAvgPoolLinear,
        "parts",
        FP8,
        RoundingContract("mean_sum", FP8.accumulate, scaled.SUMS.name),
        scaled_avgpool_linear,
        scratch=lambda problem: _means(problem) * scaled.SUMS.itemsize,
        pack=scaled.pack,
    )
    return (*floats, integers, numbers)


def _nbytes(precision: Precision, problem: Problem) -> int:
    return _means(problem) * precision.dtype.itemsize


def _means(problem: Problem) -> int:
    """The number of means: N·C."""
    n, c = problem.inputs[0][:2]
    return n * c


def avgpool_linear(
    op: AvgPoolLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """inputs: (N, C, H, W). weights: (O, C), bias (O,). out: (N, O)."""
    pooling, layer = op.parts
    means = workspace.view(out.dtype).reshape(inputs[0].shape[:2])
    others.gap(pooling, inputs, (), means, workspace)  # type: ignore[arg-type]
    others.linear(layer, (means,), weights, out, workspace)  # type: ignore[arg-type]


def quantized_avgpool_linear(
    op: QuantizedAvgPoolLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """inputs: (N, C, H, W). weights: (O, C), bias (O,), multiplier (O,), and the pooling's (1,).
    out: (N, O) in float32."""
    *of_linear, multiplier = weights
    means = workspace.view(np.dtype(op.gap.output_storage)).reshape(inputs[0].shape[:2])
    quantized.gap(op.gap, inputs, (multiplier,), means, workspace)
    quantized.linear(op.linear, (means,), tuple(of_linear), out, workspace)


def scaled_avgpool_linear(
    op: ScaledAvgPoolLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """inputs: (N, C, H, W) in e4m3. weights: (O, C), bias (O,), multiplier (O,). out: (N, O) in
    float32, as its means are."""
    pooling, layer = op.parts
    means = workspace.view(scaled.SUMS).reshape(inputs[0].shape[:2])
    scaled.gap(pooling, inputs, (), means, workspace)  # type: ignore[arg-type]
    scaled.linear(layer, (means,), weights, out, workspace)  # type: ignore[arg-type]
