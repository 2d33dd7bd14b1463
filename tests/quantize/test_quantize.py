"""`r18 quantize`: calibration, its files, its output, and that errors leave nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import r18 as package
from commands import r18
from r18.backend import CompileOptions
from r18.calibration.observe import observe, scales
from r18.calibration.observers import METHODS
from r18.calibration.weights import least_error, nearest_weights
from r18.errors import ImageError, ManifestError, R18Error, UnknownName, UsageError
from r18.graph.passes import fuse
from r18.graph.quantize import quantized, rounded, scaled_values, value_scales
from r18.graph.resnet import tiny
from r18.quantize import Request, Result, quantize
from r18.quantize import run as run_module
from r18.quantize.losses import decibels, measure
from r18.quantize.photographs import choose, photographs
from r18.weights import load_weights
from r18_numpy import Backend as NumpyBackend

NUMPY = NumpyBackend()
FOLDED = fuse(tiny(), "all")


def made(folder: Path, out: Path, **options: Any) -> Result:
    lines: list[str] = []
    request = Request(folder, out, "synthetic", "tiny", **options)
    return quantize(request, NUMPY, lines.append)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return made(folder, tmp_path_factory.mktemp("out") / "q", calibrate=5)


# -- what comes of it --------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_eight_bits_keep_the_network(method: str, folder: Path, tmp_path: Path) -> None:
    result = made(folder, tmp_path / "q", method=method)
    assert result.losses.decibels > 23
    assert result.losses.agree + len(result.losses.changed) == result.losses.images == 12
    assert result.same
    assert [one.value for one in result.losses.values] == [s.output for s in FOLDED.steps]
    found = load_weights(str(tmp_path / "q"), tiny())
    assert found == result.weights
    assert found.quantization is not None
    assert found.quantization.calibration.method == method
    assert found.quantization.calibration.images == 12
    floats = load_weights("synthetic", tiny())
    assert all(np.array_equal(found[name], floats[name]) for name in floats)


def test_fewer_bits_lose_more(folder: Path, tmp_path: Path) -> None:
    found = [
        made(folder, tmp_path / str(bits), bits=bits, rounding="nearest").losses.decibels
        for bits in (8, 4, 2)
    ]
    assert found[0] > found[1] + 6 > found[2] + 6
    assert load_weights(str(tmp_path / "2"), tiny()).quantization.bits == 2  # type: ignore[union-attr]


def test_what_was_lost_is_what_a_program_loses(whole: Result, folder: Path) -> None:
    """The printed losses are those of a program, computed here from public parts."""
    assert not whole.same
    chosen = choose(folder, 5, 256)
    assert len(chosen.calibration) == 5
    assert set(chosen.calibration).isdisjoint(chosen.measured)
    assert len(chosen.measured) == 7 == whole.losses.images
    images = photographs(folder, chosen.measured, whole.weights.preprocess, pytest.fail)
    pixels = images.pixels
    exact = package.compile(tiny(), whole.weights, "numpy", batch=7, precision="fp64")(pixels)
    got = package.compile(tiny(), whole.weights, "numpy", batch=7, precision="int8")(pixels)
    noise = np.square(got.astype(np.float64) - exact).sum()
    expected = 10 * np.log10(np.square(exact).sum() / noise)
    assert abs(whole.losses.decibels - expected) < 1e-9
    differ = np.flatnonzero(exact.argmax(axis=1) != got.argmax(axis=1))
    assert [one.file for one in whole.losses.changed] == [images.files[i] for i in differ]


def test_the_error_of_a_value_in_the_middle(whole: Result, folder: Path) -> None:
    quantization = whole.weights.quantization
    assert quantization is not None
    chosen = choose(folder, 5, 256)
    images = photographs(folder, chosen.measured, whole.weights.preprocess, pytest.fail)
    options = {"batch": 7, "taps": ("layer2", "stem_pool")}
    exact = package.compile(tiny(), whole.weights, "numpy", precision="fp64", **options)
    got = package.compile(tiny(), whole.weights, "numpy", precision="int8", **options)
    exact(images.pixels), got(images.pixels)
    of = {one.value: one for one in whole.losses.values}
    where = value_scales(quantized(FOLDED), quantization.scales)
    for tap in ("layer2", "stem_pool"):
        value = FOLDED.value_of(tap)
        right = exact.fetch(tap)
        found = got.fetch(tap).astype(np.float64) * where[value]
        expected = decibels(np.square(right).sum(), np.square(found - right).sum())
        assert abs(of[value].decibels - expected) < 1e-9
        assert of[value].scale == where[value]


def test_calibration_sees_the_values_of_the_network(folder: Path) -> None:
    """Calibration sees a float program's largest magnitudes, and not the last batch's padding."""
    weights = load_weights("synthetic", tiny())
    files = choose(folder, 11, 1).calibration
    images = photographs(folder, files, weights.preprocess, pytest.fail)
    assert len(images) == 11  # a batch of 8 and one of 3
    found = observe(NUMPY, FOLDED, weights, images)
    formats = scaled_values(quantized(FOLDED))
    assert found.keys() == formats.keys()
    options = CompileOptions(batch=8, taps=tuple(formats), kernels={"maxpool": "*"})
    program = NUMPY.compile(FOLDED, weights, options)
    values: dict[str, list[np.ndarray]] = {name: [] for name in formats}
    for batch, count in ((images.pixels[:8], 8), (np.roll(images.pixels, 3, axis=0)[:8], 3)):
        program(batch)  # of one size, because a product's last bit depends on it
        for name, parts in values.items():
            parts.append(program.fetch(name)[:count].reshape(-1))
    for name, histogram in found.items():
        whole = np.concatenate(values[name])
        assert histogram.largest == np.abs(whole).max()
        assert histogram.total == whole.size
    chosen = scales(found, FOLDED, "minmax")
    for name, scale in chosen.items():
        limit = 255 if formats[name] == "uint8" else 127
        assert scale == np.float32(found[name].largest / limit)
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256((folder / file).read_bytes()).hexdigest().encode() + b"\n")
    assert images.sha256 == digest.hexdigest()


@pytest.mark.parametrize("bits", [4, 2])
def test_scales_of_few_bits_have_less_error_than_those_of_the_largest(bits: int) -> None:
    weights = load_weights("synthetic", tiny())
    found = nearest_weights(FOLDED, weights, bits)
    assert found.keys() == {s.name for s in FOLDED.steps} - {"maxpool", "avgpool"}
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((6, 64, 3, 3))

    def error(one: Any) -> np.ndarray:
        wide = one.integers * one.scale.astype(np.float64)[:, None, None, None]
        return np.square(wide - weight).reshape(6, -1).sum(axis=1)

    best, largest = least_error(weight, bits), rounded(weight, bits)
    assert (error(best) <= error(largest)).all()
    assert error(best).sum() < 0.9 * error(largest).sum()
    assert np.abs(best.integers).max() <= {4: 7, 2: 1}[bits]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    arguments = ("quantize", "--images", folder, "--weights", "synthetic", "--network", "tiny")
    arguments = (*arguments, "--backend", "numpy", "--out", tmp_path / "q")
    done = r18(*arguments, "--calibrate", 5, "--method", "percentile")
    assert done.code == 0
    assert "int8 weights, nearest; activations by percentile of 5 images" in done.out
    assert "measured on 7 images that the calibration did not use" in done.out
    assert "agree_top1 = " in done.out
    assert "dB signal to noise" in done.out
    for step in FOLDED.steps:
        assert step.output in done.out
    assert "images: 5 to calibrate with, 7 to measure on" in done.err
    again = r18(*arguments)
    assert again.code == 2
    assert "one is there already" in again.err
    forced = r18(*arguments, "--force", "--json", "--bits", 4, "--rounding", "nearest")
    assert forced.code == 0
    assert "with 4 bits much is lost (18 points of top-1" in forced.err
    data = json.loads(forced.out)
    assert data["bits"] == 4
    assert data["measured_on_calibration"] is True
    assert len(data["values"]) == len(FOLDED.steps)
    assert data["agree_top1"] + len(data["changed"]) == data["images"] == 12
    found = load_weights(str(tmp_path / "q"), tiny())
    assert found.sha256 == data["weights"]["sha256"]


def test_changed_images_are_named(folder: Path, tmp_path: Path) -> None:
    """Changed images are named; two bits to nearest change classes of an untrained network."""
    result = made(folder, tmp_path / "q", bits=2, rounding="nearest")
    text = result.text()
    assert result.losses.changed
    for one in result.losses.changed[: run_module.SHOWN]:
        assert f"changed: {one.file}: class {one.got}, float64 has {one.exact}" in text


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "mean"}, UsageError, "unknown calibration method 'mean'"),
        ({"bits": 3}, UsageError, "weights have 8, 4 or 2 bits, got 3"),
        ({"rounding": "up"}, UsageError, "unknown rounding 'up'"),
        ({"calibrate": 0}, UsageError, "at least 1 image"),
        ({"measure": -1}, UsageError, "at least 1"),
    ],
)
def test_requests_that_make_no_sense(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Request(Path("a"), Path("b"), **options)


def test_nothing_is_half_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise R18Error("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "measure", fail)
        with pytest.raises(R18Error, match="in the middle"):
            made(folder, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(UsageError, match="it holds no image"):
        made(empty, tmp_path / "q")
    with pytest.raises(UsageError, match="no such folder"):
        made(tmp_path / "absent", tmp_path / "q")
    with pytest.raises(UnknownName, match="unknown network 'tinny'"):
        quantize(Request(folder, tmp_path / "q", "synthetic", "tinny"), NUMPY)
    assert [path.name for path in tmp_path.iterdir()] == ["none"]


def test_a_folder_that_is_no_export_is_refused_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ManifestError, match="it is no export"):
        made(folder, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_below_a_file_is_refused_first(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(ManifestError) as caught:
        made(tmp_path / "absent", taken / "q")
    assert str(caught.value) == (
        f"cannot write the export '{taken / 'q'}': '{taken}' is no folder; choose another place"
    )


def test_images_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "broken.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match="none of 1 images in"):
        made(images, tmp_path / "q")
    for name in ("00.png", "01.png"):
        (images / name).write_bytes((folder / name).read_bytes())
    lines: list[str] = []
    request = Request(images, tmp_path / "q", "synthetic", "tiny")
    result = quantize(request, NUMPY, lines.append)
    assert result.calibrated == result.losses.images == 2
    assert any(line.startswith("left out: broken.png: ") for line in lines)
    assert "images: 2 to calibrate with, 2 to measure on" in lines


def test_the_images_to_measure_on_are_those_that_can_be_read(folder: Path, tmp_path: Path) -> None:
    for name in ("00.png", "02.png"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "01.png").write_bytes(b"no image")
    lines: list[str] = []
    request = Request(tmp_path, tmp_path / "q", "synthetic", "tiny", calibrate=1)
    result = quantize(request, NUMPY, lines.append)
    assert result.losses.images == 1
    assert lines[0].startswith("left out: 01.png: ")
    assert lines[1:] == ["images: 1 to calibrate with, 1 to measure on"]


def test_values_that_are_not_finite_are_named(folder: Path) -> None:
    weights = dict(load_weights("synthetic", tiny()))
    weights["bn1.weight"] = np.full_like(weights["bn1.weight"], 3e38)
    files = choose(folder, 2, 1).calibration
    images = photographs(folder, files, load_weights("synthetic", tiny()).preprocess, print)
    with pytest.raises(R18Error, match="'relu': not finite on a calibration image; check the wei"):
        observe(NUMPY, FOLDED, weights, images)


def test_images_of_another_size(folder: Path) -> None:
    weights = load_weights("synthetic", tiny())
    files = choose(folder, 2, 1).calibration
    images = photographs(folder, files, weights.preprocess, print)
    with pytest.raises(UsageError, match=r"the images have shape \(3, 32, 32\), 'tiny' takes"):
        observe(NUMPY, fuse(tiny(image_size=64), "all"), weights, images)


def test_a_network_that_loses_nothing_has_no_end() -> None:
    assert decibels(1.0, 0.0) == np.inf
    assert decibels(0.0, 1.0) == -np.inf
    assert decibels(100.0, 1.0) == 20.0


def test_progress_is_told(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    request = Request(folder, tmp_path / "q", "synthetic", "tiny")
    quantize(request, NUMPY, progress=lambda *one: seen.append(one))
    assert seen == [
        *(("calibrating", done, 12) for done in (8, 12)),
        *(("measuring", done, 12) for done in (8, 12)),
    ]


def test_a_backend_without_integers_measures_with_numpys(folder: Path, whole: Result) -> None:
    from r18_torch import Backend as TorchBackend

    chosen = choose(folder, 5, 256)
    images = photographs(folder, chosen.measured, whole.weights.preprocess, pytest.fail)
    quantization = whole.weights.quantization
    assert quantization is not None
    found = measure(TorchBackend(), FOLDED, whole.weights, quantization, images)
    assert abs(found.decibels - whole.losses.decibels) < 1e-6
