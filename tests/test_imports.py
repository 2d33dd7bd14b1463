"""Which packages may import which, and what importing may not do.

`r18` imports neither backends nor the oracle; a backend imports `r18` and itself; the oracle
imports `r18`, and reaches backends through the registry; tools and the command line sit on top.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT, output_of

BACKENDS = sorted(p.parent for p in (ROOT / "backends").glob("*/__init__.py"))
ENTRY_POINTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]["entry-points"]["r18.backends"]
OURS = {"r18", "r18_oracle", *(p.name for p in BACKENDS)}

# What the core does not depend on: extras.
EXTRAS = (
    "torch",
    "torchvision",
    "numba",
    "cupy",
    "cuda",
    "safetensors",
    "onnx",
    "onnxruntime",
    "openvino",
    "dask",
    "distributed",
    "pyarrow",
    "jinja2",
    "matplotlib",
    "hypothesis",
    "pytest",
)


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every absolute import, wherever it stands; also by a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            first = node.args[0]
            if (
                name in ("import_module", "__import__", "find_spec")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield node.lineno, first.value.split(".")[0]


def files(*folders: str | Path) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def breaches(paths: list[Path], allowed: set[str]) -> list[str]:
    """Imports of our own packages that are not among the allowed ones."""
    assert paths, "there is nothing to check"
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for line, name in imported(path.read_text(encoding="utf-8"))
        if (name in OURS or name.startswith("r18_")) and name not in allowed
    ]


def test_the_check_finds_imports_of_every_form() -> None:
    source = """
import os, r18_torch.device as d
from r18_oracle.judge.bounds import bound
from . import sibling
if TYPE_CHECKING:
    import r18_numpy
def lazily():
    from r18_cupy import Backend
    importlib.import_module("r18_numba.kernels")
    __import__("backends")
"""
    assert sorted(name for _, name in imported(source)) == [
        "backends",
        "os",
        "r18_cupy",
        "r18_numba",
        "r18_numpy",
        "r18_oracle",
        "r18_torch",
    ]


def test_the_core_imports_neither_backends_nor_oracle() -> None:
    core = [p for p in files("r18") if not p.is_relative_to(ROOT / "r18" / "cli")]
    assert ROOT / "r18" / "runtime" / "plan.py" in core
    assert breaches(core, {"r18"}) == []


def test_the_command_line_imports_no_backend() -> None:
    """The command line reaches backends through the registry only."""
    assert breaches(files("r18/cli"), {"r18", "r18_oracle"}) == []


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda p: p.name)
def test_a_backend_imports_the_core_and_itself(backend: Path) -> None:
    assert breaches(files(backend), {"r18", backend.name}) == []


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda p: p.name)
def test_a_backend_uses_the_public_core_and_not_the_command_line(backend: Path) -> None:
    for path in files(backend):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("r18.cli"), path
                if node.module.split(".")[0] == "r18":
                    private = [a.name for a in node.names if a.name.startswith("_")]
                    assert not private, f"{path} imports {private}"


def test_the_oracle_imports_the_core_and_no_backend() -> None:
    assert breaches(files("oracle"), {"r18", "r18_oracle"}) == []


def test_tools_import_no_backend() -> None:
    assert breaches(files("tools"), {"r18", "r18_oracle"}) == []


def test_nothing_imports_a_folder_name() -> None:
    """Nothing imports `backends`, `oracle` or `tools`: they are folders, not packages."""
    paths = files("r18", "backends", "oracle", "tools", "tests")
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for line, name in imported(path.read_text(encoding="utf-8"))
        if name in ("backends", "oracle", "tools")
    ]
    assert found == []
    for folder in ("backends", "oracle", "tools"):
        assert not (ROOT / folder / "__init__.py").exists()


# -- what importing may not do -----------------------------------------------------------------

BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_the_blocker_blocks() -> None:
    code = BLOCK + "\ntry:\n    import torch\nexcept ModuleNotFoundError as e:\n    print(e.name)"
    assert output_of(code) == "torch"


def test_every_module_of_the_core_imports_without_the_extras() -> None:
    """The core imports without PyTorch or safetensors: code that needs them imports them when used.

    `r18.torch` itself imports alone; the modules below it need PyTorch.
    """
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files("r18")
        if not path.is_relative_to(ROOT / "r18" / "cli")
        and (path.parent != ROOT / "r18" / "torch" or path.name == "__init__.py")
    ]
    assert {"r18", "r18.runtime.plan", "r18.graph.schedule", "r18.torch"} <= set(modules)
    code = f"""
import importlib, traceback
failed = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception:
        failed.append((name, traceback.format_exc()))
for name, why in failed:
    print(name, why)
print(len({modules!r}), "modules")
"""
    assert output_of(BLOCK + code) == f"{len(modules)} modules"


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_backend_can_be_made_without_its_framework(name: str) -> None:
    """A backend's package imports without the framework, and `probe` reports that it is missing."""
    code = f"""
from r18.errors import BackendUnavailable
from r18.backend.registry import load_backend
backend = load_backend({name!r})
try:
    print("ready", backend.probe().kind)
except BackendUnavailable as error:
    print("unavailable", bool(error.cause), bool(error.remedy))
"""
    needs_nothing = name == "numpy"
    assert output_of(BLOCK + code) == ("ready cpu" if needs_nothing else "unavailable True True")


def test_importing_the_torch_backend_does_not_import_torch() -> None:
    code = """
import sys, r18_torch
backend = r18_torch.Backend()
print("torch" in sys.modules)
"""
    assert output_of(code) == "False"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda p: p.name)
def test_backend_modules_import_without_contacting_a_device(backend: Path) -> None:
    """The subprocess sees no GPU, so that contacting a device while importing is an error.

    PyTorch reports whether it was initialised.
    """
    modules = [
        ".".join(path.relative_to(backend.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in files(backend)
    ]
    assert backend.name in modules
    code = f"""
import importlib, sys
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {EXTRAS!r}:
            raise
        print(name, "needs", error.name)
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
"""
    if missing := output_of(code):
        pytest.skip(f"not installed here: {missing}")
