"""`r18 check`: a function judged as it stands.

`check` settles the target in a worker process, then verifies it as `r18 verify` does a backend with
one kernel. A convolution that turns out to be transformed where it is found wrong is settled and
verified once more. `assert_kernel` is that for a test suite; the core's `r18.check` hands on to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r18.errors import BackendUnavailable, UsageError, counted, plain, show
from r18.graph.ops import Problem
from r18_oracle.check.tally import Tally
from r18_oracle.findings import SILENCE, Finding, save
from r18_oracle.functions.likes import like_of
from r18_oracle.functions.suites import backendbench, flashinfer, hub, kernelbench
from r18_oracle.functions.suites.adapted import Adapted
from r18_oracle.functions.target import (
    MARK,
    Target,
    backend_of,
    function_at,
    like_named,
    local_place,
    marked_in,
    module_of_file,
    place_of,
)
from r18_oracle.probe.again import Again, posed, settle_again
from r18_oracle.probe.settle import Found, settle, unsettled
from r18_oracle.search.campaign import KernelReport, run_campaign
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.verify import Request, verify
from r18_oracle.search.worker import Job, run_jobs

PROFILE = "quick"
NETWORK, SMALL_NETWORK = "resnet18", "tiny"
SETTLE_SECONDS = 120.0
"""A function that is silent for this long while it is settled counts as hung."""
CALLS = 2_500
"""Calls of a function in a quick search, about."""
BUDGET = 25.0
"""Seconds that they may take; a slower function gets fewer and smaller problems."""
NETWORK_RATE, NETWORK_ELEMENTS = 3e8, 1e7
"""Multiplications a second, or elements, that a function needs for the problems of a network."""


@dataclass(frozen=True)
class How:
    """profile: the effort. network: whose problems it also gets, if it is fast enough, or None.

    isolated: in worker processes. If not, a crash ends this process, and a hang this search.
    """

    profile: str = PROFILE
    seed: int = 0
    network: str | None = NETWORK
    isolated: bool = True


@dataclass(frozen=True)
class Checked:
    """The result.

    target: settled, if it could be. found: what the probes found; None if they crashed.
    accepted: the contract was given, so that a narrow one is not a fault.
    reports: of the search, one for each contract; findings: all of them. After two searches they
    are those of the second; seconds: of both.
    reduced: how the search of a slow function was reduced, in a sentence; "" if it was not.
    """

    target: Target
    found: Found | None
    accepted: bool
    reports: tuple[KernelReport, ...]
    findings: tuple[Finding, ...]
    seconds: float
    reduced: str = ""

    @property
    def below(self) -> tuple[str, ...]:
        """What is narrower than expected, as in `Found.below`; empty if a narrow contract was
        accepted."""
        return () if self.accepted or self.found is None else self.found.below

    @property
    def ok(self) -> bool:
        return self.judged and not self.findings and not self.below

    @property
    def judged(self) -> bool:
        """Whether it took a problem and every search of it ended well, or something was found."""
        return bool(self.findings) or self._ran

    @property
    def _ran(self) -> bool:
        return bool(self.reports) and all(report.verdict == "ok" for report in self.reports)

    @property
    def tally(self) -> Tally:
        """The sum of the reports' tallies."""
        tally = Tally()
        for report in self.reports:
            tally.include(report.tally)
            tally.refused += report.tally.refused
        return tally

    def text(self, folder: Path | None = None) -> str:
        """The result as text. folder: where findings are saved, with the commands that replay
        them."""
        target = self.target
        lines = [f"{target.place}, like {target.operator.title}"]
        given = f"{target.dtype} arrays of {target.arrays}" if target.arrays else target.dtype
        lines.append(f"  given     {given}")
        lines += self._found()
        if self.reports:
            tally = self.tally
            how = f"{counted(tally.problems, 'problem')}, {sum(tally.passed.values())} checks"
            where = " where they passed" if self.findings else ""
            lines.append(
                f"  searched  {how} in {self.seconds:.0f} s; error/bound {tally.ratio:.3g}{where}"
            )
            if self.reduced:
                lines.append(f"            {self.reduced}")
            lines += [f"  refused   {n}: {reason}" for reason, n in tally.refused.items()]
        lines.append(f"  verdict   {self.verdict}")
        for finding in self.findings:
            path = save(finding, folder) if folder is not None else None
            lines += ["", finding.describe(path)]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        if self.findings:
            return f"wrong: {', '.join(dict.fromkeys(f.check for f in self.findings))}"
        if not self.judged:
            return "not judged: it took no problem"
        if self.below:
            said = (
                f"narrower than its arrays: {self._narrow()}; right within that\n"
                f"            --contract {self.target.contract} if that is meant"
            )
            if self.target.operator.sums_products:
                return said
            # Fitted to errors alone, whose cause it does not know.
            return f"{said}; a wrong constant or a term left out may look the same"
        words = self.target.arithmetic.words()
        if self.accepted or (self.found is not None and self.found.arithmetic is not None):
            return f"right: it {words}"
        return f"right as one that {words}; what it computes with was not found"

    def _narrow(self) -> str:
        return f"this {self.target.dtype} kernel {' and '.join(self.below)}"

    def _found(self) -> list[str]:
        found = self.found
        if found is None:
            return []
        lines = []
        if found.arithmetic is not None:
            lines.append(f"  found     {found.arithmetic.words()}")
            if found.below:
                what = f"this {self.target.dtype} kernel {' and '.join(found.below)}"
                lines.append(f"            {what}")
        lines += [f"            {note}" for note in found.notes]
        if found.arithmetic is None:
            lines[:1] = [f"  found     {found.notes[0]}"] if found.notes else []
        lines.append(f"  judged by {self.target.contract}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        found, tally = self.found, self.tally
        return {
            "target": self.target.name,
            "like": self.target.operator.title,
            "dtype": self.target.dtype,
            "arrays": self.target.arrays,
            "contract": self.target.contract,
            "found": None if found is None or found.arithmetic is None else str(found.arithmetic),
            "words": self.target.arithmetic.words(),
            "below": [] if found is None else list(found.below),
            "notes": [] if found is None else list(found.notes),
            "problems": tally.problems,
            "refused": dict(tally.refused),
            "checks": dict(tally.passed),
            "error_over_bound": tally.ratio,
            "reduced": self.reduced,
            "verdict": self.verdict,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_json() for finding in self.findings],
        }


