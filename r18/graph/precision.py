"""Precision as data: the formats of storage, of factors and of sums.

`tf32` stores float32 and rounds the factors of each product to 11 significand bits; a kernel may
round its outputs to as many, since the next layer multiplies no more of them. `fp16x3` stores
float32 and splits each factor in two float16 numbers, the second scaled by 2¹¹: three products of
them make one of float32's grade on units that only support float16. `fp8` stores numbers in e4m3,
with the scales of `r18.graph.scaled`. `int8` stores 8-bit integers and sums in 32-bit ones.
bfloat16 and e4m3 arrays on the host use the dtypes of `ml_dtypes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from r18.errors import WeightsError, unknown
from r18.graph.ops import Op, WeightSpec

Array = npt.NDArray[Any]

BFLOAT16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
E4M3: np.dtype[np.generic] = np.dtype(ml_dtypes.float8_e4m3fn)

E4M3_LARGEST = 448.0
"""The largest e4m3 number: larger values saturate there. The format has no infinity."""
E4M3_BITS, E4M3_LEAST_EXPONENT = 4, -6
"""Significand bits, and the exponent of the smallest normal number."""

_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float8_e4m3fn": E4M3,
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
}

# Formats that exist only inside an arithmetic unit: no array has them as its dtype.
_MULTIPLY_ONLY = {"tf32", "fp16x2"}
_HELD_IN = {"tf32": "float32"}
"""The multiply-only formats whose numbers an array can hold, and the dtype of that array."""


def dtype_of(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of a storage format's name; raises `UnknownName`."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise unknown("storage format", name, _DTYPES) from None


def holder_of(name: str) -> np.dtype[np.generic]:
    """The dtype of arrays of results in a format: float32 for tf32; raises `UnknownName`."""
    return dtype_of(_HELD_IN.get(name, name))


def round_to_tf32(values: Array) -> Array:
    """float32 rounded to 11 significand bits, to nearest, ties away from zero; NaN stays NaN.

    Matches `cvt.rna.tf32.f32`. A NaN whose payload is only in the dropped bits would become
    infinite, so NaNs are replaced.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    kept = np.where(np.isnan(values), np.uint32(0x7FC00000), rounded)
    return kept.view(np.float32)


def round_to_e4m3(values: Array) -> Array:
    """Numbers rounded to e4m3, to nearest, ties to even, saturated; float64. NaN stays NaN.

    Matches `cvt.rn.satfinite.e4m3x2.f32`. Rounded once, whatever format the numbers are in.
    """
    with np.errstate(invalid="ignore"):  # of NaN
        wide = np.clip(np.asarray(values, np.float64), -E4M3_LARGEST, E4M3_LARGEST)
    _, exponents = np.frexp(wide)  # of a significand below 1
    quanta = np.ldexp(1.0, np.maximum(exponents - 1, E4M3_LEAST_EXPONENT) - (E4M3_BITS - 1))
    rounded: Array = np.rint(wide / quanta) * quanta
    return rounded


