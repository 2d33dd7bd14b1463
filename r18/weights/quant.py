"""The `quant` block of a manifest: integers next to the float tensors that they were made of.

    "quant": {
      "bits": 4, "full_range": false, "packing": "lowest bits first, rows in whole bytes",
      "calibration": {"method": "mse", "rounding": "adaround", "images": 256, "sha256": "…"},
      "sha256": "…",
      "activations": [
        {"name": "image", "dtype": "int8", "scale": 0.0207, "zero_point": 0},
        …
      ],
      "weights": [
        {"name": "conv1", "shape": [64, 3, 7, 7], "zero_point": 0,
         "path": "conv1.int_weight.bin", "sha256": "…",
         "bias_path": "conv1.int_bias.bin", "bias_sha256": "…", "scale": […]},
        …
      ]
    }

`r18.graph.quantized` specifies what the numbers mean. Names of activations are those of values,
names of weights those of steps, both of the network at fusion level `all`. A scale is a float32,
written in decimal so that it reads back exactly; a weight has one for each output channel. A
weight's file holds its integers, one output channel after the other: int8, or packed as
`r18.graph.quantization` says (`packing`). A bias is little-endian int32. The block's `sha256` is
that of `r18.graph.quantization.digest`.

The block is not trusted. Everything it says is checked before the first tensor is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r18.errors import ManifestError, R18Error, WeightsError, nearest, show
from r18.files import check_distinct
from r18.graph.ops import Shape
from r18.graph.passes import fuse
from r18.graph.quantization import (
    Calibration,
    Quantization,
    QuantizedWeight,
    StoredWeight,
    digest,
    packed,
    row_nbytes,
    sha256_of,
    unpacked,
)
from r18.graph.quantize import (
    LEVEL,
    check_range,
    check_sums,
    multipliers,
    quantized,
    scaled_values,
)
from r18.graph.quantized import LIMITS, MOST_DEPTH, STORAGES, limit_of
from r18.graph.schedule import Schedule
from r18.weights.fields import as_list, as_object, as_shape, as_text, check_known, field
from r18.weights.tensors import TensorFile, check_sha256, read_file

PACKING = "lowest bits first, rows in whole bytes"
SMALLEST = float(np.finfo(np.float32).tiny)

_FIELDS = ("bits", "full_range", "packing", "calibration", "sha256", "activations", "weights")
_ACTIVATION = ("name", "dtype", "scale", "zero_point")


@dataclass(frozen=True)
class Activation:
    """The storage format and scale of a value."""

    name: str
    dtype: str
    scale: float


@dataclass(frozen=True)
class IntegerEntry:
    """A weight in integers, with its bias."""

    name: str
    shape: Shape
    path: str
    sha256: str
    bias_path: str
    bias_sha256: str
    scale: tuple[float, ...]

    @property
    def count(self) -> int:
        """The integers of an output channel."""
        return math.prod(self.shape[1:])


_WEIGHT = (*(f.name for f in fields(IntegerEntry)), "zero_point")


@dataclass(frozen=True)
class PackedFile(TensorFile):
    """A weight's file: (O, bytes of a row) in uint8. integers: its shape. bits: of each."""

    dtype: str = "uint8"
    integers: Shape = ()
    bits: int = 8

    @property
    def described(self) -> str:
        text = f"shape {show(list(self.integers))} in int{self.bits}"
        return text if self.bits == 8 else f"{text}, {self.shape[1]} bytes for each output channel"


