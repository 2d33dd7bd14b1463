"""Call a backend's kernels with the problems of a profile, under coverage.py.

If their device is available, kernels run as in `r18 verify`. Otherwise only the host code of
kernels that declare host files or device functions is called: `refusal`, `workspace`, `prepare`,
`function_labels`, and the choice of a variant.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from coverage import Coverage

from r18.backend import Backend, Kernel
from r18.backend.registry import installed, load_backend
from r18.errors import BackendUnavailable, R18Error, UsageError
from r18.graph.ops import Problem
from r18_oracle.findings import described
from r18_oracle.generate.corners import runnable, vast
from r18_oracle.judge.declared import declaration
from r18_oracle.mutation.mutants import Target
from r18_oracle.search.campaign import network_problems, run_campaign, walk
from r18_oracle.search.profiles import Profile

MOST_WEIGHTS = 1 << 20
"""Without a device, `prepare` is called for weights of at most this many elements. Larger weights
take longer, but no other branches."""


@dataclass(frozen=True)
class Lines:
    """What was executed of a file: its lines of code, and its branches as (line, next line).

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
    """What a backend's kernels executed on a profile's problems.

    root:     the backend's package, or its single module.
    device:   where the kernels ran; None if only their host code was called.
    problems: how many were accepted by a kernel or one of its choices.
    failed:   the error that stopped a kernel before its last problem, by the kernel's id.
    declared: the labels of device functions, with the ids of the kernels that declare them.
    launched: the labels of those that some problem launches.
    lines:    what was executed of each module under `root`.
    """

    backend: Backend
    root: Path
    device: str | None = None
    problems: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    declared: dict[str, list[str]] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)
    lines: dict[Path, Lines] = field(default_factory=dict)


def measure(
    name: str,
    how: Profile,
    seed: int = 0,
    network: str | None = "resnet18",
    *,
    on_kernel: Callable[[str], None] = lambda kernel: None,
) -> Measured:
    """Call a backend's kernels with every problem of the profile and of the network.

    name: as `load_backend` takes it. The process must be new, since cached functions do not run
    again. Raises what loading raises, `UnknownName` for a network, `BackendUnavailable` if the
    device is not available and no kernel declares host files or device functions, and `UsageError`
    if no problem was accepted.
    """
    if network is not None:
        network_problems(network, how.batches)  # raises for an unknown name
    root = _root(name)
    with _covered(root) as coverage:
        backend = load_backend(name)
        found = Measured(backend, root)
        if Target.of(name).path.resolve() != root:
            module = type(backend).__module__
            raise UsageError(
                f"backend '{name}' is loaded from one package and defined in another, '{module}'\n"
                f"  give it as {module}:{type(backend).__name__}"
            )
        found.device = _device(backend)
        for kernel in backend.kernels():
            on_kernel(kernel.id)
            try:
                _call_host_code(found, kernel, how, seed, network)
                if found.device is not None:
                    _run(found, name, kernel, how, seed, network)
            except Exception as error:  # any exception of a kernel
                found.failed.setdefault(kernel.id, described(error))
    if not found.problems:
        raise UsageError(f"the kernels of '{name}' accepted no problem, so nothing was measured")
    found.lines = _lines(coverage, root)
    return found


def sources(root: Path) -> list[Path]:
    """The Python modules of a package, or the single module."""
    return [root] if root.is_file() else sorted(root.rglob("*.py"))


# -- the kernels ---------------------------------------------------------------------------------


def _device(backend: Backend) -> str | None:
    """The device that kernels run on; None if only their host code can be called."""
    try:
        return str(backend.probe())
    except BackendUnavailable:
        if any(kernel.host_files or kernel.function_labels() for kernel in backend.kernels()):
            return None
        raise


def _run(
    found: Measured, name: str, kernel: Kernel, how: Profile, seed: int, network: str | None
) -> None:
    """The kernel's campaign, as in `r18 verify`."""
    report = run_campaign(found.backend, kernel, how, seed, backend_name=name, network_name=network)
    found.problems += report.tally.problems
    if report.finding is not None:
        found.failed[kernel.id] = f"{report.finding.check}: {report.finding.message}"


def _call_host_code(
    found: Measured, kernel: Kernel, how: Profile, seed: int, network: str | None
) -> None:
    """Call the host code of the kernel and its choices for each problem of their campaign."""
    labels = kernel.function_labels()
    for label in labels:
        found.declared.setdefault(label, []).append(kernel.id)
    if found.device is not None and not labels:
        return  # the campaign calls all of this
    prepared = set()
    for one, problem in _problems(found.backend, kernel, how, seed, network):
        if one.refusal(problem) is not None:
            continue
        one.workspace(problem)
        if not runnable(problem):
            continue
        found.launched |= {*one.function_labels(problem)}
        if found.device is not None:
            continue
        found.problems += 1
        declaration(one)
        found.backend.variant(one, problem)
        if (one.id, problem.op) not in prepared:
            prepared.add((one.id, problem.op))
            _prepare(one, problem)


def _problems(
    backend: Backend, kernel: Kernel, how: Profile, seed: int, network: str | None
) -> list[tuple[Kernel, Problem]]:
    """The problems of a kernel's campaign, each with the kernel or the choice that it is for."""
    found: list[tuple[Kernel, Problem]] = []

    def keep(one: Kernel, problem: Problem, *_: object) -> bool:
        found.append((one, problem))
        return True

    walk(backend, kernel, how, seed, network, keep, whole=True)
    return [*found, *((kernel, problem) for problem in vast(kernel.op))]


def _prepare(kernel: Kernel, problem: Problem) -> None:
    """Pack weights, as far as possible without the device."""
    shapes = [spec.shape for spec in problem.op.weights()]
    if sum(int(np.prod(shape)) for shape in shapes) <= MOST_WEIGHTS:
        with suppress(Exception):  # whatever its allocator raises without a device
            kernel.prepare(problem, tuple(np.ones(shape, np.float32) for shape in shapes))


# -- coverage ------------------------------------------------------------------------------------


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


@contextmanager
def _covered(root: Path) -> Iterator[Coverage]:
    """Record the branches taken in the code under `root`, on all threads."""
    pattern = str(root) if root.is_file() else f"{root}/*"
    coverage = Coverage(
        data_file=None,
        config_file=False,
        branch=True,
        include=[pattern],
        concurrency=_concurrency(),
    )
    # Only an entry with a reason may silence a branch, not a `pragma`.
    coverage.set_option("report:exclude_lines", [r"if (typing\.)?TYPE_CHECKING:"])
    coverage.set_option("report:partial_branches", [])
    coverage.start()
    try:
        yield coverage
    finally:
        coverage.stop()


def _concurrency() -> list[str]:
    """What coverage.py has to tell apart: Numba's simulator runs kernels in greenlets."""
    return ["thread", "greenlet"] if importlib.util.find_spec("greenlet") else ["thread"]


def _lines(coverage: Coverage, root: Path) -> dict[Path, Lines]:
    data = coverage.get_data()
    files = {str(path): path for path in sources(root)}
    for file in files:
        data.touch_file(file)  # so that a module that was already imported is reported
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
