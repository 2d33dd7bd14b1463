"""Watching a kernel inside its process: what it calls, and what it leaves changed.

A kernel computes its own result and changes only its output and workspace. Python enforces neither:
a backend may call another backend, a library may turn off subnormals for the whole process when it
is loaded, a plugin may replace a NumPy function or fork. Crashes and hangs are left to
`r18_oracle.search.worker`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, ValuesView
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from operator import is_
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import psutil
import torch
from threadpoolctl import LibController, ThreadpoolController

from r18.backend import Backend, Kernel, registry
from r18.machine import set_blas_threads
from r18.runtime.launch import run_kernel
from r18.runtime.plan import make_plan
from r18_oracle.ops.spec import OpSpec
from r18_oracle.ops.table import SPECS

LIBRARIES = ("numpy", "torch", "torch.nn.functional")
JUDGES = (
    *(f"r18_oracle.judge.{name}" for name in ("reference", "bounds", "roundings", "verdict")),
    *("r18_oracle.ops.spec", "r18_oracle.ops.table"),
    *(type(spec).__module__ for spec in SPECS.values()),
    *("r18_oracle.generate.inputs", "r18_oracle.check.checks", "r18_oracle.search.campaign"),
)
"""The modules that know the answers."""
TOOLS = (
    *("r18_oracle.cases", "r18_oracle.findings", "r18_oracle.judge.declared"),
    *(f"r18_oracle.check.{name}" for name in ("call", "state", "tally", "turns", "watch")),
    *(f"r18.backend.{name}" for name in ("device", "kernel", "launch", "plan", "program")),
    *("r18.backend.protocol", "r18.backend.host", "r18.runtime.launch", "r18.runtime.plan"),
    *("r18.graph.ops", "r18.graph.precision"),
)
"""The other modules that take part in a verdict."""
_ROUND_TO_NEAREST = 0  # FE_TONEAREST, on every architecture that NumPy runs on


# -- what it calls -----------------------------------------------------------------------------


@contextmanager
def intrusions(kernel: Kernel) -> Iterator[list[str]]:
    """A list that is filled with forbidden calls of the kernel, in any of its threads.

    Forbidden are the oracle, the core's functions that load a backend or run a kernel, and kernels
    of another backend. Only Python calls are seen. If a profiler is already active, nothing is
    watched.
    """
    found: list[str] = []
    over = threading.Event()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if over.is_set():
            sys.setprofile(None)  # in a thread that outlived the call
        elif event == "call" and (what := _intrusion(kernel, frame)) and what not in found:
            found.append(what)

    if sys.getprofile() is not None:
        yield found
        return
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        over.set()
        sys.setprofile(None)
        threading.setprofile(None)


def _intrusion(kernel: Kernel, frame: FrameType) -> str | None:
    code = frame.f_code
    if code in _off_limits() or frame.f_globals.get("__name__") in JUDGES:
        return f"{frame.f_globals.get('__name__')}.{code.co_qualname}"
    if code.co_name == "enqueue":
        other = frame.f_locals.get("self")
        if isinstance(other, Kernel) and _backend(other) != _backend(kernel):
            return f"the kernel {other.id}"
    return None


def _backend(kernel: Kernel) -> str:
    return kernel.id.partition("/")[0]


@cache
def _off_limits() -> frozenset[CodeType]:
    entrances = (registry.load_backend, run_kernel, make_plan, Backend.compile)
    return frozenset(entrance.__code__ for entrance in entrances)


# -- what it leaves changed --------------------------------------------------------------------


@dataclass(eq=False)
class Names:
    """The names of a module, a class or a table, and the objects that they must stay bound to.

    there: the values of all names at present, as a view. seen: these values when nothing was found
    to be replaced; of a library, which has thousands, nothing.
    """

    owner: Any
    held: dict[Any, Any]
    there: ValuesView[Any]
    seen: tuple[Any, ...]

    @classmethod
    def of(cls, owner: Any) -> Names:
        """The present names of an owner."""
        there = _held(owner).values()
        return cls(owner, _watched(owner), there, () if _is_library(owner) else tuple(there))

    def replaced(self) -> str | None:
        """The first name that is bound to something else now, in words, or None."""
        if len(self.there) == len(self.seen) and all(map(is_, self.there, self.seen)):
            return None
        there = _held(self.owner)
        if isinstance(self.owner, OpSpec) and there:  # a spec has no state: it hides a method
            return f"replaced {next(iter(there))} in the spec of {self.owner.op.name}"
        if not all(map(is_, map(there.get, self.held), self.held.values())):
            name = next(name for name, value in self.held.items() if there.get(name) is not value)
            return f"replaced {name} in {getattr(self.owner, '__name__', 'a table')}"
        if self.seen:
            self.seen = tuple(self.there)
        return None

    def restore(self) -> None:
        if isinstance(self.owner, OpSpec):
            vars(self.owner).clear()
        for name, value in self.held.items():
            if _held(self.owner).get(name) is value:
                continue
            if isinstance(self.owner, dict):
                self.owner[name] = value
            else:
                setattr(self.owner, name, value)


@dataclass(frozen=True, eq=False)
class Bindings:
    """The names of all owners, and a quick way to see that none is bound to anything else.

    libraries: the names and what they must stay bound to. ours: the values of all names at present,
    as views. tags: the version tags of all owners' dictionaries, which these views keep alive; none
    if this Python has no such tags.
    """

    libraries: tuple[tuple[Mapping[Any, Any], Mapping[Any, Any]], ...]
    ours: tuple[ValuesView[Any], ...]
    tags: tuple[ctypes.c_uint64, ...]

    @classmethod
    def of(cls, names: tuple[Names, ...]) -> Bindings:
        libraries = [one for one in names if _is_library(one.owner)]
        ours = (one.there for one in names if not _is_library(one.owner))
        tags = tuple(_tag(_held(one.owner)) for one in names) if HAS_TAGS else ()
        return cls(tuple((one.held, _held(one.owner)) for one in libraries), tuple(ours), tags)

    def versions(self) -> list[int]:
        """The version tags of the dictionaries. As long as none changes, no name is bound to
        another object.

        Runs after every call, and reads one number where `addresses` reads thirty objects.
        """
        return [tag.value for tag in self.tags]

    def addresses(self) -> bytes:
        """The addresses of the objects bound to the names, one after the other.

        Thousands of names. No object is compared, so a kernel's `__eq__` cannot fool it.
        """
        found: list[Any] = []
        for held, now in self.libraries:
            found += map(now.get, held)
        for values in self.ours:
            found += values
        return _references(tuple(found))


def _by_numpy(objects: tuple[Any, ...]) -> bytes:
    """Where objects are in memory: NumPy's arrays of objects hold their addresses."""
    return _array_of(objects, object, len(objects)).tobytes()


