"""Ops that are not sums of products, wrong in one place each.

Every op is a function of whole arrays here: a formula. A fault changes one of its terms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.backend.host import HostFunction
from r18.graph.ops import (
    Add,
    BatchNorm,
    GlobalAvgPool,
    Layout,
    MaxPool2d,
    Op,
    Relayout,
    ReLU,
    Softmax,
)

Arrays = tuple[Array, ...]


def of_inputs(formula: Callable[..., Array]) -> HostFunction:
    """`out = formula(op, *inputs)`."""

    def run(op: Op, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        out[...] = formula(op, *inputs)

    return run


# -- BatchNorm ---------------------------------------------------------------------------------

Formula = Callable[[Array, Array, Array, Array, Array, np.float32], Array]


def normalise(formula: Formula) -> HostFunction:
    """`out = formula(x, weight, bias, mean, variance, eps)`; parameters broadcast over x."""

    def run(op: BatchNorm, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        w, b, m, v = (p[:, None, None] for p in weights)
        out[...] = formula(inputs[0], w, b, m, v, np.float32(op.eps))

    return run


def batchnorm(x: Array, w: Array, b: Array, m: Array, v: Array, eps: np.float32) -> Array:
    """BatchNorm as the op defines it."""
    y: Array = (x - m) / np.sqrt(v + eps) * w + b
    return y


def _bn(name: str, wrong: str, formula: Formula) -> Fault:
    return fault(BatchNorm, name, wrong, "bound", normalise(formula))


_BATCHNORM = (
    _bn(
        "eps_outside_root",
        "eps is added to the deviation, not to the variance",
        lambda x, w, b, m, v, eps: (x - m) / (np.sqrt(v) + eps) * w + b,
    ),
    _bn(
        "eps_missing",
        "no eps",
        lambda x, w, b, m, v, eps: (x - m) / np.sqrt(v) * w + b,
    ),
    _bn(
        "eps_of_another_framework",
        "eps is always 0.001",
        lambda x, w, b, m, v, eps: batchnorm(x, w, b, m, v, np.float32(1e-3)),
    ),
    _bn(
        "variance_as_deviation",
        "divides by the variance, without a root",
        lambda x, w, b, m, v, eps: (x - m) / (v + eps) * w + b,
    ),
    _bn(
        "mean_ignored",
        "the mean is not subtracted",
        lambda x, w, b, m, v, eps: x / np.sqrt(v + eps) * w + b,
    ),
    _bn(
        "mean_after_scale",
        "the mean is subtracted after the scaling",
        lambda x, w, b, m, v, eps: x / np.sqrt(v + eps) * w - m + b,
    ),
    _bn(
        "weight_and_bias_swapped",
        "scales by the bias and adds the weight",
        lambda x, w, b, m, v, eps: batchnorm(x, b, w, m, v, eps),
    ),
    _bn(
        "channel_off_by_one",
        "channel c is scaled by the weight of channel c + 1",
        lambda x, w, b, m, v, eps: batchnorm(x, np.roll(w, -1, axis=0), b, m, v, eps),
    ),
)


# -- ReLU, Add, Relayout -----------------------------------------------------------------------


def relu(op: Op, x: Array) -> Array:
    return np.maximum(x, 0)


def add(op: Add, a: Array, b: Array) -> Array:
    """Addition as the op defines it."""
    return np.maximum(a + b, 0) if op.relu else a + b


def relayout(op: Relayout, x: Array) -> Array:
    forth = (op.source, op.target) == (Layout.NCHW, Layout.NHWC)
    back = (op.source, op.target) == (Layout.NHWC, Layout.NCHW)
    return x.transpose((0, 2, 3, 1) if forth else (0, 3, 1, 2) if back else (0, 1, 2, 3))


def _by_columns(op: Relayout, x: Array) -> Array:
    height = 2 if op.source is Layout.NCHW else 1
    return np.swapaxes(x, height, height + 1).reshape(x.shape)


_POINTWISE = (
    fault(ReLU, "identity", "does nothing", "exact", of_inputs(lambda op, x: x)),
    fault(ReLU, "absolute", "takes the absolute value", "exact", of_inputs(lambda op, x: abs(x))),
    fault(
        ReLU,
        "leaky",
        "lets a hundredth of the negative through",
        "exact",
        of_inputs(lambda op, x: np.maximum(x, x * np.float32(0.01))),
    ),
    fault(
        ReLU, "capped", "clamps at 6 too", "exact", of_inputs(lambda op, x: np.clip(x, 0, 6))
    ),
    fault(
        ReLU,
        "swallows_nan",
        "ReLU(NaN) is 0",
        "edges",
        of_inputs(lambda op, x: np.where(x > 0, x, 0)),
    ),
    fault(
        ReLU,
        "loses_subnormals",
        "subnormal numbers become 0",
        "edges",
        of_inputs(lambda op, x: np.where(x < np.float32(2.0**-126), 0, x)),
    ),
    fault(Add, "subtracts", "subtracts", "exact", of_inputs(lambda op, a, b: add(op, a, -b))),
    fault(
        Add, "first_input_twice", "adds a to a", "exact", of_inputs(lambda op, a, b: add(op, a, a))
    ),
    fault(Add, "relu_ignored", "never clamps", "exact", of_inputs(lambda op, a, b: a + b)),
    fault(
        Add, "relu_always", "always clamps", "exact", of_inputs(lambda op, a, b: relu(op, a + b))
    ),
    fault(
        Relayout,
        "not_moved",
        "copies as if source and target were the same",
        "exact",
        of_inputs(lambda op, x: x.reshape(relayout(op, x).shape)),
    ),
    fault(
        Relayout,
        "height_and_width_swapped",
        "walks the image column by column",
        "exact",
        of_inputs(lambda op, x: relayout(op, _by_columns(op, x))),
    ),
)  # fmt: skip


# -- pooling -----------------------------------------------------------------------------------


def pool(
    outside: float = -np.inf,
    larger: Callable[[Array, Array], Array] = np.maximum,
    first: int = 0,
    flipped: bool = False,
) -> HostFunction:
    """Max-pooling as the op defines it, or with other parameters.

    outside: the value of padding. larger: the maximum of two. first: the tap to begin with.
    flipped: strides are taken in the wrong order.
    """

    def run(op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        (kh, kw), (ph, pw) = op.kernel_size, op.padding
        sh, sw = op.stride[::-1] if flipped else op.stride
        oh, ow = out.shape[2:]
        # Padded so far on the right that every window fits, whatever the stride.
        edges = ((0, 0), (0, 0), (ph, ph + (oh + 1) * sh), (pw, pw + (ow + 1) * sw))
        x = np.pad(inputs[0], edges, constant_values=outside)
        taps = [
            x[:, :, r : r + oh * sh : sh, s : s + ow * sw : sw]
            for r in range(min(first, kh - 1), kh)
            for s in range(kw)
        ]
        out[...] = reduce(larger, taps)

    return run


def _far_aligned(
    op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Windows aligned at the far end, as if the output's size were rounded up."""
    rest = [
        (extent + 2 * p - k) % s
        for extent, p, k, s in zip(
            inputs[0].shape[2:], op.padding, op.kernel_size, op.stride, strict=True
        )
    ]
    moved = np.full_like(inputs[0], -np.inf)
    h, w = (e - r for e, r in zip(inputs[0].shape[2:], rest, strict=True))
    moved[:, :, : max(0, h), : max(0, w)] = inputs[0][:, :, rest[0] :, rest[1] :]
    pool()(op, (moved,), weights, out, workspace)


