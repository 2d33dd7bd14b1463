"""Judging one output against the reference: by equality, or by the derived bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.errors import beside_one
from r18.graph.ops import ConvMaxPool, Problem
from r18.graph.scaled import ScaledConvMaxPool
from r18_oracle.cases import Case
from r18_oracle.judge.bias import led
from r18_oracle.judge.bounds import Bound, bound
from r18_oracle.judge.pictures import error_map
from r18_oracle.judge.reference import no_kernel_running, pre_epilogue, reference
from r18_oracle.judge.roundings import addends_of, rounded


def ratio_text(ratio: float) -> str:
    """An error/bound in three digits, or in as many as tell which side of 1 it is on."""
    return beside_one(ratio, 3, "{:.{}g}".format)


@dataclass(frozen=True)
class Judgement:
    """The result of comparing one output with the reference.

    ok:         every judged element is right.
    ratio:      max(error / bound); above 1 is a fault. Infinite for a wrong element whose bound
                is 0 and for a NaN where the reference has none.
    sharp:      max(error / statistical line), or None where there is none: above 1 is a warning.
    resolution: an error of this size, relative to the root mean square of the result, would have
                been found at every judged element (twice the bound); None for an exact check.
    bias:       how far the signed errors add up to more than rounding to nearest explains
                (`r18_oracle.judge.bias`): above 1 is a fault. None where that is not known.
    unjudged:   elements where an intermediate may overflow and the output is an infinity or NaN.
    coordinate, got, expected, allowed: the worst element.
    picture:    a map of the error (`r18_oracle.judge.pictures`) if there is a fault.
    """

    ok: bool
    ratio: float
    sharp: float | None
    resolution: float | None
    unjudged: int
    coordinate: tuple[int, ...]
    got: float
    expected: float
    allowed: float
    picture: dict[str, Any] | None = None
    bias: float | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The float64 result of a case, and the bound that a kernel is held to."""

    y: Array
    limits: Bound

    @property
    def nbytes(self) -> int:
        limits = self.limits
        drift = (
            (limits.drift.steps, limits.drift.certain, limits.drift.alike) if limits.drift else ()
        )
        arrays = (self.y, limits.largest, limits.statistical, limits.overflows, *drift)
        return sum(a.nbytes for a in arrays if a is not None)