def check(
    target: Target,
    how: How | None = None,
    *,
    on_progress: Callable[[str, Problem | None], None] = lambda what, problem: None,
) -> Checked:
    """Settle a target and search it for a fault.

    Raises what loading the function raises, `UnknownName` for an unknown profile.
    """
    how = how or How()
    chosen = profile(how.profile)
    accepted = bool(target.contract)
    backend_of(target.name)  # raises here, and not in a worker, if the function is not there
    found, lost = _settled(target, how)
    ready = unsettled(target) if found is None else found.target
    plan = _planned(chosen, how, ready, found)
    first = _searched(plan, ready, found, accepted, on_progress)
    posed = lost if found is None else found.finding
    if posed is not None and not first.findings:
        first = replace(first, findings=(posed,))
    again = None if accepted or found is None else _settled_again(first, found, how)
    if again is None:
        return first
    then = replace(first, target=again.found.target, found=again.found)
    if then.target == ready:
        return then
    if again.finding is not None:
        return replace(then, findings=(again.finding,))
    second = _searched(plan, then.target, then.found, accepted, on_progress)
    return replace(second, seconds=first.seconds + second.seconds)


@dataclass(frozen=True)
class _Plan:
    """How a function is searched.

    how: as asked. profile: the effort, reduced for a slow function. network: whose problems it
    gets, or None. reduced: how the search is reduced, in a sentence.
    """

    how: How
    profile: Profile
    network: str | None
    reduced: str


def _planned(chosen: Profile, how: How, target: Target, found: Found | None) -> _Plan:
    products = target.operator.sums_products
    paced, reduced = (chosen, "") if found is None else _paced(chosen, found, products)
    least = NETWORK_RATE if products else NETWORK_ELEMENTS
    network = how.network if found is not None and found.rate >= least else None
    if how.network is not None and network is None:
        why = "slow" if found is not None and found.rate else "it could not be timed"
        reduced = f"{reduced or why}, none of {how.network}"
    return _Plan(how, paced, network, reduced)


def _searched(
    plan: _Plan,
    target: Target,
    found: Found | None,
    accepted: bool,
    on_progress: Callable[[str, Problem | None], None],
) -> Checked:
    """Search a settled target."""
    how = plan.how
    if not how.isolated:
        return _here(target, found, accepted, plan.profile, how.seed, plan.reduced)
    backend = backend_of(target.name)
    network = plan.network or SMALL_NETWORK
    verification = verify(
        {target.name: backend},
        Request(plan.profile, f"{backend.name}/*", network, seed=how.seed, workers=1),
        on_progress=on_progress,
    )
    (result,) = verification.backends
    findings, reports = tuple(verification.findings), tuple(result.kernels)
    seconds = verification.seconds
    return Checked(target, found, accepted, reports, findings, seconds, plan.reduced)


