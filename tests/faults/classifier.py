"""Global average pooling fused with the linear layer, wrong in one step each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from faults import scaled
from faults.fault import Fault, fault, kernel
from faults.quantized import F32
from r18.backend import Array, RoundingContract
from r18.backend.host import HostFunction
from r18.graph.ops import AvgPoolLinear
from r18.graph.precision import FP8, FP16, FP64, INT8, round_to_e4m3
from r18.graph.quantized import QuantizedAvgPoolLinear
from r18.graph.scaled import ScaledAvgPoolLinear

Arrays = tuple[Array, ...]
CHUNK = 16
"""Channels per step of the kernels with faults in a tail."""


def _mean(x: Array) -> Array:
    found: Array = x.sum(axis=(2, 3)) / x.dtype.type(x.shape[2] * x.shape[3])
    return found


def classifier(
    means: Callable[[Array], Array] = _mean,
    weigh: Callable[[Array, Array], Array] = lambda m, w: m @ w.T,
    bias: Callable[[Array], Array] = lambda b: b,
    number: type[Any] = np.float32,
) -> HostFunction:
    """The op by its definition, or with other steps. number: the dtype of sums."""

    def run(
        op: AvgPoolLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        found = means(inputs[0].astype(number))
        out[...] = weigh(found, weights[0].astype(number)) + bias(weights[1].astype(number))

    return run


def _by_size(divisor: Callable[[int, int], int]) -> Callable[[Array], Array]:
    return lambda x: x.sum(axis=(2, 3)) / x.dtype.type(divisor(x.shape[2], x.shape[3]))


def _no_last_row(x: Array) -> Array:
    found: Array = x[:, :, : max(1, x.shape[2] - 1)].sum(axis=(2, 3))
    return found / x.dtype.type(x.shape[2] * x.shape[3])


def _whole_chunks(m: Array, w: Array) -> Array:
    whole = max(CHUNK, m.shape[1] // CHUNK * CHUNK)
    found: Array = m[:, :whole] @ w[:, :whole].T
    return found


def _of_first(m: Array, w: Array) -> Array:
    return np.asarray(np.broadcast_to(m[:1], m.shape) @ w.T)


def _in_float16(x: Array) -> Array:
    return _mean(x).astype(np.float16).astype(x.dtype)


_floats: Callable[..., Fault] = partial(fault, AvgPoolLinear)
_integers: Callable[..., Fault] = partial(fault, QuantizedAvgPoolLinear, precision=INT8)
_numbers: Callable[..., Fault] = partial(
    fault, ScaledAvgPoolLinear, precision=FP8, contract=scaled.OF_MEANS
)


def requantized(sums: Array, multiplier: Array, stored: str) -> Array:
    """The pooling's requantisation, done right."""
    limits = np.iinfo(stored)
    found: Array = np.clip(np.rint(sums.astype(F32) * multiplier), limits.min, limits.max)
    return found


def _ties_up(sums: Array, multiplier: Array, stored: str) -> Array:
    limits = np.iinfo(stored)
    found: Array = np.floor(sums.astype(F32) * multiplier + F32(0.5))
    return np.clip(found, limits.min, limits.max)


def _wrapped(sums: Array, multiplier: Array, stored: str) -> Array:
    found: Array = np.rint(sums.astype(F32) * multiplier).astype(np.int64).astype(stored)
    return found


def _as_int8(sums: Array, multiplier: Array, stored: str) -> Array:
    return requantized(sums, multiplier, stored).astype(np.int64).astype(np.int8)


def _not_rounded(sums: Array, multiplier: Array, stored: str) -> Array:
    limits = np.iinfo(stored)
    found: Array = np.clip(sums.astype(F32) * multiplier, limits.min, limits.max)
    return found