class Answers:
    """An LRU cache of answers with a limit in bytes.

    Kernels with one contract get the same cases, and an answer costs two convolutions in float64.
    `get` raises `KernelRunning` while a kernel runs.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._nbytes = 0
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()

    def get(self, key: Hashable) -> Answer | None:
        """The answer, or None if it is not in the cache."""
        no_kernel_running()
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def put(self, key: Hashable, answer: Answer) -> None:
        """Store an answer; drop the least recently used ones beyond the limit."""
        self._known[key] = answer
        self._nbytes += answer.nbytes
        while self._nbytes > self._most:
            self._nbytes -= self._known.popitem(last=False)[1].nbytes


ANSWERS = Answers(256 << 20)  # ResNet-18's convolutions at batch 1, and all that is drawn


def judge(
    case: Case,
    contract: RoundingContract,
    got: Array,
    *,
    exact: bool = False,
    key: Hashable | None = None,
) -> Judgement:
    """Compare an output (logical shape, storage dtype) with the float64 reference.

    With `exact`, the result must equal the reference, rounded to storage as the contract says; the
    inputs must be such that nothing overflows. Otherwise raises `UnknownName` for a contract that
    has no derivation.

    key: identifies case, contract and `exact` in the cache of answers; None does not cache.
    """
    answer = expected(case, contract, exact=exact, key=key)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _compare(got.astype(np.float64), answer.y, answer.limits, exact, case)


def expected(
    case: Case, contract: RoundingContract, *, exact: bool = False, key: Hashable | None = None
) -> Answer:
    """What `judge` compares with; the arguments are its own."""
    answer = None if key is None else ANSWERS.get(key)
    if answer is None:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            answer = _answer(case, contract, exact)
        if key is not None:
            ANSWERS.put(key, answer)
    return answer


def _answer(case: Case, contract: RoundingContract, exact: bool) -> Answer:
    y = reference(case.problem, *case.wide())
    if not exact:
        return Answer(y, bound(case, contract, y))
    return Answer(_rounded(case, contract, y), Bound(np.zeros(1)))


def _rounded(case: Case, contract: RoundingContract, y: Array) -> Array:
    """An exact result as the kernel stores it: once, or before and after an epilogue."""
    op = case.problem.op
    if isinstance(op, ConvMaxPool | ScaledConvMaxPool):
        conv = case.of_convolution()
        made = _rounded(conv, contract, reference(conv.problem, *conv.wide()))
        return reference(Problem(op.pool, (made.shape,)), (made,), ())
    if contract.stored_sum and contract.algorithm == "sum":
        total = rounded(pre_epilogue(case.problem, *case.wide()), contract.output)
        for addend in addends_of(case):
            total += addend
        y = np.maximum(total, 0) if getattr(op, "relu", False) else total
    return rounded(y, contract.output)


def _compare(got: Array, y: Array, limits: Bound, exact: bool, case: Case) -> Judgement:
    op = case.problem.op
    error = np.abs(got - y)
    largest = np.broadcast_to(limits.largest, y.shape)
    if limits.overflows is None and limits.drift is None and not error.any():  # NaN is any
        return _equal(y, largest, limits, exact)
    ratio = np.where(error == 0, 0.0, error / largest)
    compared = np.isfinite(error)
    if not compared.all():
        # NaN in `error` means a NaN or an unlike infinity on either side: right only where both
        # agree. It is infinite where one side is, or where a finite difference overflows.
        same = (np.isnan(got) & np.isnan(y)) | (got == y)
        finite = np.isfinite(y)
        ratio = np.where(same, 0.0, np.where(finite & np.isfinite(got), ratio, np.inf))
        compared &= finite
    unjudged = 0
    if limits.overflows is not None:
        # After an overflow the output stays infinite or NaN, except that ReLU turns −∞ into 0, and
        # that max-pooling takes another value over −∞, which is then too low. Any other finite
        # output did not overflow and is judged.
        lost = ~np.isfinite(got) | ~np.isfinite(largest)
        if isinstance(op, ConvMaxPool | ScaledConvMaxPool):
            lost |= got < y
        elif getattr(op, "relu", False):
            lost |= got == 0
        judged = ~(limits.overflows & lost)
        unjudged = int(y.size - judged.sum())
        ratio = np.where(judged, ratio, 0.0)
        compared &= judged
    worst = np.unravel_index(int(np.argmax(ratio)), y.shape)
    chosen: Any = ... if compared.all() else compared  # the first takes no copy
    any_compared = bool(compared.any())
    sharp = None
    if limits.statistical is not None and any_compared:
        off = error[chosen]
        sharp = float(np.max(np.where(off == 0, 0.0, off / limits.statistical[chosen])))
    bias = None
    if limits.drift is not None:
        sure = compared & (np.abs(y) > largest)
        bias = limits.drift.ratio(got - y, y, sure)
        if bias is not None and bias > 1:
            bias = limits.drift.ratio(got - y, y, sure, led(case.problem, *case.wide()))
    resolution = None
    if not exact and any_compared:
        rms = float(np.sqrt(np.mean(np.square(y[chosen]))))
        resolution = float(2 * np.max(largest[chosen]) / rms) if rms > 0 else None
    peak = float(ratio[worst])
    return Judgement(
        ok=peak <= 1.0,
        ratio=peak,
        sharp=sharp,
        resolution=resolution,
        unjudged=unjudged,
        coordinate=tuple(int(i) for i in worst),
        got=float(got[worst]),
        expected=float(y[worst]),
        allowed=float(largest[worst]),
        picture=None if peak <= 1.0 else error_map(ratio, [int(i) for i in worst]),
        bias=bias,
    )


def _equal(y: Array, largest: Array, limits: Bound, exact: bool) -> Judgement:
    """The judgement of an output that equals a finite reference in every element."""
    rms = 0.0 if exact else float(np.sqrt(np.mean(np.square(y))))
    first = (0,) * y.ndim
    return Judgement(
        ok=True,
        ratio=0.0,
        sharp=None if limits.statistical is None else 0.0,
        resolution=float(2 * np.max(largest) / rms) if rms > 0 else None,
        unjudged=0,
        coordinate=first,
        got=float(y[first]),
        expected=float(y[first]),
        allowed=float(largest[first]),
    )
