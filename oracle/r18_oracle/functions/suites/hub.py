"""Hugging Face's `kernels` package: a kernel of the hub that is installed, or a folder with one.

    kernels-community/relu@1:relu    version 1 of a repository; `@` may be followed by a revision
    my_kernel:relu                   a folder with build/<variant>/, as kernel-builder leaves one,
                                     with <variant>/, or the folder of a variant itself

The package chooses the build variant for this machine and imports it. Its functions are called as
any others are: the operator's arguments by position, with memory for the result in front of them
where the first parameter is called `out`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from r18.errors import BackendUnavailable, UsageError, plain
from r18_oracle.functions.likes import LIKES

METADATA = "metadata.json"
"""A file that each build variant has."""


def is_kernel(owner: str) -> bool:
    """Whether a place's owner is a repository of the hub, or a folder with a kernel."""
    if Path(owner).is_dir():
        places = (f"{inner}{METADATA}" for inner in ("build/*/", "*/", ""))
        return any(any(Path(owner).glob(place)) for place in places)
    return "/" in owner and not owner.endswith((".py", ".json"))


def module_of(owner: str) -> ModuleType:
    """The kernel's module, of the build variant for this machine.

    Raises `BackendUnavailable` without the package, `UsageError` for a repository without a
    version, and what the package raises where there is no such kernel or no variant for this
    machine.
    """
    try:
        import kernels
    except ImportError as error:
        cause = f"the package kernels does not import: {error}"
        raise BackendUnavailable(owner, cause, "pip install kernels") from error
    module: ModuleType
    if Path(owner).is_dir():
        module = kernels.get_local_kernel(Path(owner))
        return module
    name, _, which = owner.partition("@")
    if not which:
        raise UsageError(f"'{plain(owner)}' names no version: {plain(name)}@1, or @REVISION")
    given = {"version": int(which)} if which.isdecimal() else {"revision": which}
    module = kernels.get_kernel(name, **given)
    return module


def places_in(folder: str) -> list[str]:
    """The places of a folder's functions that are named after an operator.

    Raises as `module_of`, and `UsageError` where there is none.
    """
    module = module_of(folder)
    found = [name for name in LIKES if callable(getattr(module, name, None))]
    if not found:
        known = sorted(name for name, value in vars(module).items() if callable(value))
        raise UsageError(
            f"no function of the kernel '{plain(folder)}' is named after an operator: name one "
            f"with --like, {plain(folder)}:FUNCTION\n  it has {', '.join(known) or 'none'}"
        )
    return [f"{folder}:{name}" for name in found]


__all__ = ["is_kernel", "module_of", "places_in"]
