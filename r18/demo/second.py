"""A second process: PyTorch and the oracle take seconds to import, while the first one computes.

It runs what the first one calls, one call at a time, so that nothing else runs while one of the two
is timed.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from r18.ends import deaf
from r18.errors import R18Error
from r18.stopwatch import Stopwatch, part, stopwatch

END_SECONDS = 2.0
"""For a process that closed its pipe to end."""


class Second:
    """An object in a process of its own, and calls of its methods.

    make: makes the object there; a function at the top level of a module.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with deaf():  # Ctrl-C ends this process, and that one with it
            self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
            self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call; `answer` gives its result. Raises `R18Error` if the process is gone."""
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._gone() from None

    def answer(self) -> Any:
        """The result of the call that was begun first.

        Raises `R18Error` if the call raised, with its traceback, and if the process is gone.
        """
        try:
            right, result = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not right:
            raise R18Error(f"the second process failed:\n{result}")
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        """As `ask`, then `answer`."""
        self.ask(method, *arguments)
        return self.answer()

    def seconds(self) -> list[tuple[str, float]]:
        """The parts of its time, without waiting for calls: (part, seconds)."""
        found: list[tuple[str, float]] = self.call(SECONDS)
        return found

    def close(self) -> None:
        """End the process, which has nothing to clean up. May be called again."""
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _gone(self) -> R18Error:
        self._process.join(END_SECONDS)
        return R18Error(f"the second process ended with exit code {self._process.exitcode}")


SECONDS = "r18 seconds"
"""A call that is none of the object's methods."""


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """In the second process: answer calls until the first process closes its end."""
    with stopwatch("start of Python, imports") as watch:
        served = make()
        while True:
            try:
                with part(WAITING):
                    method, arguments = pipe.recv()
            except EOFError:
                return
            answer: tuple[bool, Any]
            try:
                if method == SECONDS:
                    answer = True, _busy(watch)
                else:
                    answer = True, getattr(served, method)(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)


WAITING = "waiting for calls"


def _busy(watch: Stopwatch) -> list[tuple[str, float]]:
    rows = [(name, seconds) for name, seconds in watch.rows()[:-1] if name != WAITING]
    return [*rows, ("total", sum(seconds for _, seconds in rows))]


__all__ = ["Second"]
