"""Helpers for several test files: seeded weights, ops in plain NumPy, plan checks, subprocesses."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from r18.backend import Plan
from r18.backend.host import HostBuffer, HostMemory
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.schedule import Schedule

Array = np.ndarray[Any, np.dtype[Any]]
ROOT = Path(__file__).resolve().parents[1]
COMPILE_ALL = "R18_COMPILE_ALL"
"""If this variable is 1, as in the nightly run, tests also compile functions on record."""


def random_weights(
    schedule: Schedule, seed: int = 0, dtype: type[np.floating[Any]] = np.float32
) -> dict[str, Array]:
    """Seeded weights under which activations neither vanish nor overflow; variances positive."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, spec in schedule.weight_specs.items():
        if spec.kind in ("conv_weight", "fc_weight"):
            std = math.sqrt(2 / math.prod(spec.shape[1:]))
            value = rng.normal(0, std, spec.shape)
        elif spec.role == "running_var" or (spec.kind, spec.role) == ("bn_param", "weight"):
            value = rng.uniform(0.5, 1.5, spec.shape)
        else:
            value = rng.normal(0, 0.1, spec.shape)
        weights[name] = value.astype(dtype)
    return weights


def images(schedule: Schedule, batch: int, seed: int = 0) -> Array:
    """Seeded float32 input of a schedule."""
    shape = (batch, *schedule.input_shape)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bytes_of(schedule: Schedule, batch: int, seed: int = 0) -> Array:
    """Seeded uint8 pixels of a schedule's images, as decoders give them, in the logical order."""
    channels, *extents = schedule.input_shape
    drawn = np.random.default_rng(seed).integers(0, 256, (batch, *extents, channels), np.uint8)
    return drawn.transpose(0, 3, 1, 2)


def compute(op: Op, inputs: Sequence[Array], weights: Sequence[Array]) -> Array:
    """The op's result in the shortest NumPy; logical layouts."""
    x = inputs[0]
    match op:
        case Conv2d():
            groups = zip(np.split(x, op.groups, 1), np.split(weights[0], op.groups), strict=True)
            y = np.concatenate(
                [
                    np.einsum("nchwrs,ocrs->nohw", _windows(part, op, 0.0), own, optimize=True)
                    for part, own in groups
                ],
                axis=1,
            )
            if op.bias:
                y = y + weights[1][:, None, None]
            if op.residual:
                y = y + inputs[1]
            return np.maximum(y, 0) if op.relu else y
        case BatchNorm():
            scale, shift, mean, var = (w[:, None, None] for w in weights)
            return (x - mean) / np.sqrt(var + op.eps) * scale + shift
        case ReLU():
            return np.maximum(x, 0)
        case Add():
            y = x + inputs[1]
            return np.maximum(y, 0) if op.relu else y
        case MaxPool2d():
            return _windows(x, op, -np.inf).max(axis=(4, 5))
        case ConvMaxPool():
            return compute(op.pool, [compute(op.conv, inputs, weights)], ())
        case ConvProjection():
            count = len(op.conv.weights())
            residual = compute(op.projection, inputs[1:], weights[count:])
            return compute(op.conv, [x, residual], weights[:count])
        case GlobalAvgPool():
            return x.mean(axis=(2, 3))
        case Linear():
            return x @ weights[0].T + weights[1]
        case Softmax():
            e = np.exp(x - x.max(axis=1, keepdims=True))
            return e / e.sum(axis=1, keepdims=True)
        case Relayout():
            return x
        case Normalize():
            mean, std = (np.array(v)[:, None, None] for v in (op.mean, op.std))
            return (x / 255 - mean) / std
        case _:
            raise AssertionError(op)


def _windows(x: Array, op: Conv2d | MaxPool2d, fill: float) -> Array:
    (ph, pw), (sh, sw) = op.padding, op.stride
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=fill)
    dh, dw = op.dilation if isinstance(op, Conv2d) else (1, 1)
    span = 1 + dh * (op.kernel_size[0] - 1), 1 + dw * (op.kernel_size[1] - 1)
    windows = sliding_window_view(padded, span, axis=(2, 3))[:, :, ::sh, ::sw]
    return windows[..., ::dh, ::dw]


