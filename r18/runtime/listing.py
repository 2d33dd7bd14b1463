"""Every installed backend, asked in a process of its own.

A plugin that hangs, crashes or exits as it is imported or probed costs one line of the listing. One
process asks the backends in turn; only after such a plugin is another one started for the rest.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

from r18.backend import CompileOptions, DeviceInfo
from r18.backend.registry import Listing, installed, load_backend, survey
from r18.ends import deaf, end_group, signal_name
from r18.graph.precision import PRECISIONS
from r18.graph.resnet import resnet18
from r18.graph.scaling import calibrated
from r18.runtime.plan import make_plan

SECONDS = 60.0
"""Time for a backend to be imported, probed and planned for, on a busy machine."""
REMEDY = "This is a fault of that plugin: import it by hand to see where."
MOST_TEXT = 1000
"""Characters of a message of a plugin."""


@dataclass(frozen=True)
class Entry:
    """A backend's line, and the precisions in which it has a kernel for every step of ResNet-18."""

    line: Listing
    precisions: tuple[str, ...] = ()


def lines(seconds: float = SECONDS) -> list[Listing]:
    """Every installed backend, in the order of `auto`, probed in this process.

    Other people's plugins are first asked in a process of their own, for at most `seconds` each:
    here come only those that survived it.
    """
    points = installed()
    others = [name for name, at in points.items() if at.dist is None or at.dist.name != "r18"]
    broken = {e.line.name: e.line for e in entries(seconds, others) if e.line.device is None}
    here = {line.name: line for line in survey(points.keys() - broken.keys())}
    return [broken.get(name) or here[name] for name in points]


def entries(seconds: float = SECONDS, names: Sequence[str] | None = None) -> list[Entry]:
    """Every installed backend, or those of these names, in the order of `auto`.

    seconds: the time that each one has.
    """
    found: list[Entry] = []
    names = list(installed()) if names is None else names
    while len(found) < len(names):
        found += _asked(names[len(found) :], seconds)
    return found


def _asked(names: Sequence[str], seconds: float) -> Iterator[Entry]:
    """The entries of backends from one process, up to the first one that ends it or hangs."""
    code = f"from r18.runtime.listing import answer; answer({list(names)!r})"
    with deaf():
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],  # -P: not from the current folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    assert process.stdout is not None
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(process.stdout, heard), daemon=True).start()
    try:
        for name in names:
            said = _next(process, heard, seconds)
            if isinstance(said, str):
                yield Entry(Listing(name, _provider(name), None, said, REMEDY))
                return
            yield _entry(said)
    finally:
        end_group(process.pid)
        process.wait()


def _listen(stream: IO[bytes], heard: queue.SimpleQueue[bytes]) -> None:
    for line in stream:
        heard.put(line)


def _next(
    process: subprocess.Popen[bytes], heard: queue.SimpleQueue[bytes], seconds: float
) -> bytes | str:
    """The next answer, or why there is none."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = process.poll()
        with suppress(queue.Empty):
            # Output from before it ended may still be on the way.
            return heard.get(timeout=0.05 if ended is None else 0.5)
        if ended is not None:
            how = f"died of {signal_name(-ended)}" if ended < 0 else f"exited with code {ended}"
            return f"its process {how} when it was imported or probed"
    return f"gave no answer for {seconds:g} s when it was imported or probed"


def _entry(said: bytes) -> Entry:
    data = json.loads(said)
    device = data["line"].pop("device")
    line = Listing(**data["line"], device=None if device is None else DeviceInfo(**device))
    return Entry(line, tuple(data["precisions"]))


def _provider(name: str) -> str:
    point = installed()[name]
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


# -- in the other process ----------------------------------------------------------------------


def answer(names: Sequence[str]) -> None:
    """Write one line for each backend to stdout, which plugins get no hold of."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        for name in names:
            (line,) = survey([name])
            data = asdict(line)
            for text in ("cause", "remedy"):
                data[text] = str(data[text])[:MOST_TEXT]
            precisions = _precisions(name) if line.device else []
            print(json.dumps({"line": data, "precisions": precisions}), file=out, flush=True)


def _precisions(name: str) -> list[str]:
    """The precisions in which the backend's kernels cover ResNet-18 at level `all`, by the planner;
    needs no device."""
    backend, network, covered = load_backend(name), resnet18(), []
    for precision in PRECISIONS:
        try:
            options = CompileOptions(precision=precision)
            make_plan(backend, calibrated(network, precision), options)
        except Exception:  # a plugin's fault must not end the listing
            continue
        covered.append(precision)
    return covered


__all__ = ["Entry", "answer", "entries", "lines"]
