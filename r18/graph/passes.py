"""Passes over a schedule: fold BatchNorm, fuse ReLU, residual, projection, pooling. Pure functions.
`from_pixels` prepends the step that turns pixels into the network's input.

Levels build on each other:

| level          | fused                                                                   |
|----------------|-------------------------------------------------------------------------|
| `none`         | nothing: one step an op                                                 |
| `add_relu`     | the residual sum of a block with its ReLU                               |
| `conv_bn_relu` | and each convolution with its BatchNorm (folded) and following ReLU     |
| `all`          | and the residual sum and ReLU into the epilogue of a convolution        |
| `all`, planned | and pooling with its convolution or linear layer, and a projection with |
|                | the convolution that adds it, where a kernel exists                     |

`fuse` brings a schedule to a level, the same for every backend. The last line depends on the
backend (`r18.runtime.fusing`), because no backend needs a kernel for fused pairs. There a
quantised network of pixels may begin with the integers of its pixels in the same step.

A fused step keeps the name of its convolution or linear layer and makes the last step's value. Only
a value with one reader is fused away. Taps do not change folding: a value inside a fused step
cannot be tapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from r18.errors import UsageError, WeightsError, unknown
from r18.graph.ops import (
    Add,
    AvgPoolLinear,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    ReLU,
    Shape,
)
from r18.graph.precision import dtype_of, is_floating
from r18.graph.quantized import (
    Quantize,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizePixels,
    check_factors,
)
from r18.graph.scaled import (
    Scale,
    ScaledAvgPoolLinear,
    ScaledConv2d,
    ScaledConvMaxPool,
    ScaledGlobalAvgPool,
    ScaledLinear,
)
from r18.graph.schedule import PIXELS, FoldedBatchNorm, Schedule, Step

FUSION_LEVELS = ("none", "add_relu", "conv_bn_relu", "all")
"""Each level fuses what the one before it does, and more; `fuse` says what."""

SCALE, TABLE = ".scale", ".table"
"""Suffixes of the names of an input's scale and of its table of pixels."""

Array = npt.NDArray[Any]


@lru_cache(maxsize=64)  # a plan, a record's floors and a page ask for the same one many times
def fuse(schedule: Schedule, level: str) -> Schedule:
    """The schedule at a fusion level; it must be at level `none`.

    Raises `UnknownName` for an unknown level and `UsageError` for a schedule already fused.
    """
    if level not in FUSION_LEVELS:
        raise unknown("fusion level", level, FUSION_LEVELS, error=UsageError)
    if schedule.level != "none":
        raise UsageError(f"schedule '{schedule.name}' is already at level '{schedule.level}'")
    depth = FUSION_LEVELS.index(level)
    if depth >= 1:
        schedule = fuse_add_relu(schedule)
    if depth >= 2:
        schedule = fuse_conv_relu(fold_batchnorm(schedule))
    if depth >= 3:
        schedule = fuse_residual(schedule)
    return replace(schedule, level=level)


def fuse_add_relu(schedule: Schedule) -> Schedule:
    """Add, then ReLU → Add with ReLU."""

    def merge(add: Step, relu: Step) -> Step | None:
        if isinstance(add.op, Add) and not add.op.relu and isinstance(relu.op, ReLU):
            return replace(add, op=replace(add.op, relu=True), output=relu.output)
        return None

    return _merge_chains(schedule, merge)


def fold_batchnorm(schedule: Schedule) -> Schedule:
    """Conv2d, then BatchNorm → Conv2d with bias, with derived weights (`Schedule.folds`)."""
    folds: list[FoldedBatchNorm] = []

    def merge(conv: Step, bn: Step) -> Step | None:
        if not (isinstance(conv.op, Conv2d) and isinstance(bn.op, BatchNorm)):
            return None
        if conv.op.bias or conv.op.residual or conv.op.relu:
            return None
        weight, bias, mean, var = bn.weights
        fold = FoldedBatchNorm(conv.name, conv.weights[0], (weight, bias, mean, var), bn.op.eps)
        folds.append(fold)
        return replace(
            conv,
            op=replace(conv.op, bias=True),
            output=bn.output,
            weights=(fold.weight, fold.bias),
        )

    return _merge_chains(schedule, merge, lambda: tuple(folds))


