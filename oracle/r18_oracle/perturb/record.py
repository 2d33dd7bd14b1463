"""The record of runs with perturbed schedules, kernel by kernel: `perturb-<device>.json`.

A kernel's entry is reused while its sources, choices and request are the same. Programs have no
digest, take seconds, and always run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import UNSET

from r18 import records
from r18.backend import Backend, DeviceInfo
from r18.records.kinds import Found, Perturb, PerturbedKernel, PerturbedProgram, PerturbRun
from r18_oracle.findings import Finding
from r18_oracle.perturb.tasks import Result
from r18_oracle.session import RecordedRun

WHAT = "perturb"


class Record:
    """The record of a device, for the kernels of a backend. Raises `UsageError` for a damaged one.

    seeds: how many seeds of delays there are. kinds: the kinds of site that are delayed.
    """

    def __init__(
        self,
        folder: Path,
        device: DeviceInfo,
        backend: Backend,
        *,
        profile: str,
        network: str | None,
        seed: int,
        seeds: int,
        kinds: Iterable[str],
    ) -> None:
        self.path = records.path_of(folder, WHAT, device)
        self._device = device
        empty = Perturb(device=device.name, runs={}, kernels={}, programs={})
        old = records.load(self.path, Perturb) or empty
        request = {
            "profile": profile,
            "network": network,
            "seed": seed,
            "seeds": seeds,
            "kinds": list(kinds),
        }
        self._run = RecordedRun(PerturbRun, old.runs, device, backend, request)
        self._kernels = self._run.current(old.kernels)
        self._programs = dict(old.programs)

    def fresh(self, kernels: Iterable[str]) -> list[Result]:
        """The recorded results of these kernels for the same sources, problems and seeds.

        There is none for a kernel without a digest, which may have changed.
        """
        return [
            _result(name, entry)
            for name in kernels
            if (entry := self._kernels.get(name)) is not None and self._run.repeats(entry)
        ]

    def write(self, results: Iterable[Result]) -> None:
        """Add results and write the whole file."""
        now = records.now()
        for result in results:
            if result.name not in self._run.digests:
                self._programs[result.name] = PerturbedProgram(
                    run=self._run.key,
                    date=now,
                    batches=result.problems,
                    calls=result.calls,
                    broken=result.broken or UNSET,
                    seconds=round(result.seconds, 3),
                )
                continue
            found = result.finding and msgspec.convert(result.finding.to_json(), Found)
            self._kernels[result.name] = PerturbedKernel(
                digest=self._run.digests[result.name],
                run=self._run.key,
                date=now,
                problems=result.problems,
                calls=result.calls,
                finding=found or UNSET,
                seconds=round(result.seconds, 3),
            )
        record = Perturb(
            device=self._device.name,
            runs=self._run.runs_of(*self._kernels.values(), *self._programs.values()),
            kernels=dict(sorted(self._kernels.items())),
            programs=dict(sorted(self._programs.items())),
        )
        records.write(self.path, record)


def _result(name: str, entry: PerturbedKernel) -> Result:
    finding = None
    if entry.finding is not UNSET:
        finding = Finding.from_json(msgspec.to_builtins(entry.finding))
    return Result(name, entry.problems, entry.calls, finding, seconds=float(entry.seconds))


__all__ = ["WHAT", "Record"]
