"""What is checked on a call, each by name, in the order in which they are made.

| check              | what it asks                                                                |
|--------------------|-----------------------------------------------------------------------------|
| `declaration`      | what the kernel declares is plausible, has a bound, and stays the same      |
| `refusal`          | `refusal` and `workspace` give the same answer whenever they are asked      |
| `runs`             | the call returns; nothing is raised                                         |
| `global_state`     | no function and no floating-point mode of the process is changed            |
| `guard_zones`      | not one byte is written outside the output and the workspace                |
| `inputs_unchanged` | inputs, weights and problem are the same afterwards                         |
| `independence`     | it calls neither the oracle nor another backend                             |
| `completion`       | nothing is still being written after `synchronize`                          |
| `full_write`       | every output element is written                                             |
| `repeatability`    | the same bits in another stream, launched twice, where deterministic        |
| `stale_memory`     | the result does not depend on what lay in and around its buffers before     |
| `in_place`         | the same bits with the output in the first input's buffer, where declared   |
| `order`            | it waits for what is enqueued before it, where streams are `overlapping`    |
| `fences`           | memory outside its buffers is not even read, where the host has them        |
| `exact`            | integers: equal to the reference, to the bit                                |
| `impulse`          | one pixel, one weight, or both: values lie where the definition puts them   |
| `bound`            | random data of four kinds: within the derived bound                         |
| `edges`            | ±0, subnormals, largest, ±Inf, NaN: as the semantics say                    |
| `batch_invariance` | a sample alone: the same bits where declared, else within the bound         |
| `sample_position`  | samples in another order: the same bits where declared, else within bound   |

The sharpest come first: a wrong index is named by integers, before a bound sees it as an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from r18.backend import Array, Backend, Kernel
from r18.errors import R18Error, UnknownName, UsageError
from r18.graph.ops import Problem
from r18_oracle.cases import Case
from r18_oracle.check.call import Observation, bits_differ, nans, noise, observe
from r18_oracle.check.fence import fenceable, trespass
from r18_oracle.check.watch import Process
from r18_oracle.findings import Finding, failed
from r18_oracle.generate.inputs import ROUNDING, fewest_variants, kinds_for, make_case
from r18_oracle.judge.declared import declaration, objection
from r18_oracle.judge.reference import KernelRunning
from r18_oracle.judge.verdict import Judgement, judge

T = TypeVar("T")

CHECKS = (
    "declaration",
    "refusal",
    "runs",
    "global_state",
    "guard_zones",
    "inputs_unchanged",
    "independence",
    "completion",
    "full_write",
    "repeatability",
    "stale_memory",
    "in_place",
    "order",
    "fences",
    "exact",
    "impulse",
    "bound",
    "edges",
    "batch_invariance",
    "sample_position",
)
VALUES = ("exact", "impulse", "bound", "edges")
"""The checks of one call on one kind of input: each can be made without the others."""

SETTLE_SECONDS = 0.002
"""How long to wait before looking again whether a kernel that said it was done still writes."""
RUNS = 8
"""How often a kernel is run again before its result is laid to what lay in memory, say."""
ELEMENTS = 32
VARIANTS = 8
"""A problem with few outputs says little with one set of inputs, so it is given several: as many
as make up so many elements, but no more than this. A shrunk problem then still shows its fault."""


@dataclass
class Tally:
    """What was run on one kernel, and how near to its bounds it came.

    ratio: the largest error/bound. sharp: the largest error/statistical line. resolution: the
    smallest relative fault that a rounding-tier run was sure to see anywhere in its output.
    """

    problems: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    ratio: float = 0.0
    sharp: float | None = None
    resolution: float | None = None
    unjudged: int = 0

    def include(self, other: Tally) -> None:
        """Add what was run on a part of the kernel; what that refused, the kernel did not."""
        self.problems += other.problems
        self.passed += other.passed
        self.ratio = max(self.ratio, other.ratio)
        self.unjudged += other.unjudged
        self.sharp = max((x for x in (self.sharp, other.sharp) if x is not None), default=None)
        known = [x for x in (self.resolution, other.resolution) if x is not None]
        self.resolution = min(known, default=None)

    def note(self, judgement: Judgement) -> None:
        self.ratio = max(self.ratio, judgement.ratio)
        self.unjudged += judgement.unjudged
        if judgement.sharp is not None:
            self.sharp = max(self.sharp or 0.0, judgement.sharp)
        if judgement.resolution is not None:
            self.resolution = min(self.resolution or judgement.resolution, judgement.resolution)


@dataclass
class Examination:
    """One kernel on one problem with one seed: runs checks, raises `Failed` at the first fault.

    announce: called with (problem, kind, seed) before each input kind, for whoever watches.
    only: a check of `VALUES` to make alone, while a problem that fails it is being shrunk.
    """

    backend: Backend
    kernel: Kernel
    problem: Problem
    seed: int
    tally: Tally
    backend_name: str
    announce: Callable[[Problem, str, int], None] = lambda problem, kind, seed: None
    only: str | None = None

    def run(self, rounding: str = "normal", *, light: bool = False) -> bool:
        """Every check that applies; False when the kernel refuses the problem.

        rounding: which of the rounding kinds to use. light: one call a kind and no repetitions,
        for problems as large as the network's.
        """
        self._kind = "none"
        # All that a replay needs besides.
        self._how: dict[str, Any] = {"rounding": rounding, "light": light, "only": self.only}
        self._process = Process.now()
        declared = self._declaration()
        if not self._accepted():
            return False
        self.tally.problems += 1
        kinds = kinds_for(self.kernel, self.problem)
        if self.only in VALUES and self.kernel.deterministic:
            if self.only in (*kinds, "bound"):
                kind = rounding if self.only == "bound" else self.only
                self._values(self.only, kind, range(self._variants(kind)))
            return True
        case = self._case(rounding)
        first = self._observe(case, settle=not light)
        others = [] if light else self._memory(case, first)
        if not light:
            self._order(case, first)
        self._fences(case)
        if "exact" in kinds:
            self._values("exact", "exact", range(self._variants("exact")))
        if not light and "impulse" in kinds:
            self._values("impulse", "impulse", range(self._variants("impulse")))
        self._about(rounding)
        for result in (first.output, *others):
            self._judge("bound", case, result, variant=0)
        self._values("bound", rounding, range(1, self._variants(rounding)))
        if not light:
            self._values("edges", "edges", range(self._variants("edges")))
            self._about(rounding)
            if self.problem.batch > 1:
                self._batch(case, first.output)
            self._completion(first, 0.0)
            self._unchanged(declared)
        return True

    # -- the checks ----------------------------------------------------------------------------

    def _declaration(self) -> dict[str, object]:
        declared = self._guarded(lambda: declaration(self.kernel))
        self._contract = self.kernel.contract
        if (reason := self._guarded(lambda: objection(self.kernel))) is not None:
            self._fail("declaration", reason)
        self._pass("declaration")
        return declared

    def _unchanged(self, declared: dict[str, object]) -> None:
        """Having run, it says of itself and of the problem what it said before."""
        now = self._guarded(lambda: declaration(self.kernel))
        if other := [name for name in declared if declared[name] != now[name]]:
            self._fail("declaration", f"its {other[0]} is not what it was before it ran")
        if not self._accepted():
            self._fail("refusal", "refuses the problem after it has run it")

    def _accepted(self) -> bool:
        reasons = [self._guarded(lambda: self.kernel.refusal(self.problem)) for _ in range(2)]
        sizes = None
        if reasons == [None, None]:
            sizes = [self._guarded(lambda: self.kernel.workspace(self.problem)) for _ in range(2)]
        if reasons[0] != reasons[1] or (sizes and sizes[0] != sizes[1]):
            self._fail("refusal", f"gave two answers: {reasons}, workspace {sizes}")
        self._pass("refusal")
        if reasons[0] is not None:
            self.tally.refused[reasons[0]] += 1
            return False
        return True

    def _completion(self, seen: Observation, seconds: float) -> None:
        if seen.in_flight(seconds):
            self._fail("completion", "memory still changed after synchronize had returned")
        self._pass("completion")

    def _memory(self, case: Case, first: Observation) -> list[Array]:
        """Again, and with other things in memory: the outputs that need not be the same bits."""
        second = self._observe(case, times=2)
        other = self._observe(case, noisy=True, watched=True)
        if not self.kernel.deterministic:
            return [second.output, other.output]
        self._same("repeatability", first.output, second.output, "depends on the run")
        self._repeats(case, first, other.output)
        how = "depends on what lay in and around its buffers"
        self._same("stale_memory", first.output, other.output, how)
        if self.kernel.in_place and self._may_alias(case):
            aliased = self._observe(case, alias=True)
            how = "depends on the output's being the input"
            self._same("in_place", first.output, aliased.output, how)
        return []

    def _repeats(self, case: Case, first: Observation, other: Array) -> None:
        """Where another result differs: is that what was changed, or one run in a few?"""
        if bits_differ(first.output, other).any():
            for _ in range(RUNS):
                again = self._observe(case, times=2)
                self._same("repeatability", first.output, again.output, "depends on the run")

    def _order(self, case: Case, first: Observation) -> None:
        """With a copy before it that ends late: another result would be that of a race."""
        if not self.backend.stream().overlapping:
            return
        got = self._called(case, late=True).output
        if self.kernel.deterministic:
            self._repeats(case, first, got)
            how = "depends on whether what was enqueued before has ended"
            self._same("order", first.output, got, how)
        else:
            self._judge("order", case, got)

    def _fences(self, case: Case) -> None:
        """After the checks that say what came of a stray read: this one only says that it was."""
        if not fenceable(self.backend):
            return
        touched = self._guarded(lambda: trespass(self.backend, self.kernel, case))
        if touched is not None:
            self._fail("fences", touched)
        self._pass("fences")

    def _may_alias(self, case: Case) -> bool:
        same_size = self.problem.inputs[0] == self.problem.output
        return same_size and case.inputs[0].dtype == case.precision.dtype

    def _full_write(self, case: Case, seen: Observation, *, noisy: bool) -> None:
        """What holds in two calls what memory held before, though it held two different things."""
        untouched = seen.untouched()
        if untouched.any():
            self._completion(seen, SETTLE_SECONDS)  # or is it only not written yet?
            untouched &= self._called(case, noisy=not noisy).untouched()
        if untouched.any():
            self._fail(
                "full_write",
                f"{np.count_nonzero(untouched)} of {untouched.size} output elements are never "
                "written",
                coordinate=_first(untouched),
            )
        self._pass("full_write")

    def _batch(self, case: Case, whole: Array) -> None:
        """Samples alone, and in another order."""
        for index in (0, self.problem.batch - 1):
            problem = replace(
                self.problem, inputs=tuple((1, *shape[1:]) for shape in self.problem.inputs)
            )
            if self.kernel.refusal(problem) is not None:
                break
            alone = replace(
                case, problem=problem, inputs=tuple(a[index : index + 1] for a in case.inputs)
            )
            got = self._observe(alone).output
            self._batch_result(
                "batch_invariance", alone, got, whole[index : index + 1], f"sample {index} alone"
            )
        rolled = replace(case, inputs=tuple(np.roll(a, 1, axis=0) for a in case.inputs))
        got = self._observe(rolled).output
        self._batch_result(
            "sample_position", rolled, got, np.roll(whole, 1, axis=0), "samples moved by one"
        )

    def _batch_result(self, check: str, case: Case, got: Array, before: Array, what: str) -> None:
        if self.kernel.batch_invariant:
            self._same(check, before, got, f"is declared batch-invariant; {what}")
        self._judge(check, case, got)

    def _variants(self, kind: str) -> int:
        """How many sets of inputs of a kind; several where the problem is small."""
        fewest = fewest_variants(self.kernel, self.problem, kind)
        return max(fewest, min(VARIANTS, ELEMENTS // math.prod(self.problem.output)))

    def _values(self, check: str, kind: str, variants: Iterable[int]) -> None:
        """A kind of input and its check."""
        for variant in variants:
            case = self._case(kind, variant)
            got = self._observe(case).output
            self._judge(check, case, got, exact=kind == "exact", variant=variant)

    # -- pieces --------------------------------------------------------------------------------

    def _about(self, kind: str, variant: int = 0) -> None:
        """What is found from here on is found on these inputs."""
        self._kind, self._how["variant"] = kind, variant
        self.announce(self.problem, kind, self.seed)

    def _case(self, kind: str, variant: int = 0) -> Case:
        self._about(kind, variant)
        return make_case(self.kernel, self.problem, kind, self.seed, variant)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a kernel raises is what it did wrong
            self._sane(self._process.change())
            cause = f"{type(error).__name__}: {error}"
            self._fail(
                "independence" if isinstance(error, KernelRunning) else "runs", f"raised {cause}"
            )

    def _sane(self, change: str | None) -> None:
        if change is not None:
            self._process.restore()  # or the next kernel would be judged by what this one left
            self._fail("global_state", f"the call {change}")

    def _called(self, case: Case, *, noisy: bool = False, **options: Any) -> Observation:
        """One call, and nothing looked at but whether it came back."""
        fill = noise(self.seed) if noisy else nans
        seen = self._guarded(
            lambda: observe(
                self.backend, self.kernel, case, fill=fill, process=self._process, **options
            )
        )
        self._pass("runs")
        return seen

    def _observe(
        self,
        case: Case,
        *,
        times: int = 1,
        alias: bool = False,
        noisy: bool = False,
        watched: bool = False,
        settle: bool = False,
    ) -> Observation:
        """One call, with the checks that every call is subject to. settle: `completion` too."""
        seen = self._called(case, times=times, alias=alias, noisy=noisy, watched=watched)
        self._sane(seen.process)
        self._pass("global_state")
        if seen.trespass:
            self._fail("guard_zones", seen.trespass)
        self._pass("guard_zones")
        if seen.changed:
            self._fail("inputs_unchanged", seen.changed)
        self._pass("inputs_unchanged")
        if seen.called:
            self._fail("independence", f"called {', '.join(seen.called)}")
        if watched:
            self._pass("independence")
        if settle:
            self._completion(seen, SETTLE_SECONDS)
        if not alias:
            self._full_write(case, seen, noisy=noisy)
        return seen

    def _same(self, check: str, before: Array, got: Array, how: str) -> None:
        """To the bit; `how` ends the sentence "the result …"."""
        differs = bits_differ(before, got)
        if differs.any():
            at = _first(differs)
            self._fail(
                check,
                f"the result {how}: {np.count_nonzero(differs)} of {got.size} elements differ",
                coordinate=at,
                got=float(got[at]),
                expected=float(before[at]),
                bound=0.0,
            )
        self._pass(check)

    def _judge(
        self,
        check: str,
        case: Case,
        got: Array,
        *,
        exact: bool = False,
        variant: int | None = None,
    ) -> None:
        """By the reference; `variant` is that of the case, where `make_case` made it just so."""
        key = None
        if variant is not None:
            asked = (self.problem, self._kind, self.seed, variant)
            key = (*asked, case.precision, self._contract)
        try:
            judgement = judge(case, self._contract, got, exact=exact, key=key)
        except (UnknownName, UsageError) as error:
            self._fail("declaration", f"no error bound follows from its contract: {error}")
        if not judgement.ok:
            how = "is not what integers must give" if exact else "exceeds the bound"
            self._fail(
                check,
                f"error {how} (error/bound {judgement.ratio:.3g})",
                coordinate=judgement.coordinate,
                got=judgement.got,
                expected=judgement.expected,
                bound=judgement.allowed,
                picture=judgement.picture,
            )
        self.tally.note(judgement)
        self._pass(check)

    def _pass(self, check: str) -> None:
        self.tally.passed[check] += 1

    def _fail(
        self,
        check: str,
        message: str,
        *,
        coordinate: tuple[int, ...] | None = None,
        got: float | None = None,
        expected: float | None = None,
        bound: float | None = None,
        picture: dict[str, Any] | None = None,
    ) -> NoReturn:
        raise failed(
            Finding(
                check=check,
                backend=self.backend_name,
                kernel=self.kernel.id,
                problem=self.problem,
                kind=self._kind,
                seed=self.seed,
                message=message,
                coordinate=coordinate,
                got=got,
                expected=expected,
                bound=bound,
                details=self._how if picture is None else self._how | {"picture": picture},
            )
        )


def _first(mask: Array) -> tuple[int, ...]:
    """The coordinate of the first element that is set."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def examine(
    backend: Backend,
    kernel: Kernel,
    problem: Problem,
    seed: int,
    tally: Tally | None = None,
    *,
    rounding: str = "normal",
    light: bool = False,
    backend_name: str | None = None,
    announce: Callable[[Problem, str, int], None] | None = None,
    only: str | None = None,
) -> bool:
    """Run every check of a kernel on a problem; False when it refuses it.

    Raises `Failed` with the finding at the first check that fails, and `R18Error` where the
    oracle itself cannot judge (an unknown contract).
    """
    if rounding not in ROUNDING:
        raise R18Error(f"'{rounding}' is no rounding kind; known: {', '.join(ROUNDING)}")
    examination = Examination(
        backend, kernel, problem, seed, tally or Tally(), backend_name or backend.name, only=only
    )
    if announce is not None:
        examination.announce = announce
    return examination.run(rounding, light=light)