def fuse_conv_relu(schedule: Schedule) -> Schedule:
    """Conv2d, then ReLU → Conv2d with ReLU in its epilogue."""

    def merge(conv: Step, relu: Step) -> Step | None:
        if isinstance(conv.op, Conv2d) and not conv.op.relu and isinstance(relu.op, ReLU):
            return replace(conv, op=replace(conv.op, relu=True), output=relu.output)
        return None

    return _merge_chains(schedule, merge)


def fuse_residual(schedule: Schedule) -> Schedule:
    """Conv2d, then Add (with ReLU) → Conv2d with residual (and ReLU) in its epilogue.

    The merged step stands where the Add stood: its other input exists by then.
    """

    def merge(conv: Step, add: Step) -> Step | None:
        if not (isinstance(conv.op, Conv2d) and isinstance(add.op, Add)):
            return None
        if conv.op.residual or conv.op.relu or len(set(add.inputs)) != 2:
            return None
        (shortcut,) = (value for value in add.inputs if value != conv.output)
        return replace(
            conv,
            op=replace(conv.op, residual=True, relu=add.op.relu),
            inputs=(*conv.inputs, shortcut),
            output=add.output,
        )

    return _merge_chains(schedule, merge, sink=True)


def fuse_pool(
    schedule: Schedule, wanted: Callable[[Step, Step], bool] = lambda fused, pool: True
) -> Schedule:
    """Conv2d without a residual, then MaxPool2d → ConvMaxPool, where that is wanted.

    Of a quantised schedule QuantizedConv2d, then QuantizedMaxPool2d → QuantizedConvMaxPool; of a
    scaled one ScaledConv2d, then MaxPool2d → ScaledConvMaxPool. wanted: asked for each such pair,
    with the step that would take its place and the pool's.
    The level stays what it is.
    """

    def merge(conv: Step, pool: Step) -> Step | None:
        op: Op
        match conv.op, pool.op:
            case Conv2d(residual=False) as first, MaxPool2d() as second:
                op = ConvMaxPool(first, second)
            case QuantizedConv2d(conv=Conv2d(residual=False)) as first, QuantizedMaxPool2d(second):
                op = QuantizedConvMaxPool(first, second)
            case ScaledConv2d(conv=Conv2d(residual=False)) as first, MaxPool2d() as second:
                op = ScaledConvMaxPool(first, second)
            case _:
                return None
        fused = replace(conv, op=op, output=pool.output)
        return fused if wanted(fused, pool) else None

    return _merge_chains(schedule, merge)


def fuse_classifier(
    schedule: Schedule, wanted: Callable[[Step, Step], bool] = lambda fused, pool: True
) -> Schedule:
    """GlobalAvgPool, then Linear → AvgPoolLinear, where that is wanted.

    Of a quantised schedule QuantizedGlobalAvgPool, then QuantizedLinear → QuantizedAvgPoolLinear;
    of a scaled one ScaledGlobalAvgPool, then ScaledLinear → ScaledAvgPoolLinear. wanted: asked for
    each such pair, with the step that would take the place of both, which keeps the linear layer's
    name, and the pooling's. The level stays what it is.
    """

    def merge(pool: Step, linear: Step) -> Step | None:
        op: Op
        match pool.op, linear.op:
            case GlobalAvgPool(), Linear() as second:
                op = AvgPoolLinear(second)
            case QuantizedGlobalAvgPool() as first, QuantizedLinear() as second:
                op = QuantizedAvgPoolLinear(first, second)
            case ScaledGlobalAvgPool(), ScaledLinear() as second:
                op = ScaledAvgPoolLinear(second)
            case _:
                return None
        weights = (*linear.weights, *pool.weights)
        fused = replace(linear, op=op, inputs=pool.inputs, weights=weights)
        return fused if wanted(fused, pool) else None

    return _merge_chains(schedule, merge)


def fuse_projection(
    schedule: Schedule, wanted: Callable[[Step, Step], bool] = lambda fused, projection: True
) -> Schedule:
    """Conv2d, then Conv2d that adds it as a residual → ConvProjection, where that is wanted.

    The first has neither residual nor ReLU: it is the projection of a block's shortcut. wanted:
    asked for each such pair, with the step that would take the place of both, which keeps the
    second one's name, and the projection's. The level stays what it is.
    """

    def merge(projection: Step, conv: Step) -> Step | None:
        match projection.op, conv.op:
            case Conv2d(residual=False, relu=False) as second, Conv2d(residual=True) as first:
                x, residual = conv.inputs
            case _:
                return None
        if residual != projection.output:
            return None
        fused = replace(
            conv,
            op=ConvProjection(first, second),
            inputs=(x, *projection.inputs),
            weights=(*conv.weights, *projection.weights),
        )
        return fused if wanted(fused, projection) else None

    return _merge_chains(schedule, merge, sink=True)


