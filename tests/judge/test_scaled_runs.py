"""The runs of Hopper's e4m3 kernels in the model of its unit: they stay within their bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faults import scaled
from faults.controls import ControlBackend
from faults.summations import Summation, promoted
from r18.graph.ops import Conv2d, Problem
from r18.graph.scaled import ScaledConv2d
from r18.runtime.launch import run_kernel
from r18_cupy.float8.implicit_gemm_wgmma import ScaledImplicitGemmWgmma
from r18_cupy.float8.wgmma import PROMOTED, ScaledWgmmaConv
from r18_cupy.float8.wgmma_halo import ScaledImplicitGemmWgmmaResident
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.verdict import judge

RUNS = [
    (ScaledImplicitGemmWgmma(), 512, promoted(PROMOTED, scaled.UNIT)),
    (ScaledImplicitGemmWgmmaResident(), 64, scaled.UNIT),
    (ScaledImplicitGemmWgmmaResident(), 128, scaled.UNIT),
]


@pytest.mark.parametrize("kind", ["normal", "positive", "cancelling"])
@pytest.mark.parametrize(("of", "channels", "total"), RUNS, ids=["promoted", "64", "128"])
def test_sums_of_the_unit_stay_within_the_bound_of_the_contract(
    of: ScaledWgmmaConv, channels: int, total: Summation, kind: str
) -> None:
    conv = Conv2d(channels, 16, (3, 3), (1, 1), (1, 1), bias=True)
    problem = Problem(ScaledConv2d(conv), ((1, channels, 5, 5),))
    assert of.refusal(problem) is None
    known = next(k for k in scaled.CONTROLS if k.contract == scaled.NARROW)
    kernel = replace(known, contract=of.contract, run=scaled.conv(total))
    for seed in range(2):
        case = make_case(kernel, problem, kind, seed)
        got = run_kernel(ControlBackend(), kernel, problem, *case.inputs, *case.weights)
        found = judge(case, kernel.contract, got)
        assert found.ok, (seed, found)