def _settled_again(first: Checked, found: Found, how: How) -> Again | None:
    """Settle again, with the problems of the findings among those that are probed.

    None unless the function transforms each of these problems.
    """
    arithmetic, findings = found.arithmetic, first.findings
    if arithmetic is None or arithmetic.algorithm == "transforms" or not posed(findings):
        return None
    if not how.isolated:
        return settle_again(found=found, findings=findings, announce=lambda *doing: None)
    arguments = {"found": found, "findings": findings}
    job = Job(settle_again, arguments, first.target.name, findings[0].kernel, SETTLE_SECONDS)
    (outcome,) = run_jobs([job], workers=1)
    if isinstance(outcome.result, Exception):
        raise outcome.result
    again: Again | None = outcome.result  # None after a crash, too: the findings stay
    return again


def _settled(target: Target, how: How) -> tuple[Found | None, Finding | None]:
    """The result of settling, or the crash or hang that ended it."""
    if not how.isolated:
        return settle(target=target, announce=lambda problem, kind, seed: None), None
    name = backend_of(target.name).kernel.id
    job = Job(settle, {"target": target}, unsettled(target).name, name, SETTLE_SECONDS)
    (outcome,) = run_jobs([job], workers=1)
    if isinstance(outcome.result, Exception):
        raise outcome.result
    if (lost := outcome.finding) is not None:
        how_found = {SILENCE: SETTLE_SECONDS, "rounding": "normal", "light": False}
        lost = replace(lost, message=f"while it was probed, {lost.message}")
        return None, lost.with_details(how_found)
    found: Found = outcome.result
    return found, None


def _paced(how: Profile, found: Found, products: bool) -> tuple[Profile, str]:
    """The profile, or a smaller one for a function that would take too long; and a sentence.

    products: its largest calls take as long as their multiplications.
    """
    largest = how.max_macs / found.rate if products and found.rate else 0.0
    expected = (found.seconds + largest) * CALLS
    if expected <= BUDGET:
        return how, ""
    share = BUDGET / expected
    smaller = replace(
        how,
        examples=max(5, int(how.examples * share)),
        max_elements=max(256, int(how.max_elements * share)),
        max_macs=max(4_096, int(how.max_macs * share)),
        every=max(how.every, min(8, int(1 / share))),
    )
    per_call = f"{(found.seconds + largest) * 1e3:.0f} ms for a call"
    return smaller, f"slow ({per_call}): {smaller.examples} smaller problems"


def _here(
    target: Target, found: Found | None, accepted: bool, how: Profile, seed: int, reduced: str
) -> Checked:
    """Search in this process."""
    backend, name = backend_of(target.name), target.name
    reports = tuple(
        run_campaign(backend, kernel, how, seed, backend_name=name, network_name=None)
        for kernel in backend.kernels()
    )
    findings = tuple(report.finding for report in reports if report.finding is not None)
    seconds = sum(report.seconds for report in reports)
    return Checked(target, found, accepted, reports, findings, seconds, reduced)


# -- what users call -----------------------------------------------------------------------------


def target_of(place: str, like: object | None = None, **options: Any) -> Target:
    """The target of a place, as the command line names it; the function's mark adds to it.

    like: an operator, or the file of a suite's problem, for a `ModelNew` or a solution. options:
    those of `Target`; an empty one counts as not given. Raises what loading the function
    raises, and `UsageError` for an unknown option.
    """
    problem = like if isinstance(like, str) and like.endswith((".py", ".json")) else None
    if problem is not None:
        if not Path(problem).is_file():
            raise UsageError(
                f"there is no file '{plain(problem)}': --like takes an operator, such as softmax, "
                "or the file of a suite's problem"
            )
        place, like = f"{problem}+{place}", None
    function = function_at(place)
    if problem is not None and not isinstance(function, Adapted):
        raise UsageError(
            f"'{plain(problem)}' is no problem of a suite for this function: only a ModelNew or a "
            "solution has one; name an operator, such as --like softmax"
        )
    marked, given = _options(function, like, options)
    return Target(place, like_named(place, marked).name, **given)


