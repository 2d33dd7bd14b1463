"""Measure in worker processes which code of a backend's kernels the problems of a profile
execute."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r18.backend import Backend, Kernel
from r18.backend.registry import installed, load_backend
from r18.errors import R18Error, UsageError
from r18.machine import caching_in
from r18_oracle.branches.calls import Part, device_of, measure_kernel, recorder
from r18_oracle.mutation.mutants import Target
from r18_oracle.search.campaign import network_problems
from r18_oracle.search.profiles import Profile
from r18_oracle.search.tasks import kernel_job
from r18_oracle.search.worker import run_jobs


@dataclass(frozen=True)
class Lines:
    """The executed part of a file: its lines of code, and its branches as (line, next line).

    The next line of a branch that leaves a function is negative.
    """

    ran: frozenset[int]
    missed: frozenset[int]
    taken: frozenset[tuple[int, int]]
    untaken: frozenset[tuple[int, int]]

    @property
    def code(self) -> frozenset[int]:
        return self.ran | self.missed


@dataclass
class Measured:
    """The code of a backend's kernels that a profile's problems executed.

    root:     the backend's package, or its single module.
    device:   where the kernels ran; None if only their host code was called.
    problems: how many were accepted by a kernel or one of its choices.
    failed:   the error that stopped a kernel before its last problem, by the kernel's id.
    declared: the labels of device functions, with the ids of the kernels that declare them.
    launched: the labels of those that some problem launches.
    compiled: the files with functions that Numba compiles, relative to `root`.
    lines:    the executed part of each module under `root`.
    """

    backend: Backend
    root: Path
    device: str | None = None
    problems: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    declared: dict[str, list[str]] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)
    compiled: set[str] = field(default_factory=set)
    lines: dict[Path, Lines] = field(default_factory=dict)


def measure(
    name: str,
    how: Profile,
    seed: int = 0,
    network: str | None = "resnet18",
    *,
    workers: int | None = None,
    on_kernel: Callable[[str], None] = lambda kernel: None,
) -> Measured:
    """Call a backend's kernels with every problem of the profile and of the network.

    name: as `load_backend` takes it. workers: the processes that call them; by default one per
    core. Raises what loading raises, `UnknownName` for a network, `BackendUnavailable` if the
    device is not available and no kernel declares host files or device functions, and `UsageError`
    if no problem was accepted.
    """
    if network is not None:
        network_problems(network, how.batches)  # raises for an unknown name
    root = _root(name)
    backend = load_backend(name)
    if Target.of(name).path.resolve() != root:
        module = type(backend).__module__
        raise UsageError(
            f"backend '{name}' is loaded from one package and defined in another, '{module}'\n"
            f"  give it as {module}:{type(backend).__name__}"
        )
    found = Measured(backend, root, device_of(backend))
    kernels = {kernel.id: kernel for kernel in backend.kernels()}
    jobs = [kernel_job(measure_kernel, name, one, how, seed, network, root=root) for one in kernels]
    parts: dict[str, Part] = {}
    # Code that compiles a kernel runs only if no compiled code is found.
    with tempfile.TemporaryDirectory(prefix="r18-") as empty, caching_in(Path(empty)):
        for outcome in run_jobs(
            jobs, workers=workers, on_progress=lambda job, problem: on_kernel(job.kernel)
        ):
            if isinstance(outcome.result, Exception):
                raise outcome.result
            if finding := outcome.finding:
                found.failed[outcome.job.kernel] = f"{finding.check}: {finding.message}"
            else:
                parts[outcome.job.kernel] = outcome.result
    _merge(found, {kernel: parts[one] for one, kernel in kernels.items() if one in parts})
    return found


def _merge(found: Measured, parts: dict[Kernel, Part]) -> None:
    """Add the code that each kernel executed. Raises `UsageError` if no problem was accepted."""
    arcs: dict[str, set[tuple[int, int]]] = {}
    for kernel, part in parts.items():
        found.problems += part.problems
        if part.failed:
            found.failed[kernel.id] = part.failed
        for label in kernel.function_labels():
            found.declared.setdefault(label, []).append(kernel.id)
        found.launched |= part.launched
        found.compiled |= part.compiled
        for file, pairs in part.arcs.items():
            arcs.setdefault(file, set()).update(pairs)
    if not found.problems and not found.failed:
        raise UsageError(
            f"the kernels of '{found.backend.name}' accepted no problem, so nothing was measured"
        )
    found.lines = _lines(found.root, arcs)


def sources(root: Path) -> list[Path]:
    """The Python modules of a package, or the single module."""
    return [root] if root.is_file() else sorted(root.rglob("*.py"))


def _root(name: str) -> Path:
    """The top-level package or module of a backend, found without importing it."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # as `load_backend` does
    module = name.partition(":")[0]
    if ":" not in name:
        points = installed()
        if name not in points:
            load_backend(name)  # raises, with the known names
        module = points[name].module
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        load_backend(name)  # raises, with the cause
        raise UsageError(f"backend '{name}' has no source code, so it has no branches")
    origin = Path(spec.origin).resolve()
    return origin.parent if spec.submodule_search_locations else origin


def _lines(root: Path, arcs: Mapping[str, Collection[tuple[int, int]]]) -> dict[Path, Lines]:
    """The lines and branches of every module, from the pairs of lines that were executed."""
    coverage = recorder(root)
    data = coverage.get_data()
    data.add_arcs(arcs)
    files = {str(path): path for path in sources(root)}
    for file in files:
        data.touch_file(file)  # so that a module that was never imported is reported
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        coverage.json_report(morfs=[*files], outfile=str(out))
        report: dict[str, Any] = json.loads(out.read_text("utf-8"))["files"]
    found = {}
    for name, said in report.items():
        found[Path(name).resolve()] = Lines(
            frozenset(said["executed_lines"]),
            frozenset(said["missing_lines"]),
            frozenset((a, b) for a, b in said["executed_branches"]),
            frozenset((a, b) for a, b in said["missing_branches"]),
        )
    if missing := sorted({*files.values()} - found.keys()):
        raise R18Error(f"coverage.py reports nothing about {missing[0]}")
    return found
