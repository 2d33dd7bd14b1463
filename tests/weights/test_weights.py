"""Weights: every source, every refusal, bit-exact exports, and synthetic weights to the bit."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import typer
from numpy.typing import NDArray
from safetensors.torch import save_file
from typer.testing import CliRunner

import commands
from r18.cli.export import export as export_command
from r18.errors import ManifestError, R18Error, UnknownName, UsageError, WeightsError
from r18.graph.passes import fuse
from r18.graph.resnet import FAMILY, resnet18, resnet34, tiny
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess
from r18.weights import FORMATS, Weights, export_weights, load_weights, weights_from
from r18.weights import sources as weights_module
from r18.weights.synthetic import synthetic_weights

ROOT = Path(__file__).parents[2]
TORCH_URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
StateDict = dict[str, Any]


@pytest.fixture(scope="module")
def weights18() -> Weights:
    return load_weights("synthetic", resnet18())


@pytest.fixture
def state(weights: Weights) -> StateDict:
    """PyTorch's `state_dict` of the weights."""
    state: StateDict = {name: torch.tensor(array) for name, array in weights.items()}
    for name in list(state):
        if name.endswith("running_var"):
            counter = name.replace("running_var", "num_batches_tracked")
            state[counter] = torch.tensor(7)
    return state


def refused(source: str | Path, schedule: Schedule, error: type[R18Error] = WeightsError) -> str:
    with pytest.raises(error) as caught:
        load_weights(source, schedule)
    return str(caught.value)


# -- The class -------------------------------------------------------------------------------


def test_weights_are_read_only(weights: Weights) -> None:
    array = weights["conv1.weight"]
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(TypeError):
        weights.tensors["conv1.weight"] = array  # type: ignore[index]
    with pytest.raises(AttributeError):
        weights.source = "else"  # type: ignore[misc]
    assert list(weights) == list(tiny().weight_specs)
    assert weights.source == "synthetic:0"
    assert weights.preprocess == Preprocess.for_image_size(32)
    assert repr(weights) == f"<Weights 'synthetic:0': 62 tensors, sha256 {weights.sha256[:16]}…>"


def test_weights_do_not_alias_what_they_are_made_of() -> None:
    given = np.zeros((2, 2), np.float32).T
    made = Weights({"w": given}, "test", Preprocess())
    given[0] = 1
    assert not made["w"].any()
    with pytest.raises(WeightsError, match="tensor 'w' is float64, expected float32"):
        Weights({"w": np.zeros(2)}, "test", Preprocess())


def test_sha256_is_over_names_shapes_and_bytes_in_name_order(weights: Weights) -> None:
    def digest(**tensors: NDArray[np.float32]) -> str:
        return Weights(tensors, "test", Preprocess()).sha256

    a, b = np.arange(4, dtype=np.float32), np.ones((2, 1), np.float32)
    expected = sha256(b"a 4\n" + a.tobytes() + b"b 2x1\n" + b.tobytes())
    assert digest(a=a, b=b) == digest(b=b, a=a) == expected.hexdigest()
    others = {digest(a=a, c=b), digest(a=a, b=b.T), digest(a=a[::-1], b=b), digest(a=a)}
    assert len(others | {expected.hexdigest()}) == 5
    for twin in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert twin == weights
        assert hash(twin) == hash(weights)
        assert twin.source == weights.source
    assert weights != load_weights("synthetic:1", tiny())
    assert weights != 1


# -- Synthetic -------------------------------------------------------------------------------


def test_synthetic_weights_to_the_bit(weights: Weights, weights18: Weights) -> None:
    assert weights.sha256 == "6cf1038fcea22f551d906fd693fecd64133a6dddbfcad60d3cd7cf97b6a353b3"
    assert weights18.sha256 == "63d8aa7ed8bda997a750050a04de3bca065dc781c2881096630c21ec74ab1610"


