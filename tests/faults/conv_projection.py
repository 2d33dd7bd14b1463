"""Convolutions that add a projection of a second image, wrong in one place each.

`block` makes one of the pieces of `faults.conv`: a projection, and the convolution that adds it. A
fault replaces a piece of either, or the way in which the two meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from faults.conv import (
    CONV,
    Conv,
    Mix,
    cut_to_float16,
    finish,
    in_float16,
    mix,
    mix_in_float16,
    total_in_float16,
)
from faults.fault import Fault, fault, kernel
from faults.memory import overwrite, then, whole
from faults.summations import tf32_cut
from r18.backend import Array
from r18.backend.host import HostFunction
from r18.graph.ops import Conv2d, ConvProjection
from r18.graph.precision import BF16, FP16, FP16X3, FP64, TF32

Arrays = tuple[Array, ...]


def projected(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, projection: Conv = CONV
) -> Array:
    """What the projection gives, in the format that it sums in."""
    of_projection = weights[len(op.conv.weights()) :]
    return projection.result(op.projection, (inputs[1],), of_projection, out)


def added(
    op: ConvProjection, x: Array, residual: Array, weights: Arrays, out: Array, conv: Conv = CONV
) -> None:
    """The convolution that adds the residual, into `out`."""
    conv(op.conv, (x, residual), weights[: len(op.conv.weights())], out, np.empty(0, np.uint8))


def block(
    conv: Conv = CONV,
    projection: Conv = CONV,
    second: Callable[[ConvProjection, Arrays], Array] = lambda op, inputs: inputs[1],
    between: Callable[[Array], Array] = lambda residual: residual,
) -> HostFunction:
    """As the op defines it, unless a piece is another.

    second: the image that is projected. between: what becomes of the projection before it is added.
    """

    def run(
        op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        x, z = inputs[0], second(op, inputs)
        residual = projected(op, (x, z), weights, out, projection)
        added(op, x, between(residual), weights, out, conv)

    return run


def one_sum(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """The projection's products before the convolution's, and both biases at the end."""
    count = len(op.conv.weights())
    bare = replace(op.projection, bias=False)
    both = [weights[at + 1] for at, part in ((0, op.conv), (count, op.projection)) if part.bias]
    residual = CONV.result(bare, inputs[1:], weights[count : count + 1], out)
    plain = replace(op.conv, bias=False, relu=False)
    y = CONV.result(plain, (inputs[0], residual), weights[:1], out)
    for bias in both:
        y = y + bias.astype(y.dtype)[:, None, None]
    out[...] = np.maximum(y, 0) if op.relu else y


def _block(name: str, wrong: str, checks: str, run: HostFunction, **options: Any) -> Fault:
    return fault(ConvProjection, name, wrong, checks, run, **options)


# -- what is projected -------------------------------------------------------------------------


def _of_the_first_shape(op: ConvProjection, inputs: Arrays) -> Array:
    """Images of z that lie as far apart as those of x do."""
    x, z = inputs
    begins = np.arange(len(z))[:, None] * x[0].size
    taken: Array = z.reshape(-1)[(begins + np.arange(z[0].size)) % z.size]
    return taken.reshape(z.shape)


def _of_whole_strides(op: ConvProjection, inputs: Arrays) -> Array:
    """Rows of z that are as long as the outputs, times the stride."""
    z = inputs[1]
    width = op.conv.infer(inputs[0].shape, op.projection.infer(z.shape))[3]
    pitch = width * op.projection.stride[1]
    rows, columns = np.arange(z.shape[2])[:, None], np.arange(z.shape[3])
    plane: Array = z.reshape(*z.shape[:2], -1)
    places = np.minimum(rows * pitch + columns, plane.shape[2] - 1)
    return np.asarray(plane[:, :, places])


def _padded_as_the_convolution(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    ph, pw = op.conv.padding
    moved = replace(
        CONV,
        row=lambda op, i, r, height: i * op.stride[0] - ph + r,
        column=lambda op, j, s, width: j * op.stride[1] - pw + s,
    )
    block(projection=moved)(op, inputs, weights, out, workspace)


def _channels_of_the_convolution(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    count = op.conv.in_channels
    short = replace(CONV, mix=lambda w, x: mix(w[:, :count], x[:, :count]))
    block(projection=short)(op, inputs, weights, out, workspace)


# -- how the two meet --------------------------------------------------------------------------


def _ends(finished: Callable[[ConvProjection, Array, Array], Array]) -> HostFunction:
    """Both results, the convolution's without ReLU, joined in another way (op, y, residual)."""

    def run(
        op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        residual = projected(op, inputs, weights, out)
        plain = replace(op.conv, residual=False, relu=False)
        y = CONV.result(plain, inputs[:1], weights[: len(op.conv.weights())], out)
        out[...] = finished(op, y, residual)

    return run


def _clamped(op: ConvProjection, y: Array) -> Array:
    return np.maximum(y, 0) if op.relu else y


def _without_bias(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    bare = replace(op, projection=replace(op.projection, bias=False))
    block()(bare, inputs, weights, out, workspace)


def _swallowing(op: Conv2d, y: Array, bias: Array, residual: Array) -> Array:
    y = finish(replace(op, relu=False), y, bias, residual)
    return np.fmax(y, 0) if op.relu else y


def _in(dtype: type[np.floating[Any]]) -> Callable[[Array], Array]:
    return lambda residual: residual.astype(dtype).astype(residual.dtype)


def _first_columns_written(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    made = np.empty_like(out)
    block()(op, inputs, weights, made, workspace)
    width = whole(out.shape[3], 8)
    out[..., :width] = made[..., :width]


FAULTS = (
    _block(
        "projection_stride_ignored",
        "the projection reads its image without a stride",
        "exact",
        block(
            projection=replace(
                CONV,
                row=lambda op, i, r, height: i - op.padding[0] + r,
                column=lambda op, j, s, width: j - op.padding[1] + s,
            )
        ),
    ),
    _block(
        "projection_aligned_at_the_far_end",
        "the pixels that a stride leaves over are at the top of the second image",
        "exact",
        block(
            projection=replace(
                CONV,
                row=lambda op, i, r, height: (
                    (height + op.padding[0] - op.kernel_size[0]) + r - (i[-1] - i) * op.stride[0]
                ),
            )
        ),
    ),
    _block(
        "second_image_at_the_first_s_offset",
        "images of the second input lie as far apart as those of the first",
        "exact impulse",
        block(second=_of_the_first_shape),
    ),
    _block(
        "second_image_of_whole_strides",
        "rows of the second image are as long as the outputs times the stride",
        "exact impulse",
        block(second=_of_whole_strides),
    ),
    _block(
        "projection_padded_as_the_convolution",
        "the projection is padded as the convolution is",
        "exact",
        _padded_as_the_convolution,
    ),
    _block(
        "last_channel_of_the_projection_ignored",
        "the loop over the projection's channels ends one too early",
        "exact",
        block(
            projection=replace(
                CONV,
                mix=lambda w, x: mix(w[:, :-1], x[:, :-1]) if w.shape[1] > 1 else mix(w, x),
            )
        ),
    ),
    _block(
        "channels_of_the_convolution",
        "the projection sums no more channels than the convolution does",
        "exact",
        _channels_of_the_convolution,
    ),
    _block(
        "first_second_image_only",
        "the projection's batch index is stuck at 0",
        "exact",
        block(projection=replace(CONV, mix=lambda w, x: mix(w, np.broadcast_to(x[:1], x.shape)))),
    ),
    _block(
        "projection_ignored",
        "the projection is not added",
        "exact",
        _ends(lambda op, y, residual: _clamped(op, y)),
    ),
    _block(
        "projection_bias_ignored",
        "the projection's bias is not added",
        "exact",
        _without_bias,
    ),
    _block(
        "projection_bias_of_next_channel",
        "channel o gets the projection's bias of channel o + 1",
        "exact",
        block(
            projection=replace(
                CONV,
                finish=lambda op, y, bias, residual: finish(op, y, np.roll(bias, -1), residual),
            )
        ),
    ),
    _block(
        "projection_after_relu",
        "the projection is added after the ReLU",
        "exact",
        _ends(lambda op, y, residual: _clamped(op, y) + residual),
    ),
    _block(
        "relu_of_the_projection",
        "the projection passes a ReLU of its own",
        "exact",
        _ends(lambda op, y, residual: _clamped(op, y + _clamped(op, residual))),
    ),
    _block(
        "projection_in_halves",
        "the projection of a float32 kernel is rounded to float16 in between",
        "exact bound",
        block(between=_in(np.float16)),
    ),
    _block(
        "projection_stored_in_between",
        "the projection is rounded to storage before it is added",
        "bound exact",
        block(between=_in(np.float16)),
        precision=FP16,
    ),
    _block(
        "second_factors_in_float16",
        "the projection's float32 factors are rounded to float16",
        "bound",
        block(projection=replace(CONV, mix=in_float16)),
    ),
    _block(
        "second_sums_in_float16",
        "the projection's sums of float16 products are kept in float16",
        "bound exact",
        block(projection=replace(CONV, mix=mix_in_float16, total=total_in_float16)),
        precision=FP16,
    ),
    _block(
        "projection_weights_cut",
        "cuts off the projection's tf32 weights, and declares that it rounds them",
        "bias",
        block(projection=replace(CONV, mix=lambda w, x: mix(tf32_cut(w), x))),
        precision=TF32,
    ),
    _block(
        "stores_cut_off",
        "results are cut off, not rounded, to float16",
        "exact bound",
        block(replace(CONV, finish=cut_to_float16)),
        precision=FP16,
    ),
    _block(
        "second_pixels_not_split",
        "of the projection's pixels the second half is dropped",
        "exact",
        block(projection=replace(CONV, mix=Mix(of_x=np.zeros_like))),
        precision=FP16X3,
    ),
    _block(
        "second_weights_not_split",
        "of the projection's weights the second half is dropped",
        "exact",
        block(projection=replace(CONV, mix=Mix(of_w=np.zeros_like))),
        precision=FP16X3,
    ),
    _block(
        "relu_swallows_nan",
        "ReLU(NaN) is 0",
        "edges",
        block(replace(CONV, finish=_swallowing)),
    ),
    _block(
        "second_input_overwritten",
        "the first pixel of the second image that is not zero is changed",
        "inputs_unchanged",
        then(block(), lambda x, w, out, scratch: overwrite(x[1])),
    ),
    _block(
        "last_columns_unwritten",
        "columns beyond a multiple of 8 are not written",
        "full_write",
        _first_columns_written,
        edges=(8,),
    ),
)

TWINS = (
    kernel("twin", ConvProjection, "taps", block()),
    kernel("twin", ConvProjection, "one_sum", one_sum),
    kernel("twin", ConvProjection, "taps", block(), precision=FP16),
    kernel("twin", ConvProjection, "one_sum", one_sum, precision=BF16),
    kernel(
        "twin", ConvProjection, "halves", block(*[replace(CONV, mix=Mix())] * 2), precision=FP16X3
    ),
    kernel(
        "twin", ConvProjection, "taps", block(*[replace(CONV, wide=np.float64)] * 2), precision=FP64
    ),
)
"""The same kernels without a fault, so that it is the fault that is caught."""
