"""Where a process stands that gives no sign of life: the stacks of its Python threads.

A signal asks the process, and `faulthandler` answers from C, so a call into C that holds the
interpreter's lock or waits does not prevent the answer. A kernel may have blocked the signal; then
there is no answer. It may have written to the file; only lines in the format of `faulthandler` are
kept.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from r18.errors import plain

SIGNAL = getattr(signal, "SIGURG", None)
"""The signal that asks; None on Windows. A process that does not handle this one ignores it, and
libraries leave it alone: SIGUSR1 would end a process that has not begun to listen."""
ANSWER_SECONDS = 1.0
"""Time limit for the answers."""
LOOK_SECONDS = 0.05
"""An answer that has not grown for this long is complete."""
MOST_READ = 1 << 18
"""Bytes of an answer that are read: 100 threads with 100 calls each may have more."""
MOST_STACKS = 16_000
"""Characters of the stacks in a finding."""
CALLS_SAID = 4
"""Calls that a sentence names, the innermost first."""

OUTERMOST = ("r18_oracle/search/worker.py", "_serve")
"""The function that runs a worker's jobs. Its callers are those of every job, and left out."""

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
_CALL = re.compile(r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<name>.+)')
_OTHER = ("  ...", "...", "  <no Python frame>")


# -- in the process that may hang --------------------------------------------------------------


def listen(folder: str) -> None:
    """From now on this process answers, in a file of that folder. Called in its main thread."""
    if SIGNAL is None:
        return
    with suppress(OSError):  # such as a full disk; then it has no stacks
        # `faulthandler` keeps the file. `ask` empties it, so writing is to begin at its end.
        faulthandler.register(SIGNAL, _file(folder, os.getpid()).open("ab", 0), all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def _file(folder: str, process_id: int) -> Path:
    return Path(folder) / f"stacks-{process_id}"


# -- in the process that asks ------------------------------------------------------------------


def ask(folder: str, process_id: int | None) -> float:
    """Ask a process that listens in a folder; returns until when `answer` is to wait for it."""
    now = time.monotonic()
    if SIGNAL is None or process_id is None:
        return now
    try:
        os.truncate(_file(folder, process_id), 0)
        os.kill(process_id, SIGNAL)
    except OSError:  # it has not begun to listen, or is gone
        return now
    return now + ANSWER_SECONDS


def answer(folder: str, process_id: int | None, until: float) -> str:
    """The stacks of a process that was asked, as `arranged` returns them."""
    if process_id is None:
        return ""
    file = _file(folder, process_id)
    size = 0
    while True:
        before, size = size, _size(file)
        if 0 < size == before or time.monotonic() >= until:
            break
        time.sleep(LOOK_SECONDS)
    with suppress(OSError), file.open("rb") as stream:
        return arranged(stream.read(MOST_READ).decode("utf-8", "replace"))
    return ""


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0


# -- the text ----------------------------------------------------------------------------------


@dataclass
class _Thread:
    """Lines of a thread. serves: it is a worker's main thread. current: it took the signal."""

    current: bool
    serves: bool = False
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add a line, unless `faulthandler` writes no such line or the worker itself is in it."""
        call = _CALL.fullmatch(line)
        if call is None and line not in _OTHER:
            return
        if call is not None and call["name"] == OUTERMOST[1]:
            self.serves |= (call["file"] or "").endswith(OUTERMOST[0])
        if not self.serves:
            self.lines.append("".join(c if c.isprintable() else "\ufffd" for c in line))


def arranged(text: str) -> str:
    """The output of `faulthandler`, the main thread first and threads by number instead of address,
    so that equal stacks are equal texts. Empty if it shows no call; at most `MOST_STACKS`
    characters.
    """
    threads: list[_Thread] = []
    for line in text.split("\n"):
        if heading := _THREAD.fullmatch(line):
            threads.append(_Thread(heading[1] == "Current thread"))
        elif threads:
            threads[-1].add(line)
    if not any(_CALL.fullmatch(line) for thread in threads for line in thread.lines):
        return ""
    # In a main thread of more than 100 calls the outermost is cut off; but it took the signal.
    threads.sort(key=lambda thread: (not thread.serves, not thread.current))
    lines: list[str] = []
    for number, thread in enumerate(threads, 1):
        name = "Main thread" if number == 1 else f"Thread {number}"
        lines += [f"{name}, most recent call first:", *thread.lines]
    whole = "\n".join(lines)
    return whole if len(whole) <= MOST_STACKS else whole[: MOST_STACKS - 1] + "…"


def place(stacks: str) -> str:
    """Where the main thread of arranged stacks stood, as the end of a sentence; or nothing.

    Such as `; it stood in wait (mine.py:7), called by run (mine.py:39)`.
    """
    said: list[str] = []
    for line in stacks.split("\n")[1:]:
        call = _CALL.fullmatch(line)
        if call is None or len(said) == CALLS_SAID:
            break
        file = re.split(r"[/\\]", call["file"] or "???")[-1]
        said.append(f"{plain(call['name'])} ({plain(file)}:{call['line']})")
    return f"; it stood in {', called by '.join(said)}" if said else ""


__all__ = ["SIGNAL", "answer", "arranged", "ask", "listen", "place"]
