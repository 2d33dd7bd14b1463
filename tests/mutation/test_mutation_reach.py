"""The code that a kernel reaches: through names, late imports, and modules found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from r18.backend.registry import load_backend
from r18_oracle.mutation.mutants import Target
from r18_oracle.mutation.names import Names, Span
from r18_oracle.mutation.reach import reach, reaching

PACKAGE = {
    "__init__.py": "from toy.host import run\n",
    "host.py": """
from toy.found import module

def lazily(x):
    from toy.device import kernels
    kernels.scale(x)

def by_name(x):
    _run("clip", x)

def _run(name, x):
    getattr(module("others"), name)(x)

def unrelated(x):
    return x
""",
    "found.py": """
from importlib import import_module

def module(name):
    return import_module(f"toy.device.{name}")
""",
    "device/__init__.py": "",
    "device/kernels.py": """
from .parts import FACTOR, tidy as cleaned

@cleaned
def scale(x):
    return x * FACTOR

def other(x):
    return x
""",
    "device/parts.py": """
FACTOR = 2
LIMIT = 3
def tidy(f):
    return f
""",
    "device/others.py": """
from toy.device import parts

def clip(x):
    return min(x, parts.LIMIT)

def grow(x):
    return x + parts.FACTOR
""",
}


@pytest.fixture
def names(tmp_path: Path) -> Names:
    for name, text in PACKAGE.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Names(tmp_path / "toy")


def lines_of(file: str, begin: str, count: int) -> Span:
    """The span of `count` lines of a file from the line that starts with `begin`."""
    lines = PACKAGE[file].splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.startswith(begin))
    return (file, first, first + count - 1)


def test_a_late_import_is_followed_through_relative_and_renamed_imports(names: Names) -> None:
    start = lines_of("host.py", "def lazily", 3)
    assert names.followed([start]) == {
        start,
        lines_of("device/kernels.py", "@cleaned", 3),
        lines_of("device/parts.py", "FACTOR", 1),
        lines_of("device/parts.py", "def tidy", 2),
    }


def test_a_function_that_is_found_by_name_is_followed(names: Names) -> None:
    start = lines_of("host.py", "def by_name", 2)
    assert names.followed([start]) == {
        start,
        lines_of("host.py", "def _run", 2),
        lines_of("found.py", "def module", 2),
        lines_of("device/others.py", "def clip", 2),
        lines_of("device/parts.py", "LIMIT", 1),
    }


def test_other_files_lead_nowhere(names: Names) -> None:
    assert names.followed([("kernels/a.cu", 1, 9)]) == {("kernels/a.cu", 1, 9)}


# -- ours --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "own", "inside", "outside"),
    [
        ("numba", "", "kernels/conv/winograd.py", "no folder"),
        ("numba-cpu", "", "kernels/winograd.py", "no folder"),
        ("numpy", "", "conv.py", "no folder"),
    ],
)
def test_a_backends_sources_are_not_those_of_another_in_its_package(
    backend: str, own: str, inside: str, outside: str
) -> None:
    target = Target.of(backend)
    assert target.own == own
    assert inside in target.sources()
    assert not [name for name in target.sources() if name.startswith(outside)]
    assert target.sources().items() <= target.texts().items()


INTEGER_PRODUCTS = {"qconv2d", "qconv2d_maxpool2d", "qlinear"}


@pytest.mark.parametrize(
    ("backend", "file", "text", "algorithms"),
    [
        ("numba-cpu", "kernels/others.py", "def rectify", {"relu"}),
        ("numba-cpu", "kernels/others.py", "def to_channels_last", {"relayout", "qrelayout"}),
        ("numba-cpu", "kernels/winograd.py", "def transform_patch_row", {"conv2d"}),
        (
            "numba-cpu",
            "kernels/micro_kernel.py",
            "def multiply(",
            {"conv2d", "conv2d_maxpool2d", "linear", *INTEGER_PRODUCTS},
        ),
        # By the dotted name of a module, and by overloads.
        (
            "numba-cpu",
            "kernels/amx.py",
            "def store_tiles",
            {"conv2d", "conv2d_maxpool2d", "linear", *INTEGER_PRODUCTS},
        ),
        ("numba-cpu", "kernels/integers/portable.py", "def multiply", INTEGER_PRODUCTS),
        ("numba", "kernels/ops/softmax.py", "def build", {"softmax"}),
    ],
)
def test_device_code_belongs_to_the_kernels_that_run_it(
    backend: str, file: str, text: str, algorithms: set[str]
) -> None:
    """Device code belongs to the kernels that run it, though it is imported only when they run."""
    target = Target.of(backend)
    names = Names(target.path)
    reaches = {k.id: reach(k, target.path, names) for k in load_backend(backend).kernels()}
    source = target.sources()[file]
    line = 1 + source[: source.index(text)].count("\n")
    shown = reaching(file, line, reaches, reaches)
    assert {kernel.split("/")[1] for kernel in shown} == algorithms
    if text == "def transform_patch_row":
        assert {kernel.split("/")[2] for kernel in shown} == {"winograd_f4x4"}
