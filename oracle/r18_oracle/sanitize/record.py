"""Records of compute-sanitizer's findings, kernel by kernel: `sanitize-<device>.json`.

There is an entry for each tool and kernel. It is reused while the kernel's sources, its choices and
the request are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from msgspec import UNSET

from r18 import records
from r18.backend import Backend, DeviceInfo
from r18.records.kinds import (
    Sanitize,
    SanitizeComplaint,
    SanitizedKernel,
    SanitizedTool,
    SanitizeRun,
)
from r18_oracle.sanitize.run import TOOLS, KernelResult, Request
from r18_oracle.sanitize.tool_report import Complaint
from r18_oracle.session import RecordedRun

WHAT = "sanitize"


class Record:
    """The record of a device, for the kernels of a backend. Raises `UsageError` for a damaged one.

    sanitizer: its version.
    """

    def __init__(
        self, folder: Path, device: DeviceInfo, backend: Backend, request: Request, sanitizer: str
    ) -> None:
        self.path = records.path_of(folder, WHAT, device)
        self._device = device
        self._sanitizer = sanitizer
        empty = Sanitize(device=device.name, sanitizer=sanitizer, runs={}, tools={})
        old = records.load(self.path, Sanitize) or empty
        asked = {"profile": request.profile, "network": request.network, "seed": request.seed}
        self._run = RecordedRun(SanitizeRun, old.runs, device, backend, asked, sanitizer=sanitizer)
        self._tools = {tool: self._run.current(found.kernels) for tool, found in old.tools.items()}

    def fresh(self, tools: Iterable[str], kernels: Iterable[str]) -> list[KernelResult]:
        """Results of these that were found in the same sources, on the same problems.

        A kernel without a digest is never fresh: it may have changed.
        """
        wanted = set(kernels)
        return [
            _result(tool, name, entry)
            for tool in tools
            for name, entry in self._tools.get(tool, {}).items()
            if name in wanted and self._run.repeats(entry)
        ]

    def write(self, results: Iterable[KernelResult]) -> None:
        """Add what was found, and write the whole file."""
        now = records.now()
        for result in results:
            self._tools.setdefault(result.tool, {})[result.kernel] = self._entry(result, now)
        tools = {tool: self._summary(tool) for tool in TOOLS if self._tools.get(tool)}
        entries = (entry for found in self._tools.values() for entry in found.values())
        record = Sanitize(
            device=self._device.name,
            sanitizer=self._sanitizer,
            runs=self._run.runs_of(*entries),
            tools=tools,
        )
        records.write(self.path, record)

    def _entry(self, result: KernelResult, now: str) -> SanitizedKernel:
        complaints = [SanitizeComplaint(**asdict(one)) for one in result.complaints]
        return SanitizedKernel(
            digest=self._run.digests[result.kernel],
            run=self._run.key,
            date=now,
            problems=result.problems,
            errors=result.errors,
            complaints=complaints or UNSET,
            broken=result.broken or UNSET,
        )

    def _summary(self, tool: str) -> SanitizedTool:
        """A tool's entries and what follows from all of them; missing: kernels without one."""
        entries = self._tools[tool]
        results = [_result(tool, name, entry) for name, entry in entries.items()]
        return SanitizedTool(
            date=max(entry.date for entry in entries.values()),
            errors=sum(result.errors or 0 for result in results),
            verdict=verdict(results),
            missing=len(self._run.digests.keys() - entries.keys()),
            kernels=dict(sorted(entries.items())),
        )


def verdict(results: Iterable[KernelResult]) -> str:
    """The worst verdict of a tool's results: `clean` only when all are, `nothing ran` of none."""
    found = {result.verdict for result in results}
    bad = ("FAIL", "a log without a summary", "nothing ran", "clean")
    return next((word for word in bad if word in found), "nothing ran")


def _result(tool: str, name: str, entry: SanitizedKernel) -> KernelResult:
    return KernelResult(
        tool,
        name,
        entry.problems,
        entry.errors,
        tuple(Complaint(one.what, one.function, one.count) for one in entry.complaints or ()),
        entry.broken or "",
    )


__all__ = ["Record", "verdict"]
