"""The exact message by which a finding names a usual mistake in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import r18_numpy
from r18.backend import Backend, DeviceInfo, HostKernel, Kernel, RoundingContract
from r18.errors import NoKernel
from r18.graph.ops import GlobalAvgPool, MatMul, Problem, ReLU
from r18.graph.precision import FP32
from r18.runtime.plan import choose_kernel
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed
from r18_oracle.functions.arithmetic import expected_of
from r18_oracle.functions.arrays import NumPyArrays
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.functions.likes import LIKES
from r18_oracle.search.coverage import lacks_convolutions
from r18_oracle.search.profiles import profile
from r18_oracle.search.verify import Request, verify

PROBLEM = Problem(ReLU(), ((2, 3),))


def returns(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> Any:
    return np.maximum(inputs[0], 0)


def widens(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
    wide = np.maximum(inputs[0], 0).astype(np.float64).ravel()
    np.lib.stride_tricks.as_strided(out.view(np.uint8).ravel(), (48,))[:] = wide.view(np.uint8)


def misshapes(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
    out[...] = np.zeros((5, 7))


def inside_numpy(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
    np.pad(inputs[0], 1, mode="no such mode")  # type: ignore[call-overload]


def uses_scratch(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
    workspace[:24].view(np.float32).reshape(2, 3)[...] = inputs[0]


def right(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
    out[...] = np.maximum(inputs[0], 0)


def line(run: Callable[..., Any]) -> str:
    return f"test_hints.py:{run.__code__.co_firstlineno + 1}"


def relu(run: Any, **options: Any) -> HostKernel:
    rule = RoundingContract("exact", "float32", "float32")
    return HostKernel("mine", ReLU, "plain", FP32, rule, run, **options)


MESSAGES = {
    returns: "6 of 6 output elements are never written; write into out (out[...] = y): what the "
    "function returns is ignored",
    widens: "wrote past the end of the output buffer, first at byte 0 after it; was a wider format "
    "written?",
    misshapes: f"raised ValueError in misshapes ({line(misshapes)}): could not broadcast input "
    "array from shape (5,7) into shape (2,3)",
    inside_numpy: f"raised ValueError in inside_numpy ({line(inside_numpy)}): mode 'no such mode' "
    "is not supported",
    uses_scratch: f"raised ValueError in uses_scratch ({line(uses_scratch)}): cannot reshape array "
    "of size 0 into shape (2,3); the workspace has 0 bytes: declare scratch=lambda problem: nbytes",
}


@pytest.mark.parametrize("run", MESSAGES, ids=lambda run: str(run.__name__))
def test_a_usual_mistake(run: Callable[..., Any]) -> None:
    with pytest.raises(Failed) as caught:
        examine(r18_numpy.Backend(), relu(run), PROBLEM, 0)
    assert caught.value.finding.message == MESSAGES[run]


def test_declared_scratch_is_no_mistake() -> None:
    with pytest.raises(Failed) as caught:
        examine(r18_numpy.Backend(), relu(uses_scratch, scratch=lambda problem: 8), PROBLEM, 0)
    assert "declare scratch" not in caught.value.finding.message


def test_a_refusal_of_any_kernel_is_none_or_a_sentence() -> None:
    class Odd(HostKernel):
        def refusal(self, problem: Problem) -> str | None:
            return False  # type: ignore[return-value]

    rule = RoundingContract("exact", "float32", "float32")
    with pytest.raises(Failed) as caught:
        examine(r18_numpy.Backend(), Odd("mine", ReLU, "plain", FP32, rule, right), PROBLEM, 0)
    assert caught.value.finding.message == (
        "refusal() must return None (accepted) or a sentence (why not), not False"
    )


# -- backends that lack something --------------------------------------------------------------


class Lacking(Backend):
    """A backend with only the given kernels."""

    name = "mine"

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "NumPy")

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels


def test_an_op_without_a_kernel_names_the_others() -> None:
    problem = Problem(GlobalAvgPool(), ((1, 2, 3, 4),))
    with pytest.raises(NoKernel) as caught:
        choose_kernel((relu(right),), problem, "fp32")
    assert str(caught.value).splitlines()[1:] == [
        "  precisions with kernels for gap: none; ops with kernels: relu; add one to kernels(), "
        "or borrow numpy's (docs/tutorial.md, step 5)"
    ]


def test_a_backend_without_a_kernel_verifies_nothing() -> None:
    found = verify({"mine": Lacking()}, Request(profile("quick"), network="tiny"))
    assert not found.executed
    assert found.closing().endswith(
        "no finding; kernels() returned no kernel, so nothing is verified"
    )


def test_a_backend_that_can_run_no_network_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose kernels run no network in any of its precisions fails, with exit code 1."""
    backend = Lacking(relu(right))
    assert lacks_convolutions(backend, "fp32")
    monkeypatch.setattr("r18_oracle.search.verify._kernels", lambda *rest: [])
    found = verify({"mine": backend}, Request(profile("quick"), network="tiny"))
    (finding,) = found.findings
    assert finding.kernel == "mine/program/all/fp32"
    assert finding.message.startswith("cannot run tiny in fp32: precisions with kernels for ")
    refusing = Lacking(relu(right, refuses=lambda problem: "not today"))
    assert not lacks_convolutions(refusing, "fp32")  # as a device without the precision refuses
    assert not lacks_convolutions(r18_numpy.Backend(), "fp32")


