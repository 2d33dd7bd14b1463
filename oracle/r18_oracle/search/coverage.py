"""Coverage: problems of a network that no kernel takes, and kernels that take no problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from r18.backend import Backend, CompileOptions, Kernel
from r18.errors import NoKernel, R18Error, UsageError, described
from r18.graph.ops import Problem
from r18.graph.precision import precision as precision_of
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan
from r18.weights.precisions import calibrated_schedule
from r18_oracle.findings import Finding
from r18_oracle.generate.corners import corners
from r18_oracle.generate.problems import schedule_problems
from r18_oracle.judge.declared import repeated
from r18_oracle.search.campaign import network_problems

CONVOLUTIONS = frozenset({"conv2d", "qconv2d"})
"""The ops without which a backend runs no network of a precision."""
SMALL = 1 << 16
"""Limit on elements and on multiplications of the corners that a precision is tried with."""


def program_refusal(
    backend: Backend, schedule: Schedule, precision: str, fusion: str
) -> str | None:
    """Why a backend cannot run a schedule (at level `none`) in a precision, or None.

    In int8 that is the schedule's integer form, which exists at fusion level `all` only. An
    exception of a kernel's `refusal` is not a refusal; the run itself will show it. Raises
    `UnknownName` or `UsageError` for a precision or a fusion level that does not exist.
    """
    options = CompileOptions(1, precision_of(precision).name, fusion)
    try:
        schedule = calibrated_schedule(schedule, options)
    except UsageError as refusal:
        return str(refusal)
    try:
        make_plan(backend, schedule, options)
    except NoKernel as refusal:
        return str(refusal).splitlines()[-1].strip()
    except R18Error:
        raise
    except Exception:
        return None
    return None


def unavailable(backend: Backend, precision: str) -> str | None:
    """Why no kernel of a precision takes any problem, however small; None if one does.

    The device does not have such a precision, as a CPU does not have tf32.
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


def lacks_convolutions(backend: Backend, precision: str) -> bool:
    """Whether it has kernels in an available precision, and no convolution among them.

    `uncovered` does not look at such a precision, which need not run networks while another does.
    """
    try:
        ops = {k.op.name for k in backend.kernels() if k.precision.name == precision}
        return CONVOLUTIONS.isdisjoint(ops) and unavailable(backend, precision) is None
    except Exception:  # of a kernel's refusal; the campaign shows it
        return False


def uncovered(
    backend: Backend, schedule: Schedule, batches: Sequence[int]
) -> list[tuple[str, Problem]]:
    """(precision, problem) for each network problem that no kernel of the backend takes.

    Only for precisions in which the backend has convolutions.
    """
    kernels = backend.kernels()
    wanted = schedule_problems(schedule, batches)
    missing: list[tuple[str, Problem]] = []
    for name in dict.fromkeys(k.precision.name for k in kernels):
        usable = [k for k in kernels if k.precision.name == name]
        answers = {p: any(k.refusal(p) is None for k in usable) for p in wanted}
        convolves = any(k.op.name == "conv2d" for k in usable)
        layouts = {k.layout for k in usable}
        for problem, ok in answers.items():
            if ok or not convolves or problem.op.optional:
                continue
            if problem.op.name == "relayout" and len(layouts) == 1:
                continue  # no plan needs one
            missing.append((name, problem))
    return missing


def idle_finding(
    name: str,
    backend: Backend,
    kernel: Kernel,
    network_name: str,
    batches: Sequence[int],
    seed: int,
) -> Finding | None:
    """The finding for a kernel that took no problem although its precision is available, or None.

    Nothing is verified about such a kernel. The finding has the first problem of the network, or
    the first corner, that the kernel refuses.
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
    except Exception as error:  # any exception of a kernel is a finding
        reason = described(error)
    message = (
        f"took none of the problems it was offered, though {kernel.precision} is available here; "
        f"it refuses this problem: {reason}"
    )
    return _finding(name, kernel.id, first, "none", message, network_name, batches, seed)


def coverage_findings(
    name: str, backend: Backend, network_name: str, batches: Sequence[int], seed: int
) -> list[Finding]:
    """A finding for each op and precision with a problem of the network that no kernel takes, and
    for each id that several kernels have.

    The former only for precisions that are available and in which the backend has convolutions.
    """

    def finding(kernel: str, problem: Problem | None, message: str) -> Finding:
        return _finding(name, kernel, problem, "network", message, network_name, batches, seed)

    same = repeated_findings(name, backend, network_name, batches, seed)
    try:
        missing = uncovered(backend, network(network_name), batches)
        precisions = {precision for precision, _ in missing}
        absent = {p for p in precisions if unavailable(backend, p) is not None}
    except Exception as error:  # any exception of a kernel is a finding
        message = f"the refusal() of a kernel raised {described(error)}"
        return [finding(f"{name}/*", None, message)]
    grouped: dict[tuple[str, str], list[Problem]] = {}
    for precision, problem in missing:
        if precision not in absent:
            grouped.setdefault((precision, problem.op.name), []).append(problem)
    return same + [
        finding(
            f"{name}/{op}/*/{precision}",
            problems[0],
            f"no {precision} kernel takes this problem of {network_name}"
            + (f", nor {len(problems) - 1} more" if len(problems) > 1 else ""),
        )
        for (precision, op), problems in grouped.items()
    ]


def repeated_findings(
    name: str, backend: Backend, network_name: str, batches: Sequence[int], seed: int
) -> list[Finding]:
    """A finding for each id that several kernels have."""
    message = (
        "several kernels have this id, which names only the first of them: "
        "give each an algorithm of its own"
    )
    return [
        _finding(name, kernel, None, "network", message, network_name, batches, seed)
        for kernel in repeated(backend.kernels())
    ]


def _finding(
    backend: str,
    kernel: str,
    problem: Problem | None,
    kind: str,
    message: str,
    network_name: str,
    batches: Sequence[int],
    seed: int,
) -> Finding:
    return Finding(
        check="coverage",
        backend=backend,
        kernel=kernel,
        problem=problem,
        kind=kind,
        seed=seed,
        message=message,
        details={"network": network_name, "batches": list(batches)},
    )
