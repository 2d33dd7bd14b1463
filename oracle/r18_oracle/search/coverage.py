"""Coverage: what of a network a backend has no kernel for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from r18.backend import Backend, CompileOptions, Kernel
from r18.errors import NoKernel, R18Error, UnknownName
from r18.evaluate.margins import Allowance
from r18.graph.ops import Problem
from r18.graph.precision import precision as precision_of
from r18.graph.schedule import Schedule, network
from r18.runtime.plan import make_plan
from r18_oracle.findings import Finding
from r18_oracle.generate.corners import corners
from r18_oracle.search.campaign import network_problems, uncovered

SMALL = 1 << 16
"""Elements and multiplications of the largest corner that a precision is tried with."""


def program_refusal(
    backend: Backend, schedule: Schedule, precision: str, fusion: str
) -> str | None:
    """Why a backend cannot run a schedule (at level `none`) in a precision, or None.

    What a kernel raises when it is asked is for the run to find, and no refusal. Raises
    `UnknownName` or `UsageError` for a precision or a fusion level that does not exist.
    """
    arithmetic = precision_of(precision)
    try:
        Allowance.of(arithmetic, 1)
    except UnknownName:
        return f"what a network may lose in {precision} is not known"
    try:
        make_plan(backend, schedule, CompileOptions(1, precision, fusion))
    except NoKernel as refusal:
        return str(refusal).splitlines()[-1].strip()
    except R18Error:
        raise
    except Exception:
        return None
    return None


def unavailable(backend: Backend, precision: str) -> str | None:
    """The reason why no kernel of a precision takes anything, however small; None if one does.

    Such a precision is not to be had on this device, as tf32 is not on a CPU.
    """
    reason = None
    for kernel in backend.kernels():
        if kernel.precision.name != precision:
            continue
        for problem in corners(kernel.op, SMALL, SMALL):
            reason = kernel.refusal(problem)
            if reason is None:
                return None
    return reason


def idle_finding(
    name: str,
    backend: Backend,
    kernel: Kernel,
    network_name: str,
    batches: Sequence[int],
    seed: int,
) -> Finding | None:
    """The finding about a kernel that took nothing, though its precision is to be had; or None.

    Nothing of it is verified then, and a person would take it for a kernel that is. It names the
    first problem of the network, or the first corner, that the kernel refuses.
    """
    first = next(
        chain(
            (p for p in network_problems(network_name, tuple(batches)) if type(p.op) is kernel.op),
            corners(kernel.op, SMALL, SMALL),
        )
    )
    try:
        if unavailable(backend, kernel.precision.name) is not None:
            return None
        reason = kernel.refusal(first)
    except Exception as error:  # whatever a kernel raises is what it did wrong
        reason = f"{type(error).__name__}: {error}"
    return Finding(
        check="coverage",
        backend=name,
        kernel=kernel.id,
        problem=first,
        kind="none",
        seed=seed,
        message=f"takes nothing that it was offered, though {kernel.precision} is to be had here; "
        f"of this problem it says: {reason}",
        details={"network": network_name, "batches": list(batches)},
    )


def coverage_findings(
    name: str, backend: Backend, network_name: str, batches: Sequence[int], seed: int
) -> list[Finding]:
    """A finding for each op and precision of which no kernel takes some problem of the network.

    Only for precisions that are to be had and in which the backend has convolutions.
    """

    def finding(kernel: str, problem: Problem | None, message: str) -> Finding:
        return Finding(
            check="coverage",
            backend=name,
            kernel=kernel,
            problem=problem,
            kind="network",
            seed=seed,
            message=message,
            details={"network": network_name, "batches": list(batches)},
        )

    try:
        missing = uncovered(backend, network(network_name), batches)
        absent = {p for p, _ in missing if unavailable(backend, p) is not None}
    except Exception as error:  # whatever a kernel raises is what it did wrong
        cause = f"{type(error).__name__}: {error}"
        return [finding(f"{name}/*", None, f"asked what it takes, a kernel raised {cause}")]
    grouped: dict[tuple[str, str], list[Problem]] = {}
    for precision, problem in missing:
        if precision in absent:
            continue
        grouped.setdefault((precision, problem.op.name), []).append(problem)
    return [
        finding(
            f"{name}/{op}/*/{precision}",
            problems[0],
            f"no {precision} kernel takes this problem of {network_name}"
            + (f", nor {len(problems) - 1} more" if len(problems) > 1 else ""),
        )
        for (precision, op), problems in grouped.items()
    ]
