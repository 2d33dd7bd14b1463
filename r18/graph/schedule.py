"""The network as data: ordered steps, the values they pass on, and the checkpoints.

Step names are torchvision's module paths, in the form that `torchvision.models.
feature_extraction.get_graph_node_names` gives them: the second call of a block's ReLU is
`layer1.0.relu_1`, its residual sum `layer1.0.add`. A value carries the name of the step that made
it at level `none`, and keeps that name when a pass fuses steps, so a checkpoint names the same
tensor at every level at which the tensor exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from r18.errors import ScheduleError, ShapeError, UsageError, unknown
from r18.graph.ops import (
    Normalize,
    Op,
    Problem,
    Shape,
    WeightSpec,
    as_int,
    as_shape,
    check_size,
)

IMAGE = "image"
PIXELS = "pixels"

CANONICAL = ("stem_pool", "layer1", "layer2", "layer3", "layer4", "gap", "logits")
"""The checkpoints that every dump holds by default, in network order."""


@dataclass(frozen=True)
class Step:
    """One node: an op, the values it reads, the value it makes, the weights it uses."""

    name: str
    op: Op
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A name worth comparing, and the value it stands for."""

    name: str
    value: str


@dataclass(frozen=True)
class FoldedBatchNorm:
    """How a convolution's folded weight and bias come from it and the BatchNorm behind it.

    conv: the convolution's step name; the new weights are `{conv}.folded_weight` and
    `{conv}.folded_bias`. conv_weight, and bn_weights in the order of `BatchNorm.weights`, name the
    tensors that they come from; `r18.graph.passes.fold_weights` computes them.
    """

    conv: str
    conv_weight: str
    bn_weights: tuple[str, str, str, str]
    eps: float

    @property
    def weight(self) -> str:
        return f"{self.conv}.folded_weight"

    @property
    def bias(self) -> str:
        return f"{self.conv}.folded_bias"


