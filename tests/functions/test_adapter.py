"""A function as a kernel: its arguments and its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import checked_kernels
from r18.backend.host import HostBuffer, HostMemory
from r18.graph.ops import Conv2d, GlobalAvgPool, Linear, MatMul, Problem, ReLU
from r18.runtime.launch import run_kernel
from r18_oracle.functions.arithmetic import expected_of
from r18_oracle.functions.arrays import NumPyArrays, TorchArrays, WrongResult
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.functions.device_arrays import TorchMemory
from r18_oracle.functions.kinds import KINDS
from r18_oracle.functions.likes import LIKES


def backend(function: Any, like: str, arrays: str = "numpy", dtype: str = "float32") -> Any:
    expected = expected_of(LIKES[like], dtype)
    kernel = FunctionKernel(("mine", "f"), function, LIKES[like], KINDS[arrays](), expected)
    return FunctionBackend(kernel)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_a_call_gives_what_the_function_returns(arrays: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 8, (3, 5)), rng.integers(-8, 8, (4, 5))

    def matmul(x: Any, w: Any) -> Any:
        return (x @ w).astype(x.dtype) if arrays == "numpy" else x @ w

    one = backend(matmul, "matmul", arrays, dtype)
    got = run_kernel(one, one.kernel, Problem(MatMul(5, 4), ((3, 5),)), a * 1.0, b * 1.0)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(got.astype(np.float64), a @ b.T)


def test_a_bias_is_of_the_arrays_format() -> None:
    seen = []

    def linear(x: Any, w: Any, b: Any) -> Any:
        seen.extend(array.dtype for array in (x, w, b))
        return x @ w.T + b

    one = backend(linear, "linear", "numpy", "float16")
    run_kernel(
        one,
        one.kernel,
        Problem(Linear(2, 3), ((1, 2),)),
        *(np.ones(s) for s in ((1, 2), (3, 2), 3)),
    )
    assert seen == [np.float16] * 3


def test_arguments_are_views_and_stay_the_same_objects() -> None:
    """Arguments are the same views in each call: guards guard them, a cache by `id` is wrong."""
    for kind in (NumPyArrays(), TorchArrays()):
        buffer = HostMemory().empty(24)
        view = kind.view(buffer, (2, 3), np.dtype(np.float32))
        assert kind.view(buffer, (2, 3), np.dtype(np.float32)) is view
        buffer.array.view(np.float32)[4] = 7
        assert float(view[1, 1]) == 7
        assert len(kind._views) == 1
    del view, buffer
    assert len(kind._views) == 0  # they end with their buffer


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: None, "is a return missing"),
        (lambda x: x[:1], r"of shape \(1, 3\), expected \(2, 3\)"),
        (lambda x: x[..., None], r"of shape \(2, 3, 1\), expected \(2, 3\)"),
        (lambda x: x.astype(np.float64), "returned float64, expected float32"),
        (lambda x: torch.from_numpy(x), "returned torch.Tensor"),
        (lambda x: x.tolist(), "returned builtins.list"),
    ],
)
def test_a_wrong_result_is_named(result: Any, said: str) -> None:
    one = backend(result, "relu")
    with pytest.raises(WrongResult, match=said):
        run_kernel(one, one.kernel, Problem(ReLU(), ((2, 3),)), np.ones((2, 3)))


def test_an_average_keeps_two_axes_of_one() -> None:
    """The result has the shape that PyTorch's `adaptive_avg_pool2d` gives it, and no other."""
    problem = Problem(GlobalAvgPool(), ((2, 3, 4, 4),))
    x = np.ones(problem.inputs[0])
    one = backend(lambda x, size: x.mean((2, 3), keepdims=True), "adaptive_avg_pool2d")
    assert run_kernel(one, one.kernel, problem, x).shape == problem.output
    for axes in (0, 1, 3):
        wrong = backend(
            lambda x, size, axes=axes: x.mean((2, 3)).reshape(2, 3, *[1] * axes),
            "adaptive_avg_pool2d",
        )
        with pytest.raises(WrongResult, match=r"expected \(2, 3, 1, 1\)"):
            run_kernel(wrong, wrong.kernel, problem, x)


@pytest.mark.parametrize("extras", [{"groups": 2}, {"dilation": (2, 1)}, {"groups": 4}])
def test_groups_and_dilation_are_refused_in_one_sentence(extras: Any) -> None:
    one = backend(checked_kernels.einsum_conv2d, "conv2d").kernel
    problem = Problem(Conv2d(4, 4, (3, 3), **extras), ((1, 4, 5, 5),))
    assert one.refusal(problem) == "groups and dilation are not asked for"


def test_long_sums_in_narrow_formats_are_refused() -> None:
    """Long sums in narrow formats are refused: their bound would be as large as the result."""
    one = backend(lambda x, w: x @ w, "matmul").kernel
    narrow = replace(one, arithmetic=replace(one.arithmetic, sums="bfloat16"))
    assert narrow.refusal(Problem(MatMul(4, 4), ((1, 4),))) is None
    assert "leave no bit" in str(narrow.refusal(Problem(MatMul(64, 4), ((1, 64),))))
    assert one.refusal(Problem(MatMul(64, 4), ((1, 64),))) is None


