"""Kernels right in a fresh process's first call, wrong after another: caches, shared scratch.

Each is built around a correct kernel; the twins hold the same state with complete keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from faults.conv import CONV, linear
from faults.fault import Fault, PlantedKernel, kernel
from faults.others import of_inputs, relu
from r18.backend import Array, Buffer
from r18.backend.host import HostFunction, PackedWeight
from r18.graph.ops import BatchNorm, Conv2d, Linear, Problem, ReLU
from r18_oracle.check.turns import blas_threads

Arrays = tuple[Array, ...]
Key = Callable[[Any, Arrays, Arrays], Hashable]


def _shapes(inputs: Arrays, weights: Arrays) -> Hashable:
    return tuple(a.shape for a in (*inputs, *weights))


def _without(**fields: Any) -> Key:
    """A key of everything that a session depends on, except for these fields of the op."""

    def key(op: Any, inputs: Arrays, weights: Arrays) -> Hashable:
        return replace(op, **fields), _shapes(inputs, weights)

    return key


def _session(key: Key, right: HostFunction = CONV) -> HostFunction:
    """Repeats the op of the first call with this key, like a runtime that compiles sessions."""
    sessions: dict[Hashable, Any] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        right(sessions.setdefault(key(op, inputs, weights), op), inputs, weights, out, workspace)

    return run


def _kept(key: Key, right: HostFunction) -> HostFunction:
    """Uses the weights of the first call with this key, as if packed then."""
    packed: dict[Hashable, Arrays] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        found = packed.setdefault(key(op, inputs, weights), tuple(w.copy() for w in weights))
        right(op, inputs, found, out, workspace)

    return run


def _batchnorm(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    weight, bias, mean, var = (w[:, None, None] for w in weights)
    out[...] = (inputs[0] - mean) / np.sqrt(var + np.float32(op.eps)) * weight + bias


def _results_of_addresses() -> HostFunction:
    """Keeps a result per input buffer, which is right as long as each buffer is used once."""
    results: dict[Hashable, Array] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        key = inputs[0].ctypes.data, inputs[0].shape, weights[0].tobytes()
        linear(op, inputs, weights, out, workspace)
        out[...] = results.setdefault(key, out.copy())

    return run


def _sessions_of_sizes() -> HostFunction:
    """Keeps a session per number of elements, whatever their shape."""
    ranks: dict[int, int] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        out[...] = relu(op, inputs[0])
        if ranks.setdefault(out.size, out.ndim) != out.ndim:
            out += 1

    return run


def _shared_scratch(scratch: Callable[[Array], Array]) -> HostFunction:
    """A ReLU in its own scratch, which each call fills again."""

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        mine = scratch(inputs[0])
        mine[...] = inputs[0]
        np.maximum(mine, 0, out=mine)
        out[...] = mine

    return run


def _sized_by_output() -> HostFunction:
    """Reads as much of the image as the first call with this output did."""
    sizes: dict[Hashable, tuple[int, ...]] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        x = inputs[0]
        size = sizes.setdefault((op, out.shape, weights[0].shape), x.shape)
        seen = np.zeros(size, x.dtype)
        both = tuple(slice(min(extents)) for extents in zip(size, x.shape, strict=True))
        seen[both] = x[both]
        CONV(op, (seen, *inputs[1:]), weights, out, workspace)

    return run


def _dense_by_shape() -> HostFunction:
    """Expands grouped weights in an array that it keeps by the dense weight's shape."""
    wholes: dict[Hashable, Array] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        outputs, channels = op.out_channels // op.groups, op.group_channels
        shape = (op.out_channels, op.in_channels, *op.kernel_size)
        whole = wholes.setdefault(shape, np.zeros(shape, np.float32))
        for group in range(op.groups):
            rows = slice(group * outputs, (group + 1) * outputs)
            whole[rows, group * channels : (group + 1) * channels] = weights[0][rows]
        CONV(replace(op, groups=1), inputs, (whole, *weights[1:]), out, workspace)

    return run


