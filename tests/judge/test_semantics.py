"""Cases that the semantics leave open or settle, and that random values do not show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from faults.fault import kernel
from r18.backend.registry import load_backend
from r18.errors import UsageError
from r18.graph.ops import BatchNorm, Conv2d, MaxPool2d, Normalize, Op, Problem
from r18.graph.precision import FP32, INT8
from r18.graph.quantized import QuantizedGlobalAvgPool, QuantizedMaxPool2d
from r18_oracle.cases import Case
from r18_oracle.check.checks import examine
from r18_oracle.generate.corners import corners
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.reference import reference
from r18_oracle.judge.verdict import judge

PADDED = Problem(Conv2d(1, 2, (3, 3), (1, 1), (1, 1)), ((1, 1, 4, 4),))
CONV = kernel("toy", Conv2d, "toy", lambda *a: None)


def case(weight: float) -> Case:
    weights = np.ones((2, 1, 3, 3))
    weights[0, 0, 0, 0] = weight
    return Case.of(CONV, PADDED, (np.ones((1, 1, 4, 4)),), (weights,))


@pytest.mark.parametrize(
    ("kind", "values", "shown"),
    [
        (Normalize((0.5,), (0.25,)), [3, 256, 300], "256.0, which uint8"),
        (QuantizedMaxPool2d(MaxPool2d((1, 1), (1, 1)), "int8"), [127, -129], "-129.0, which int8"),
        (QuantizedGlobalAvgPool("uint8"), [1.5], "1.5, which uint8"),
        (QuantizedGlobalAvgPool("uint8"), [math.nan], "nan, which uint8"),
    ],
)
def test_inputs_in_integers_are_not_cast(kind: Op, values: list[float], shown: str) -> None:
    problem = Problem(kind, ((1, 1, 1, len(values)),))
    toy = kernel("toy", type(kind), "toy", lambda *a: None, INT8)
    weights = tuple(np.ones(spec.shape) for spec in kind.weights())
    x = np.array(values, np.float64).reshape(problem.inputs[0])
    with pytest.raises(UsageError, match=f"an input of the case holds {shown} cannot represent"):
        Case.of(toy, problem, (x,), weights)


@pytest.mark.parametrize("weight", [math.inf, math.nan])
def test_padding_may_skip_a_non_finite_weight_or_not(weight: float) -> None:
    """A non-finite weight may count on padding or not; no output without padding may vary."""
    given = case(weight)
    y = reference(PADDED, *given.wide()).astype(np.float32)
    assert np.isnan(y[0, 0, 0]).all()
    assert judge(given, CONV.contract, y).ok
    skipped = y.copy()
    skipped[0, 0, 0, :] = skipped[0, 0, :, 0] = 6.0
    assert judge(given, CONV.contract, skipped).ok
    for at in ((0, 0, 1, 1), (0, 1, 0, 0)):
        wrong = skipped.copy()
        wrong[at] = 5.5
        assert judge(given, CONV.contract, wrong).coordinate == at


def test_a_variance_below_minus_eps_is_nan_throughout_its_channel() -> None:
    problem = Problem(BatchNorm(5), ((2, 5, 3, 4),))
    one = kernel("toy", BatchNorm, "toy", lambda *a: None)
    given = make_case(one, problem, "edges", 0)
    (below,) = np.flatnonzero(given.weights[3] < 0)
    assert np.isnan(reference(problem, *given.wide())[:, below]).all()


@pytest.mark.parametrize("backend", ["numpy", "r18_torch:cpu"])
def test_kernels_agree_on_that_variance(backend: str) -> None:
    loaded = load_backend(backend)
    for one in loaded.kernels():
        problem = Problem(BatchNorm(5), ((2, 5, 3, 4),))
        if one.op is BatchNorm and one.refusal(problem) is None:
            assert examine(loaded, one, problem, 0)


def test_corners_have_one_channel_and_one_column_under_a_stride() -> None:
    found = [
        problem.op.kernel_size
        for problem in corners(Conv2d, 4096, 400_000)
        if isinstance(problem.op, Conv2d)
        and problem.op.in_channels == problem.output[3] == problem.op.stride[0] == 1
        and problem.op.stride[1] > 1
        and problem.output[2] > 1
    ]
    assert (7, 7) in found
    assert (5, 5) in found


def test_torchs_channels_last_kernel_is_right_there() -> None:
    """Our channels-last kernel is right for one column; PyTorch's own is not: see
    docs/pytorch-one-column.md."""
    backend = load_backend("r18_torch:cpu")
    for one in backend.kernels():
        if one.id == f"torch/conv2d/aten_nhwc/{FP32.name}":
            for problem in corners(Conv2d, 4096, 400_000):
                if problem.op.in_channels == 1:  # type: ignore[attr-defined]
                    assert examine(backend, one, problem, 0)
