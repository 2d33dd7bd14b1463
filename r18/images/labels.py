"""ImageNet's class names, in class order: what index 207 is called.

`imagenet_classes.json` is written by `tools/make_class_names.py` from torchvision's metadata.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files


@cache
def class_names() -> tuple[str, ...]:
    """The 1000 names of ImageNet-1k, by class index."""
    text = files("r18.images").joinpath("imagenet_classes.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def class_name(index: int, classes: int) -> str | None:
    """The name of a class of a network with `classes` classes; None unless they are ImageNet's."""
    names = class_names()
    return names[index] if classes == len(names) else None


__all__ = ["class_name", "class_names"]
