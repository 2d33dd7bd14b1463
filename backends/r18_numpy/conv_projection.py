"""A convolution and the projection of its residual, one after the other in one kernel."""

from __future__ import annotations

from functools import partial

from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import EXTRAS, ConvProjection, Problem, parts_of
from r18.graph.precision import Precision
from r18_numpy.conv import conv_im2col, im2col_nbytes

Arrays = tuple[Array, ...]


def projection_kernels(precision: Precision) -> tuple[HostKernel, ...]:
    """The kernel of a precision of floats, whose accumulator is its storage format."""
    return (
        HostKernel(
            "numpy",
            ConvProjection,
            "im2col",
            precision,
            RoundingContract("sum", precision.accumulate, precision.storage),
            run=conv_projection,
            scratch=partial(_nbytes, precision),
            pack=pack,
            edges=(1, 7, 8, 14, 16, 28, 56),
            extras=EXTRAS,
        ),
    )


def _nbytes(precision: Precision, problem: Problem) -> int:
    return max(im2col_nbytes(part, precision.dtype.itemsize) for part in parts_of(problem))


def pack(op: ConvProjection, weights: Arrays) -> Arrays:
    """Both filters as matrices (O, C/groups·kh·kw)."""
    return tuple(w.reshape(op.conv.out_channels, -1) if w.ndim > 1 else w for w in weights)


def conv_projection(
    op: ConvProjection, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """The projection is computed into the output, and read from there as the residual.

    inputs: (N, C, H, W), and the projection's. weights: those of both convolutions as of
    `conv_im2col`, the projection's last. out: (N, O, OH, OW).
    """
    x, z = inputs
    count = len(op.conv.weights())
    conv_im2col(op.projection, (z,), weights[count:], out, workspace)
    conv_im2col(op.conv, (x, out), weights[:count], out, workspace)
