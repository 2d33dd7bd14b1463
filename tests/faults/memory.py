"""Kernels with right numbers that misuse memory or time, or break their declarations."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from faults.conv import CONV, linear
from faults.fault import Fault, fault, kernel
from faults.others import add, of_inputs, relu
from r18.backend import Array
from r18.backend.host import HostFunction
from r18.graph.ops import Add, Conv2d, GlobalAvgPool, Linear, Problem, ReLU

Arrays = tuple[Array, ...]
RELU = of_inputs(relu)


def then(
    right: HostFunction, wrong: Callable[[Arrays, Arrays, Array, Array], None]
) -> HostFunction:
    """A correct kernel that then calls `wrong(inputs, weights, out, workspace)`."""

    def run(op: object, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        right(op, inputs, weights, out, workspace)
        wrong(inputs, weights, out, workspace)

    return run


# -- what is not written -----------------------------------------------------------------------


def whole(extent: int, tile: int) -> int:
    """The part of an extent that whole tiles cover; all of it where there is no whole tile."""
    return extent // tile * tile or extent


def _last_columns_left(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    width = whole(out.shape[3], 8)
    out[..., :width] = CONV.result(op, inputs, weights, out)[..., :width]


def _last_columns_zero(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    CONV(op, inputs, weights, out, workspace)
    out[..., whole(out.shape[3], 16) :] = 0


def _last_channels_left(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    channels = whole(out.shape[1], 4)
    out[:, :channels] = CONV.result(op, inputs, weights, out)[:, :channels]


def _tail_left(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    size = whole(out.size, 4)
    out.reshape(-1)[:size] = relu(op, inputs[0]).reshape(-1)[:size]


def _large_wrong(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    CONV(op, inputs, weights, out, workspace)
    out[:, 32:] = out[:, : max(0, out.shape[1] - 32)]


def _second_tile_wrong(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    CONV(op, inputs, weights, out, workspace)
    out[:, :, :, 16:17] = out[:, :, :, :1][..., : max(0, min(1, out.shape[3] - 16))]


_UNWRITTEN = (
    fault(
        Conv2d,
        "last_columns_unwritten",
        "columns beyond a multiple of 8 are not written",
        "full_write",
        _last_columns_left,
        edges=(8,),
    ),
    fault(
        Conv2d,
        "last_columns_zero",
        "columns beyond a multiple of 16 are zero",
        "exact",
        _last_columns_zero,
        edges=(16,),
    ),
    fault(
        Conv2d,
        "last_channels_unwritten",
        "output channels beyond a multiple of 4 are not written",
        "full_write",
        _last_channels_left,
        edges=(4,),
    ),
    fault(
        ReLU,
        "tail_unwritten",
        "elements beyond a multiple of 4 are not written",
        "full_write",
        _tail_left,
        edges=(4,),
    ),
    fault(
        Conv2d,
        "wrong_beyond_32_channels",
        "the second tile of 32 output channels holds the first again",
        "exact",
        _large_wrong,
        edges=(32,),
    ),
    fault(
        Conv2d,
        "wrong_at_17_columns",
        "the first column of the second tile of 16 is that of the first tile",
        "exact",
        _second_tile_wrong,
        edges=(16,),
    ),
)


# -- what is read that should not be -----------------------------------------------------------


def _accumulates(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out += CONV.result(op, inputs, weights, out)


def _padded_nbytes(problem: Problem) -> int:
    assert isinstance(problem.op, Conv2d)
    n, c, h, w = problem.inputs[0]
    ph, pw = problem.op.padding
    return 4 * n * c * (h + 2 * ph) * (w + 2 * pw)


def _stale_border(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Pads in the workspace, whose border it expects to be zero already."""
    (n, c, h, w), (ph, pw) = inputs[0].shape, op.padding
    padded = workspace.view(np.float32).reshape(n, c, h + 2 * ph, w + 2 * pw)
    padded[:, :, ph : ph + h, pw : pw + w] = inputs[0]
    unpadded = Conv2d(
        op.in_channels,
        op.out_channels,
        op.kernel_size,
        op.stride,
        (0, 0),
        op.bias,
        op.residual,
        op.relu,
    )
    CONV(unpadded, (padded, *inputs[1:]), weights, out, workspace)