def _by_layout(objects: tuple[Any, ...]) -> bytes:
    """As `_by_numpy`, in half of the time: a tuple of CPython holds the addresses after its
    head."""
    return _bytes_at(id(objects) + tuple.__basicsize__, len(objects) * _POINTER)


_array_of, _bytes_at = np.fromiter, ctypes.string_at
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_SOME = (None, 1.5, "text")
_references = (
    _by_layout
    if sys.implementation.name == "cpython" and _by_layout(_SOME) == _by_numpy(_SOME)
    else _by_numpy
)


def _tag(names: Mapping[Any, Any]) -> ctypes.c_uint64:
    """The version tag of a dictionary (PEP 509) in memory, after the object's head and length.

    A class shows its dictionary through a proxy, which refers to nothing else.
    """
    there = names if isinstance(names, dict) else gc.get_referents(names)[0]
    return ctypes.c_uint64.from_address(id(there) + object.__basicsize__ + _POINTER)


def _has_tags() -> bool:
    """Whether each change of a dictionary changes its version tag: in CPython 3.11 and 3.12."""
    if sys.implementation.name != "cpython":
        return False

    class Owner:
        bound: Any = None

    owner = Owner()
    table: dict[str, Any] = {"bound": None}
    tags = [_tag(found) for found in (table, vars(Owner), vars(owner))]
    seen = [[tag.value for tag in tags]]
    for value in (1.5, None, 2.5):
        table["bound"] = Owner.bound = owner.bound = value
        seen.append([tag.value for tag in tags])
    del table["bound"], Owner.bound, owner.bound
    seen.append([tag.value for tag in tags])
    still = [tag.value for tag in tags] == seen[-1]
    return still and all(len(set(values)) == len(seen) for values in zip(*seen, strict=True))


HAS_TAGS = _has_tags()


@dataclass(eq=False)
class Process:
    """The state that the kernels of a process share, at one moment.

    names: of each watched module, class and table.
    bindings, versions, addresses: the same names, the version tags of their dictionaries, and where
    what they are bound to is in memory.
    children: the processes that this one has started.
    errors: NumPy's handling of floating-point errors. dtype: PyTorch's default.
    blas_threads: the number of threads of each BLAS library.
    """

    names: tuple[Names, ...]
    bindings: Bindings
    versions: list[int]
    addresses: bytes
    children: frozenset[int]
    errors: Any
    dtype: torch.dtype
    blas_threads: tuple[int, ...]

    @classmethod
    def now(cls) -> Process:
        """The present state; the previous object if nothing has changed."""
        owners = _owners(len(sys.modules))
        if not _latest or _latest[0] is not owners or _latest[1].change() is not None:
            names = tuple(map(Names.of, owners))
            bindings = Bindings.of(names)
            process = cls(
                names=names,
                bindings=bindings,
                versions=bindings.versions(),
                addresses=bindings.addresses(),
                children=children(),
                errors=np.geterr(),
                dtype=torch.get_default_dtype(),
                blas_threads=_blas_threads(),
            )
            _latest[:] = owners, process
        latest: Process = _latest[1]
        return latest

    def change(self) -> str | None:
        """The first change since this state was taken, in words, or None."""
        if (replaced := self._replaced()) is not None:
            return replaced
        if children() - self.children:
            return "left a child process"
        if np.geterr() != self.errors:
            return "changed what NumPy does about floating-point errors"
        if torch.get_default_dtype() != self.dtype:
            return "changed PyTorch's default dtype"
        if _blas_threads() != self.blas_threads:
            return "left BLAS with another number of threads"
        return _arithmetic()

    def _replaced(self) -> str | None:
        """The first name that is bound to something else now, in words, or None."""
        versions = self.bindings.versions()
        if versions and versions == self.versions:
            return None
        addresses = self.bindings.addresses()
        if addresses != self.addresses:  # or an owner has names that it did not have
            for names in self.names:
                if (replaced := names.replaced()) is not None:
                    return replaced
        self.versions, self.addresses = versions, addresses
        return None

    def restore(self) -> None:
        """Restore the state as far as possible, so that the next kernel starts from it."""
        for names in self.names:
            names.restore()
        for child in children() - self.children:
            with suppress(OSError):  # it may have ended
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        np.seterr(**self.errors)
        torch.set_default_dtype(self.dtype)
        for library, count in zip(_blas(), self.blas_threads, strict=True):
            set_blas_threads(library, count)
        torch.set_flush_denormal(False)
        round_to(_ROUND_TO_NEAREST)


