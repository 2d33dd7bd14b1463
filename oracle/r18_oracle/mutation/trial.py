"""One mutant before the oracle, in a process of its own.

A worker stays warm: it has imported PyTorch, Hypothesis, the oracle, and what the backend imports,
and has computed nothing. For each mutant it makes a copy of the backend's package with the one
change in it, forks, and the child imports that copy. What a mutant breaks dies with the child; a
child that takes too long is ended by its own alarm. The working tree is never touched.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from r18.backend import Backend
from r18.errors import R18Error, UsageError
from r18.registry import load_backend
from r18_oracle.campaign import Profile, run_campaign
from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant, Target


@dataclass(frozen=True)
class Question:
    """How mutants are examined.

    root: where the copies are made. network: whose problems to include, or None. seed, how: as
    `run_campaign` takes them.
    """

    target: Target
    root: Path
    how: Profile
    seed: int
    network: str | None


def trial(
    announce: object,
    question: Question,
    mutant: Mutant | None,
    kernels: Sequence[str],
    seconds: int,
) -> Finding | None:
    """The first finding on these kernels in so many seconds; `mutant` None changes nothing.

    First every kernel on drawn problems, then every kernel on the network's. That an import or
    the oracle itself fails is a finding too; what goes wrong in this machinery is raised.
    """

    def search(backend: Backend, root: Path) -> Finding | None:
        found = {kernel.id: kernel for kernel in backend.kernels()}
        missing = [name for name in kernels if name not in found]
        if missing:
            return _finding(question, "kernels", missing[0], "the backend no longer lists it")
        passes = [(question.how, None), (replace(question.how, examples=1), question.network)]
        for how, network in passes if question.network else passes[:1]:
            for name in kernels:
                report = run_campaign(
                    backend,
                    found[name],
                    how,
                    question.seed,
                    backend_name=question.target.backend,
                    network_name=network,
                )
                if report.finding is not None:
                    return report.finding
        return None

    result = _isolated(question, mutant, seconds, search)
    if isinstance(result, _Ended):
        return _finding(question, result.check, "", result.message)
    assert result is None or isinstance(result, Finding)
    return result


def _finding(question: Question, check: str, kernel: str, message: str) -> Finding:
    backend = question.target.backend
    return Finding(check, backend, kernel, None, "none", question.seed, message)


@dataclass(frozen=True)
class _Ended:
    """How a child ended that came to no result of its own."""

    check: str
    message: str


Work = Callable[[Backend, Path], Any]


def _isolated(question: Question, mutant: Mutant | None, seconds: int, work: Work) -> Any:
    """`work` on the backend of a copy of the package with the change, in a child."""
    if not hasattr(os, "fork"):
        raise UsageError("mutation runs need a system that can fork: Linux or macOS")
    _warm_up(question.target.package)
    with tempfile.TemporaryDirectory(dir=question.root) as folder:
        root = _copy(question.target, Path(folder), mutant)
        said, result = _forked(seconds, lambda: _in_copy(question.target, root, work))
    if said == "broken":
        raise R18Error(f"the mutation run itself failed:\n{result}")
    if isinstance(result, _Ended) and mutant is None:
        raise R18Error(f"the unchanged backend does not come through: {result.message}")
    return result


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


@cache
def _warm_up(package: str) -> None:
    """Import all that the package imports, then forget the package."""
    torch.set_num_threads(1)
    importlib.import_module(package)
    for name in _modules(package):
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def _modules(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


def _forked(seconds: int, work: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """What `work` returns in a child of at most so many seconds, or how the child ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_and_exit(seconds, work, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and said:
        result: tuple[str, Any] = pickle.loads(said)
        return result
    if code == -signal.SIGALRM:
        return "done", _Ended("hang", f"had not ended after {seconds} s")
    if code < 0:
        return "done", _Ended("crash", f"died of {signal.Signals(-code).name}")
    return "done", _Ended("crash", f"exited with code {code}")


def _run_and_exit(seconds: int, work: Callable[[], tuple[str, Any]], pipe: int) -> NoReturn:
    """The child's whole life; the alarm's default action ends it, whatever it is doing."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with os.fdopen(pipe, "wb") as out:
            out.write(pickle.dumps(work()))
        os._exit(0)
    finally:  # whatever was raised must not run the parent's code in the child
        os._exit(97)


def _in_copy(target: Target, root: Path, work: Work) -> tuple[str, Any]:
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root.parent))
    try:
        backend = load_backend(target.backend)
    except BaseException as error:
        return "done", _Ended("import", f"{type(error).__name__}: {error}")
    strays = [n for n in _modules(target.package) if not _comes_from(sys.modules[n], root)]
    if strays:
        return "broken", f"{', '.join(strays)} did not come from the copy in {root}"
    try:
        return "done", work(backend, root)
    except Exception as error:  # it would end `r18 verify` too: it is seen
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return "done", _Ended("error", f"{type(error).__name__}: {error} ({where})")


def _comes_from(module: Any, root: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(root)
