"""Settling a target: the arrays that a function takes, its speed, and its arithmetic.

`settle` runs in a worker process, since it calls the function: it may crash or hang there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import ModuleType

import numpy as np

from r18.errors import BackendUnavailable
from r18.graph.ops import Problem
from r18.runtime.launch import run_kernel
from r18_oracle.check.call import Raised, attempted
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed, Finding
from r18_oracle.functions.arithmetic import BITS, Arithmetic
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.functions.kinds import KINDS
from r18_oracle.functions.suites.adapted import Adapted
from r18_oracle.functions.target import Target, backend_of
from r18_oracle.generate.inputs import make_case
from r18_oracle.generate.problems import fitted as fitted_to
from r18_oracle.generate.shrink import elements
from r18_oracle.generate.sizes import takes
from r18_oracle.ops.table import spec_of
from r18_oracle.probe.dots import Dots, forms, with_bias
from r18_oracle.probe.factors import Factors, are_whole, factors_of
from r18_oracle.probe.fitted import fitted
from r18_oracle.probe.order import order_of, shape_of
from r18_oracle.probe.sums import (
    flushes,
    narrowest,
    rounds_before_bias,
    rounds_products,
    sums_of,
)
from r18_oracle.probe.transforms import as_transform, note_on, transformed, window_of

Announce = Callable[[Problem | None, str, int], None]
HOST = ("torch", "numpy")
TRIED = 6
"""Problems on which a library's arrays are tried."""
MOST_MACS, MOST_ELEMENTS = 400_000, 4_096
"""The size of a small problem: as large as a quick search draws (`r18_oracle.search.profiles`)."""
CALLS, CALLS_SECONDS = 20, 0.5
"""The calls that a time is the least of, and the seconds after which they are enough."""
LARGER = 64
"""Times the batch of a small problem: the first whose time may say how fast the function is."""
ENOUGH, LARGEST = 0.005, 4_000_000
"""Seconds of a call that say it, and the elements of the largest problem that is tried."""
SLOW = 0.05
"""Seconds for a small problem above which sums are only probed short."""


@dataclass(frozen=True)
class Found:
    """The result of settling.

    target:     the target with its arrays and, where nothing contradicts, its contract.
    arithmetic: what the function computes with; None if it could not be probed.
    below:      what is narrower than expected: `multiplies in tf32`.
    notes:      sentences for people: the evidence, the order of sums, what could not be seen.
    seconds:    the time of a call as a quick search makes it. rate: multiplications or elements a
                second, of a larger one.
    finding:    of a problem that the probes pose, where no known arithmetic gives what it returned.
    """

    target: Target
    arithmetic: Arithmetic | None
    below: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    rate: float
    finding: Finding | None = None


def settle(*, target: Target, announce: Announce, also: Sequence[Problem] = ()) -> Found:
    """Find what the target leaves open. Raises `BackendUnavailable` if no library can be tried.

    also: convolutions that the function is known to transform (`transforms.leaks`).
    """
    with np.errstate():  # a function that sets what NumPy does is found by the checks, not here
        return _settled(target, announce, also)


def _settled(target: Target, announce: Announce, also: Sequence[Problem]) -> Found:
    announce(None, "none", 0)
    named, error = _with_arrays(target, announce)
    backend = backend_of(named.name)
    backend.probe()
    if error is not None:
        return Found(_declared(named), None, (), (f"could not be probed: {error}",), 0.0, 0.0)
    paced = attempted(lambda: _pace(backend, announce))
    if isinstance(paced, Raised):
        note = f"could not be probed: it {paced.words()}"
        return Found(_declared(named), None, (), (note,), 0.0, 0.0)
    seconds, rate, longest = paced

    posed: dict[Problem, None] = {}

    def probed() -> tuple[Arithmetic | None, tuple[str, ...]]:
        result = attempted(lambda: _arithmetic(backend, named, longest, announce, also, posed))
        if isinstance(result, Raised):
            return None, (f"could not be probed: it {result.words()}",)
        return result

    arithmetic, notes = probed()
    below = () if arithmetic is None else arithmetic.below(named.expected)
    if arithmetic is not None and below:
        second, others = probed()
        if second != arithmetic:  # it is wrong now and then
            notes, arithmetic = (_differing(arithmetic, second, others),), None
    if arithmetic is None:
        held = _declared(named)
        finding = first_finding(held, list(posed) or _small(backend.kernel), announce)
        return Found(held, None, (), notes, seconds, rate, finding)
    settled = named if named.contract else named.with_contract(arithmetic)
    return Found(settled, arithmetic, below, notes, seconds, rate)


def _differing(first: Arithmetic, second: Arithmetic | None, notes: tuple[str, ...]) -> str:
    """What two probings found that do not agree; notes: of the second."""
    other = notes[0] if second is None else f"it {second.words()}"
    return (
        f"probed twice, with two answers: it {first.words()}; {other}. "
        "Its results differ from call to call: judged by what is expected"
    )


def unsettled(target: Target) -> Target:
    """The target held to what is expected, with the arrays that would be tried first.

    For a function that ends the process in which it is settled.
    """
    named = target if target.arrays else replace(target, arrays=_in_order(target, HOST)[0])
    return _declared(named)


