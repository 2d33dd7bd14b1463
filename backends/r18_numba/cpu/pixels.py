"""Pixels into what networks take: what it promises and what it calls."""

from __future__ import annotations

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import Layout, Normalize
from r18.graph.precision import FP32
from r18_numba.cpu.compiled import NAME, RUNNING, ceil_div, module

Arrays = tuple[Array, ...]


def pixel_kernels() -> tuple[HostKernel, ...]:
    contract = RoundingContract("normalize", FP32.accumulate, FP32.storage)
    return (
        HostKernel(
            NAME,
            Normalize,
            "scale_shift",
            FP32,
            contract,
            normalize,
            layout=Layout.NHWC,
            batch_invariant=True,
        ),
    )


def normalize(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """x·scale + shift: bytes (N, H, W, C) in, floats in the same order out."""
    scale, shift = (np.array(values, np.float32) for values in op.scale_shift)
    pixels = out.size // op.channels
    kernels = module("pixels")
    with RUNNING:
        kernels.normalize(
            *(inputs[0].reshape(-1), scale, shift, out.reshape(-1)),
            *(pixels, op.channels, ceil_div(pixels, kernels.SPAN)),
        )