# -- a function ------------------------------------------------------------------------------------


def message(function: Callable[..., Any], like: str, problem: Problem) -> str:
    """The message of the first finding on a function that takes NumPy's arrays."""
    expected = expected_of(LIKES[like], "float32")
    kernel = FunctionKernel(("mine", "f"), function, LIKES[like], NumPyArrays(), expected)
    with pytest.raises(Failed) as caught:
        examine(FunctionBackend(kernel), kernel, problem, 0)
    return caught.value.finding.message


PRODUCT, DOT = Problem(MatMul(5, 4), ((3, 5),)), Problem(MatMul(16, 1), ((1, 16),))
REPEATED = "it is the result of the call before, which had other inputs"


def kahan(a: Any, b: Any) -> Any:
    """Compensated sums, in which an infinity becomes NaN."""
    total = lost = np.zeros((len(a), b.shape[1]), a.dtype)
    for k in range(a.shape[1]):
        term = a[:, k, None] * b[k] - lost
        total, lost = total + term, (total + term - total) - term
    return total


def threes(a: Any, b: Any) -> Any:
    return np.full((len(a), b.shape[1]), 3, a.dtype)


@pytest.mark.parametrize(("function", "problem"), [(kahan, DOT), (threes, DOT), (threes, PRODUCT)])
def test_a_result_without_information_is_not_called_repeated(
    function: Callable[..., Any], problem: Problem
) -> None:
    assert REPEATED not in message(function, "matmul", problem)


@pytest.mark.parametrize("problem", [DOT, PRODUCT, Problem(MatMul(1, 1), ((1, 1),))])
def test_the_result_of_the_call_before_is_named(problem: Problem) -> None:
    results: list[Any] = []

    def stale(a: Any, b: Any) -> Any:
        results.append((a.copy(), b.copy(), a @ b))
        first, *_ = results
        return first[2].copy()

    assert REPEATED in message(stale, "matmul", problem)


def test_a_function_that_returns_a_wrong_result_raised_nothing() -> None:
    """The finding is what the function returned, without a place in r18's own code."""
    said = "returned float64, expected float32 as the input has"
    assert message(lambda x: x.astype(np.float64), "relu", PROBLEM) == said
    memory = np.zeros((2, 3), np.float32)
    said = "overwrote the result of the call before, which its caller holds"
    assert message(lambda x: np.maximum(x, 0, out=memory), "relu", PROBLEM) == said
