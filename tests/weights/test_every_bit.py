"""Changes in a manifest's field, a tensor's bit or a square fc's axes never pass unnoticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import r18
from flips import flip_bit, flipped, without
from r18.backend.registry import available
from r18.errors import ManifestError
from r18.graph.resnet import resnet, tiny
from r18.weights import Weights, export_weights, load_weights
from r18.weights.manifest import MANIFEST, read_manifest, write_manifest
from r18.weights.tensors import tensor_sha256
from support import images, run_schedule

CARRIED = {("preprocess", "resize")} | {
    ("preprocess", what, channel) for what in ("mean", "std") for channel in range(3)
}
"""Values that a manifest may choose, and that reach its reader."""


def test_every_field_of_a_manifest_is_looked_at(pristine: Path) -> None:
    path = pristine / MANIFEST
    text, manifest = path.read_text(), read_manifest(pristine).manifest
    count = 0
    fields = [
        (where, data)
        for where, data in without(json.loads(text))
        if where[0] != "tensors" or len(where) < 3 or where[1] == 0  # all tensors have the same
    ]
    try:
        for where, data in (*flipped(json.loads(text)), *fields):
            path.write_text(json.dumps(data))
            count += 1
            try:
                found = read_manifest(pristine).manifest
            except ManifestError:
                continue
            assert where in CARRIED, f"{where} was changed, and the file was accepted"
            assert found != manifest, f"{where} was changed and does not arrive"
            assert load_weights(str(pristine), tiny()).preprocess == found.preprocess
    finally:
        path.write_text(text)
    assert count > 6 * len(manifest.tensors)


def test_one_bit_of_every_tensor_is_noticed(pristine: Path, weights: Weights) -> None:
    """One bit of each kind of tensor is noticed: convolutions, BatchNorm's parameters and buffers,
    fc's weight and bias."""
    kinds = set()
    for entry in read_manifest(pristine).manifest.tensors:
        for bit in (0, -1):  # the lowest bit of the first value, the sign of the last one
            flip_bit(pristine / entry.path, bit)
            with pytest.raises(ManifestError, match=rf"tensor '{entry.name}': .* has sha256"):
                read_manifest(pristine)
            flip_bit(pristine / entry.path, bit)
        kinds.add(entry.kind)
    assert kinds == {"conv_weight", "bn_param", "bn_buffer", "fc_weight", "fc_bias"}
    assert load_weights(str(pristine), tiny()) == weights


def test_two_tensors_of_one_shape_do_not_change_places(pristine: Path, tmp_path: Path) -> None:
    for first, second in (
        ("bn1.weight", "bn1.bias"),
        ("bn1.running_mean", "bn1.running_var"),
        ("layer1.0.conv1.weight", "layer1.0.conv2.weight"),
    ):
        copied = Path(shutil.copytree(pristine, tmp_path / first))
        (copied / f"{first}.bin").rename(copied / "kept")
        (copied / f"{second}.bin").rename(copied / f"{first}.bin")
        (copied / "kept").rename(copied / f"{second}.bin")
        with pytest.raises(ManifestError, match="has sha256"):
            read_manifest(copied)


def test_one_bit_of_every_tensor_changes_the_digest_of_weights(weights: Weights) -> None:
    """One changed bit of any tensor changes the digest by which dumps and records know weights."""
    seen = {weights.sha256}
    for name in weights:
        tensors = {n: np.array(array) for n, array in weights.items()}
        tensors[name].reshape(-1).view(np.uint32)[-1] ^= 1
        changed = Weights(tensors, weights.source, weights.preprocess)
        assert changed != weights
        assert tensor_sha256(changed[name]) != tensor_sha256(weights[name])
        seen.add(changed.sha256)
    assert len(seen) == len(weights) + 1


# -- a square fc -------------------------------------------------------------------------------

SQUARE = resnet("tiny", blocks=(1, 1, 1, 1), width=8, classes=64, image_size=32)
"""A network with a 64×64 fc, whose transposed weight has the same shape, bytes and names."""


@pytest.fixture(scope="module")
def square() -> dict[str, Any]:
    made = dict(load_weights("synthetic:5", SQUARE))
    assert made["fc.weight"].shape == (64, 64)
    assert not np.array_equal(made["fc.weight"], made["fc.weight"].T)
    return made


def sources(square: dict[str, Any], folder: Path) -> dict[str, str]:
    """The weights in every format, written by other programs if possible."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in square.items()}
    torch.save(tensors, folder / "w.pth")
    np.savez(folder / "w.npz", **square)
    safetensors.numpy.save_file(square, folder / "w.safetensors")
    write_manifest(folder / "manifest", load_weights("synthetic:5", SQUARE), SQUARE)
    names = {ending: str(folder / f"w.{ending}") for ending in ("pth", "npz", "safetensors")}
    return {**names, "manifest": str(folder / "manifest"), "synthetic": "synthetic:5"}


def test_a_square_fc_is_not_transposed_on_any_way(square: dict[str, Any], tmp_path: Path) -> None:
    """A square fc is transposed in no format: its values are right, and so are its logits."""
    folded = {name: array.astype(np.float64) for name, array in square.items()}
    x = images(SQUARE, 2)
    exact = run_schedule(SQUARE, folded, x.astype(np.float64))["fc"]
    folded["fc.weight"] = folded["fc.weight"].T
    other = run_schedule(SQUARE, folded, x.astype(np.float64))["fc"]
    scale = np.abs(exact).max()
    assert np.abs(other - exact).max() > 0.1 * scale
    for kind, source in sources(square, tmp_path).items():
        loaded = load_weights(source, SQUARE)
        np.testing.assert_array_equal(loaded["fc.weight"], square["fc.weight"], err_msg=kind)
        for fusion in ("none", "all"):
            got = r18.compile(SQUARE, source, "numpy", batch=2, fusion=fusion)(x)
            assert np.abs(got - exact).max() < 1e-4 * scale, (kind, fusion)
    raw = np.fromfile(tmp_path / "manifest" / "fc.weight.bin", "<f4").reshape(64, 64)
    np.testing.assert_array_equal(raw, square["fc.weight"])


def test_a_square_fc_is_not_transposed_by_any_backend_or_export(
    square: dict[str, Any], tmp_path: Path
) -> None:
    x = images(SQUARE, 2)
    exact = run_schedule(
        SQUARE, {n: a.astype(np.float64) for n, a in square.items()}, x.astype(np.float64)
    )["fc"]
    state = {name: torch.from_numpy(np.array(array)) for name, array in square.items()}
    for backend in available():
        if backend.probe().simulated:
            continue
        for given in (square, state):
            got = r18.compile(SQUARE, given, backend, batch=2)(x)
            assert np.abs(got - exact).max() < 1e-3 * np.abs(exact).max(), backend.name
    made = load_weights("synthetic:5", SQUARE)
    for format in ("npz", "safetensors"):
        path = tmp_path / f"w.{format}"
        export_weights(path, made, SQUARE, format=format)
        assert load_weights(str(path), SQUARE) == made
