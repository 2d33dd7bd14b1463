"""Pixels into what networks take."""

from __future__ import annotations

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import Normalize
from r18.graph.precision import Precision

Arrays = tuple[Array, ...]


def pixel_kernels(precision: Precision) -> tuple[HostKernel, ...]:
    contract = RoundingContract("normalize", precision.accumulate, precision.storage)
    return (
        HostKernel(
            "numpy",
            Normalize,
            "scale_shift",
            precision,
            contract,
            normalize,
            batch_invariant=True,
        ),
    )


def normalize(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift: (N, H, W, C) of bytes in, (N, C, H, W) out."""
    scale, shift = (np.array(values, out.dtype)[:, None, None] for values in op.scale_shift)
    np.multiply(inputs[0].transpose(0, 3, 1, 2), scale, out=out)
    out += shift
