"""The oracle on one mutant, in a forked child of the worker.

A worker stays warm: it has imported PyTorch, Hypothesis, the oracle and the backend's imports, and
has computed nothing. For each mutant it copies the backend's package with the change and forks; the
child imports the copy. The working tree is never touched.

A child that has examined a change of device code is reused for the next such change, since both run
the same Python and initialising a device takes longer than catching most mutants. It is reused only
as long as its findings are wrong values. Any other finding is repeated in a new child, so that it
is not attributed to the wrong mutant.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from r18.backend import Backend, Kernel
from r18.backend.registry import load_backend
from r18.errors import R18Error, UsageError, described
from r18.graph.ops import Problem
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed, Finding
from r18_oracle.mutation.mutants import Mutant, Target
from r18_oracle.mutation.process import Ended, Process, Say
from r18_oracle.ptx.accepted import Accepted
from r18_oracle.ptx.check import first_violation
from r18_oracle.ptx.parse import PtxError
from r18_oracle.search.campaign import run_campaign, search
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.search.profiles import Profile
from r18_oracle.search.verify import SIMULATED_NETWORK


@dataclass(frozen=True)
class Question:
    """How mutants are examined.

    root: the folder of the copies. network: the network whose problems to include, or None. seed,
    how: see `run_campaign`. architecture: the device's. codes: for each unchanged compiled kernel,
    by id, its machine code for that architecture. deadline: on the clock of `time.monotonic`; after
    it a trial ends without a result.
    """

    target: Target
    root: Path
    how: Profile
    seed: int
    network: str | None
    architecture: str = ""
    codes: Mapping[str, str] = field(default_factory=dict)
    deadline: float = math.inf

    @property
    def cache(self) -> Path:
        """The folder where the unchanged kernels cache their machine code."""
        return self.root / "cache"


@dataclass(frozen=True)
class _Request:
    """A child's request: the copy's root and cache, the kernels to search, and the precisions in
    which to run the network."""

    question: Question
    root: Path
    cache: Path
    kernels: tuple[str, ...]
    precisions: tuple[str, ...]
    compiled: bool
    silence_seconds: int


@dataclass(frozen=True)
class Passed:
    """Unchanged kernels without a finding. silence: the longest of a call, in seconds."""

    silence: float


COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences by which Numba colours a compiler's messages on a terminal."""

INVALID = "invalid"
"""The check of a mutant that does not compile."""
SAME_CODE = "same code"
"""The check of a mutant that compiles to the machine code of the original and is therefore
equivalent (Papadakis et al., Trivial compiler equivalence, ICSE 2015)."""
SAME_REASON = "It compiles to the same machine code."
PTXCHECK = "ptxcheck"
"""The check of a mutant whose PTX violates a rule that `r18 ptxcheck` applies."""
LATE = "late"
"""The check of a mutant that was not examined before the deadline."""

NETWORK = SIMULATED_NETWORK
"""The network that runs host code after its kernels: the smallest that has every layer."""
SAMPLES = 2
"""The network's images."""
GLANCE = 4
"""Problems drawn for every kernel before any is searched; they catch most mutants."""

WRONG_VALUES = {
    "exact",
    "impulse",
    "bound",
    "edges",
    "full_write",
    "repeatability",
    "stale_memory",
    "order",
    "batch_invariance",
    "sample_position",
}
"""Checks whose findings leave a process and its device intact."""
MOST_ASKED = 50
"""A child is replaced after this many requests, since each copy leaves something in memory."""

COMPILER_ERRORS = {
    "TypingError",
    "LoweringError",
    "UnsupportedError",
    "UnsupportedBytecodeError",
    "UnsupportedParforsError",
    "ConstantInferenceError",
    "RequireLiteralValue",
    "CompilerError",
    "VerificationError",
    "NotDefinedError",
}
"""Numba's errors for code that does not compile; a call raises them."""


def trial(
    announce: object,
    question: Question,
    mutant: Mutant | None,
    kernels: Sequence[str],
    silence_seconds: int,
    precisions: Sequence[str] = (),
) -> Finding | Passed | None:
    """The first finding on these kernels, or None; `Passed` for unchanged kernels (`mutant` None).

    kernels: in the order of examination. silence_seconds: the time limit of one call. precisions:
    those in which the network `NETWORK` is run after the kernels.
    A process that dies, a failing import and an exception in the oracle are findings too. Findings
    of the checks `INVALID`, `SAME_CODE` and `LATE` are not faults: the mutant was not examined.
    Raises `UsageError` on a system without `fork`, and `R18Error` if this machinery itself fails.
    """
    if not hasattr(os, "fork"):
        raise UsageError("mutation runs need a system that can fork: Linux or macOS")
    said: list[Any] = [Ended(LATE, "there was no time for it")]
    silence = 0.0
    if time.monotonic() < question.deadline:
        _warm_up(question.target.package)
        compiled = mutant is not None and mutant.compiled
        with tempfile.TemporaryDirectory(dir=question.root) as folder:
            here = Path(folder)
            changes = {} if mutant is None else {mutant.file: mutant.source}
            root = copied(question.target, here, changes)
            cache_folder = question.cache if mutant is None else _own_cache(question.cache, here)
            how = tuple(kernels), tuple(precisions), compiled, silence_seconds
            request = _Request(question, root, cache_folder, *how)
            keep = compiled or (mutant is None and bool(question.codes))
            said, silence = _asked(request, keep=keep)
    result = said[-1]
    if isinstance(result, Ended):
        problem, kind, seed = next((s for s in reversed(said[:-1])), (None, "none", question.seed))
        backend = question.target.backend
        return Finding(result.check, backend, "", problem, kind, seed, result.message)
    if isinstance(result, str):
        raise R18Error(f"the mutation run itself failed: {result}")
    assert result is None or isinstance(result, Finding)
    return Passed(silence) if result is None and mutant is None else result


