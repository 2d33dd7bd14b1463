"""The one tree of errors.

A message names the request, the facts found, the known names (with the nearest match), and what
to do. Everything that this project raises on purpose derives from `R18Error`; the command line
turns these into one line on stderr and an exit code, and lets any other exception through as the
bug that it is. An exception of a kernel's code keeps its type, and gets a `KernelNote`.

A message may quote an untrusted file or name. `show` and `plain` limit the quotation, and escape
characters that a terminal would obey.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath

MOST_QUOTED = 200
"""The most characters of a file that a message quotes."""

MOST_TEXT = 2000
"""Characters of a text that a kernel wrote, in a message."""

MOST_COMPARED = 1000
"""The most known names that a message lists and compares with."""


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

    `cause` says what was found, `remedy` what to do about it. Raises `TypeError` without a cause.
    """

    def __init__(self, name: str, cause: str = "", remedy: str = "") -> None:
        if not cause:
            raise TypeError(
                "BackendUnavailable takes the backend's name, the cause and a remedy: "
                f"BackendUnavailable(self.name, {show(name)}, 'what to do')"
            )
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


def counted(count: int, noun: str) -> str:
    """A number and its noun: `1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def plain(text: object, limit: int = MOST_QUOTED) -> str:
    """Text that is not trusted, for a message that has its own quotes, in one line.

    Control characters, line breaks among them, are escaped; at most `limit` characters stay.
    """
    found = _escaped(str(text)[: limit + 1].replace("\n", "\\n"))
    return found if len(found) <= limit else found[: limit - 1] + "…"


def _escaped(text: str) -> str:
    """Escape control characters, those that reverse text, lone surrogates; newlines are ours."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def unknown(
    kind: str,
    asked: object,
    known: Iterable[str],
    *,
    hint: str = "",
    meant: str | None = None,
    error: type[R18Error] = UnknownName,
) -> R18Error:
    """Build the error for a name that is not known, with the nearest match and the known names.

    `kind` is the noun of the message ("backend", "checkpoint"), `hint` a closing sentence that
    says what to do. `meant` is suggested in place of the nearest match. `asked` may be anything; a
    value that is no string is quoted.
    """
    names = sorted(known)
    if isinstance(asked, str):
        near = meant or nearest(asked, names)
        message = f"unknown {kind} '{plain(asked)}'"
    else:
        near = meant
        message = f"unknown {kind}: expected a name, got {show(asked)}"
    if near:
        message += f", did you mean '{plain(near)}'?"
    listed = [plain(name) for name in names[:MOST_COMPARED]]
    if len(names) > MOST_COMPARED:
        listed.append(f"and {len(names) - MOST_COMPARED} more")
    message += f"\n  known: {', '.join(listed) if listed else '(none)'}"
    if hint:
        message += f"\n  {hint}"
    return error(message)


def unknown_kernel(glob: str, ids: Iterable[str]) -> R18Error:
    """`unknown` for a glob that matches no kernel's id; a bare op or algorithm gets its stars."""
    names = list(ids)
    if not names:
        return UsageError(f"no kernel matches {show(glob)}: kernels() returned no kernel")
    inside = f"*/{glob}/*"
    part = any(glob in name.split("/")[1:-1] for name in names)
    hint = "A glob over ids works too."
    return unknown("kernel", glob, names, hint=hint, meant=inside if part else None)


def beside_one(ratio: float, digits: int, shown: Callable[[float, int], str]) -> str:
    """A ratio in `digits` digits, or in more where it would be shown as 1 without being 1.

    So the text says on which side of 1 it is. shown: writes a number in a number of digits.
    """
    while shown(ratio, digits) == "1" and ratio != 1 and digits < 17:
        digits += 1
    return shown(ratio, digits)


def nearest(asked: str, known: Iterable[str]) -> str | None:
    """The known name most like the one asked for, or None if none is similar."""
    lowered = {name.lower(): name for name in sorted(known)}
    begin = asked[:MOST_QUOTED].lower()  # the comparison takes quadratic time
    near = difflib.get_close_matches(begin, list(lowered)[:MOST_COMPARED], n=1, cutoff=0.5)
    return lowered[near[0]] if near else None


def described(error: BaseException, where: str = "") -> str:
    """The type, the place and the text of a kernel's exception; `MOST_TEXT` of the text at most."""
    kind = type(error).__name__[:MOST_TEXT]
    try:
        text = str(error)
    except BaseException as another:  # a kernel may raise anything
        return f"{kind}{where}, which cannot be printed: its text raises {type(another).__name__}"
    return f"{kind}{where}: {shortened(text)}"


def shortened(text: str) -> str:
    """A foreign text, cut after `MOST_TEXT` characters."""
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}… ({len(text):,} characters)"


class KernelNote(str):
    """The note on an exception of a kernel's code: which kernel raised it on what, where, and what
    to do."""

    __slots__ = ()


def note_kernel(error: Exception, kernel: str, problem: object) -> None:
    """Leave a `KernelNote` on what a kernel's code raised, unless it is an error of r18.

    kernel: its id. Call it where the error is caught first: the place is looked for in the calls
    between here and there.
    """
    if isinstance(error, R18Error) or kernel_note(error):
        return
    where = raised_in(error)
    said = _escaped(described(error, f" in {where}" if where else ""))
    note = KernelNote(
        f"kernel {plain(kernel)} raised {said}\n  its problem: {plain(str(problem))}\n"
        f"  r18 verify --kernels '{plain(kernel)}', with the same --backend, finds the smallest "
        "problem that shows it"
    )
    with suppress(Exception):  # an exception's class is foreign code
        error.add_note(note)


@contextmanager
def noting(kernel: str, problem: object) -> Iterator[None]:
    """`note_kernel` for whatever is raised inside."""
    try:
        yield
    except Exception as error:
        note_kernel(error, kernel, problem)
        raise


def kernel_note(error: BaseException) -> KernelNote | None:
    """The note of `note_kernel`; None for an exception that no kernel raised."""
    notes: list[object] = []
    with suppress(Exception):  # an exception's class is foreign code
        notes += error.__notes__
    return next((note for note in notes if isinstance(note, KernelNote)), None)


def raised_in(error: BaseException, *, ours: bool = False) -> str:
    """Where a plugin raised an error, such as `run (mine.py:39)`; empty if no such code is known.

    That is the innermost call in the folder of the outermost code that is not r18's or Python's
    import system: a plugin's line, rather than the line of a library that it called. With `ours`,
    r18's own innermost call if there is no other.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return plain(f"{PurePath(error.filename).name}:{error.lineno}")
    places = [place for place in _places(error) if place[0] != "importlib"]
    theirs = [place for place in places if place[0] not in ("r18", "r18_oracle")]
    if theirs:
        folder = PurePath(theirs[0][1]).parent
        places = [place for place in theirs if PurePath(place[1]).parent.is_relative_to(folder)]
    elif not places or not ours:
        return ""
    _, path, line, name = places[-1]
    where = f"{PurePath(path).name}:{line}"
    return plain(where if name == "<module>" else f"{name} ({where})")


def _places(error: BaseException) -> Iterator[tuple[str, str, int, str]]:
    """The top package, file, line and function of each call that an error passed through."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        yield package, code.co_filename, trace.tb_lineno, code.co_name
        trace = trace.tb_next