def as_stored(array: Array, dtype: np.dtype[Any]) -> Array:
    """A dense array in a storage dtype; e4m3 saturates, elsewhere too large a value is infinite."""
    if dtype == E4M3 and array.dtype != E4M3:
        array = round_to_e4m3(array)
    with np.errstate(over="ignore", invalid="ignore"):
        stored: Array = np.asarray(array, dtype, order="C")
    return stored


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a floating-point one, bfloat16 and e4m3 included."""
    return dtype.kind == "f" or dtype in (BFLOAT16, E4M3)


@dataclass(frozen=True)
class Precision:
    """How a kernel stores its tensors, multiplies, and accumulates.

    storage:    the format of activations and weights in memory.
    multiply:   the format each factor of a product is rounded to first.
    accumulate: the format sums are kept in.
    flush_to_zero: subnormal inputs and results are replaced by zero.
    vectors:    the format of biases and BatchNorm's parameters; "" for that of `accumulate`.
    """

    name: str
    storage: str
    multiply: str
    accumulate: str
    flush_to_zero: bool = False
    vectors: str = ""

    def __post_init__(self) -> None:
        for field in (self.storage, self.accumulate, *filter(None, [self.vectors])):
            dtype_of(field)
        if self.multiply not in _MULTIPLY_ONLY:
            dtype_of(self.multiply)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype of stored tensors."""
        return dtype_of(self.storage)

    @property
    def splits(self) -> bool:
        """Whether each factor is multiplied as two numbers, for which bounds are of their own."""
        return self.multiply == "fp16x2"

    def input_dtypes(self, op: Op) -> tuple[np.dtype[np.generic], ...]:
        """The dtype of each input of an op."""
        return tuple(dtype_of(name or self.storage) for name in op.input_storage)

    def output_dtype(self, op: Op) -> np.dtype[np.generic]:
        """The dtype of an op's output."""
        return dtype_of(op.output_storage or self.storage)

    def weight_dtype(self, spec: WeightSpec) -> np.dtype[np.generic]:
        """The dtype of a weight: matrices in `storage`, vectors in `vectors`, or its own.

        Biases and BatchNorm's parameters are few and enter each output once: rounding them to a
        narrow storage format would cost accuracy and save nothing.
        """
        if spec.storage or len(spec.shape) > 1:
            return dtype_of(spec.storage or self.storage)
        return dtype_of(self.vectors or self.accumulate)

    def stored(self, array: Array, spec: WeightSpec) -> Array:
        """A float32 or float64 weight rounded to the dtype that it is kept in, dense.

        Raises `WeightsError` for integers that the format, or the limit of the weight, does not
        hold: they are not rounded. And for a factor that is not positive and finite.
        """
        stored = as_stored(array, self.weight_dtype(spec))
        if stored.dtype.kind in "iu" and not np.array_equal(stored, array):
            wanted = f"{stored.dtype} cannot represent"
            raise WeightsError(f"the {spec.role} holds values that {wanted}: nothing is cast")
        if spec.limit and (beyond := stored[np.abs(stored.astype(np.int64)) > spec.limit]).size:
            raise WeightsError(
                f"the {spec.role} holds {beyond[0]}: its integers are −{spec.limit} … {spec.limit}"
            )
        if spec.positive and not (np.isfinite(stored) & (stored > 0)).all():
            raise WeightsError(f"every {spec.role} must be positive and finite")
        return stored

    def __str__(self) -> str:
        return self.name


FP64 = Precision("fp64", "float64", "float64", "float64")
FP32 = Precision("fp32", "float32", "float32", "float32")
TF32 = Precision("tf32", "float32", "tf32", "float32")
FP16X3 = Precision("fp16x3", "float32", "fp16x2", "float32")
FP16 = Precision("fp16", "float16", "float16", "float32")
BF16 = Precision("bf16", "bfloat16", "bfloat16", "float32")
FP8 = Precision("fp8", "float8_e4m3fn", "float8_e4m3fn", "float32")
INT8 = Precision("int8", "int8", "int8", "int32")

_ALSO = {"float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "single": "fp32"}
_ALSO |= {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_ALSO |= {"float8": "fp8", "float8_e4m3fn": "fp8", "e4m3": "fp8"}
"""Formats' names, which are not those of precisions: to a string, tf32 is nearest to float32."""

PRECISIONS: dict[str, Precision] = {
    p.name: p for p in (FP64, FP32, FP16X3, TF32, FP16, BF16, FP8, INT8)
}


def precision(name: str) -> Precision:
    """The precision of that name; raises `UnknownName` with the known ones."""
    try:
        return PRECISIONS[name]
    except (KeyError, TypeError):  # a list is no key
        meant = _ALSO.get(name.lower()) if isinstance(name, str) else None
        raise unknown("precision", name, PRECISIONS, meant=meant) from None


__all__ = [
    "BF16",
    "BFLOAT16",
    "E4M3",
    "E4M3_LARGEST",
    "FP8",
    "FP16",
    "FP16X3",
    "FP32",
    "FP64",
    "INT8",
    "PRECISIONS",
    "TF32",
    "Precision",
    "as_stored",
    "dtype_of",
    "holder_of",
    "is_floating",
    "precision",
    "round_to_e4m3",
    "round_to_tf32",
]
