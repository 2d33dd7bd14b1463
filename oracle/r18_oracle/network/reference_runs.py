"""Layer-by-layer runs of a network without a backend: in float64, and in PyTorch's own float32.

A `LayerRun` computes one step at a time, on demand, and drops each value after its last reader, so
that it holds no more values than the network itself. Values that a later run needs again can be
kept in addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from r18.backend import Array
from r18.errors import UsageError
from r18.graph.ops import Op, Problem
from r18.graph.passes import fold_weights
from r18.graph.precision import Precision
from r18.graph.schedule import Schedule, Step
from r18_oracle.judge.reference import reference
from r18_oracle.ops.spec import Tensors
from r18_oracle.ops.table import spec_of


class LayerRun:
    """The values of a schedule for one batch, each computed when it is first needed.

    takes: the values that `take` will be called with, repeated if a value is taken repeatedly.
    known: values of earlier runs of this schedule on this batch, which are not computed again. The
    values that this run takes are added. Runs share the arrays, so they are only read. None: no
    value is known, and none is kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        images: Array,
        compute: Callable[[Step, tuple[Array, ...]], Array],
        takes: Iterable[str],
        known: dict[str, Array] | None = None,
    ) -> None:
        self._steps = schedule.steps
        self._compute = compute
        self._readers = Counter(takes)
        self._known = {} if known is None else known
        self._kept = frozenset(self._readers) if known is not None else frozenset()
        self._made: set[str] = set()
        self._readers.update(value for step in schedule.steps for value in step.inputs)
        self._values = {schedule.input: images}

    def take(self, value: str) -> Array:
        """The value, computed if needed. Raises `KeyError` if it is not in `takes`."""
        for step in self._needed(value):
            made = self._compute(step, tuple(self._read(name) for name in step.inputs))
            self._made.add(step.output)
            if step.output in self._kept:
                self._known[step.output] = made
            elif self._readers[step.output]:
                self._values[step.output] = made
        return self._read(value)

    def _needed(self, value: str) -> list[Step]:
        """The steps that are to be computed for a value, in order."""
        wanted, found = {value}, []
        for step in reversed(self._steps):
            there = step.output in self._known or step.output in self._values
            if there or step.output not in wanted:
                continue
            if step.output in self._made:  # and dropped
                raise KeyError(step.output)
            found.append(step)
            wanted.update(step.inputs)
        return found[::-1]

    def _read(self, value: str) -> Array:
        if value in self._known:
            return self._known[value]
        array = self._values[value]
        self._readers[value] -= 1
        if not self._readers[value]:
            del self._values[value]
        return array


def reference_run(
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Array,
    takes: Iterable[str],
    known: dict[str, Array] | None = None,
) -> LayerRun:
    """A run in float64 from these weights and images, of a schedule at level `none`.

    One in integers gives integers, and logits in float32: float64 holds them exactly.
    known: as in `LayerRun`, of earlier runs from the same weights and images.

    `take` raises `UsageError` if a value is not finite, since nothing can be compared with it.
    """

    def compute(step: Step, inputs: tuple[Array, ...]) -> Array:
        problem = Problem(step.op, tuple(array.shape for array in inputs))
        wide = tuple(np.asarray(weights[name], np.float64) for name in step.weights)
        y = reference(problem, inputs, wide)
        if not np.isfinite(y).all():
            raise UsageError(
                f"step '{step.name}' of '{schedule.name}' gives NaN or infinity in float64: "
                "nothing can be compared with these weights and images"
            )
        return y

    return LayerRun(schedule, images.astype(np.float64), compute, takes, known)


def pytorch_run(
    schedule: Schedule,
    fused: Schedule,
    weights: Mapping[str, Array],
    precision: Precision,
) -> Callable[[Array, Iterable[str]], LayerRun]:
    """Runs in PyTorch's own float32, rounded to the precision's storage.

    Returns a function (images, takes) → run.

    - Stored as float32 or wider: the schedule at level `none` through `torch.nn.functional`, as
      torchvision's module computes it. For tf32 the factors of products are rounded to 11 bits.
      Factors that are split into two float16 are not rounded: the split changes them by 2⁻²³, as
      much as float32 does.
    - Stored narrower: the fused schedule, with images, weights and every value that a fused step
      stores so rounded to the storage format, and PyTorch's float32 in between. The error of a
      narrow format depends on how often it rounds, which the fusion level decides, and hardly on
      the summation. The float32 error times the ratio of the roundoffs would overstate it.
    """
    storage: torch.dtype = getattr(torch, precision.storage)
    narrow = storage.itemsize < torch.float32.itemsize
    executed = fused if narrow else schedule
    read = fold_weights(executed, weights)

    def stored(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(storage).to(torch.float32) if narrow else tensor

    def compute(step: Step, inputs: tuple[Array, ...]) -> Array:
        tensors = tuple(torch.from_numpy(array) for array in inputs)
        with np.errstate(over="ignore"):  # overflow is reported below
            rounded = [
                np.array(read[name], precision.weight_dtype(spec)).astype(np.float32)
                for name, spec in zip(step.weights, step.op.weights(), strict=True)
            ]
        given = [torch.from_numpy(array) for array in rounded]
        if precision.multiply == "tf32" and spec_of(step.op).products:
            tensors = (_tf32(tensors[0]), *tensors[1:])
            given[0] = _tf32(given[0])
        with torch.inference_mode():
            made = pytorch(step.op, tensors, tuple(given))
            y: Array = (made if step.op.output_storage else stored(made)).numpy()
        if not np.isfinite(y).all():
            raise UsageError(
                f"step '{step.name}' of '{executed.name}' leaves the range of {precision.storage} "
                f"in PyTorch's own arithmetic: it cannot be run in {precision}\n"
                "  choose a precision with more range"
            )
        return y

    def run(images: Array, takes: Iterable[str]) -> LayerRun:
        source = images.astype(np.float32)
        if not executed.storage[executed.input]:
            source = stored(torch.from_numpy(source)).numpy()
        return LayerRun(executed, source, compute, takes)

    return run


def pytorch(op: Op, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    """One op by `torch.nn.functional`, in the tensors' own dtype.

    Raises `UsageError` for an op that no network has.
    """
    y: torch.Tensor = spec_of(op).pytorch(op, inputs, weights)
    return y


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    """float32 rounded to 11 significand bits, to nearest, ties to even."""
    bits = tensor.view(torch.int32)
    odd = (bits >> 13) & 1
    return ((bits + 0x0FFF + odd) & ~0x1FFF).view(torch.float32)


__all__ = ["LayerRun", "pytorch", "pytorch_run", "reference_run"]