@dataclass(frozen=True)
class QuantBlock:
    """The contents of the block; checked in itself when read, against a network by `check`."""

    bits: int
    full_range: bool
    calibration: Calibration
    sha256: str
    activations: tuple[Activation, ...]
    weights: tuple[IntegerEntry, ...]

    @classmethod
    def of(cls, found: Quantization, schedule: Schedule) -> QuantBlock:
        """The block of a quantisation of a schedule (at level `none`), in the schedule's order.

        Raises `WeightsError` where it is not one of this schedule.
        """
        integers = quantized(fuse(schedule, LEVEL), found.bits)
        formats = scaled_values(integers)
        if set(formats) != set(found.scales):
            wrong = sorted(set(formats) ^ set(found.scales))
            raise WeightsError(f"the quantisation is not one of '{schedule.name}': '{wrong[0]}'")
        entries = [
            IntegerEntry(
                name=step.name,
                shape=found.weights[step.name].integers.shape,
                path=f"{step.name}.int_weight.bin",
                sha256=sha256_of(packed(found.weights[step.name].integers, found.bits)),
                bias_path=f"{step.name}.int_bias.bin",
                bias_sha256=sha256_of(found.biases[step.name]),
                scale=tuple(float(scale) for scale in found.weights[step.name].scale),
            )
            for step in integers.steps
            if step.name in found.weights
        ]
        made = cls(
            found.bits,
            found.full_range,
            found.calibration,
            found.sha256,
            tuple(Activation(n, dtype, float(found.scales[n])) for n, dtype in formats.items()),
            tuple(entries),
        )
        made.check(schedule, WeightsError)
        return made

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; `from_json` is the inverse."""
        return {
            "bits": self.bits,
            "full_range": self.full_range,
            "packing": PACKING,
            "calibration": asdict(self.calibration),
            "sha256": self.sha256,
            "activations": [asdict(one) | {"zero_point": 0} for one in self.activations],
            "weights": [
                asdict(one)
                | {"shape": list(one.shape), "zero_point": 0}
                | {"scale": list(one.scale)}
                for one in self.weights
            ],
        }

    def dumps(self) -> str:
        """The text of the block: one line for each activation and weight."""
        data = self.to_json()
        lists = {name: data.pop(name) for name in ("activations", "weights")}
        head = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
        for name, entries in lists.items():
            lines = ",\n".join(f"      {json.dumps(entry)}" for entry in entries)
            head.append(f"    {json.dumps(name)}: [\n{lines}\n    ]")
        return "{\n" + ",\n".join(head) + "\n  }"

    @classmethod
    def from_json(cls, value: object) -> QuantBlock:
        """Check every field by itself. Raises `ManifestError`, which does not name the file."""
        data = as_object(value, "quant")
        check_known(data, _FIELDS, "field of quant")
        bits = field(data, "bits", "quant")
        if type(bits) is not int or bits not in LIMITS:
            raise ManifestError(f"quant.bits: weights have 8, 4 or 2 bits, got {show(bits)}")
        full_range = field(data, "full_range", "quant")
        if not isinstance(full_range, bool):
            raise ManifestError(f"quant.full_range must be true or false, got {show(full_range)}")
        packing = field(data, "packing", "quant")
        if packing != PACKING:
            raise ManifestError(f"quant.packing is {show(packing)}, this r18 reads {PACKING!r}")
        calibration = _calibration(field(data, "calibration", "quant"))
        stated = check_sha256(
            as_text(field(data, "sha256", "quant"), "quant.sha256"), "quant.sha256", ManifestError
        )
        activations, entries = (
            as_list(field(data, name, "quant"), f"quant.{name}")
            for name in ("activations", "weights")
        )
        made = cls(
            bits,
            full_range,
            calibration,
            stated,
            tuple(_activation(one, f"quant.activations[{i}]") for i, one in enumerate(activations)),
            tuple(_weight(one, f"quant.weights[{i}]") for i, one in enumerate(entries)),
        )
        check_distinct("activation", [one.name for one in made.activations], ManifestError)
        check_distinct("weight", [one.name for one in made.weights], ManifestError)
        check_distinct("path", list(made.paths()), ManifestError)
        found = made.computed_sha256()
        if found != stated:
            raise ManifestError(
                f"quant.sha256 is {stated[:16]}…, and the block has {found[:16]}…\n"
                "  a scale, a digest or another field was changed; quantise again"
            )
        return made

    def computed_sha256(self) -> str:
        """The digest of all that the block says."""
        return digest(
            self.bits,
            self.full_range,
            self.calibration,
            {one.name: np.float32(one.scale) for one in self.activations},
            {
                one.name: StoredWeight(
                    one.shape, np.array(one.scale, np.float32), one.sha256, one.bias_sha256
                )
                for one in self.weights
            },
        )

    def paths(self) -> Iterator[str]:
        """The path of every file."""
        for one in self.weights:
            yield from (one.path, one.bias_path)

    def check(self, schedule: Schedule, error: type[WeightsError] = ManifestError) -> None:
        """Raise `error` unless the block is one of a network, given at level `none`."""
        try:
            folded = fuse(schedule, LEVEL)
            integers = quantized(folded, self.bits)
        except R18Error as problem:
            raise error(f"quant: {problem}") from None
        formats = scaled_values(integers)
        _same("activation", [one.name for one in self.activations], formats, schedule.name, error)
        for value in self.activations:
            if value.dtype != formats[value.name]:
                raise error(
                    f"quant: activation '{value.name}' is {value.dtype}, {schedule.name} needs "
                    f"{formats[value.name]}: uint8 after a ReLU, int8 elsewhere"
                )
        steps = {step.name: step for step in integers.steps}
        shapes = {
            name: spec.shape
            for name, step in steps.items()
            for spec in step.op.weights()
            if spec.role == "weight"
        }
        _same("weight", [one.name for one in self.weights], shapes, schedule.name, error)
        for entry in self.weights:
            if entry.shape != shapes[entry.name]:
                raise error(
                    f"quant: weight '{entry.name}' has shape {show(list(entry.shape))}, "
                    f"{schedule.name} needs {list(shapes[entry.name])}"
                )
        try:
            multipliers(
                folded,
                self.bits,
                {one.name: np.float32(one.scale) for one in self.activations},
                {one.name: np.array(one.scale, np.float32) for one in self.weights},
            )
        except WeightsError as problem:
            raise error(f"quant: {problem}") from None

    def check_computable(self) -> None:
        """Raise `ManifestError` for integers that no kernel takes."""
        try:
            check_range(self.bits, self.full_range)
        except WeightsError as error:
            raise ManifestError(f"quant: {error}") from None

    @property
    def files(self) -> list[TensorFile]:
        """The file of each weight, with that of its bias behind it."""
        found: list[TensorFile] = []
        for one in self.weights:
            stored = (one.shape[0], row_nbytes(one.count, self.bits))
            found.append(
                PackedFile(
                    f"{one.name}.int_weight",
                    one.path,
                    stored,
                    sha256=one.sha256,
                    integers=one.shape,
                    bits=self.bits,
                )
            )
            name = f"{one.name}.int_bias"
            found.append(TensorFile(name, one.bias_path, one.shape[:1], "int32", one.bias_sha256))
        return found

    def read(self, root: Path, schedule: Schedule) -> Quantization:
        """The quantisation, of files in a folder; for a block that was checked.

        Raises `ManifestError` for integers beyond the limit of their bits, unused bits that are not
        0, and biases with which a sum may leave int32.
        """
        files = iter(self.files)
        stored = {step.name: step.op for step in quantized(fuse(schedule, LEVEL), self.bits).steps}
        found: dict[str, QuantizedWeight] = {}
        biases: dict[str, NDArray[Any]] = {}
        for one, weight, bias in zip(self.weights, files, files, strict=True):
            rows = read_file(root, weight, ManifestError)
            try:
                integers = unpacked(rows, one.count, self.bits).reshape(one.shape)
                self._check_range(integers)
                biases[one.name] = read_file(root, bias, ManifestError)
                check_sums(one.name, stored[one.name].input_storage[0], integers, biases[one.name])
            except ManifestError:
                raise
            except WeightsError as error:
                raise ManifestError(f"quant: weight '{one.name}': {error}") from None
            found[one.name] = QuantizedWeight(integers, np.array(one.scale, np.float32))
        scales = {one.name: np.float32(one.scale) for one in self.activations}
        return Quantization(self.bits, scales, found, biases, self.calibration, self.full_range)

    def _check_range(self, integers: NDArray[np.int8]) -> None:
        limit = limit_of(self.bits)
        if not self.full_range and integers.min() < -limit:
            raise WeightsError(
                f"it holds {integers.min()}: weights of {self.bits} bits are −{limit} … {limit} "
                "unless the block says full_range"
            )


def stored_bytes(found: Quantization) -> Iterator[tuple[str, NDArray[Any]]]:
    """The step's name and what its two files hold, of each weight: packed, then the bias."""
    for name, weight in found.weights.items():
        yield f"{name}.int_weight", packed(weight.integers, found.bits)
        yield f"{name}.int_bias", np.ascontiguousarray(found.biases[name], "<i4")


