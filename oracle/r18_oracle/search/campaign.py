"""A campaign: one kernel through drawn problems and those of the network, in this process.

Hypothesis draws and shrinks; `r18_oracle.search.worker` runs campaigns in processes of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from r18.backend import Backend, Kernel
from r18.errors import unknown
from r18.graph.ops import OPTIONAL_OPS, Problem
from r18.graph.schedule import Schedule, network
from r18_oracle.check.checks import Tally, examine
from r18_oracle.findings import CHOICE, Failed, Finding, failed
from r18_oracle.generate.inputs import ROUNDING
from r18_oracle.generate.problems import problems, schedule_problems
from r18_oracle.generate.shrink import elements, shrunk
from r18_oracle.search.choices import on_kernel, shares


@dataclass(frozen=True)
class Profile:
    """How long to look.

    examples:       drawn problems a kernel.
    max_elements, max_macs: the size of a drawn problem.
    batches:        batch sizes at which the network's own problems are run.
    whole:          run every check on the network's problems, not one call a kind.
    samples:        images compared end to end, checkpoint by checkpoint.
    shrink_seconds: how long to look for a smaller problem once one fails.
    call_seconds:   the longest that a worker may be silent before it counts as hung.
    """

    name: str
    examples: int
    max_elements: int
    max_macs: int
    batches: tuple[int, ...]
    whole: bool
    samples: int
    shrink_seconds: float
    call_seconds: float


PROFILES = {
    p.name: p
    for p in (
        Profile("quick", 15, 4_096, 400_000, (1,), False, 2, 5, 60),
        Profile("ci", 40, 8_192, 1_000_000, (1,), False, 4, 20, 120),
        Profile("thorough", 250, 65_536, 20_000_000, (1, 2, 8), True, 16, 60, 300),
        Profile("nightly", 2_500, 262_144, 100_000_000, (1, 2, 3, 8, 64), True, 64, 300, 900),
    )
}


def profile(name: str) -> Profile:
    """The profile of that name; raises `UnknownName`."""
    try:
        return PROFILES[name]
    except KeyError:
        raise unknown("profile", name, PROFILES) from None


@dataclass
class KernelReport:
    """What a campaign found on one kernel.

    tally: of the kernel and, but for what they refused, of its choices. choices: of each, by its
    id. network_problems: how many of the problems are the network's.
    """

    backend: str
    kernel: str
    tally: Tally = field(default_factory=Tally)
    finding: Finding | None = None
    network_problems: int = 0
    seconds: float = 0.0
    choices: dict[str, Tally] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """`ok`, `FAIL`, or `refused`: it took no problem that it was offered."""
        if self.finding is not None:
            return "FAIL"
        chosen = sum(tally.problems for tally in self.choices.values())
        return "ok" if self.tally.problems > chosen else "refused"

    @property
    def spent(self) -> bool:
        """Whether the process is of no more use: what a kernel raises may be a device that is
        lost to it, where every later call raises too."""
        return self.finding is not None and self.finding.check == "runs"


Announce = Callable[[Problem | None, str, int], None]


@cache
def network_problems(name: str, batches: tuple[int, ...]) -> tuple[Problem, ...]:
    """The distinct problems of a named network."""
    return schedule_problems(network(name), batches)


def run_campaign(
    backend: Backend,
    kernel: Kernel,
    how: Profile,
    seed: int,
    *,
    backend_name: str | None = None,
    network_name: str | None = "resnet18",
    announce: Announce = lambda problem, kind, seed: None,
) -> KernelReport:
    """Search one kernel for a fault; the report's finding is the smallest failing problem.

    network_name: whose problems to include; None leaves them out (for slow devices the tiny one
    stands in). The same seed gives the same problems and inputs.
    """
    report = KernelReport(backend_name or backend.name, kernel.id)
    start = time.perf_counter()
    passed: list[Callable[[], bool]] = []  # the last that did

    def attempt(
        one: Kernel,
        problem: Problem,
        data_seed: int,
        rounding: str,
        light: bool,
        only: str | None = None,
    ) -> bool:
        examined = partial(
            examine,
            backend,
            one,
            problem,
            data_seed,
            report.tally if one is kernel else report.choices[one.id],
            rounding=rounding,
            light=light,
            backend_name=report.backend,
            announce=announce,
            only=only,
        )
        try:
            accepted = examined()
        except Failed as failure:
            finding = on_kernel(failure.finding, kernel)
            if finding.check == "runs" and passed and _fails(passed[0]):
                raise _DeviceLost(finding) from None  # smaller problems would raise too
            raise failed(finding) from None
        if accepted:
            passed[:] = [examined]
        return accepted

    def made_small(one: Kernel, shown: Callable[[], Any]) -> Any:
        """What `shown` gives; what fails is made as small as it gets. Of what is drawn too, which
        Hypothesis has made small: it takes the first of a few windows, say, for the smallest."""
        try:
            return shown()
        except Failed as failure:
            seen, details = failure.finding, failure.finding.details
            given = seen.seed, details["rounding"], details["light"]
            raise _smallest(failure, how, lambda p, check: attempt(one, p, *given, check)) from None

    def fixed(one: Kernel, problem: Problem, index: int, light: bool) -> bool:
        """A problem that was not drawn."""
        rounding = ROUNDING[index % len(ROUNDING)]
        taken: bool = made_small(one, partial(attempt, one, problem, seed, rounding, light))
        return taken

    try:
        for share in shares(backend, kernel, how, seed):
            one = share.one
            if one is not kernel:
                report.choices[one.id] = Tally()
            made_small(one, partial(search, one, share.how, share.seed, partial(attempt, one)))
            for index, problem in enumerate(share.known):
                fixed(one, problem, index, False)
        if network_name is not None:
            for index, problem in enumerate(network_problems(network_name, how.batches)):
                if type(problem.op) is kernel.op:
                    report.network_problems += fixed(kernel, problem, index, not how.whole)
        report.finding = _idle_choice(report, how, seed, network_name)
    except (Failed, _DeviceLost) as failure:
        report.finding = failure.finding
    for tally in report.choices.values():
        report.tally.include(tally)
    report.seconds = time.perf_counter() - start
    return report


def _idle_choice(
    report: KernelReport, how: Profile, seed: int, network_name: str | None
) -> Finding | None:
    """The finding about a choice that took nothing while its kernel did, or None: nothing of it is
    verified then."""
    idle = [name for name, tally in report.choices.items() if not tally.problems]
    if not idle or not report.tally.problems:
        return None
    reasons = "; ".join(report.choices[idle[0]].refused)
    message = f"{idle[0]}, one of its choices, took none of the problems it was shown: {reasons}"
    details = {CHOICE: idle[0], "profile": how.name, "network": network_name}
    about = "coverage", report.backend, report.kernel, None, "none", seed
    return Finding(*about, message, details=details)


def search(
    kernel: Kernel,
    how: Profile,
    seed: int,
    attempt: Callable[[Problem, int, str, bool, str | None], bool],
) -> None:
    """Draw problems and inputs, and raise the smallest `Failed` that `attempt` raises on them.

    Once there is one, its check is all that smaller problems are tried for.
    """
    best: list[Failed] = []
    deadline = math.inf

    @hypothesis.seed(seed)
    @settings(
        max_examples=how.examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(
        problem=problems(kernel, how.max_elements, how.max_macs),
        data_seed=st.integers(0, 2**16 - 1),
        rounding=st.sampled_from(ROUNDING),
    )
    def draw(problem: Problem, data_seed: int, rounding: str) -> None:
        nonlocal deadline
        if time.monotonic() > deadline:
            raise _ShrunkEnough
        try:
            attempt(problem, data_seed, rounding, False, best[0].finding.check if best else None)
        except Failed as failure:
            if not best:
                deadline = time.monotonic() + how.shrink_seconds
            if not best or _smaller(failure.finding, best[0].finding):
                best[:] = [failure]
            raise

    try:
        draw()
    except (_ShrunkEnough, Failed, Flaky):  # flaky: it fails, but not each time, or not alike
        if not best:
            raise
        raise best[0] from None


class _ShrunkEnough(BaseException):
    """Ends a search; Hypothesis lets it through, as it does KeyboardInterrupt."""


class _DeviceLost(BaseException):
    """What passed before now raises: ends a search with the finding that it began with."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding


