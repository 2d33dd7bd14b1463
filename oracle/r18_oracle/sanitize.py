"""A backend's kernels under NVIDIA's compute-sanitizer, tool by tool.

memcheck: accesses out of bounds or misaligned. racecheck: hazards in shared memory. initcheck:
reads of global memory that nothing wrote. synccheck: barriers that not all threads reach.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from r18 import records
from r18.backend import Backend, DeviceInfo
from r18.errors import R18Error, UsageError
from r18_oracle.records import digest_of
from r18_oracle.sanitized import BROKEN
from r18_oracle.sanitizer_report import Complaint, Report, parse

WHAT = "sanitize"
# What each tool is told besides. NOTE: memcheck also reports calls of CUDA's API that fail, such
# as a driver's being asked for a function that it lacks; a failing launch raises by itself.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
POOL_OFF = {"R18_CUPY_POOL": "0"}
"""So that each buffer is an allocation that the tools know of; see `r18_cupy.device`."""


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


@dataclass
class ToolResult:
    """What one tool found.

    problems: calls of each kernel that came to its end. errors: as the tool counts them.
    broken: what ended a kernel's run before its end, by kernel. complaints: those printed.
    unreadable: processes whose log has no summary.
    """

    tool: str
    problems: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    complaints: list[Complaint] = field(default_factory=list)
    unreadable: int = 0
    device: DeviceInfo | None = None

    @property
    def verdict(self) -> str:
        """`clean` only when every kernel came to its end and every log says so."""
        if self.errors or self.broken:
            return "FAIL"
        if not sum(self.problems.values()):
            return "nothing ran"
        return f"{self.unreadable} logs without a summary" if self.unreadable else "clean"


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


def run_tool(
    sanitizer: Path,
    tool: str,
    request: Request,
    progress: Callable[[str, str], None] = lambda tool, kernel: None,
) -> ToolResult:
    """Run the kernels under one tool; a new process goes on after one that broke.

    progress: told of the tool and each kernel that is done with.
    """
    result = ToolResult(tool)
    left = list(request.kernels)
    while left:
        with tempfile.TemporaryDirectory(prefix="r18-sanitize-") as folder:
            _run_once(sanitizer, request, left, Path(folder), result, progress)
            for report in _reports(Path(folder)):
                result.errors += report.errors or 0
                result.unreadable += report.errors is None
                result.complaints += report.complaints
        done = {*result.problems, *result.broken}
        left = [name for name in left if name not in done]
    return result


def _run_once(
    sanitizer: Path,
    request: Request,
    kernels: Sequence[str],
    folder: Path,
    result: ToolResult,
    progress: Callable[[str, str], None],
) -> None:
    """One process, over as many of the kernels as it gets through; at least one is filed."""
    asked = asdict(request) | {"kernels": list(kernels)}
    command = [
        *(str(sanitizer), "--tool", result.tool, *TOOLS[result.tool]),
        *("--target-processes", "all", "--print-limit", "100"),
        *("--log-file", str(folder / "%p.log")),
        *(sys.executable, "-m", "r18_oracle.sanitized", json.dumps(asked)),
    ]
    under = kernels[0]
    stderr = folder / "stderr"
    with (
        stderr.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | POOL_OFF,
        ) as process,
    ):
        watch = _Watch(process, request.seconds)
        assert process.stdout is not None
        for line in process.stdout:
            said = _words(line)
            watch.heard()
            if "device" in said:
                result.device = DeviceInfo(**said["device"])
            under = said.get("begins", under)
            if "ends" in said:
                result.problems[said["ends"]] = said["problems"]
                progress(result.tool, said["ends"])
            if "broken" in said:
                result.broken[said["broken"]] = said["error"]
                progress(result.tool, said["broken"])
        code = process.wait()
        watch.stop()
    if watch.ended:
        result.broken[under] = f"said nothing for {request.seconds:g} s and was ended"
    elif code not in (0, BROKEN) and under not in result.problems:
        tail = " ".join(stderr.read_text("utf-8", "replace").split()[-40:])
        result.broken[under] = f"its process ended with code {code}: {tail}"
    missing = [k for k in kernels if k not in result.problems and k not in result.broken]
    if missing == list(kernels):  # nothing was said: going on would go on for ever
        result.broken[under] = f"its process ended with code {code} and said nothing"


def _words(line: str) -> dict[str, Any]:
    """A line of the child's; what else is printed there is nobody's."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class _Watch:
    """Ends a process that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self.ended = False
        self._timer = self._started()

    def _started(self) -> threading.Timer:
        timer = threading.Timer(self._seconds, self._end)
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


def _reports(folder: Path) -> Iterable[Report]:
    """Of the processes that the tool looked into."""
    logs = sorted(folder.glob("*.log"))
    if not logs:
        yield Report(None, ())
    for log in logs:
        yield parse(log.read_text("utf-8", "replace"))


# -- the record --------------------------------------------------------------------------------


def save(
    results: Sequence[ToolResult],
    request: Request,
    backend: Backend,
    sanitizer: str,
    folder: Path,
) -> Path | None:
    """Write what the tools found to the device's record; None when no kernel ran.

    A tool's kernels that were not run now stay, as long as their digest is the present one; not
    after errors, which no tool lays to a kernel: then all are to be run anew.
    """
    device = next((result.device for result in results if result.device), None)
    if device is None:
        return None
    path = records.path_of(folder, WHAT, device)
    record = records.read(path, WHAT)
    digests = {kernel.id: digest_of(kernel) for kernel in backend.kernels()}
    tools = dict(record.get("tools", {}))
    for result in results:
        old = tools.get(result.tool, {"kernels": {}, "errors": 0})
        kept = {
            name: entry
            for name, entry in old["kernels"].items()
            if name not in request.kernels
            and entry["digest"] == digests.get(name, "")
            and not old["errors"]
        }
        broken = {k: v["broken"] for k, v in kept.items() if "broken" in v} | result.broken
        now = {
            name: {"digest": digests[name], "problems": result.problems.get(name, 0)}
            | ({"broken": result.broken[name]} if name in result.broken else {})
            for name in request.kernels
        }
        tools[result.tool] = {
            "date": records.now(),
            "profile": request.profile,
            "seed": request.seed,
            "errors": result.errors,
            "verdict": "FAIL" if broken else result.verdict,
            "complaints": [asdict(complaint) for complaint in result.complaints],
            "kernels": dict(sorted((kept | now).items())),
        }
    records.write(
        path,
        {
            "record": WHAT,
            "format": records.FORMAT,
            "device": device.name,
            "sanitizer": sanitizer,
            "environment": records.environment(device),
            "tools": tools,
        },
    )
    return path


__all__ = ["TOOLS", "Request", "ToolResult", "find", "run_tool", "save", "version_of"]
