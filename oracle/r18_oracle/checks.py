"""What is checked on a call, each by name.

| check              | what it asks                                                                |
|--------------------|-----------------------------------------------------------------------------|
| `runs`             | the call returns; nothing is raised                                         |
| `refusal`          | `refusal` and `workspace` give the same answer when asked again             |
| `guard_zones`      | not one byte is written outside the output and the workspace                |
| `inputs_unchanged` | inputs and weights hold the same bytes afterwards                           |
| `full_write`       | every output element is written                                             |
| `completion`       | nothing is still being written after `synchronize`                          |
| `stale_memory`     | the result does not depend on what output and workspace held before         |
| `repeatability`    | the same bits on a second run and in another stream, where deterministic    |
| `in_place`         | the same bits with the output in the first input's buffer, where declared   |
| `exact`            | integers: equal to the reference, to the bit                                |
| `impulse`          | one pixel, one weight: the value lies where the definition puts it          |
| `bound`            | random data of four kinds: within the derived bound                         |
| `edges`            | ±0, subnormals, largest, ±Inf, NaN: as the semantics say                    |
| `batch_invariance` | a sample alone: the same bits where declared, else within the bound         |
| `sample_position`  | samples in another order: the same bits where declared, else within bound   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NoReturn, TypeVar

import numpy as np

from r18.backend import Array, Backend, Kernel
from r18.errors import R18Error
from r18.ops import Problem
from r18_oracle.call import POISONS, Observation, observe
from r18_oracle.cases import Case
from r18_oracle.findings import Failed, Finding
from r18_oracle.inputs import ROUNDING, kinds_for, make_case
from r18_oracle.judge import Judgement, judge

T = TypeVar("T")

CHECKS = (
    "runs",
    "refusal",
    "guard_zones",
    "inputs_unchanged",
    "full_write",
    "completion",
    "stale_memory",
    "repeatability",
    "in_place",
    "exact",
    "impulse",
    "bound",
    "edges",
    "batch_invariance",
    "sample_position",
)


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

    def note(self, judgement: Judgement) -> None:
        self.ratio = max(self.ratio, judgement.ratio)
        self.unjudged += judgement.unjudged
        if judgement.sharp is not None:
            self.sharp = max(self.sharp or 0.0, judgement.sharp)
        if judgement.resolution is not None:
            self.resolution = min(self.resolution or judgement.resolution, judgement.resolution)


@cache
def failure_type(check: str) -> type[Failed]:
    """One exception type a check, so that a search that shrinks stays with the check it saw."""
    return type(f"Failed_{check}", (Failed,), {})


@dataclass
class Examination:
    """One kernel on one problem with one seed: runs checks, raises `Failed` at the first fault.

    announce: called with (problem, kind, seed) before each input kind, for whoever watches.
    """

    backend: Backend
    kernel: Kernel
    problem: Problem
    seed: int
    tally: Tally
    backend_name: str
    announce: Callable[[Problem, str, int], None] = lambda problem, kind, seed: None

    def run(self, rounding: str = "normal", *, light: bool = False) -> bool:
        """Every check that applies; False when the kernel refuses the problem.

        rounding: which of the rounding kinds to use. light: one call a kind and no repetitions,
        for problems as large as the network's.
        """
        self._kind = "none"
        if not self._accepted():
            return False
        self.tally.problems += 1
        self._structure(rounding, light)
        kinds = kinds_for(self.kernel, self.problem)
        if "exact" in kinds:
            self._values("exact", "exact")
        if not light:
            self._values("impulse", "impulse")
            self._values("edges", "edges")
        return True

    # -- the checks ----------------------------------------------------------------------------

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

    def _structure(self, rounding: str, light: bool) -> None:
        """The checks on memory, then the bound, on one rounding-tier case."""
        case = self._case(rounding)
        first = self._observe(case, settle=not light)
        if not light:
            second = self._observe(case, poison=POISONS[1])
            self._full_write(first, second)
            if self.kernel.deterministic:
                self._same("stale_memory", first.raw, second.raw, "what its buffers held before")
                again = self._observe(case)
                self._same("repeatability", first.raw, again.raw, "the run")
                if self.kernel.in_place and self._may_alias(case):
                    aliased = self._observe(case, alias=True)
                    self._same("in_place", first.raw, aliased.raw, "its output's being its input")
        self._judge("bound", case, first.output)
        if not light and self.problem.batch > 1:
            self._batch(case, first.output)

    def _may_alias(self, case: Case) -> bool:
        same_size = self.problem.inputs[0] == self.problem.output
        return same_size and case.inputs[0].dtype == case.precision.dtype

    def _full_write(self, first: Observation, second: Observation) -> None:
        item = first.output.dtype.itemsize
        untouched = (first.raw == POISONS[0]) & (second.raw == POISONS[1])
        elements = np.flatnonzero(untouched.reshape(-1, item).all(axis=1))
        if elements.size:
            self._fail(
                "full_write",
                f"{elements.size} of {first.output.size} output elements are never written, "
                f"first at element {int(elements[0])} of the buffer",
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
        if self.kernel.batch_invariant and got.tobytes() != before.tobytes():
            at = np.unravel_index(int(np.argmax(got != before)), got.shape)
            self._fail(
                check,
                f"{what}: declared batch-invariant, but other bits came out",
                coordinate=tuple(int(i) for i in at),
                got=float(got[at]),
                expected=float(before[at]),
                bound=0.0,
            )
        self._judge(check, case, got)

    def _values(self, check: str, kind: str) -> None:
        case = self._case(kind)
        exact = kind == "exact"
        self._judge(check, case, self._observe(case).output, exact=exact)

    # -- pieces --------------------------------------------------------------------------------

    def _case(self, kind: str) -> Case:
        self._kind = kind
        self.announce(self.problem, kind, self.seed)
        return make_case(self.kernel, self.problem, kind, self.seed)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Failed:
            raise
        except Exception as error:  # whatever a kernel raises is what it did wrong
            cause = f"{type(error).__name__}: {error}"
            self._fail("runs", f"raised {cause}")

    def _observe(
        self, case: Case, *, poison: int = POISONS[0], alias: bool = False, settle: bool = False
    ) -> Observation:
        seen = self._guarded(
            lambda: observe(
                self.backend, self.kernel, case, poison=poison, alias=alias, settle=settle
            )
        )
        self._pass("runs")
        if seen.trespass:
            self._fail("guard_zones", seen.trespass)
        self._pass("guard_zones")
        if seen.changed:
            self._fail("inputs_unchanged", seen.changed)
        self._pass("inputs_unchanged")
        if seen.late:
            self._fail("completion", "the output still changed after synchronize had returned")
        if settle:
            self._pass("completion")
        return seen

    def _same(self, check: str, one: Array, two: Array, on: str) -> None:
        if not np.array_equal(one, two):
            count = int(np.count_nonzero(one != two))
            self._fail(check, f"the result depends on {on}: {count} bytes differ")
        self._pass(check)

    def _judge(self, check: str, case: Case, got: Array, *, exact: bool = False) -> None:
        judgement = judge(case, self.kernel.contract, got, exact=exact)
        if not judgement.ok:
            how = "is not what integers must give" if exact else "exceeds the bound"
            self._fail(
                check,
                f"error {how} (error/bound {judgement.ratio:.3g})",
                coordinate=judgement.coordinate,
                got=judgement.got,
                expected=judgement.expected,
                bound=judgement.allowed,
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
    ) -> NoReturn:
        raise failure_type(check)(
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
            )
        )


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
) -> bool:
    """Run every check of a kernel on a problem; False when it refuses it.

    Raises `Failed` with the finding at the first check that fails, and `R18Error` where the
    oracle itself cannot judge (an unknown contract).
    """
    if rounding not in ROUNDING:
        raise R18Error(f"'{rounding}' is no rounding kind; known: {', '.join(ROUNDING)}")
    examination = Examination(
        backend, kernel, problem, seed, tally or Tally(), backend_name or backend.name
    )
    if announce is not None:
        examination.announce = announce
    return examination.run(rounding, light=light)
