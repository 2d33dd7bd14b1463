"""Quantised networks with random weights, and the comparison of a backend with `numpy` in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from r18.backend import Array, Backend, CompileOptions
from r18.graph.passes import fuse
from r18.graph.quantize import quantized, quantized_weights
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess
from r18.runtime.fusing import keeping_pools
from r18_numpy import Backend as Numpy
from support import random_weights


def images_of(schedule: Schedule, batch: int) -> Array:
    shape = (batch, *schedule.input_shape)
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def integer_weights(schedule: Schedule, images: Array, bits: int) -> dict[str, Array]:
    """Quantised random weights; each value's scale comes from its largest magnitude."""
    folded, weights = fuse(schedule, "all"), random_weights(schedule)
    values = tuple(step.output for step in folded.steps)
    program = Numpy().compile(folded, weights, CompileOptions(batch=len(images), taps=values))
    program(images)
    stored = {s.output: s.op.output_storage for s in quantized(folded).steps} | {"image": "int8"}
    most = {v: np.abs(program.fetch(v)).max() for v in values} | {"image": np.abs(images).max()}
    scales = {v: float(m) / (255 if stored[v] == "uint8" else 127) for v, m in most.items()}
    return quantized_weights(folded, weights, scales, bits)


def assert_equals_numpy(
    backend: Backend,
    schedule: Schedule,
    bits: int,
    *,
    batch: int,
    pixels: bool = False,
    kernels: Mapping[str, str] | None = None,
) -> None:
    """Compare every value of the schedule (float, unfused) in integers, from images or pixels.

    So no step is fused with its max-pooling, and none with what makes integers of its image.
    kernels: kernels of the backend, by op or step.
    """
    images = images_of(schedule, batch)
    integers = quantized(fuse(schedule, "all"), bits)
    weights = integer_weights(schedule, images, bits)
    values = tuple(step.output for step in integers.steps)
    options = CompileOptions(precision="int8", batch=batch, taps=values)
    given = images
    if pixels:
        options = replace(options, pixels=Preprocess().normalize)
        given = np.random.default_rng(3).integers(0, 256, images.shape).astype(np.uint8)
    expected = Numpy().compile(integers, weights, options)
    kept = keeping_pools(integers) | dict(kernels or {})
    found = backend.compile(integers, weights, replace(options, kernels=kept))
    np.testing.assert_array_equal(found(given), expected(given))
    for value in values:
        theirs = expected.fetch(value)
        assert np.unique(theirs).size > 1, f"{value} is constant: nothing is compared"
        np.testing.assert_array_equal(found.fetch(value), theirs, value)