def naive(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The product summed one rank after another, from the last to the first."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for k in reversed(range(a.shape[1])):
        out += a[:, k, None] * b[k]
    return out


def shuffled(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    order = np.random.default_rng(0).permutation(a.shape[1])
    return np.einsum("ik,kj->ij", a[:, order], b[order])


@pytest.mark.parametrize("matmul", [naive, shuffled])
def test_synthetic_weights_do_not_depend_on_the_order_of_summation(
    matmul: Callable[..., Any], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(np, "matmul", lambda a, b: calls.append(1) or matmul(a, b))
    assert Weights(synthetic_weights(tiny()), "", Preprocess()) == weights
    assert calls


def test_synthetic_weights_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.weights.synthetic.SAMPLES", 1)  # two images, or it takes long
    whole = synthetic_weights(tiny())
    monkeypatch.setattr("r18.weights.synthetic.COLUMNS", 5000)  # two rows of conv1's output
    blocks = synthetic_weights(tiny())
    assert all(np.array_equal(blocks[name], whole[name]) for name in whole)


def test_synthetic_weights_refuse_what_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.weights.synthetic.WEIGHT_BITS", 40)
    assert "beyond the 2^53 that is exact" in refused("synthetic", tiny())


def test_synthetic_seeds_and_names_give_different_tensors(weights: Weights) -> None:
    other = load_weights("synthetic:1", tiny())
    assert all(not np.array_equal(weights[name], other[name]) for name in weights)
    assert not np.array_equal(weights["layer1.0.conv1.weight"], weights["layer1.0.conv2.weight"])
    assert load_weights("synthetic:0007", tiny()).source == "synthetic:7"


def test_synthetic_weights_are_like_trained_ones(weights18: Weights) -> None:
    for name, spec in resnet18().weight_specs.items():
        array = weights18[name].astype(np.float64)
        if spec.kind == "conv_weight":
            he = np.sqrt(2 / np.prod(spec.shape[1:]))
            assert abs(array.std() / he - 1) < 0.02
            assert abs(array.mean()) < 0.02 * he
        elif spec.role == "running_var":
            assert 0.01 < array.min() <= array.max() < 100
        elif spec.role == "weight" and spec.kind == "bn_param":
            assert 0.2 < array.min() <= array.max() <= 1.5
        # Full mantissas: the lowest bit is set in half of the values.
        if array.size >= 512:
            assert 0.4 < (weights18[name].view(np.uint32) & 1).mean() < 0.6


def test_synthetic_activations_stay_in_a_trained_networks_range(weights18: Weights) -> None:
    model = torchvision.models.resnet18()
    keys = model.load_state_dict({n: torch.tensor(a) for n, a in weights18.items()}, strict=False)
    assert not keys.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in keys.missing_keys)
    model = model.double().eval()
    stds: dict[str, float] = {}
    for stage in ("maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"):
        model.get_submodule(stage).register_forward_hook(
            lambda _m, _i, out, stage=stage: stds.__setitem__(stage, float(out.std()))
        )
    images = torch.tensor(np.random.default_rng(0).standard_normal((4, 3, 224, 224)))
    with torch.no_grad():
        logits = model(images)
    assert all(0.1 < std < 3 for std in stds.values()), stds
    assert torch.isfinite(logits).all()
    assert 0.2 < logits.std() < 5
    assert len(set(logits.argmax(1).tolist())) >= 3
    best = logits.topk(2, dim=1).values
    assert ((best[:, 0] - best[:, 1]) > 1e-4).all()


@pytest.mark.parametrize(
    "schedule",
    [
        tiny(classes=1, image_size=1),
        tiny(softmax=True),
        tiny().between("stem_pool", "layer2"),
        tiny().between("gap", "logits"),
        fuse(tiny(), "add_relu"),
    ],
    ids=["smallest", "softmax", "slice", "fc", "add_relu"],
)
def test_synthetic_weights_for_any_schedule(schedule: Schedule) -> None:
    made = load_weights("synthetic", schedule)
    assert {n: a.shape for n, a in made.items()} == {
        n: s.shape for n, s in schedule.weight_specs.items()
    }
    assert all(np.isfinite(a).all() for a in made.values())


def test_synthetic_weights_do_not_depend_on_fusion_of_the_sum(weights: Weights) -> None:
    assert load_weights("synthetic", fuse(tiny(), "add_relu")) == weights


@pytest.mark.parametrize("seed", ["", "-1", "x", "1.0", "٣", " 1", "1" * 19])
def test_bad_seed(seed: str) -> None:
    assert refused(f"synthetic:{seed}", tiny(), UsageError) == (
        f"weights 'synthetic:{seed}': the seed must be an integer of 1 to 18 digits\n"
        "  for example synthetic:7; synthetic alone is synthetic:0"
    )


def test_weights_are_loaded_before_fusion() -> None:
    assert refused("synthetic", fuse(tiny(), "all")) == (
        "weights are loaded for fusion level 'none', got 'all'\n"
        "  load them first, then fuse: folding keeps the names of the level 'none'"
    )


# -- Naming a source -------------------------------------------------------------------------


def test_unknown_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("imagnet", tiny(), UnknownName) == (
        "unknown weights source 'imagnet', did you mean 'imagenet'?\n"
        "  known: FILE.npz, FILE.pt, FILE.pth, FILE.safetensors, FOLDER of timm, "
        "FOLDER with manifest.json, imagenet, synthetic, synthetic:SEED, timm:FILE.safetensors"
    )
    assert refused("net.onnx", tiny()).startswith(
        "weights 'net.onnx': no such file, and nothing is known about '.onnx'\n  known: imagenet, "
    )
    (tmp_path / "net.onnx").touch()
    assert refused("net.onnx", tiny()).startswith(
        "weights 'net.onnx': nothing is known about '.onnx'"
    )
    assert refused("net.pth", tiny()) == "weights 'net.pth': no such file; check the path"
    assert refused(Path("imagenet"), tiny(), UnknownName).startswith("unknown weights source")
    os.mkfifo("pipe.pth")
    assert refused("pipe.pth", tiny()) == (
        "weights 'pipe.pth': cannot be read: not a regular file, but a FIFO"
    )
    os.mkdir("folder")
    assert refused("folder", tiny()).startswith("weights 'folder': the folder holds no manifest.j")
    assert "make one with `r18 export --out folder`" in refused("folder", tiny())
    Path("folder/notes.txt").write_text("mine")
    assert "name a folder that `r18 export` wrote, a file of weights (" in refused("folder", tiny())
    for name in ("a.pth", "b.npz", "c.pt", "d.safetensors"):
        Path("folder", name).touch()
    assert refused("folder", tiny()).endswith("name the file in it: a.pth, b.npz, c.pt and 1 more")
    Path("folder/manifest.json").write_text('{"kind": "dump", "version": 1}')
    assert refused("folder", tiny()).endswith(": it belongs to a dump, which holds no weights")
    Path("text.pth").write_text("xx begins no pickle")
    assert "no checkpoint of PyTorch's, or damaged: it is no pickle\n" in refused(
        "text.pth", tiny()
    )
    assert "cannot be read" in refused(f"{'x' * 4000}.pth", tiny())


# -- Round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_export_and_load_is_bit_exact(format: str, tmp_path: Path, weights: Weights) -> None:
    saved: list[str] = []
    out = tmp_path / "new" / "fp32"
    path = export_weights(
        out, weights, tiny(), format=format, progress=lambda entry: saved.append(entry.name)
    )
    loaded = load_weights(path, tiny())
    assert loaded == weights
    assert all(loaded[name].tobytes() == weights[name].tobytes() for name in weights)
    assert loaded.preprocess == weights.preprocess
    assert loaded.source == str(path)
    assert saved == list(weights)
    with pytest.raises(ManifestError, match="there already"):
        export_weights(out, weights, tiny(), format=format)
    other = load_weights("synthetic:1", tiny())
    assert export_weights(out, other, tiny(), format=format, overwrite=True) == path
    assert load_weights(path, tiny()) == other
    names = {"bin": ["fp32"]}.get(format, ["fp32.json", f"fp32.{format}"])
    assert sorted(p.name for p in path.parent.iterdir()) == names


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_manifest_of_other_weights_in_the_other_format_stays(
    tmp_path: Path, weights: Weights, overwrite: bool
) -> None:
    old = export_weights(tmp_path / "w.npz", weights, tiny(), format="npz")
    other = load_weights("synthetic:1", tiny())
    with pytest.raises(ManifestError, match=r"w\.json' is the manifest of '.*w\.npz' too"):
        export_weights(tmp_path / "w", other, tiny(), format="safetensors", overwrite=overwrite)
    assert load_weights(old, tiny()) == weights
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.json", "w.npz"]


@pytest.mark.parametrize("format", ["bin", "npz", "safetensors"])
def test_whoever_may_read_other_new_files_may_read_an_export(
    tmp_path: Path, weights: Weights, format: str
) -> None:
    path = export_weights(tmp_path / "w", weights, tiny(), format=format)
    (tmp_path / "other").touch()
    usual = (tmp_path / "other").stat().st_mode
    files = [path] if path.is_file() else list(path.iterdir())
    assert {file.stat().st_mode for file in files} == {usual}


def test_files_that_are_no_export_are_never_replaced(tmp_path: Path, weights: Weights) -> None:
    (tmp_path / "w.json").write_text('{"mine": 1}')
    with pytest.raises(ManifestError, match="its manifest would replace another file; choose"):
        export_weights(tmp_path / "w.npz", weights, tiny(), format="npz", overwrite=True)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ManifestError, match=r"folder\.npz' is there already"):
        export_weights(tmp_path / "folder", weights, tiny(), format="npz", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.npz", "w.json"]


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_a_file_of_another_format_is_never_replaced(
    tmp_path: Path, weights: Weights, format: str
) -> None:
    other = export_weights(
        tmp_path / "other", weights, tiny(), format={"npz": "safetensors"}.get(format, "npz")
    )
    document = io.BytesIO()
    with zipfile.ZipFile(document, "w") as archive:
        archive.writestr("word/document.xml", "<w/>")
    path = tmp_path / f"w.{format}"
    for held in (b"mine", b"\x02" + bytes(7) + b"[]", document.getvalue(), other.read_bytes()):
        path.write_bytes(held)
        for force in (False, True):
            with pytest.raises(ManifestError) as refused:
                export_weights(path, weights, tiny(), format=format, overwrite=force)
            assert str(refused.value) == (
                f"'{path}' is no .{format} file; name another file, or delete it"
            )
        assert path.read_bytes() == held
        assert not path.with_suffix(".json").exists()
    path.write_bytes(b"")
    for _ in ("an empty file", "an earlier export"):
        export_weights(path, weights, tiny(), format=format, overwrite=True)
    assert load_weights(path, tiny()) == weights


@pytest.mark.parametrize("given", ["tiny", None])
def test_weights_of_something_that_is_no_schedule(given: Any) -> None:
    name = given or "resnet18"
    for load in (load_weights, weights_from):
        with pytest.raises(UsageError) as caught:
            load("synthetic", given)  # type: ignore[operator]
        assert str(caught.value) == (
            f"the weights are for a schedule, not for {given!r}: give r18.network({name!r})"
        )


def test_unknown_format(tmp_path: Path, weights: Weights) -> None:
    with pytest.raises(UsageError, match="unknown export format 'npy', did you mean 'npz'"):
        export_weights(tmp_path / "x", weights, tiny(), format="npy")


def test_preprocessing_travels_with_the_manifest(tmp_path: Path, weights: Weights) -> None:
    mine = Preprocess(resize=40, center_crop=32, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    given = Weights(weights, "mine", mine)
    for format in FORMATS:
        path = export_weights(tmp_path / format, given, tiny(), format=format)
        assert load_weights(path, tiny()).preprocess == mine
        at64 = load_weights(path, tiny(image_size=64)).preprocess
        assert at64 == Preprocess(resize=73, center_crop=64, mean=mine.mean, std=mine.std)


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_manifest_beside_an_archive(format: str, tmp_path: Path, weights: Weights) -> None:
    path = export_weights(tmp_path / "w", weights, tiny(), format=format)
    sidecar = path.with_suffix(".json")
    text = sidecar.read_text()
    data = json.loads(text)

    def damaged(change: Callable[[Any], object]) -> str:
        data = json.loads(text)
        change(data)
        sidecar.write_text(json.dumps(data))
        message = refused(path, tiny(), ManifestError)
        assert message.startswith(f"manifest '{sidecar}': ")
        return message

    assert data["tensors"][0]["path"] == "conv1.weight"
    assert "tensor 'conv1.weight' has sha256 " in damaged(
        lambda d: d["tensors"][0].update(sha256="0" * 64)
    )
    assert "path is 'x', expected the array's name" in damaged(
        lambda d: d["tensors"][0].update(path="x")
    )
    assert "tensor 'conv1.weight' is missing" in damaged(lambda d: d["tensors"].pop(0))
    assert "version is 9" in damaged(lambda d: d.update(version=9))
    sidecar.write_text("hello")
    assert "not JSON" in refused(path, tiny(), ManifestError)
    sidecar.unlink()
    assert load_weights(path, tiny()) == weights


def test_npz_that_numpy_wrote(tmp_path: Path, weights: Weights) -> None:
    arrays = {n: np.asfortranarray(a.astype(">f4")) for n, a in weights.items()}
    np.savez_compressed(tmp_path / "w.npz", **arrays)  # type: ignore[arg-type]
    assert load_weights(tmp_path / "w.npz", tiny()) == weights


# -- PyTorch checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".PTH"])
@pytest.mark.parametrize("form", ["plain", "wrapped", "module", "parameters"])
def test_checkpoints(
    suffix: str, form: str, tmp_path: Path, state: StateDict, weights: Weights
) -> None:
    if form == "module":
        state = {f"module.{name}": value for name, value in state.items()}
    if form == "parameters":
        state["fc.bias"] = torch.nn.Parameter(state["fc.bias"])
    path = tmp_path / f"w{suffix}"
    torch.save({"state_dict": state, "epoch": 3} if form == "wrapped" else state, path)
    assert load_weights(str(path), tiny()) == weights


def test_weights_from_a_model(weights18: Weights) -> None:
    model = torchvision.models.resnet18()
    state = model.state_dict()
    loaded = weights_from(state, resnet18())
    assert loaded.source == "state_dict"
    assert all(np.array_equal(loaded[name], state[name].numpy()) for name in loaded)
    assert weights_from(weights18, resnet18()) == weights18


def with_nan(state: StateDict) -> None:
    state["fc.weight"][1, 2] = torch.nan
    state["fc.weight"][3, 4] = torch.inf


def test_refused_state_dicts(tmp_path: Path, state: StateDict) -> None:
    """Each kind of damage has its own message, the same in every format."""
    cases: list[tuple[Callable[[StateDict], object], str]] = [
        (
            lambda s: s.pop("fc.bias"),
            "tensor 'fc.bias' is missing\n  tiny needs 62 tensors, 61 of them are here; "
            "another network, or a part of a checkpoint?",
        ),
        (
            lambda s: (s.pop("fc.bias"), s.pop("fc.weight")),
            "tensor 'fc.weight' (and 1 more) is missing\n",
        ),
        (
            lambda s: s.update({"fc.wieght": s["fc.weight"].clone()}),
            "tensor 'fc.wieght' is not one of tiny's, did you mean 'fc.weight'?\n"
            "  known are its 62 tensors, by torchvision's names; another network?",
        ),
        (
            lambda s: s.update({"bn1.bias": torch.zeros(9)}),
            "tensor 'bn1.bias' has shape [9], tiny needs [8]\n"
            "  another network, or another number of classes?",
        ),
        *(
            (
                lambda s, dtype=dtype: s.update({"fc.bias": s["fc.bias"].to(dtype)}),
                f"tensor 'fc.bias' is {str(dtype).removeprefix('torch.')}, expected float32\n"
                "  convert it first (in PyTorch: model.float()); weights are never cast silently",
            )
            for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64)
        ),
        (with_nan, "tensor 'fc.weight' is not finite: nan at [1, 2] (and 1 more)\n"),
        (
            lambda s: s["bn1.running_var"].__setitem__(2, -1e-9),
            "tensor 'bn1.running_var' is a variance and below zero: -9.999999717180685e-10 at [2]",
        ),
    ]
    for change, message in cases:
        damaged = {name: value.clone() for name, value in state.items()}
        change(damaged)
        torch.save(damaged, tmp_path / "w.pth")
        save_file(damaged, tmp_path / "w.safetensors")
        files = ["w.pth", "w.safetensors"]
        if "bfloat16" not in message:
            np.savez(tmp_path / "w.npz", **{n: v.numpy() for n, v in damaged.items()})
            files.append("w.npz")
        for file in files:
            found = refused(tmp_path / file, tiny())
            assert found.startswith(f"weights '{tmp_path / file}': {message}")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, expected a state_dict (names and tensors)\n  make it with "),
        ({1: torch.zeros(1)}, "holds a dict, expected a state_dict"),
        ({"model": {}, "epoch": 3}, "'model' is a dict, expected a tensor\n  in a checkpoint of "),
        ({"fc.bias": torch.zeros(10).to_sparse()}, "tensor 'fc.bias' is torch.sparse_coo, expec"),
        ({"fc.bias": torch.zeros(10, device="meta")}, "tensor 'fc.bias' is on the meta device"),
        ({}, "tensor 'conv1.weight' (and 61 more) is missing"),
    ],
)
def test_files_that_hold_no_state_dict(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    assert refused(tmp_path / "w.pth", tiny()).startswith(
        f"weights '{tmp_path / 'w.pth'}': {message}"
    )


class Bait:
    """An object that makes a folder if it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_malicious_pickles_are_not_executed(tmp_path: Path, state: StateDict) -> None:
    marker = tmp_path / "marker"
    state["bait"] = Bait(marker)
    torch.save(state, tmp_path / "zip.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(state["bait"]))
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for file in ("zip.pth", "raw.pth", "legacy.pt"):
        message = refused(tmp_path / file, tiny())
        assert f"weights '{tmp_path / file}': no checkpoint of PyTorch's, or damaged: " in message
        assert "mkdir" in message
        assert "nothing in a file is executed" in message
    np.savez(tmp_path / "w.npz", **{"fc.bias": np.array([state["bait"]], dtype=object)})
    assert "tensor" in refused(tmp_path / "w.npz", tiny())
    assert not marker.exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)  # the bait does work
    assert marker.exists()


def test_object_arrays_are_not_unpickled(tmp_path: Path, weights: Weights) -> None:
    marker = tmp_path / "marker"
    arrays: dict[str, Any] = dict(weights)
    arrays["fc.bias"] = np.array([Bait(marker)] * 10, dtype=object)
    np.savez(tmp_path / "w.npz", **arrays)
    assert "tensor 'fc.bias' is object, expected float32" in refused(tmp_path / "w.npz", tiny())
    assert not marker.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("kind", ["empty", "text", "truncated", "flipped"])
def test_damaged_files(suffix: str, kind: str, tmp_path: Path, state: StateDict) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".pth":
        torch.save(state, path)
    elif suffix == ".npz":
        np.savez(path, **{n: v.numpy() for n, v in state.items()})
    else:
        save_file(state, path)
    data = path.read_bytes()
    broken = {
        "empty": b"",
        "text": b"not weights at all",
        "truncated": data[: len(data) // 2],
        "flipped": bytes(255 - byte for byte in data[:64]) + data[64:],
    }[kind]
    path.write_bytes(broken)
    message = refused(path, tiny())
    assert message.startswith(f"weights '{path}': ")
    assert "damaged" in message or "PyTorch refuses to load it" in message


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        (
            "safetensors",
            "w.safetensors",
            "reading it needs the library safetensors, which is not installed\n"
            "  pip install 'r18[safetensors]'",
        ),
    ],
)
def test_missing_libraries(
    module: str, source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / source).touch()
    monkeypatch.setitem(sys.modules, module, None)  # importing it now raises ImportError
    assert message in refused(tmp_path / source, tiny())


def test_exporting_without_safetensors(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(WeightsError, match=r"writing \.safetensors needs the library safetensors"):
        export_weights(tmp_path / "w", weights, tiny(), format="safetensors")
    assert list(tmp_path.iterdir()) == []


# -- ImageNet --------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for PyTorch's downloads, and no network."""

    def offline(url: str, timeout: float) -> None:
        raise urllib.error.URLError(f"no route to {url[:28]} within {timeout:g} s")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(urllib.request, "urlopen", offline)
    return tmp_path / "hub" / "checkpoints"


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes) -> list[str]:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def test_imagenet_offline(hub: Path) -> None:
    assert refused("imagenet", resnet18()) == (
        "weights 'imagenet' are not in PyTorch's cache and cannot be downloaded: "
        "<urlopen error no route to https://download.pytorch.org within 30 s>\n"
        f"  asked for {TORCH_URL}\n"
        f"  without a network: put resnet18-f37072fd.pth into {hub},\n"
        "  or use --weights FILE.pth, or --weights synthetic (no download needed)"
    )
    assert "put resnet34-b627a593.pth into" in refused("imagenet", resnet34())
    assert not hub.exists()


