"""The evidence of mutation runs: `mutate-<device>.json`, written while mutants are judged.

Of each backend it holds the last run's sample and score, and what became of each mutant. What was
found about sources that are still the same is not asked again: a run that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r18 import records
from r18.backend import DeviceInfo
from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant
from r18_oracle.mutation.plan import Pace, Plan
from r18_oracle.mutation.score import Result, Score

WHAT = "mutate"
TOLD = ("status", "reason", "kernels", "finding", "problem", "seconds")
"""What is kept of every mutant; of one that was not killed also where and what it is."""


@dataclass(frozen=True)
class Known:
    """What was found out before: fates of mutants, and paces of unchanged kernels, by their ids."""

    fates: Mapping[str, Result] = field(default_factory=dict)
    paces: Mapping[str, Pace] = field(default_factory=dict)


class Journal:
    """The record of a backend on a device.

    how: what else decides a mutant's fate (profile, seed, network); an entry of another `how` is
    not known. shown: the kernels of each mutant, by its id. Raises `UsageError` for a record that
    is damaged.
    """

    def __init__(
        self,
        folder: Path,
        device: DeviceInfo,
        plan: Plan,
        how: Mapping[str, Any],
        shown: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.path = records.path_of(folder, WHAT, device)
        self._device = device
        self._plan = plan
        self._how = dict(how)
        self._shown = shown
        self._environment = records.environment(device)
        old = records.read(self.path, WHAT).get("backends", {}).get(plan.target.backend, {})
        same = all(old.get(name) == value for name, value in self._how.items())
        self._old: Mapping[str, Any] = old if same else {}
        self._entries: dict[str, dict[str, Any]] = self._fresh()
        self._paces: dict[str, dict[str, Any]] = self._unchanged()

    def known(self) -> Known:
        """What earlier runs found out about sources that are still the same.

        The unchanged kernels must have passed in the environment of now.
        """
        fates = {
            mutant.id: self._result(mutant, self._entries[mutant.id])
            for mutant in self._plan.mutants
            if mutant.id in self._entries
        }
        paces = {
            name: Pace(entry["seconds"], entry["silence"]) for name, entry in self._paces.items()
        }
        return Known(fates, paces)

    def passed(self, paces: Mapping[str, Pace]) -> None:
        """The unchanged kernels that have passed."""
        key = records.key_of(self._environment)
        for name, pace in paces.items():
            self._paces[name] = {
                "digest": self._plan.digest([name]),
                "environment": key,
                "seconds": round(pace.seconds, 3),
                "silence": round(pace.silence, 3),
            }

    def write(self, request: Mapping[str, Any], score: Score, judged: Iterable[Result]) -> None:
        """The file, anew, whole: the run's request and score, and what is judged by now.

        judged: results that are to be added. Those judged by hand stand by themselves, with their
        reasons: nothing was run that could be known again.
        """
        key = records.key_of(self._environment)
        for result in judged:
            mutant = result.mutant
            if mutant.id not in self._plan.reasons:
                digest = self._plan.digest(self._shown[mutant.id], mutant)
                self._entries[mutant.id] = {
                    "digest": digest,
                    "environment": key,
                    **_told(result),
                }
        by_hand = {
            result.mutant.id: result.reason
            for result in (*score.results, *score.further)
            if result.mutant.id in self._plan.reasons
        }
        used = {e["environment"] for e in (*self._entries.values(), *self._paces.values())}
        environments = {**self._old.get("environments", {}), key: self._environment}
        run = {
            "date": records.now(),
            **self._how,
            **request,
            **score.summary(),
            "environments": {k: v for k, v in environments.items() if k in used},
            "unchanged": dict(sorted(self._paces.items())),
            "by_hand": dict(sorted(by_hand.items())),
            "results": dict(sorted(self._entries.items())),
        }
        record = records.read(self.path, WHAT)  # other backends may have been written meanwhile
        backends = record.get("backends", {}) | {self._plan.target.backend: run}
        records.write(
            self.path,
            {
                "record": WHAT,
                "format": records.FORMAT,
                "device": self._device.name,
                "backends": dict(sorted(backends.items())),
            },
        )

    def _fresh(self) -> dict[str, dict[str, Any]]:
        """The old entries of mutants that are still the same, of kernels that still are."""
        entries: dict[str, dict[str, Any]] = self._old.get("results", {})
        return {
            mutant.id: entries[mutant.id]
            for mutant in self._plan.mutants
            if mutant.id in entries
            and entries[mutant.id]["digest"] == self._plan.digest(self._shown[mutant.id], mutant)
        }

    def _unchanged(self) -> dict[str, dict[str, Any]]:
        """The old entries of unchanged kernels that still are the same, and ran where this runs."""
        key = records.key_of(self._environment)
        return {
            name: entry
            for name, entry in self._old.get("unchanged", {}).items()
            if name in self._plan.reaches
            and entry["environment"] == key
            and entry["digest"] == self._plan.digest([name])
        }

    def _result(self, mutant: Mutant, entry: Mapping[str, Any]) -> Result:
        found = entry["finding"]
        return Result(
            mutant,
            entry["status"],
            self._plan.diff(mutant),
            tuple(entry["kernels"]),
            found and Finding(backend=self._plan.target.backend, problem=None, **found),
            entry["reason"],
            entry["seconds"],
            entry.get("sanitizer", ""),
        )


def _told(result: Result) -> dict[str, Any]:
    data = result.to_json()
    if result.status == "killed":
        return {name: data[name] for name in TOLD}
    return {name: value for name, value in data.items() if name != "id"}


__all__ = ["Journal", "Known"]
