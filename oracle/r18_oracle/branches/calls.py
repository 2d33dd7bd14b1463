"""The worker's task for one kernel: call it with a profile's problems, under coverage.py.

If its device is available, it runs as in `r18 verify`. Otherwise only the host code of kernels that
declare host files or device functions is called: `refusal`, `workspace`, `prepare`,
`function_labels`, and what chooses a kernel or a variant for a problem.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from coverage import Coverage

from r18.backend import Backend, Kernel
from r18.backend.registry import load_backend
from r18.errors import BackendUnavailable, described
from r18.graph.ops import Problem
from r18_oracle.generate.corners import runnable, vast
from r18_oracle.judge.declared import declaration
from r18_oracle.loading import kernel_of
from r18_oracle.search.campaign import Announce, run_campaign, walk
from r18_oracle.search.profiles import Profile

MOST_WEIGHTS = 1 << 20
"""Without a device, `prepare` is called for weights of at most this many elements. Larger weights
take longer, but no other branches."""


@dataclass(frozen=True)
class Part:
    """The code that one kernel executed, in the worker that called it.

    problems: how many were accepted by it or one of its choices.
    failed:   the error that stopped it before its last problem; empty without one.
    launched: the labels of the device functions that some problem launches.
    arcs:     the executed branches of each file, as coverage.py's pairs of lines.
    compiled: the files with functions that Numba compiles, relative to the package.
    """

    problems: int
    failed: str
    launched: frozenset[str]
    arcs: dict[str, list[tuple[int, int]]]
    compiled: frozenset[str]


def measure_kernel(
    *,
    backend: str,
    kernel: str,
    how: Profile,
    seed: int,
    network_name: str | None,
    root: Path,
    announce: Announce,
) -> Part:
    """Call one kernel, in a worker; its arguments are those of `r18_oracle.branches.measure`.

    Code that an earlier kernel of the worker caused to be imported or cached is not executed again;
    it counts for the earlier kernel only.
    """
    with _covered(root) as coverage:
        loaded = _loaded(backend)
        chosen = kernel_of(loaded, kernel)
        calls = _Calls(loaded, backend, chosen, how, seed, network_name, announce)
        calls.make()
    data = coverage.get_data()
    return Part(
        calls.problems,
        calls.failed,
        frozenset(calls.launched),
        {file: data.arcs(file) or [] for file in data.measured_files()},
        frozenset(_compiled(root)),
    )


@cache
def _loaded(name: str) -> Backend:
    """The backend of this process, whether its device is available or not."""
    return load_backend(name)


def device_of(backend: Backend) -> str | None:
    """The device that kernels run on; None if only their host code can be called."""
    try:
        return str(backend.probe())
    except BackendUnavailable:
        if any(kernel.host_files or kernel.function_labels() for kernel in backend.kernels()):
            return None
        raise


@dataclass
class _Calls:
    """The calls of one kernel and its choices."""

    backend: Backend
    name: str
    one: Kernel
    how: Profile
    seed: int
    network: str | None
    announce: Announce
    device: str | None = None
    problems: int = 0
    failed: str = ""
    launched: set[str] = field(default_factory=set)

    def make(self) -> None:
        """Make all calls, or those up to the first that fails."""
        try:
            self.device = device_of(self.backend)
            for one in (self.one, *self.backend.variants(self.one)):
                _ = one.variant_of  # only plans read it
            self._host_code()
            if self.device is not None:
                self._campaign()
        except Exception as error:  # any exception of a kernel
            self.failed = self.failed or described(error)

    def _campaign(self) -> None:
        """The kernel's campaign, as in `r18 verify`."""
        report = run_campaign(
            self.backend,
            self.one,
            self.how,
            self.seed,
            backend_name=self.name,
            network_name=self.network,
            announce=self.announce,
        )
        self.problems += report.tally.problems
        if report.finding is not None:
            self.failed = f"{report.finding.check}: {report.finding.message}"

    def _host_code(self) -> None:
        """Call what decides, for each problem of the campaign: what is refused, what is launched,
        and which kernel a plan prefers.
        """
        labels = self.one.function_labels()
        if self.device is not None and not labels:
            return  # the campaign calls all of this
        prepared = set()
        for one, problem in _problems(self.backend, self.one, self.how, self.seed, self.network):
            self.announce(problem, "none", self.seed)
            self.backend.fastest(problem, one.precision.name)
            if one.refusal(problem) is not None:
                continue
            one.workspace(problem)
            if not runnable(problem):
                continue
            self.launched |= {*one.function_labels(problem)}
            if self.device is not None:
                continue
            self.problems += 1
            declaration(one)
            self.backend.variant(one, problem)
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


@contextmanager
def _covered(root: Path) -> Iterator[Coverage]:
    """Record the branches taken in the code under `root`, on all threads."""
    coverage = recorder(root)
    coverage.start()
    try:
        yield coverage
    finally:
        coverage.stop()


def recorder(root: Path) -> Coverage:
    """A coverage recorder that keeps its data in memory."""
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
    return coverage


def _concurrency() -> list[str]:
    """The kinds of concurrency for coverage.py: Numba's simulator runs kernels in greenlets.

    NOTE: Not where there is no simulator: with "greenlet", coverage.py 7 keeps greenlets in a weak
    dictionary, and never returns from its callback in the main thread once threads have ended.
    """
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    return ["thread", "greenlet"] if simulated else ["thread"]


def _compiled(root: Path) -> set[str]:
    """The files with functions that Numba compiles, of the modules that are imported."""
    found = set()
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "/").resolve()
        if path.is_relative_to(root) and any(
            hasattr(thing, "py_func") and thing.__module__ == module.__name__
            for thing in [*vars(module).values()]
        ):
            found.add(path.relative_to(root).as_posix() if path != root else path.name)
    return found
