"""The processes in which mutants run: forked from a warm worker, each with its own alarm.

A mutant's damage ends with its process. A fork of a warm worker skips seconds of imports. A
process can handle any number of requests; the caller decides when to replace it.
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

from r18.ends import signal_name

Say = Callable[[Any], None]
"""Sends a message to the caller while the process works."""

Work = Callable[[Any, Say], Any]
"""Handles a request: may send messages, and returns the result."""


@dataclass(frozen=True)
class Ended:
    """How work ended without a result: the check that failed, and a message."""

    check: str
    message: str


@dataclass(frozen=True)
class _Result:
    """The last message on a request. A mutant cannot produce one by printing or exiting."""

    value: Any


class Process:
    """A forked process that handles one request after another with `work`.

    asked: the number of requests. silence: the longest time between messages on the last request,
    in seconds. child: its process id, 0 after it has ended.
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
        """Send a request; returns the messages, and last the result or `Ended`.

        seconds: the alarm ends the process after this time; the work may reset the alarm. An ended
        process takes no further requests.
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
        # UnpicklingError: it died in the middle of a message.
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            return [*said, self._death()]

    def end(self) -> None:
        """Kill the process, whatever it does."""
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            self.child = 0
        self._answers.close()
        with suppress(BrokenPipeError):  # a request that it did not read is still in the buffer
            self._requests.close()

    def _death(self) -> Ended:
        _, status = os.waitpid(self.child, 0)
        self.child = 0
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            return Ended("hang", "a call had not ended")
        if code < 0:
            return Ended("crash", f"died of {signal_name(-code)}")
        return Ended("crash", f"exited with code {code}")


def _serve(work: Work, asking: int, answering: int) -> NoReturn:
    """The child's main loop; the alarm's default action ends it, whatever it is doing."""
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
