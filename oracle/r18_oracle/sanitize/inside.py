"""The process that runs under compute-sanitizer: a backend's kernels on the problems of a profile.

Each buffer of a call is an allocation. Between the guard zones of one large allocation, where
`r18 verify` places buffers, memcheck would not see an access past the end of a buffer, and poisoned
memory would count as initialised. Values are neither judged nor read back: initcheck does not see
TMA stores, and would report every output that is stored by TMA as uninitialised.

    python -m r18_oracle.sanitize.inside '{"backend": ..., "kernels": [...], ...}'

Prints a line of JSON when each kernel begins and when it ends. Exits with `BROKEN` at the first
call that raises, since the device is then in an error state. At the deadline it exits after the
current call, so that the tool reports what it found; if the tool, its parent, has ended, it exits
at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from r18.backend import Backend, Kernel
from r18.backend.registry import load_backend
from r18.errors import described
from r18.graph.ops import Problem
from r18.runtime.launch import launch_on
from r18_oracle.generate.inputs import make_case
from r18_oracle.loading import kernel_of
from r18_oracle.search.campaign import walk
from r18_oracle.search.profiles import Profile, profile

BROKEN = 41
"""The exit code after a call that raised."""


class Broken(BaseException):
    """A call raised. A `BaseException`, so that Hypothesis does not try it again."""


class TimeIsUp(BaseException):
    """The deadline has passed. A `BaseException`, for the same reason."""


def exercise(
    backend: Backend,
    kernel: Kernel,
    how: Profile,
    seed: int,
    network_name: str | None,
    deadline: float = math.inf,
) -> int:
    """Call the kernel on the problems of a campaign; returns how many it took.

    deadline: on the clock of `time.monotonic`. Raises `Broken` with the exception of the first call
    that fails, and `TimeIsUp` after the deadline.
    """
    taken = 0

    def attempt(one: Kernel, problem: Problem, data_seed: int, rounding: str) -> bool:
        nonlocal taken
        if time.monotonic() >= deadline:
            raise TimeIsUp
        if one.refusal(problem) is not None:
            return False
        case = make_case(one, problem, rounding, data_seed)
        weights = (array.astype(np.float64) for array in case.weights)
        try:
            launch = launch_on(backend, one, problem, *case.inputs, *weights)
            stream = backend.stream()
            launch.enqueue(stream)
            stream.synchronize()
        except Exception as error:
            about = problem if one is kernel else f"{problem} ({one.id})"
            raise Broken(f"{about}: {described(error)}") from error
        taken += 1
        return True

    walk(backend, kernel, how, seed, network_name, attempt)
    return taken


def main(asked: str) -> int:
    """Run the request, given as JSON; returns the exit code."""
    request: dict[str, Any] = json.loads(asked)
    threading.Thread(target=_go_with, args=(os.getppid(),), daemon=True).start()
    backend = load_backend(request["backend"])
    backend.probe()
    how = profile(request["profile"])
    stop = request.get("deadline")
    deadline = math.inf if stop is None else float(stop)
    for name in request["kernels"]:
        kernel = kernel_of(backend, name)
        _say(begins=name)
        try:
            taken = exercise(backend, kernel, how, request["seed"], request["network"], deadline)
        except Broken as broken:
            _say(broken=name, error=str(broken))
            return BROKEN
        except TimeIsUp:
            return 0
        _say(ends=name, problems=taken)
    return 0


def _go_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