def test_memory_on_a_device_is_a_memory() -> None:
    """PyTorch's memory, here on the host, works as a backend's memory."""
    memory = TorchMemory("cpu")
    buffer = memory.empty(40)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory.upload(array, buffer)
    np.testing.assert_array_equal(memory.download(buffer, (2, 3), array.dtype), array)
    part = buffer.view(4, 8)
    np.testing.assert_array_equal(memory.download(part, (2,), array.dtype), [1, 2])
    memory.fill(part, 0)
    np.testing.assert_array_equal(memory.download(buffer, (4,), array.dtype), [0, 0, 0, 3])
    with pytest.raises(ValueError, match="view"):
        buffer.view(36, 8)
    with pytest.raises(TypeError, match="HostBuffer"):
        memory.fill(HostBuffer(np.zeros(4, np.uint8)), 0)


def test_what_the_users_function_refuses() -> None:
    """The user's `refuses` gets shapes in place of arrays, and settings as they are."""

    def refuses(x: Any, w: Any, b: Any, stride: Any, padding: Any) -> Any:
        assert (len(x), len(w)) == (4, 4)
        return "channels must be a multiple of 8" if x[1] % 8 else stride != 1

    one = replace(backend(checked_kernels.einsum_conv2d, "conv2d").kernel, refuses=refuses)
    taken = Problem(Conv2d(8, 4, (3, 3)), ((1, 8, 5, 5),))
    assert one.refusal(taken) is None
    odd = Problem(Conv2d(3, 4, (3, 3)), ((1, 3, 5, 5),))
    assert one.refusal(odd) == "channels must be a multiple of 8"
    strided = Problem(Conv2d(8, 4, (3, 3), (2, 2)), ((1, 8, 5, 5),))
    assert one.refusal(strided) == "is refused by refuses"


def test_a_winograd_contract_makes_two_kernels() -> None:
    """A Winograd contract makes two kernels: only 3×3 windows of stride 1 have Winograd's bound."""
    kernel = backend(checked_kernels.winograd_conv2d, "conv2d").kernel
    contract = replace(kernel.arithmetic, algorithm="winograd_f2x2")
    winograd, others = FunctionBackend(replace(kernel, arithmetic=contract)).kernels()
    assert (winograd.contract.algorithm, others.contract.algorithm) == ("winograd_f2x2", "sum")
    assert winograd.id != others.id
    for window, taken in (((3, 3), winograd), ((5, 5), others)):
        problem = Problem(Conv2d(3, 4, window), ((1, 3, 7, 7),))
        assert [one for one in (winograd, others) if one.refusal(problem) is None] == [taken]


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_a_result_that_the_next_call_overwrites(arrays: str) -> None:
    """A caller holds a result: memory that each call writes again is a fault, a memo is none."""
    memory: dict[Any, Any] = {}

    def shared(x: Any) -> Any:
        found = memory.setdefault("one", x * 0)
        found[...] = x
        return found

    def remembered(x: Any) -> Any:
        return memory.setdefault(float(x[0, 0]), x + 0)

    problem = Problem(ReLU(), ((2, 3),))
    one, two = (np.full((2, 3), value, np.float32) for value in (1, 2))

    def into(out: Any, x: Any) -> Any:
        out[...] = x
        return out[...]

    for right in (remembered, into, lambda x: x, lambda x: x[:]):
        kept = backend(right, "relu", arrays=arrays)
        for x in (one, two, one):
            np.testing.assert_array_equal(run_kernel(kept, kept.kernel, problem, x), x)
    wrong = backend(shared, "relu", arrays=arrays)
    run_kernel(wrong, wrong.kernel, problem, one)
    with pytest.raises(WrongResult, match="overwrote the result of the call before"):
        run_kernel(wrong, wrong.kernel, problem, two)


@pytest.mark.parametrize("setting", ["ignore", "print"])
def test_how_numpy_handles_errors_stays_as_the_function_leaves_it(setting: Any) -> None:
    """Errors do nothing in a call, and a change that it makes can be seen after it."""
    problem, x = Problem(ReLU(), ((1, 2),)), np.float32([[0, 1]])
    quiet = backend(lambda x: (x / np.float32(0)) * 0 + x, "relu")

    def changes(x: Any) -> Any:
        np.seterr(all=setting)
        return x

    changing = backend(changes, "relu")
    with np.errstate(all="raise"):
        before = np.geterr(), np.geterrcall()
        run_kernel(quiet, quiet.kernel, problem, x)
        assert (np.geterr(), np.geterrcall()) == before
        run_kernel(changing, changing.kernel, problem, x)
        assert set(np.geterr().values()) == {setting}
        assert np.geterrcall() == before[1]