# -- the child, from outside -------------------------------------------------------------------

_kept: list[Process] = []
"""The child that examines changes of device code, if there is one."""


def _asked(request: _Request, *, keep: bool) -> tuple[list[Any], float]:
    """A child's messages and its longest silence. keep: reuse the child if it is still intact."""
    if not keep:
        process = Process(_examine)
        try:
            return _heard(process, request), process.silence
        finally:
            process.end()
    process = _kept.pop() if _kept else Process(_examine)
    said: list[Any] = []
    try:
        said = _heard(process, request)
    finally:
        trusted = bool(said) and _leaves_no_trace(said[-1])
        if trusted and process.asked < MOST_ASKED:
            _kept.append(process)
        else:
            process.end()
    doubtful = not trusted and process.asked > 1 and not _is_late(said[-1])
    return _asked(request, keep=True) if doubtful else (said, process.silence)


def _heard(process: Process, request: _Request) -> list[Any]:
    said = process.ask(request, _alarm(request.question, request.silence_seconds))
    if isinstance(said[-1], Ended) and said[-1].check == "hang":
        if time.monotonic() >= request.question.deadline:
            return [Ended(LATE, "its time was up")]
        said[-1] = Ended("hang", f"{said[-1].message} after {request.silence_seconds} s")
    return said


def _leaves_no_trace(result: object) -> bool:
    if isinstance(result, Finding):
        return result.check in WRONG_VALUES
    return result is None or (isinstance(result, Ended) and result.check in (INVALID, SAME_CODE))


def _is_late(result: object) -> bool:
    return isinstance(result, Ended) and result.check == LATE


def _alarm(question: Question, silence_seconds: float) -> int:
    """Seconds until a silent child is ended: at most the rest of the run."""
    left = question.deadline - time.monotonic()
    return max(1, math.ceil(min(silence_seconds, left)))


# -- the child, from inside --------------------------------------------------------------------


class _TimeIsUp(BaseException):
    """The deadline has passed. A `BaseException`, which Hypothesis does not catch."""


def _examine(request: _Request, say: Say) -> Finding | Ended | str | None:
    """Import the copy and search its kernels; for device code, only those whose code changed.

    Returns a finding, None, how the trial ended, or a message if the run itself is at fault.
    """
    sys.dont_write_bytecode = True
    target, root = request.question.target, request.root
    os.environ["R18_CACHE"] = str(request.cache)
    _forget(target.package)
    sys.path[:] = [p for p in sys.path if not Path(p).is_relative_to(request.question.root)]
    sys.path.insert(0, str(root.parent))
    importlib.invalidate_caches()
    try:
        backend = load_backend(target.backend)
    except BaseException as error:
        return tidied(Ended("import", described(error)), request.question.root)
    strays = [n for n in _modules(target.package) if not _comes_from(sys.modules[n], root)]
    if strays:
        return f"{', '.join(strays)} did not come from the copy in {root}"

    def announcing(silence_seconds: float) -> Announce:
        def announce(problem: Problem | None, kind: str, seed: int) -> None:
            if time.monotonic() >= request.question.deadline:
                raise _TimeIsUp
            signal.alarm(_alarm(request.question, silence_seconds))
            say((problem, kind, seed))

        return announce

    announce = announcing(request.silence_seconds)
    # No kernel's pace tells how long a program of them all is compiled.
    patient = announcing(request.question.how.call_seconds)
    try:
        return tidied(_search(request, backend, announce, patient), request.question.root)
    except _TimeIsUp:
        return Ended(LATE, "its time was up")
    except Exception as error:  # it would end `r18 verify` too, so the mutant is caught
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Ended("error", f"{described(error)} ({where})")


Announce = Callable[[Problem | None, str, int], None]