# -- fields ------------------------------------------------------------------------------------


def _same(
    what: str, found: Iterable[str], wanted: Iterable[str], network: str, error: type[WeightsError]
) -> None:
    """Raise `error` for a name that the network does not have, or that is missing."""
    given, known = list(found), list(wanted)
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise error(
                f"quant: {what} {show(name)} is not one of {network}'s"
                + (f", did you mean '{near}'?" if near else "")
            )
    for name in known:
        if name not in given:
            raise error(f"quant: {what} '{name}' is missing; {network} has {len(known)}")


def _calibration(value: object) -> Calibration:
    data = as_object(value, "quant.calibration")
    names = tuple(one.name for one in fields(Calibration))
    check_known(data, names, "field of quant.calibration")
    texts = {
        name: as_text(field(data, name, "quant.calibration"), f"quant.calibration.{name}")
        for name in ("method", "rounding", "sha256")
    }
    check_sha256(texts["sha256"], "quant.calibration.sha256", ManifestError)
    for name in ("method", "rounding"):
        if not texts[name].isprintable() or " " in texts[name]:
            raise ManifestError(f"quant.calibration.{name} must be a word, got {show(texts[name])}")
    images = field(data, "images", "quant.calibration")
    if type(images) is not int or not 0 <= images < 1 << 31:
        raise ManifestError(
            f"quant.calibration.images must be a number of images, got {show(images)}"
        )
    return Calibration(texts["method"], texts["rounding"], images, texts["sha256"])