@dataclass(frozen=True)
class Schedule:
    """Ordered steps from `input` to `output`; validated, with every shape inferred, when made.

    input_shape is one sample's: (C, H, W) for images, (F,) for a slice that begins behind GAP.
    `level` is the fusion level that the passes brought it to. `output` is the value that a program
    returns; left empty, the last step's.
    """

    name: str
    input_shape: Shape
    steps: tuple[Step, ...]
    checkpoints: tuple[Checkpoint, ...]
    input: str = IMAGE
    folds: tuple[FoldedBatchNorm, ...] = ()
    level: str = "none"
    output: str = ""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ScheduleError(f"schedule '{self.name}' has no steps")
        given = as_shape(self.input_shape, f"schedule '{self.name}': the input's shape")
        object.__setattr__(self, "input_shape", given)
        if not self.output:
            object.__setattr__(self, "output", self.steps[-1].output)
        _no_repeats(self.name, "step", (s.name for s in self.steps))
        _no_repeats(self.name, "value", (self.input, *(s.output for s in self.steps)))
        _no_repeats(self.name, "checkpoint", (c.name for c in self.checkpoints))
        self.shapes(1)
        for step in self.steps:
            if step.op.of_pixels != (self.of_pixels and self.input in step.inputs):
                raise ScheduleError(
                    f"step '{step.name}': pixels are the schedule's input, and what reads them is "
                    f"{self.steps[0].op.name if self.of_pixels else Normalize.name} alone"
                )
            wanted = step.op.weights()
            if len(step.weights) != len(wanted):
                raise ScheduleError(
                    f"step '{step.name}': {step.op.label} reads {len(wanted)} weights, "
                    f"{len(step.weights)} are named"
                )
        _ = self.storage  # raises where reading and storing differ
        specs = self.weight_specs
        for fold in self.folds:
            if fold.weight not in specs or fold.bias not in specs:
                raise ScheduleError(f"the BatchNorm folded into '{fold.conv}' serves no step")
        values = {self.input, *(s.output for s in self.steps)}
        if self.output not in values:
            raise ScheduleError(f"the output is '{self.output}', which no step makes")
        for checkpoint in self.checkpoints:
            if checkpoint.value not in values:
                raise ScheduleError(
                    f"checkpoint '{checkpoint.name}' names the value '{checkpoint.value}', "
                    "which no step makes"
                )

    @cached_property
    def storage(self) -> Mapping[str, str]:
        """Each value's storage format; empty where it is the precision's.

        Raises `ScheduleError` where a value is read in another one than it is in.
        """
        stored: dict[str, str] = {}
        for step in self.steps:
            for value, wanted in zip(step.inputs, step.op.input_storage, strict=True):
                found = stored.setdefault(value, wanted)
                if found != wanted:
                    raise ScheduleError(
                        f"step '{step.name}': {step.op.label} reads '{value}' as "
                        f"{wanted or 'the precision says'}, and it is stored as "
                        f"{found or 'the precision says'}"
                    )
            stored[step.output] = step.op.output_storage
        return stored

    @cached_property
    def fused(self) -> dict[str, Schedule]:
        """This schedule at the fusion levels for which `r18.graph.passes.fuse` was called."""
        return {}

    @property
    def of_pixels(self) -> bool:
        """Whether the input is pixels, in bytes; else it is in the precision's storage format."""
        return self.steps[0].op.of_pixels

    def shapes(self, batch: int) -> dict[str, Shape]:
        """Every value's logical shape at a batch size; raises `ScheduleError`, `ShapeError`."""
        batch = as_int(batch, "batch")
        shapes: dict[str, Shape] = {self.input: (batch, *self.input_shape)}
        for step in self.steps:
            for value in step.inputs:
                if value not in shapes:
                    raise ScheduleError(
                        f"step '{step.name}' reads '{value}' before any step made it"
                    )
            try:
                shapes[step.output] = step.op.infer(*(shapes[v] for v in step.inputs))
                check_size(shapes[step.output])
            except ShapeError as error:
                raise ShapeError(f"step '{step.name}': {error}") from None
        return shapes

    def problems(self, batch: int) -> dict[str, Problem]:
        """Every step's problem at a batch size, by step name."""
        shapes = self.shapes(batch)
        return {s.name: Problem(s.op, tuple(shapes[v] for v in s.inputs)) for s in self.steps}

    @cached_property
    def weight_specs(self) -> Mapping[str, WeightSpec]:
        """The weights that the steps read, by name, in step order (folded ones included)."""
        specs: dict[str, WeightSpec] = {}
        for step in self.steps:
            for name, spec in zip(step.weights, step.op.weights(), strict=True):
                known = specs.setdefault(name, spec)
                if known.shape != spec.shape:
                    raise ScheduleError(
                        f"weight '{name}' is read as {known.shape} and, by step '{step.name}', "
                        f"as {spec.shape}"
                    )
        return specs

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample."""
        return sum(p.macs for p in self.problems(1).values())

    @property
    def parameters(self) -> int:
        """Trainable parameters, as frameworks count them (BatchNorm buffers are not)."""
        return sum(
            _size(spec.shape) for spec in self.weight_specs.values() if spec.kind != "bn_buffer"
        )

    def step(self, name: str) -> Step:
        """The step of that name; raises `UnknownName` with the nearest."""
        for step in self.steps:
            if step.name == name:
                return step
        raise unknown("step", name, (s.name for s in self.steps))

    @cached_property
    def taps(self) -> Mapping[str, str]:
        """Every name that can be tapped: the checkpoints, then every value, by value name."""
        names = {c.name: c.value for c in self.checkpoints}
        for value in (self.input, *(s.output for s in self.steps)):
            names.setdefault(value, value)
        return names

    def value_of(self, tap: str) -> str:
        """The value behind a checkpoint or value name; raises `UnknownName`."""
        try:
            return self.taps[tap]
        except KeyError:
            hint = (
                f"At fusion level '{self.level}' values inside fused steps do not exist; "
                "level 'none' has every one."
                if self.level != "none"
                else ""
            )
            raise unknown("checkpoint", tap, self.taps, hint=hint) from None

    def between(self, first: str, last: str) -> Schedule:
        """The slice that computes `last` from `first` (tap names), as a schedule of its own.

        Raises `ScheduleError` when `last` needs a value from outside the slice.
        """
        source, target = self.value_of(first), self.value_of(last)
        makers = {s.output: s for s in self.steps}
        needed: set[str] = set()
        pending = [target]
        while pending:
            value = pending.pop()
            if value == source or value in needed:
                continue
            if value not in makers:
                raise ScheduleError(
                    f"'{last}' cannot be computed from '{first}' alone: it also needs '{value}'"
                )
            needed.add(value)
            pending.extend(makers[value].inputs)
        steps = tuple(s for s in self.steps if s.output in needed)
        if not steps:
            raise ScheduleError(f"there is no step between '{first}' and '{last}'")
        values = {source, *(s.output for s in steps)}
        convs = {s.name for s in steps}
        return replace(
            self,
            name=f"{self.name}[{first}:{last}]",
            input=source,
            input_shape=self.shapes(1)[source][1:],
            steps=steps,
            output=target,
            checkpoints=tuple(c for c in self.checkpoints if c.value in values),
            folds=tuple(f for f in self.folds if f.conv in convs),
        )


def _size(shape: Shape) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _no_repeats(schedule: str, kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScheduleError(f"schedule '{schedule}': {kind} '{name}' appears twice")
        seen.add(name)


def checkpoint_names(schedule: Schedule, asked: str | Sequence[str] = "canonical") -> list[str]:
    """The checkpoints meant, in network order: "canonical", "all", or names.

    "all" is every name that the schedule can tap except its input: at level `none` each of
    torchvision's module paths. Raises `UnknownName` for a name that the schedule lacks,
    `UsageError` when nothing is left.
    """
    match asked:
        case "canonical":
            names = [name for name in CANONICAL if name in schedule.taps]
        case "all":
            names = [name for name, value in schedule.taps.items() if value != schedule.input]
        case str():
            names = [name.strip() for name in asked.split(",") if name.strip()]
        case _:
            names = list(asked)
    if not names:
        raise UsageError(f"no checkpoints of '{schedule.name}' are asked for by '{asked}'")
    place = {schedule.input: -1}
    place |= {step.output: index for index, step in enumerate(schedule.steps)}
    return sorted(dict.fromkeys(names), key=lambda name: place[schedule.value_of(name)])


__all__ = [
    "CANONICAL",
    "IMAGE",
    "PIXELS",
    "Checkpoint",
    "FoldedBatchNorm",
    "Schedule",
    "Step",
    "checkpoint_names",
]