_MAXPOOL = (
    fault(MaxPool2d, "padding_wins", "padding counts as 0", "exact", pool(outside=0.0)),
    fault(
        MaxPool2d,
        "finite_padding",
        "padding counts as the least finite number, which is more than −Inf",
        "edges",
        pool(outside=float(np.finfo(np.float32).min)),
    ),
    fault(
        MaxPool2d, "swallows_nan", "NaN loses against any number", "edges", pool(larger=np.fmax)
    ),
    fault(MaxPool2d, "minimum", "takes the minimum", "exact", pool(np.inf, np.minimum)),
    fault(MaxPool2d, "swapped_strides", "strides in the wrong order", "exact", pool(flipped=True)),
    fault(MaxPool2d, "first_row_ignored", "begins with the second row", "exact", pool(first=1)),
    fault(
        MaxPool2d,
        "aligned_at_the_far_end",
        "windows are laid as if the output's size were rounded up",
        "exact",
        _far_aligned,
    ),
)  # fmt: skip


def mean(divisor: Callable[[int, int], int] = lambda h, w: h * w) -> HostFunction:
    """Global average pooling as the op defines it, or with another divisor."""
    return of_inputs(lambda op, x: x.sum(axis=(2, 3)) / np.float32(divisor(x.shape[2], x.shape[3])))