def children() -> frozenset[int]:
    """The processes that this one has started and not waited for, by their ids.

    Not the two that Python starts where it needs them: one keeps track of shared memory, and from
    the other one workers are forked.
    """
    if hasattr(os, "waitid"):  # one call that tells whether there is any
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return frozenset()
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    server = getattr(forkserver, "_forkserver", None)
    pythons = {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}
    return _started() - pythons


def _started() -> frozenset[int]:
    """The processes that this one has started. Linux lists them for each thread; elsewhere the
    parent of every process of the machine is looked up, which takes milliseconds."""
    threads = Path("/proc/self/task")
    if _lists_children():
        found: set[int] = set()
        for thread in os.listdir(threads):
            with suppress(OSError):  # it may have ended; then another one has its children
                found.update(map(int, (threads / thread / "children").read_bytes().split()))
        return frozenset(found)
    with suppress(psutil.Error):
        return frozenset(child.pid for child in psutil.Process().children())
    return frozenset()


@cache
def _lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


_latest: list[Any] = []
"""The owners whose names `Process.now` looked at last, and what it returned. A list, since a name
that is bound again would itself be a change."""


@lru_cache(maxsize=1)
def _owners(loaded: int) -> tuple[Any, ...]:
    """The libraries, and our modules with their classes, tables and specs.

    loaded: the number of loaded modules, which the cached answer depends on.
    """
    libraries = [sys.modules[name] for name in LIBRARIES]
    ours = [import_module(name) for name in (*JUDGES, *TOOLS)]  # an error where one has moved
    parts = [
        found
        for module in ours
        for name, found in vars(module).items()
        if (isinstance(found, type) and found.__module__ == module.__name__)
        or (isinstance(found, dict) and not name.startswith("__"))
        or isinstance(found, OpSpec)
    ]
    return (*libraries, *ours, *parts)


def _watched(owner: Any) -> dict[Any, Any]:
    """The objects that must not be replaced; in a library, the functions whose names the oracle
    uses."""
    held = _held(owner)
    if _is_library(owner):
        return {name: held[name] for name in _mentioned() & held.keys() if callable(held[name])}
    return {name: value for name, value in held.items() if not str(name).startswith("__")}


def _is_library(owner: Any) -> bool:
    return getattr(owner, "__name__", None) in LIBRARIES


def _held(owner: Any) -> Mapping[Any, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


@cache
def _mentioned() -> frozenset[str]:
    """Every name in the oracle's code."""
    modules = [module for name, module in sys.modules.items() if name.startswith("r18_oracle.")]
    held = [value for module in modules for value in vars(module).values()]
    held += [value for found in held if isinstance(found, type) for value in vars(found).values()]
    codes = [value.__code__ for value in held if isinstance(value, FunctionType)]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(found)


@cache
def _blas() -> tuple[LibController, ...]:
    """The BLAS libraries that are loaded when first asked for."""
    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


def _blas_threads() -> tuple[int, ...]:
    return tuple(library.get_num_threads() for library in _blas())


def _arithmetic() -> str | None:
    """A change of this thread's rounding or handling of subnormals, in words, or None."""
    u, least = np.float64(2.0**-53), np.array([2.0**-1022])
    # 1 + u is a tie; 1 + 1.5u and −1 − 1.5u are above half: together they tell the modes apart.
    sums = np.array([1.0, 1.0, -1.0]) + np.array([u, 1.5 * u, -1.5 * u])
    if sums.tolist() != [1.0, 1 + 2 * float(u), -1 - 2 * float(u)]:
        return "changed the processor's rounding mode"
    if (least / 4).item() == 0:
        return "switched subnormal numbers off in the processor"
    return None


def round_to(mode: int) -> None:
    """Set the C library's rounding mode by `fesetround`, if it can be loaded."""
    try:
        set_mode = ctypes.CDLL(None).fesetround
    except (AttributeError, OSError, TypeError):
        return
    set_mode(mode)
