"""The schedule that a plan runs, and what it fuses beyond what a fusion level does. Pure.

At level `all` a plan fuses a convolution with the max-pooling of what it makes, if that is wanted:

- An override of the pooling's step keeps the two apart. One of the convolution's step decides by
  the kernels that it names: those of the fused op, of the convolution, or of both, which asks
  nothing.
- An override of the fused op asks for it, one of either op keeps the two apart.
- Otherwise a kernel must take the fused problem in the precision, and no measurement say that the
  two ops are faster apart (`r18.backend.Apart`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from r18.backend import Apart, Backend, CompileOptions
from r18.errors import UsageError
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.graph.passes import from_pixels, fuse, fuse_pool
from r18.graph.schedule import Schedule, Step


def schedule_for(backend: Backend, schedule: Schedule, options: CompileOptions) -> Schedule:
    """The schedule (at level `none`, or at that of the options) as the backend's plan runs it.

    Needs no device. Raises `UnknownName` for a level that does not exist, and `UsageError` for a
    schedule that is at another one.
    """
    if schedule.level == "none":
        schedule = fuse(schedule, options.fusion)
    elif schedule.level != options.fusion:
        raise UsageError(
            f"schedule '{schedule.name}' is at level '{schedule.level}', "
            f"the options ask for '{options.fusion}'"
        )
    if options.pixels is not None:
        schedule = from_pixels(schedule, options.pixels)
    if options.fusion != "all":
        return schedule
    shapes = schedule.shapes(options.batch)

    def wanted(fused: Step, pool: Step) -> bool:
        problem = Problem(fused.op, tuple(shapes[value] for value in fused.inputs))
        return _Question(backend, options, fused.name, pool.name, problem).answer()

    return fuse_pool(schedule, wanted)


@dataclass(frozen=True)
class _Question:
    """Whether two steps, by name, are better one step that computes the problem."""

    backend: Backend
    options: CompileOptions
    conv: str
    pool: str
    problem: Problem

    def answer(self) -> bool:
        overrides = self.options.kernels
        if self.pool in overrides:
            return False
        if self.conv in overrides:
            pattern = overrides[self.conv]
            named = {k.op for k in self.backend.kernels() if fnmatchcase(k.id, pattern)}
            if not {Conv2d, ConvMaxPool} <= named:
                return ConvMaxPool in named
            return self.preferred(pattern)
        if ConvMaxPool.name in overrides:
            return True
        return not {Conv2d.name, MaxPool2d.name} & overrides.keys() and self.preferred("*")

    def preferred(self, pattern: str) -> bool:
        """Whether one of the kernels that match takes the problem, and nothing speaks against."""
        backend, precision = self.backend, self.options.precision
        if isinstance(backend.fastest(self.problem, precision), Apart):
            return False
        return any(
            kernel.op is ConvMaxPool
            and kernel.precision.name == precision
            and fnmatchcase(kernel.id, pattern)
            and kernel.refusal(self.problem) is None
            for kernel in backend.kernels()
        )


__all__ = ["schedule_for"]
