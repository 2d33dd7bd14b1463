"""One mutant before the oracle, in a process that is not the worker's own.

A worker stays warm: it has imported PyTorch, Hypothesis, the oracle, and what the backend imports,
and has computed nothing. For each mutant it makes a copy of the backend's package with the one
change in it, and forks; the child imports that copy. The working tree is never touched.

After a change of device code the child goes on to the next such change: the Python that it runs is
the same, and a device takes longer to be ready than most mutants to be caught. It goes on as long
as all that it saw were wrong values; what else it finds is found again in a new one, or nobody
would know of which mutant it comes.
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
from r18.errors import R18Error, UsageError
from r18.graph.ops import Problem
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed, Finding
from r18_oracle.mutation.mutants import Mutant, Target
from r18_oracle.mutation.process import Ended, Process, Say
from r18_oracle.search.campaign import run_campaign, search
from r18_oracle.search.profiles import Profile


@dataclass(frozen=True)
class Question:
    """How mutants are examined.

    root: where the copies are made. network: whose problems to include, or None. seed, how: as
    `run_campaign` takes them. architecture, codes: the device's, and the machine code of each
    unchanged kernel for it, by id, of kernels that are compiled. deadline: by `time.monotonic`,
    after which a trial ends without a result.
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
        """Where the unchanged kernels keep what they are compiled to."""
        return self.root / "cache"


@dataclass(frozen=True)
class _Request:
    """What a child is asked: the copy's root and its cache, and which kernels to search."""

    question: Question
    root: Path
    cache: Path
    kernels: tuple[str, ...]
    compiled: bool
    silence_seconds: int


@dataclass(frozen=True)
class Passed:
    """The unchanged kernels, when nothing was found; silence: the longest of a call, in seconds."""

    silence: float


INVALID = "invalid"
"""The check of a mutant that does not compile: it is no program."""
SAME_CODE = "same code"
"""The check of a mutant that compiles to the machine code of the original: equivalent, and proved
so (Papadakis et al., Trivial compiler equivalence, ICSE 2015)."""
SAME_REASON = "It compiles to the same machine code."
LATE = "late"
"""The check of a mutant for which there was no time."""
UNHEARD = (INVALID, SAME_CODE, LATE)
"""The checks that say that there was nothing to find."""

GLANCE = 4
"""Drawn problems that every kernel is shown before any is searched: most mutants are caught so."""

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
"""Findings that leave a process and its device as they were."""
MOST_ASKED = 50
"""A child that was asked so often is replaced: what copies leave behind in it adds up."""

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
"""Numba's, for what it does not compile; a call raises them."""


def trial(
    announce: object,
    question: Question,
    mutant: Mutant | None,
    kernels: Sequence[str],
    silence_seconds: int,
) -> Finding | Passed | None:
    """The first finding on these kernels, or None; `mutant` None changes nothing, and has `Passed`.

    kernels: in the order in which to look. silence_seconds: the longest that one call may take.
    That the process dies, or that an import or the oracle itself fails, is a finding too; what
    goes wrong in this machinery is raised. The checks `UNHEARD` say that there was nothing to find.
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
            how = tuple(kernels), compiled, silence_seconds
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
"""The one that examines changes of device code, when there is one."""


def _asked(request: _Request, *, keep: bool) -> tuple[list[Any], float]:
    """What a child says, and its longest silence; it may be kept if there is no doubt about it."""
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
    said = process.ask(request, _alarm(request))
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


def _alarm(request: _Request) -> int:
    """Seconds until a child that says nothing is ended: what a call may take, or the run."""
    left = request.question.deadline - time.monotonic()
    return request.silence_seconds if left > request.silence_seconds else max(1, math.ceil(left))


# -- the child, from inside --------------------------------------------------------------------


class _TimeIsUp(BaseException):
    """The run's; Hypothesis lets it through, as it does KeyboardInterrupt."""


def _examine(request: _Request, say: Say) -> Finding | Ended | str | None:
    """Import the copy and search its kernels; after a change of device code, those it changed.

    The result is a finding or none, how it ended, or a sentence about what is wrong with the run.
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
        return Ended("import", f"{type(error).__name__}: {error}")
    strays = [n for n in _modules(target.package) if not _comes_from(sys.modules[n], root)]
    if strays:
        return f"{', '.join(strays)} did not come from the copy in {root}"

    def announce(problem: Problem | None, kind: str, seed: int) -> None:
        if time.monotonic() >= request.question.deadline:
            raise _TimeIsUp
        signal.alarm(_alarm(request))
        say((problem, kind, seed))

    try:
        return _search(request, backend, announce)
    except _TimeIsUp:
        return Ended(LATE, "its time was up")
    except Exception as error:  # it would end `r18 verify` too: it is seen
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Ended("error", f"{type(error).__name__}: {error} ({where})")


Announce = Callable[[Problem | None, str, int], None]


def _search(request: _Request, backend: Backend, announce: Announce) -> Finding | Ended | None:
    """A glance at every kernel that the mutant changes, then at each all that a campaign shows."""
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
    return None if changed else Ended(SAME_CODE, SAME_REASON)


def _changed(question: Question, kernel: Kernel) -> bool:
    """Whether it compiles to other machine code than the unchanged one; raises if it does not."""
    if kernel.id not in question.codes or not kernel.targets:
        return True
    return kernel.machine_code(question.architecture) != question.codes[kernel.id]


def _glance(
    question: Question, backend: Backend, kernel: Kernel, announce: Announce
) -> Finding | None:
    """The first of a few drawn problems that shows a fault; it is not made smaller."""

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


def _about(finding: Finding) -> Finding | Ended:
    """The finding, or that there was no program to find anything about."""
    error = re.match(r"raised (\w+):", finding.message)
    if finding.check == "runs" and error and error[1] in COMPILER_ERRORS:
        return Ended(INVALID, " ".join(finding.message.split()))
    return finding


# -- the copy ----------------------------------------------------------------------------------


def copied(target: Target, folder: Path, texts: Mapping[str, str]) -> Path:
    """A copy of the package or module under `folder`, with these texts in its files; its path."""
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
    """A mutant's cache: it holds what the unchanged kernels have in theirs, and goes with it."""
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
    """Import all that the package imports, then forget the package."""
    torch.set_num_threads(1)
    importlib.import_module(package)
    _forget(package)
    gc.collect()
    gc.freeze()


def _forget(package: str) -> None:
    for name in _modules(package):
        del sys.modules[name]
