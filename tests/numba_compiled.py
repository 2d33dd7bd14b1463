"""What Numba made of each CUDA function for a GPU, recorded to spare tests compiling.

`python tests/numba_compiled.py` compiles all functions and writes numba_compiled.json next to it.
The file is valid for the same sources, functions, argument types, and versions of Python
and the compilers; otherwise the tests compile. With R18_COMPILE_ALL=1, as in the nightly run, they
always do.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from r18.atomic import write_text
from r18.backend.digest import combined
from r18.graph.ops import Problem
from r18.graph.precision import INT8
from r18_oracle.generate.corners import corners
from r18_oracle.generate.crossings import crossings
from support import COMPILE_ALL, output_of

RECORD = Path(__file__).with_suffix(".json")
LARGEST = 4096, 400_000
"""The most elements and operations of a problem."""

Row = list[str]
Launch = tuple[Any, tuple[str, ...]]
"""A function and the types of its arguments: the elements of an array, or `int`."""


def made(kind: str) -> list[Row] | None:
    """The rows of `KINDS[kind]`, from the record or compiled. None without libnvvm."""
    if (known := key(kind)) is None:
        return None
    found = recorded().get(kind, {})
    if found.get("key") == known and not os.environ.get(COMPILE_ALL):
        return [row.split() for row in found["rows"]]
    return [row.split() for row in compiled(kind)]


def compiled(kind: str) -> list[str]:
    """The rows as this machine's compilers have them, as text: from a process without the
    simulator."""
    code = f"import numba_compiled; numba_compiled.show({kind!r})"
    printed = output_of(code, path=[Path(__file__).parent], env={"NUMBA_ENABLE_CUDASIM": "0"})
    return printed.splitlines()


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def key(kind: str) -> dict[str, str] | None:
    """All that decides the rows of a kind. None without libnvvm."""
    if (nvvm := libnvvm()) is None:
        return None
    kernels = [kernel.digest for kernel in _kernels(kind)]
    launched = [f"{_code(function).__name__} {types}" for function, types in KINDS[kind][0]()]
    how = Path(__file__).read_text("utf-8")
    return {
        "sources": combined([*kernels, *launched, how]),
        "python": "{}.{}".format(*sys.version_info),
        **{name: version(name) for name in ("numba", "numba-cuda", "llvmlite")},
        "libnvvm": nvvm,
    }


@cache
def libnvvm() -> str | None:
    """The sha256 of NVVM's library, which is the compiler; None if there is none."""
    pathfinder: Any = import_module("cuda.pathfinder")
    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvvm").abs_path
    except pathfinder.DynamicLibNotFoundError:
        return None
    with open(path, "rb") as library:
        return hashlib.file_digest(library, "sha256").hexdigest()


# -- which functions ---------------------------------------------------------------------------


def _kernels(kind: str) -> list[Any]:
    from r18_numba.catalogue import all_kernels

    return [k for k in all_kernels() if (k.precision is INT8) == (kind == "integers")]


class _Launches:
    """A launcher that only records functions and their argument types."""

    def __init__(self) -> None:
        self.all: dict[Any, tuple[str, ...]] = {}

    def launch(self, function: Any, grid: Any, block: Any, *given: Any, phase: str = "") -> None:
        self.all[function] = tuple(map(_type, given))


class _Floats:
    """Stand-ins for a problem's float arrays, with the right types and one element each."""

    def __init__(self, problem: Problem, storage: Any) -> None:
        given = np.uint8 if problem.op.name == "normalize" else storage
        self.inputs = [np.empty(1, given) for _ in problem.inputs]
        self.out, self.storage = np.empty(1, storage), storage

    def weight(self, place: int, dtype: Any = None) -> Any:
        return np.empty(1, dtype or self.storage)

    def scratch(self, *sizes: int) -> list[Any]:
        return [np.empty(1, np.float32) for _ in sizes]


class _Integers:
    def __init__(self, problem: Problem) -> None:
        self.inputs = [np.empty(1, dtype) for dtype in INT8.input_dtypes(problem.op)]
        self.out = np.empty(1, INT8.output_dtype(problem.op))

    def weight(self, place: int, dtype: Any) -> Any:
        return np.empty(1, dtype)


def _floats() -> Iterator[Launch]:
    """Every float function, from one problem per kernel."""
    launches = _Launches()
    for kernel in _kernels("floats"):
        known = (*corners(kernel.op, *LARGEST), *crossings(kernel, *LARGEST))
        problem = next(p for p in known if kernel.refusal(p) is None)
        kernel.launch(problem, _Floats(problem, kernel.storage), launches)
    yield from launches.all.items()


