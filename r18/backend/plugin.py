"""Import and make a plugin's backend, and describe its faults.

Each function raises `BackendUnavailable` with the cause, the place in the plugin's code, and what
to do. Any error that a plugin raises becomes one, so that a broken plugin never hides the others.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path, PurePath

from r18.backend.device import DeviceInfo, Memory, Stream
from r18.backend.fields import RETURN, field_objection, missing_return, named
from r18.backend.kernel import Kernel
from r18.backend.protocol import Backend
from r18.errors import BackendUnavailable, R18Error, nearest, plain, raised_in, show

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""A backend's name: it is a part of kernel ids, files' names and comma-separated options."""
INHERIT = "Inherit it: its defaults are part of the protocol."
"""The remedy for an object that is not of the protocol's class."""


def make_backend(name: str, load: Callable[[], object]) -> Backend:
    """The backend that `load` brings: an instance, or something that makes one without arguments.

    Contacts no device. name: as the user asked for it, for messages.
    """
    try:
        factory = load()
    except BackendUnavailable:
        raise
    except (Exception, SystemExit) as error:  # whatever a plugin raises, the user needs the cause
        raise _import_failed(name, error) from error
    if isinstance(factory, type):
        _check_class(name, factory)
    if callable(factory):
        _check_call(name, factory)
    backend = _answer(name, f"{_called(factory)}()", factory) if callable(factory) else factory
    if not isinstance(backend, Backend):
        what = show(backend)
        raise BackendUnavailable(
            name,
            f"{_called(factory)}() returned {what}, no backend: {RETURN}"
            if callable(factory)
            else f"{what} is no backend",
            "Name a class that inherits r18.backend.Backend, or a function that returns one.",
        )
    _check_name(name, backend)
    return backend


def named_object(module: str, path: str) -> object:
    """The object of a `module:path`; the module is looked for in the current folder too.

    Raises what importing the module raises, and `BackendUnavailable` for a module or an attribute
    that does not exist, with the nearest that does.
    """
    here = os.getcwd()  # where a console script, unlike `python -m`, does not look
    if here not in sys.path:
        sys.path.append(here)  # behind all that is installed, which it cannot hide
    asked = f"{module}:{path}"
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        cause = f"no module '{plain(error.name)}' in the current folder or on sys.path"
        near = nearest(error.name, (file.stem for file in Path(here).glob("*.py")))
        remedy = f"Did you mean {near}:{path}?" if near else "Run r18 in the folder of the module."
        raise BackendUnavailable(asked, cause, remedy) from None
    for part in path.split("."):
        owner = found
        try:
            found = getattr(owner, part)
        except AttributeError:
            near = nearest(part, (name for name in dir(owner) if not name.startswith("_")))
            meant = f", did you mean '{near}'?" if near else ""
            what = getattr(owner, "__name__", type(owner).__name__)
            cause = f"{plain(what)} has no '{plain(part)}'{meant}"
            raise BackendUnavailable(asked, cause, _known_backends(found)) from None
    return found


def module_of_file(name: str) -> str:
    """The module that a file's name means: `good` of `good.py` and `./good.py`; '' for others."""
    path = PurePath(name)
    if path.suffix == ".py":
        path = path.with_suffix("")
    elif "/" not in name and os.sep not in name:
        return ""
    return ".".join(part for part in path.parts if part not in (".", path.root))


def hint_for_file(name: str) -> str:
    """Advice where an uninstalled name matches a file in the current folder: what to write; or
    ''."""
    module = module_of_file(name) or name
    if not module.isidentifier() or not Path(f"{module}.py").is_file():
        return ""
    return f"For the file {module}.py in the current folder, write {module}:Backend."


def probe(name: str, backend: Backend) -> DeviceInfo:
    """The backend's device, with its memory, stream and kernels checked."""
    device = _answer(name, "probe()", backend.probe)
    if not isinstance(device, DeviceInfo):
        if isinstance(device, str):
            what, remedy = f"the string {show(device)}", f'Write DeviceInfo("cpu", {show(device)}).'
        else:
            what, remedy = _kind(device), 'Write return DeviceInfo("cpu", "its name").'
        cause = f"probe() must return a DeviceInfo, not {what}"
        raise BackendUnavailable(name, cause + missing_return(device), remedy)
    _check_parts(name, backend)
    check_kernels(name, backend)
    return device


def _check_parts(name: str, backend: Backend) -> None:
    """Raise unless a `memory` and a `stream()` of the backend's own are what they must be."""
    made, own = type(backend), vars(backend)
    if made.memory is not Backend.memory or "memory" in own:
        found = _answer(name, "memory", lambda: backend.memory)
        cause = "memory must be an r18.backend.device.Memory, not "
        if inspect.ismethod(found):
            raise BackendUnavailable(name, f"{cause}a method", "Write @cached_property above it.")
        if not isinstance(found, Memory):
            own_code = isinstance(
                inspect.getattr_static(made, "memory"), property | cached_property
            )
            hint = missing_return(found) if own_code else ""
            raise BackendUnavailable(name, f"{cause}{named(found)}{hint}", INHERIT)
    if made.stream is not Backend.stream or "stream" in own:
        found = _answer(name, "stream()", backend.stream)
        if not isinstance(found, Stream):
            cause = f"stream() must return an r18.backend.device.Stream, not {named(found)}"
            raise BackendUnavailable(name, cause + missing_return(found), INHERIT)


def simulates(name: str, backend: Backend) -> bool:
    """Whether the backend would run in a simulator, as far as it knows."""
    return bool(_answer(name, "simulates()", backend.simulates))


