"""A target: a function and how it is called, as one string that a worker process can load.

    check:my_kernels.py:conv2d?like=conv2d&dtype=float32&arrays=torch&contract=sum,float32

The part before `?` is what the user wrote: a file and a name, or a module and a name. A target
that is not settled yet has no `arrays` or no `contract`; `r18_oracle.probe` finds them.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from r18.backend.plugin import named_object
from r18.errors import BackendUnavailable, UsageError, nearest, plain, raised_in, show
from r18_oracle.functions.arithmetic import Arithmetic, arithmetic_of, expected_of
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.functions.kinds import arrays_of
from r18_oracle.functions.likes import LIKES, Like, like_of
from r18_oracle.functions.suites import backendbench, flashinfer, hub, kernelbench
from r18_oracle.functions.suites.adapted import Adapted

SCHEME = "check:"
JOINED = r"(?<=\.py)\+|(?<=\.json)\+"
"""Separates the file of a suite's problem from that of its kernel, where these are two."""
MARK = "__r18_check__"
"""The attribute by which `r18.check.kernel` marks a function: a dict of options."""
OPTIONS = ("like", "dtype", "arrays", "contract", "refuses")

_LOCAL: dict[str, Callable[..., Any]] = {}
"""Functions of this process that no other process can import, by the place in their target."""


@dataclass(frozen=True)
class Target:
    """A function, and how it is called and judged.

    place:    `FILE.py:NAME` or `MODULE:NAME`; the name may have dots. A kernel of KernelBench with
              its problem is `PROBLEM.py+FILE.py:ModelNew`, and a solution of FlashInfer-Bench is
              `FILE.json:NAME`.
    like:     the name of an operator (`r18_oracle.functions.likes`).
    dtype:    the format of its arrays.
    arrays:   the library that they are of; "" if that is to be found.
    contract: the text of an `Arithmetic`; "" if that is to be found.
    refuses:  the place of a function that says which calls it does not take; "" if it takes all.
    deterministic: whether it must give the same bits each time.
    """

    place: str
    like: str
    dtype: str = "float32"
    arrays: str = ""
    contract: str = ""
    refuses: str = ""
    deterministic: bool = True

    def __post_init__(self) -> None:
        expected_of(like_of(self.like), self.dtype)
        if self.arrays:
            arrays_of(self.arrays)
        if self.contract:
            arithmetic_of(self.contract, self.operator, self.dtype)

    @property
    def operator(self) -> Like:
        return like_of(self.like)

    @property
    def expected(self) -> Arithmetic:
        """The arithmetic expected of a function like the operator, whatever is found."""
        return expected_of(self.operator, self.dtype)

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic that the function is judged by: its contract, or else the expected one."""
        if not self.contract:
            return self.expected
        return arithmetic_of(self.contract, self.operator, self.dtype)

    @property
    def name(self) -> str:
        """The string that stands for it where a backend's name is expected."""
        options = {name: getattr(self, name) for name in OPTIONS} | (
            {} if self.deterministic else {"deterministic": "no"}
        )
        words = "&".join(f"{name}={value}" for name, value in options.items() if value)
        return f"{SCHEME}{self.place}?{words}"

    @classmethod
    def of(cls, name: str) -> Target:
        """The inverse of `name`. Raises `UsageError`."""
        place, _, words = name.removeprefix(SCHEME).partition("?")
        options = dict(part.partition("=")[::2] for part in words.split("&") if part)
        deterministic = options.pop("deterministic", "yes") != "no"
        if not name.startswith(SCHEME) or "like" not in options or options.keys() - set(OPTIONS):
            raise UsageError(f"{show(name)} is no target of `r18 check`")
        return cls(place, deterministic=deterministic, **options)

    def with_contract(self, arithmetic: Arithmetic) -> Target:
        return replace(self, contract=str(arithmetic))


def is_target(name: str) -> bool:
    """Whether a backend's name stands for a function."""
    return name.startswith(SCHEME)


def local_place(function: Callable[..., Any]) -> str:
    """A place for a function that only this process has."""
    place = f"{_title(function.__module__)}:{_title(function.__qualname__)}-{len(_LOCAL)}"
    _LOCAL[place] = function
    return place


def place_of(function: Callable[..., Any]) -> str | None:
    """Where another process can import the function; None where it cannot."""
    module, path = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or not path or "<" in path:
        return None
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # of no Python file
        file = None
    if file is not None and _is_same(function, f"{file}:{path}"):
        return f"{file}:{path}"
    return f"{module}:{path}" if _is_same(function, f"{module}:{path}", sys.modules) else None


def _is_same(function: object, place: str, known: Any = None) -> bool:
    """Whether the module at that place holds the function under that name."""
    owner, _, path = place.rpartition(":")
    module: Any = None
    if known is not None:
        module = known.get(owner)
    else:
        wanted = Path(owner).resolve()
        for one in list(sys.modules.values()):
            found = getattr(one, "__file__", None) or ""
            # To resolve the paths of all modules takes a quarter of a second.
            if Path(found).name == Path(owner).name and Path(found).resolve() == wanted:
                module = one
    for part in path.split("."):
        module = getattr(module, part, None)
    return module is function