def _declared(target: Target) -> Target:
    """The target held to the contract that was given, or to what is expected."""
    return target if target.contract else target.with_contract(target.expected)


def first_finding(
    target: Target,
    problems: Iterable[Problem],
    announce: Announce,
    *,
    seed: int = 0,
    rounding: str = "normal",
) -> Finding | None:
    """The first finding of all checks on these problems. A search draws such ones by chance only.

    seed, rounding: as `examine` takes them.
    """
    backend = backend_of(target.name)
    for problem in problems:
        for kernel in backend.kernels():
            try:
                examine(
                    backend,
                    kernel,
                    problem,
                    seed,
                    rounding=rounding,
                    backend_name=target.name,
                    announce=announce,
                )
            except Failed as failure:
                return failure.finding
    return None


# -- the arrays that it takes --------------------------------------------------------------------


def _with_arrays(target: Target, announce: Announce) -> tuple[Target, str | None]:
    """The target with a library whose arrays the function takes, or else the first library that is
    there and what the function raised with its arrays."""
    if target.arrays:
        return target, _objection(target, announce)
    first: tuple[Target, str] | None = None
    causes = []
    for name in _in_order(target):
        one = replace(target, arrays=name)
        try:
            backend_of(one.name).probe()
        except BackendUnavailable as error:
            causes.append(f"{name}: {error.cause}")
            continue
        error_of = _objection(one, announce)
        if error_of is None:
            return one, None
        first = first or (one, error_of)
    if first is None:
        raise BackendUnavailable("check", "; ".join(causes), "Install NumPy or PyTorch.")
    return first


def _in_order(target: Target, kinds: Iterable[str] = tuple(KINDS)) -> list[str]:
    """Kinds of arrays, first those of the libraries that the function's module has imported.

    NumPy computes with PyTorch's tensors, but that is not what the function is for.
    """
    function = backend_of(target.name).kernel.function
    used = {target.place.partition(":")[0].partition(".")[0]}
    used |= {"torch"} if isinstance(function, Adapted) else set()
    for value in getattr(function, "__globals__", {}).values():
        if isinstance(value, ModuleType):
            used.add(value.__name__.partition(".")[0])
    return sorted(kinds, key=lambda name: name.partition("-")[0] not in used)


def _objection(target: Target, announce: Announce) -> str | None:
    """What the function raises on small problems, or that it takes none of them, in words; None if
    it computes one of them."""
    backend = backend_of(target.name)
    said = "it takes none of the small problems that are tried first"
    kernel = backend.kernel
    if not (small := _small(kernel)):
        problem = next(iter(spec_of(kernel.op).ordinary(kernel)))
        reason, names = str(kernel.refusal(problem)), kernel.like.call(problem.op).names
        return f"{said}: {reason}" + ("" if names in reason else f"; it is called with {names}")
    for problem in small:
        announce(problem, "normal", 0)
        result = attempted(lambda problem=problem: _call(backend, problem))  # type: ignore[misc]
        if not isinstance(result, Raised):
            return None
        said = f"it {result.words()}"
    return said


def _small(kernel: FunctionKernel) -> list[Problem]:
    """Ordinary problems, rounded up to what the function takes."""
    ordinary = (fitted_to(kernel, p, MOST_MACS) for p in spec_of(kernel.op).ordinary(kernel))
    plain = (q for p in ordinary for q in (p, *spec_of(p.op).plainer(p)))
    return list(islice((p for p in plain if takes(kernel, p)), TRIED))


def _call(backend: FunctionBackend, problem: Problem) -> float:
    """Call the function on a problem; the seconds of the call."""
    case = make_case(backend.kernel, problem, "normal", 0)
    start = time.perf_counter()
    run_kernel(backend, backend.kernel, problem, *case.inputs, *case.handed())
    return time.perf_counter() - start


def _pace(backend: FunctionBackend, announce: Announce) -> tuple[float, float, float]:
    """The least time of some calls as a search makes them, the rate of a call with so large a batch
    that its work takes most of the time, and the time of the largest call, which is as large as
    those of the probes."""
    taken = _small(backend.kernel)
    drawn = [p for p in taken if p.macs <= MOST_MACS and elements(p) <= MOST_ELEMENTS]
    small, largest = max(drawn or taken, key=elements), max(taken, key=elements)
    announce(small, "normal", 0)
    seconds = _least(backend, small)
    announce(largest, "normal", 0)
    longest = seconds if largest is small else _least(backend, largest)
    rate = _work(small) / seconds
    spec, batch, took = spec_of(small.op), LARGER * small.batch, 0.0
    while longest <= SLOW and took <= ENOUGH:  # a short call says more of the call than of the work
        problem = spec.rebuild(small.op, spec.numbers(small) | {"n": batch})
        if elements(problem) > LARGEST or not takes(backend.kernel, problem):
            break
        announce(problem, "normal", 0)
        took = _least(backend, problem)
        rate = _work(problem) / took
        batch *= 4
    return seconds, rate, longest


