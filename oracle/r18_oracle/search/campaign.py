"""A campaign: one kernel on drawn problems, corners and the network's problems, in this process.

`Campaign.run` is the whole story. Hypothesis draws problems and shrinks those that fail
(`search`); `r18_oracle.search.worker` runs campaigns in processes of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from r18.backend import Backend, Kernel
from r18.graph.ops import Problem
from r18.graph.resnet import network
from r18_oracle.check.checks import examine
from r18_oracle.check.relatives import base_problem
from r18_oracle.check.state import State
from r18_oracle.check.tally import Tally
from r18_oracle.findings import CHOICE, Failed, Finding, failed
from r18_oracle.generate.corners import corners
from r18_oracle.generate.inputs import ROUNDING
from r18_oracle.generate.problems import problems, schedule_problems
from r18_oracle.generate.shrink import elements, shrunk
from r18_oracle.generate.sizes import takes
from r18_oracle.judge.declared import objection
from r18_oracle.search.choices import WHOLE, Part, Share, shares
from r18_oracle.search.history import CALLS, Earlier
from r18_oracle.search.profiles import Profile

Announce = Callable[[Problem | None, str, int], None]
"""Called with (problem, kind of input, seed) before each call of a kernel."""
Attempt = Callable[[Problem, int, str, bool, str | None], bool]
"""Examines (problem, data seed, rounding kind, light, only); False if the problem is refused.
Raises `Failed`."""


@dataclass
class KernelReport:
    """The result of a campaign on one kernel.

    tally:   of the kernel and its choices, without what the choices refused.
    choices: the tally of each choice, by id.
    network_problems: how many of the problems are the network's.
    history: the examinations of this process before the finding's, of any kernel.
    """

    backend: str
    kernel: str
    tally: Tally = field(default_factory=Tally)
    finding: Finding | None = None
    network_problems: int = 0
    seconds: float = 0.0
    choices: dict[str, Tally] = field(default_factory=dict)
    history: tuple[Earlier, ...] = ()

    @property
    def verdict(self) -> str:
        """`ok`, `FAIL`, or `refused` if the kernel took no problem at all."""
        if self.finding is not None:
            return "FAIL"
        return "ok" if self.own_problems else "refused"

    @property
    def own_problems(self) -> int:
        """How many problems the kernel itself took, without those of its choices."""
        return self.tally.problems - sum(tally.problems for tally in self.choices.values())

    @property
    def spent(self) -> bool:
        """Whether the process must be replaced: an exception may mean that its device is lost,
        and then every later call raises."""
        return self.finding is not None and self.finding.check == "runs"


def joined(reports: Sequence[KernelReport]) -> KernelReport:
    """One report of the parts of a campaign, in their order.

    The finding, with its history, is that of the first part that has one. The seconds are those of
    all parts together.
    """
    first, *_ = reports
    failed = next((report for report in reports if report.finding is not None), first)
    whole = KernelReport(
        first.backend,
        first.kernel,
        finding=failed.finding,
        network_problems=sum(report.network_problems for report in reports),
        seconds=sum(report.seconds for report in reports),
        history=failed.history,
    )
    for report in reports:
        whole.tally.include(report.tally)
        whole.tally.refused += report.tally.refused
        whole.choices |= report.choices
    return whole


LARGE = 1 << 19
"""Elements of a corner, weights included, above which it gets the checks of a network's problem: a
table of pixels for each of 65,537 channels takes 134 MB in float64, in every call."""


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
    part: Part = WHOLE,
    announce: Announce = lambda problem, kind, seed: None,
) -> KernelReport:
    """Search one kernel for a fault; the report's finding is the smallest failing problem.

    network_name: the network whose problems to include; None for no network. part: the part to run.
    The same seed gives the same problems and inputs.
    """
    name = backend_name or backend.name
    return Campaign(backend, kernel, how, seed, name, network_name, announce).run(part)


class Campaign:
    """One kernel and its choices; the arguments are those of `run_campaign`."""

    def __init__(
        self,
        backend: Backend,
        kernel: Kernel,
        how: Profile,
        seed: int,
        backend_name: str,
        network_name: str | None,
        announce: Announce,
    ) -> None:
        self.backend = backend
        self.kernel = kernel
        self.how = how
        self.seed = seed
        self.network_name = network_name
        self.announce = announce
        self.report = KernelReport(backend_name, kernel.id)
        self._calls = CALLS[backend_name]
        self._last_passed: Callable[[], bool] | None = None  # examines that problem again
        self._smallest_passed: Problem | None = None

    def run(self, part: Part = WHOLE) -> KernelReport:
        """Stop at the first fault; see `run_campaign`."""
        report, start = self.report, time.perf_counter()
        try:
            self._run_shares(part)
            self._run_network(part)
        except (Failed, _DeviceLost) as failure:
            report.finding = failure.finding
            report.history = tuple(self._calls)
        for tally in report.choices.values():
            report.tally.include(tally)
        if part == WHOLE and report.finding is None:
            report.finding = idle_choice(report, self.how, self.seed, self.network_name)
        report.seconds = time.perf_counter() - start
        return report

    def _run_shares(self, part: Part) -> None:
        base = base_problem(self.kernel, self.how.max_macs)
        with_state = part.nth == 0
        checked = self._run_state(base) if with_state else self._keep_alone(base)
        every = [*shares(self.backend, self.kernel, self.how, self.seed)]
        for place in part.shares(len(every)):
            self._run_share(every[place])
        if with_state and not checked:
            self._run_state(self._smallest_passed)

    def _run_state(self, problem: Problem | None) -> bool:
        """The check `state` on one problem, and the ordinary checks on what it suspects; False
        without a problem."""
        if problem is None:
            return False
        if not self._keep_alone(problem):
            return True
        kernel = self.kernel.id
        for suspect in self._state(problem).run():
            self._run_fixed(self.kernel, suspect, 0, light=False)
        self._calls.append(Earlier(kernel, kernel, problem, self.seed, state=True))
        return True

    def _keep_alone(self, problem: Problem | None) -> bool:
        """Keep a small call that is right alone: when it raises later, the device is lost.

        problem: for a kernel that takes no corner. Returns whether the kernel may be called at all.
        """
        try:
            if objection(self.kernel) is not None:
                return False  # the check `declaration` says so
        except Exception:  # it says that too
            return False
        limits = self.how.max_elements, self.how.max_macs
        least = (p for p in corners(self.kernel.op, *limits) if takes(self.kernel, p))
        smallest = min(least, key=elements, default=problem)
        if smallest is not None:
            first = self._state(smallest)
            if first.right_alone():
                self._last_passed = first.right_alone
        return True

    def _state(self, problem: Problem) -> State:
        return State(
            self.backend,
            self.kernel,
            problem,
            self.seed,
            self.report.tally,
            backend_name=self.report.backend,
            announce=self.announce,
        )

    def _run_share(self, share: Share) -> None:
        """The kernel or one choice: drawn problems first, then corners and crossings, and at last
        problems that take several rounds."""
        one = share.one
        if one is not self.kernel:
            self.report.choices[one.id] = Tally()
        with self._shrinking(one):
            search(one, share.how, share.seed, partial(self._attempt, one))
        for index, problem in enumerate((*share.known, *share.vast)):
            large = elements(problem) > LARGE and not self.how.whole
            self._run_fixed(one, problem, index, light=large)
        for index, problem in enumerate(share.rounds):
            large = elements(problem) > 8 * share.how.max_elements  # as no corner is
            self._run_fixed(one, problem, index, light=large)

    def _run_network(self, part: Part) -> None:
        if self.network_name is None:
            return
        every = network_problems(self.network_name, self.how.batches)
        mine = [*Share(self.kernel, self.how, self.seed).of_network(every)]
        for index, problem in mine[part.problems]:
            accepted = self._run_fixed(self.kernel, problem, index, light=not self.how.whole)
            self.report.network_problems += accepted

    def _run_fixed(self, one: Kernel, problem: Problem, index: int, *, light: bool) -> bool:
        """Examine a problem that was not drawn; False if it is refused."""
        rounding = ROUNDING[index % len(ROUNDING)]
        with self._shrinking(one):
            return self._attempt(one, problem, self.seed, rounding, light)

    def _attempt(
        self,
        one: Kernel,
        problem: Problem,
        data_seed: int,
        rounding: str,
        light: bool,
        only: str | None = None,
    ) -> bool:
        """Examine the kernel or a choice on one problem; False if it is refused.

        Raises `Failed` with a finding on the kernel, and `_DeviceLost`.
        """
        examined = partial(
            examine,
            self.backend,
            one,
            problem,
            data_seed,
            self.report.tally if one is self.kernel else self.report.choices[one.id],
            rounding=rounding,
            light=light,
            backend_name=self.report.backend,
            announce=self.announce,
            only=only,
        )
        try:
            accepted = examined()
        except Failed as failure:
            finding = failure.finding.on_kernel(self.kernel.id)
            if finding.check == "runs" and self._last_passed and _fails(self._last_passed):
                raise _DeviceLost(finding) from None  # smaller problems would raise too
            raise failed(finding) from None
        if accepted:
            call = Earlier(self.kernel.id, one.id, problem, data_seed, rounding, light, only)
            self._calls.append(call)
            self._last_passed = examined
            if one is self.kernel and self._smaller_than_passed(problem):
                self._smallest_passed = problem
        return accepted

    def _smaller_than_passed(self, problem: Problem) -> bool:
        before = self._smallest_passed
        return before is None or elements(problem) < elements(before)

    @contextmanager
    def _shrinking(self, one: Kernel) -> Iterator[None]:
        """Replace a `Failed` by that of the smallest problem that fails the same check.

        Drawn problems are shrunk again: Hypothesis minimises in the order of its choices, so it
        keeps the first of several windows rather than the smallest, for example.
        """
        try:
            yield
        except Failed as failure:
            details, seed = failure.finding.details, failure.finding.seed
            given = seed, details["rounding"], details["light"]
            raise _smallest(
                failure,
                self.how.shrink_seconds,
                lambda problem, check: self._attempt(one, problem, *given, check),
            ) from None


def idle_choice(
    report: KernelReport, how: Profile, seed: int, network_name: str | None
) -> Finding | None:
    """The finding for a choice that took no problem although its kernel did, or None.

    Nothing would be verified about such a choice.
    """
    idle = [name for name, tally in report.choices.items() if not tally.problems]
    if not idle or not report.own_problems:
        return None
    reasons = "; ".join(report.choices[idle[0]].refused)
    return Finding(
        check="coverage",
        backend=report.backend,
        kernel=report.kernel,
        problem=None,
        kind="none",
        seed=seed,
        message=f"{idle[0]}, one of its choices, took none of the problems it was shown: {reasons}",
        details={CHOICE: idle[0], "profile": how.name, "network": network_name},
    )


# -- drawing and shrinking ---------------------------------------------------------------------


def search(kernel: Kernel, how: Profile, seed: int, attempt: Attempt) -> None:
    """Draw problems and inputs; raise the smallest `Failed` that `attempt` raises on them.

    After the first failure, smaller problems are tried for the failed check only.
    """
    smallest = _SmallestDrawn(attempt, how.shrink_seconds)

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
        smallest.attempt(problem, data_seed, rounding)

    try:
        draw()
    except (_ShrunkEnough, Failed, Flaky):  # flaky: fails sometimes, or in different ways
        if smallest.failure is None:
            raise
        raise smallest.failure from None


def walk(
    backend: Backend,
    kernel: Kernel,
    how: Profile,
    seed: int,
    network_name: str | None,
    attempt: Callable[[Kernel, Problem, int, str], bool],
    *,
    whole: bool = False,
) -> None:
    """The problems of a campaign, with its seeds and inputs, for runs that check something else.

    whole: with those beyond the limit of a workspace, for runs in which size costs little.

    attempt: gets the kernel or a choice, a problem, the seed of its data and the rounding kind. It
    returns False if the problem is refused, and may raise `Failed`.
    """

    def fixed(one: Kernel, found: Iterable[Problem]) -> None:
        for index, problem in enumerate(found):
            attempt(one, problem, seed, ROUNDING[index % len(ROUNDING)])

    for share in shares(backend, kernel, how, seed):

        def drawn(
            problem: Problem,
            data_seed: int,
            rounding: str,
            light: bool,
            only: str | None,
            one: Kernel = share.one,
        ) -> bool:
            return attempt(one, problem, data_seed, rounding)

        search(share.one, share.how, share.seed, drawn)
        fixed(share.one, share.known)
        if whole:
            fixed(share.one, share.rounds)
    if network_name is not None:
        every = network_problems(network_name, how.batches)
        found = Share(kernel, how, seed).of_network(every)
        fixed(kernel, (problem for _, problem in found))


class _SmallestDrawn:
    """The smallest failure among drawn problems, and the deadline for shrinking it."""

    def __init__(self, attempt: Attempt, shrink_seconds: float) -> None:
        self.failure: Failed | None = None
        self._attempt = attempt
        self._shrink_seconds = shrink_seconds
        self._deadline = math.inf

    def attempt(self, problem: Problem, data_seed: int, rounding: str) -> None:
        """Examine one drawn problem, and keep its failure if it is the smallest so far.

        Raises `_ShrunkEnough` after the deadline, and `Failed`.
        """
        if time.monotonic() > self._deadline:
            raise _ShrunkEnough
        only = self.failure.finding.check if self.failure else None
        try:
            self._attempt(problem, data_seed, rounding, False, only)
        except Failed as failure:
            if self.failure is None:
                self._deadline = time.monotonic() + self._shrink_seconds
            if self.failure is None or _smaller(failure.finding, self.failure.finding):
                self.failure = failure
            raise


def _smallest(
    failure: Failed, shrink_seconds: float, attempt: Callable[[Problem, str], object]
) -> Failed:
    """The failure of the same check on the smallest problem found within the time limit.

    attempt: examines (problem, check); raises `Failed`.
    """
    best, finding = failure, failure.finding
    deadline = time.monotonic() + shrink_seconds

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


def _smaller(one: Finding, other: Finding) -> bool:
    """Whether `one` fails the same check on fewer elements, or on as many with a smaller seed."""
    if one.check != other.check or one.problem is None or other.problem is None:
        return False
    return (elements(one.problem), one.seed) < (elements(other.problem), other.seed)


def _fails(examined: Callable[[], bool]) -> bool:
    try:
        return not examined()
    except Failed:
        return True


class _ShrunkEnough(BaseException):
    """Ends shrinking; Hypothesis does not catch a `BaseException`."""


class _DeviceLost(BaseException):
    """A problem that passed before now raises; carries the finding that lost the device."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