def _search(
    request: _Request, backend: Backend, announce: Announce, patient: Announce
) -> Finding | Ended | None:
    """A glance at every kernel that the mutant changes, then a full campaign on each, then the
    order of memory accesses in the PTX of each, which no value may show. Finally a network: only it
    uses captured launches."""
    if not request.compiled:
        backend.probe()  # from now on it lists only what its device runs
    found = {kernel.id: kernel for kernel in backend.kernels()}
    question = request.question
    changed: list[Kernel] = []
    for name in request.kernels:
        if name not in found:
            return Ended("kernels", f"the backend no longer lists {name}")
        kernel = found[name]
        if request.compiled:
            announce(None, "none", 0)
            try:
                if not _changed(question, kernel):
                    continue
            except R18Error as error:
                return Ended(INVALID, str(error))
        changed.append(kernel)
        if len(request.kernels) > 1 and (finding := _glance(question, backend, kernel, announce)):
            return _about(finding)
    for kernel in changed:
        report = run_campaign(
            backend,
            kernel,
            question.how,
            question.seed,
            backend_name=question.target.backend,
            network_name=question.network,
            announce=announce,
        )
        if report.finding is not None:
            return _about(report.finding)
    for kernel in changed:
        if finding := _disordered(question, kernel, announce):
            return finding
    for precision in request.precisions:
        if failed := _in_network(question, precision, patient):
            return failed
    return None if changed or not request.compiled else Ended(SAME_CODE, SAME_REASON)


def _changed(question: Question, kernel: Kernel) -> bool:
    """Whether the kernel's machine code differs from the original's; raises compiler errors."""
    if kernel.id not in question.codes or not kernel.targets:
        return True
    return kernel.machine_code(question.architecture) != question.codes[kernel.id]


def _glance(
    question: Question, backend: Backend, kernel: Kernel, announce: Announce
) -> Finding | None:
    """The finding of the first of a few drawn problems that shows a fault, not reduced."""

    def attempt(
        problem: Problem, data_seed: int, rounding: str, light: bool, only: str | None
    ) -> bool:
        return examine(
            backend,
            kernel,
            problem,
            data_seed,
            rounding=rounding,
            light=light,
            backend_name=question.target.backend,
            announce=announce,
            only=only,
        )

    how = replace(question.how, examples=min(GLANCE, question.how.examples), shrink_seconds=0)
    try:
        search(kernel, how, question.seed, attempt)
    except Failed as failure:
        return failure.finding
    return None


def _disordered(question: Question, kernel: Kernel, announce: Announce) -> Finding | None:
    """The first violation of `r18 ptxcheck` in the kernel, if PTX is known and understood."""
    if not question.architecture:
        return None

    def on_function(label: str) -> None:
        announce(None, "none", 0)

    try:
        accepted = Accepted.of(question.target.backend)
        found = first_violation(
            kernel, question.architecture, question.network, accepted, on_function
        )
    except PtxError:
        return None
    if found is None:
        return None
    where = question.target.backend, kernel.id, None, "none", question.seed
    return Finding(PTXCHECK, *where, str(found))


def _in_network(question: Question, precision: str, announce: Announce) -> Finding | Ended | None:
    """The first finding of a whole network in a precision."""
    run = NetworkRun(NETWORK, "synthetic", precision, "all", SAMPLES, question.seed)
    report = run.on(question.target.backend, announce)
    if isinstance(report, Finding):
        return _about(report)
    return next(iter(report.findings), None)


def _about(finding: Finding) -> Finding | Ended:
    """The finding, or `INVALID` if it is a compiler error."""
    error = re.match(r"raised (\w+)\b", finding.message)
    if finding.check == "runs" and error and error[1] in COMPILER_ERRORS:
        return Ended(INVALID, " ".join(finding.message.split()))
    return finding


def tidied(found: Finding | Ended | None, root: Path) -> Finding | Ended | None:
    """What was found with a message for a record: files by their place in the package, no colours.

    root: the folder of the copies, whose name differs from run to run.
    """
    if found is None:
        return None
    message = re.sub(rf"[^\s'\"(]*{re.escape(root.name)}/\w+/", "", found.message)
    return replace(found, message=COLOURS.sub("", message))


# -- the copy ----------------------------------------------------------------------------------


def copied(target: Target, folder: Path, texts: Mapping[str, str]) -> Path:
    """Copy the package or module into `folder` and replace these files' texts; returns its path."""
    root = folder / target.path.name
    folder.mkdir(exist_ok=True)
    if target.path.is_file():
        root.write_bytes(target.path.read_bytes())
    else:
        shutil.copytree(target.path, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in texts.items():
        (root if root.is_file() else root / name).write_text(text, "utf-8")
    return root


def _own_cache(unchanged: Path, folder: Path) -> Path:
    """A mutant's cache: a copy of the unchanged kernels' cache, deleted with the mutant."""
    here = folder / "cache"
    if unchanged.is_dir():
        shutil.copytree(unchanged, here, copy_function=os.link)  # files there are only replaced
    return here


def _modules(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


def _comes_from(module: Any, root: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(root)


@cache
def _warm_up(package: str) -> None:
    """Import everything that the package imports, then forget the package itself."""
    torch.set_num_threads(1)
    importlib.import_module(package)
    _forget(package)
    gc.collect()
    gc.freeze()


def _forget(package: str) -> None:
    for name in _modules(package):
        del sys.modules[name]
