"""The record of runs with perturbed schedules, kernel by kernel: `perturb-<device>.json`.

A kernel's entry has the digest of its sources and choices. While the digest and the request are
unchanged, the kernel does not run again, so a stopped run can be continued. Programs have no
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
from r18_oracle.search.records import digest_of

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
        self._digests = {kernel.id: digest_of(backend, kernel) for kernel in backend.kernels()}
        run = {
            "profile": profile,
            "network": network,
            "seed": seed,
            "seeds": seeds,
            "kinds": list(kinds),
            "environment": records.environment(device),
        }
        self._key = records.key_of(run)
        self._run = msgspec.convert(run, PerturbRun)
        old = records.load(self.path, Perturb)
        ours = {name.partition("/")[0] for name in self._digests}
        self._runs = (old.runs if old else {}) | {self._key: self._run}
        self._programs = dict(old.programs) if old else {}
        self._kernels = {
            name: entry
            for name, entry in (old.kernels if old else {}).items()
            if name.partition("/")[0] not in ours
            or (name in self._digests and entry.digest == self._digests[name])
        }

    def fresh(self, kernels: Iterable[str]) -> list[Result]:
        """The recorded results of these kernels for the same sources, problems and seeds.

        There is none for a kernel without a digest, which may have changed.
        """
        return [
            _result(name, entry)
            for name in kernels
            if (entry := self._kernels.get(name)) is not None
            and entry.digest is not None
            and self._same_request(entry.run)
        ]

    def _same_request(self, run: str) -> bool:
        then, now = self._runs[run], self._run
        return all(
            getattr(then, name) == getattr(now, name)
            for name in ("profile", "network", "seed", "seeds", "kinds")
        )

    def write(self, results: Iterable[Result]) -> None:
        """Add results and write the whole file."""
        now = records.now()
        for result in results:
            if result.name not in self._digests:
                self._programs[result.name] = PerturbedProgram(
                    run=self._key,
                    date=now,
                    batches=result.problems,
                    calls=result.calls,
                    broken=result.broken or UNSET,
                    seconds=round(result.seconds, 3),
                )
                continue
            found = result.finding and msgspec.convert(result.finding.to_json(), Found)
            self._kernels[result.name] = PerturbedKernel(
                digest=self._digests[result.name],
                run=self._key,
                date=now,
                problems=result.problems,
                calls=result.calls,
                finding=found or UNSET,
                seconds=round(result.seconds, 3),
            )
        used = {entry.run for entry in self._kernels.values()}
        used |= {entry.run for entry in self._programs.values()}
        record = Perturb(
            device=self._device.name,
            runs={key: run for key, run in self._runs.items() if key in used},
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