def _least(backend: FunctionBackend, problem: Problem) -> float:
    """The least seconds of some calls: another process may have the cores for a moment."""
    found = [_call(backend, problem)]
    while len(found) < CALLS and sum(found) < CALLS_SECONDS:
        found.append(_call(backend, problem))
    return min(found)


def _work(problem: Problem) -> int:
    return max(problem.macs, elements(problem))


# -- its arithmetic --------------------------------------------------------------------------------


def _arithmetic(
    backend: FunctionBackend,
    target: Target,
    seconds: float,
    announce: Announce,
    also: Sequence[Problem],
    posed: dict[Problem, None],
) -> tuple[Arithmetic | None, tuple[str, ...]]:
    """What the function computes with, and notes. posed: gets the problems of sums of products."""
    expected = target.expected
    with np.errstate(all="ignore"):
        if backend.kernel.like.sums_products:
            return _of_sums(backend, target, announce, seconds, also, posed)
        found = fitted(backend, expected)
    if found is None:
        return None, ("random inputs are within no known bound: it is judged by what is expected",)
    return found, ()


def _of_sums(
    backend: FunctionBackend,
    target: Target,
    announce: Announce,
    seconds: float,
    also: Sequence[Problem],
    posed: dict[Problem, None],
) -> tuple[Arithmetic | None, tuple[str, ...]]:
    """The coarsest of all forms, by the probes; and what they saw, in words."""
    storage, moved = target.dtype, transformed(backend, target.dtype, also)
    asked = [replace(dots, posed=posed) for dots in forms(backend) if _is_plain(dots, moved)]
    if not asked:
        return None, ("takes none of the shapes that the probes pose",)
    every: list[Factors] = []
    for dots in asked:
        announce(dots.form.problem(2, dots.form.multiple, 1), "none", 0)
        every.append(factors_of(dots, storage))
    factors = min(every, key=lambda one: (one.bits, not one.cut_off))
    widths = [sums_of(dots, storage, long=seconds < SLOW) for dots in asked]
    sums = narrowest(widths)
    if factors.bits >= sums.bits - sums.truncates and all(
        are_whole(dots, sums.bits, truncates=sums.truncates) for dots in asked
    ):
        factors = Factors(storage, BITS[storage], False)
    if not factors.name or not sums.name:
        return None, ("no known arithmetic gives what it returned: judged by what is expected",)
    notes = [*_evidence(factors, storage), sums.words()]
    wider = sums.bits > BITS[storage] and factors.name == storage
    if wider and any(rounds_products(dots, storage) for dots in asked if dots.multiplies):
        notes.append(f"its products are rounded to {storage} before they are added")
        sums = replace(sums, bits=BITS[storage])
    arithmetic = Arithmetic(
        "sum",
        storage,
        factors.name,
        sums.name,
        truncates=sums.truncates or factors.cut_off,
        stored_sum=_rounds_first(backend, storage, sums.name),
        flushes=_flushes(asked, storage, factors.name, sums.name),
    )
    notes.append(_order(asked, arithmetic, seconds))
    if moved:
        known = as_transform(backend, moved, arithmetic)
        arithmetic = known or arithmetic
        notes.append(note_on(moved, None if known is None else known.algorithm))
    return arithmetic, tuple(notes)


def _is_plain(dots: Dots, moved: list[Problem]) -> bool:
    """Whether a form shows sums although some windows are transformed: not one of 3×3 windows, nor,
    where other windows are transformed too, as by an FFT, one of more than a pixel."""
    if not moved:
        return True
    if any(window_of(problem) != "3×3" for problem in moved):
        return dots.form.problem(2, dots.form.multiple, 1).inputs[0][2:] == (1, 1)
    return dots.form.multiple == 1


def _flushes(asked: list[Dots], storage: str, factors: str, sums: str) -> bool:
    """Whether subnormal numbers are lost; not where a format of less range loses them anyway."""
    if sums not in ("float32", "float64") or factors == "float16" != storage:
        return False
    return any(flushes(dots, storage, rounded=factors != storage) for dots in asked)


def _evidence(factors: Factors, storage: str) -> list[str]:
    if factors.witness is None:
        return []
    given, left = factors.witness
    return [f"{given!r} × 1 gave {left!r}: factors of {factors.bits} bits, of {storage} arrays"]


def _rounds_first(backend: FunctionBackend, storage: str, sums: str) -> bool:
    """Whether it rounds the sum before the bias; only where the accumulator is the wider one."""
    return sums != storage and any(rounds_before_bias(d, storage) for d in with_bias(backend))


def _order(asked: list[Dots], arithmetic: Arithmetic, seconds: float) -> str:
    if seconds >= SLOW:
        return "too slow to look at the order of its sums"
    shape = shape_of(asked[0])
    if shape is None:
        return "does not take the sums that would show their order"
    order = order_of(asked[0], arithmetic, shape)
    if order is None:
        return "adds in an order that is no single tree, such as one that depends on the row"
    return f"{order.words()}; judged for any order"


__all__ = ["Found", "first_finding", "settle", "unsettled"]
