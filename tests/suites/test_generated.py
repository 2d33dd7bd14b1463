"""Kernels in the forms of benchmark suites: right ones pass, and wrong ones are caught.

The folders next to this file hold them: `backendbench/right`, `kernelbench/right_*.py`,
`flashinfer/solutions/right*.json`, and one folder or file for each fault. What the suites' own
checks say of the same faults is in `test_suites_own_checks.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from r18.errors import UsageError
from r18_oracle.checked import Checked, How, asked_for, check, target_of
from r18_oracle.cli.check import check as command
from r18_oracle.findings import load
from r18_oracle.functions.suites.backendbench import OVERLOADS, overload_of
from r18_oracle.functions.suites.traced import NotJudged, traced
from r18_oracle.functions.target import function_at
from r18_oracle.search.replay import replayed

HERE = Path(__file__).parent
BACKENDBENCH, KERNELBENCH = HERE / "backendbench", HERE / "kernelbench"
SOLUTIONS = HERE / "flashinfer" / "solutions"
HERE_AND_NOW = How("brief", network=None, isolated=False)


def judged(path: Path) -> Checked:
    """The only kernel of a folder or a file."""
    (target,) = asked_for(str(path)).targets
    return check(target, HERE_AND_NOW)


@pytest.mark.parametrize(
    "folder", sorted(p.name for p in (BACKENDBENCH / "right").iterdir() if p.name != "mul__Tensor")
)
def test_right_kernels_of_backendbench_pass(folder: str) -> None:
    result = judged(BACKENDBENCH / "right" / folder)
    assert result.ok, result.text()
    assert result.tally.problems >= 3


@pytest.mark.parametrize("file", sorted(p.name for p in KERNELBENCH.glob("right_*.py")))
def test_right_kernels_of_kernelbench_pass(file: str) -> None:
    result = judged(KERNELBENCH / file)
    assert result.ok, result.text()
    assert result.tally.problems >= 3


def test_a_right_solution_of_flashinfer_passes() -> None:
    result = judged(SOLUTIONS / "right_returned.json")
    assert result.ok, result.text()
    assert result.found is not None
    assert result.found.arithmetic is not None
    assert set(result.tally.refused) <= {f"{a} is {n} in its definition" for a, n in AXES.items()}


AXES = {"N": 96, "K": 1280}
"""The fixed axes of the definition in `flashinfer/definitions`."""


def test_a_smaller_product_is_spread_over_the_fixed_axes() -> None:
    """A smaller product is spread over the fixed axes, including their ends, and is right."""
    kernel = function_at(f"{SOLUTIONS / 'right.json'}:run")
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)
    assert torch.equal(kernel(a, b), a @ b)
    whole = torch.ones(5, AXES["K"]), torch.ones(AXES["K"], AXES["N"])
    assert torch.equal(kernel(*whole), torch.full((5, AXES["N"]), float(AXES["K"])))
    assert kernel.refuses((5, 1281), (1281, 96)) == "K is 1280 in its definition"  # type: ignore[attr-defined]


CAUGHT = {
    "flashinfer/solutions/zeros.json": ("exact", ""),
    "flashinfer/solutions/last_rows.json": ("exact", ""),
    "backendbench/zeros": ("bound", ""),
    "backendbench/stale": ("edges", "it is the result of the call before"),
    "backendbench/cached": ("state", ""),
    "backendbench/one_shape": ("exact", ""),
    "backendbench/boundary_row": ("exact", ""),
    "kernelbench/zeros.py": ("bound", ""),
    "kernelbench/identity.py": ("exact", ""),
    "kernelbench/stale.py": ("edges", "it is the result of the call before"),
    "kernelbench/cached.py": ("impulse", ""),
    "kernelbench/one_shape.py": ("exact", ""),
    "kernelbench/boundary_row.py": ("exact", ""),
    "kernelbench/last_row.py": ("bound", ""),
}
"""By fault: the check that finds it, and words of its message."""
OF_IDENTITY = ("state", "runs", "exact", "bound", "impulse")
"""The checks that may find a cache by `id`: ids are reused, so it may fail in an early one."""


@pytest.mark.parametrize("name", CAUGHT)
def test_wrong_kernels_are_caught_by_the_check_for_them(name: str) -> None:
    result = judged(HERE / name)
    (finding,) = result.findings
    expected, words = CAUGHT[name]
    assert finding.check in (OF_IDENTITY if name == "backendbench/cached" else (expected,))
    assert words in finding.message
    assert finding.problem is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("backendbench/lower_precision", "multiplies in float16"),
        ("kernelbench/lower_precision.py", "multiplies in bfloat16"),
        ("flashinfer/solutions/lower_precision.json", "multiplies in bfloat16"),
    ],
)
def test_a_lower_precision_is_named(name: str, said: str) -> None:
    result = judged(HERE / name)
    assert not result.ok
    assert said in result.below
    assert f"this float32 kernel {said}" in result.text()


def test_a_finding_is_replayed_in_a_worker(tmp_path: Path) -> None:
    result = judged(KERNELBENCH / "boundary_row.py")
    (finding,) = result.findings
    assert "r18 replay" in result.text(tmp_path)
    (file,) = tmp_path.iterdir()
    again = replayed(load(file))
    assert again is not None
    assert (again.check, again.problem) == (finding.check, finding.problem)


def test_the_command_lists_what_it_did_not_judge(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        command(str(BACKENDBENCH / "broken"))
    assert ended.value.exit_code == 1
    assert "not judged: " in capsys.readouterr().err


# -- requested kernels ---------------------------------------------------------------------------


def test_a_folder_is_all_of_its_kernels() -> None:
    asked = asked_for(str(BACKENDBENCH / "right"))
    assert len(asked.targets) == 9
    assert {target.like for target in asked.targets} == {
        *("relu", "add", "matmul", "linear", "conv2d", "max_pool2d", "softmax", "batch_norm"),
        "adaptive_avg_pool2d",
    }
    (sentence,) = asked.left_out
    assert sentence.endswith("mul__Tensor: mul.Tensor is like no operator that is judged")
    assert not asked.broken


def test_a_kernel_that_does_not_import_is_broken() -> None:
    (sentence,) = asked_for(str(BACKENDBENCH / "broken")).broken
    assert "No module named 'no_such_module_of_a_kernel'" in sentence


@pytest.mark.parametrize(
    ("folder", "overload"),
    [
        ("relu__default", "relu.default"),
        ("_softmax__default", "_softmax.default"),
        ("add___Tensor", "add_.Tensor"),
        ("max_pool2d_with_indices__default", "max_pool2d_with_indices.default"),
    ],
)
def test_the_overload_of_a_folder(folder: str, overload: str) -> None:
    assert overload_of(folder) == overload


def test_every_overload_is_one_of_atens() -> None:
    """Every overload is one of ATen's, called by ATen's schema: the operator itself is right."""
    for overload in OVERLOADS:
        name, _, kind = overload.partition(".")
        assert kind in getattr(torch.ops.aten, name).overloads()


def test_a_problem_in_another_file() -> None:
    new, problem = str(KERNELBENCH / "new_only.py"), str(KERNELBENCH / "identity.py")
    with pytest.raises(UsageError, match=r"--like PROBLEM\.py"):
        asked_for(new)
    (target,) = asked_for(new, problem).targets
    assert target.like == "relu"
    assert check(target, HERE_AND_NOW).ok


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is in 'cuda'; judged are python and triton"):
        asked_for(str(SOLUTIONS / "in_cuda.json"))
    alone = tmp_path / "alone.json"
    alone.write_bytes((SOLUTIONS / "right_returned.json").read_bytes())
    with pytest.raises(UsageError, match=r"no definitions/gemm_n96_k1280\.json near .*--like"):
        asked_for(str(alone))
    definition = SOLUTIONS.parent / "definitions" / "gemm_n96_k1280.json"
    (target,) = asked_for(str(alone), str(definition)).targets
    assert (target.like, target.dtype) == ("matmul", "float32")
    with pytest.raises(UsageError, match=r"is Conv2d, relu, where one operator is judged"):
        asked_for(str(KERNELBENCH / "fused.py"))
    with pytest.raises(UsageError, match=r"mul\.Tensor is like no operator"):
        asked_for(str(BACKENDBENCH / "right" / "mul__Tensor"))
    with pytest.raises(UsageError, match="relu__default_implementation"):
        asked_for(str(KERNELBENCH))
    with pytest.raises(UsageError, match="called like softmax, not 'relu'"):
        target_of(f"{KERNELBENCH / 'zeros.py'}:ModelNew", "relu")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.Conv2d(4, 4, 3, groups=2), "groups or dilation"),
        (torch.nn.Conv2d(4, 4, 3, padding="same"), "padding 'same'"),
        (torch.nn.Linear(4, 4, bias=False), "without a bias"),
        (torch.nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (torch.nn.AdaptiveAvgPool2d(2), "output size 2"),
        (torch.nn.Softmax(dim=0), "over axis 0"),
        (torch.nn.GELU(), "GELU"),
    ],
)
def test_modules_that_are_not_judged(module: torch.nn.Module, said: str) -> None:
    with pytest.raises(NotJudged, match=said):
        traced(torch.nn.Sequential(module))


class Softmax(torch.nn.Module):
    """As KernelBench's, by one of PyTorch's three spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "functional":
            return torch.nn.functional.softmax(x, dim=1)
        return torch.softmax(x, 1) if self.how == "function" else x.softmax(dim=-1)


@pytest.mark.parametrize("how", ["functional", "function", "method"])
def test_each_spelling_of_a_softmax_is_one(how: str) -> None:
    assert traced(Softmax(how)).like == "softmax"


def test_weights_of_another_shape_are_refused() -> None:
    kernel = function_at(f"{KERNELBENCH / 'right_linear.py'}:ModelNew")
    assert kernel.refuses((2, 3), (5, 3), (5,)) is None  # type: ignore[attr-defined]
    kernel = function_at(f"{KERNELBENCH / 'right_batch_norm.py'}:ModelNew")
    how = {"training": False, "momentum": 0.1, "eps": 0.1}
    shapes = (2, 3, 4, 4), (3,), (3,), (3,), (3,)
    assert kernel.refuses(*shapes, **how) == "Model cannot be made with eps 0.1"  # type: ignore[attr-defined]
