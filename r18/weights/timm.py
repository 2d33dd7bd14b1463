"""timm's ResNets: weights in torchvision's names, and a `config.json` that says how images go in.

timm (PyTorch Image Models) publishes a network as a folder with `model.safetensors` and
`config.json`, whose `pretrained_cfg` gives the size of images, the filter that resizes them, and
`crop_pct`, the part of the resized shorter side that the crop takes. An evaluation in timm resizes
to ⌊size / crop_pct⌋ and crops the centre; so does the `Preprocess` made here. At `test_input_size`
its `test_crop_pct` counts.

A file of settings may come from anywhere and is not trusted: what is read of it is checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from r18.errors import R18Error, WeightsError, show
from r18.files import JSON_LIMIT, read_object
from r18.graph.resnet import FAMILY
from r18.images.preprocess import Preprocess

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
KEYWORD = "timm"
"""Before the path of timm's weights, as in `timm:resnet50.safetensors`."""

HEAD = "pretrained_cfg"


@dataclass(frozen=True)
class Settings:
    """How images of these weights are prepared; the usual ones of timm's ResNets.

    architecture: of timm; empty where it is not known. size, test_size: of images, in pixels.
    crop, test_crop: the part of the resized shorter side that is kept, at these sizes.
    """

    architecture: str = ""
    size: int = 224
    crop: float = 0.95
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    test_size: int = 0
    test_crop: float = 0.0

    def preprocess(self, size: int) -> Preprocess:
        """The preprocessing for images of that size. Raises `WeightsError` for settings that make
        none."""
        tested = size == self.test_size and self.test_crop
        crop = self.test_crop if tested else self.crop
        try:
            return Preprocess(
                resize=math.floor(size / crop),
                center_crop=size,
                mean=self.mean,  # type: ignore[arg-type]
                std=self.std,  # type: ignore[arg-type]
                interpolation=self.interpolation,
            )
        except R18Error as error:
            raise WeightsError(f"its settings make no preprocessing: {error}") from None

    def check(self, network: str) -> None:
        """Raise `WeightsError` for another network than these weights are of."""
        if self.architecture and network in FAMILY and self.architecture != network:
            raise WeightsError(
                f"it is timm's {show(self.architecture)}, asked for '{network}'\n"
                f"  known are {', '.join(FAMILY)}, which timm and torchvision name alike"
            )


def is_config(path: Path) -> bool:
    """Whether a file is timm's `config.json`, as far as its first field tells."""
    try:
        return path.is_file() and HEAD in read_object(path, JSON_LIMIT, WeightsError)
    except (R18Error, OSError):
        return False


def read_config(path: Path) -> Settings:
    """The settings in a `config.json` of timm's. Raises `WeightsError`, which names the file."""
    try:
        data = read_object(path, JSON_LIMIT, WeightsError)
        cfg = data.get(HEAD)
        if not isinstance(cfg, dict):
            raise WeightsError(f"it has no {HEAD}: no config.json of timm's")
        mode = cfg.get("crop_mode", "center")
        if mode != "center":
            raise WeightsError(f"its crop_mode is {show(mode)}, and only 'center' is known here")
        usual = Settings()
        return Settings(
            architecture=_text(data.get("architecture", ""), "architecture"),
            size=_side(cfg.get("input_size", (3, usual.size, usual.size)), "input_size"),
            crop=_part(cfg.get("crop_pct", 0.875), "crop_pct"),
            interpolation=_text(cfg.get("interpolation", "bilinear"), "interpolation"),
            mean=_three(cfg.get("mean", usual.mean), "mean"),
            std=_three(cfg.get("std", usual.std), "std"),
            test_size=_side(cfg.get("test_input_size", (3, 0, 0)), "test_input_size"),
            test_crop=_part(cfg["test_crop_pct"], "test_crop_pct") if _tested(cfg) else 0.0,
        )
    except WeightsError as error:
        raise WeightsError(f"settings '{path}': {error}") from None
    except OSError as error:
        raise WeightsError(f"settings '{path}': cannot be read: {error}") from None


def _tested(cfg: dict[str, object]) -> bool:
    return cfg.get("test_crop_pct") is not None


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise WeightsError(f"{what} must be a text, got {show(value)}")
    return value


def _side(value: object, what: str) -> int:
    """The side of the square (channels, height, width)."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise WeightsError(f"{what} must be three integers, got {show(value)}")
    if not all(type(one) is int and one >= 0 for one in value):
        raise WeightsError(f"{what} must be three integers, got {show(value)}")
    _, height, width = value
    if height != width:
        raise WeightsError(f"{what} is {height}×{width}, and only square images are known here")
    return int(height)


def _part(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise WeightsError(f"{what} must be above 0 and at most 1, got {show(value)}")
    return float(value)


def _three(value: object, what: str) -> tuple[float, ...]:
    """Three numbers, which `Preprocess` checks."""
    if not isinstance(value, list | tuple):
        raise WeightsError(f"{what} must be three numbers, got {show(value)}")
    return tuple(value)


__all__ = ["CONFIG", "KEYWORD", "WEIGHTS", "Settings", "is_config", "read_config"]