def fuse_pairs(
    schedule: Schedule, wanted: Callable[[Step, Step], bool] = lambda fused, other: True
) -> Schedule:
    """Every pair that a plan may fuse, where that is wanted.

    They are those of `fuse_pool`, `fuse_projection` and `fuse_classifier`.
    """
    return fuse_classifier(fuse_projection(fuse_pool(schedule, wanted), wanted), wanted)


def fuse_ops(schedule: Schedule, names: Collection[str]) -> Schedule:
    """The pairs whose fused ops have these names, such as `conv2d_maxpool2d`, fused."""
    return fuse_pairs(schedule, lambda fused, other: fused.op.name in names)


def fuse_image(
    schedule: Schedule, wanted: Callable[[Step, Step], bool] = lambda fused, image: True
) -> Schedule:
    """Quantize or QuantizePixels, then QuantizedConvMaxPool → one op, where that is wanted.

    Of a scaled schedule Scale, then ScaledConvMaxPool. The fused step takes the image, of numbers
    or pixels, and keeps the convolution's name. wanted: asked with the step that would take the
    place of both, and with the one that makes the convolution's input of the image.
    """

    def merge(image: Step, conv: Step) -> Step | None:
        op: Op
        match image.op, conv.op:
            case Quantize() | QuantizePixels() as first, QuantizedConvMaxPool(image=None) as second:
                op = replace(second, image=first)
            case Scale() as first, ScaledConvMaxPool(image=None) as second:
                op = replace(second, image=first)
            case _:
                return None
        weights = (*conv.weights, *image.weights)
        fused = replace(conv, op=op, inputs=image.inputs, weights=weights)
        return fused if wanted(fused, image) else None

    return _merge_chains(schedule, merge)


def from_pixels(schedule: Schedule, normalize: Normalize) -> Schedule:
    """The schedule behind a step `normalize`, which makes its input from the value `pixels`.

    In a quantised one the step `quantize` makes integers of the pixels, by a table.

    Every other value keeps its name, and so do the checkpoints. Raises `ShapeError` where the
    channels are others, and `ScheduleError` for a schedule that has such a step.
    """
    first = schedule.steps[0]
    if isinstance(first.op, Quantize):
        table = (f"{schedule.input}{TABLE}",)
        step = Step(first.name, QuantizePixels(normalize), (PIXELS,), first.output, table)
        return replace(schedule, steps=(step, *schedule.steps[1:]), input=PIXELS)
    return replace(
        schedule,
        steps=(Step(normalize.name, normalize, (PIXELS,), schedule.input), *schedule.steps),
        input=PIXELS,
    )


def _merge_chains(
    schedule: Schedule,
    merge: Callable[[Step, Step], Step | None],
    folds: Callable[[], tuple[FoldedBatchNorm, ...]] = tuple,
    sink: bool = False,
) -> Schedule:
    """Replace producer and sole consumer by what `merge` makes of them, in one sweep.

    The merged step stands where the producer stood, or, with `sink`, where the consumer did: it
    may then read values that were made in between. Checkpoints on values that no longer exist
    are dropped.
    """
    readers = Counter(value for step in schedule.steps for value in step.inputs)
    readers[schedule.output] += 1  # whoever calls the program reads it
    steps: dict[str, Step] = {}  # by output value, in order
    for step in schedule.steps:
        for value in step.inputs:
            producer = steps.get(value)
            if producer is None or readers[value] != 1:
                continue
            merged = merge(producer, step)
            if merged is None:
                continue
            if sink:
                del steps[value]
                steps[merged.output] = merged
            else:
                steps = {
                    (merged.output if s is producer else v): (merged if s is producer else s)
                    for v, s in steps.items()
                }
            break
        else:
            steps[step.output] = step
    if len(steps) == len(schedule.steps):
        return schedule
    values = {schedule.input, *steps}
    return replace(
        schedule,
        steps=tuple(steps.values()),
        checkpoints=tuple(c for c in schedule.checkpoints if c.value in values),
        folds=(*schedule.folds, *folds()),
    )