def run_schedule(schedule: Schedule, weights: Mapping[str, Array], x: Array) -> dict[str, Array]:
    """Every value of a schedule, by `compute`; `weights` are those that its steps name."""
    values = {schedule.input: x}
    for step in schedule.steps:
        values[step.output] = compute(
            step.op, [values[v] for v in step.inputs], [weights[w] for w in step.weights]
        )
    return values


def physical(array: Array, layout: Layout) -> Array:
    """The array in memory order of a layout, from logical order."""
    nhwc = layout is Layout.NHWC and array.ndim == 4
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if nhwc else array


class PoisonedMemory(HostMemory):
    """Host memory whose buffers begin as NaN (bytes of 0xFF), and which remembers them."""

    def __init__(self) -> None:
        self.buffers: list[HostBuffer] = []

    def empty(self, nbytes: int) -> HostBuffer:
        buffer = super().empty(nbytes)
        buffer.array.fill(0xFF)
        self.buffers.append(buffer)
        return buffer


def check_plan(plan: Plan, granule: int) -> dict[str, str]:
    """Play a plan on a map of who owns which bytes; returns the in-place pairs, output → input.

    Asserts that every step reads only bytes that still belong to what it reads, that a workspace
    and an output touch nothing that is read by this step, and that input, output and taps survive
    to the end. Knows nothing of the planner: only steps, tensors and offsets.
    """
    free, arena = -1, np.full(-(-plan.arena_nbytes // granule), -1, np.int32)
    ids = {key: index for index, key in enumerate(plan.tensors)}

    def span(offset: int, nbytes: int) -> slice:
        assert offset % granule == 0, f"offset {offset} is not a multiple of {granule}"
        assert 0 <= offset <= offset + nbytes <= plan.arena_nbytes
        return slice(offset // granule, -(-(offset + nbytes) // granule))

    def place(key: str) -> slice:
        tensor = plan.tensors[key]
        return span(tensor.offset, tensor.nbytes)

    schedule = plan.schedule
    arena[place(schedule.input)] = ids[schedule.input]
    in_place: dict[str, str] = {}
    for step in plan.steps:
        for key in step.inputs:
            assert (arena[place(key)] == ids[key]).all(), f"{step.name} reads {key}, overwritten"
        output, workspace = place(step.output), span(step.workspace_offset, step.workspace_nbytes)
        arena[workspace] = free
        for position, key in enumerate(step.inputs):
            if (arena[place(key)] != ids[key]).any():
                raise AssertionError(f"the workspace of {step.name} overlaps its input {key}")
            if place(key) == output:
                assert step.kernel.in_place, f"{step.name} writes over {key}, not being in place"
                assert position == 0, f"{step.name} writes over its second input"
                in_place[step.output] = key
            else:
                apart = place(key).stop <= output.start or output.stop <= place(key).start
                assert apart, f"the output of {step.name} partly overlaps its input {key}"
        arena[output] = ids[step.output]
        assert (arena[workspace] == free).all(), f"{step.name}: workspace and output overlap"
    taps = (schedule.value_of(tap) for tap in plan.options.taps)
    for value in (schedule.input, schedule.output, *taps):
        assert (arena[place(value)] == ids[value]).all(), f"{value} does not survive the run"
    return in_place


def run_python(
    code: str, *, path: Sequence[Path] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with folders on its path and variables set."""
    full = {name: value for name, value in os.environ.items() if name != "R18_BACKEND"}
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    full["PYTHONPATH"] = os.pathsep.join([*map(str, path), *inherited])
    full["CUDA_VISIBLE_DEVICES"] = ""
    full.update(env or {})
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=full,
        timeout=300,
        check=False,
    )


def output_of(code: str, *, path: Sequence[Path] = (), env: Mapping[str, str] | None = None) -> str:
    """What the code prints; a failure shows its stderr."""
    done = run_python(code, path=path, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def own_time(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]
) -> None:
    """Replace functions of `time` for one module alone.

    Other threads keep theirs: PyTorch's compiler leaves one that sleeps again and again.
    """
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))


def tool_module(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