def _beyond_the_input(
    op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Reads features four at a time, and so past the input's end."""
    n, k = inputs[0].shape
    wide = -(-k // 4) * 4
    rows = np.lib.stride_tricks.as_strided(inputs[0], (n, wide), inputs[0].strides)
    w = np.pad(weights[0], ((0, 0), (0, wide - k)), constant_values=1e-6)
    out[...] = rows @ w.T + weights[1]


def _look_past(array: Array) -> None:
    """Read a cache line beyond an array, without using it."""
    ctypes.string_at(array.ctypes.data + array.nbytes, 64)


def _reads_after_writing(
    op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    np.copyto(out, inputs[1])
    out += inputs[0]
    np.copyto(out, relu(ReLU(), out) if op.relu else out)


_STALE = (
    fault(
        Conv2d,
        "accumulates_on_output",
        "adds to what the output holds",
        "stale_memory",
        _accumulates,
    ),
    fault(
        Conv2d,
        "stale_border",
        "takes the workspace's border for zeros",
        "stale_memory",
        _stale_border,
        scratch=_padded_nbytes,
    ),
    fault(
        Linear,
        "reads_beyond_the_input",
        "reads a vector of 4 where less is left, with weights that are not quite zero",
        "stale_memory exact",
        _beyond_the_input,
        edges=(4,),
    ),
    fault(
        ReLU,
        "looks_past_its_input",
        "reads a vector beyond its input, and uses nothing of it",
        "fences",
        then(RELU, lambda x, w, out, scratch: _look_past(x[0])),
    ),
    fault(
        Linear,
        "looks_past_its_weights",
        "reads a vector beyond its weights, and uses nothing of it",
        "fences",
        then(linear, lambda x, w, out, scratch: _look_past(w[0])),
    ),
    fault(
        Add,
        "reads_after_writing",
        "declares that it works in place, and reads its input after writing its output",
        "in_place",
        _reads_after_writing,
        in_place=True,
    ),
)  # fmt: skip


# -- what is written that should not be --------------------------------------------------------


def _poke(array: Array, offset: int, nbytes: int = 4) -> None:
    """Zero bytes at an offset from an array's start, even outside it."""
    ctypes.memset(array.ctypes.data + offset, 0, nbytes)


def overwrite(array: Array) -> None:
    """Zero the first non-zero byte of a read-only array."""
    flat = array.reshape(-1).view(np.uint8)
    used = np.flatnonzero(flat)
    if used.size:
        _poke(flat, int(used[0]), 1)


_WRITES = (
    fault(
        Conv2d,
        "writes_past_the_end",
        "one element beyond the output",
        "guard_zones",
        then(CONV, lambda x, w, out, scratch: _poke(out, out.nbytes)),
    ),
    fault(
        ReLU,
        "writes_before_the_beginning",
        "one element before the output",
        "guard_zones",
        then(RELU, lambda x, w, out, scratch: _poke(out, -4)),
    ),
    fault(
        Conv2d,
        "writes_past_its_workspace",
        "one byte more of the workspace than it asked for",
        "guard_zones",
        then(CONV, lambda x, w, out, scratch: _poke(scratch, scratch.nbytes, 1)),
        scratch=lambda problem: 100,
    ),
    fault(
        ReLU,
        "writes_to_a_workspace_of_no_bytes",
        "one element of a workspace that it did not ask for",
        "guard_zones",
        then(RELU, lambda x, w, out, scratch: _poke(scratch, 0)),
    ),
    fault(
        Add,
        "writes_before_its_input",
        "one element before its first input",
        "guard_zones",
        then(of_inputs(add), lambda x, w, out, scratch: _poke(x[0], -4)),
    ),
    fault(
        Conv2d,
        "writes_one_image_too_far",
        "an image beyond the last of the batch",
        "guard_zones",
        then(CONV, lambda x, w, out, scratch: _poke(out, out.nbytes, out[0].nbytes)),
    ),
    fault(
        ReLU,
        "input_overwritten",
        "the first pixel that is not zero is changed",
        "inputs_unchanged",
        then(RELU, lambda x, w, out, scratch: overwrite(x[0])),
    ),
    fault(
        Conv2d,
        "weight_overwritten",
        "the first weight that is not zero is changed",
        "inputs_unchanged",
        then(CONV, lambda x, w, out, scratch: overwrite(w[0])),
    ),
)


# -- time --------------------------------------------------------------------------------------


def _later(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """Returns at once, while work that no stream knows is still running."""

    def work() -> None:
        time.sleep(0.005)
        out[...] = relu(op, inputs[0])

    threading.Thread(target=work).start()


def _changing_order() -> HostFunction:
    """Sums in another order in each call, as atomic additions may."""
    calls: Iterator[int] = count()

    def run(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        x, w = inputs[0], weights[0]
        order = np.roll(np.arange(op.in_channels), next(calls))
        CONV(op, (x[:, order], *inputs[1:]), (w[:, order], *weights[1:]), out, workspace)

    return run


def _one_order_after_the_other() -> HostFunction:
    forth: Iterator[int] = count()

    def run(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        step = 1 if next(forth) % 2 else -1
        out[...] = _in_order(inputs[0], weights[0], step) + weights[1]

    return run


def _in_order(x: Array, w: Array, step: int) -> Array:
    """x·wᵀ, one product after the other, forwards or backwards."""
    y = np.zeros((len(x), len(w)), x.dtype)
    for k in range(x.shape[1])[::step]:
        y += x[:, k, None] * w[None, :, k]
    return y


_TIMING = (
    fault(
        ReLU,
        "synchronisation_dropped",
        "the work goes on after synchronize has returned",
        "completion",
        _later,
    ),
    fault(
        Conv2d,
        "changing_order",
        "sums in another order in each call, and declares that it is deterministic",
        "repeatability",
        _changing_order(),
    ),
    fault(
        Linear,
        "depends_on_the_previous_call",
        "every other call sums from the other end",
        "repeatability",
        _one_order_after_the_other(),
    ),
    fault(
        Add,
        "begins_early",
        "reads and writes before what was enqueued before it has ended",
        "order",
        of_inputs(add),
        hasty=True,
    ),
)


# -- batches -----------------------------------------------------------------------------------


def _mean_of(x: Array, step: int) -> Array:
    flat = x.reshape(*x.shape[:2], -1)[..., ::step]
    y = np.zeros(x.shape[:2], x.dtype)
    for index in range(flat.shape[2]):
        y += flat[..., index]
    return np.asarray(y / x.dtype.type(flat.shape[2]))


def _order_by_batch(
    op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    out[...] = _mean_of(inputs[0], -1 if len(inputs[0]) > 1 else 1)


def _order_by_position(
    op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """The first and last sample are summed forwards, the others backwards."""
    out[...] = _mean_of(inputs[0], 1)
    out[1:-1] = _mean_of(inputs[0], -1)[1:-1]


_BATCHES = (
    fault(
        GlobalAvgPool,
        "order_by_batch",
        "declares batch invariance, and sums in another order for one sample alone",
        "batch_invariance",
        _order_by_batch,
        batch_invariant=True,
    ),
    fault(
        GlobalAvgPool,
        "order_by_position",
        "declares batch invariance, and sums the samples in the middle in another order",
        "sample_position",
        _order_by_position,
        batch_invariant=True,
    ),
)


# -- what it says ------------------------------------------------------------------------------


def _every_other() -> Callable[[Problem], str | None]:
    turn: Iterator[int] = count()
    return lambda problem: "not now" if next(turn) % 2 else None


def _ever_more() -> Callable[[Problem], int]:
    turn: Iterator[int] = count(64)
    return lambda problem: next(turn)


def _even_only(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """A ReLU that needs even sizes, without declaring it."""
    if out.size % 2:
        raise ValueError("the size must be even")
    RELU(op, inputs, weights, out, workspace)


_WORDS = (
    fault(
        ReLU,
        "refuses_every_other_time",
        "refuses a problem, and takes it when asked again",
        "refusal",
        RELU,
        refuses=_every_other(),
    ),
    fault(
        ReLU,
        "workspace_grows",
        "asks for another workspace each time",
        "refusal",
        RELU,
        scratch=_ever_more(),
    ),
    fault(ReLU, "raises_on_odd_sizes", "raises, and has not refused", "runs", _even_only),
)

FAULTS: tuple[Fault, ...] = (
    *_UNWRITTEN,
    *_STALE,
    *_WRITES,
    *_TIMING,
    *_BATCHES,
    *_WORDS,
)
TWINS = (
    kernel(
        "twin",
        GlobalAvgPool,
        "in_order",
        of_inputs(lambda op, x: _mean_of(x, 1)),
        batch_invariant=True,
    ),
    kernel(
        "twin",
        Linear,
        "in_order",
        lambda op, x, w, out, scratch: np.copyto(out, _in_order(x[0], w[0], 1) + w[1]),
        batch_invariant=True,
    ),
    kernel("twin", Conv2d, "with_workspace", then(CONV, lambda *_: None), scratch=lambda p: 100),
)
"""Kernels made from the same parts, without a fault."""

__all__ = ["FAULTS", "RELU", "TWINS", "linear", "then"]
