"""The arithmetic of a function: the formats that it multiplies and sums in, and how it rounds.

An `Arithmetic` is a precision and a rounding contract in one, and has a text, such as
`sum,float32,factors=tf32`: what `r18 check` prints as found, takes as `--contract`, and keeps in
the name of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from r18.backend import RoundingContract
from r18.errors import UsageError, show, unknown
from r18.graph.ops import BatchNorm
from r18.graph.precision import BF16, FP16, FP32, FP64, PRECISIONS, Precision
from r18_oracle.functions.likes import Like

DTYPES = {"float32": FP32, "float16": FP16, "bfloat16": BF16, "float64": FP64}
"""The formats of arrays, each with the precision that is expected of a function over them."""

BITS = {"float64": 53, "float32": 24, "fp16x2": 22, "tf32": 11, "float16": 11, "bfloat16": 8}
"""The bits of a significand, the leading one included."""
NAMES = {"fp16x2": "pairs of 11-bit numbers"}
"""Formats whose name says little."""
SUMS = ("float64", "float32", "float16", "bfloat16")
"""The formats that sums may be bounded in."""
FLAGS = ("truncates", "stored_sum", "flushes")
TRANSFORMS = ("winograd_f2x2", "winograd_f4x4", "transforms")
"""The algorithms of convolutions that are no plain sum."""


@dataclass(frozen=True)
class Arithmetic:
    """How a function over arrays of one format rounds.

    algorithm: of the rounding contract (`r18.backend.RoundingContract`).
    storage:   the format of its arrays.
    factors:   the format that the factors of each product are rounded to first.
    sums:      the format in which sums are kept, or any intermediate result.
    truncates: sums are cut off, not rounded to nearest; factors may be, too.
    stored_sum: the sum is rounded to `storage` before the bias is added.
    flushes:   subnormal numbers are replaced by zero.
    """

    algorithm: str
    storage: str
    factors: str
    sums: str
    truncates: bool = False
    stored_sum: bool = False
    flushes: bool = False

    def __post_init__(self) -> None:
        for what, name, known in (
            ("format of arrays", self.storage, DTYPES),
            ("format of factors", self.factors, BITS),
            ("format of sums", self.sums, SUMS),
        ):
            if name not in known:
                raise unknown(what, name, known, error=UsageError)

    @property
    def precision(self) -> Precision:
        """One of `r18.graph.precision` with vectors as they are stored, if there is one."""
        for known in PRECISIONS.values():
            if (known.storage, known.multiply) != (self.storage, self.factors):
                continue
            if BITS[self.sums] >= BITS[known.accumulate]:
                return replace(known, vectors=self.storage, flush_to_zero=self.flushes)
        name = f"{self.storage}-{self.factors}-{self.sums}"
        return Precision(
            *(name, self.storage, self.factors, self.sums), self.flushes, vectors=self.storage
        )

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract(
            self.algorithm,
            "float32" if self.algorithm == "exact" and self.storage != "float64" else self.sums,
            self.storage,
            truncates=self.truncates,
            stored_sum=self.stored_sum,
        )

    def __str__(self) -> str:
        factors = f",factors={self.factors}" if self.factors != self.storage else ""
        flags = "".join(f",{name}" for name in FLAGS if getattr(self, name))
        return f"{self.algorithm},{self.sums}{factors}{flags}"

    def words(self) -> str:
        """For people: `multiplies tf32 and sums in float32, cut off`."""
        if self.algorithm == "exact":
            return "moves values and rounds nothing"
        how = f"sums in {self.sums}" if self.algorithm == "sum" else f"computes in {self.sums}"
        if self.algorithm.startswith("winograd"):
            how = f"transforms 3×3 windows ({self.algorithm}), {how}"
        elif self.algorithm == "transforms":
            how = f"transforms some windows (FFT or Winograd's F(6×6, 3×3)), {how}"
        elif self.algorithm == "sum":
            how = f"multiplies {NAMES.get(self.factors, self.factors)} and {how}"
        else:  # its errors are known, and not the formats that they come from
            how = f"stays within the bound of {self.sums}"
            how += ", as x·scale + shift" if self.algorithm == "scale_shift" else ""
        how += ", cut off" if self.truncates else ", rounded to nearest"
        how += ", and rounds the sum before it adds the bias" if self.stored_sum else ""
        return how + ("; subnormal numbers become zero" if self.flushes else "")

    def below(self, expected: Arithmetic) -> tuple[str, ...]:
        """The formats narrower than expected, each as a verb and its object; empty if none is."""
        found = []
        if self.algorithm == "exact":
            return ()
        if BITS[self.factors] < BITS[expected.factors]:
            found.append(f"multiplies in {NAMES.get(self.factors, self.factors)}")
        if BITS[self.sums] < BITS[expected.sums]:
            products = self.algorithm in ("sum", *TRANSFORMS)
            beyond = f"exceeds the bound of {expected.sums} and is within that of {self.sums}"
            found.append(f"sums in {self.sums}" if products else beyond)
        if self.truncates and not expected.truncates and BITS[self.factors] > BITS["tf32"]:
            found.append("cuts its sums off instead of rounding them")
        return tuple(found)


def expected_of(like: Like, dtype: str) -> Arithmetic:
    """The arithmetic expected of a function like this operator, over arrays of this format.

    Factors as they are stored, sums in the precision's accumulator. Raises `UsageError` for a
    format of arrays that is not known.
    """
    if dtype not in DTYPES:
        raise unknown("format of arrays", dtype, DTYPES, error=UsageError)
    sums = DTYPES[dtype].accumulate
    return Arithmetic(like.algorithms[0], dtype, dtype, sums)


def arithmetic_of(text: str, like: Like, dtype: str) -> Arithmetic:
    """The arithmetic of a text: a precision's name (`tf32`), or what `str(arithmetic)` gives.

    Raises `UsageError` for any other text.
    """
    expected = expected_of(like, dtype)
    if text in PRECISIONS:
        named = PRECISIONS[text]
        if named.storage != dtype:
            raise UsageError(f"{text} stores {named.storage}, and the arrays are {dtype}")
        return _bounded(replace(expected, factors=named.multiply, sums=named.accumulate))
    algorithm, *parts = text.split(",")
    if not parts or algorithm not in (*like.algorithms, *_transforms(like)):
        raise UsageError(
            f"'{text}' is no contract of {like.title}: name a precision ({', '.join(PRECISIONS)}) "
            f"or write '{expected}', as `r18 check` prints it"
        )
    values: dict[str, Any] = {"sums": parts[0]}
    for part in parts[1:]:
        name, equals, value = part.partition("=")
        if name not in (*FLAGS, "factors") or bool(equals) != (name == "factors"):
            raise UsageError(f"{show(part)} is no part of a contract: {', '.join(FLAGS)}, factors=")
        values[name] = value if equals else True
    return _bounded(replace(expected, algorithm=algorithm, **values))


def _transforms(like: Like) -> tuple[str, ...]:
    return TRANSFORMS if like.name == "conv2d" else ()


def _bounded(asked: Arithmetic) -> Arithmetic:
    """The arithmetic, unless no problem has a bound under it: then it raises `UsageError`.

    `r18_oracle.judge.bounds` derives the bounds, and a test compares the two.
    """
    why = None
    if asked.algorithm in ("batchnorm", "scale_shift") and asked.sums == "float16":
        why = f"batch_norm's eps of {BatchNorm.eps:g} is lost in float16"
    elif asked.algorithm == "transforms" and (
        asked.factors != asked.storage
        or min(BITS[asked.storage], BITS[asked.sums]) < BITS["float32"]
        or asked.truncates
    ):
        why = "transforms are of float32 or float64 arrays, with sums that are rounded in either"
    elif asked.algorithm in TRANSFORMS and asked.factors == "fp16x2":
        why = f"no bound is derived for {asked.algorithm} with factors that are pairs of numbers"
    if why is not None:
        raise UsageError(f"the contract '{asked}' of {asked.storage} arrays has no bound: {why}")
    return asked


__all__ = ["BITS", "DTYPES", "SUMS", "Arithmetic", "arithmetic_of", "expected_of"]
