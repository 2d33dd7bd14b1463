"""The house: who may import whom, no circles, and no folder too large to take in.

`tests/test_imports.py` holds what importing may do to a process; here the map is held.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support import ROOT

CORE = (
    ("errors",),
    ("atomic", "check", "cpu", "ends", "files", "hooks", "progress", "stopwatch"),
    ("cache", "machine"),
    ("graph",),
    ("backend",),
    ("records", "images", "runtime"),
    ("calibration",),
    ("weights", "torch"),
    ("qdq",),
    ("compiled", "bench"),
    ("evaluate", "inner_loops"),
    ("quantize",),
    ("report",),
    ("cli",),
    ("demo",),  # its command is registered as another package's is
)
"""The core's floors, the lowest first: a module imports from its own floor and from below."""
ORACLE = (
    ("cases", "findings", "functions", "loading", "slate", "stacks", "threads", "xfails", "demo"),
    ("ops", "judge", "generate"),  # an op's spec holds its reference, its bound and its drawing
    ("check",),
    ("probe",),
    ("network",),
    ("dumps",),
    ("search",),
    ("session", "checked"),
    ("sanitize", "ptx", "perturb"),
    ("mutation", "conformance"),
    ("branches",),
    ("cli", "plugin"),
)
MOST_MODULES = 15
MOST_LINES = 60
"""The largest number of lines of a command, including its options and docstring."""
PACKAGES = [
    ROOT / "r18",
    ROOT / "oracle" / "r18_oracle",
    *sorted(path.parent for path in (ROOT / "backends").glob("*/__init__.py")),
]


def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = list(path.relative_to(package.parent).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str) -> set[str]:
    """Our modules that a module imports, wherever it does, except under `if TYPE_CHECKING:`."""
    found: set[str] = set()
    for node in statements(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno} imports by dots; ours are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module or "")
    return (found & MODULES.keys()) - {module}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # no statement is part of one
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from statements(node)


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What each module imports. Not computed in collection, which every process does."""
    return {module: imports(module) for module in MODULES}


def test_the_imports_are_seen(imported: dict[str, set[str]]) -> None:
    """Imports are found at a module's top and inside functions."""
    assert "r18.errors" in imported["r18.graph.ops"] | imported["r18.graph.passes"]
    assert len(MODULES) > 200
    assert sum(map(len, imported.values())) > 1000


def test_there_are_no_import_circles(imported: dict[str, set[str]]) -> None:
    """No circle exists, even with the imports inside functions."""
    assert list(TopologicalSorter(imported).static_order())  # raises CycleError, with the circle


@pytest.mark.parametrize(("package", "floors"), [("r18", CORE), ("r18_oracle", ORACLE)])
def test_imports_point_down(
    package: str, floors: tuple[tuple[str, ...], ...], imported: dict[str, set[str]]
) -> None:
    height = {name: floor for floor, names in enumerate(floors) for name in names}
    inside = {module for module in MODULES if module.startswith(f"{package}.")}
    rooms = {module.split(".")[1] for module in inside} - {"__main__"}
    assert rooms <= height.keys(), "a folder without a floor"
    wrong = [
        f"{module} (floor {height[room]}) imports {target} (floor {height[other]})"
        for module in sorted(inside)
        for target in sorted(imported[module] & inside)
        if (room := module.split(".")[1]) != (other := target.split(".")[1])
        and room != "__main__"
        and height[other] > height[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("backend", PACKAGES[2:], ids=lambda path: path.name)
def test_a_backend_imports_the_protocol_and_the_graph(
    backend: Path, imported: dict[str, set[str]]
) -> None:
    """Of the core, a backend imports only the protocol, the graph and independent utilities."""
    allowed = {"backend", "graph", "errors", "atomic", "cache", "files", "machine"}
    for module in sorted(MODULES):
        if module.split(".")[0] != backend.name:
            continue
        for target in sorted(imported[module]):
            first, *rest = target.split(".")
            assert first in ("r18", backend.name), f"{module} imports {target}"
            assert first != "r18" or not rest or rest[0] in allowed, f"{module} imports {target}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=str)
def test_a_folder_has_few_modules(folder: Path) -> None:
    found = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(found) <= MOST_MODULES, found


def test_a_command_is_short() -> None:
    """A command only parses, calls one function of the library, and prints."""
    long = {}
    for module, path in MODULES.items():
        if ".cli." in module or module.endswith(".command"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                    lines = node.end_lineno - node.lineno + 1
                    if lines > MOST_LINES:
                        long[f"{module}.{node.name}"] = lines
    assert long == {}


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=str)
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text("utf-8"))
    assert ast.get_docstring(tree), f"{folder / '__init__.py'} has no docstring"