_GAP = (
    fault(
        GlobalAvgPool,
        "divisor_less_one",
        "divides by HW − 1",
        "exact bound",
        mean(lambda h, w: h * w - 1),
    ),
    fault(
        GlobalAvgPool, "divisor_squared", "divides by H·H", "exact bound", mean(lambda h, w: h * h)
    ),
    fault(
        GlobalAvgPool, "divisor_of_imagenet", "divides by 7·7", "exact bound", mean(lambda h, w: 49)
    ),
    fault(GlobalAvgPool, "sum", "does not divide", "exact bound", mean(lambda h, w: 1)),
    fault(
        GlobalAvgPool,
        "last_row_ignored",
        "the last row is not summed",
        "exact bound",
        of_inputs(
            lambda op, x: x[:, :, : max(1, x.shape[2] - 1)].sum(axis=(2, 3))
            / np.float32(x.shape[2] * x.shape[3])
        ),
    ),
)  # fmt: skip


# -- softmax -----------------------------------------------------------------------------------


def softmax(op: Softmax, x: Array) -> Array:
    """Softmax as the op defines it."""
    e = np.exp(x - x.max(axis=1, keepdims=True))
    y: Array = e / e.sum(axis=1, keepdims=True)
    return y


def _softmax(
    name: str, wrong: str, formula: Callable[[Softmax, Array], Array], checks: str
) -> Fault:
    return fault(Softmax, name, wrong, checks, of_inputs(formula))


_SOFTMAX = (
    _softmax(
        "unshifted",
        "the maximum is not subtracted: exp overflows",
        lambda op, x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True),
        "bound edges",
    ),
    _softmax(
        "maximum_of_half",
        "the maximum of the first half is subtracted: exp overflows now and then",
        lambda op, x: np.exp(x - x[:, : (x.shape[1] + 1) // 2].max(axis=1, keepdims=True))
        / np.exp(x - x[:, : (x.shape[1] + 1) // 2].max(axis=1, keepdims=True)).sum(
            axis=1, keepdims=True
        ),
        "bound edges",
    ),
    _softmax("wrong_axis", "over the batch", lambda op, x: softmax(op, x.T).T, "bound"),
    _softmax(
        "base_two",
        "2 to the power of x",
        lambda op, x: softmax(op, x * np.float32(np.log(2))),
        "bound",
    ),
    _softmax(
        "last_term_missing",
        "the sum ends one too early",
        lambda op, x: np.exp(x - x.max(axis=1, keepdims=True))
        / np.exp(x - x.max(axis=1, keepdims=True))[:, : max(1, x.shape[1] - 1)].sum(
            axis=1, keepdims=True
        ),
        "bound edges",
    ),
    _softmax(
        "nan_ignored",
        "a NaN spoils its own element alone",
        lambda op, x: np.where(np.isnan(x), x, softmax(op, np.where(np.isnan(x), -np.inf, x))),
        "edges",
    ),
)  # fmt: skip

FAULTS = (*_BATCHNORM, *_POINTWISE, *_MAXPOOL, *_GAP, *_SOFTMAX)
TWINS = (
    kernel("twin", BatchNorm, "as_written", normalise(batchnorm), batch_invariant=True),
    kernel("twin", ReLU, "maximum", of_inputs(relu), batch_invariant=True, in_place=True),
    kernel("twin", Add, "sum", of_inputs(add), batch_invariant=True, in_place=True),
    kernel("twin", Relayout, "transpose", of_inputs(relayout), batch_invariant=True),
    kernel("twin", MaxPool2d, "taps", pool(), batch_invariant=True),
    kernel("twin", GlobalAvgPool, "sum", mean()),
    kernel("twin", Softmax, "shifted", of_inputs(softmax), batch_invariant=True),
)
"""The same kernels without a fault, so that it is the fault that is caught."""
