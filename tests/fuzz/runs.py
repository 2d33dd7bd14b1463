"""One file under limits of memory and time, and many of them in a process of their own."""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fuzz.damage import damaged
from fuzz.targets import Target
from r18.errors import R18Error

SECONDS = 20.0
"""The time limit for one file in seconds, on a busy machine; none takes a second."""
GROWTH = 768 << 10
"""The memory limit for one file: kilobytes added to the process's peak."""
OWN_FAULT = 97
"""The exit code of a child in which the fuzzer itself failed."""
MOST_MESSAGE = 4000
"""The longest message in characters; messages quote less than this, and list only known names."""


class TooLong(BaseException):
    """A timeout, which the reading code must not catch."""


@dataclass(frozen=True)
class Failure:
    """A file that was neither accepted nor refused with a message."""

    target: str
    data: bytes
    why: str


def read_one(target: Target, data: bytes, folder: Path) -> str | None:
    """Read a damaged file; returns what was wrong with how that ended, or None."""
    target.put(folder, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _limited(SECONDS):
            target.read(folder)
    except R18Error as error:
        return _wrong_words(str(error))
    except TooLong:
        return f"it took more than {SECONDS:g} s"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {error!s:.200}"
        )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return f"it took {grown >> 10} MB" if grown > GROWTH else None


def _wrong_words(text: str) -> str | None:
    if not text.replace("\n", "").isprintable():
        return f"the message holds control characters: {text[:300]!r}"
    return (
        f"a message of {len(text)} characters: {text[:300]}" if len(text) > MOST_MESSAGE else None
    )


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def late(*_: object) -> NoReturn:
        raise TooLong

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def files(target: Target, seed: str, count: int) -> Iterator[bytes]:
    """Damaged files; the same for the same seed."""
    rng = random.Random(f"{target.name} {seed}")
    for _ in range(count):
        yield damaged(rng, rng.choice(target.valid))


def chunk(target: Target, seed: str, count: int, folder: Path) -> list[Failure]:
    """Read `count` files in a child process; if it crashes, the last file failed."""

    def read() -> list[Failure]:
        return [
            Failure(target.name, data, why)
            for data in files(target, seed, count)
            if (why := read_one(target, data, folder)) is not None
        ]

    answer, status = in_child(read)
    if not answer:
        ended = "the fuzzer failed" if status == OWN_FAULT << 8 else f"the process ended: {status}"
        return [Failure(target.name, target.get(folder), ended)]
    result: list[Failure] = pickle.loads(answer)
    return result


def in_child(work: Callable[[], object]) -> tuple[bytes, int]:
    """What `work` returns in a forked process, pickled, and the process's status.

    It is silent and of limited memory. The bytes are empty if it crashed or `work` raised.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
            found = pickle.dumps(work())
            with os.fdopen(writing, "wb") as stream:
                stream.write(found)
            os._exit(0)
        finally:  # an error of the fuzzer's own
            os._exit(OWN_FAULT)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    return answer, status
