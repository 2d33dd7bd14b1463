"""Finding backends: entry points, `R18_BACKEND`, `module:attr`.

Listing loads nothing. A backend is imported when a caller names it, and contacts its device
in `probe()`. An explicit choice never falls back; `auto` takes the first of `AUTO_ORDER` that
probes, then any other installed one by name, and never one that runs in a simulator.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePath

from r18.backend.device import DeviceInfo
from r18.backend.plugin import (
    check_kernels,
    hint_for_file,
    make_backend,
    module_of_file,
    named_object,
    probe,
    simulates,
)
from r18.backend.protocol import Backend
from r18.errors import BackendUnavailable, UsageError, plain, show, unknown

GROUP = "r18.backends"
VARIABLE = "R18_BACKEND"
AUTO_ORDER = ("cupy", "numba", "numba-cpu", "numpy", "torch")
"""The order in which `auto` tries backends, on real devices only; documented in the README."""


def installed() -> dict[str, EntryPoint]:
    """Every backend entry point, ours or not, by name, in the order of `auto`; loads nothing."""
    return {name: claims[0] for name, claims in _claims().items()}


def _claims() -> dict[str, tuple[EntryPoint, ...]]:
    """As `installed`; a name has several entry points when plugins claim it for unlike objects."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, {}).setdefault(point.value, point)
    ranked = [name for name in AUTO_ORDER if name in found]
    ranked += sorted(found.keys() - set(ranked))
    return {name: tuple(found[name].values()) for name in ranked}


def title(backend: Backend) -> str:
    """A backend's name for messages, with its class if another package has the name installed.

    A backend of a module may keep the name of the one that it inherits.
    """
    point = installed().get(backend.name)
    kind = type(backend)
    if point is None or point.module.partition(".")[0] == kind.__module__.partition(".")[0]:
        return backend.name
    return f"{backend.name} (of {kind.__module__}.{kind.__qualname__}, not the installed one)"


def load_backend(name: str) -> Backend:
    """Import and make the backend of an entry point's name or a `module:attr`.

    The module is looked for on the path, then in the current folder. Contacts no device. Raises
    `UnknownName` with the known names and the nearest, `BackendUnavailable` when its import or its
    making raises, or when several plugins claim it.
    """
    if not isinstance(name, str):
        raise UsageError(f"a backend is chosen by its name, got {show(name)}")
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not module or not attribute:
            raise UsageError(f"'{name}' is not of the form module:attr")
        if written := module_of_file(module):
            how, place = f"write {written}", PurePath(module)
            if place.is_absolute() or ".." in place.parts:  # no module's name leads there
                how = f"run r18 in {plain(place.parent)} and write {place.stem}"
            raise UsageError(f"'{plain(name)}' names a file: {how}:{attribute}")
        return make_backend(name, lambda: named_object(module, attribute))
    points = _claims()
    if name not in points:
        hint = f"Set {VARIABLE} or --backend to one of these, to 'auto', or to 'module:attr'."
        hint = hint_for_file(name) or hint
        raise unknown("backend", name, [*points, "auto"], hint=hint)
    if len(points[name]) > 1:
        claims = " and ".join(point.value for point in points[name])
        remedy = "Uninstall one of them, or choose by module:attr."
        raise BackendUnavailable(name, f"several plugins claim this name: {claims}", remedy)
    return make_backend(name, points[name][0].load)


def checked_backend(name: str) -> Backend:
    """`load_backend`, with the fields of its kernels checked; still contacts no device."""
    backend = load_backend(name)
    check_kernels(name, backend)
    return backend


def check_named(name: str, where: str, repeated: Collection[str] = ()) -> None:
    """Raise `UsageError` for a backend that a file names, and that loading would import from it.

    An installed backend may be named by anybody. A `module:attr` is code that the file chose: the
    user repeats it. where: the file, as the message begins. repeated: what the user named.
    """
    if ":" in name and name not in repeated:
        raise UsageError(
            f"{where} names the backend '{plain(name)}', a module that would be imported and run\n"
            "  repeat it if you trust it, with --backend; installed backends need no such word"
        )


def _probed(name: str) -> tuple[Backend, DeviceInfo]:
    """The backend and its device; whatever its probe raises becomes `BackendUnavailable`."""
    backend = load_backend(name)
    return backend, probe(name, backend)


def get_backend(name: str | None = None) -> Backend:
    """The backend to use, probed: `name`, else `R18_BACKEND`, else `auto`.

    An explicit name raises `UnknownName` or `BackendUnavailable` rather than fall back. `auto`
    raises `BackendUnavailable` listing every cause when nothing can run.
    """
    asked = name or os.environ.get(VARIABLE) or "auto"
    if asked != "auto":
        return _probed(asked)[0]
    causes: list[str] = []
    for candidate in installed():
        try:
            backend = load_backend(candidate)
            if not simulates(candidate, backend) and not probe(candidate, backend).simulated:
                return backend
        except BackendUnavailable as error:
            causes.append(f"{candidate}: {error.cause}")
            continue
        causes.append(f"{candidate}: has a simulator alone, which auto never takes")
    raise BackendUnavailable(
        "auto",
        "no installed backend can run here: " + ("; ".join(causes) or "none is installed"),
        "`r18 backends` shows what each one needs.",
    )


@dataclass(frozen=True)
class Listing:
    """One line of `r18 backends`: a device, or the cause and the remedy."""

    name: str
    provider: str
    device: DeviceInfo | None
    cause: str = ""
    remedy: str = ""


def survey(names: Collection[str] | None = None) -> list[Listing]:
    """Every installed backend, or those of these names, probed in this process.

    One that raises is a line like the others; `r18.runtime.listing` also survives a crash.
    """
    lines: list[Listing] = []
    for name, points in _claims().items():
        if names is not None and name not in names:
            continue
        provider = ", ".join(
            f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            for point in points
        )
        try:
            lines.append(Listing(name, provider, _probed(name)[1]))
        except BackendUnavailable as error:  # a broken one is a line like the others
            lines.append(Listing(name, provider, None, error.cause, error.remedy))
    return lines


def asked_module() -> Listing | None:
    """The backend that `R18_BACKEND` names as module:attr, probed; None if it names no module."""
    asked = os.environ.get(VARIABLE, "")
    if ":" not in asked:
        return None
    try:
        return Listing(asked, VARIABLE, _probed(asked)[1])
    except BackendUnavailable as error:
        return Listing(asked, VARIABLE, None, error.cause, error.remedy)
    except UsageError as error:
        return Listing(asked, VARIABLE, None, str(error))


def available() -> list[Backend]:
    """Every installed backend that probes, in the order of `auto`."""
    return [load_backend(line.name) for line in survey() if line.device is not None]