def _options(
    function: Callable[..., Any], like: object | None, options: dict[str, Any]
) -> tuple[object | None, dict[str, Any]]:
    """The operator and the options of a target: those of the function's mark, and those given."""
    merged = dict(getattr(function, MARK, {}))
    if isinstance(function, Adapted):
        merged |= {"like": function.like, "dtype": function.dtype}
        if like is not None and like_of(like).name != function.like:
            raise UsageError(f"this kernel is called like {function.like}, not {show(like)}")
    merged |= {name: value for name, value in options.items() if value not in ("", None)}
    merged = {name: value for name, value in merged.items() if value != ""}
    marked = merged.pop("like", None)
    known = ("dtype", "arrays", "contract", "refuses", "deterministic")
    if wrong := [name for name in merged if name not in known]:
        raise UsageError(f"{show(wrong[0])} is no option of a check: {', '.join(known)}")
    if callable(refuses := merged.get("refuses")):
        merged["refuses"] = place_of(refuses) or local_place(refuses)
    return (marked if like is None else like), merged


@dataclass(frozen=True)
class Asked:
    """The targets that a command's argument means.

    targets: to be judged. left_out: sentences for a suite's kernels that are like no operator here.
    broken: sentences for those that do not load.
    """

    targets: tuple[Target, ...]
    left_out: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


def asked_for(asked: str, like: object | None = None, **options: Any) -> Asked:
    """The targets of an argument of `r18 check`: a place, a file, or a folder of a suite.

    A file is one with marked functions, with KernelBench's `ModelNew` or a solution of
    FlashInfer-Bench; a folder is one of BackendBench, or a kernel of Hugging Face's `kernels`.
    `torch.nn.functional.relu` is `torch.nn.functional:relu`. Raises `UsageError` where nothing is
    to be judged.
    """
    if Path(asked).is_dir() and hub.is_kernel(asked):
        return Asked(tuple(target_of(place, like, **options) for place in hub.places_in(asked)))
    if Path(asked).is_dir():
        return _of_folder(asked, like, options)
    if asked.endswith(".json"):
        return Asked((target_of(f"{asked}:{flashinfer.entry_of(asked)}", like, **options),))
    if not asked.endswith(".py"):
        owner, dot, name = asked.rpartition(".")
        place = f"{owner}:{name}" if dot and ":" not in asked else asked
        return Asked((target_of(place, like, **options),))
    names = list(marked_in(asked))
    if not names and hasattr(module_of_file(asked), kernelbench.NEW):
        names = [kernelbench.NEW]
    if not names:
        raise UsageError(
            f"no function of '{asked}' is marked with @r18.check.kernel: name one, {asked}:FUNCTION"
        )
    return Asked(tuple(target_of(f"{asked}:{name}", like, **options) for name in names))


def _of_folder(folder: str, like: object | None, options: dict[str, Any]) -> Asked:
    """The targets in a folder of BackendBench. A kernel that does not load does not stop the
    others."""
    places, refused = backendbench.kernels_in(Path(folder))
    targets, broken = [], []
    for place in places:
        try:
            targets.append(target_of(place, like, **options))
        except BackendUnavailable as error:
            broken.append(f"{place}: {error.cause}")
        except UsageError as error:
            broken.append(f"{place}: {error}")
    left_out = tuple(f"{inner}: {why}" for inner, why in refused.items())
    if not targets and not broken:
        if left_out:
            raise UsageError(f"no kernel in '{folder}' is judged: {'; '.join(left_out)}")
        raise UsageError(
            f"'{folder}' has no relu__default/relu__default_implementation*.py or such"
        )
    return Asked(tuple(targets), left_out, tuple(broken))


def assert_kernel(
    function: Callable[..., Any],
    like: object | None = None,
    *,
    profile: str = PROFILE,
    seed: int = 0,
    network: str | None = NETWORK,
    isolated: bool = True,
    findings: Path | str | None = None,
    **options: Any,
) -> Checked:
    """Check a function; raises `AssertionError` with the text of the result unless it is right.

    options: those of `Target`. profile, seed, network, isolated: those of `How`. findings: a folder
    for what is found, with the commands that replay it. Raises `UsageError` for a function that a
    worker process cannot import, unless `isolated` is False.
    """
    place = place_of(function)
    if place is None and isolated:
        raise UsageError(
            f"{show(function)} cannot be imported by a worker process: define it at the top level "
            "of a module, or pass isolated=False"
        )
    marked, given = _options(function, like, options)
    name = like_named(place or f":{function.__name__}", marked).name
    target = Target(place or local_place(function), name, **given)
    result = check(target, How(profile, seed, network, isolated))
    if not result.ok:
        raise AssertionError(result.text(Path(findings) if findings is not None else None))
    return result


def dumped(results: list[Checked]) -> str:
    """Results as JSON."""
    return json.dumps([result.to_json() for result in results], indent=2, allow_nan=False)


__all__ = ["Asked", "Checked", "asked_for", "assert_kernel", "check", "dumped", "target_of"]
