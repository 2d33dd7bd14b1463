"""What compute-sanitizer's tools found, kernel by kernel: `sanitize-<device>.json`.

An entry a tool and kernel, with the digest of the kernel's sources and choices. One of which these
and the request are still the same is fresh: it need not be made again, and a run that was stopped
goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r18 import records
from r18.backend import Backend, DeviceInfo
from r18_oracle.sanitize.run import TOOLS, KernelResult, Request
from r18_oracle.sanitize.tool_report import Complaint
from r18_oracle.search.records import digest_of

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
        self._digests = {kernel.id: digest_of(backend, kernel) for kernel in backend.kernels()}
        self._sanitizer = sanitizer
        self._run = {
            "profile": request.profile,
            "network": request.network,
            "seed": request.seed,
            "sanitizer": sanitizer,
            "environment": records.environment(device),
        }
        self._key = records.key_of(self._run)
        old = records.read(self.path, WHAT)
        ours = {name.partition("/")[0] for name in self._digests}
        self._runs: dict[str, Any] = old.get("runs", {}) | {self._key: self._run}
        self._tools: dict[str, dict[str, dict[str, Any]]] = {
            tool: {
                name: entry
                for name, entry in found["kernels"].items()
                if name.partition("/")[0] not in ours
                or (name in self._digests and entry["digest"] == self._digests[name])
            }
            for tool, found in old.get("tools", {}).items()
        }

    def fresh(self, tools: Iterable[str], kernels: Iterable[str]) -> list[KernelResult]:
        """What is known of these: found in the same sources, on the same problems.

        Of a kernel without a digest nobody knows whether it is the same.
        """
        wanted = set(kernels)
        same = ("profile", "network", "seed")
        return [
            _result(tool, name, entry)
            for tool in tools
            for name, entry in self._tools.get(tool, {}).items()
            if name in wanted
            and entry["digest"] is not None
            and all(self._runs[entry["run"]][field] == self._run[field] for field in same)
        ]

    def write(self, results: Iterable[KernelResult]) -> None:
        """Add what was found, and write the file anew, whole."""
        now = records.now()
        for result in results:
            self._tools.setdefault(result.tool, {})[result.kernel] = {
                "digest": self._digests[result.kernel],
                "run": self._key,
                "date": now,
                **_told(result),
            }
        tools = {tool: self._summary(tool) for tool in TOOLS if self._tools.get(tool)}
        used = {e["run"] for found in self._tools.values() for e in found.values()}
        records.write(
            self.path,
            {
                "record": WHAT,
                "format": records.FORMAT,
                "device": self._device.name,
                "sanitizer": self._sanitizer,
                "runs": {key: run for key, run in self._runs.items() if key in used},
                "tools": tools,
            },
        )

    def _summary(self, tool: str) -> dict[str, Any]:
        """A tool's entries, and what follows from all of them; missing: kernels without one."""
        entries = self._tools[tool]
        results = [_result(tool, name, entry) for name, entry in entries.items()]
        return {
            "date": max(entry["date"] for entry in entries.values()),
            "errors": sum(result.errors or 0 for result in results),
            "verdict": verdict(results),
            "missing": len(self._digests.keys() - entries.keys()),
            "kernels": dict(sorted(entries.items())),
        }


def verdict(results: Iterable[KernelResult]) -> str:
    """Of all of a tool's results: the worst, `clean` only when each is; `nothing ran` of none."""
    found = {result.verdict for result in results}
    bad = ("FAIL", "a log without a summary", "nothing ran", "clean")
    return next((word for word in bad if word in found), "nothing ran")


def _told(result: KernelResult) -> dict[str, Any]:
    """An entry's findings; what is empty is left out."""
    data: dict[str, Any] = {"problems": result.problems, "errors": result.errors}
    if result.complaints:
        data["complaints"] = [asdict(complaint) for complaint in result.complaints]
    if result.broken:
        data["broken"] = result.broken
    return data


def _result(tool: str, name: str, entry: Mapping[str, Any]) -> KernelResult:
    return KernelResult(
        tool,
        name,
        entry["problems"],
        entry["errors"],
        tuple(Complaint(**complaint) for complaint in entry.get("complaints", ())),
        entry.get("broken", ""),
    )


__all__ = ["Record", "verdict"]