def _name(data: dict[str, object], what: str) -> str:
    """A name that a message and a digest can hold in one line."""
    name = as_text(field(data, "name", what), f"{what}.name")
    if not name.isprintable():
        raise ManifestError(f"{what}.name must be printable, got {show(name)}")
    return name


def _activation(value: object, what: str) -> Activation:
    data = as_object(value, what)
    check_known(data, _ACTIVATION, f"field of {what}")
    name = _name(data, what)
    dtype = field(data, "dtype", what)
    if dtype not in STORAGES:
        raise ManifestError(f"{what}.dtype must be uint8 or int8, got {show(dtype)}")
    scale = _scale(field(data, "scale", what), f"the scale of activation {show(name)}")
    _check_zero_point(data, what, f"activation {show(name)}")
    return Activation(name, str(dtype), scale)


def _weight(value: object, what: str) -> IntegerEntry:
    data = as_object(value, what)
    check_known(data, _WEIGHT, f"field of {what}")
    name = _name(data, what)
    texts = {
        key: as_text(field(data, key, what), f"{what}.{key}")
        for key in ("path", "sha256", "bias_path", "bias_sha256")
    }
    for key in ("sha256", "bias_sha256"):
        check_sha256(texts[key], f"{what}.{key}", ManifestError)
    shape = as_shape(field(data, "shape", what), f"{what}.shape")
    if len(shape) < 2:
        raise ManifestError(f"{what}.shape must be that of a matrix or filters, got {list(shape)}")
    depth = math.prod(shape[1:])
    if depth > MOST_DEPTH:
        raise ManifestError(
            f"weight {show(name)}: K is {depth:,}, and sums of more than {MOST_DEPTH:,} products "
            "may leave int32"
        )
    scales = as_list(field(data, "scale", what), f"{what}.scale", "numbers")
    if len(scales) != shape[0]:
        raise ManifestError(
            f"weight {show(name)}: {len(scales)} scales for {shape[0]} output channels; each "
            "channel has one"
        )
    scale = tuple(
        _scale(one, f"the scale of channel {channel} of weight {show(name)}")
        for channel, one in enumerate(scales)
    )
    _check_zero_point(data, what, f"weight {show(name)}")
    return IntegerEntry(name, shape, scale=scale, **texts)


def _scale(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"{what} must be a number, got {show(value)}")
    if value == 0:
        raise ManifestError(f"{what} is 0: no integer would stand for another number than 0")
    if value < 0:
        raise ManifestError(f"{what} is negative: {show(value)}; scales are positive")
    if not (isinstance(value, int) or math.isfinite(value)):
        raise ManifestError(f"{what} is {value}; scales are finite")
    if not SMALLEST <= value <= float(np.finfo(np.float32).max):
        raise ManifestError(f"{what} is {show(value)}, beyond the normal numbers of float32")
    if float(np.float32(value)) != value:
        raise ManifestError(
            f"{what} is {show(value)}, which is no float32; the nearest is {np.float32(value)!s}"
        )
    return float(value)


def _check_zero_point(data: dict[str, object], what: str, whose: str) -> None:
    value = field(data, "zero_point", what)
    if type(value) is not int:
        raise ManifestError(f"{what}.zero_point must be an integer, got {show(value)}")
    if value:
        raise ManifestError(
            f"{whose} has zero_point {show(value)}: kernels take 0 only\n  quantise symmetrically, "
            "with uint8 after a ReLU"
        )


__all__ = ["Activation", "IntegerEntry", "QuantBlock", "stored_bytes"]
