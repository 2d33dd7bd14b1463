"""What a kernel declares, and whether that can be held against it.

The bound that a kernel is held to follows from its own rounding contract, so a contract looser
than the kernel's precision would hide errors.
"""

from __future__ import annotations

from dataclasses import replace

from r18.backend import Kernel
from r18.graph.precision import PRECISIONS
from r18_oracle.judge.bounds import DERIVATIONS
from r18_oracle.ops.table import spec_of

NARROW = ("fp16x2", "tf32", "float16", "bfloat16")
"""The formats that tensor cores multiply, whose sums may therefore be truncated."""

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
    """The reason why what the kernel declares is not acceptable, or None.

    - It inherits `r18.backend.Kernel`, whose defaults the core and the oracle rely on.
    - The precision is one of `r18.graph.precision.PRECISIONS` (it may flush to zero), and the id
      contains its name and the op's.
    - Sums are kept in the precision's `accumulate` format and results in its `storage` format.
    - Sums are truncated only where factors are narrow enough for a tensor core.
    - The algorithm has a derivation, for split factors one of its own.
    - The kernel takes the problems that it names as its extra problems.
    """
    if not isinstance(kernel, Kernel):
        return f"{type(kernel).__name__} does not inherit r18.backend.Kernel"
    precision, contract = kernel.precision, kernel.contract
    known = PRECISIONS.get(precision.name)
    if known is None or precision != replace(known, flush_to_zero=precision.flush_to_zero):
        return f"its precision is not the one that is known as '{precision.name}': {precision!r}"
    parts = kernel.id.split("/")
    if len(parts) < 4 or parts[1] != kernel.op.name or parts[3] != precision.name:
        return f"its id is not backend/{kernel.op.name}/algorithm/{precision.name}[/tile]"
    if contract.accumulate != precision.accumulate:
        return f"{precision} accumulates in {precision.accumulate}, not in {contract.accumulate}"
    if contract.output != precision.storage:
        return f"{precision} stores {precision.storage}, not {contract.output}"
    if contract.truncates and precision.multiply not in NARROW:
        return f"sums of {precision.multiply} products are rounded: no unit cuts them off"
    if contract.algorithm not in {*DERIVATIONS, *spec_of(kernel.op).derivations}:
        return f"the oracle has no error bound for '{contract.algorithm}'"
    if precision.splits and contract.algorithm.startswith("winograd"):
        return f"the oracle has no error bound for '{contract.algorithm}' with {precision}"
    for extra in kernel.extra_problems:
        if (reason := kernel.refusal(extra)) is not None:
            return f"it names {extra} among its extra problems, but does not take it: {reason}"
    return None
