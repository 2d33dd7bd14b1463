"""FlashInfer-Bench: a solution of a matrix product, as a JSON file.

    {"definition": "gemm_n4096_k4096", "sources": [{"path": "main.py", "content": …}],
     "spec": {"language": "triton", "entry_point": "main.py::run", …}}

The definition is another JSON file, named after it. One of `op_type` `gemm` is C = A·Bᵀ with A of
(M, K), B of (N, K). Some of the axes have one size only. A solution returns C, or gets it as its
last argument where `destination_passing_style` is true, as it is by default
(flashinfer_bench/data in github.com/flashinfer-ai/flashinfer-bench).

A problem that is smaller than the fixed axes is spread over them, with zeros between: the sums and
their bounds are those of the smaller problem.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r18.errors import UsageError, show
from r18_oracle.functions.suites.adapted import Adapted

LANGUAGES = ("python", "triton")
"""Languages that need no build."""
ABOVE = 4
"""Folders above a solution in which its `definitions` are looked for."""


def entry_of(file: str) -> str:
    """The name of the function in a solution's entry point."""
    return str(_read(Path(file)).get("spec", {}).get("entry_point", "")).rpartition("::")[2]


def adapted(file: str, definition: str | None = None) -> Adapted:
    """A solution as a function like `torch.matmul`. definition: its file, where it is not found.

    Raises `UsageError` for a solution that is not judged here, and what its module raises.
    """
    solution = _read(Path(file))
    spec = solution.get("spec", {})
    if spec.get("language") not in LANGUAGES:
        raise UsageError(
            f"'{file}' is in {show(spec.get('language'))}; judged are {' and '.join(LANGUAGES)}, "
            "which need no build"
        )
    defined = _read(Path(definition) if definition else _definition(Path(file), solution))
    sizes, dtype = _product(defined)
    run = _entry(solution, spec)
    in_place = spec.get("destination_passing_style", True)

    def called(a: Any, b: Any) -> Any:
        m, (k, n) = len(a), b.shape
        rows, terms, columns = (
            _places(count, sizes.get(axis, count))
            for axis, count in {"M": m, "K": k, "N": n}.items()
        )
        arrays = _spread(a, rows, terms), _spread(b.t(), columns, terms)
        if in_place:
            c = a.new_full((rows.stop, columns.stop), float("nan"))  # shows what is never written
            run(*arrays, c)
        else:
            c = run(*arrays)
        return c[rows.at.to(c.device)][:, columns.at.to(c.device)].contiguous()

    def refuses(a: Any, b: Any) -> str | None:
        for axis, size in {"M": a[0], "N": b[1], "K": a[1]}.items():
            if sizes.get(axis, size) < size:
                return f"{axis} is {sizes[axis]} in its definition"
        return None

    return Adapted("matmul", called, refuses, dtype)


@dataclass(frozen=True)
class _Places:
    """Where a smaller problem's rows, terms or columns are in an axis of a fixed size."""

    at: Any
    stop: int


def _places(count: int, size: int) -> _Places:
    """Places spread evenly from the first to the last; all of them where the sizes are the same."""
    import torch

    return _Places(torch.arange(count) * (size - 1) // max(1, count - 1), size)


def _spread(array: Any, rows: _Places, columns: _Places) -> Any:
    """The array in a larger one of zeros. A zero changes no sum and rounds nothing."""
    if array.shape == (rows.stop, columns.stop):
        return array.contiguous()
    full = array.new_zeros(rows.stop, columns.stop)
    full[rows.at[:, None].to(array.device), columns.at.to(array.device)] = array
    return full


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UsageError(f"there is no file '{file}'")
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"'{file}' is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"'{file}' is no JSON object")
    return found


def _definition(file: Path, solution: dict[str, Any]) -> Path:
    name = f"{solution.get('definition')}.json"
    for parent in list(file.resolve().parents)[:ABOVE]:
        for found in sorted((parent / "definitions").rglob(name)):
            return found
    raise UsageError(
        f"there is no definitions/{name} near '{file}': give it, --like DEFINITION.json"
    )


def _product(defined: dict[str, Any]) -> tuple[dict[str, int], str]:
    """The axes that have one size, and the format, of a matrix product's definition."""
    inputs, outputs = defined.get("inputs", {}), defined.get("outputs", {})
    arrays = [*inputs.values(), *outputs.values()]
    shapes = [array.get("shape") for array in arrays]
    formats = {array.get("dtype") for array in arrays}
    is_product = defined.get("op_type") == "gemm" and len(formats) == 1
    if not is_product or shapes != [["M", "K"], ["N", "K"], ["M", "N"]]:
        raise UsageError(
            f"the definition {show(defined.get('name'))} is no product of one format, A of (M, K) "
            "with B of (N, K), of op_type gemm"
        )
    axes = defined.get("axes", {}).items()
    return {
        name: axis["value"] for name, axis in axes if axis.get("type") == "const"
    }, formats.pop()


def _entry(solution: dict[str, Any], spec: dict[str, Any]) -> Callable[..., Any]:
    """The function of the entry point, imported from the sources in a folder of their own."""
    folder = Path(tempfile.mkdtemp(prefix="r18-solution-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for source in solution.get("sources", []):
        path = (folder / source["path"]).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise UsageError(f"the source {show(source['path'])} is not inside its solution")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source["content"], "utf-8")
    inner, _, name = spec.get("entry_point", "").partition("::")
    if not (folder / inner).is_file():
        raise UsageError(f"the entry point {show(spec.get('entry_point'))} is in no source")
    made = importlib.util.spec_from_file_location(
        f"{folder.name}-{Path(inner).stem}", folder / inner
    )
    if made is None or made.loader is None:
        raise UsageError(f"the entry point {show(spec.get('entry_point'))} is no Python file")
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    if not callable(found := getattr(module, name, None)):
        raise UsageError(f"'{inner}' has no function {show(name)}")
    run: Callable[..., Any] = found
    return run


__all__ = ["adapted", "entry_of"]