def of_integers(
    means: Callable[[Array, Array, str], Array] = requantized,
    pixels: Callable[[Array], Array] = lambda x: x.sum(axis=(2, 3), dtype=np.int64),
    weigh: Callable[[Array, Array], Array] = lambda m, w: m @ w.T,
) -> HostFunction:
    """The quantised op by its definition, or with other steps."""

    def run(
        op: QuantizedAvgPoolLinear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        weight, bias, multiplier, of_mean = weights
        m = means(pixels(inputs[0]), of_mean, op.gap.output_storage).astype(np.float64)
        sums = weigh(m, weight.astype(np.float64)) + bias
        out[...] = sums.astype(F32) * multiplier

    return run


def _in_e4m3(x: Array) -> Array:
    """The float32 means of `sgap`, as if they were stored in e4m3 like its input."""
    return round_to_e4m3(scaled.mean(x)).astype(F32)


def _tail_of_zeros(x: Array) -> Array:
    found = scaled.mean(x)
    found[:, max(CHUNK, found.shape[1] // CHUNK * CHUNK) :] = 0
    return found


FAULTS = (
    _floats(
        "divisor_of_imagenet",
        "divides by 7·7",
        "impulse",
        classifier(_by_size(lambda h, w: 49)),
    ),
    _floats("sum", "does not divide", "impulse", classifier(_by_size(lambda h, w: 1))),
    _floats("last_row_ignored", "the last row is not summed", "impulse", classifier(_no_last_row)),
    _floats(
        "tail_ignored",
        "channels beyond whole chunks are left out",
        "impulse bound",
        classifier(weigh=_whole_chunks),
        edges=(CHUNK,),
    ),
    _floats(
        "means_of_first_sample",
        "every sample gets the first one's means",
        "impulse",
        classifier(weigh=_of_first),
    ),
    _floats(
        "bias_ignored",
        "the bias is not added",
        "exact bound",
        classifier(bias=lambda b: b * b.dtype.type(0)),
    ),
    _floats(
        "means_rounded",
        "rounds means to float16, which its contract does not say",
        "impulse",
        classifier(_in_float16),
        precision=FP16,
    ),
    _integers("ties_up", "rounds ties of means up", "bound edges", of_integers(_ties_up)),
    _integers("means_wrap", "means wrap and do not saturate", "bound edges", of_integers(_wrapped)),
    _integers(
        "means_not_rounded",
        "multiplies means that are no integers",
        "impulse bound",
        of_integers(_not_rounded),
    ),
    _integers(
        "means_as_int8", "takes unsigned means for signed ones", "bound", of_integers(_as_int8)
    ),
    _integers(
        "sums_in_int8",
        "adds pixels in int8",
        "impulse bound",
        of_integers(pixels=lambda x: x.sum(axis=(2, 3), dtype=np.int8)),
    ),
    _integers(
        "last_row_ignored",
        "the last row is not summed",
        "impulse bound",
        of_integers(
            pixels=lambda x: x[:, :, : max(1, x.shape[2] - 1)].sum(axis=(2, 3), dtype=np.int64)
        ),
    ),
    _integers(
        "tail_ignored",
        "channels beyond whole chunks are left out",
        "impulse bound",
        of_integers(weigh=_whole_chunks),
        edges=(CHUNK,),
    ),
    _integers(
        "means_of_first_sample",
        "every sample gets the first one's means",
        "impulse bound",
        of_integers(weigh=_of_first),
    ),
    _numbers(
        "divisor_of_imagenet",
        "divides by 7·7",
        "exact impulse",
        scaled.classifier(_by_size(lambda h, w: 49)),
    ),
    _numbers(
        "last_row_ignored",
        "the last row is not summed",
        "exact impulse",
        scaled.classifier(_no_last_row),
    ),
    _numbers(
        "tail_ignored",
        "channels beyond whole chunks are left out",
        "exact bound",
        scaled.classifier(_tail_of_zeros),
        edges=(CHUNK,),
    ),
    _numbers(
        "means_of_first_sample",
        "every sample gets the first one's means",
        "exact impulse",
        scaled.classifier(lambda x: np.repeat(scaled.mean(x)[:1], len(x), axis=0)),
    ),
    _numbers(
        "means_rounded",
        "stores means in e4m3",
        "impulse bound",
        scaled.classifier(_in_e4m3),
    ),
    _numbers(
        "means_in_float16",
        "rounds means to float16, which its contract does not say",
        "impulse bound",
        scaled.classifier(_in_float16),
    ),
    _numbers(
        "bias_scaled",
        "scales the bias too",
        "exact bound",
        scaled.classifier(scale_bias=True),
    ),
)
TWINS = (
    kernel("twin", AvgPoolLinear, "as_written", classifier()),
    kernel("twin", AvgPoolLinear, "as_written", classifier(), FP16),
    kernel("twin", AvgPoolLinear, "as_written", classifier(number=np.float64), FP64),
    kernel(
        "twin",
        AvgPoolLinear,
        "means_stored",
        classifier(_in_float16),
        FP16,
        RoundingContract("stored_mean_sum", FP16.accumulate, FP16.storage),
    ),
    kernel("twin", QuantizedAvgPoolLinear, "as_written", of_integers(), INT8),
)
