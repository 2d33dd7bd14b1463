"""A quantisation: the integers and scales of a network, as a calibration decides them.

It holds the data that cannot be computed again: the scale of every value, the weights and biases in
integers, and how they were found. Multipliers follow from the scales (`r18.graph.quantize`).

Weights of 4 and 2 bits are stored packed: two's complement, the lowest bits of a byte first, each
output channel in whole bytes, whose unused bits are 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from r18.errors import WeightsError
from r18.graph.quantized import check_factors, limit_of

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in integers: int8, and the float32 scale of each output channel.

    Raises `WeightsError` for other formats, and for a scale that is not positive and finite.
    """

    integers: Array
    scale: Array

    def __post_init__(self) -> None:
        integers, scale = self.integers, self.scale
        formats = f"{integers.dtype} {scale.dtype}"
        if formats != "int8 float32" or scale.shape != integers.shape[:1]:
            raise WeightsError(
                "a quantised weight is int8 with a float32 scale for each output channel, got "
                f"{integers.dtype} of shape {integers.shape} and {scale.dtype} of shape "
                f"{scale.shape}"
            )
        check_factors("a quantised weight", "scale", self.scale)


@dataclass(frozen=True)
class Calibration:
    """How scales and integers were found.

    method: of the scales of activations. rounding: of weights. images: how many were looked at, and
    sha256: a digest over them.
    """

    method: str
    rounding: str
    images: int
    sha256: str


GIVEN = Calibration("given", "nearest", 0, hashlib.sha256().hexdigest())
"""The calibration of scales that the caller chose, without images."""


@dataclass(frozen=True, eq=False)
class Quantization:
    """The integers of a network's weights, and the scales of all its values.

    bits:   of a weight: 8, 4 or 2.
    scales: float32, of the input and of each value that a step makes in integers, by name;
            max-pooling keeps its input's.
    weights, biases: by step name; biases are int32, in units of the scale of a product.
    full_range: weights may be −128, −8 or −2.

    Equal are those with equal `sha256`.
    """

    bits: int
    scales: Mapping[str, np.float32]
    weights: Mapping[str, QuantizedWeight]
    biases: Mapping[str, Array]
    calibration: Calibration = GIVEN
    full_range: bool = False

    def __post_init__(self) -> None:
        limit_of(self.bits)
        for name in ("scales", "weights", "biases"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[object, ...]:
        parts = dict(self.scales), dict(self.weights), dict(self.biases)  # a proxy has no pickle
        return type(self), (self.bits, *parts, self.calibration, self.full_range)

    @cached_property
    def sha256(self) -> str:
        """A digest over all of it; see `digest`."""
        return digest(
            self.bits,
            self.full_range,
            self.calibration,
            self.scales,
            {
                name: StoredWeight(
                    weight.integers.shape,
                    weight.scale,
                    sha256_of(packed(weight.integers, self.bits)),
                    sha256_of(self.biases[name]),
                )
                for name, weight in self.weights.items()
            },
        )

    def __eq__(self, other: object) -> bool:
        return self.sha256 == other.sha256 if isinstance(other, Quantization) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.sha256)


@dataclass(frozen=True)
class StoredWeight:
    """A weight as `digest` reads it; the digests are those of its two files."""

    shape: tuple[int, ...]
    scale: Array
    sha256: str
    bias_sha256: str


def digest(
    bits: int,
    full_range: bool,
    calibration: Calibration,
    scales: Mapping[str, np.float32],
    weights: Mapping[str, StoredWeight],
) -> str:
    """sha256 over a quantisation, in UTF-8; names are sorted, floats are little-endian float32.

    A line `BITS FULL_RANGE METHOD ROUNDING IMAGES SHA256`, where FULL_RANGE is 0 or 1; for each
    scale a line of its value's name, and the float; for each weight a line
    `STEP 64x3x7x7 WEIGHT_SHA256 BIAS_SHA256`, and its scales.
    """
    found = hashlib.sha256()
    how = calibration
    head = f"{bits} {int(full_range)} {how.method} {how.rounding} {how.images} {how.sha256}\n"
    found.update(head.encode())
    for name in sorted(scales):
        found.update(f"{name}\n".encode() + np.array(scales[name], "<f4").tobytes())
    for name in sorted(weights):
        one = weights[name]
        extents = "x".join(map(str, one.shape))
        found.update(f"{name} {extents} {one.sha256} {one.bias_sha256}\n".encode())
        found.update(np.ascontiguousarray(one.scale, "<f4").tobytes())
    return found.hexdigest()


def sha256_of(array: Array) -> str:
    """The hex digest of an array's bytes, row-major and little-endian."""
    stored = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return hashlib.sha256(stored).hexdigest()


# -- packing -----------------------------------------------------------------------------------


def row_nbytes(count: int, bits: int) -> int:
    """The bytes of `count` integers of a row."""
    return -(-count * bits // 8)


def packed(integers: Array, bits: int) -> Array:
    """(O, …) integers in int8 as (O, bytes of a row) in uint8."""
    rows = np.ascontiguousarray(integers).reshape(len(integers), -1).view(np.uint8)
    if bits == 8:
        return rows
    each = 8 // bits
    missing = -rows.shape[1] % each
    parts = np.pad(rows & np.uint8((1 << bits) - 1), ((0, 0), (0, missing)))
    parts = parts.reshape(len(rows), -1, each)
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    found: Array = np.bitwise_or.reduce(parts << shifts, axis=2).astype(np.uint8)
    return found


def unpacked(rows: Array, count: int, bits: int) -> Array:
    """(O, count) integers in int8 of packed rows. Raises `WeightsError` for unused bits not 0."""
    if bits == 8:
        return rows.view(np.int8)
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    parts = (rows[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
    parts = parts.reshape(len(rows), -1)
    if parts[:, count:].any():
        row = int(np.flatnonzero(parts[:, count:].any(axis=1))[0])
        raise WeightsError(f"the unused bits at the end of row {row} are not 0")
    sign = np.int8(1 << (bits - 1))  # of two's complement
    found: Array = (parts[:, :count].astype(np.int8) ^ sign) - sign
    return found


__all__ = [
    "GIVEN",
    "Calibration",
    "Quantization",
    "QuantizedWeight",
    "StoredWeight",
    "digest",
    "packed",
    "row_nbytes",
    "sha256_of",
    "unpacked",
]
