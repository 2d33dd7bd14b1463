"""Kernels of Hugging Face's package `kernels`: from folders as kernel-builder makes them.

`hub/right` and `hub/wrong` are such folders. Where the package is not installed, a stand-in loads
them, which treats a variant for every machine as the package does. No test needs the network.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import commands
from r18.errors import BackendUnavailable, UsageError
from r18_oracle.checked import Checked, How, asked_for, check, target_of
from r18_oracle.functions.suites import hub
from r18_oracle.functions.target import backend_of, function_at

HERE = Path(__file__).parent / "hub"
RIGHT, WRONG = HERE / "right", HERE / "wrong"
HERE_AND_NOW = How("brief", network=None, isolated=False)
INSTALLED = importlib.util.find_spec("kernels") is not None


class StandIn(ModuleType):
    """A stand-in for `kernels` with the functions that are called."""

    def __init__(self) -> None:
        super().__init__("kernels")
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def get_local_kernel(self, folder: Path) -> ModuleType:
        (variant,) = (path.parent for path in folder.rglob(hub.METADATA))
        name = json.loads((variant / hub.METADATA).read_text("utf-8"))["id"]
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    def get_kernel(self, name: str, **which: Any) -> ModuleType:
        self.asked.append((name, which))
        return self.get_local_kernel(RIGHT)


@pytest.fixture(
    autouse=True,
    params=[
        "stand-in",
        pytest.param("kernels", marks=pytest.mark.skipif(not INSTALLED, reason="no kernels")),
    ],
)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package that loads kernels: the stand-in, or the real one."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "kernels", StandIn())
    for cached in (backend_of, function_at):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    for name in ("_right_universal_r18", "_wrong_universal_r18"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return sys.modules.get("kernels")


def judged(name: str, like: str = "") -> Checked:
    return check(target_of(f"{WRONG}:{name}", like), HERE_AND_NOW)


def test_right_functions_pass() -> None:
    targets = asked_for(str(RIGHT)).targets
    assert [target.like for target in targets] == ["matmul", "relu", "adaptive_avg_pool2d"]
    for target in targets:
        result = check(target, HERE_AND_NOW)
        assert result.ok, result.text()
        assert result.tally.problems >= 3
        assert result.target.arrays in ("torch", "torch-cuda")


CAUGHT = {
    "zeros": ("softmax", "bound"),
    "boundary_row": ("relu", "full_write"),
    "unwritten": ("relu", "full_write"),
    "stale": ("adaptive_avg_pool2d", "edges"),
    "cached": ("matmul", "impulse"),
    "one_shape": ("relu", "exact"),
    "late": ("relu", "completion"),
    "calls_the_reference": ("softmax", "independence"),
    "changes_its_input": ("relu", "inputs_unchanged"),
}
"""By fault: the operator, and the check that finds it."""


@pytest.mark.parametrize("name", CAUGHT)
def test_wrong_functions_are_caught_by_the_check_for_them(name: str) -> None:
    like, expected = CAUGHT[name]
    (finding,) = judged(name, like).findings
    assert finding.check == expected
    assert finding.problem is not None


def test_a_lower_precision_is_named() -> None:
    result = judged("lower_precision", "matmul")
    assert not result.ok
    assert "this float32 kernel multiplies in bfloat16" in result.text()


def test_memory_for_the_result_has_the_operator_s_shape() -> None:
    backend = backend_of(target_of(f"{RIGHT}:adaptive_avg_pool2d", arrays="torch").name)
    assert backend.kernel.signature.writes
    assert backend.kernel.signature.positional == ("x", "output_size")
    out, x = torch.full((2, 3, 1, 1), float("nan")), torch.ones(2, 3, 4, 5)
    assert function_at(f"{RIGHT}:adaptive_avg_pool2d")(out, x, 1) is out
    assert torch.equal(out, torch.ones(2, 3, 1, 1))


def test_a_folder_without_an_operator_says_what_it_has() -> None:
    with pytest.raises(UsageError, match="named after an operator") as caught:
        asked_for(str(WRONG))
    assert "boundary_row, cached, calls_the_reference, " in str(caught.value)
    with pytest.raises(UsageError, match="has no 'zeroes', did you mean 'zeros'"):
        target_of(f"{WRONG}:zeroes", "relu")


def test_what_is_a_kernel(tmp_path: Path) -> None:
    assert hub.is_kernel(str(RIGHT))
    assert hub.is_kernel(str(RIGHT / "torch-universal"))
    assert hub.is_kernel("kernels-community/relu@1")
    assert not hub.is_kernel(str(tmp_path))
    assert not hub.is_kernel("some/my_kernels.py")
    assert not hub.is_kernel("solutions/gemm.json")
    assert not hub.is_kernel("torch.nn.functional")


def test_a_kernel_as_it_is_built_passes(tmp_path: Path) -> None:
    shutil.copytree(RIGHT, tmp_path / "mine" / "build")
    assert hub.is_kernel(str(tmp_path / "mine"))
    result = check(target_of(f"{tmp_path / 'mine'}:relu"), HERE_AND_NOW)
    assert result.ok, result.text()


def test_a_repository_is_asked_for_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    package = StandIn()
    monkeypatch.setitem(sys.modules, "kernels", package)
    function_at("kernels-community/relu@1:relu")
    function_at("kernels-community/relu@main:relu")
    assert package.asked == [
        ("kernels-community/relu", {"version": 1}),
        ("kernels-community/relu", {"revision": "main"}),
    ]
    with pytest.raises(UsageError, match="names no version: kernels-community/relu@1"):
        function_at("kernels-community/relu:relu")


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(BackendUnavailable) as caught:
        function_at(f"{RIGHT}:relu")
    assert "the package kernels does not import" in caught.value.cause
    assert caught.value.remedy == "pip install kernels"


@pytest.mark.skipif(not INSTALLED, reason="no kernels")
def test_a_worker_process_loads_the_kernel(package: Any) -> None:
    if isinstance(package, StandIn):
        pytest.skip("a worker has no stand-in")
    done = commands.r18("check", RIGHT, "--profile", "brief", "--network", "none")
    assert done.code == 0, done.err
    assert done.out.count("verdict   right: ") == 3
