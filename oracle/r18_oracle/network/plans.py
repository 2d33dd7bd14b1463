"""Plans compute every step of a schedule, at any batch, with kernels of their backend."""

from __future__ import annotations

from dataclasses import replace

from r18.backend import Backend, CompileOptions, Plan
from r18.errors import NoKernel, R18Error, described, raised_in
from r18.graph.passes import fuse_image, fuse_pairs
from r18.graph.schedule import Schedule
from r18.runtime.fusing import PARTS
from r18.runtime.plan import make_plan
from r18_oracle.judge.reference import KernelRunning, kernel_running
from r18_oracle.loading import planned_kernels

BATCHES = (1, 8, 64, 256, 1024)
"""The batches of `check_plans`. The oracle runs networks at small ones only, but a backend chooses
kernels and tiles by the batch, and a plan needs no memory."""


class WrongPlan(R18Error):
    """A backend's plan that does not compute its schedule, or that raised."""


def check_plans(
    backend: Backend, schedule: Schedule, fused: Schedule, options: CompileOptions
) -> None:
    """Plan a schedule at each of `BATCHES` and check each plan as `check_plan` does.

    backend: probed, since it may list and choose kernels by the device. fused: the schedule at the
    options' level. A batch that no kernel takes is skipped. Raises `WrongPlan`, also for an
    exception of the backend's code, and what planning at the options' batch raises.
    """
    with kernel_running():
        make_plan(backend, schedule, options)  # raises where the options are at fault
    for batch in BATCHES:
        try:
            with kernel_running():
                plan = make_plan(backend, schedule, replace(options, batch=batch))
        except NoKernel:
            continue
        except KernelRunning:
            raise
        except Exception as error:
            raised = described(error, f" in {raised_in(error, ours=True)}")
            raise WrongPlan(
                f"backend '{backend.name}': planning '{schedule.name}' at batch {batch} raised "
                f"{raised}"
            ) from error
        check_plan(backend, fused, plan, batch)


def check_plan(backend: Backend, fused: Schedule, plan: Plan, batch: int) -> None:
    """Check that the plan computes every step of the schedule with a kernel of the backend.

    A tuning table may name one of a kernel's choices, such as a tile. Where the plan fuses a
    convolution with its max-pooling or with the integers of its image, or global average pooling
    with the linear layer behind it, the schedule is fused likewise. Raises `WrongPlan`.
    """
    known = planned_kernels(backend)
    planned = {plan.tensors[step.output].value: step for step in reversed(plan.steps)}
    pairs = {v: step.problem.op for v, step in planned.items() if type(step.problem.op) in PARTS}
    fused = fuse_pairs(fused, lambda step, pool: step.output in pairs)
    fused = fuse_image(fused, lambda step, image: pairs[step.output] == step.op)
    problems = fused.problems(batch)
    for step in fused.steps:
        made = planned.get(step.output)
        if made is None or made.problem != problems[step.name]:
            found = "nothing" if made is None else str(made.problem)
            raise WrongPlan(
                f"backend '{backend.name}': its plan computes '{step.output}' by {found}, "
                f"'{fused.name}' at level '{fused.level}' by {problems[step.name]}"
            )
    for launch in plan.steps:
        reason = launch.kernel.refusal(launch.problem)
        if launch.kernel.id not in known or reason is not None:
            raise WrongPlan(
                f"backend '{backend.name}': step '{launch.name}' of its plan names the kernel "
                f"'{launch.kernel.id}', which "
                + (f"refuses its problem: {reason}" if reason else "the backend does not list")
            )


__all__ = ["BATCHES", "WrongPlan", "check_plan", "check_plans"]
