"""`r18 check` as a whole: right functions pass, wrong ones are caught by the check for them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import checked_kernels
import r18
from r18.errors import UsageError
from r18_oracle.check.checks import VALUES
from r18_oracle.checked import Checked, How, check, target_of
from r18_oracle.findings import load
from r18_oracle.search.replay import replayed

HERE = Path(checked_kernels.__file__)
BRIEF = How("brief", network=None)
HERE_AND_NOW = How("brief", network=None, isolated=False)
MOST_SECONDS = 60.0


def checked(name: str, like: str, how: How = HERE_AND_NOW, **options: Any) -> Checked:
    place = name if ":" in name else f"{HERE}:{name}"
    return check(target_of(place, like, **options), how)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("torch.nn.functional:conv2d", "conv2d"),
        ("torch.nn.functional:linear", "linear"),
        ("torch.nn.functional:batch_norm", "batch_norm"),
        ("torch.nn.functional:relu", "relu"),
        ("torch.nn.functional:max_pool2d", "max_pool2d"),
        ("torch.nn.functional:adaptive_avg_pool2d", "adaptive_avg_pool2d"),
        ("torch.nn.functional:softmax", "softmax"),
        ("torch:add", "add"),
        ("torch:matmul", "matmul"),
        ("numpy:matmul", "matmul"),
        ("numpy:add", "add"),
        ("einsum_conv2d", "conv2d"),
        ("winograd_conv2d", "conv2d"),
        ("fft_conv2d", "conv2d"),
        ("numpy_softmax", "softmax"),
        ("batch_norm", "batch_norm"),
        ("matmul_pairwise", "matmul"),
        ("matmul_sequential", "matmul"),
        ("matmul_double_sums", "matmul"),
        ("matmul_rounded_products", "matmul"),
    ],
)
def test_right_functions_pass(name: str, like: str) -> None:
    start = time.monotonic()
    result = checked(name, like)
    assert result.ok, result.text()
    assert result.tally.problems >= 3
    assert time.monotonic() - start < MOST_SECONDS


@pytest.mark.parametrize(
    ("name", "like", "dtype"),
    [
        ("torch:matmul", "matmul", "float64"),
        ("torch:matmul", "matmul", "float16"),
        ("torch:matmul", "matmul", "bfloat16"),
        ("torch.nn.functional:linear", "linear", "bfloat16"),
        ("torch.nn.functional:batch_norm", "batch_norm", "float16"),
    ],
)
def test_right_functions_pass_in_other_formats(name: str, like: str, dtype: str) -> None:
    result = checked(name, like, dtype=dtype)
    assert result.ok, result.text()


def test_a_function_may_return_a_view_of_what_it_writes() -> None:
    result = checked("relu_into_a_view", "relu", arrays="numpy")
    assert result.ok, result.text()


@pytest.mark.parametrize("name", ["matmul_tf32", "matmul_tensor_core", "matmul_half_sums"])
def test_functions_in_less_are_right_within_that_and_fail(name: str) -> None:
    """A function in a narrower format fails, and passes with the contract that the result names."""
    result = checked(name, "matmul")
    assert not result.ok
    assert not result.findings
    assert result.below
    assert f"this float32 kernel {result.below[0]}" in result.text()
    again = checked(name, "matmul", contract=result.target.contract)
    assert again.ok, again.text()


def test_lower_precision_than_declared_is_out_of_bounds() -> None:
    result = checked("matmul_tf32", "matmul", contract="fp32")
    assert [finding.check for finding in result.findings] == ["bound"]


@pytest.mark.parametrize(
    ("name", "like", "caught"),
    [
        ("conv2d_zeros", "conv2d", "exact"),
        ("conv2d_last_halo_row", "conv2d", "exact"),
        ("conv2d_unwritten", "conv2d", ("full_write", "stale_memory", "repeatability")),
        ("conv2d_of_one_shape", "conv2d", "runs"),
        ("fft_wrapped", "conv2d", ("bound", "impulse")),
        ("relu_in_place", "relu", "inputs_unchanged"),
        ("relu_that_ignores_errors", "relu", "global_state"),
        ("add_in_one_buffer", "add", ("runs", "state")),
        ("matmul_reads_on", "matmul", "fences"),
    ],
)
def test_wrong_functions_are_caught(name: str, like: str, caught: Any) -> None:
    result = checked(name, like)
    assert not result.ok
    (finding,) = result.findings
    assert finding.check in (caught if isinstance(caught, tuple) else (caught,)), result.text()
    assert finding.problem is not None


def test_a_stale_result_is_named_and_replayed_from_its_file(tmp_path: Path) -> None:
    """A function that computes once for each shape is wrong on the second inputs of any check."""
    result = checked("conv2d_stale", "conv2d", BRIEF)
    (finding,) = result.findings
    assert "it is the result of the call before" in finding.message
    assert "r18 replay" in result.text(tmp_path)
    (file,) = tmp_path.iterdir()
    again = replayed(load(file))
    assert again is not None
    assert (again.check, again.problem) == (finding.check, finding.problem)


def test_a_crash_is_a_finding() -> None:
    result = checked("crashes", "matmul", BRIEF)
    (finding,) = result.findings
    assert finding.check == "crash"
    assert "SIGSEGV" in finding.message
    assert finding.problem is not None
    assert result.found is None
    assert replayed(finding) is not None


def test_the_result_of_a_cache_by_identity() -> None:
    """A cache by `id` is found by `state` or an ordinary check, since ids are reused."""
    result = checked("conv2d_cached_by_id", "conv2d", BRIEF)
    assert not result.ok
    (finding,) = result.findings
    assert finding.check in ("state", "runs", *VALUES), result.text()


# -- in a test suite -------------------------------------------------------------------------------


@r18.check.kernel(like=F.relu)
def rectified(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(0)


def test_a_marked_function_is_asserted() -> None:
    options = {"profile": "brief", "network": None}
    result = r18.check.assert_kernel(rectified, isolated=False, **options)
    assert result.target.like == "relu"
    with pytest.raises(AssertionError, match="wrong: exact"):
        r18.check.assert_kernel(lambda x: -x, like="relu", isolated=False, **options)


def test_a_local_function_cannot_go_to_a_worker() -> None:
    with pytest.raises(UsageError, match="isolated=False"):
        r18.check.assert_kernel(lambda x: x, like="relu")


def test_wrong_marks() -> None:
    with pytest.raises(UsageError, match="no option 'dtypes'"):
        r18.check.kernel(like="relu", dtypes="float16")
    with pytest.raises(UsageError, match=r"write @r18\.check\.kernel"):

        @r18.check.kernel
        def relu(x: Any) -> Any: ...


# -- the command -----------------------------------------------------------------------------------


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "r18", "check", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def test_a_wrong_constant_may_look_like_a_narrow_format() -> None:
    result = checked("softmax_of_another_base", "softmax")
    assert not result.ok
    assert result.target.contract == "softmax,float16"
    assert result.verdict.endswith("a wrong constant or a term left out may look the same")
    assert "wrong constant" not in checked("matmul_half_sums", "matmul").verdict


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def relu(x): return np.maximum(x, 0)\n"
        "def add(a, b): return a + np.abs(b)\n"
    )
    options = ("--profile", "brief", "--network", "none")
    right = command(tmp_path, "mine.py:relu", *options)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "verdict   right" in right.stdout
    wrong = command(tmp_path, "mine.py:add", *options, "--json")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    (result,) = json.loads(wrong.stdout)
    assert result["arrays"] == "numpy"
    assert [finding["check"] for finding in result["findings"]] == ["exact"]
    unknown = command(tmp_path, "mine.py:addd")
    assert unknown.returncode == 2
    assert "did you mean 'add'" in unknown.stderr


def test_the_command_refuses_what_it_cannot_judge(tmp_path: Path) -> None:
    """Exit code 2 where nothing was run, and a file that is not there is not passed over."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def relu(x): return np.maximum(x, 0)\n"
        "def no(problem): return 'takes nothing'\n"
    )
    (tmp_path / "model.py").write_text("class Model: pass\n")
    options = ("--profile", "brief", "--network", "none")
    nothing = command(tmp_path, "mine.py:relu", *options, "--refuses", "mine.py:no")
    assert nothing.returncode == 2, nothing.stdout + nothing.stderr
    assert "not judged: it took no problem" in nothing.stdout
    assert "could not be probed: it takes none of the small problems" in nothing.stdout
    assert "slow" not in nothing.stdout
    for wrong, said in (
        (("--like", "no.py"), "there is no file 'no.py'"),
        (("--like", "model.py"), "'model.py' is no problem of a suite for this function"),
        (
            ("--like", "batch_norm", "--contract", "batchnorm,float16"),
            "the contract 'batchnorm,float16' of float32 arrays has no bound",
        ),
        (("--findings", "mine.py"), "is no folder; name a folder"),
        (("--findings", "mine.py/below"), "is no folder; name a folder"),
    ):
        refused = command(tmp_path, "mine.py:relu", *options, *wrong)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert said in refused.stderr
        assert not refused.stdout