# -- loading -----------------------------------------------------------------------------------


def function_at(place: str) -> Callable[..., Any]:
    """The function of a place; its module is imported from its file or from the path.

    A suite's kernel (`r18_oracle.functions.suites`) comes back as an `Adapted`. Raises
    `BackendUnavailable` with the cause, and `UsageError` for a place of another form.
    """
    if place in _LOCAL:
        return _LOCAL[place]
    owner, colon, path = place.rpartition(":")
    if not colon or not owner or not path:
        raise UsageError(f"'{plain(place)}' is not of the form FILE.py:FUNCTION or MODULE:FUNCTION")
    found: Any
    try:
        if owner.endswith(".json"):
            found = _solution(owner)
        elif owner.endswith(".py"):
            found = _attribute(module_of_file(re.split(JOINED, owner)[-1]), path, owner)
        elif hub.is_kernel(owner):
            found = _attribute(hub.module_of(owner), path, owner)
        else:
            found = named_object(owner, path)
    except (BackendUnavailable, UsageError):
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        where = raised_in(error)
        cause = f"{type(error).__name__}: {error}" + (f", in {where}" if where else "")
        raise BackendUnavailable(place, cause, "Its module does not import; see there.") from error
    if not callable(found):
        raise UsageError(f"'{plain(place)}' is {show(found)}, no function")
    if isinstance(found, Adapted):
        return found
    function: Callable[..., Any] = _adapted(owner, path, found) or found
    return function


@cache
def _solution(owner: str) -> Adapted:
    """FlashInfer-Bench's solution, after its definition where that is given."""
    *definition, file = re.split(JOINED, owner)
    return flashinfer.adapted(file, *definition)


@cache
def _adapted(owner: str, path: str, found: Any) -> Adapted | None:
    """The kernel of a suite as a function; None for any other."""
    if path != kernelbench.NEW or not inspect.isclass(found):
        return backendbench.adapted(path, found)
    reference = module_of_file(re.split(JOINED, owner)[0])
    if not kernelbench.is_problem(reference):
        raise UsageError(
            f"'{plain(owner)}' has no Model and no get_init_inputs: name the problem's file, "
            f"--like PROBLEM.py"
        )
    return kernelbench.adapted(reference, found)


def marked_in(file: str) -> dict[str, dict[str, Any]]:
    """The functions of a file that `r18.check.kernel` marks, by name, with their options."""
    module = module_of_file(file)
    return {
        name: dict(getattr(found, MARK))
        for name, found in vars(module).items()
        if callable(found) and isinstance(getattr(found, MARK, None), dict)
    }


def module_of_file(file: str) -> ModuleType:
    """The module of a file, imported once; its folder is on the path, as for a script."""
    path = Path(file).resolve()
    if not path.is_file():
        near = nearest(path.name, (f.name for f in path.parent.glob("*.py")))
        hint = f", did you mean '{near}'?" if near else ""
        raise UsageError(f"there is no file '{plain(file)}'{hint}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    name = path.stem if path.stem not in sys.modules else f"r18_checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"'{plain(file)}' is no Python file")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _attribute(found: Any, path: str, owner: str) -> Any:
    for part in path.split("."):
        if not hasattr(found, part):
            functions = [name for name, value in vars(found).items() if callable(value)]
            near = nearest(part, functions)
            hint = f", did you mean '{near}'?" if near else ""
            raise UsageError(f"'{plain(owner)}' has no '{plain(part)}'{hint}")
        found = getattr(found, part)
    return found


def like_named(place: str, like: object | None) -> Like:
    """The operator asked for, else the one that the function is named after.

    Raises `UsageError` where neither says.
    """
    if like is not None:
        return like_of(like)
    last = re.split(r"[:.]", place)[-1]
    if last not in LIKES:
        titles = ", ".join(one.title for one in LIKES.values())
        raise UsageError(
            f"'{plain(last)}' is named after no operator: give --like, one of {titles}"
        )
    return LIKES[last]


@cache
def backend_of(name: str) -> FunctionBackend:
    """The backend of a target's name. Contacts no device. Raises what `function_at` does."""
    target = Target.of(name)
    owner, _, path = target.place.rpartition(":")
    title = _title(Path(owner).stem if owner.endswith(".py") else owner), _title(path)
    return FunctionBackend(
        FunctionKernel(
            title,
            function_at(target.place),
            target.operator,
            arrays_of(target.arrays or "torch"),
            target.arithmetic,
            target.deterministic,
            function_at(target.refuses) if target.refuses else None,
        )
    )


def _title(text: str) -> str:
    """A name as a part of kernel ids."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-._+") or "function"


__all__ = [
    "MARK",
    "Target",
    "backend_of",
    "function_at",
    "is_target",
    "like_named",
    "local_place",
    "marked_in",
    "module_of_file",
    "place_of",
]
