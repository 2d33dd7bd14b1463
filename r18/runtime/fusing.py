"""The schedule that a plan runs, and what it fuses beyond what a fusion level does. Pure.

At level `all` a plan fuses a convolution with the max-pooling of what it makes, if that is wanted:

- An override of the pooling's step keeps the two apart. One of the convolution's step decides by
  the kernels that it names: those of the fused op, of the convolution, or of both, which asks
  nothing.
- An override of the fused op asks for it, one of either op keeps the two apart.
- Otherwise a kernel must take the fused problem in the precision, and no measurement say that the
  two ops are faster apart (`r18.backend.Apart`).

It fuses global average pooling with the linear layer behind it by the same rules, with the layer in
place of the convolution, and the projection of a block's shortcut with the convolution that adds
it, with the projection in place of the pooling. Here a tap of the means, or of the projection,
keeps the two apart: every network has the means as its checkpoint `gap`, and PyTorch's module path
of a shortcut is a checkpoint too. A convolution that is pooled makes no checkpoint at this level.

A quantised network then fuses the step that makes integers of its image, of numbers or of pixels,
into such a convolution, by the same rules, and so does a scaled one the step that makes e4m3
numbers. Here an override of the fused op, or of the convolution's step, says only which kernels:
one of them must take the image.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from r18.backend import Apart, Backend, CompileOptions
from r18.backend.launch import refusal_of
from r18.errors import UsageError
from r18.graph.ops import (
    AvgPoolLinear,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    Problem,
)
from r18.graph.passes import (
    from_pixels,
    fuse,
    fuse_classifier,
    fuse_image,
    fuse_pool,
    fuse_projection,
)
from r18.graph.quantized import (
    Quantize,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizePixels,
)
from r18.graph.scaled import (
    Scale,
    ScaledAvgPoolLinear,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18.graph.schedule import CANONICAL, Schedule, Step

PARTS: dict[type[Op], tuple[type[Op], type[Op]]] = {
    ConvMaxPool: (Conv2d, MaxPool2d),
    QuantizedConvMaxPool: (QuantizedConv2d, QuantizedMaxPool2d),
    ScaledConvMaxPool: (ScaledConv2d, MaxPool2d),
    ConvProjection: (Conv2d, Conv2d),
    AvgPoolLinear: (Linear, GlobalAvgPool),
    QuantizedAvgPoolLinear: (QuantizedLinear, QuantizedGlobalAvgPool),
    ScaledAvgPoolLinear: (ScaledLinear, ScaledGlobalAvgPool),
}
"""The ops whose steps are fused, by the fused op: the one whose name the step keeps (a convolution
or linear layer), and the other (the pooling or projection)."""


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

    def asked(fused: Step, other: Step) -> _Question:
        problem = Problem(fused.op, tuple(shapes[value] for value in fused.inputs))
        return _Question(backend, options, fused.name, other.name, problem)

    tapped = {schedule.taps[tap] for tap in options.taps if tap in schedule.taps}

    def untapped(fused: Step, other: Step) -> bool:
        return other.output not in tapped and asked(fused, other).fuses()

    schedule = fuse_pool(schedule, lambda fused, pool: asked(fused, pool).fuses())
    schedule = fuse_classifier(fuse_projection(schedule, untapped), untapped)
    return fuse_image(schedule, lambda fused, image: asked(fused, image).takes_image())


def keeping_pools(schedule: Schedule) -> dict[str, str]:
    """Kernel overrides under which a plan stores what each convolution makes, to be tapped.

    The means of global pooling and projections need none: to tap them is enough.
    """
    pools = MaxPool2d | QuantizedMaxPool2d
    return {step.name: "*" for step in schedule.steps if isinstance(step.op, pools)}


def keeping_checkpoints(
    schedule: Schedule, options: CompileOptions, more: Collection[str] = ()
) -> CompileOptions:
    """The options with the canonical checkpoints, and more names of values, tapped, so that a plan
    keeps each of them."""
    canonical = (name for name in CANONICAL if name in schedule.taps)
    return replace(options, taps=tuple(dict.fromkeys((*canonical, *more))))


@dataclass(frozen=True)
class _Question:
    """Whether two steps, by name, are better one step that computes the problem.

    kept: the step whose name the one step has, of a convolution or linear layer. other: the
    pooling's, the projection's, or the one that makes integers or e4m3 numbers of the image.
    """

    backend: Backend
    options: CompileOptions
    kept: str
    other: str
    problem: Problem

    def fuses(self) -> bool:
        """Whether to fuse a pooling, or a projection, with its convolution or linear layer."""
        overrides, fused = self.options.kernels, type(self.problem.op)
        kept, other = PARTS[fused]
        if self.other in overrides:
            return False
        if self.kept in overrides:
            pattern = overrides[self.kept]
            named = {k.op for k in self.backend.kernels() if fnmatchcase(k.id, pattern)}
            if not {kept, fused} <= named:
                return fused in named
            return self.preferred(pattern)
        if fused.name in overrides:
            return True
        return not {kept.name, other.name} & overrides.keys() and self.preferred("*")

    def takes_image(self) -> bool:
        """Whether to fuse what makes integers or e4m3 numbers of an image with its convolution."""
        overrides = self.options.kernels
        makers = Quantize.name, QuantizePixels.name, Scale.name
        if {self.other, *makers} & overrides.keys():
            return False
        for name in (self.kept, type(self.problem.op).name):
            if name in overrides:
                return self.possible(overrides[name])
        return self.preferred("*")

    def preferred(self, pattern: str) -> bool:
        """Whether one of the kernels that match takes the problem, and nothing speaks against."""
        if isinstance(self.backend.fastest(self.problem, self.options.precision), Apart):
            return False
        return self.possible(pattern)

    def possible(self, pattern: str) -> bool:
        """Whether one of the kernels that match takes the problem."""
        return any(
            kernel.op is type(self.problem.op)
            and kernel.precision.name == self.options.precision
            and fnmatchcase(kernel.id, pattern)
            and refusal_of(kernel, self.problem) is None
            for kernel in self.backend.kernels()
        )


__all__ = ["PARTS", "keeping_checkpoints", "keeping_pools", "schedule_for"]
