"""The quant block, field by field: the least that each refusal needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantised_weights import CALIBRATION, quantised_weights, sealed
from r18.errors import ManifestError, WeightsError
from r18.graph.quantization import packed, sha256_of
from r18.graph.resnet import tiny
from r18.weights.precisions import quantization_of
from r18.weights.quant import PackedFile, QuantBlock, stored_bytes

Json = dict[str, Any]
FOUND = quantization_of(quantised_weights(4))
BLOCK = QuantBlock.of(FOUND, tiny())


def changed(change: Callable[[Json], object], seal: bool = True) -> QuantBlock:
    """The block after a change, with the matching digest."""
    data: Json = json.loads(BLOCK.dumps())
    change(data)
    if seal:
        data["sha256"] = sealed(data)
    return QuantBlock.from_json(data)


def test_a_block_reads_back() -> None:
    data = json.loads(BLOCK.dumps())
    assert data == json.loads(json.dumps(BLOCK.to_json()))
    assert QuantBlock.from_json(data) == BLOCK
    assert list(data) == [
        *("bits", "full_range", "packing", "calibration", "sha256"),
        *("activations", "weights"),
    ]
    assert list(data["weights"][0]) == [
        *("name", "shape", "path", "sha256", "bias_path", "bias_sha256", "scale", "zero_point"),
    ]
    assert data["activations"][0] == {
        "name": "image",
        "dtype": "int8",
        "scale": float(FOUND.scales["image"]),
        "zero_point": 0,
    }
    lines = BLOCK.dumps().splitlines()
    assert len(lines) == 2 + 5 + 2 * 2 + len(BLOCK.activations) + len(BLOCK.weights)
    assert all(line.startswith("    ") for line in lines[1:-1])


def test_a_block_says_what_the_quantisation_says() -> None:
    assert (BLOCK.bits, BLOCK.full_range, BLOCK.calibration) == (4, False, CALIBRATION)
    assert BLOCK.sha256 == FOUND.sha256 == BLOCK.computed_sha256()
    assert {one.name: one.scale for one in BLOCK.activations} == dict(FOUND.scales)
    for one in BLOCK.weights:
        weight, bias = FOUND.weights[one.name], FOUND.biases[one.name]
        assert one.shape == weight.integers.shape
        assert one.count == weight.integers[0].size
        assert (one.path, one.bias_path) == (
            f"{one.name}.int_weight.bin",
            f"{one.name}.int_bias.bin",
        )
        assert one.sha256 == sha256_of(packed(weight.integers, 4))
        assert one.bias_sha256 == sha256_of(bias)
        assert list(one.scale) == weight.scale.tolist()
    assert list(BLOCK.paths()) == [
        path for one in BLOCK.weights for path in (one.path, one.bias_path)
    ]


def test_files_are_those_of_weights_and_biases() -> None:
    files = BLOCK.files
    stored = dict(stored_bytes(FOUND))
    assert [one.path for one in files] == list(BLOCK.paths())
    assert [one.name for one in files] == list(stored)
    for file in files:
        array = stored[file.name]
        assert file.shape == array.shape
        assert file.dtype == array.dtype.name
        assert file.sha256 == sha256_of(array)
    for weight, entry in zip(files[::2], BLOCK.weights, strict=True):
        assert isinstance(weight, PackedFile)
        assert (weight.integers, weight.bits) == (entry.shape, 4)
    first = files[0]
    assert first.described == "shape [8, 3, 7, 7] in int4, 74 bytes for each output channel"
    whole = QuantBlock.of(quantization_of(quantised_weights(8)), tiny())
    assert whole.files[0].described == "shape [8, 3, 7, 7] in int8"


def weight(place: int, /, **values: object) -> Callable[[Json], object]:
    return lambda data: data["weights"][place].update(values)


def activation(place: int, /, **values: object) -> Callable[[Json], object]:
    return lambda data: data["activations"][place].update(values)


def calibration(**values: object) -> Callable[[Json], object]:
    return lambda data: data["calibration"].update(values)


def taller(data: Json) -> None:
    """Add a channel, with its scale."""
    data["weights"][-1]["shape"][0] += 1
    data["weights"][-1]["scale"].append(0.5)


REFUSED: dict[str, tuple[Callable[[Json], object], str]] = {
    "method": (calibration(method="min max"), r"calibration\.method must be a word, got 'min max'"),
    "method with a line": (calibration(method="min\nmax"), r"calibration\.method must be a word"),
    "rounding": (calibration(rounding="to nearest"), r"calibration\.rounding must be a word"),
    "rounding with a line": (calibration(rounding="a\n"), r"calibration\.rounding must be a word"),
    "digest of images": (calibration(sha256="ab" * 31), r"quant\.calibration\.sha256 must be 64"),
    "no images": (calibration(images=-1), "must be a number of images, got -1"),
    "too many images": (calibration(images=1 << 31), "must be a number of images, got 2147483648"),
    "images true": (calibration(images=True), "must be a number of images, got True"),
    "digest": (weight(1, sha256="0" * 63), r"quant\.weights\[1\]\.sha256 must be 64"),
    "digest of a bias": (weight(1, bias_sha256="0"), r"weights\[1\]\.bias_sha256 must be 64"),
    "name": (weight(2, name="a\nb"), r"weights\[2\]\.name must be printable"),
    "name of a value": (activation(3, name="a\tb"), r"activations\[3\]\.name must be printable"),
    "empty name": (weight(0, name=""), "must be a text that is not empty"),
    "vector": (weight(0, shape=[8]), "must be that of a matrix or filters, got"),
    "deep": (weight(0, shape=[8, 2, 33156]), "weight 'conv1': K is 66,312, and sums of more than"),
    "scales": (lambda d: d["weights"][-1]["scale"].append(1.0), "11 scales for 10 output channels"),
    "scale true": (activation(0, scale=True), "activation 'image' must be a number, got True"),
    "scale 1": (activation(0, scale=2**128), "beyond the normal numbers of float32"),
    "zero": (weight(0, zero_point=True), r"weights\[0\]\.zero_point must be an integer, got True"),
    "twice": (weight(1, name="conv1"), "the weight 'conv1' appears 2 times"),
    "path twice": (
        weight(1, bias_path="conv1.int_bias.bin"),
        r"'conv1\.int_bias\.bin' appears",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: str) -> None:
    change, words = REFUSED[kind]
    with pytest.raises(ManifestError, match=words):
        changed(change)


def smallest(data: Json) -> None:
    data["activations"][0]["scale"] = float(np.finfo(np.float32).tiny)
    data["activations"][1]["scale"] = float(np.finfo(np.float32).max)


ACCEPTED: dict[str, Callable[[Json], object]] = {
    "no images": calibration(images=0),
    "most images": calibration(images=(1 << 31) - 1),
    "other words": calibration(method="mine", rounding="up"),
    "an integer": activation(0, scale=1),
    "ends of float32": smallest,
    "deepest": weight(0, shape=[8, 66_311]),
    "matrix": weight(0, shape=[8, 147]),
    "full range": lambda data: data.update(full_range=True),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_a_block_may_say(kind: str) -> None:
    made = changed(ACCEPTED[kind])
    assert made != BLOCK
    assert QuantBlock.from_json(json.loads(made.dumps())) == made


def test_a_digest_that_is_another() -> None:
    with pytest.raises(ManifestError, match=rf"sha256 is {'0' * 16}…, and the block has"):
        changed(lambda data: data.update(sha256="0" * 64), seal=False)


OTHERS: dict[str, tuple[Callable[[Json], object], str]] = {
    "format of the first": (activation(0, dtype="uint8"), "'image' is uint8, tiny needs int8"),
    "format of the last": (activation(-1, dtype="int8"), "is int8, tiny needs uint8"),
    "shape of the first": (weight(0, shape=[8, 147]), "weight 'conv1' has shape .8, 147., tiny"),
    "shape of the last": (taller, r"weight 'fc' has shape \[11, 64\], tiny needs \[10, 64\]"),
    "a value more": (
        lambda d: d["activations"].append(d["activations"][0] | {"name": "imag"}),
        "activation 'imag' is not one of tiny's, did you mean 'image'",
    ),
    "a weight less": (
        lambda d: d["weights"].pop(3),
        f"is missing; tiny has {len(BLOCK.weights)}",
    ),
    "product": (
        lambda d: (activation(0, scale=2.0**-126)(d), weight(0, scale=[2.0**-126] * 8)(d)),
        "quant: step 'conv1': the scale of a product of channel 0 must be positive",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("error", [ManifestError, WeightsError])
def test_what_another_network_would_have(kind: str, error: type[WeightsError]) -> None:
    change, words = OTHERS[kind]
    made = changed(change)
    with pytest.raises(error, match=words) as caught:
        made.check(tiny(), error)
    assert type(caught.value) is error


def test_a_block_of_the_network_itself() -> None:
    BLOCK.check(tiny())
    BLOCK.check_computable()
    with pytest.raises(ManifestError, match="quant: the quantisation is full_range"):
        changed(lambda data: data.update(full_range=True)).check_computable()
