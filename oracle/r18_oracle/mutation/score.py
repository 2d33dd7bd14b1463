"""What became of a backend's mutants, and the share of them that the oracle caught."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant
from r18_oracle.mutation.trial import INVALID, SAME_CODE, SAME_REASON


@dataclass(frozen=True)
class Result:
    """One mutant's fate.

    status: `killed` by a finding, or `survived`; `equivalent`, judged by hand (then it is not run)
    or proved by its machine code; `invalid`, since it does not compile. The last two for a reason.
    kernels: those that were to be examined, up to the first finding.
    sanitizer: of a survivor, the version of compute-sanitizer that found nothing either; empty
    where it was not run to its end.
    """

    mutant: Mutant
    status: str
    diff: str
    kernels: tuple[str, ...] = ()
    finding: Finding | None = None
    reason: str = ""
    seconds: float = 0.0
    sanitizer: str = ""

    @classmethod
    def of(
        cls,
        mutant: Mutant,
        diff: str,
        kernels: tuple[str, ...],
        finding: Finding | None,
        seconds: float,
    ) -> Result:
        """Of what a trial has found, which was not late."""
        if finding is None:
            return cls(mutant, "survived", diff, kernels, seconds=seconds)
        nothing = {INVALID: "invalid", SAME_CODE: "equivalent"}
        if finding.check in nothing:
            status = nothing[finding.check]
            return cls(mutant, status, diff, kernels, reason=finding.message, seconds=seconds)
        return cls(mutant, "killed", diff, kernels, finding, seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        """Without the diff, which `r18 mutate --show ID` prints, and the finding in short."""
        return {
            "id": self.mutant.id,
            "file": self.mutant.file,
            "line": self.mutant.line,
            "scope": self.mutant.scope,
            "operator": self.mutant.operator,
            "before": self.mutant.before,
            "after": self.mutant.after,
            "status": self.status,
            "reason": self.reason,
            "kernels": list(self.kernels),
            "finding": None if self.finding is None else self._found(self.finding),
            "problem": None if self.finding is None else str(self.finding.problem or ""),
            "seconds": round(self.seconds, 3),
            "sanitizer": self.sanitizer,
        }

    @staticmethod
    def _found(finding: Finding) -> dict[str, Any]:
        fields = ("check", "kernel", "kind", "seed", "message")
        return {name: getattr(finding, name) for name in fields}


@dataclass(frozen=True)
class Score:
    """What a run found.

    results: of its sample, in the order of the source; where the run stopped early, of the first
    part of the sample, up to the first mutant that is not judged. further: those judged beyond it,
    which do not count: mutants that are quickly judged would count more than others.
    left: how many are not judged.
    """

    backend: str
    profile: str
    seed: int
    results: tuple[Result, ...]
    further: tuple[Result, ...] = ()
    left: int = 0

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def percent(self) -> float:
        """Killed / (all − equivalent − invalid), in percent; 0 when that is none."""
        return 100 * self.count("killed") / self.tried if self.tried else 0.0

    @property
    def tried(self) -> int:
        """The mutants that could have been caught."""
        return self.count("killed") + self.count("survived")

    def to_json(self) -> dict[str, Any]:
        """With the results of those that count."""
        return self.summary() | {"results": [result.to_json() for result in self.results]}

    def summary(self) -> dict[str, Any]:
        """The numbers."""
        return {
            "backend": self.backend,
            "profile": self.profile,
            "seed": self.seed,
            "mutants": len(self.results),
            "killed": self.count("killed"),
            "survived": self.count("survived"),
            "equivalent": self.count("equivalent"),
            "invalid": self.count("invalid"),
            "further": len(self.further),
            "left": self.left,
            "score": self.percent,
        }

    def text(self) -> str:
        """The equivalent and the survivors with their diffs, the tables, and the score."""
        parts = [
            f"equivalent: {result.mutant.id}\n{result.diff}reason: {result.reason}"
            for result in self.results
            if result.status == "equivalent" and result.reason != SAME_REASON
        ]
        parts += [
            f"SURVIVED: {result.mutant.id}\n{result.diff}shown to: {', '.join(result.kernels)}"
            for result in (*self.results, *self.further)
            if result.status == "survived"
        ]
        operators = dict.fromkeys(result.mutant.operator for result in self.results)
        rows = [self._row(name, name) for name in operators]
        heads = ("operator", "mutants", *self._statuses())
        parts.append(tabulate([*rows, self._row("all", None)], heads))
        checks = Counter(result.finding.check for result in self.results if result.finding)
        parts.append(tabulate(checks.most_common(), ("killed by", "mutants")))
        parts.append(self.closing())
        return "\n\n".join(parts)

    def _row(self, head: str, operator: str | None) -> tuple[str | int, ...]:
        chosen = [r.status for r in self.results if operator in (None, r.mutant.operator)]
        return (head, len(chosen), *(chosen.count(status) for status in self._statuses()))

    def _statuses(self) -> tuple[str, ...]:
        """The table's; no language but a compiled one has invalid mutants."""
        invalid = ("invalid",) if self.count("invalid") else ()
        return ("killed", "survived", "equivalent", *invalid)

    def closing(self) -> str:
        """The last lines."""
        invalid = self.count("invalid")
        said = (
            f"{self.backend}: {self.count('killed')} of {self.tried} mutants caught "
            f"({self.count('equivalent')} more are equivalent"
            + (f", {invalid} do not compile" if invalid else "")
            + f"): score {self.percent:.2f} %"
        )
        if not self.left:
            return said
        judged = len(self.results) + len(self.further)
        return (
            f"{said}\nSTOPPED early: {self.left} of {judged + self.left} mutants are not judged; "
            f"the score is of the first {len(self.results)} of the sample"
        )
