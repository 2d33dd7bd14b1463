"""timm's weights: torchvision's names, and timm's own preprocessing, which exports keep."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision import transforms

from commands import r18
from r18.errors import WeightsError
from r18.graph.resnet import network, resnet18, resnet50, tiny
from r18.images.preprocess import Preprocess, preprocess_image
from r18.weights import Weights, export_weights, load_weights

CONFIG: dict[str, Any] = {
    "architecture": "resnet50",
    "num_classes": 1000,
    "pretrained_cfg": {
        "tag": "a1_in1k",
        "input_size": [3, 224, 224],
        "test_input_size": [3, 288, 288],
        "interpolation": "bicubic",
        "crop_pct": 0.95,
        "test_crop_pct": 1.0,
        "crop_mode": "center",
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "first_conv": "conv1",
        "classifier": "fc",
    },
}
"""timm's configuration of a ResNet-50, without fields that are not read here."""

BICUBIC = Preprocess(resize=235, center_crop=224, interpolation="bicubic")


def changed(**fields: Any) -> dict[str, Any]:
    return CONFIG | {"pretrained_cfg": CONFIG["pretrained_cfg"] | fields}


@pytest.fixture
def folder(tmp_path: Path, weights: Weights) -> Path:
    """The tiny network in timm's form, with counters of training steps."""
    state = {name: torch.tensor(array) for name, array in weights.items()}
    counters = [n.replace("running_var", "num_batches_tracked") for n in state if "_var" in n]
    save_file(state | {n: torch.tensor(3) for n in counters}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def refused(source: Path | str, name: str = "tiny") -> str:
    with pytest.raises(WeightsError) as caught:
        load_weights(source, network(name))
    return str(caught.value)


def timm_says(image: Image.Image, size: int, crop: float) -> np.ndarray[Any, Any]:
    """timm's evaluation transform, `timm.data.create_transform`, from torchvision's parts."""
    transform = transforms.Compose(
        [
            transforms.Resize(math.floor(size / crop), transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize(CONFIG["pretrained_cfg"]["mean"], CONFIG["pretrained_cfg"]["std"]),
        ]
    )
    return transform(image).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("size", "crop"), [(224, 0.95), (288, 1.0), (160, 0.95), (33, 0.95)])
def test_pixels_are_timms_to_the_bit(folder: Path, size: int, crop: float) -> None:
    schedule = tiny(image_size=size)
    config = load_weights(folder, schedule).preprocess
    assert config.shape == (3, size, size)
    for width, height in ((300, 261), (97, 400), (235, 235)):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        np.testing.assert_array_equal(preprocess_image(image, config), timm_says(image, size, crop))


def test_a_folder_a_file_in_it_and_a_file_alone(
    folder: Path, weights: Weights, tmp_path: Path
) -> None:
    schedule = tiny(image_size=224)
    for source in (folder, folder / "model.safetensors", f"timm:{folder}"):
        found = load_weights(source, schedule)
        assert dict(found).keys() == dict(weights).keys()
        assert all(np.array_equal(found[name], weights[name]) for name in weights)
        assert found.preprocess == BICUBIC
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "model.safetensors").rename(alone / "mine.safetensors")
    assert load_weights(alone / "mine.safetensors", schedule).preprocess == Preprocess()
    assert load_weights(f"timm:{alone / 'mine.safetensors'}", schedule).preprocess == BICUBIC


def test_weights_that_timm_took_from_torchvision_keep_its_filter(folder: Path) -> None:
    settings = changed(interpolation="bilinear", crop_pct=0.875)
    (folder / "config.json").write_text(json.dumps(settings))
    assert load_weights(folder, tiny(image_size=224)).preprocess == Preprocess()


def test_an_export_keeps_the_preprocessing_and_another_size_its_ratio(
    folder: Path, tmp_path: Path
) -> None:
    schedule = tiny(image_size=224)
    out = tmp_path / "export"
    export_weights(out, load_weights(folder, schedule), schedule)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["preprocess"] == {
        "resize": 235,
        "center_crop": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bicubic",
    }
    again = load_weights(out, schedule)
    assert again.preprocess == BICUBIC
    wider = load_weights(out, tiny(image_size=448)).preprocess
    assert (wider.resize, wider.interpolation) == (470, "bicubic")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (changed(crop_mode="squash"), "its crop_mode is 'squash', and only 'center' is known"),
        (changed(crop_pct=0), "crop_pct must be above 0 and at most 1, got 0"),
        (changed(crop_pct=True), "crop_pct must be above 0"),
        (changed(test_crop_pct=1.5), "test_crop_pct must be above 0"),
        (changed(input_size=[3, 224, 192]), "input_size is 224×192, and only square"),
        (changed(input_size="224"), "input_size must be three integers"),
        (changed(interpolation="lanczos"), "interpolation must be bilinear or bicubic"),
        (changed(interpolation=3), "interpolation must be a text"),
        (changed(mean=[0.5]), "mean must be three numbers"),
        (changed(std=0.5), "std must be three numbers"),
        ({"pretrained_cfg": []}, "it has no pretrained_cfg"),
    ],
)
def test_settings_that_make_no_preprocessing(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    assert said in refused(folder)


def test_another_network_of_timms_is_refused_by_name(folder: Path) -> None:
    assert "it is timm's 'resnet50', asked for 'resnet18'" in refused(folder, "resnet18")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architecture": "resnet50d"}))
    assert "it is timm's 'resnet50d', asked for 'resnet50'" in refused(folder, "resnet50")


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "there is no file '" in refused(tmp_path)
    assert "there is no file '" in refused(f"timm:{tmp_path / 'a.safetensors'}")
    assert "timm's weights are in a file such as" in refused(f"timm:{tmp_path / 'a.h5'}")
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    assert "the folder holds no manifest.json" in refused(tmp_path)


def test_timms_names_are_torchvisions() -> None:
    """timm's names are torchvision's, for ResNets that both have, in the order of `state_dict`."""
    block = ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample.0", "downsample.1")
    found = [n for n in resnet50().weight_specs if n.startswith("layer1.0.")]
    norm = ("weight", "bias", "running_mean", "running_var")
    assert found == [
        f"layer1.0.{layer}.{role}"
        for layer in block
        for role in (norm if "bn" in layer or layer.endswith(".1") else ("weight",))
    ]
    assert {"conv1.weight", "bn1.weight", "fc.weight", "fc.bias"} <= set(resnet18().weight_specs)


def test_the_command_exports_them(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = r18("export", "--network", "tiny", "--weights", folder, "--out", out)
    assert done.code == 0, done.err
    assert json.loads((out / "manifest.json").read_text())["preprocess"]["interpolation"] == (
        "bicubic"
    )
