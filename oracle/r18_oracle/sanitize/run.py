"""A backend's kernels under NVIDIA's compute-sanitizer, tool by tool.

memcheck: accesses out of bounds or misaligned. racecheck: hazards in shared memory. initcheck:
reads of global memory that nothing wrote. synccheck: barriers that not all threads reach.

A process takes seconds to start under a tool, so it runs a few kernels. The tool does not name the
kernel of an error, so if there are errors, each kernel runs again in a process of its own.
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

# Further arguments of each tool. NOTE: memcheck would also report CUDA API calls that fail, such as
# a query for a function that the driver lacks; a failing launch raises anyway.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
POOL_OFF = {"R18_CUPY_POOL": "0"}
"""Without a pool each buffer is an allocation that the tools see; see `r18_cupy.cuda.device`."""

MOST_KERNELS = 6
"""The most kernels that one process runs."""
ROUNDS = 4
"""Processes that each job runs in turn, so that all jobs end at about the same time."""
GRACE_SECONDS = 20.0
"""At the deadline a process exits after its current call; it is killed this much later."""


@dataclass(frozen=True)
class Request:
    """The kernels to run, by id, on the problems of a profile and of a network (or None).

    seconds: the time limit for each kernel under a tool.
    """

    backend: str
    kernels: tuple[str, ...]
    profile: str = "quick"
    network: str | None = "resnet18"
    seed: int = 0
    seconds: float = 3600.0


@dataclass(frozen=True)
class Part:
    """Kernels that run under a tool in one process."""

    tool: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class KernelResult:
    """A tool's findings in one kernel.

    problems: calls that returned. errors: as the tool counts them; None without a summary.
    complaints: the errors that it printed. broken: why the run did not finish, if it did not.
    """

    tool: str
    kernel: str
    problems: int
    errors: int | None
    complaints: tuple[Complaint, ...] = ()
    broken: str = ""

    @property
    def verdict(self) -> str:
        """`clean` only if the kernel finished and the log says so."""
        if self.errors or self.broken:
            return "FAIL"
        if not self.problems:
            return "nothing ran"
        return "clean" if self.errors == 0 else "a log without a summary"


def find(asked: str | None = None) -> Path:
    """The tool's executable: `asked`, or the one on the path, in CUDA_HOME or in the CUDA wheels.

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
        "compute-sanitizer is not found on the path, in CUDA_HOME, or next to the CUDA wheels\n"
        "  it comes with the CUDA toolkit (package cuda-sanitizer); install it, or give its "
        "path with --sanitizer PATH"
    )


def version_of(sanitizer: Path) -> str:
    """The name and version that it prints; raises `R18Error` if it does not run."""
    try:
        said = subprocess.run(
            [str(sanitizer), "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise R18Error(f"{sanitizer} does not run: {error}") from error
    lines = [line for line in said.stdout.splitlines() if "ersion" in line]
    return f"compute-sanitizer {lines[-1].strip()}" if lines else "compute-sanitizer"


def parts(kernels: Mapping[str, Sequence[str]], jobs: int) -> list[Part]:
    """The processes to run, in order, for the kernels of each tool.

    Every tool runs the first kernels before any tool runs the last.
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
    """Runs the parts of a request in several processes at a time.

    jobs: number of processes; they share the cores and the device. deadline: on the clock of
    `time.monotonic`; a kernel that has not finished by then has no result. variables: added to the
    environment of the processes.
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
        """The results of each part when it finishes; closing the iterator ends all processes."""
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
        """A result for each kernel that there was time for.

        After a process that broke, a new one runs the rest; after one with errors, each of its
        kernels runs again in a process of its own.
        """
        found: list[KernelResult] = []
        waiting = [part.kernels]
        while waiting and not self._is_late():
            kernels = waiting.pop(0)
            process = self._process(part.tool, kernels)
            if process.errors == 0 or len(process.begun) == 1:
                found += process.results(part.tool)
            else:  # the errors may be of any of these kernels
                waiting += [(kernel,) for kernel in process.begun]
            if rest := tuple(kernel for kernel in kernels if kernel not in process.begun):
                waiting.append(rest)
        return found

    def _is_late(self) -> bool:
        return self._over.is_set() or time.monotonic() >= self._deadline

    def _process(self, tool: str, kernels: Sequence[str]) -> _Process:
        """Run one process on as many of the kernels as it finishes; it begins at least one."""
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
                if self._over.is_set():  # `run` has ended the other processes just now
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
            if not found.begun:  # otherwise `part` would repeat it forever
                found.begun.append(kernels[0])
            under = found.begun[-1]
            ended = under in found.problems or under in found.broken
            if not ended and not self._is_late():
                found.broken[under] = _cause(watch, code, stderr.read_text("utf-8", "replace"))
        return found


@dataclass
class _Process:
    """The result of one process.

    begun: the kernels that it began. problems: calls of each kernel that finished. broken: the
    reason for each that did not. errors, complaints: the tool's, for the whole process.
    """

    begun: list[str] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    errors: int | None = None
    complaints: tuple[Complaint, ...] = ()

    def results(self, tool: str) -> list[KernelResult]:
        """The results of the kernels that finished or broke."""
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
    """The environment of a process: no pool, and its share of the cores as threads."""
    threads = max(1, cpus() // jobs)
    return {THREADS: str(threads)} | os.environ | POOL_OFF


def _note(found: _Process, said: Mapping[str, Any]) -> None:
    """Add a message of the process: a kernel begins, has ended, or broke."""
    if "begins" in said:
        found.begun.append(said["begins"])
    if "ends" in said:
        found.problems[said["ends"]] = said["problems"]
    if "broken" in said:
        found.broken[said["broken"]] = said["error"]


def _cause(watch: _Watch, code: int, stderr: str) -> str:
    """Why a process did not finish its kernel."""
    if watch.ended:
        return f"said nothing for {watch.seconds:g} s and was ended"
    if code in (0, BROKEN):
        return f"its process ended with code {code} and said nothing"
    return f"its process ended with code {code}: {' '.join(stderr.split()[-40:])}"


def _words(line: str) -> dict[str, Any]:
    """A message of the process; {} for other output."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class _Watch:
    """Kills a process that prints nothing for too long, or that passes the deadline."""

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
    """One report for each process that the tool instrumented."""
    return [parse(log.read_text("utf-8", "replace")) for log in sorted(folder.glob("*.log"))]


def _summed(reports: Sequence[Report]) -> tuple[int | None, tuple[Complaint, ...]]:
    """The sum of the errors, None if it is not known, and all complaints."""
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