def _fails(examined: Callable[[], object]) -> bool:
    try:
        examined()
    except Failed:
        return True
    return False


def _smaller(one: Finding, other: Finding) -> bool:
    """Same fault, in less: fewer elements, or as many and a smaller seed."""
    if one.check != other.check or one.problem is None or other.problem is None:
        return False
    return (elements(one.problem), one.seed) < (elements(other.problem), other.seed)


def _smallest(failure: Failed, how: Profile, attempt: Callable[[Problem, str], object]) -> Failed:
    """The failure of the same check on the smallest problem that is found to fail it."""
    best, finding = failure, failure.finding
    deadline = time.monotonic() + how.shrink_seconds

    def fails(problem: Problem) -> bool:
        nonlocal best
        try:
            attempt(problem, finding.check)
        except Failed as again:
            if again.finding.check != finding.check:
                return False
            best = again
            return True
        return False

    if finding.problem is not None:
        shrunk(finding.problem, fails, lambda: time.monotonic() > deadline)
    return best


def uncovered(
    backend: Backend, schedule: Schedule, batches: Sequence[int]
) -> list[tuple[str, Problem]]:
    """(precision, problem) of every network problem that no kernel of the backend takes.

    Only for precisions in which the backend has convolutions at all.
    """
    kernels = backend.kernels()
    wanted = schedule_problems(schedule, batches)
    missing: list[tuple[str, Problem]] = []
    for name in dict.fromkeys(k.precision.name for k in kernels):
        usable = [k for k in kernels if k.precision.name == name]
        answers = {p: any(k.refusal(p) is None for k in usable) for p in wanted}
        convolves = any(k.op.name == "conv2d" for k in usable)
        layouts = {k.layout for k in usable}
        for problem, ok in answers.items():
            if ok or not convolves or isinstance(problem.op, OPTIONAL_OPS):
                continue
            if problem.op.name == "relayout" and len(layouts) == 1:
                continue  # nothing of it would ever be planned
            missing.append((name, problem))
    return missing


def replay(
    backend: Backend,
    kernel: Kernel,
    finding: Finding,
    *,
    backend_name: str,
    announce: Announce = lambda problem, kind, seed: None,
) -> Finding | None:
    """Run a finding's problem and inputs again; the finding that comes out, or None."""
    if finding.problem is None:
        return None
    try:
        examine(
            backend,
            kernel,
            finding.problem,
            finding.seed,
            rounding=finding.details.get("rounding", "normal"),
            light=finding.details.get("light", False),
            only=finding.details.get("only"),
            backend_name=backend_name,
            announce=announce,
        )
    except Failed as failure:
        return failure.finding
    return None
