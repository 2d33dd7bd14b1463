"""Processes that mutants run in: forked from a warm worker, ended by an alarm of their own.

What a mutant breaks dies with its process, and a worker is warm: a fork has at once what took it
seconds to import. A process may be asked again and again; whoever asks decides how long.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

Say = Callable[[Any], None]
"""A process's way to speak while it works."""

Work = Callable[[Any, Say], Any]
"""What a process does with a request: it may say something, and returns its result."""


@dataclass(frozen=True)
class Ended:
    """How work ended that came to no result of its own: a check, and what to say of it."""

    check: str
    message: str


@dataclass(frozen=True)
class _Result:
    """The last word on a request; nothing that a mutant prints or leaves with looks like it."""

    value: Any


class Process:
    """A forked process that does `work` for one request after another.

    asked: how often it was. silence: the longest, in seconds, that it said nothing to the last
    request. child: its id, 0 once it has ended.
    """

    def __init__(self, work: Work) -> None:
        asking, requests = os.pipe()
        answers, answering = os.pipe()
        self.asked = 0
        self.silence = 0.0
        self.child = os.fork()
        if self.child == 0:
            os.close(requests)
            os.close(answers)
            _serve(work, asking, answering)
        os.close(asking)
        os.close(answering)
        self._requests = os.fdopen(requests, "wb")
        self._answers = os.fdopen(answers, "rb")

    def ask(self, request: Any, seconds: int) -> list[Any]:
        """All that it says to a request; the last is the result, or how it `Ended`.

        seconds: after so many its alarm ends it; the work may set that anew. An ended process is
        not to be asked again.
        """
        self.asked += 1
        self.silence = 0.0
        said: list[Any] = []
        heard = time.monotonic()
        try:
            pickle.dump((request, seconds), self._requests)
            self._requests.flush()
            while True:
                word = pickle.load(self._answers)
                before, heard = heard, time.monotonic()
                self.silence = max(self.silence, heard - before)
                if isinstance(word, _Result):
                    return [*said, word.value]
                said.append(word)
        # The last of them: it died in the middle of a word.
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            return [*said, self._death()]

    def end(self) -> None:
        """Whatever it does."""
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            self.child = 0
        self._answers.close()
        with suppress(BrokenPipeError):  # a request that it did not take is still in there
            self._requests.close()

    def _death(self) -> Ended:
        _, status = os.waitpid(self.child, 0)
        self.child = 0
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            return Ended("hang", "a call had not ended")
        if code < 0:
            return Ended("crash", f"died of {signal.Signals(-code).name}")
        return Ended("crash", f"exited with code {code}")


def _serve(work: Work, asking: int, answering: int) -> NoReturn:
    """The child's whole life; the alarm's default action ends it, whatever it is doing."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with os.fdopen(asking, "rb") as requests, os.fdopen(answering, "wb") as answers:

            def say(word: Any) -> None:
                answers.write(pickle.dumps(word))
                answers.flush()

            while True:
                request, seconds = pickle.load(requests)
                signal.alarm(seconds)
                result = work(request, say)
                signal.alarm(0)
                say(_Result(result))
    finally:  # whatever was raised must not run the parent's code in the child
        os._exit(97)
