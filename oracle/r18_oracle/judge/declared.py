"""What a kernel says of itself, and whether to believe it.

The bound that a kernel is held to follows from its own rounding contract, so a contract looser
than the kernel's precision would let any error pass.
"""

from __future__ import annotations

from dataclasses import replace

from r18.backend import Kernel
from r18.graph.precision import PRECISIONS
from r18_oracle.judge.bounds import DERIVATIONS

NARROW = ("fp16x2", "tf32", "float16", "bfloat16")
"""The formats that tensor cores multiply, and so those whose sums may be cut off."""

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
    """What is wrong with the kernel's declaration, or None.

    - It inherits `r18.backend.Kernel`, whose defaults the core and the oracle rely on.
    - The precision is one of `r18.graph.precision.PRECISIONS` (it may flush to zero), and the id
      names it and the op.
    - Sums are kept in the precision's `accumulate` format and results in its `storage` format.
    - Sums are cut off only where factors are narrow enough for a tensor core.
    - The algorithm has a derivation, and for factors that are split in two one of its own.
    - It takes the extra problems that it names.
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
    if contract.algorithm not in DERIVATIONS:
        return f"the oracle has no error bound for '{contract.algorithm}'"
    if precision.splits and contract.algorithm.startswith("winograd"):
        return f"the oracle has no error bound for '{contract.algorithm}' with {precision}"
    for extra in kernel.extra_problems:
        if (reason := kernel.refusal(extra)) is not None:
            return f"it names {extra} among its extra problems, but does not take it: {reason}"
    return None
