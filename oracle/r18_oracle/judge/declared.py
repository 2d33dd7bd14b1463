"""Check a kernel's declarations, above all that its contract is strict enough to judge it by.

The bound that a kernel is held to follows from its own rounding contract, so a contract looser
than the kernel's precision would hide errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from r18.backend import Kernel
from r18.errors import nearest, show
from r18.graph.precision import PRECISIONS, Precision
from r18_oracle.functions.backend import FunctionKernel
from r18_oracle.judge.bounds import DERIVATIONS, FORMATS
from r18_oracle.judge.roundings import FACTORS
from r18_oracle.ops.table import spec_of

NARROW = ("fp16x2", "tf32", "float16", "bfloat16", "float8_e4m3fn")
"""The formats that tensor cores multiply, whose sums may therefore be truncated."""

FRACTIONS = {"float8_e4m3fn": 13}
"""The bits of fraction of sums that tensor cores keep, where they are fewer than float32's: those
of the coarsest known unit, Hopper's."""

ATTRIBUTES = (
    "id",
    "op",
    "algorithm",
    "precision",
    "layout",
    "deterministic",
    "batch_invariant",
    "in_place",
    "contract",
    "edges",
    "extra_problems",
)


def declaration(kernel: Kernel) -> dict[str, object]:
    """Everything that a kernel declares, by name."""
    return {name: getattr(kernel, name) for name in ATTRIBUTES}


def objection(kernel: Kernel) -> str | None:
    """Why the kernel's declaration is not acceptable, or None.

    - It inherits `r18.backend.Kernel`, whose defaults the core and the oracle rely on.
    - The precision is one of `r18.graph.precision.PRECISIONS` (it may flush to zero), and the id
      contains its name and the op's.
    - Sums are kept in the precision's `accumulate` format, or in one with a smaller unit roundoff,
      which claims a sharper bound; results are rounded to its `storage` format, or to tf32 where
      it multiplies in tf32.
    - Factors are claimed only in a format with a smaller unit roundoff than the precision's, and
      not where it splits them.
    - Sums are truncated only where factors are narrow enough for a tensor core, and promoted only
      by the algorithms `sum` and `scaled_sum`; they keep as few bits of fraction as a unit does.

    A function that is judged as it stands (`r18_oracle.functions`) declares nothing: what it is
    held to was found or is the user's word, so any formats will do.
    - The algorithm has a derivation, for split factors one of its own.
    - Its edges are sizes, and it takes the problems that it names as its extra problems.
    """
    if not isinstance(kernel, Kernel):
        return f"{type(kernel).__name__} does not inherit r18.backend.Kernel"
    precision, contract = kernel.precision, kernel.contract
    if isinstance(kernel, FunctionKernel):
        return None
    known = PRECISIONS.get(precision.name)
    if known is None:
        return f"its precision is {_unknown(precision.name, PRECISIONS)}"
    if precision != replace(known, flush_to_zero=precision.flush_to_zero):
        return f"its precision is not the one that is known as '{precision.name}': {precision!r}"
    parts = kernel.id.split("/")
    if len(parts) < 4 or parts[1] != kernel.op.name or parts[3] != precision.name:
        return f"its id is not backend/{kernel.op.name}/algorithm/{precision.name}[/tile]"
    accumulators = _accumulators(precision)
    if contract.accumulate not in accumulators:
        said = f"{precision} accumulates in {precision.accumulate}, not in {contract.accumulate}"
        return said if len(accumulators) == 1 else f"{said}; known: {', '.join(accumulators)}"
    outputs = spec_of(kernel.op).outputs or (precision.storage,)
    if contract.output not in (*outputs, *_outputs(precision)):
        return f"{precision} stores {' or '.join(outputs)}, not {contract.output}"
    if contract.factors and (wrong_factors := _factors_objection(precision, contract.factors)):
        return wrong_factors
    if contract.truncates and precision.multiply not in NARROW:
        return f"sums of {precision.multiply} products are rounded: no unit cuts them off"
    kept = FRACTIONS.get(precision.multiply)
    if contract.fraction and (kept is None or contract.fraction < kept):
        said = f"{kept} bits of fraction" if kept else f"all bits of {contract.accumulate}"
        return f"units that multiply {precision.multiply} keep {said}, not {contract.fraction}"
    if contract.promoted and contract.algorithm not in ("sum", "scaled_sum"):
        return f"the oracle has no error bound for '{contract.algorithm}' with promoted sums"
    known_algorithms = {*DERIVATIONS, *spec_of(kernel.op).derivations}
    if contract.algorithm not in known_algorithms:
        usual = [*spec_of(kernel.op).algorithms, *spec_of(kernel.op).derivations, "exact"]
        said = _unknown(contract.algorithm, known_algorithms, dict.fromkeys(usual))
        return f"the oracle has no error bound for {said}"
    if precision.splits and contract.algorithm.startswith("winograd"):
        return f"the oracle has no error bound for '{contract.algorithm}' with {precision}"
    if wrong := [edge for edge in kernel.edges if edge < 1]:
        return f"its edges are sizes of at least 1, not {wrong[0]}"
    for extra in kernel.extra_problems:
        if (reason := kernel.refusal(extra)) is not None:
            return f"it names {extra} among its extra problems, but does not take it: {reason}"
    return None


def _factors_objection(precision: Precision, factors: str) -> str | None:
    """Why a contract may not claim this format of factors, or None."""
    if precision.splits:
        return f"{precision} splits its factors: a contract cannot claim others"
    multiply = FACTORS.get(precision.multiply) or FORMATS[precision.multiply]
    if factors not in FORMATS or FORMATS[factors].u >= multiply.u:
        return f"{precision} multiplies {precision.multiply}: {factors} as factors claims no more"
    return None


def _outputs(precision: Precision) -> tuple[str, ...]:
    """Formats of outputs that their arrays do not enforce."""
    return ("tf32",) if precision.multiply == "tf32" else ()


def _unknown(name: str, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """A name that is not known, with the nearest that is, and those to choose from."""
    near = nearest(name, known := list(known))
    meant = f", did you mean '{near}'?" if near else ";"
    return f"{show(name)}{meant} known: {', '.join(known if listed is None else listed)}"


def _accumulators(precision: Precision) -> tuple[str, ...]:
    """The precision's accumulator, and the formats that round less."""
    own = FORMATS.get(precision.accumulate)
    finer = (name for name, found in FORMATS.items() if own is not None and found.u < own.u)
    return tuple(dict.fromkeys((precision.accumulate, *finer)))


def repeated(kernels: Sequence[Kernel]) -> list[str]:
    """The ids that more than one kernel of a backend has: a plan, a record and a finding name a
    kernel by its id, and only the first of them would ever be verified."""
    return [name for name, count in Counter(kernel.id for kernel in kernels).items() if count > 1]
