"""Dumps of integer checkpoints: how they are stored, and how a diff reports them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import r18
from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.errors import DumpError
from r18.graph.resnet import tiny
from r18.graph.schedule import CANONICAL
from r18_numpy import Backend as NumpyBackend
from r18_oracle.dumps.dumps import diff_dumps, read_dump, write_dump
from r18_oracle.dumps.files import sha256_of
from r18_oracle.network.images import seeded

NUMPY = NumpyBackend()
WEIGHTS = quantised_weights()


def dump(folder: Path, precision: str = "int8", weights: object = WEIGHTS) -> Path:
    options = CompileOptions(precision=precision)
    write_dump(folder, NUMPY, tiny(), weights, seeded(tiny(), 2), options=options)  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("int8") / "d")


def edit(folder: Path, place: int, **fields: object) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    for name, value in fields.items():
        if value is None:
            del data["checkpoints"][place][name]
        else:
            data["checkpoints"][place][name] = value
    path.write_text(json.dumps(data))


def overwrite(folder: Path, name: str, change: int) -> None:
    """Change one integer, with a right digest."""
    found = read_dump(folder)
    file = found.checkpoint(name)
    values = found.read(name).copy()
    values.reshape(-1)[7] += change
    (folder / file.path).write_bytes(values.tobytes())
    place = [one.name for one in found.checkpoints].index(name)
    edit(folder, place, sha256=sha256_of(values, file.dtype))


def test_checkpoints_are_integers_with_their_scale(integers: Path) -> None:
    found = read_dump(integers)
    assert WEIGHTS.quantization is not None
    assert tuple(file.name for file in found.checkpoints) == CANONICAL
    for file in found.checkpoints:
        array = found.read(file.name)
        if file.name == "logits":
            assert (file.dtype, file.scale) == ("float32", None)
            assert found.numbers("logits") is not None
            continue
        assert file.dtype == array.dtype.name == "uint8"
        assert (integers / file.path).stat().st_size == array.size
        value = "relu" if file.name == "stem_pool" else tiny().value_of(file.name)
        assert file.scale == WEIGHTS.quantization.scales[value]
        np.testing.assert_array_equal(found.numbers(file.name), array * np.float64(file.scale))
    options = CompileOptions(precision="int8", batch=2, taps=("layer3",))
    from r18.weights.precisions import in_precision

    program = NUMPY.compile(*in_precision(tiny(), WEIGHTS, options), options)
    program(seeded(tiny(), 2).values)
    np.testing.assert_array_equal(found.read("layer3"), program.fetch("layer3"))


def test_equal_dumps_are_identical_byte_for_byte(integers: Path, tmp_path: Path) -> None:
    report = diff_dumps(integers, dump(tmp_path / "again"))
    assert report.ok
    assert report.identical
    assert report.closing() == "all 7 checkpoints are identical, byte for byte"
    assert report.to_json()["identical"] is True
    done = r18("diff", integers, tmp_path / "again")
    assert (done.code, done.out.strip().splitlines()[-1]) == (0, report.closing())


def test_one_checkpoint_is_named_in_the_singular(integers: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(integers, tmp_path / name)
        manifest = tmp_path / name / "manifest.json"
        data = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(data | {"checkpoints": data["checkpoints"][:1]}))
    report = diff_dumps(tmp_path / "a", tmp_path / "b")
    assert report.closing() == "the only checkpoint is identical, byte for byte"


def test_one_unit_is_found(integers: Path, tmp_path: Path) -> None:
    other = dump(tmp_path / "other")
    overwrite(other, "layer2", 1)
    report = diff_dumps(integers, other)
    assert not report.ok
    assert not report.identical
    assert report.closing().startswith("first bad checkpoint: layer2 (max_abs 1 > atol 1e-4 at ")
    assert diff_dumps(integers, other, atol=1.0).closing().endswith("agree within atol 1")


def test_integers_and_floats_are_compared_as_numbers(integers: Path, tmp_path: Path) -> None:
    floats = dump(tmp_path / "fp32", "fp32")
    report = diff_dumps(floats, integers, atol=1e9)
    assert report.ok
    assert not report.identical
    found, exact = read_dump(integers), read_dump(floats)
    for row in report.rows:
        apart = np.abs(found.numbers(row.checkpoint) - exact.read(row.checkpoint)).max()
        assert abs(row.comparison.max_abs - apart) < 1e-9


def test_other_scales_are_other_weights(integers: Path, tmp_path: Path) -> None:
    other = dump(tmp_path / "other", weights=quantised_weights(4))
    with pytest.raises(DumpError, match="the dumps have different weights"):
        diff_dumps(integers, other)
    assert diff_dumps(integers, other, atol=1e9, allow_different_input=True).ok


def test_bounds_are_for_floats(integers: Path) -> None:
    done = r18("diff", integers, integers, "--bounds")
    assert done.code == 2
    assert "is in int8, where the bound is 0" in done.err
    assert "r18 diff without --bounds" in done.err


@pytest.mark.parametrize(
    ("place", "fields", "words"),
    [
        (1, {"scale": None}, "the field 'scale' is missing"),
        (1, {"scale": 0.0}, "the scale of 'layer1' must be positive and finite, got 0.0"),
        (1, {"scale": -1.0}, "must be positive and finite, got -1.0"),
        (1, {"scale": "1"}, "the field 'scale' must be of type float, got '1'"),
        (6, {"scale": 0.5}, "'logits' has a scale, and is float32: only integers have one"),
        (1, {"dtype": "float32"}, "'layer1' has a scale, and is float32"),
        (1, {"dtype": "int4"}, "the dtype 'int4' is not one of"),
    ],
)
def test_damaged_integer_dumps(
    place: int, fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = dump(tmp_path / "d")
    edit(folder, place, **fields)
    with pytest.raises(DumpError, match=words):
        read_dump(folder)


def test_the_command_dumps_integers(tmp_path: Path) -> None:
    from r18.weights.manifest import write_manifest

    write_manifest(tmp_path / "w", WEIGHTS, tiny())
    common = ("--backend", "numpy", "--network", "tiny", "--weights", tmp_path / "w")
    done = r18(
        "dump", *common, "--precision", "int8", "--checkpoints", "all", "--out", tmp_path / "d"
    )
    assert done.code == 0, done.err
    found = read_dump(tmp_path / "d")
    assert found.made is not None
    assert (found.made.precision, found.made.fusion) == ("int8", "all")
    assert {file.dtype for file in found.checkpoints} == {"uint8", "int8", "float32"}
    assert found.checkpoint("image.int8").dtype == "int8"
    said = r18("diff", tmp_path / "d", tmp_path / "d", "--explain")
    assert said.code == 2
    assert said.err == (
        f"r18: the dump '{tmp_path / 'd'}' names the weights '{tmp_path / 'w'}', a file or folder "
        f"of this machine\n  repeat it if that is what you want, with --weights {tmp_path / 'w'}; "
        "imagenet and synthetic need no such word\n"
    )
