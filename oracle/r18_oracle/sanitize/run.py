"""A backend's kernels under NVIDIA's compute-sanitizer, tool by tool.

memcheck: accesses out of bounds or misaligned. racecheck: hazards in shared memory. initcheck:
reads of global memory that nothing wrote. synccheck: barriers that not all threads reach.

A process takes seconds to start under a tool, and its tool's errors are laid to no kernel; so it
runs a few kernels, and where there are errors, each of them again by itself.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from r18.errors import R18Error, UsageError
from r18.machine import THREADS, cpus
from r18_oracle.sanitize.inside import BROKEN
from r18_oracle.sanitize.tool_report import Complaint, Report, parse

# What each tool is told besides. NOTE: memcheck also reports calls of CUDA's API that fail, such
# as a driver's being asked for a function that it lacks; a failing launch raises by itself.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
POOL_OFF = {"R18_CUPY_POOL": "0"}
"""So that each buffer is an allocation that the tools know of; see `r18_cupy.cuda.device`."""

MOST_KERNELS = 6
"""Of a process."""
ROUNDS = 4
"""Processes that each job runs one after another, so that all end at about the same time."""
GRACE_SECONDS = 20.0
"""A process ends by itself when its time is up, after the call that it is in; if not, so much
later."""


@dataclass(frozen=True)
class Request:
    """What to run: kernel ids, on the problems of a profile and of a network (or none).

    seconds: the longest that a tool may be silent about its next kernel.
    """

    backend: str
    kernels: tuple[str, ...]
    profile: str = "quick"
    network: str | None = "resnet18"
    seed: int = 0
    seconds: float = 3600.0


@dataclass(frozen=True)
class Part:
    """Kernels to run under a tool in one process."""

    tool: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class KernelResult:
    """What a tool found in one kernel.

    problems: calls that came to their end. errors: as the tool counts them; None without a
    summary. complaints: those printed. broken: what ended its run before its end, if anything did.
    """

    tool: str
    kernel: str
    problems: int
    errors: int | None
    complaints: tuple[Complaint, ...] = ()
    broken: str = ""

    @property
    def verdict(self) -> str:
        """`clean` only when the kernel came to its end and the log says so."""
        if self.errors or self.broken:
            return "FAIL"
        if not self.problems:
            return "nothing ran"
        return "clean" if self.errors == 0 else "a log without a summary"


def find(asked: str | None = None) -> Path:
    """The tool's executable: `asked`, else on the path, in CUDA_HOME, or of the CUDA wheels.

    Raises `UsageError` with the remedy.
    """
    if asked is not None:
        if found := shutil.which(asked):
            return Path(found)
        raise UsageError(f"there is no executable '{asked}'")
    site = Path(sysconfig.get_path("purelib"))
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda") if home]
    folders += [home.parent / "compute-sanitizer" for home in folders]
    folders += sorted(site.glob("nvidia/*/bin"))
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    if found := shutil.which("compute-sanitizer", path=search):
        return Path(found)
    raise UsageError(
        "compute-sanitizer is not found on the path, in CUDA_HOME, or beside the CUDA wheels\n"
        "  it comes with the CUDA toolkit (package cuda-sanitizer); install it, or say where it "
        "is with --sanitizer PATH"
    )


def version_of(sanitizer: Path) -> str:
    """Its name and version, as it says them; raises `R18Error` when it does not run."""
    try:
        said = subprocess.run(
            [str(sanitizer), "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise R18Error(f"{sanitizer} does not run: {error}") from error
    lines = [line for line in said.stdout.splitlines() if "ersion" in line]
    return f"compute-sanitizer {lines[-1].strip()}" if lines else "compute-sanitizer"


def parts(kernels: Mapping[str, Sequence[str]], jobs: int) -> list[Part]:
    """What each process runs, of the kernels that are asked for by tool, in the order to run it.

    Every tool comes to the first kernels before any comes to the last.
    """
    share = math.ceil(sum(map(len, kernels.values())) / (jobs * ROUNDS))
    size = max(1, min(MOST_KERNELS, share))
    found = [
        (first, Part(tool, tuple(names[first : first + size])))
        for tool, names in kernels.items()
        for first in range(0, len(names), size)
    ]
    return [part for _, part in sorted(found, key=lambda pair: pair[0])]


class Runner:
    """Runs parts of a request, some of them side by side.

    jobs: how many processes at a time; they share the cores and the device. deadline: by
    `time.monotonic`; what has not come to its end by then has no result. variables: of the
    processes' environment, besides ours.
    """

    def __init__(
        self,
        sanitizer: Path,
        request: Request,
        jobs: int = 1,
        deadline: float = math.inf,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._sanitizer = sanitizer
        self._request = request
        self._jobs = jobs
        self._deadline = deadline
        self._variables = variables
        self._over = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, todo: Sequence[Part]) -> Generator[list[KernelResult], None, None]:
        """The results of each part as it comes to its end; closing the iterator ends them all."""
        with ThreadPoolExecutor(self._jobs) as threads:
            started = [threads.submit(self.part, part) for part in todo]
            try:
                for done in as_completed(started):
                    yield done.result()
            finally:
                self._over.set()
                for future in started:
                    future.cancel()
                for process in tuple(self._running):
                    process.kill()

    def part(self, part: Part) -> list[KernelResult]:
        """A result for each kernel, but for those that there was no time for.

        A new process goes on after one that broke, and with each kernel of one that had errors.
        """
        found: list[KernelResult] = []
        waiting = [part.kernels]
        while waiting and not self._is_late():
            kernels = waiting.pop(0)
            process = self._process(part.tool, kernels)
            if process.errors == 0 or len(process.begun) == 1:
                found += process.results(part.tool)
            else:  # whose are they?
                waiting += [(kernel,) for kernel in process.begun]
            if rest := tuple(kernel for kernel in kernels if kernel not in process.begun):
                waiting.append(rest)
        return found

    def _is_late(self) -> bool:
        return self._over.is_set() or time.monotonic() >= self._deadline

    def _process(self, tool: str, kernels: Sequence[str]) -> _Process:
        """One, over as many of the kernels as it gets through; at least one is begun."""
        with tempfile.TemporaryDirectory(prefix="r18-sanitize-") as name:
            folder = Path(name)
            stop = None if self._deadline == math.inf else self._deadline
            asked = asdict(self._request) | {"kernels": list(kernels), "deadline": stop}
            command = [
                *(str(self._sanitizer), "--tool", tool, *TOOLS[tool]),
                *("--target-processes", "all", "--print-limit", "100"),
                *("--log-file", str(folder / "%p.log")),
                *(sys.executable, "-m", "r18_oracle.sanitize.inside", json.dumps(asked)),
            ]
            found = _Process()
            stderr = folder / "stderr"
            with (
                stderr.open("w") as errors,
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env={**_environment(self._jobs), **self._variables},
                ) as process,
            ):
                self._running.add(process)
                if self._over.is_set():  # since just now: nobody else will end it
                    process.kill()
                watch = _Watch(process, self._request.seconds, self._deadline + GRACE_SECONDS)
                assert process.stdout is not None
                for line in process.stdout:
                    watch.heard()
                    _note(found, _words(line))
                code = process.wait()
                watch.stop()
                self._running.discard(process)
            found.errors, found.complaints = _summed(_reports(folder))
            if not found.begun:  # going on would go on for ever
                found.begun.append(kernels[0])
            under = found.begun[-1]
            ended = under in found.problems or under in found.broken
            if not ended and not self._is_late():
                found.broken[under] = _cause(watch, code, stderr.read_text("utf-8", "replace"))
        return found


@dataclass
class _Process:
    """What one process came to.

    begun: the kernels that it came to. problems, broken: of those that came to their end, and of
    those that something ended. errors, complaints: the tool's, of all of it.
    """

    begun: list[str] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    errors: int | None = None
    complaints: tuple[Complaint, ...] = ()

    def results(self, tool: str) -> list[KernelResult]:
        """Of those that ended, one way or the other."""
        return [
            KernelResult(
                tool,
                kernel,
                self.problems.get(kernel, 0),
                self.errors,
                self.complaints,
                self.broken.get(kernel, ""),
            )
            for kernel in self.begun
            if kernel in self.problems or kernel in self.broken
        ]


def _environment(jobs: int) -> dict[str, str]:
    """Of a process: the pool off, and no more threads than its share of the cores."""
    threads = max(1, cpus() // jobs)
    return {THREADS: str(threads)} | os.environ | POOL_OFF


def _note(found: _Process, said: Mapping[str, Any]) -> None:
    """What a process says of a kernel: that it begins, that it ended, or what broke it."""
    if "begins" in said:
        found.begun.append(said["begins"])
    if "ends" in said:
        found.problems[said["ends"]] = said["problems"]
    if "broken" in said:
        found.broken[said["broken"]] = said["error"]


def _cause(watch: _Watch, code: int, stderr: str) -> str:
    """Why a process came to no end of its kernel."""
    if watch.ended:
        return f"said nothing for {watch.seconds:g} s and was ended"
    if code in (0, BROKEN):
        return f"its process ended with code {code} and said nothing"
    return f"its process ended with code {code}: {' '.join(stderr.split()[-40:])}"


def _words(line: str) -> dict[str, Any]:
    """A line of the child's; what else is printed there is nobody's."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class _Watch:
    """Ends a process that says nothing for too long, or that is late."""

    def __init__(self, process: subprocess.Popen[str], seconds: float, latest: float) -> None:
        self._process = process
        self._latest = latest
        self.seconds = seconds
        self.ended = False
        self._timer = self._started()

    def _started(self) -> threading.Timer:
        patience = min(self.seconds, max(0.0, self._latest - time.monotonic()))
        timer = threading.Timer(patience, self._end)
        timer.start()
        return timer

    def heard(self) -> None:
        self._timer.cancel()
        if not self.ended:
            self._timer = self._started()

    def stop(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.ended = True
        self._process.kill()


def _reports(folder: Path) -> list[Report]:
    """Of the processes that the tool looked into."""
    return [parse(log.read_text("utf-8", "replace")) for log in sorted(folder.glob("*.log"))]


def _summed(reports: Sequence[Report]) -> tuple[int | None, tuple[Complaint, ...]]:
    """The errors of all, None where one does not tell, or there is none; and the complaints."""
    counts = [report.errors for report in reports]
    known = [count for count in counts if count is not None]
    complete = bool(counts) and len(known) == len(counts)
    errors = sum(known) if complete or any(known) else None
    return errors, tuple(complaint for report in reports for complaint in report.complaints)


__all__ = [
    "TOOLS",
    "KernelResult",
    "Part",
    "Request",
    "Runner",
    "find",
    "parts",
    "version_of",
]
