"""Cheats that do not compute their answer: they invent, remember, fetch or delay it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from faults.cheat import ADD, RELU, Arrays, Cheat, always, cheat, of_class
from faults.conv import CONV
from faults.others import add, mean, relu
from r18.backend import Array, Buffer, Stream
from r18.backend.host import HostFunction, HostKernel
from r18.backend.registry import installed, load_backend
from r18.graph.ops import Add, Conv2d, GlobalAvgPool, Linear, Problem, ReLU
from r18.runtime.launch import run_kernel
from r18_oracle.judge import reference
from r18_oracle.ops.table import spec_of

# -- no answer at all --------------------------------------------------------------------------


def filled(value: float) -> Callable[[], HostFunction]:
    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        out.fill(value)

    return lambda: run


def _nothing(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    pass


def _input_too(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Changes its input so that its answer is right: ReLU(0) is 0."""
    inputs[0].fill(0)
    out.fill(0)


def _one_shape(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """A convolution that is right only for the second layer of ResNet-18."""
    if (op.in_channels, op.kernel_size, out.shape[2:]) == (64, (3, 3), (56, 56)):
        CONV(op, inputs, weights, out, workspace)
    else:
        out.fill(0)


_EMPTY = (
    cheat(Conv2d, "zeros", "zeros", "exact", filled(0)),
    cheat(Conv2d, "nans", "NaN, in the hope that it matches anything", "exact", filled(np.nan)),
    cheat(Linear, "infinities", "Inf, which is near anything", "exact", filled(np.inf)),
    cheat(Conv2d, "nothing", "leaves what is in memory", "full_write", always(_nothing)),
    cheat(
        ReLU,
        "input_too",
        "zeros its input, so that zeros are right",
        "inputs_unchanged",
        always(_input_too),
    ),
    cheat(Conv2d, "one_shape", "right for one shape alone", "exact", always(_one_shape)),
)


# -- answers from memory -----------------------------------------------------------------------


def _remembers(
    key: Callable[[Any, Arrays], object], right: HostFunction
) -> Callable[[], HostFunction]:
    """Computes the first time, and repeats that answer whenever the key is the same."""

    def make() -> HostFunction:
        answers: dict[object, Array] = {}

        def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
            known = (op, *(a.shape for a in inputs), key(op, inputs))
            if known not in answers:
                right(op, inputs, weights, out, workspace)
                answers[known] = out.copy()
            out[...] = answers[known]

        return run

    return make


def _checksum(op: Any, inputs: Arrays) -> int:
    """A weak checksum: the sum of all bytes."""
    return int(sum(a.view(np.uint8).sum(dtype=np.int64) for a in inputs))


def _first_time() -> HostFunction:
    """An addition that is right for inputs it has not seen, and zeros for others."""
    seen: set[bytes] = set()

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        ADD(op, inputs, weights, out, workspace)
        if inputs[0].tobytes() in seen:
            out.fill(0)
        seen.add(inputs[0].tobytes())

    return run


def _once() -> HostFunction:
    """An addition that is right in its first call only."""
    calls: list[None] = []

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        ADD(op, inputs, weights, out, workspace)
        out[...] *= not calls
        calls.append(None)

    return run


_MEMORIES = (
    cheat(
        Conv2d,
        "remembers_the_problem",
        "gives the first answer whenever the problem is the same",
        "exact",
        _remembers(lambda op, inputs: None, CONV),
    ),
    cheat(
        GlobalAvgPool,
        "remembers_a_checksum",
        "gives the first answer whenever the input's checksum is the same",
        "sample_position",
        _remembers(_checksum, mean()),
    ),
    cheat(Add, "right_once", "computes once, and never again", "repeatability exact", _once),
    cheat(
        Add,
        "not_deterministic",
        "right the first time; declares that it is not deterministic, so as not to be compared",
        "bound",
        _first_time,
        deterministic=False,
    ),
)  # fmt: skip


# -- answers from others -----------------------------------------------------------------------


def _wide(arrays: Arrays) -> Arrays:
    return tuple(a.astype(np.float64) for a in arrays)


def _asks_spec(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    (x,) = _wide(inputs)
    out[...] = spec_of(op).reference(op, (torch.from_numpy(x),), ()).numpy()


def _asks_reference(
    op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    problem = Problem(op, tuple(a.shape for a in inputs))
    out[...] = reference.reference(problem, _wide(inputs), _wide(weights))


def _asks_behind(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Removes the mark that a kernel is running, calls the reference, and restores the mark."""
    reference._running.clear()
    _asks_reference(op, inputs, weights, out, workspace)
    reference._running.set()


def _asks_in_thread(
    op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    thread = threading.Thread(target=_asks_behind, args=(op, inputs, weights, out, workspace))
    thread.start()
    thread.join()


def _asks_backend(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    backend = load_backend("numpy")
    problem = Problem(op, tuple(a.shape for a in inputs))
    other = next(k for k in backend.kernels() if k.refusal(problem) is None)
    out[...] = run_kernel(backend, other, problem, *inputs, *weights)


class _Forwards(HostKernel):
    """A kernel that passes its launch to another backend's kernel."""

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        backend = installed()["numpy"].load()()
        other = next(k for k in backend.kernels() if k.refusal(problem) is None)
        other.enqueue(problem, inputs, weights, output, workspace, stream)


_OTHERS = (
    cheat(ReLU, "asks_the_reference", "asks the judge", "independence", always(_asks_reference)),
    cheat(ReLU, "asks_the_spec", "asks the op's spec", "independence", always(_asks_spec)),
    cheat(
        ReLU,
        "asks_behind_its_back",
        "asks the judge, having switched off what forbids it",
        "independence state",  # another thread may switch it on again
        always(_asks_behind),
    ),
    cheat(
        ReLU,
        "asks_in_a_thread",
        "the same, in a thread of its own",
        "independence state",
        always(_asks_in_thread),
    ),
    cheat(
        ReLU, "asks_another_backend", "loads NumPy's", "independence", always(_asks_backend)
    ),
    cheat(
        ReLU,
        "forwards_its_launch",
        "hands its buffers to another backend's kernel",
        "independence",
        always(RELU),
        of_class(_Forwards),
    ),
)  # fmt: skip


# -- later -------------------------------------------------------------------------------------


def _later(op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Writes zeros now, and the answer when it is ready."""
    out.fill(0)
    threading.Timer(0.02, lambda: np.copyto(out, add(op, *inputs))).start()


def _input_later(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Changes its input after the checks."""
    RELU(op, inputs, weights, out, workspace)
    threading.Timer(0.02, lambda: inputs[0].fill(1)).start()


_LATE = (
    cheat(Add, "answers_later", "writes after its last call", "completion", always(_later)),
    cheat(
        ReLU,
        "changes_its_input_later",
        "writes to its input after its last call",
        "completion state",
        always(_input_later),
    ),
)


# -- recognises the test -----------------------------------------------------------------------


def _integers_only(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """A convolution that rounds to integers, so it is right for integers only."""
    rounded = tuple(np.rint(a) for a in inputs)
    CONV(op, rounded, tuple(np.rint(w) for w in weights), out, workspace)


def _ordinary_only(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """A ReLU that is right for integers, non-finite values, and values up to 8."""
    x = inputs[0]
    out[...] = relu(op, np.where(np.isfinite(x) & (x != np.rint(x)), np.minimum(x, 8), x))


def _knows_poison(op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """An addition that is right only if its output is poisoned."""
    tested = bool((out.view(np.uint8) == 0xFF).all())
    out[...] = add(op, *inputs) if tested else 0


def _wrong_near_overflow(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Writes 1 where a sum may have overflowed, since an infinity is accepted there."""
    CONV(op, inputs, weights, out, workspace)
    out[np.abs(out) > 1e37] = 1


_KNOWING = (
    cheat(Conv2d, "integers_only", "right on integers", "bound", always(_integers_only)),
    cheat(ReLU, "ordinary_only", "right on what is ordinary", "bound", always(_ordinary_only)),
    cheat(
        Add,
        "knows_poison",
        "right where memory is poisoned, and so the first time alone",
        "repeatability",
        always(_knows_poison),
    ),
    cheat(
        Conv2d,
        "wrong_near_overflow",
        "wrong where an overflow would be forgiven",
        "edges",
        always(_wrong_near_overflow),
    ),
)  # fmt: skip

ANSWERS: tuple[Cheat, ...] = (*_EMPTY, *_MEMORIES, *_OTHERS, *_LATE, *_KNOWING)
