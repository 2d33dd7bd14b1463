"""The checks of a kernel on one problem, by name, in the order in which they are made.

| check              | what must hold                                                              |
|--------------------|-----------------------------------------------------------------------------|
| `declaration`      | the kernel's declarations are plausible, give a bound, and do not change    |
| `refusal`          | `refusal` and `workspace` give the same answer every time                   |
| `runs`             | the call returns and raises nothing                                         |
| `global_state`     | no function or floating-point mode of the process changes, no child is left |
| `guard_zones`      | no byte outside the output and the workspace is written                     |
| `inputs_unchanged` | inputs, weights and problem are the same afterwards                         |
| `independence`     | the kernel calls neither the oracle nor another backend                     |
| `completion`       | nothing is written after `synchronize` has returned                         |
| `full_write`       | every output element is written                                             |
| `repeatability`    | the same bits in another stream, launched twice, if deterministic           |
| `stale_memory`     | the result does not depend on what memory held before the call              |
| `in_place`         | the same bits with the output in the first input's buffer, if declared      |
| `order`            | the kernel waits for work enqueued before it, if streams are `overlapping`  |
| `fences`           | memory outside its buffers is not read either, on host memory               |
| `exact`            | integers: equal to the reference, to the bit                                |
| `impulse`          | one pixel, one weight, or both: values end up where the definition says     |
| `bound`            | random data of four kinds: within the derived bound                         |
| `bias`             | random data: the errors do not lean to one side, if sums round to nearest   |
| `edges`            | ±0, subnormals, largest, ±Inf, NaN: as the semantics say                    |
| `batch_invariance` | a sample by itself: the same bits if declared, else within the bound        |
| `sample_position`  | samples in another order: the same bits if declared, else within the bound  |
| `state`            | the same result after other calls (`r18_oracle.check.state`)                |

The sharpest checks come first: integers name a wrong index before a bound shows it as an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from r18.backend import Array, Backend, Kernel
from r18.errors import R18Error, UnknownName, UsageError, shortened, show
from r18.graph.ops import Problem
from r18_oracle.cases import Case
from r18_oracle.check.call import (
    Observation,
    Prepared,
    Raised,
    attempted,
    bits_differ,
    nans,
    noise,
    observe,
)
from r18_oracle.check.fence import fenceable, trespass
from r18_oracle.check.hints import raised, unwritten
from r18_oracle.check.tally import Tally
from r18_oracle.check.watch import Process
from r18_oracle.findings import Finding, failed
from r18_oracle.generate.corners import runnable
from r18_oracle.generate.inputs import CASES, ROUNDING, fewest_variants, kinds_for
from r18_oracle.judge.declared import declaration, objection
from r18_oracle.judge.nonfinite import origin
from r18_oracle.judge.reference import KernelRunning, explanation
from r18_oracle.judge.verdict import Judgement, expected, judge, ratio_text

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
    "bias",
    "edges",
    "batch_invariance",
    "sample_position",
    "state",
)
VALUES = ("exact", "impulse", "bound", "edges")
"""The checks of one call on one kind of input: each can be made without the others."""

SETTLE_SECONDS = 0.002
"""The wait before looking for writes after `synchronize`."""
LEAST_SECONDS = SETTLE_SECONDS / 10
"""The part of `SETTLE_SECONDS` in which nothing is computed."""
RUNS = 8
"""How often a kernel is run again before a difference is attributed to anything but the run."""
ELEMENTS = 32
VARIANTS = 8
"""One set of inputs tells little about a problem with few outputs. It gets several, up to
`ELEMENTS` outputs in all and `VARIANTS` sets, so that a shrunk problem still shows its fault."""


@dataclass
class Examination:
    """One kernel on one problem with one seed; raises `Failed` at the first check that fails.

    announce: called with (problem, kind, seed) before each kind of input.
    only: the one check of `VALUES` to make, while a problem that fails it is being shrunk.
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
        """Every check that applies; False if the kernel refuses the problem.

        For a problem too large to be allocated, these are `declaration` and `refusal`.
        rounding: the rounding kind of input to use. light: one call per kind of input and no
        repetitions, for problems as large as the network's.
        """
        self._kind = "none"
        self._results: list[tuple[Case, Array]] = []
        # Further details that a replay needs.
        self._how: dict[str, Any] = {"rounding": rounding, "light": light, "only": self.only}
        self._process = Process.now()
        declared = self._declaration()
        if not self._accepted():
            return False
        if not runnable(self.problem):
            return True
        self.tally.problems += 1
        only = "bound" if self.only == "bias" else self.only  # both judge the same calls
        if only in VALUES and self.kernel.deterministic:
            self._values(only, rounding if only == "bound" else only)
        elif light:
            self._light_checks(rounding)
        else:
            self._all_checks(rounding)
            self._same_declaration(declared)
        return True

    def _all_checks(self, rounding: str) -> None:
        case = self._case(rounding)
        first = self._observe(case, settle=True, known=False)
        others = self._memory(case, first)
        self._order(case, first)
        self._fences(case, first.prepared)
        self._values("exact", "exact")
        self._values("impulse", "impulse")
        self._bound(case, [first.output, *others])
        self._values("edges", "edges")
        self._about(rounding)
        if self.problem.batch > 1:
            self._batch_invariance(case, first.output)
            self._sample_position(case, first)
        self._completion(first, 0.0)

    def _light_checks(self, rounding: str) -> None:
        case = self._case(rounding)
        first = self._observe(case, known=False)
        self._fences(case, first.prepared)
        self._values("exact", "exact")
        self._bound(case, [first.output])

    # -- what the kernel declares --------------------------------------------------------------

    def _declaration(self) -> dict[str, object]:
        declared = self._guarded(lambda: declaration(self.kernel))
        self._contract = self.kernel.contract
        if (reason := self._guarded(lambda: objection(self.kernel))) is not None:
            self._fail("declaration", reason)
        self._pass("declaration")
        return declared

    def _same_declaration(self, declared: dict[str, object]) -> None:
        """After its calls, the kernel declares what it declared before."""
        now = self._guarded(lambda: declaration(self.kernel))
        if other := [name for name in declared if declared[name] != now[name]]:
            self._fail("declaration", f"its {other[0]} changed while it ran")
        if not self._accepted():
            self._fail("refusal", "refuses the problem after running it")

    def _accepted(self) -> bool:
        """The check `refusal`, and whether the kernel takes the problem."""
        reasons = [self._guarded(lambda: self.kernel.refusal(self.problem)) for _ in range(2)]
        sizes = None
        if reasons == [None, None]:
            sizes = [self._guarded(lambda: self.kernel.workspace(self.problem)) for _ in range(2)]
        if reasons[0] is not None and not isinstance(reasons[0], str):
            how = "must return None (accepted) or a sentence (why not)"
            self._fail("refusal", f"refusal() {how}, not {show(reasons[0])}")
        if reasons[0] != reasons[1] or (sizes and sizes[0] != sizes[1]):
            self._fail("refusal", f"gave two answers: {reasons}, workspace {sizes}")
        self._pass("refusal")
        if reasons[0] is not None:
            self.tally.refused[shortened(reasons[0])] += 1
            return False
        return True

    # -- what it does to memory ----------------------------------------------------------------

    def _memory(self, case: Case, first: Observation) -> list[Array]:
        """The checks `repeatability`, `stale_memory` and `in_place`.

        Returns the other outputs of a kernel that is not deterministic, to be judged by `_bound`.
        """
        second = self._observe(case, times=2)  # with weights prepared once more
        other = self._observe(case, noisy=True, watched=True, prepared=first.prepared)
        if not self.kernel.deterministic:
            return [second.output, other.output]
        self._repeatability(first, second)
        self._stale_memory(case, first, other)
        if self.kernel.in_place and self._may_alias(case):
            self._in_place(case, first)
        return []

    def _repeatability(self, first: Observation, second: Observation) -> None:
        self._same("repeatability", first.output, second.output, "depends on the run")

    def _stale_memory(self, case: Case, first: Observation, other: Observation) -> None:
        self._repeats(case, first, other.output)
        how = "depends on what memory held before the call"
        self._same("stale_memory", first.output, other.output, how)

    def _in_place(self, case: Case, first: Observation) -> None:
        aliased = self._observe(case, alias=True, prepared=first.prepared)
        how = "depends on whether the output is the input's buffer"
        self._same("in_place", first.output, aliased.output, how)

    def _may_alias(self, case: Case) -> bool:
        same_size = self.problem.inputs[0] == self.problem.output
        return same_size and case.inputs[0].dtype == case.output_dtype

    def _order(self, case: Case, first: Observation) -> None:
        """Run after a copy that ends late: a kernel that does not wait reads or writes too
        early."""
        if not self.backend.stream().overlapping:
            return
        got = self._called(case, late=True, prepared=first.prepared).output
        if self.kernel.deterministic:
            self._repeats(case, first, got)
            how = "depends on when work enqueued before it ends"
            self._same("order", first.output, got, how)
        else:
            self._judge("order", case, got)

    def _repeats(self, case: Case, first: Observation, other: Array) -> None:
        """`repeatability` again if another result differs: some kernels differ one run in a few."""
        if bits_differ(first.output, other).any():
            for _ in range(RUNS):
                self._repeatability(first, self._observe(case, times=2))

    def _fences(self, case: Case, prepared: Prepared) -> None:
        """The check `fences`, after the checks of a stray read's effects, which are more
        specific."""
        if not fenceable(self.backend):
            return
        touched = self._guarded(lambda: trespass(self.backend, self.kernel, case, prepared))
        if touched is not None:
            self._fail("fences", touched)
        self._pass("fences")

    def _full_write(self, case: Case, seen: Observation, *, noisy: bool) -> None:
        """An element is not written if it keeps two different fills in two calls."""
        untouched = seen.untouched()
        if untouched.any():
            self._completion(seen, SETTLE_SECONDS)  # it may still be written
            again = self._called(case, noisy=not noisy, prepared=seen.prepared)
            untouched &= again.untouched()
        if untouched.any():
            self._fail(
                "full_write",
                f"{np.count_nonzero(untouched)} of {untouched.size} output elements are never "
                f"written{unwritten(self.kernel) if untouched.all() else ''}",
                coordinate=_first(untouched),
            )
        self._pass("full_write")

    def _meanwhile(self, case: Case) -> float:
        """Compute the answers that the checks need next, starting with the one to this case; the
        rest of `SETTLE_SECONDS`.

        Some rest is always left: only while this thread sleeps is a thread of the kernel sure to
        get the interpreter.
        """
        end = time.monotonic() + SETTLE_SECONDS
        for kind, variant in self._coming(self._kind):
            if (kind, variant) != (self._kind, 0):
                case = CASES.made(self.kernel, self.problem, kind, self.seed, variant)
            with suppress(UnknownName, UsageError):  # `_judge` reports them
                key = self._key(case, kind, variant)
                expected(case, self._contract, exact=kind == "exact", key=key)
            if time.monotonic() >= end - LEAST_SECONDS:
                break
        return max(LEAST_SECONDS, end - time.monotonic())

    def _coming(self, rounding: str) -> Iterator[tuple[str, int]]:
        """The kinds of input that `_all_checks` judges, in its order, each with a variant."""
        yield rounding, 0
        known = kinds_for(self.kernel, self.problem)
        for kind in (kind for kind in ("exact", "impulse", rounding, "edges") if kind in known):
            yield from ((kind, v) for v in range(kind == rounding, self._variants(kind)))

    def _completion(self, seen: Observation, seconds: float) -> None:
        if seen.in_flight(seconds):
            self._fail("completion", "memory still changed after synchronize had returned")
        self._pass("completion")

    # -- its values ----------------------------------------------------------------------------

    def _bound(self, case: Case, outputs: Iterable[Array]) -> None:
        """Judge the outputs of the calls so far, then further variants of the same kind of
        input."""
        rounding = self._how["rounding"]
        self._about(rounding)
        for result in outputs:
            self._judge("bound", case, result, variant=0)
        self._values("bound", rounding, first=1)

    def _values(self, check: str, kind: str, first: int = 0) -> None:
        """Call the kernel on each variant of a kind of input that it can be judged on, and judge
        the outputs."""
        if kind not in kinds_for(self.kernel, self.problem):
            return
        for variant in range(first, self._variants(kind)):
            case = self._case(kind, variant)
            got = self._observe(case).output
            self._judge(check, case, got, exact=kind == "exact", variant=variant)

    def _variants(self, kind: str) -> int:
        """The number of sets of inputs; several for a small problem."""
        fewest = fewest_variants(self.kernel, self.problem, kind)
        return max(fewest, min(VARIANTS, ELEMENTS // math.prod(self.problem.output)))

    def _batch_invariance(self, case: Case, whole: Array) -> None:
        """Compare the first and the last sample, each in a batch of one, with those of the whole
        batch."""
        shapes = tuple((1, *shape[1:]) for shape in self.problem.inputs)
        problem = replace(self.problem, inputs=shapes)
        if self.kernel.refusal(problem) is not None:
            return
        prepared = None
        for index in (0, self.problem.batch - 1):
            sample = slice(index, index + 1)
            alone = replace(case, problem=problem, inputs=tuple(a[sample] for a in case.inputs))
            got = self._observe(alone, prepared=prepared)
            prepared = got.prepared
            what = f"sample {index} alone"
            self._batch_result("batch_invariance", alone, got.output, whole[sample], what)

    def _sample_position(self, case: Case, first: Observation) -> None:
        rolled = replace(case, inputs=tuple(np.roll(a, 1, axis=0) for a in case.inputs))
        got = self._observe(rolled, prepared=first.prepared).output
        before = np.roll(first.output, 1, axis=0)
        self._batch_result("sample_position", rolled, got, before, "samples moved by one")

    def _batch_result(self, check: str, case: Case, got: Array, before: Array, what: str) -> None:
        if self.kernel.batch_invariant:
            self._same(check, before, got, f"is declared batch-invariant; {what}")
        self._judge(check, case, got)

    # -- calls ---------------------------------------------------------------------------------

    def _about(self, kind: str, variant: int = 0) -> None:
        """Let findings from here on name these inputs."""
        self._kind, self._how["variant"] = kind, variant
        self.announce(self.problem, kind, self.seed)

    def _case(self, kind: str, variant: int = 0) -> Case:
        self._about(kind, variant)
        return CASES.made(self.kernel, self.problem, kind, self.seed, variant)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Call the kernel; an exception fails `runs`."""
        result = attempted(call)
        if isinstance(result, Raised):
            self._global_state(self._process.change())
            check = "independence" if isinstance(result.error, KernelRunning) else "runs"
            self._fail(check, raised(result.error, self.kernel))
        return result

    def _global_state(self, change: str | None) -> None:
        if change is not None:
            self._process.restore()  # so that the next kernel starts from the same state
            self._fail("global_state", f"the call {change}")

    def _called(self, case: Case, *, noisy: bool = False, **options: Any) -> Observation:
        """One call, with the check `runs` only."""
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
        known: bool = True,
        prepared: Prepared | None = None,
    ) -> Observation:
        """One call, with the checks of every call. settle: `completion` too. prepared: the weights
        of an earlier call.

        known: the caller compares every element with what it must be. Then `full_write` is not
        asked of integers, which are what memory held before by chance in most outputs, so that it
        would call the kernel once more each time; the first call of a problem shows it.
        """
        seen = self._called(
            case, times=times, alias=alias, noisy=noisy, watched=watched, prepared=prepared
        )
        self._global_state(seen.process)
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
            self._completion(seen, self._meanwhile(case))
        if not alias and not (known and case.output_dtype.kind in "iu"):
            self._full_write(case, seen, noisy=noisy)
        self._results = [*self._results[-1:], (case, seen.output)]
        return seen

    def _repeated(self, case: Case, got: Array) -> str:
        """A hint for a wrong result that is the previous call's, whose inputs were others, and
        which was right for those."""
        if not _telling(got, case):
            return ""
        for other, before in self._results:
            if other is not case and before.shape == got.shape:
                same = before.dtype == got.dtype and not bits_differ(before, got).any()
                others = not np.array_equal(other.inputs[0], case.inputs[0])
                if same and others and judge(other, self._contract, before).ok:
                    return "it is the result of the call before, which had other inputs"
        return ""

    def _same(self, check: str, before: Array, got: Array, how: str) -> None:
        """Fail unless the bits are the same; `how` completes the sentence "the result …"."""
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

    def _key(self, case: Case, kind: str, variant: int) -> Hashable:
        """The key of a case from `make_case` in the cache of answers."""
        asked = (self.problem, kind, self.seed, variant)
        return (*asked, case.precision, self._contract)

    def _judge(
        self,
        check: str,
        case: Case,
        got: Array,
        *,
        exact: bool = False,
        variant: int | None = None,
    ) -> None:
        """Judge an output by the reference.

        variant: that of the case, if `make_case` returned it unchanged; its reference is cached.
        """
        key = None if variant is None else self._key(case, self._kind, variant)
        try:
            judgement = judge(case, self._contract, got, exact=exact, key=key)
        except (UnknownName, UsageError) as error:
            self._fail("declaration", f"no error bound follows from its contract: {error}")
        if not judgement.ok:
            how = "is not what integers must give" if exact else "exceeds the bound"
            where = judgement.coordinate, judgement.got, judgement.expected
            whence = self._repeated(case, got) or origin(case, *where)
            whence = whence or explanation(self.problem, *case.wide(), got)
            self._fail(
                check,
                f"error {how} (error/bound {ratio_text(judgement.ratio)})"
                + (whence and f"; {whence}"),
                coordinate=judgement.coordinate,
                got=judgement.got,
                expected=judgement.expected,
                bound=judgement.allowed,
                picture=judgement.picture,
            )
        self.tally.note(judgement)
        self._pass(check)
        if check == "bound" and judgement.bias is not None:
            self._bias(judgement)

    def _bias(self, judgement: Judgement) -> None:
        if judgement.bias is not None and judgement.bias > 1:
            self._fail(
                "bias",
                "the signed errors add up to more than rounding to nearest, which the contract "
                f"declares, explains ({judgement.bias:.3g} times its line)",
                coordinate=judgement.coordinate,
                got=judgement.got,
                expected=judgement.expected,
                bound=judgement.allowed,
            )
        self._pass("bias")

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
        CASES.clear()
        raise failed(
            Finding(
                check=check,
                backend=self.backend_name,
                kernel=self.kernel.id,
                problem=self.problem,
                kind=self._kind,
                seed=self.seed,
                message=shortened(message),
                coordinate=coordinate,
                got=got,
                expected=expected,
                bound=bound,
                details=self._how if picture is None else self._how | {"picture": picture},
            )
        )


def _telling(result: Array, case: Case) -> bool:
    """Whether a result shows which inputs it is of: not all NaN or infinite, not all one value.

    A single element shows it, unless it is zero, and NaN or an infinity where the case has none.
    """
    finite = result[np.isfinite(result)]
    inputs, weights = case.wide()
    if finite.size < result.size and all(np.isfinite(a).all() for a in (*inputs, *weights)):
        return True
    return bool(result.any() if result.size == finite.size == 1 else (finite != finite[:1]).any())


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
    """Run every check of a kernel on a problem; False if the kernel refuses the problem.

    Raises `Failed` with the finding at the first check that fails, and `R18Error` for an unknown
    rounding kind.
    """
    if rounding not in ROUNDING:
        raise R18Error(f"'{rounding}' is not a rounding kind; known: {', '.join(ROUNDING)}")
    examination = Examination(
        backend, kernel, problem, seed, tally or Tally(), backend_name or backend.name, only=only
    )
    if announce is not None:
        examination.announce = announce
    return examination.run(rounding, light=light)