def _integers() -> Iterator[Launch]:
    """Every integer function. Small tiles come first, for every combination of formats; large tiles
    are compiled for one combination."""
    functions, signatures = set(), set()
    for kernel in reversed(_kernels("integers")):
        for problem in corners(kernel.op, *LARGEST):
            if kernel.refusal(problem) is None:
                launches = _Launches()
                kernel.launch(problem, _Integers(problem), launches)
                ((function, types),) = launches.all.items()
                name = _code(function).__name__
                if function not in functions or (name, types) not in signatures:
                    functions.add(function)
                    signatures.add((name, types))
                    yield function, types


def _type(argument: Any) -> str:
    return str(argument.dtype) if isinstance(argument, np.ndarray) else "int"


def _code(function: Any) -> Any:
    """The Python function behind a GPU function; the simulator keeps it as `fn`."""
    return function.fn if hasattr(function, "fn") else function.py_func


# -- compiling, in a process of its own --------------------------------------------------------


def show(kind: str) -> None:
    """Print a row for each function."""
    target: Any = import_module("r18_numba.target")
    target.gpu_count = lambda: 1  # so that it is not the simulator that is chosen
    launched, compile_one = KINDS[kind]
    compile_one(launched())


def _compiler(capability: tuple[int, int]) -> Any:
    """`numba.cuda`, which takes the current device to have the compute capability."""
    cuda = import_module("r18_numba.target").numba_cuda()
    device = SimpleNamespace(compute_capability=capability)
    dispatcher: Any = import_module("numba.cuda.dispatcher")
    dispatcher.get_current_device = lambda: device
    return cuda


def _signature(types: tuple[str, ...]) -> tuple[Any, ...]:
    of: Any = import_module("numba.cuda").types
    numpy_support: Any = import_module("numba.cuda.np.numpy_support")
    return tuple(
        of.int32 if name == "int" else of.Array(numpy_support.from_dtype(np.dtype(name)), 1, "C")
        for name in types
    )


def _show_floats(launched: Iterator[Launch]) -> None:
    """Prints for each function: its name, whether the PTX has the target, and local memory."""
    cuda = _compiler((7, 5))
    for function, types in launched:
        code, _ = cuda.compile(
            function.py_func, _signature(types), device=False, cc=(7, 5), abi="numba"
        )
        print(function.py_func.__name__, ".target sm_75" in code, ".local" in code)


def _show_integers(launched: Iterator[Launch]) -> None:
    """Prints the same for two architectures, and then the instructions on floats."""
    asked = ((8, 0), (9, 0))
    cuda = _compiler(asked[0])
    library: Any = import_module("numba.cuda.codegen").CUDACodeLibrary
    libraries, to_ptx = [], library.get_asm_strs

    def noted(self: Any, cc: Any = None) -> Any:
        libraries.append(self)
        return to_ptx(self, cc)

    library.get_asm_strs = noted

    def show_one(function: Any, types: tuple[str, ...]) -> None:
        # Numba's typing and lowering take nearly all of the time, and are the same from sm_60 on:
        # NVVM makes the other architecture's PTX of the same IR.
        signature = _signature(types)
        first, _ = cuda.compile(function, signature, device=False, cc=asked[0], abi="numba")
        (other,) = libraries[-1].get_asm_strs(cc=asked[1])
        for cc, ptx in zip(asked, (first, other), strict=True):
            used = sorted(set(re.findall(r"^\s+(?:@\S+ )?(\w+\.[\w.]*f32[\w.]*) ", ptx, re.M)))
            name = f"sm_{cc[0]}{cc[1]}"
            print(name, function.__name__, f".target {name}" in ptx, ".local" in ptx, *used)

    def contracted(x: Any, out: Any) -> None:
        out[0] = x[0] * x[1] + x[2]

    show_one(contracted, ("float32", "float32"))
    for function, types in launched:
        show_one(function.py_func, types)


Shown = Callable[[Iterator[Launch]], None]
KINDS: dict[str, tuple[Callable[[], Iterator[Launch]], Shown]] = {
    "floats": (_floats, _show_floats),
    "integers": (_integers, _show_integers),
}


if __name__ == "__main__":
    if libnvvm() is None:
        raise SystemExit("no libnvvm: pip install 'numba-cuda[cu13]' brings it")
    found = {kind: {"key": key(kind), "rows": compiled(kind)} for kind in KINDS}
    write_text(RECORD, json.dumps(found, indent=1) + "\n")
