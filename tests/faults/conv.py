"""Convolutions and matrix products that are wrong in one place each.

`Conv` is a correct convolution cut into pieces; a fault replaces one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.graph.ops import Conv2d, Linear
from r18.graph.precision import FP16, FP16X3, FP64

Arrays = tuple[Array, ...]


# -- the pieces of a correct convolution -------------------------------------------------------


def row(op: Conv2d, i: Array, r: int, height: int) -> Array:
    """The image's row under tap r of output row i; outside the image for the padding."""
    return i * op.stride[0] - op.padding[0] + r


def column(op: Conv2d, j: Array, s: int, width: int) -> Array:
    return j * op.stride[1] - op.padding[1] + s


def zero_outside(x: Array, rows: Array, columns: Array) -> Array:
    """x[:, :, rows, columns], and zero where the image has no such row or column."""
    h, w = x.shape[2:]
    taken = nearest_outside(x, rows, columns)
    no_row = (rows < 0) | (rows >= h)
    no_column = (columns < 0) | (columns >= w)
    np.copyto(taken, 0, where=no_row[:, None] | no_column)
    return taken


def nearest_outside(x: Array, rows: Array, columns: Array) -> Array:
    """A copy. This is what campaigns call most: to index by two arrays takes twice as long."""
    taken: Array = x.take(rows, 2, mode="clip").take(columns, 3, mode="clip")
    return taken


def tap(w: Array, r: int, s: int) -> Array:
    """The weights (O, C) of one tap."""
    taken: Array = w[:, :, r, s]
    return taken


def mix(w: Array, x: Array) -> Array:
    """(O, C) and (N, C, OH, OW) to (N, O, OH, OW)."""
    n, c, h, width = x.shape
    mixed: Array = np.matmul(w, x.reshape(n, c, h * width)).reshape(n, -1, h, width)
    return mixed


def total(terms: list[Array]) -> Array:
    """The taps' terms, added in order."""
    y = terms[0].copy()
    for term in terms[1:]:
        y += term
    return y


def finish(op: Conv2d, y: Array, bias: Array, residual: Array) -> Array:
    """Bias, residual, ReLU; those that the op does not fuse are zero."""
    y = y + bias[:, None, None] + residual
    return np.maximum(y, 0) if op.relu else y