def test_imagenet_for_another_network(hub: Path) -> None:
    assert refused("imagenet", tiny()) == (
        f"weights 'imagenet' exist for {', '.join(FAMILY)}, not for 'tiny'\n"
        "  use --weights synthetic, which fits every network"
    )


def test_imagenet_is_torchvision_s() -> None:
    """ImageNet's addresses in r18, which need no import of PyTorch, are torchvision's."""
    for name, url in weights_module._IMAGENET.items():
        assert torchvision.models.get_model_weights(name)["IMAGENET1K_V1"].url == url


@pytest.mark.parametrize(
    "variables",
    [{}, {"XDG_CACHE_HOME": "/x"}, {"TORCH_HOME": "~/y"}, {"TORCH_HOME": "/z"}],
    ids=str,
)
def test_imagenet_is_looked_for_where_pytorch_does(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    theirs = Path(torch.hub.get_dir())
    assert weights_module._hub() == theirs
    monkeypatch.delitem(sys.modules, "torch")
    assert weights_module._hub() == theirs


def test_imagenet_download_and_cache(
    hub: Path, weights18: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.BytesIO()
    torch.save({name: torch.tensor(array) for name, array in weights18.items()}, stream)
    content = stream.getvalue()

    # The real file's hash stands in its name, so what a test serves is never genuine.
    serve(monkeypatch, content)
    message = refused("imagenet", resnet18())
    assert "cannot be downloaded: what came is damaged or incomplete, by its sha256" in message
    assert list(hub.iterdir()) == []

    monkeypatch.setattr(weights_module, "_is_genuine", lambda path, name: True)
    asked = serve(monkeypatch, content)
    for _ in range(2):
        loaded = load_weights("imagenet", resnet18())
        assert loaded == weights18
        assert loaded.source == "imagenet"
        assert loaded.preprocess == Preprocess(resize=256, center_crop=224)
    assert asked == [TORCH_URL]
    monkeypatch.undo()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(hub.parent))
    assert refused("imagenet", resnet18()) == (
        f"weights 'imagenet': {hub / 'resnet18-f37072fd.pth'} is damaged, its sha256 does not "
        "begin as its name says\n  delete it, and it is downloaded again"
    )


# -- A trained network, and the command ------------------------------------------------------


def test_trained_weights_export_and_reload(shared: Path, tmp_path: Path) -> None:
    source = shared / "weights" / "resnet18-photos1000.pth"
    loaded = load_weights(source, resnet18())
    state = torch.load(source, weights_only=True)
    assert all(np.array_equal(loaded[name], state[name].numpy()) for name in loaded)
    for format in FORMATS:
        path = export_weights(tmp_path / "fp32", loaded, resnet18(), format=format)
        assert load_weights(path, resnet18()) == loaded


def test_export_command(tmp_path: Path, weights: Weights) -> None:
    app = typer.Typer()
    app.command()(export_command)
    arguments = ["--weights", "synthetic", "--network", "tiny", "--out", str(tmp_path / "fp32")]
    lines = CliRunner().invoke(app, arguments, catch_exceptions=False).output.splitlines()
    assert lines[0] == "saved: conv1.weight [8, 3, 7, 7] -> conv1.weight.bin"
    assert len(lines) == len(weights) + 1
    assert lines[-1] == f"exported: 62 tensors, 0.3 MB -> {tmp_path / 'fp32'}"
    assert load_weights(tmp_path / "fp32", tiny()) == weights
    with pytest.raises(ManifestError, match="one is there already"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    CliRunner().invoke(app, [*arguments, "--force"], catch_exceptions=False)
    CliRunner().invoke(app, [*arguments, "--format", "npz"], catch_exceptions=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fp32", "fp32.json", "fp32.npz"]


@pytest.mark.parametrize("format", [*FORMATS, "qdq"])
def test_a_place_that_cannot_be_written_is_refused_before_weights_are_loaded(
    format: str, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    done = commands.r18(
        *("export", "--weights", tmp_path / "absent.npz", "--network", "tiny"),
        *("--format", format, "--out", taken / "new" / "w"),
    )
    assert done.code == 2
    assert f"'{taken}' is no folder; " in done.err
    assert "absent" not in done.err


@pytest.mark.parametrize(
    ("name", "format"), [("z.onnx", "qdq"), ("z.NPZ", "npz"), ("z.safetensors", "safetensors")]
)
def test_a_folder_with_the_name_of_a_file_is_refused(
    name: str, format: str, tmp_path: Path
) -> None:
    out = tmp_path / name
    done = commands.r18("export", "--weights", "synthetic", "--network", "tiny", "--out", out)
    assert done.code == 2
    assert f"--out {out} is the name of a file" in done.err
    assert f"add --format {format}, or name a folder" in done.err
    assert not out.exists()


def test_export_tool(tmp_path: Path) -> None:
    tool = [
        sys.executable,
        str(ROOT / "tools" / "export_resnet18.py"),
        "--out",
        str(tmp_path / "x"),
    ]
    done = subprocess.run([*tool, "--weights", "synthetic:2"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("saved: conv1.weight [64, 3, 7, 7] -> conv1.weight.bin\n")
    assert load_weights(tmp_path / "x", resnet18()) == load_weights("synthetic:2", resnet18())
    refused = commands.tool("export_resnet18", *tool[2:], "--weights", "synthetic:-2")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("export_resnet18: weights 'synthetic:-2': the seed must be an ")