def _one_for_all() -> Callable[[Array], Array]:
    made: dict[Hashable, Array] = {}
    return lambda x: made.setdefault(x.shape, np.empty_like(x))


def _two_in_turn() -> Callable[[Array], Array]:
    made: dict[int, Array] = {}
    turns = count()

    def scratch(x: Array) -> Array:
        slot = next(turns) % 2
        if slot not in made or made[slot].size < x.size:
            made[slot] = np.empty(x.size, x.dtype)
        return made[slot][: x.size].reshape(x.shape)

    return scratch


def _one_per_thread() -> Callable[[Array], Array]:
    local = threading.local()

    def scratch(x: Array) -> Array:
        made: dict[Hashable, Array] = local.__dict__.setdefault("made", {})
        return made.setdefault(x.shape, np.empty_like(x))

    return scratch


def _part_per_thread(
    op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Works in a copy of the input for each of BLAS's current threads."""
    for index in range(blas_threads()):
        mine = workspace[index * out.nbytes :][: out.nbytes].view(out.dtype)
        mine[...] = np.maximum(inputs[0].reshape(-1), 0)
    out.reshape(-1)[...] = mine


def _copies(problem: Problem) -> int:
    return 4 * blas_threads() * int(np.prod(problem.output))


@dataclass(frozen=True, eq=False)
class _Prepares(PlantedKernel):
    """Halves the weights while it prepares, in the caller's array if that is float32 already."""

    def prepare(self, problem: Problem, weights: Arrays) -> tuple[Buffer, ...]:
        weight = np.asarray(weights[0], np.float32)
        weight *= np.float32(0.5)
        prepared = super().prepare(problem, weights)
        return (PackedWeight.of(weight), *prepared[1:])


def _twice(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    linear(op, inputs, (weights[0] * np.float32(2), *weights[1:]), out, workspace)


@dataclass(frozen=True, eq=False)
class _PacksIntoOne(PlantedKernel):
    """Packs the weights of every program of a shape into one buffer."""

    def prepare(self, problem: Problem, weights: Arrays) -> tuple[Buffer, ...]:
        prepared = super().prepare(problem, weights)
        shape = weights[0].shape
        buffer = _PACKED.setdefault(shape, prepared[0])
        buffer.array[...] = prepared[0].array  # type: ignore[attr-defined]
        return (buffer, *prepared[1:])


_PACKED: dict[Hashable, Any] = {}


@dataclass(frozen=True, eq=False)
class _PacksInScratch(PlantedKernel):
    """Packs the weights of every program of a shape in one scratch, and copies from there."""

    def prepare(self, problem: Problem, weights: Arrays) -> tuple[Buffer, ...]:
        scratch = _SCRATCH.setdefault(weights[0].shape, np.empty(weights[0].shape, np.float32))
        scratch[...] = weights[0]
        return super().prepare(problem, (scratch, *weights[1:]))


_SCRATCH: dict[Hashable, Array] = {}


@dataclass(frozen=True, eq=False)
class _KeyedByArray(PlantedKernel):
    """Prepares the weights of an array only the first time it sees the array."""

    def prepare(self, problem: Problem, weights: Arrays) -> tuple[Buffer, ...]:
        key = id(weights[0]), weights[0].ctypes.data, weights[0].shape
        if key not in _SEEN:
            _SEEN[key] = super().prepare(problem, weights), weights
        return _SEEN[key][0]


_SEEN: dict[Hashable, Any] = {}


def _own(kind: type[PlantedKernel], op: type[Any], name: str, run: HostFunction) -> PlantedKernel:
    plain = kernel("fault", op, name, run)
    return kind(plain.backend, op, name, plain.precision, plain.contract, run)


def _fault(made: PlantedKernel, wrong: str, checks: tuple[str, ...] = ("state",)) -> Fault:
    return Fault(made, wrong, checks)


def _planted(op: type[Any], name: str, wrong: str, run: HostFunction, **options: Any) -> Fault:
    return _fault(kernel("fault", op, name, run, **options), wrong)


def planted() -> tuple[Fault, ...]:
    """The faults, with nothing in their caches."""
    _PACKED.clear()
    _SEEN.clear()
    _SCRATCH.clear()
    return (
        _planted(
            Conv2d,
            "session_without_stride",
            "keeps sessions by everything but the stride",
            _session(_without(stride=(1, 1))),
        ),
        _planted(
            Conv2d,
            "session_of_vertical_stride",
            "keeps sessions by the vertical stride only",
            _session(lambda op, x, w: (replace(op, stride=(op.stride[0], 1)), _shapes(x, w))),
        ),
        _planted(
            Conv2d,
            "session_without_relu",
            "keeps sessions by everything but the ReLU",
            _session(_without(relu=False)),
        ),
        _planted(
            Conv2d,
            "session_without_padding",
            "keeps sessions by everything but the padding",
            _session(_without(padding=(0, 0))),
        ),
        _planted(
            Conv2d,
            "session_without_image",
            "keeps sessions by the size of the output, not by that of the image",
            _sized_by_output(),
        ),
        _planted(
            Conv2d,
            "dense_weight_by_shape",
            "expands grouped weights in an array that it keeps by its shape",
            _dense_by_shape(),
            extras=frozenset({"groups"}),
        ),
        _planted(
            BatchNorm,
            "session_without_eps",
            "keeps sessions by everything but eps",
            _session(_without(eps=1.0), _batchnorm),
        ),
        _planted(
            Linear,
            "packed_by_id",
            "keeps packed weights by the id of their array",
            _kept(lambda op, x, w: (id(w[0]), op), linear),
        ),
        _planted(
            Linear,
            "packed_by_address",
            "keeps packed weights by their address",
            _kept(lambda op, x, w: (w[0].ctypes.data, op), linear),
        ),
        _fault(
            kernel("fault", Linear, "packed_by_shape", _kept(lambda op, x, w: op, linear)),
            "keeps packed weights by their shape",
            ("state", "exact"),  # the second kind of input already shows it
        ),
        _planted(
            Linear,
            "results_by_address",
            "keeps results by the address of the input",
            _results_of_addresses(),
        ),
        _fault(
            kernel("fault", ReLU, "session_of_sizes", _sessions_of_sizes()),
            "keeps sessions by the number of elements",
            ("exact",),  # images and features of one size: no scenario has both
        ),
        _planted(
            ReLU,
            "scratch_of_all_programs",
            "works in scratch that two programs in two threads share",
            _shared_scratch(_one_for_all()),
        ),
        _planted(
            ReLU,
            "scratch_for_two_threads",
            "works in one of two scratch buffers, whichever was not the last",
            _shared_scratch(_two_in_turn()),
        ),
        _planted(
            ReLU,
            "workspace_of_planned_threads",
            "needs a workspace for the threads of the call and asks for that of the planning",
            _part_per_thread,
            scratch=_copies,
        ),
        _fault(
            _own(_Prepares, Linear, "weights_halved", _twice),
            "changes float32 weights while it prepares them",
        ),
        _fault(
            _own(_PacksIntoOne, Linear, "packed_into_one", linear),
            "packs the weights of all programs of a shape into one buffer",
        ),
        _fault(
            _own(_PacksInScratch, Linear, "packed_in_scratch", linear),
            "packs weights in scratch that two preparing threads share",
        ),
        _fault(
            _own(_KeyedByArray, Linear, "prepared_by_array", linear),
            "prepares an array of weights once, whatever it holds later",
        ),
    )


FAULTS = planted()
TWINS = (
    kernel("twin", Linear, "session", _session(_without(), linear)),
    kernel("twin", BatchNorm, "session", _session(_without(), _batchnorm)),
    kernel(
        "twin",
        Linear,
        "packed_by_value",
        _kept(lambda op, x, w: (op, *(a.tobytes() for a in w)), linear),
    ),
    kernel("twin", ReLU, "scratch_per_thread", _shared_scratch(_one_per_thread())),
    kernel("twin", ReLU, "plain", of_inputs(relu)),
)
"""The same kernels, with state that is keyed by all that it depends on."""
