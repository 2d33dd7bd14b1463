"""The command-line application: subcommands, exit codes, and how errors are shown.

Exit codes: 0 success; 1 a finding (a difference, a failed check); 2 a wrong request, missing or
damaged input, a package that is not installed, a kernel that raises, or nothing executed. Errors of
the `R18Error` tree, missing extras and exceptions of kernels are one message on stderr; anything
else is a bug and keeps its traceback.
`r18.ends` has the exit codes of a command that is interrupted or cannot write its output.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import r18
from r18.errors import ImageError, R18Error, kernel_note, plain

FOUND = 1
"""Exit code: the command ran, and found what it looked for (a difference, a failure)."""
REFUSED = 2
"""Exit code: the command could not do what was asked."""

GROUP = "r18.commands"
"""The entry-point group by which other packages, our oracle first, add commands."""

# The core's, each a module with one function of its own name (`plan.plan`).
COMMANDS: tuple[str, ...] = (
    "backends",
    "kernels",
    "schedule",
    "plan",
    "tune",
    "export",
    "quantize",
    "classify",
    "evaluate",
    "bench",
    "profile",
    "roofline",
    "report",
)

EXTRAS = dict.fromkeys(("torch", "torchvision", "hypothesis", "pytest", "coverage"), "oracle")
"""Modules that commands import without a check, and the extra that installs each."""


class _Escaped(BaseException):
    """An exception that Typer would end the process for in its own way."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def _escaping() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        raise _Escaped(error) from error


class _Commands(TyperGroup):
    """The subcommands; Ctrl-C and streams that cannot be written are left to `r18.ends`."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _escaping():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _escaping():
            return super().invoke(ctx)


class _Command(TyperCommand):
    """A subcommand, for which an option's name is never the value of the option before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        nargs = {
            name: 0 if getattr(one, "is_flag", False) else one.nargs
            for one in self.get_params(ctx)
            for name in (*one.opts, *one.secondary_opts)
            if name.startswith("-")  # no positional argument
        }
        rest = iter(args)
        for word in rest:
            if word == "--":
                break
            for value in islice(rest, nargs.get(word, 0)):
                if value in nargs:
                    values = "a value" if nargs[word] == 1 else f"{nargs[word]} values"
                    ctx.fail(f"Option '{word}' needs {values}; '{value}' is an option.")
        return super().parse_args(ctx, args)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"r18 {r18.__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    pass


def _brought(entry: EntryPoint) -> Callable[..., None]:
    """The command of an entry point; of one that cannot be loaded, a command that says so."""
    try:
        command: Callable[..., None] = entry.load()
    except (Exception, SystemExit) as error:  # another package's fault hides no other command
        why = f"the command '{entry.name}' ({entry.value}) cannot be loaded: {error!r}"

        def broken() -> None:
            raise R18Error(why)

        broken.__doc__ = f"Cannot be loaded: {type(error).__name__}."
        return broken
    return command


def application(asked: Sequence[str] = ()) -> typer.Typer:
    """The command line for these arguments.

    If the first word is a command, it is the only one that is loaded: the others' libraries take
    longer to import than many a command runs. For `--help` and a word unknown, all are.
    """
    app = typer.Typer(
        name="r18",
        cls=_Commands,
        help="ResNet-18 inference written by hand, and an oracle that checks every kernel.\n\n"
        "Exit codes: 0 success, 1 a difference or failed check was found, 2 wrong request or "
        "input, 74 the output cannot be written, 130 Ctrl-C, 141 the reader of the output has "
        "stopped, 143 SIGTERM.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    word = next((one for one in asked if not one.startswith("-")), "")
    if word in COMMANDS:
        _add(app, word)
        return app
    brought = [entry for entry in sorted(entry_points(group=GROUP)) if entry.name not in COMMANDS]
    named = [entry for entry in brought if entry.name == word]
    for name in () if named else COMMANDS:
        _add(app, name)
    for entry in named or brought:
        app.command(entry.name, cls=_Command)(_brought(entry))
    return app


def _add(app: typer.Typer, name: str) -> None:
    """One of `COMMANDS`."""
    app.command(name, cls=_Command)(getattr(importlib.import_module(f"r18.cli.{name}"), name))


def main() -> None:
    """Run the command line in this process.

    Raises `SystemExit`, `KeyboardInterrupt`, and the `OSError` of a stream that cannot be written.
    """
    try:
        application(sys.argv[1:])(prog_name="r18")  # however it was started
    except (_Escaped, Exception) as caught:
        error = caught.error if isinstance(caught, _Escaped) else caught
        if (message := _message(error)) is None:
            raise error from None
        print(f"r18: {message}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


def _message(error: BaseException) -> str | None:
    """The message in place of a traceback; None for an error that is a bug or ends the process."""
    if isinstance(error, ImageError) and isinstance(error.__cause__, ImageError):
        error = error.__cause__  # it names the file; around it stands its number in a Python list
    if isinstance(error, R18Error):
        return str(error)
    if note := kernel_note(error):
        return note
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"'{plain(error.filename)}': the file system takes no name of that length"
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        remedy = f"pip install 'r18[{EXTRAS[error.name]}]'"
        return f"this needs {error.name}, which is not installed\n  {remedy}"
    return None
