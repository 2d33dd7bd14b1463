"""Every op has one `OpSpec`, and a package can bring an op of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from r18.backend import RoundingContract
from r18.backend.host import HostKernel
from r18.errors import UsageError
from r18.graph.ops import OPS, Op, Problem, Shape
from r18.graph.precision import FP32
from r18.graph.quantized import QUANTIZED_OPS
from r18.graph.scaled import SCALED_OPS
from r18_oracle.generate.corners import corners
from r18_oracle.generate.inputs import kinds_for, make_case
from r18_oracle.judge.bounds import DERIVATIONS
from r18_oracle.judge.verdict import judge
from r18_oracle.ops import relu, table
from r18_oracle.ops.spec import OpSpec, Tensors


@dataclass(frozen=True)
class Clip(Op):
    """An op of another package: min(max(x, 0), 6)."""

    name: ClassVar[str] = "clip"

    def infer(self, *inputs: Shape) -> Shape:
        return inputs[0]


class ClipSpec(OpSpec[Clip]):
    op = Clip
    algorithms = ("exact",)

    def reference(self, op: Clip, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0].clamp(0, 6)

    def draw(self, kernel: Any, most: int, macs: int) -> Any:
        raise NotImplementedError

    def corners(self) -> Iterator[Problem]:
        yield Problem(Clip(), ((2, 3),))

    def crossings(self, kernel: Any, size: int) -> Iterator[Problem]:
        yield Problem(Clip(), ((1, size),))


SPEC = ClipSpec()


def kernel(most: float) -> HostKernel:
    def run(op: Clip, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
        np.clip(inputs[0], 0, most, out=out)

    contract = RoundingContract("exact", "float32", "float32")
    return HostKernel("toy", Clip, "clip", FP32, contract, run)


def test_every_op_has_a_spec_of_algorithms_that_have_a_bound() -> None:
    assert set(table.SPECS) == {*OPS.values(), *QUANTIZED_OPS, *SCALED_OPS}
    for op, spec in table.SPECS.items():
        assert table.spec_of(op) is spec
        assert spec.algorithms
        assert set(spec.algorithms) <= set(DERIVATIONS)


def test_an_op_without_a_spec_is_an_error() -> None:
    with pytest.raises(UsageError, match="no float64 reference for clip"):
        table.spec_of(Clip())


def test_an_op_cannot_be_registered_twice() -> None:
    with pytest.raises(UsageError, match="already has a spec of relu"):
        table.register(relu.ReLUSpec())


def test_a_package_brings_an_op_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("clip", f"{__name__}:SPEC", table.GROUP)
    monkeypatch.setattr(table, "SPECS", dict(table.SPECS))
    monkeypatch.setattr(table, "entry_points", lambda group, name: [point])
    assert table.spec_of(Clip).op is Clip
    (problem,) = corners(Clip, 100, 100)
    for most, right in ((6, True), (1, False)):
        toy = kernel(most)
        assert "exact" in kinds_for(toy, problem)
        case = make_case(toy, problem, "exact", 1)
        got = np.clip(case.inputs[0], 0, most)
        assert judge(case, toy.contract, got, exact=True).ok is right
