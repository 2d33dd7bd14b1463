"""The check `perturb`: a kernel on one problem, with threads and copies delayed by several seeds.

The build with delays first runs without any; that output must be within the bound. With each seed a
deterministic kernel must then give the same bits, and any other kernel an output within the bound.
No call may raise, or write where it must not. Memory holds NaN before calls with even seeds and
ordinary numbers before the others. Where launches overlap, half of the calls (seeds 4 to 7, 12 to
15, and so on) begin while the copy of the inputs is still running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from r18.backend import Array, Backend, Kernel
from r18.errors import UsageError, shortened, show
from r18.graph.ops import Problem
from r18_oracle.cases import Case
from r18_oracle.check.call import (
    Observation,
    Raised,
    attempted,
    bits_differ,
    nans,
    noise,
    observe,
)
from r18_oracle.findings import PERTURB, Failed, Finding, failed
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.verdict import judge, ratio_text

CHECK = "perturb"
SEEDS = 8
"""How many seeds of delays each problem has by default."""
TRIALS = 3
"""Runs with delays at only one kind of site, when a failure is attributed to kinds."""
REPLAYS = 20
"""Runs of a replay with each of a finding's seeds: a race need not show each time."""
CALM = 0
"""The seed of the call without delays."""

Announce = Callable[[Problem, str, int], None]


@dataclass(frozen=True)
class Delays:
    """Seeds of delays, and the kinds of site that are delayed; None for all."""

    seeds: tuple[int, ...]
    kinds: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        kinds = None if self.kinds is None else list(self.kinds)
        return {"seeds": list(self.seeds), "kinds": kinds}

    @classmethod
    def of(cls, finding: Finding) -> Delays:
        """The delays in a finding's details. Raises `UsageError` for damaged ones."""
        data = finding.details.get(PERTURB)
        match data:
            case {"seeds": [*seeds], "kinds": [*_] | None as kinds} if (
                0 < len(seeds) <= 1 << 16
                and all(type(seed) is int and 0 <= seed < 1 << 32 for seed in seeds)
                and all(isinstance(kind, str) for kind in kinds or ())
            ):
                return cls(tuple(seeds), None if kinds is None else tuple(kinds))
        raise UsageError(f"a damaged finding: its details: {show(data)} are not delays")


def unable(backend: Backend) -> UsageError:
    """The error for a backend that cannot delay anything."""
    return UsageError(
        f"backend '{backend.name}' cannot perturb its schedule\n"
        "  to support this, a backend overrides `Backend.perturb`; of ours, cupy does"
    )


@dataclass
class Perturbed:
    """Examines kernels under perturbation and counts its `calls`; see the module."""

    backend: Backend
    backend_name: str
    delays: Delays
    announce: Announce = lambda problem, kind, seed: None
    calls: int = 0

    @cached_property
    def _overlapping(self) -> bool:
        return self.backend.stream().overlapping

    def examine(self, kernel: Kernel, problem: Problem, seed: int, rounding: str) -> bool:
        """Run a problem with every seed of delays; False if the kernel refuses it.

        seed, rounding: of the inputs. Raises `Failed`, and `UsageError` for a backend that cannot
        perturb anything.
        """
        if kernel.refusal(problem) is not None:
            return False
        case = make_case(kernel, problem, rounding, seed)
        self.announce(problem, rounding, seed)
        about = _About(self.backend_name, kernel, case, rounding, seed)
        try:
            calm = self._call(about, Delays((CALM,), ()))
            about.judge(calm.output, Delays((CALM,), ()))
            for one in self.delays.seeds:
                self.announce(problem, rounding, seed)
                self._with_delays(about, Delays((one,), self.delays.kinds), calm.output)
        finally:
            self._undo()
        return True

    def again(self, kernel: Kernel, finding: Finding) -> None:
        """Replay a finding in `REPLAYS` runs; raises `Failed` in the first that fails."""
        assert finding.problem is not None
        rounding = finding.details.get("rounding", "normal")
        for _ in range(REPLAYS):
            self.examine(kernel, finding.problem, finding.seed, rounding)

    def _with_delays(self, about: _About, delays: Delays, calm: Array) -> None:
        """Make one call with delays; a failure names the kinds of site that suffice for it."""
        try:
            self._compare(about, delays, calm)
        except Failed as failure:
            if has_raised(failure.finding):
                raise  # the device may be lost
            kinds = delays.kinds if delays.kinds is not None else self._kinds()
            found = [kind for kind in kinds if self._suffices(about, delays, kind, calm)]
            if not found or len(found) == len(kinds):
                raise
            raise failed(_named(failure.finding, replace(delays, kinds=tuple(found)))) from None

    def _suffices(self, about: _About, delays: Delays, kind: str, calm: Array) -> bool:
        """Whether delays at only one kind of site fail too."""
        for _ in range(TRIALS):
            try:
                self._compare(about, replace(delays, kinds=(kind,)), calm)
            except Failed:
                return True
        return False

    def _compare(self, about: _About, delays: Delays, calm: Array) -> None:
        seen = self._call(about, delays)
        if about.kernel.deterministic:
            about.same(calm, seen.output, delays)
        else:
            about.judge(seen.output, delays)

    def _call(self, about: _About, delays: Delays) -> Observation:
        self.calls += 1
        seen = attempted(lambda: self._observed(about, delays))
        if isinstance(seen, Raised):
            about.fail(seen.words(), delays, raised=True)
        if seen is None:
            raise unable(self.backend)
        for wrong in (seen.trespass, seen.changed):
            if wrong:
                about.fail(wrong, delays)
        return seen

    def _observed(self, about: _About, delays: Delays) -> Observation | None:
        """Make a call with delays; None if the backend cannot delay anything."""
        (seed,) = delays.seeds
        if not self.backend.perturb(seed, delays.kinds):
            return None
        return observe(
            self.backend,
            about.kernel,
            about.case,
            fill=noise(seed) if seed % 2 else nans,
            late=self._overlapping and seed // 4 % 2 == 1,
        )

    def _kinds(self) -> tuple[str, ...]:
        return self.backend.perturb(CALM, ())

    def _undo(self) -> None:
        """Switch delays off; after a lost device nothing can be undone."""
        try:
            self.backend.perturb(None)
        except Exception:
            return


