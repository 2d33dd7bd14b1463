"""The fates of a backend's mutants, and the share of them that the oracle caught."""

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

    status: `killed` by a finding; `survived`; `equivalent`, judged by hand (and not run) or because
    it compiles to the same machine code; `invalid`, since it does not compile.
    reason: why it is equivalent or invalid.
    kernels: those to examine, up to the first finding.
    sanitizer: for a survivor, the version of compute-sanitizer that found nothing either; empty
    if that did not finish.
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
        """The fate after a trial that was not late."""
        if finding is None:
            return cls(mutant, "survived", diff, kernels, seconds=seconds)
        nothing = {INVALID: "invalid", SAME_CODE: "equivalent"}
        if finding.check in nothing:
            status = nothing[finding.check]
            return cls(mutant, status, diff, kernels, reason=finding.message, seconds=seconds)
        return cls(mutant, "killed", diff, kernels, finding, seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        """As plain data, with a short finding and no diff; `r18 mutate --show ID` prints it."""
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
    """The results of a run.

    results: those of the sample, in source order; after an early stop, those of the sample up to
    the first mutant that is not judged. further: results after that one, which do not count, since
    they favour mutants that are judged quickly.
    left: how many mutants are not judged.
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
        """Killed / (all − equivalent − invalid), in percent; 0 if no mutant is left."""
        return 100 * self.count("killed") / self.tried if self.tried else 0.0

    @property
    def tried(self) -> int:
        """The mutants that could have been caught."""
        return self.count("killed") + self.count("survived")

    def to_json(self) -> dict[str, Any]:
        """The summary and the results that count."""
        return self.summary() | {"results": [result.to_json() for result in self.results]}

    def summary(self) -> dict[str, Any]:
        """The numbers of the score."""
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
        """Equivalent mutants and survivors with their diffs, the tables, and the score."""
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
        """The table's columns; only compiled languages have invalid mutants."""
        invalid = ("invalid",) if self.count("invalid") else ()
        return ("killed", "survived", "equivalent", *invalid)

    def closing(self) -> str:
        """The last lines of the text."""
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
