"""Commands on networks of bottlenecks, and on named networks with another head or size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import r18
from r18.cli.app import REFUSED
from r18.errors import UsageError
from r18.graph.passes import fuse
from r18.graph.resnet import name_of, network, resnet50, tiny
from r18.weights import load_weights
from r18.weights.sources import resolved

ASKED = "tiny_bottleneck:classes=3,image_size=48"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        pixels = rng.integers(0, 256, (60, 70, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def test_a_name_with_parameters_is_the_network_with_them() -> None:
    assert network("resnet50:classes=10,image_size=96") == resnet50(classes=10, image_size=96)
    assert network("tiny:classes=3", classes=5) == tiny(classes=5)
    assert network(ASKED).name == "tiny_bottleneck"
    for name in (ASKED, "resnet50", "tiny:image_size=33", "resnet18:classes=10"):
        assert name_of(network(name)) == name
        assert name_of(fuse(network(name), "all")) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet50:depth=3", "unknown parameter of network 'resnet50:depth=3' 'depth'"),
        ("tiny:classes", "classes is given once, as an integer: tiny:classes=10"),
        ("tiny:classes=-1", "classes is given once, as an integer"),
        ("tiny:classes=1,classes=2", "classes is given once, as an integer"),
        ("tiny:classes=9999999999", "classes is given once, as an integer"),
        ("tiny:image_size=9999999999", "integer of at most 9 digits, without a sign: tiny:im"),
        ("tiny:image_size=-3", "integer of at most 9 digits, without a sign: tiny:image_size=10"),
        ("tiny:", "unknown parameter of network 'tiny:' ''"),
        ("tiny:classes=0", "out_features must be at least 1"),
        ("resnet51:classes=3", "unknown network 'resnet51', did you mean 'resnet50'?"),
    ],
)
def test_parameters_that_are_none(name: str, said: str) -> None:
    done = r18("schedule", "--network", name)
    assert (done.code, said in done.err) == (REFUSED, True), done.err


def test_a_parameter_by_itself_that_does_not_exist() -> None:
    with pytest.raises(UsageError) as caught:
        network("resnet50", image_sise=3)
    assert str(caught.value) == (
        "unknown parameter of network 'resnet50' 'image_sise', did you mean 'image_size'?\n"
        "  known: classes, image_size, softmax"
    )
    assert network("tiny", softmax=True) == tiny(softmax=True)


@pytest.mark.parametrize("command", ["schedule", "plan"])
def test_two_sizes_of_images_are_refused(command: str) -> None:
    backend = ("--backend", "numpy") if command == "plan" else ()
    asked = (command, "--network", "tiny:image_size=64", *backend, "--image-size")
    done = r18(*asked, 32)
    assert done.code == REFUSED
    assert "--network tiny:image_size=64 and --image-size 32 give two sizes" in done.err
    assert r18(*asked, 64).code == 0


def test_the_schedule_and_plans_of_the_family() -> None:
    steps = json.loads(r18("schedule", "--network", "resnext50_32x4d", "--json").out)["steps"]
    conv = next(step for step in steps if step["step"] == "layer1.0.conv2")
    assert (conv["settings"]["groups"], conv["macs"]) == (32, 128 * 4 * 9 * 56 * 56)
    plan = r18("plan", "--network", "resnet50", "--backend", "cupy", "--precision", "fp16")
    assert plan.code == 0, plan.err
    assert "layer3.5.conv3" in plan.out
    plan = r18("plan", "--network", "resnext50_32x4d", "--backend", "cupy", "--precision", "fp16")
    assert plan.code == 0, plan.err
    assert plan.out.count("cupy/conv2d/grouped_mma/fp16/nhwc") == 16
    plan = r18("plan", "--network", "resnext50_32x4d", "--backend", "numba")
    assert plan.code == 0, plan.err
    assert plan.out.count("numba/conv2d/direct/fp32") == 16


def test_a_head_and_a_size_of_ones_own_from_export_to_classes(tmp_path: Path, photos: Path) -> None:
    out = tmp_path / "out"
    done = r18("export", "--network", ASKED, "--weights", "synthetic", "--out", out)
    assert done.code == 0, done.err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["network"] == {"classes": 3, "image_size": 48}
    given = ("--network", ASKED, "--weights", out)
    done = r18(*("classify", photos / "0.png", *given, "--backend", "numpy", "--top", 3, "--json"))
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["network"] == ASKED
    assert sorted(guess["index"] for guess in found["images"][0]["top"]) == [0, 1, 2]
    wrong = r18("classify", photos / "0.png", "--weights", out, "--backend", "numpy")
    assert wrong.code == REFUSED
    assert "it is of model 'tiny_bottleneck', asked for 'resnet18'" in wrong.err


def test_integers_of_a_bottleneck_from_photographs_to_a_dump(tmp_path: Path, photos: Path) -> None:
    out = tmp_path / "int8"
    given = ("--network", ASKED, "--backend", "numpy")
    done = r18(
        *("quantize", "--images", photos, "--out", out, "--weights", "synthetic", *given, "--json")
    )
    assert done.code == 0, done.err
    weights = load_weights(out, network(ASKED), "int8")
    assert weights.quantization is not None
    assert "layer2.1.conv3" in weights.quantization.weights
    done = r18(
        *("dump", "--out", tmp_path / "dump", "--weights", out, "--precision", "int8"),
        *(*given, "--checkpoints", "canonical", "--batch", 2),
    )
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "dump" / "manifest.json").read_text())["network"] == ASKED
    same = r18("diff", tmp_path / "dump", tmp_path / "dump")
    assert same.code == 0, same.err


def test_a_bench_names_the_network_as_it_was_asked_for() -> None:
    done = r18(
        *("bench", "--network", ASKED, "--backends", "numpy", "--batch", 1),
        *("--warmup", 0, "--repeat", 1, "--check", "--json"),
    )
    assert done.code == 0, done.err
    assert ASKED in done.out
    assert "torchvision has no 'tiny_bottleneck'" in done.err


def test_a_path_of_timms_is_made_absolute() -> None:
    assert resolved("synthetic:3") == "synthetic:3"
    assert resolved("imagenet") == "imagenet"
    assert resolved("timm:a/b.safetensors") == f"timm:{Path('a/b.safetensors').resolve()}"
    assert resolved("a/b.pth") == str(Path("a/b.pth").resolve())