@dataclass(frozen=True)
class _About:
    """The subject of a finding, and the comparisons that raise one."""

    backend_name: str
    kernel: Kernel
    case: Case
    rounding: str
    seed: int

    def judge(self, got: Array, delays: Delays) -> None:
        """Fail unless an output is within the bound; the reference is kept for the kernel's next
        call on these inputs."""
        asked = (self.case.problem, self.rounding, self.seed, 0)
        contract = self.kernel.contract
        judgement = judge(self.case, contract, got, key=(*asked, self.case.precision, contract))
        if not judgement.ok:
            self.fail(
                f"the error exceeds the bound (error/bound {ratio_text(judgement.ratio)})",
                delays,
                coordinate=judgement.coordinate,
                got=judgement.got,
                expected=judgement.expected,
                bound=judgement.allowed,
            )

    def same(self, calm: Array, got: Array, delays: Delays) -> None:
        """Fail unless the bits are the same as without delays."""
        differs = bits_differ(calm, got)
        if differs.any():
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
            self.fail(
                f"{np.count_nonzero(differs)} of {got.size} elements differ from those without "
                "delays",
                delays,
                coordinate=at,
                got=float(got[at]),
                expected=float(calm[at]),
                bound=0.0,
            )

    def fail(self, wrong: str, delays: Delays, *, raised: bool = False, **where: Any) -> NoReturn:
        details: dict[str, Any] = delays.to_json() | ({"raised": True} if raised else {})
        finding = Finding(
            check=CHECK,
            backend=self.backend_name,
            kernel=self.kernel.id,
            problem=self.case.problem,
            kind=self.rounding,
            seed=self.seed,
            message=shortened(wrong),
            details={"rounding": self.rounding, PERTURB: details, "wrong": shortened(wrong)},
            **where,
        )
        raise failed(_named(finding, delays))


def _named(finding: Finding, delays: Delays) -> Finding:
    """The finding with the seed and the kinds of site in its message and its details."""
    if delays.kinds == ():
        how = "without delays"
    else:
        kinds = ", ".join(delays.kinds) if delays.kinds else "every kind of site"
        how = f"with delays of seed {delays.seeds[0]} at {kinds}"
    details = finding.details | {PERTURB: finding.details[PERTURB] | delays.to_json()}
    return replace(finding, message=f"{how}: {finding.details['wrong']}", details=details)


def has_raised(finding: Finding) -> bool:
    """Whether the call raised an exception, so that the device may be lost."""
    return "raised" in finding.details[PERTURB]


def lost(finding: Finding, delays: Delays) -> Finding:
    """A crash or a hang of a worker as a finding of this check."""
    wrong = f"{finding.check}: {finding.message}"
    kinds: Sequence[str] = delays.kinds or ("every kind of site",)
    count = len(delays.seeds)
    message = f"with delays of one of {count} seeds at {', '.join(kinds)}: {wrong}"
    details = {"rounding": finding.kind, PERTURB: delays.to_json(), "wrong": wrong}
    return replace(finding, check=CHECK, message=message, details=finding.details | details)


__all__ = ["CHECK", "SEEDS", "Delays", "Perturbed", "has_raised", "lost", "unable"]