def _check_class(name: str, made: type) -> None:
    """Raise unless the class inherits the protocol and defines its methods."""
    title = made.__name__
    if not issubclass(made, Backend):
        raise BackendUnavailable(
            name,
            f"class {title} does not inherit r18.backend.Backend",
            f"Write class {title}(r18.backend.Backend).",
        )
    abstract = sorted(getattr(made, "__abstractmethods__", ()))
    if abstract:
        own = {part for base in made.__mro__ for part in vars(base)} - set(dir(Backend))
        near = [found for part in abstract if (found := nearest(part, own))]
        cause = f"class {title} defines no " + " and no ".join(f"'{part}'" for part in abstract)
        if near:
            cause += f"; it has {' and '.join(repr(part) for part in near)}: rename it?"
        raise BackendUnavailable(name, cause, "r18.backend.protocol says what each one returns.")


def _check_call(name: str, factory: Callable[..., object]) -> None:
    """Raise if it needs arguments."""
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(factory).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a signature that Python does not know
        return
    if needed:
        raise BackendUnavailable(
            name,
            f"{_called(factory)} must be callable without arguments, and takes {', '.join(needed)}",
            "Give each a default, or name a function that returns a backend.",
        )


def _check_name(name: str, backend: Backend) -> None:
    found: object = getattr(backend, "name", None)
    title = type(backend).__name__
    if found is None:
        cause = f"class {title} has no 'name'"
        raise BackendUnavailable(name, cause, 'Write name = "mine" in its body.')
    if not isinstance(found, str):
        cause = f"the name of class {title} must be a string, not {show(found)}"
        raise BackendUnavailable(name, cause, 'Write name = "mine" in its body.')
    if not NAME.fullmatch(found):
        meant = re.sub(r"[^a-z0-9._+-]+", "-", found.lower()).strip("-._+") or "mine"
        raise BackendUnavailable(
            name,
            f"the name {show(found)} of class {title} may only have letters, digits and . _ + -",
            f'It is a part of kernel ids and options: write name = "{meant}".',
        )


def check_kernels(name: str, backend: Backend) -> None:
    """Raise unless `kernels()` returns a tuple of kernels that inherit the protocol's defaults and
    have the fields that it asks for."""
    kernels = _answer(name, "kernels()", backend.kernels)
    if isinstance(kernels, Kernel):
        cause = f"kernels() must return a tuple of kernels, not one {type(kernels).__name__}"
        raise BackendUnavailable(name, cause, "Write a comma after it: return (kernel,).")
    if not isinstance(kernels, Sequence):
        if hasattr(kernels, "__next__"):
            cause = f"kernels() of '{plain(backend.name)}' returned {_kind(kernels)}, which can be "
            raise BackendUnavailable(name, f"{cause}read only once", "Return a tuple of it.")
        cause = f"kernels() must return a tuple of kernels, not {_kind(kernels)}"
        raise BackendUnavailable(name, cause + missing_return(kernels), "Return a tuple.")
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            raise BackendUnavailable(
                name,
                f"its kernel {show(kernel)} does not inherit r18.backend.Kernel",
                INHERIT,
            )
        of = plain(type(kernel).__name__)
        if wrong := _answer(name, f"a field of {of}", partial(field_objection, kernel)):
            remedy = "r18.backend.Kernel says what each field is."
            raise BackendUnavailable(name, f"kernel {of}: {wrong}", remedy)


# -- messages ----------------------------------------------------------------------------------


def _import_failed(name: str, error: BaseException) -> BackendUnavailable:
    """The error for whatever importing the plugin's module raised."""
    where = raised_in(error)
    first, *more = str(error).split("\n")  # known names may follow, to which no place belongs
    first = f"{type(error).__name__}: {first}" + (f", in {where}" if where else "")
    cause = "\n".join((first, *more))
    module = plain(name.partition(":")[0])
    seen = f"python -c 'import {module}'" if ":" in name else "import it by hand"
    remedy = f"This is a fault of that plugin; to see the whole traceback: {seen}"
    return BackendUnavailable(name, cause, _install(error) or remedy)


def _answer(name: str, words: str, call: Callable[[], object]) -> object:
    """The result of calling the plugin's code; raises `BackendUnavailable` if it raises."""
    try:
        return call()
    except BackendUnavailable:
        raise
    except (Exception, SystemExit) as error:  # whatever a plugin raises, the user needs the cause
        raise _raised(name, words, error) from error


def _raised(name: str, call: str, error: BaseException) -> BackendUnavailable:
    where = raised_in(error)
    text = str(error) if isinstance(error, R18Error) else f"{type(error).__name__}: {error}"
    remedy = "This is a fault of that plugin" + (f", in {where}." if where else ".")
    return BackendUnavailable(name, f"{call} raised {text}", _install(error) or remedy)


def _install(error: BaseException) -> str:
    """The remedy for a package that a plugin imports and that is missing; '' for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = plain(error.name.partition(".")[0])
    return f"Install the package that provides {package}, or the extra that brings it."


def _called(factory: object) -> str:
    return plain(getattr(factory, "__name__", type(factory).__name__))


def _kind(value: object) -> str:
    """The type of an unwanted value, with its article; None is None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {plain(name)}"


def _known_backends(found: object) -> str:
    """The classes of a module that inherit `Backend`, for a message."""
    classes = [
        name
        for name, value in getattr(found, "__dict__", {}).items()
        if isinstance(value, type) and issubclass(value, Backend) and value is not Backend
    ]
    return f"Its backends: {', '.join(classes)}." if classes else "It defines no backend."
