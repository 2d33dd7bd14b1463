"""The one tree of errors.

A message names what was asked, what was found, what is known (with the nearest match), and what
to do. Everything that this project raises on purpose derives from `R18Error`; the command line
turns these into one line on stderr and an exit code, and lets any other exception through as the
bug that it is.

A message may quote a file or a name that somebody else wrote. `show` and `plain` limit what is
quoted, and escape what a terminal would obey.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MOST_QUOTED = 200
"""The most characters of a file that a message quotes."""

MOST_COMPARED = 1000
"""The most known names that a message lists and compares with."""

_CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal obeys, what reverses text, and lone surrogates; a newline is ours."""


class R18Error(Exception):
    """Base of every error that r18 raises on purpose; its message holds no control characters."""

    def __str__(self) -> str:
        return _escaped(super().__str__())


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


def show(value: object, limit: int = 80) -> str:
    """The `repr` of something not trusted, at most `limit` characters of it.

    `repr` escapes control characters.
    """
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__}, deeply nested"
    return text if len(text) <= limit else text[: limit - 3] + "…" + text[-2:]


def plain(text: object, limit: int = MOST_QUOTED) -> str:
    """Text that is not trusted, for a message that has its own quotes, in one line.

    Control characters, line breaks among them, are escaped; at most `limit` characters stay.
    """
    found = _escaped(str(text)[: limit + 1].replace("\n", "\\n"))
    return found if len(found) <= limit else found[: limit - 1] + "…"


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def unknown(
    kind: str,
    asked: object,
    known: Iterable[str],
    *,
    hint: str = "",
    error: type[R18Error] = UnknownName,
) -> R18Error:
    """Build the error for a name that is not known, with the nearest match and the known names.

    `kind` is the noun of the message ("backend", "checkpoint"), `hint` a closing sentence that
    says what to do. `asked` may be anything; a value that is no string is quoted.
    """
    names = sorted(known)
    lowered = {name.lower(): name for name in names}
    near: list[str] = []
    if isinstance(asked, str):
        begin = asked[:MOST_QUOTED].lower()  # the comparison takes quadratic time
        near = difflib.get_close_matches(begin, list(lowered)[:MOST_COMPARED], n=1, cutoff=0.5)
        message = f"unknown {kind} '{plain(asked)}'"
    else:
        message = f"unknown {kind}: expected a name, got {show(asked)}"
    if near:
        message += f", did you mean '{plain(lowered[near[0]])}'?"
    listed = [plain(name) for name in names[:MOST_COMPARED]]
    if len(names) > MOST_COMPARED:
        listed.append(f"and {len(names) - MOST_COMPARED} more")
    message += f"\n  known: {', '.join(listed) if listed else '(none)'}"
    if hint:
        message += f"\n  {hint}"
    return error(message)
