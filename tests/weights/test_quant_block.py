"""The quant block of a manifest: round trips, packing, and each kind of damage in its own words."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import r18
from flips import flip_bit, flipped, without
from quantised_weights import quantised_weights, sealed
from r18.backend import CompileOptions
from r18.backend.registry import get_backend
from r18.errors import ManifestError, UsageError, WeightsError
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization, QuantizedWeight, packed, row_nbytes, unpacked
from r18.graph.quantize import integer_weights, quantized
from r18.graph.resnet import resnet, tiny
from r18.weights import Weights, export_weights, load_weights, manifest, quant
from r18.weights.manifest import MANIFEST, load_manifest, read_manifest, write_manifest
from support import images

Json = dict[str, Any]
BITS = (8, 4, 2)


@pytest.fixture(scope="module", params=BITS, ids=lambda bits: f"int{bits}")
def made(request: pytest.FixtureRequest) -> Weights:
    return quantised_weights(request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in four bits, which tests do not change."""
    folder = tmp_path_factory.mktemp("quant") / "int4"
    write_manifest(folder, quantised_weights(4), tiny())
    return folder


@pytest.fixture
def export(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "int4"))


# -- round trips -------------------------------------------------------------------------------


def test_a_round_trip_is_bit_exact(made: Weights, tmp_path: Path) -> None:
    write_manifest(tmp_path / "q", made, tiny())
    found = load_weights(str(tmp_path / "q"), tiny())
    assert found == made
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in made.items()}
    ours, theirs = made.quantization, found.quantization
    assert ours is not None
    assert theirs is not None
    assert theirs.bits == ours.bits
    assert theirs.calibration == ours.calibration
    assert theirs.scales == ours.scales
    for name, weight in ours.weights.items():
        np.testing.assert_array_equal(theirs.weights[name].integers, weight.integers)
        np.testing.assert_array_equal(theirs.weights[name].scale, weight.scale)
        np.testing.assert_array_equal(theirs.biases[name], ours.biases[name])
    folded = fuse(tiny(), "all")
    first, second = (integer_weights(folded, one) for one in (ours, theirs))
    assert first.keys() == second.keys() == quantized(folded, ours.bits).weight_specs.keys()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    again = load_manifest(tmp_path / "q" / MANIFEST)
    assert again.from_json(json.loads(again.dumps())) == again


def test_an_export_of_an_export_keeps_the_block(made: Weights, tmp_path: Path) -> None:
    export_weights(tmp_path / "a", made, tiny())
    export_weights(tmp_path / "b", load_weights(str(tmp_path / "a"), tiny()), tiny())
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for format in ("npz", "safetensors"):
        with pytest.raises(UsageError, match="quantised weights are exported in the format bin"):
            export_weights(tmp_path / f"w.{format}", made, tiny(), format=format)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_floats_have_no_block(tmp_path: Path) -> None:
    write_manifest(tmp_path / "w", load_weights("synthetic", tiny()), tiny())
    assert "quant" not in json.loads((tmp_path / "w" / MANIFEST).read_text())
    assert load_weights(str(tmp_path / "w"), tiny()).quantization is None


def test_a_quantisation_crosses_processes_and_is_known_by_its_digest(made: Weights) -> None:
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.quantization == made.quantization
    assert hash(again.quantization) == hash(made.quantization)
    assert made != replace(made, quantization=None)
    assert f"int{made.quantization.bits}" in repr(made)  # type: ignore[union-attr]


