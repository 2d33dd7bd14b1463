"""One mutant before the oracle, in a process of its own.

A worker stays warm: it has imported PyTorch, Hypothesis, the oracle, and what the backend imports,
and has computed nothing. For each mutant it makes a copy of the backend's package with the one
change in it, forks, and the child imports that copy. What a mutant breaks dies with the child; a
child that is silent for too long is ended by its own alarm. The working tree is never touched.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from r18.backend import Backend, CompiledKernel, Kernel
from r18.errors import R18Error, UsageError
from r18.ops import Problem
from r18.registry import load_backend
from r18_oracle.campaign import Profile, run_campaign
from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant, Target


@dataclass(frozen=True)
class Question:
    """How mutants are examined.

    root: where the copies are made. network: whose problems to include, or None. seed, how: as
    `run_campaign` takes them. architecture, codes: the device's, and the machine code of each
    unchanged kernel for it, by id, of kernels that are compiled.
    """

    target: Target
    root: Path
    how: Profile
    seed: int
    network: str | None
    architecture: str = ""
    codes: Mapping[str, str] = field(default_factory=dict)


def trial(
    announce: object,
    question: Question,
    mutant: Mutant | None,
    kernels: Sequence[str],
    silence_seconds: int,
) -> Finding | None:
    """The first finding on these kernels, or None; `mutant` None changes nothing.

    silence_seconds: the longest that one call may take. That the process dies, or that an import
    or the oracle itself fails, is a finding too; what goes wrong in this machinery is raised.
    The checks `INVALID` and `SAME_CODE` say that there was nothing to find.
    """
    if not hasattr(os, "fork"):
        raise UsageError("mutation runs need a system that can fork: Linux or macOS")
    _warm_up(question.target.package)
    compiled = mutant is not None and mutant.compiled
    with tempfile.TemporaryDirectory(dir=question.root) as folder:
        root = _copy(question.target, Path(folder), mutant)
        said = _forked(
            silence_seconds,
            lambda say: _examine(question, root, kernels, compiled, silence_seconds, say),
        )
    result = said[-1]
    if isinstance(result, _Ended):
        problem, kind, seed = next((s for s in reversed(said[:-1])), (None, "none", question.seed))
        backend = question.target.backend
        return Finding(result.check, backend, "", problem, kind, seed, result.message)
    if isinstance(result, str):
        raise R18Error(f"the mutation run itself failed: {result}")
    assert result is None or isinstance(result, Finding)
    return result


@dataclass(frozen=True)
class _Ended:
    """How a child ended that came to no result of the oracle's."""

    check: str
    message: str


INVALID = "invalid"
"""The check of a mutant that does not compile: it is no program."""
SAME_CODE = "same code"
"""The check of a mutant that compiles to the machine code of the original: equivalent, and proved
so (Papadakis et al., Trivial compiler equivalence, ICSE 2015)."""
SAME_REASON = "It compiles to the same machine code."
DONE = 33
"""The exit code of a child that has said its result; no mutant leaves with it by chance."""

Say = Callable[[Any], None]
"""The child's way to speak: (problem, kind, seed) before each call, and last its result: a
`Finding`, None, `_Ended`, or a sentence about what is wrong with the run itself."""


def _examine(
    question: Question,
    root: Path,
    kernels: Sequence[str],
    compiled: bool,
    silence_seconds: int,
    say: Say,
) -> Finding | _Ended | str | None:
    """Import the copy and search its kernels; after a change of device code, those it changed."""
    sys.dont_write_bytecode = True
    os.environ["R18_CACHE"] = str(question.root / "cache")  # what mutants compile to goes with it
    sys.path.insert(0, str(root.parent))
    target = question.target
    try:
        backend = load_backend(target.backend)
    except BaseException as error:
        return _Ended("import", f"{type(error).__name__}: {error}")
    strays = [n for n in _modules(target.package) if not _comes_from(sys.modules[n], root)]
    if strays:
        return f"{', '.join(strays)} did not come from the copy in {root}"

    def announce(problem: Problem | None, kind: str, seed: int) -> None:
        signal.alarm(silence_seconds)
        say((problem, kind, seed))

    try:
        return _search(question, backend, kernels, compiled, announce)
    except Exception as error:  # it would end `r18 verify` too: it is seen
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return _Ended("error", f"{type(error).__name__}: {error} ({where})")


def _search(
    question: Question,
    backend: Backend,
    kernels: Sequence[str],
    compiled: bool,
    announce: Callable[[Problem | None, str, int], None],
) -> Finding | _Ended | None:
    found = {kernel.id: kernel for kernel in backend.kernels()}
    searched = 0
    for name in kernels:
        if name not in found:
            return _Ended("kernels", f"the backend no longer lists {name}")
        if compiled:
            announce(None, "none", 0)
            try:
                if not _changed(question, found[name]):
                    continue
            except R18Error as error:
                return _Ended(INVALID, str(error))
        searched += 1
        report = run_campaign(
            backend,
            found[name],
            question.how,
            question.seed,
            backend_name=question.target.backend,
            network_name=question.network,
            announce=announce,
        )
        if report.finding is not None:
            return report.finding
    return None if searched else _Ended(SAME_CODE, SAME_REASON)


def _changed(question: Question, kernel: Kernel) -> bool:
    """Whether it compiles to other machine code than the unchanged one; raises if it does not."""
    if kernel.id not in question.codes or not isinstance(kernel, CompiledKernel):
        return True
    return kernel.machine_code(question.architecture) != question.codes[kernel.id]


# -- the copy ----------------------------------------------------------------------------------


def _copy(target: Target, folder: Path, mutant: Mutant | None) -> Path:
    """A copy of the package or module under `folder`, with the mutant's file in it; its path."""
    root = folder / target.path.name
    if target.path.is_file():
        root.write_bytes(target.path.read_bytes())
    else:
        shutil.copytree(target.path, root, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        path = root if root.is_file() else root / mutant.file
        path.write_text(mutant.source, "utf-8")
    return root


def _modules(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


def _comes_from(module: Any, root: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(root)


# -- the child ---------------------------------------------------------------------------------


@cache
def _warm_up(package: str) -> None:
    """Import all that the package imports, then forget the package."""
    torch.set_num_threads(1)
    importlib.import_module(package)
    for name in _modules(package):
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def _forked(silence_seconds: int, work: Callable[[Say], Any]) -> list[Any]:
    """All that a child says; the last is what `work` returned, or how the child ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_and_exit(silence_seconds, work, write)
    os.close(write)
    said: list[Any] = []
    with os.fdopen(read, "rb") as pipe:
        try:
            while True:
                said.append(pickle.load(pipe))
        except (EOFError, pickle.UnpicklingError):  # the second: it died in the middle of a word
            pass
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == DONE:
        return said
    if code == -signal.SIGALRM:
        return [*said, _Ended("hang", f"a call had not ended after {silence_seconds} s")]
    if code < 0:
        return [*said, _Ended("crash", f"died of {signal.Signals(-code).name}")]
    return [*said, _Ended("crash", f"exited with code {code}")]


def _run_and_exit(silence_seconds: int, work: Callable[[Say], Any], pipe: int) -> NoReturn:
    """The child's whole life; the alarm's default action ends it, whatever it is doing."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(silence_seconds)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with os.fdopen(pipe, "wb") as out:

            def say(words: Any) -> None:
                out.write(pickle.dumps(words))
                out.flush()

            say(work(say))
        os._exit(DONE)
    finally:  # whatever was raised must not run the parent's code in the child
        os._exit(97)
