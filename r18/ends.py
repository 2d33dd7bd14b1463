"""How a command ends early: Ctrl-C, SIGTERM, a closed pipe, a stdout that cannot be written.

Each ends with one line on stderr and an exit code of its own. A signal raises an exception, so that
files that are half written, worker processes and temporary folders are removed on the way out.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

UNWRITABLE = 74
"""Exit code: stdout or stderr cannot be written, as on a full disk; EX_IOERR of sysexits.h."""
HUNG_UP = 129
INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143
"""Exit codes: 128 and the signal's number, as shells have it. 141 is SIGPIPE's: whoever read the
output has stopped, as `head` does."""

WORDS = {HUNG_UP: "hung up", INTERRUPTED: "interrupted", TERMINATED: "terminated"}
SIGNALS = ("SIGHUP", "SIGINT", "SIGTERM")  # Windows has no SIGHUP
SAME_SECONDS = 2.0
"""A second signal within this time must not cut short the cleaning up for the first."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, as a `KeyboardInterrupt`: it triggers the same cleanup as Ctrl-C."""


class _Signals:
    """Handlers that raise `KeyboardInterrupt` or `Terminated` while the command runs.

    caught: the exit code of the last signal, or 0. active: cleared when the command has ended;
    from then on there is nothing to clean up, and a signal ends the process at once.
    """

    def __init__(self) -> None:
        self.caught = 0
        self.active = True
        self._last = -SAME_SECONDS

    def install(self) -> None:
        """Signals that are ignored stay so, as with `nohup` or in the background of a shell."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread do it
        for number in (getattr(signal, name, None) for name in SIGNALS):
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.caught = 128 + number
        if not self.active:
            with suppress(OSError):
                os.write(2, f"r18: {WORDS[self.caught]}\n".encode())
            os._exit(self.caught)
        if time.monotonic() - self._last < SAME_SECONDS:
            return
        self._last = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def run(command: Callable[[], object]) -> NoReturn:
    """Run a command of the console as long as it is let, then exit; for a process of its own.

    command: exits as it likes; `KeyboardInterrupt`, with what the user should know as its argument,
    and the `OSError` of a stream that cannot be written come out of it as they are. Any other
    exception passes through as the bug that it is.
    """
    signals = _Signals()
    try:
        signals.install()
        sys.stdout, sys.stderr = _watched(sys.stdout), _watched(sys.stderr)
        try:
            with _broken_streams():
                command()
                _flush()
            code: int | str | None = 0
        except SystemExit as end:
            code = end.code
            with _broken_streams():
                _flush()
            if signals.caught and code:  # it may have made another error of the signal
                raise KeyboardInterrupt from None
    except KeyboardInterrupt as error:
        signals.active = False
        code = signals.caught or INTERRUPTED
        _say(": ".join([WORDS[code], *map(str, error.args)]))
    except _Broken as broken:
        signals.active = False
        code = broken.code
        _say(broken.line)
    signals.active = False
    _drop_unwritten()
    sys.exit(code)


@contextmanager
def deaf() -> Iterator[None]:
    """Processes that are started inside do not get Ctrl-C; this one gets it when the block ends."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # It would be started with the first process, and let the signal through again.
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferred() -> Iterator[None]:
    """As `deaf`, and signals are put off to the end: half of the block could not be undone."""
    pending: list[int] = []
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # signals are the main thread's
    # The mask does not do: another thread may take the signal, and the handler runs in this one.
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda got, frame: pending.append(got))
    try:
        with deaf():
            yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
    if pending:
        signal.raise_signal(pending[0])


def end_group(leader: int) -> None:
    """Kill a process, the group that it leads, and its descendants that have left the group."""
    import psutil  # not before a command has its handlers

    found = []
    with suppress(psutil.Error):
        found = psutil.Process(leader).children(recursive=True)
    if hasattr(os, "killpg"):
        with suppress(OSError):  # no such group: it leads none yet, or is gone
            os.killpg(leader, signal.SIGKILL)
    for process in found:
        with suppress(psutil.Error):
            process.kill()


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `SIGRTMIN+3`: Python names only the first and the last real-time signal."""
    with suppress(ValueError):
        return signal.Signals(number).name
    first = getattr(signal, "SIGRTMIN", None)
    if first is not None and first < number <= signal.SIGRTMAX:
        return f"SIGRTMIN+{number - first}"
    return f"signal {number}"


class _Broken(Exception):
    """A stream that cannot be written: the exit code, and the line to say."""

    def __init__(self, code: int, line: str) -> None:
        self.code, self.line = code, line
        super().__init__(line)


@contextmanager
def _broken_streams() -> Iterator[None]:
    """Turn the error of a standard stream into `_Broken`; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise _Broken(CLOSED_PIPE, "the reader of the output has closed the pipe") from None
        names = [name for name in ("stdout", "stderr") if _unwritable(getattr(sys, name))]
        if not names:
            raise
        line = f"cannot write {' or '.join(names)}: {error.strerror or error}"
        raise _Broken(UNWRITABLE, line) from None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed when the process began
            stream.flush()


class _Watched(io.FileIO):
    """A descriptor that remembers that it could not be written: an `OSError` does not say where."""

    failed = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            self.failed = True
            raise


def _watched(stream: TextIO) -> TextIO:
    """A standard stream over `_Watched`; as it is where it has no descriptor, or is a console."""
    if os.name == "nt" or not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        raw = io.BufferedWriter(_Watched(stream.fileno(), "wb", closefd=False))
    except (OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _unwritable(stream: TextIO | None) -> bool:
    """Whether something could not be written to a stream, or cannot now."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        return True
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return getattr(raw, "failed", False)


def _say(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        print(f"r18: {line}", file=sys.stderr, flush=True)


def _drop_unwritten() -> None:
    """Drop unwritten output: Python would write it once more as it ends, and complain."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and _unwritable(stream):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


__all__ = ["deaf", "deferred", "end_group", "run", "signal_name"]
