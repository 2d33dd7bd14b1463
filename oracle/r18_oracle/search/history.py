"""Findings that depend on earlier calls, and so do not appear in a fresh process.

Campaigns call many kernels in one process. `confirmed` runs a finding's call alone in a fresh
process. If it is right there, it depends on earlier calls; they are replayed in fresh processes
too, as few as still show it, and saved with the finding.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from r18.backend import Backend, Kernel
from r18.errors import UsageError
from r18.graph.ops import Problem
from r18_oracle.check.checks import examine
from r18_oracle.check.state import State
from r18_oracle.findings import (
    BEFORE,
    STATE,
    Failed,
    Finding,
    Subject,
    failed,
    problem_from_json,
    problem_to_json,
)
from r18_oracle.loading import kernel_of, with_choices

TRIALS = 10
"""The most fresh processes for one finding."""
REMEMBERED = 2_000
"""The calls of a backend that a process remembers."""
ALONE = "alone"
"""Key of a finding's details: "right" if its call is right as the first in a process."""
ORIGINAL = "check"
"""Key of the details of a finding with earlier calls: the check that failed after them."""

Announce = Callable[[Problem | None, str, int], None]


@dataclass(frozen=True)
class Earlier:
    """An examination that came before, of a listed kernel or one of its choices (`one`)."""

    kernel: str
    one: str
    problem: Problem
    seed: int
    rounding: str = "normal"
    light: bool = False
    only: str | None = None
    state: bool = False

    def to_json(self) -> dict[str, Any]:
        plain = {k: v for k, v in vars(self).items() if v is not None and v is not False}
        return plain | {"problem": problem_to_json(self.problem)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Earlier:
        """The inverse of `to_json`; raises `UsageError`."""
        try:
            return cls(**data | {"problem": problem_from_json(data["problem"])})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise UsageError(f"a damaged finding: a call before it: {error}") from None

    def again(self, backend: Backend, announce: Announce) -> None:
        """Make the examination again, whatever it finds."""
        kernel = kernel_of(backend, self.kernel)
        every = with_choices(backend, [kernel])
        one = next((one for one in every if one.id == self.one), None)
        if one is None:
            raise UsageError(f"the finding needs a call of {self.one}, which is not there")
        with suppress(Failed):
            if self.state:
                State(backend, one, self.problem, self.seed, announce=announce).run()
                return
            examine(
                backend,
                one,
                self.problem,
                self.seed,
                rounding=self.rounding,
                light=self.light,
                only=self.only,
                announce=announce,
            )


CALLS: defaultdict[str, deque[Earlier]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
"""The examinations of this process, in order, by backend: a replay has only one."""


def earlier_calls(finding: Finding) -> list[Earlier]:
    """The calls that a finding needs before it; empty for one of a scenario, or without any."""
    if STATE in finding.details:
        return []
    given = finding.details.get(BEFORE, [])
    if not isinstance(given, list):
        raise UsageError("a damaged finding: the calls before it are no list")
    return [Earlier.from_json(data) for data in given]


def alone(finding: Finding) -> Finding:
    """The same call without what came before it."""
    rest = {k: v for k, v in finding.details.items() if k not in (STATE, BEFORE, ALONE, ORIGINAL)}
    check = str(finding.details.get(ORIGINAL, finding.check))
    return replace(finding, check=check, details=rest)


def after(finding: Finding, before: Sequence[Earlier]) -> Finding:
    """A finding as one of the check `state`, with the calls that it needs."""
    count = "another call" if len(before) == 1 else f"{len(before)} other calls"
    details = finding.details | {
        ORIGINAL: finding.check,
        ALONE: "right",
        BEFORE: [call.to_json() for call in before],
    }
    message = f"right in a fresh process, wrong after {count}: {finding.check}: {finding.message}"
    return replace(finding, check="state", message=message, details=details)


def scenario(backend: Backend, kernel: Kernel, finding: Finding, announce: Announce) -> None:
    """Play the scenario of a finding again. Raises `Failed`, and `UsageError` for a damaged one."""
    try:
        asked = finding.details[STATE]
        base, name = problem_from_json(asked["base"]), asked["scenario"]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"a damaged finding: its scenario: {error}") from None
    state = State(
        backend, kernel, base, finding.seed, backend_name=finding.backend, announce=announce
    )
    try:
        state.run(only=name)
    except Failed as failure:
        found = failure.finding
        kept = {ALONE: finding.details[ALONE]} if ALONE in finding.details else {}
        raise failed(replace(found, details=found.details | kept)) from None


Replayed = Callable[[Finding], Finding | None]
"""Replays a finding in a fresh process."""


def confirmed(finding: Finding, history: Sequence[Earlier], replayed: Replayed) -> Finding:
    """The finding as a fresh process shows it.

    One that its call alone shows stays as it is, or becomes what the call alone shows. Any other
    is of the check `state`, with the fewest earlier calls found that it takes. If no calls bring
    it back, it says so.
    """
    if finding.subject is not Subject.KERNEL or finding.check in ("crash", "hang"):
        return finding
    if finding.problem is None:
        return finding
    by_itself = replayed(alone(finding))
    if by_itself is not None:
        return by_itself if finding.depends_on_calls else finding
    if STATE in finding.details:
        for name in (finding.details[STATE]["scenario"], None):  # that scenario, or all of them
            asked = {STATE: finding.details[STATE] | {"scenario": name}, ALONE: "right"}
            again = replayed(replace(finding, details=finding.details | asked))
            if again is not None:
                return replace(again, details=again.details | asked)
    return _with_calls(alone(finding), history, replayed)


def _with_calls(finding: Finding, history: Sequence[Earlier], replayed: Replayed) -> Finding:
    """The finding with the fewest calls found that bring it back."""
    mine = [call for call in history if call.kernel == finding.kernel]
    for calls in (mine, list(history)):
        again = replayed(after(finding, calls)) if calls else None
        if again is not None:
            return _fewest(finding, calls, again, replayed)
    details = finding.details | {ALONE: "right"}
    message = f"{finding.message} (right in a fresh process, also after the calls before it)"
    return replace(finding, message=message, details=details)


def _fewest(finding: Finding, calls: list[Earlier], best: Finding, replayed: Replayed) -> Finding:
    """Halve the calls as long as one half still brings the finding back."""
    trials = TRIALS
    while len(calls) > 1 and trials > 1:
        middle = len(calls) // 2
        for half in (calls[middle:], calls[:middle]):
            trials -= 1
            again = replayed(after(finding, half))
            if again is not None:
                calls, best = half, again
                break
        else:
            return best
    return best
