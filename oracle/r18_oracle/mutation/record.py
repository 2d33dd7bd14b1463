"""The record of mutation runs: `mutate-<device>.json`, written while mutants are judged.

For each backend it holds the last run's sample and score, and the fate of each mutant. A run of
other files than the first keeps that score and adds its own, as one of `samples`. A run reuses the
fates whose code has not changed, wherever it is now, so a stopped run can be continued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from r18 import records
from r18.backend import DeviceInfo
from r18.records.kinds import Environment, Fate, Mutate, MutateRun, MutateSample, PaceOf
from r18_oracle.findings import Finding
from r18_oracle.mutation.edits import STATE
from r18_oracle.mutation.mutants import Mutant, file_of, kind_of, operator_of, placeless
from r18_oracle.mutation.plan import Pace, Plan
from r18_oracle.mutation.score import Result, Score

WHAT = "mutate"
FIELDS = ("status", "reason", "kernels", "finding", "problem", "seconds")
"""The fields that the record keeps of a killed mutant; for others it also keeps the change."""


@dataclass(frozen=True)
class Known:
    """The results of earlier runs: fates of mutants and paces of unchanged kernels, by id."""

    fates: Mapping[str, Result] = field(default_factory=dict)
    paces: Mapping[str, Pace] = field(default_factory=dict)


class Journal:
    """The record of a backend on a device.

    how: what else a fate depends on (profile, seed, network); entries with another `how` are not
    reused. shown: the kernels of each mutant, by its id. kind: the kind of mutants that run. Fates
    of the other kind are kept, and a run of structural mutants keeps the score of the tokens if
    there is one.
    Raises `UsageError` for a damaged record.
    """

    def __init__(
        self,
        folder: Path,
        device: DeviceInfo,
        plan: Plan,
        how: Mapping[str, Any],
        shown: Mapping[str, tuple[str, ...]],
        kind: str = "tokens",
    ) -> None:
        self.path = records.path_of(folder, WHAT, device)
        self._device = device
        self._plan = plan
        self._how = dict(how)
        self._shown = shown
        self._kind = kind
        environment = records.environment(device)
        self._key = records.key_of(environment)
        self._environment = msgspec.convert(environment, Environment)
        record = records.load(self.path, Mutate)
        old = record.backends.get(plan.target.backend) if record else None
        same = old and all(getattr(old, name) == value for name, value in self._how.items())
        self._old = old if same else None
        self._moved: set[str] = set()
        self._entries = self._fresh()
        self._paces = self._unchanged()

    def known(self) -> Known:
        """The results of earlier runs on sources that have not changed.

        Paces are reused only if the unchanged kernels passed in this environment.
        """
        fates = {
            mutant.id: self._result(mutant, self._entries[mutant.id])
            for mutant in self._plan.mutants
            if mutant.id in self._entries
        }
        return Known(fates, {name: Pace(e.seconds, e.silence) for name, e in self._paces.items()})

    def passed(self, paces: Mapping[str, Pace]) -> None:
        """Add unchanged kernels that have passed."""
        for name, pace in paces.items():
            self._paces[name] = PaceOf(
                digest=self._plan.digest([name]),
                environment=self._key,
                seconds=round(pace.seconds, 3),
                silence=round(pace.silence, 3),
            )

    def write(self, request: Mapping[str, Any], score: Score, judged: Iterable[Result]) -> None:
        """Write the whole file: the run's request and score, and every known fate.

        judged: results to add. Mutants judged by hand are listed separately with their reasons,
        since nothing was run for them. A run that was stopped before its first mutant was judged
        has no score, and the earlier scores stay with the fates that they are of.
        """
        for result in judged:
            if result.mutant.id not in self._plan.reasons:
                self._entries[result.mutant.id] = self._entry(result)
        by_hand = {
            result.mutant.id: result.reason
            for result in (*score.results, *score.further)
            if result.mutant.id in self._plan.reasons
        }
        before = self._old.results if self._old else {}
        stopped = score.left > 0 and not score.results
        keeps_score = stopped or self._keeps_score(request)

        def stays(name: str) -> bool:
            """With a score stay the fates that it is of, even if sources have changed since."""
            if name in self._moved:
                return False
            others = keeps_score and not fnmatchcase(file_of(name), request["files"])
            return stopped or others or kind_of(name) != self._kind

        entries = {name: fate for name, fate in before.items() if stays(name)} | self._entries
        if self._old and self._old.by_hand is not UNSET:
            by_hand |= {n: reason for n, reason in self._old.by_hand.items() if stays(n)}
        used = {fate.environment for fate in entries.values()}
        used |= {pace.environment for pace in self._paces.values()}
        old = self._old.environments if self._old else {}
        environments = old | {self._key: self._environment}
        head = {"date": records.now(), **self._how, **request, **score.summary()}
        samples = self._old.samples if self._old and self._old.samples is not UNSET else {}
        if self._old and keeps_score:
            if self._kind != "state" and not stopped:
                sample = {name: head[name] for name in MutateSample.__struct_fields__}
                samples = samples | {head["files"]: MutateSample(**sample)}
            head = {name: getattr(self._old, name) for name in head}
        if samples:
            head["samples"] = samples
        if classes := _classes(entries, by_hand):
            head["state"] = classes
        run = {
            **head,
            "environments": {k: v for k, v in environments.items() if k in used},
            "unchanged": dict(sorted(self._paces.items())),
            "by_hand": dict(sorted(by_hand.items())),
            "results": dict(sorted(entries.items())),
        }
        mine = {self._plan.target.backend: MutateRun(**run)}

        def with_mine(found: Mutate | None) -> Mutate:
            backends = (found.backends if found else {}) | mine
            return Mutate(device=self._device.name, backends=dict(sorted(backends.items())))

        records.update(self.path, Mutate, with_mine)

    def _keeps_score(self, request: Mapping[str, Any]) -> bool:
        """Whether the record has a score of other mutants: of tokens, or of other files."""
        if self._old is None:
            return False
        kinds = {kind_of(name) for name in self._old.results}
        if self._kind == "state":
            return bool(kinds - {"state"})
        return kinds != {"state"} and request["files"] != self._old.files

    def _fresh(self) -> dict[str, Fate]:
        """The old fates of mutants whose change and kernels are the same, on whatever line."""
        names: dict[str, list[str]] = {}
        old = self._old.results if self._old else {}
        for name in old:
            names.setdefault(placeless(name), []).append(name)
        fresh = {}
        for mutant in self._plan.mutants:
            for name in names.get(placeless(mutant.id), ()):
                if self._is_fresh(mutant, old[name]):
                    fresh[mutant.id] = old[name]
                    if name != mutant.id:
                        self._moved.add(name)
                    break
        return fresh

    def _is_fresh(self, mutant: Mutant, old: Fate) -> bool:
        """Whether a mutant's old fate holds: the kernels that killed it, or else all it is shown
        to, are unchanged."""
        shown = self._shown[mutant.id]
        if old.status == "killed" and set(old.kernels) <= set(shown):
            shown = tuple(old.kernels)
        return old.digest == self._plan.digest(shown, mutant)

    def _unchanged(self) -> dict[str, PaceOf]:
        """The old paces of kernels whose sources are the same, in this environment."""
        return {
            name: entry
            for name, entry in (self._old.unchanged if self._old else {}).items()
            if name in self._plan.reaches
            and entry.environment == self._key
            and entry.digest == self._plan.digest([name])
        }

    def _entry(self, result: Result) -> Fate:
        data = result.to_json()
        del data["id"]
        if result.status == "killed":
            data = {name: data[name] for name in FIELDS}
        digest = self._plan.digest(result.kernels, result.mutant)
        return msgspec.convert({"digest": digest, "environment": self._key} | data, Fate)

    def _result(self, mutant: Mutant, entry: Fate) -> Result:
        found = None
        if entry.finding is not None:
            fields = msgspec.to_builtins(entry.finding)
            found = Finding(backend=self._plan.target.backend, problem=None, **fields)
        return Result(
            mutant,
            entry.status,
            self._plan.diff(mutant),
            tuple(entry.kernels),
            found,
            entry.reason,
            entry.seconds,
            entry.sanitizer or "",
        )


def _classes(fates: Mapping[str, Fate], by_hand: Iterable[str]) -> dict[str, dict[str, int]]:
    """How many structural mutants of each class have which status."""
    found: dict[str, Counter[str]] = {}
    statuses = {name: fate.status for name, fate in fates.items()}
    for name, status in (statuses | dict.fromkeys(by_hand, "equivalent")).items():
        if kind_of(name) == "state":
            found.setdefault(operator_of(name), Counter())[status] += 1
    return {name: dict(sorted(found[name].items())) for name in STATE if name in found}


__all__ = ["Journal", "Known"]