@dataclass(frozen=True)
class Conv:
    """A convolution as the op defines it: a `HostFunction`, in pieces that can be replaced."""

    row: Callable[[Conv2d, Array, int, int], Array] = row
    column: Callable[[Conv2d, Array, int, int], Array] = column
    pixels: Callable[[Array, Array, Array], Array] = zero_outside
    tap: Callable[[Array, int, int], Array] = tap
    mix: Callable[[Array, Array], Array] = mix
    total: Callable[[list[Array]], Array] = total
    finish: Callable[[Conv2d, Array, Array, Array], Array] = finish
    wide: type[np.floating[Any]] = np.float32

    def result(self, op: Conv2d, inputs: Arrays, weights: Arrays, out: Array) -> Array:
        """The output, summed in `wide`."""
        x, w = inputs[0].astype(self.wide), weights[0].astype(self.wide)
        (kh, kw), (h, width) = op.kernel_size, x.shape[2:]
        i, j = np.arange(out.shape[2]), np.arange(out.shape[3])
        rows = [self.row(op, i, r, h) for r in range(kh)]
        columns = [self.column(op, j, s, width) for s in range(kw)]
        terms = [
            self.mix(self.tap(w, r, s), self.pixels(x, rows[r], columns[s]))
            for r in range(kh)
            for s in range(kw)
        ]
        bias = weights[1] if op.bias else np.zeros(op.out_channels, self.wide)
        residual = inputs[1] if op.residual else np.zeros((1, 1, 1, 1), self.wide)
        return self.finish(
            op, self.total(terms), bias.astype(self.wide), residual.astype(self.wide)
        )

    def __call__(
        self, op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        out[...] = self.result(op, inputs, weights, out)


CONV = Conv()


def conv(name: str, wrong: str, checks: str = "exact", **pieces: Any) -> Fault:
    return fault(Conv2d, name, wrong, checks, replace(CONV, **pieces))


# -- where it reads ----------------------------------------------------------------------------

_INDICES = (
    conv(
        "swapped_strides",
        "rows step by the horizontal stride, columns by the vertical one",
        row=lambda op, i, r, h: i * op.stride[1] - op.padding[0] + r,
        column=lambda op, j, s, w: j * op.stride[0] - op.padding[1] + s,
    ),
    conv(
        "swapped_padding",
        "the vertical padding is used for columns and the other way round",
        row=lambda op, i, r, h: i * op.stride[0] - op.padding[1] + r,
        column=lambda op, j, s, w: j * op.stride[1] - op.padding[0] + s,
    ),
    conv(
        "swapped_kernel_axes",
        "weights are read as if they lay column by column",
        tap=lambda w, r, s: w.reshape(*w.shape[:2], -1)[:, :, s * w.shape[2] + r],
    ),
    conv(
        "flipped_kernel",
        "a true convolution: the kernel is turned by 180 degrees",
        tap=lambda w, r, s: w[:, :, -1 - r, -1 - s],
    ),
    conv(
        "halo_off_by_one",
        "the window starts one column too far right",
        column=lambda op, j, s, w: j * op.stride[1] - op.padding[1] + s + 1,
    ),
    conv(
        "halo_too_short",
        "the image's last column is taken for padding",
        pixels=lambda x, rows, columns: zero_outside(x[..., :-1], rows, columns)
        if x.shape[3] > 1
        else zero_outside(x, rows, columns),
    ),
    conv(
        "padding_replicates",
        "outside the image the nearest pixel is read, not zero",
        pixels=nearest_outside,
    ),
    conv(
        "padding_wraps",
        "outside the image the opposite side is read",
        pixels=lambda x, rows, columns: x[
            :, :, (rows % x.shape[2])[:, None], columns % x.shape[3]
        ],
    ),
    conv(
        "aligned_at_the_far_end",
        "windows are laid from the bottom up, so that a stride's rest is left at the top",
        row=lambda op, i, r, h: (h + op.padding[0] - op.kernel_size[0]) + r
        - (i[-1] - i) * op.stride[0],
    ),
    conv(
        "stride_ignored_down",
        "rows step by one",
        row=lambda op, i, r, h: i - op.padding[0] + r,
    ),
    conv(
        "channel_off_by_one",
        "weights of channel c meet the image's channel c + 1",
        mix=lambda w, x: mix(w, np.roll(x, -1, axis=1)),
    ),
    conv(
        "first_image_only",
        "the batch index is stuck at 0",
        mix=lambda w, x: mix(w, np.broadcast_to(x[:1], x.shape)),
    ),
    conv(
        "last_channel_ignored",
        "the loop over channels ends one too early",
        mix=lambda w, x: mix(w[:, :-1], x[:, :-1]) if w.shape[1] > 1 else mix(w, x),
    ),
    conv(
        "output_channels_reversed",
        "output channel o gets the weights of the o-th from the end",
        tap=lambda w, r, s: w[::-1, :, r, s],
    ),
    conv(
        "grouped",
        "the first half of the outputs sees only the first half of the channels",
        mix=lambda w, x: mix(_halved(w), x),
    ),
)  # fmt: skip


def _halved(w: Array) -> Array:
    half = w.copy()
    half[: w.shape[0] // 2, (w.shape[1] + 1) // 2 :] = 0
    return half


# -- what it sums ------------------------------------------------------------------------------


def _first_without_last_product(w: Array, r: int, s: int) -> Array:
    """The last tap's weights, but none for the last channel."""
    taken = tap(w, r, s)
    if (r, s) == (w.shape[2] - 1, w.shape[3] - 1):
        taken = taken.copy()
        taken[:, -1] = 0
    return taken


def in_float16(w: Array, x: Array) -> Array:
    return mix(w.astype(np.float16).astype(w.dtype), x.astype(np.float16).astype(x.dtype))


def _eleven_bits(a: Array) -> Array:
    """Significands cut to 11 bits, as units for tf32 do."""
    cut: Array = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return cut


def _halves(a: Array) -> tuple[Array, Array]:
    """A float32 array in float16 twice: itself, and what that lost of it, times 2¹¹."""
    high = a.astype(np.float16).astype(a.dtype)
    low = ((a - high) * 2**11).astype(np.float16).astype(a.dtype)
    return high, low


@dataclass(frozen=True)
class Mix:
    """`mix` by products of float16 halves; a fault replaces one of the pieces.

    of_x, of_w: what is made of the second halves of pixels and weights. scale: of the crossed sum.
    bring:      what is done to factors before they are split.
    """

    of_x: Callable[[Array], Array] = lambda low: low
    of_w: Callable[[Array], Array] = lambda low: low
    scale: float = 2.0**-11
    bring: Callable[[Array], Array] = lambda a: a
    halves: Callable[[Array], tuple[Array, Array]] = _halves

    def __call__(self, w: Array, x: Array) -> Array:
        (w_high, w_low), (x_high, x_low) = (self.halves(self.bring(a)) for a in (w, x))
        crossed = mix(self.of_w(w_low), x_high) + mix(w_high, self.of_x(x_low))
        y: Array = mix(w_high, x_high) + crossed * w.dtype.type(self.scale)
        return y


def _cut_off(a: Array) -> tuple[Array, Array]:
    """The first half cut off to 8 bits, as bfloat16 would be: the second is then too short."""
    high = (a.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = high.astype(np.float16).astype(a.dtype)
    return high, ((a - high) * 2**11).astype(np.float16).astype(a.dtype)


def total_in_float16(terms: list[Array]) -> Array:
    y = np.zeros(terms[0].shape, np.float16)
    for term in terms:
        y = (y + term.astype(np.float16)).astype(np.float16)
    return y.astype(terms[0].dtype)


def mix_in_float16(w: Array, x: Array) -> Array:
    return total_in_float16([mix(w[:, [c]], x[:, [c]]) for c in range(w.shape[1])])


def cut_to_float16(op: Conv2d, y: Array, bias: Array, residual: Array) -> Array:
    """The result cut off at 11 bits, so that the store that follows has nothing to round."""
    return _eleven_bits(np.ascontiguousarray(finish(op, y, bias, residual)))


_SUMS = (
    conv(
        "dropped_product",
        "the last product of every sum is missing",
        tap=_first_without_last_product,
    ),
    conv(
        "doubled_product",
        "the first tap is added twice",
        total=lambda terms: total([terms[0], *terms]),
    ),
    conv(
        "truncated_intermediate",
        "the sum passes through an integer",
        "bound",
        total=lambda terms: np.trunc(total(terms)),
    ),
    conv("factors_in_float16", "float32 factors are rounded to float16", "bound", mix=in_float16),
    conv("sums_in_float16", "a float32 kernel keeps its sums in float16", total=total_in_float16),
    conv(
        "factors_in_tf32",
        "a float32 kernel multiplies on units for tf32",
        "bound",
        mix=lambda w, x: mix(
            _eleven_bits(np.ascontiguousarray(w)), _eleven_bits(np.ascontiguousarray(x))
        ),
    ),
    conv(
        "zero_weights_skipped",
        "products with a zero weight are skipped: 0·NaN is lost",
        "edges",
        mix=lambda w, x: sum(
            (
                np.where(
                    w[None, :, c, None, None] != 0, w[None, :, c, None, None] * x[:, None, c], 0
                )
                for c in range(w.shape[1])
            ),
            start=np.zeros((len(x), len(w), *x.shape[2:]), x.dtype),
        ),
    ),
    fault(
        Conv2d,
        "sums_in_float16",
        "sums of float16 products are kept in float16",
        "bound exact",
        replace(CONV, mix=mix_in_float16, total=total_in_float16),
        precision=FP16,
    ),
    fault(
        Conv2d,
        "stores_cut_off",
        "results are cut off, not rounded, to float16",
        "exact bound",
        replace(CONV, finish=cut_to_float16),
        precision=FP16,
    ),
    *(
        fault(Conv2d, name, wrong, checks, replace(CONV, mix=wrongly), precision=FP16X3)
        for name, wrong, checks, wrongly in (
            (
                "crossed_products_dropped",
                "products of float16, and nothing of the second halves",
                "exact",
                Mix(of_x=np.zeros_like, of_w=np.zeros_like),
            ),
            (
                "pixels_not_split",
                "of pixels the second half is dropped",
                "exact",
                Mix(of_x=np.zeros_like),
            ),
            (
                "weights_not_split",
                "of weights the second half is dropped",
                "exact",
                Mix(of_w=np.zeros_like),
            ),
            (
                "crossed_sum_not_scaled",
                "the sum of crossed products is not scaled back",
                "exact",
                Mix(scale=1.0),
            ),
            (
                "second_half_of_next_channel",
                "second halves of weights are those of the next output channel",
                "exact",
                Mix(of_w=lambda low: np.roll(low, 1, axis=0)),
            ),
            (
                "second_halves_too_short",
                "first halves of 8 bits leave more than second ones hold",
                "bound exact",
                Mix(halves=_cut_off),
            ),
            (
                "factors_saturate",
                "factors beyond float16 become its largest value: an infinity gets lost",
                "edges",
                Mix(bring=lambda a: np.clip(a, -65504, 65504)),
            ),
        )
    ),
    fault(
        Conv2d,
        "sums_in_float32",
        "a float64 kernel computes in float32",
        "exact",
        CONV,
        precision=FP64,
    ),
)


# -- what it does to the sum -------------------------------------------------------------------


def _epilogue(
    name: str, wrong: str, wrongly: Callable[[Conv2d, Array, Array, Array], Array], checks: str
) -> Fault:
    return conv(name, wrong, checks, finish=wrongly)


def _clamped(op: Conv2d, y: Array) -> Array:
    return np.maximum(y, 0) if op.relu else y


_EPILOGUES = (
    _epilogue(
        "relu_missing",
        "the ReLU is not applied",
        lambda op, y, b, z: y + b[:, None, None] + z,
        "exact",
    ),
    _epilogue(
        "relu_before_bias",
        "the bias is added after the ReLU",
        lambda op, y, b, z: _clamped(op, y + z) + b[:, None, None],
        "exact",
    ),
    _epilogue(
        "residual_after_relu",
        "the residual is added after the ReLU",
        lambda op, y, b, z: _clamped(op, y + b[:, None, None]) + z,
        "exact",
    ),
    _epilogue(
        "residual_ignored",
        "the residual is not added",
        lambda op, y, b, z: _clamped(op, y + b[:, None, None]),
        "exact",
    ),
    _epilogue(
        "bias_ignored", "the bias is not added", lambda op, y, b, z: _clamped(op, y + z), "exact"
    ),
    _epilogue(
        "bias_of_next_channel",
        "output channel o gets the bias of channel o + 1",
        lambda op, y, b, z: finish(op, y, np.roll(b, -1), z),
        "exact",
    ),
    _epilogue(
        "relu_swallows_nan",
        "ReLU(NaN) is 0",
        lambda op, y, b, z: (np.fmax if op.relu else np.add)(y + b[:, None, None] + z, 0),
        "edges",
    ),
)  # fmt: skip


# -- matrix products ---------------------------------------------------------------------------


def linear(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """As the op defines it."""
    out[...] = inputs[0] @ weights[0].T + weights[1]


def _transposed(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out[...] = inputs[0] @ weights[0].reshape(op.in_features, op.out_features) + weights[1]


def _no_tail(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    whole = max(4, op.in_features // 4 * 4)
    out[...] = inputs[0][:, :whole] @ weights[0][:, :whole].T + weights[1]


def _no_bias(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out[...] = inputs[0] @ weights[0].T


def _last_bias(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out[...] = inputs[0] @ weights[0].T + np.roll(weights[1], 1)


_LINEAR = (
    fault(Linear, "weight_transposed", "weights are read transposed", "exact", _transposed),
    fault(
        Linear,
        "tail_ignored",
        "features beyond a multiple of 4 are not summed",
        "exact",
        _no_tail,
        edges=(4,),
    ),
    fault(Linear, "bias_ignored", "the bias is not added", "exact", _no_bias),
    fault(Linear, "bias_off_by_one", "feature o gets the bias of o − 1", "exact", _last_bias),
)

FAULTS = (*_INDICES, *_SUMS, *_EPILOGUES, *_LINEAR)
TWINS = (
    kernel("twin", Conv2d, "taps", CONV),
    kernel("twin", Conv2d, "taps", CONV, precision=FP16),
    kernel("twin", Conv2d, "taps", replace(CONV, wide=np.float64), precision=FP64),
    kernel("twin", Conv2d, "taps", CONV, precision=FP16X3),
    kernel("twin", Conv2d, "halves", replace(CONV, mix=Mix()), precision=FP16X3),
    kernel("twin", Linear, "matmul", linear),
)
"""The same kernels without a fault, so that it is the fault that is caught."""