def fold_weights(schedule: Schedule, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights that the schedule's steps read: as given, and folded where it says so.

    With s = weight / √(running_var + eps) of the BatchNorm, the folded convolution weight is
    w[o,…]·s[o] and the folded bias is bias[o] − running_mean[o]·s[o]. Computed in float64; kept
    there, so that the kernel's rounding to storage is the only one.

    The tensors may be PyTorch's, as in `model.state_dict()`; other entries are ignored. Raises
    `WeightsError` for a tensor that is missing, misshapen or not floating-point, `UsageError` for
    anything but a mapping.
    """
    if not isinstance(weights, Mapping):
        raise UsageError(
            f"weights must be a mapping of names to tensors, got a {type(weights).__name__}\n"
            "  of a PyTorch module, give model.state_dict()"
        )
    specs = schedule.weight_specs

    def given(name: str, shape: Shape, storage: str = "") -> Array:
        if name not in weights:
            raise WeightsError(
                f"schedule '{schedule.name}' needs the weight '{name}', which is not given"
                + _why_missing(name, weights)
            )
        array = as_array(weights[name], f"weight '{name}'", storage)
        if array.shape != shape:
            raise WeightsError(
                f"weight '{name}' has shape {array.shape}, schedule '{schedule.name}' needs {shape}"
            )
        return array

    folded: dict[str, Array] = {}
    for fold in schedule.folds:
        channels = specs[fold.bias].shape
        scale, shift, mean, var = (
            given(name, channels).astype(np.float64) for name in fold.bn_weights
        )
        scale = scale / np.sqrt(var + fold.eps)
        weight = given(fold.conv_weight, specs[fold.weight].shape).astype(np.float64)
        folded[fold.weight] = weight * scale[:, None, None, None]
        folded[fold.bias] = shift - mean * scale
    for step in schedule.steps:
        pixels = step.op.image if isinstance(step.op, QuantizedConvMaxPool) else step.op
        if isinstance(pixels, QuantizePixels):
            table = step.weights[-1]
            name = table.removesuffix(TABLE) + SCALE
            scale = given(name, (1,)).astype(np.float32)
            check_factors(f"weight '{name}'", "scale", scale)
            folded[table] = pixels.table(scale[0])
    return {
        name: folded[name] if name in folded else given(name, spec.shape, spec.storage)
        for name, spec in specs.items()
    }


def _why_missing(name: str, weights: Mapping[str, object]) -> str:
    """A second line for a message, where PyTorch's names tell what became of a weight."""
    layer, _, role = name.rpartition(".")
    if f"{name}_orig" in weights:
        return f"\n  it is pruned: torch.nn.utils.prune.remove(module, '{role}') makes it plain"
    if any(given.startswith(f"{layer}.parametrizations.{role}.") for given in map(str, weights)):
        return (
            "\n  it is parametrised: torch.nn.utils.parametrize.remove_parametrizations(module, "
            f"'{role}') makes it plain"
        )
    if f"module.{name}" in weights:
        return "\n  the names begin with 'module.': give the state_dict of the module within"
    return ""


def as_array(tensor: Any, what: str, storage: str = "") -> Array:
    """A floating-point tensor of NumPy or PyTorch as an array; `what` begins the message.

    storage: a format of integers that the tensor may be in as well. PyTorch's tensors are brought
    to the host, and bfloat16 is widened, exactly. Raises `WeightsError` for any other kind of
    value, which would be cast: integers, complex numbers, masks, strings.
    """
    given = type(tensor).__name__
    if hasattr(tensor, "detach"):  # PyTorch, which the core does not import
        given = f"{tensor.dtype} tensor"
        try:
            tensor = tensor.detach().cpu()
            tensor = (tensor.float() if given.startswith("torch.bfloat16") else tensor).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            cause = str(error).partition("\n")[0][:200]
            raise WeightsError(f"{what} is no dense tensor on a device: {cause}") from None
    elif isinstance(tensor, np.ndarray):
        given = f"{tensor.dtype} array"
    if isinstance(tensor, np.ma.MaskedArray):
        raise WeightsError(f"{what} is a masked array, and kernels know no mask: fill it first")
    if isinstance(tensor, np.ndarray) and storage and tensor.dtype == dtype_of(storage):
        return tensor
    if not isinstance(tensor, np.ndarray) or not is_floating(tensor.dtype):
        raise WeightsError(
            f"{what} must be a floating-point array or tensor, got {given}: nothing is cast"
        )
    return tensor