def test_what_a_reader_in_any_language_needs(whole: Path) -> None:
    """A reader in any language can unpack four-bit weights from the block, as done here by hand."""
    block = json.loads((whole / MANIFEST).read_text())["quant"]
    quantization = quantised_weights(4).quantization
    assert quantization is not None
    entry = block["weights"][0]
    data = (whole / entry["path"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    count, channels = int(np.prod(entry["shape"][1:])), entry["shape"][0]
    row = (count + 1) // 2
    assert count % 2 == 1, "an odd row has four unused bits"
    assert len(data) == channels * row
    for channel in range(channels):
        found = []
        for byte in data[channel * row : (channel + 1) * row]:
            found += [n - 16 if n > 7 else n for n in (byte & 15, byte >> 4)]
        expected = quantization.weights[entry["name"]].integers[channel].reshape(-1)
        assert found == [*expected.tolist(), 0]
    bias = np.frombuffer((whole / entry["bias_path"]).read_bytes(), "<i4")
    np.testing.assert_array_equal(bias, quantization.biases[entry["name"]])
    scales = {one["name"]: one["scale"] for one in block["activations"]}
    assert all(np.float32(scale) == scale for scale in scales.values())
    assert block["calibration"] == {
        "method": "minmax",
        "rounding": "nearest",
        "images": 3,
        "sha256": "ab" * 32,
    }


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_packing_is_exact_at_every_length(bits: int, count: int) -> None:
    rng = np.random.default_rng(count)
    ends = -(1 << bits - 1), (1 << bits - 1) - 1
    integers = rng.integers(ends[0], ends[1] + 1, (3, count)).astype(np.int8)
    integers[0], integers[1] = ends
    rows = packed(integers, bits)
    assert rows.dtype == np.uint8
    assert rows.shape == (3, row_nbytes(count, bits))
    np.testing.assert_array_equal(unpacked(rows, count, bits), integers)
    for index in range(count):  # where each one is
        one = np.zeros((1, count), np.int8)
        one[0, index] = 1
        number = int.from_bytes(packed(one, bits).tobytes(), "little")
        assert number == 1 << bits * index


# -- damage ------------------------------------------------------------------------------------


def read(folder: Path) -> Json:
    found: Json = json.loads((folder / MANIFEST).read_text())
    return found


def edit(folder: Path, change: Callable[[Json], object]) -> None:
    """Change the block and give it the matching digest, if it still has one."""
    data = read(folder)
    change(data["quant"])
    with suppress(ManifestError):
        data["quant"]["sha256"] = sealed(data["quant"])
    (folder / MANIFEST).write_text(json.dumps(data))


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a refusal that comes before any tensor is allocated."""
    for module in (manifest, quant):
        monkeypatch.setattr(module, "read_file", _no_allocation)
    with pytest.raises(ManifestError) as caught:
        read_manifest(folder)
    return str(caught.value).removeprefix(f"manifest '{folder / MANIFEST}': ")


def _no_allocation(*_: object) -> None:
    raise AssertionError("a tensor was allocated before everything was checked")


def activation(name: str, /, **values: object) -> Callable[[Json], object]:
    def change(block: Json) -> None:
        (found,) = (one for one in block["activations"] if one["name"] == name)
        found.update(values)

    return change


def weight(name: str, /, **values: object) -> Callable[[Json], object]:
    def change(block: Json) -> None:
        (found,) = (one for one in block["weights"] if one["name"] == name)
        found.update(values)

    return change


def scale_of(channel: int, value: float) -> Callable[[Json], object]:
    def change(block: Json) -> None:
        block["weights"][0]["scale"][channel] = value

    return change


def deep(block: Json) -> None:
    block["weights"][0]["shape"] = [8, 66_312]


def drop(kind: str, place: int) -> Callable[[Json], object]:
    return lambda block: block[kind].pop(place)


DAMAGE: dict[str, tuple[Callable[[Json], object], str]] = {
    "no field": (lambda b: b.pop("bits"), "the field 'bits' of quant is missing"),
    "no inner field": (
        lambda b: b["weights"][1].pop("scale"),
        "the field 'scale' of quant.weights[1] is missing",
    ),
    "no zero point": (
        lambda b: b["activations"][0].pop("zero_point"),
        "the field 'zero_point' of quant.activations[0] is missing",
    ),
    "unknown field": (lambda b: b.update(bit=8), "unknown field of quant 'bit', did you mean"),
    "unknown inner field": (
        lambda b: b["weights"][0].update(scales=[]),
        "unknown field of quant.weights[0] 'scales', did you mean 'scale'?",
    ),
    "unknown activation field": (
        lambda b: b["activations"][0].update(axis=1),
        "unknown field of quant.activations[0] 'axis'",
    ),
    "unknown calibration": (
        lambda b: b["calibration"].update(seed=1),
        "unknown field of quant.calibration 'seed'",
    ),
    "bits 3": (
        lambda b: b.update(bits=3),
        "quant.bits: weights have 8, 4 or 2 bits, got 3",
    ),
    "bits true": (lambda b: b.update(bits=True), "weights have 8, 4 or 2 bits, got True"),
    "full_range": (
        lambda b: b.update(full_range=1),
        "quant.full_range must be true or false, got 1",
    ),
    "packing": (lambda b: b.update(packing="big"), "quant.packing is 'big', this r18 reads"),
    "scale 0": (activation("image", scale=0), "the scale of activation 'image' is 0: no integer"),
    "scale negative": (
        activation("image", scale=-0.5),
        "the scale of activation 'image' is negative: -0.5",
    ),
    "scale infinite": (
        activation("image", scale=float("inf")),
        "Infinity is not a JSON number",
    ),
    "scale NaN": (activation("image", scale=float("nan")), "NaN is not a JSON number"),
    "scale too large": (activation("image", scale=1e300), "is 1e+300, beyond the normal numbers"),
    "scale subnormal": (activation("image", scale=2.0**-140), "beyond the normal numbers of"),
    "scale no float32": (activation("image", scale=0.1), "is 0.1, which is no float32; the near"),
    "scale a text": (activation("image", scale="1"), "of activation 'image' must be a number, got"),
    "channel scale 0": (scale_of(3, 0.0), "the scale of channel 3 of weight 'conv1' is 0"),
    "channel scale negative": (
        scale_of(2, -1.0),
        "the scale of channel 2 of weight 'conv1' is negative: -1.0",
    ),
    "wrong length": (
        lambda b: b["weights"][0]["scale"].pop(),
        "weight 'conv1': 7 scales for 8 output channels; each channel has one",
    ),
    "zero point": (
        activation("relu", zero_point=3),
        "activation 'relu' has zero_point 3: kernels take 0 only",
    ),
    "zero point of a weight": (
        weight("fc", zero_point=-1),
        "weight 'fc' has zero_point -1: kernels take 0 only",
    ),
    "zero point no integer": (
        weight("fc", zero_point=0.0),
        ".zero_point must be an integer, got 0.0",
    ),
    "K too large": (
        deep,
        "weight 'conv1': K is 66,312, and sums of more than 66,311 products may leave int32",
    ),
    "shape": (
        weight("fc", shape=[10, 65]),
        "weight 'fc' has shape [10, 65], tiny needs [10, 64]",
    ),
    "shape of a vector": (
        weight("fc", shape=[10]),
        ".shape must be that of a matrix or filters, got [10]",
    ),
    "dtype": (activation("image", dtype="int4"), "dtype must be uint8 or int8, got 'int4'"),
    "format": (
        activation("relu", dtype="int8"),
        "activation 'relu' is int8, tiny needs uint8: uint8 after a ReLU, int8 elsewhere",
    ),
    "no activation": (drop("activations", 1), "activation 'relu' is missing; tiny has"),
    "no weight": (drop("weights", -1), "weight 'fc' is missing; tiny has"),
    "unknown weight": (weight("fc", name="fcc"), "weight 'fcc' is not one of tiny's, did you mean"),
    "activation twice": (
        lambda b: b["activations"].append(b["activations"][0]),
        "the activation 'image' appears 2 times",
    ),
    "path of a float tensor": (
        weight("fc", path="fc.weight.bin"),
        "the path 'fc.weight.bin' appears 2 times",
    ),
    "path out": (weight("fc", path="../x"), "the path '../x' is not a plain relative one"),
    "no file": (weight("fc", bias_path="x.bin"), "there is no 'x.bin' in the folder"),
    "sha256": (weight("fc", bias_sha256="A" * 64), "bias_sha256 must be 64 lowercase hex digits"),
    "wrong sha256": (
        weight("fc", sha256="0" * 64),
        "tensor 'fc.int_weight': 'fc.int_weight.bin' has sha256 ",
    ),
    "calibration": (
        lambda b: b["calibration"].update(method="min max"),
        "quant.calibration.method must be a word, got 'min max'",
    ),
    "images": (
        lambda b: b["calibration"].update(images=-1),
        "quant.calibration.images must be a number of images, got -1",
    ),
    "no object": (lambda b: b.update(calibration=[]), "quant.calibration must be an object, got"),
    "no list": (lambda b: b.update(weights={}), "quant.weights must be a list of objects, got"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(kind: str, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, fragment = DAMAGE[kind]
    edit(export, change)
    assert fragment in refused(export, monkeypatch)


def test_each_kind_of_damage_has_its_own_words() -> None:
    assert len({fragment for _, fragment in DAMAGE.values()}) == len(DAMAGE)


@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_a_scale_beyond_all_numbers(
    text: str, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read(export)
    data["quant"]["activations"][0]["scale"] = "HERE"
    (export / MANIFEST).write_text(json.dumps(data).replace('"HERE"', text))
    wanted = "is inf; scales are finite" if text == "1e999" else "is negative: -inf"
    assert wanted in refused(export, monkeypatch)


def test_a_scale_that_was_changed_in_silence(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read(export)
    data["quant"]["activations"][0]["scale"] *= 2
    (export / MANIFEST).write_text(json.dumps(data))
    assert "a scale, a digest or another field was changed" in refused(export, monkeypatch)


def test_multipliers_that_float32_does_not_hold(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multipliers that underflow to 0 in float32 are refused, though each scale is a number."""
    edit(export, activation("image", scale=2.0**-126))
    edit(export, scale_of(5, 2.0**-126))
    assert (
        "quant: step 'conv1': the scale of a product of channel 5 must be positive and finite"
    ) in refused(export, monkeypatch)


def short(folder: Path) -> None:
    path = folder / "layer1.0.conv1.int_weight.bin"
    os.truncate(path, path.stat().st_size - 1)


def long(folder: Path) -> None:
    path = folder / "fc.int_bias.bin"
    os.truncate(path, path.stat().st_size + 4)


def test_files_of_another_size(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short(export)
    assert (
        "tensor 'layer1.0.conv1.int_weight': 'layer1.0.conv1.int_weight.bin' has 287 bytes, "
        "expected 288: shape [8, 8, 3, 3] in int4, 36 bytes for each output channel"
    ) in refused(export, monkeypatch)


def test_a_bias_that_is_too_long(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long(export)
    assert "has 44 bytes, expected 40: shape [10] in int32" in refused(export, monkeypatch)


def rewrite(folder: Path, name: str, data: bytes) -> str:
    """The message on reading other bytes that have the right digest."""
    block = read(folder)["quant"]
    entry = next(one for one in block["weights"] if name in (one["path"], one["bias_path"]))
    key = "sha256" if entry["path"] == name else "bias_sha256"
    (folder / name).write_bytes(data)
    edit(folder, weight(entry["name"], **{key: hashlib.sha256(data).hexdigest()}))
    with pytest.raises(ManifestError) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_values_with_a_right_hash(export: Path) -> None:
    path = export / "conv1.int_weight.bin"
    data = bytearray(path.read_bytes())
    kept = bytes(data)
    data[0] = data[0] & 0xF0 | 8
    assert (
        "quant: weight 'conv1': it holds -8: weights of 4 bits are −7 … 7 unless the block says "
        "full_range"
    ) in rewrite(export, path.name, bytes(data))
    data = bytearray(kept)
    data[73] |= 0x10  # the last byte of the first channel: 147 integers
    assert "the unused bits at the end of row 0 are not 0" in rewrite(
        export, path.name, bytes(data)
    )


def test_a_bias_with_which_a_sum_leaves_int32(export: Path) -> None:
    data = np.full(10, 2**31 - 1, "<i4").tobytes()
    message = rewrite(export, "fc.int_bias.bin", data)
    assert "quant: weight 'fc': step 'fc': the bias of channel 0 is" in message
    assert "a sum may leave int32" in message
    data = np.full(10, -(2**31), "<i4").tobytes()
    assert "a sum may leave int32" in rewrite(export, "fc.int_bias.bin", data)


TINY = ("--backend", "numpy", "--network", "tiny", "--precision", "int8")


def test_the_full_range_is_read_and_no_kernel_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full range is read, and int8 refuses it before a tensor is allocated; floats work."""
    for bits in BITS:
        made = quantised_weights(bits)
        found = made.quantization
        assert found is not None
        first = found.weights["conv1"]
        integers = first.integers.copy()
        integers[0, 0, 0, 0] = -(1 << bits - 1)
        changed = dict(found.weights) | {"conv1": QuantizedWeight(integers, first.scale)}
        full = Quantization(
            bits, found.scales, changed, found.biases, found.calibration, full_range=True
        )
        folder = tmp_path / str(bits)
        write_manifest(folder, replace(made, quantization=full), tiny())
        again = load_weights(str(folder), tiny()).quantization
        assert again is not None
        assert again == full
        assert again.weights["conv1"].integers.min() == -(1 << bits - 1)
        with pytest.raises(WeightsError, match="is full_range, and its weights may be"):
            integer_weights(fuse(tiny(), "all"), again)
        with monkeypatch.context() as patch:
            for module in (manifest, quant):
                patch.setattr(module, "read_file", _no_allocation)
            refused = f"the quantisation is full_range, and its weights may be −{1 << bits - 1}: "
            with pytest.raises(ManifestError, match=refused):
                load_weights(str(folder), tiny(), "int8")
            done = r18("dump", *TINY, "--weights", folder, "--out", tmp_path / "dump")
            assert (done.code, refused in done.err) == (2, True), done.err
            assert "or compute with the floats, in another precision" in done.err
            assert not (tmp_path / "dump").exists()
        floats = load_weights(str(folder), tiny(), "fp32")
        program = get_backend("numpy").compile(tiny(), floats, CompileOptions())
        assert program(images(tiny(), 1)).shape == (1, 10)
        edit(folder, lambda block: block.update(full_range=False))
        with pytest.raises(ManifestError, match=f"it holds -{1 << bits - 1}: weights of {bits}"):
            read_manifest(folder)


def test_a_network_without_an_integer_form(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    softmaxed = tiny(softmax=True)
    for module in (manifest, quant):
        monkeypatch.setattr(module, "read_file", _no_allocation)
    with pytest.raises(ManifestError, match="quant: step 'softmax': softmax has no integer form"):
        read_manifest(export, softmaxed)


def test_weights_of_another_network_are_not_exported(tmp_path: Path) -> None:
    other = resnet("tiny", blocks=(1, 1, 1, 2), width=8, classes=10, image_size=32)
    weights = replace(
        load_weights("synthetic", other), quantization=quantised_weights().quantization
    )
    with pytest.raises(WeightsError, match="the quantisation is not one of 'tiny'"):
        write_manifest(tmp_path / "w", weights, other)
    assert list(tmp_path.iterdir()) == []


def test_a_block_next_to_an_archive(tmp_path: Path, whole: Path) -> None:
    """A quant block next to an archive, where it has no files, is refused."""
    export_weights(tmp_path / "w", load_weights("synthetic", tiny()), tiny(), format="npz")
    data = json.loads((tmp_path / "w.json").read_text())
    (tmp_path / "w.json").write_text(json.dumps(data | {"quant": read(whole)["quant"]}))
    with pytest.raises(ManifestError, match="whose integers are files of a folder"):
        load_weights(str(tmp_path / "w.npz"), tiny())


# -- every field and every bit -----------------------------------------------------------------


def test_every_field_of_the_block_is_looked_at(whole: Path) -> None:
    """Every field of the block is checked: a changed or missing one is refused."""
    path = whole / MANIFEST
    text = path.read_text()
    data = json.loads(text)
    count = 0

    def documents() -> Any:
        for where, block in (*flipped(data["quant"]), *without(data["quant"])):
            yield where, data | {"quant": block}

    try:
        for where, changed in documents():
            if where[0] in ("weights", "activations") and len(where) > 1 and where[1] not in (0, 5):
                continue  # all have the same fields
            path.write_text(json.dumps(changed))
            count += 1
            try:
                read_manifest(whole)
            except ManifestError:
                continue
            pytest.fail(f"{where} was changed, and the block was accepted")
    finally:
        path.write_text(text)
    assert count > 80


def test_one_bit_of_every_tensor_of_integers_is_noticed(whole: Path) -> None:
    count = 0
    for one in read_manifest(whole).manifest.files:
        for bit in (0, -1):
            flip_bit(whole / one.path, bit)
            with pytest.raises(ManifestError, match=rf"tensor '{one.name}': .* has sha256"):
                read_manifest(whole)
            flip_bit(whole / one.path, bit)
        count += 1
    assert count == len(tiny().weight_specs) + 2 * len(read(whole)["quant"]["weights"])


def test_one_bit_changes_the_digest() -> None:
    made = quantised_weights(4)
    found = made.quantization
    assert found is not None
    seen = {made.sha256, replace(made, quantization=None).sha256}
    changes = []
    for name, weight in found.weights.items():
        integers = weight.integers.copy()
        integers.reshape(-1)[-1] ^= 1
        scale = weight.scale.copy()
        scale[-1] = np.nextafter(scale[-1], np.float32(1))
        bias = found.biases[name].copy()
        bias[0] ^= 1
        parts = (QuantizedWeight(integers, weight.scale), QuantizedWeight(weight.integers, scale))
        changes += [replace(found, weights=dict(found.weights) | {name: one}) for one in parts]
        changes.append(replace(found, biases=dict(found.biases) | {name: bias}))
    for name, number in found.scales.items():
        more = np.nextafter(number, np.float32(1))
        changes.append(replace(found, scales=dict(found.scales) | {name: more}))
    changes.append(replace(found, calibration=replace(found.calibration, images=4)))
    for change in changes:
        seen.add(replace(made, quantization=change).sha256)
    assert len(seen) == len(changes) + 2
