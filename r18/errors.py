"""The one tree of errors.

A message names what was asked, what was found, what is known (with the nearest match), and what
to do. Everything that this project raises on purpose derives from `R18Error`; the command line
turns these into one line on stderr and an exit code, and lets any other exception through as the
bug that it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class R18Error(Exception):
    """Base of every error that r18 raises on purpose."""


class UsageError(R18Error):
    """The request makes no sense as given: a wrong option, value or combination."""


class ShapeError(R18Error):
    """A shape does not fit the operation or the program that it was given to."""


class ScheduleError(R18Error):
    """A schedule is inconsistent: a name used twice, an input that no step produces, ..."""


class WeightsError(R18Error):
    """Weights are missing, damaged, or not those of the schedule."""


class ManifestError(WeightsError):
    """A manifest, or a file it lists, is damaged or not to be trusted."""


class ImageError(R18Error):
    """An image cannot be read, or is not safe to read."""


class DumpError(R18Error):
    """A checkpoint dump is incomplete or damaged, or two dumps cannot be compared."""


class UnknownName(R18Error):
    """A name that nothing known carries: a backend, a kernel, a checkpoint, a weights source."""


class BackendUnavailable(R18Error):
    """A backend exists but cannot run here.

    `cause` says what was found, `remedy` what to do about it.
    """

    def __init__(self, name: str, cause: str, remedy: str = "") -> None:
        self.name = name
        self.cause = cause
        self.remedy = remedy
        super().__init__(
            f"backend '{name}' is not available: {cause}" + (f"\n  {remedy}" if remedy else "")
        )

    def __reduce__(self) -> tuple[type[BackendUnavailable], tuple[str, str, str]]:
        return BackendUnavailable, (self.name, self.cause, self.remedy)  # it crosses processes


class NoKernel(R18Error):
    """No kernel of a backend accepts a step; the message lists every refusal."""


class ProgramClosed(R18Error):
    """A program was used after `close()`."""


def unknown(
    kind: str,
    asked: str,
    known: Iterable[str],
    *,
    hint: str = "",
    error: type[R18Error] = UnknownName,
) -> R18Error:
    """Build the error for a name that is not known, with the nearest match and the known names.

    `kind` is the noun of the message ("backend", "checkpoint"), `hint` a closing sentence that
    says what to do.
    """
    names = sorted(known)
    lowered = {name.lower(): name for name in names}
    near = difflib.get_close_matches(asked.lower(), list(lowered), n=1, cutoff=0.5)
    message = f"unknown {kind} '{asked}'"
    if near:
        message += f", did you mean '{lowered[near[0]]}'?"
    message += f"\n  known: {', '.join(names) if names else '(none)'}"
    if hint:
        message += f"\n  {hint}"
    return error(message)
