"""Agreement with a reference on photographs, and the hardest photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from r18.errors import ImageError, UnknownName
from r18.evaluate.rows import OK, UNREADABLE, Row
from r18.evaluate.summary import Summary, summarise
from r18.graph.resnet import network
from r18.images.labels import class_name
from r18.images.preprocess import Preprocess, preprocess_image
from r18.report.evidence import Evaluation
from r18.report.render import image

SHOWN = 12
"""The largest number of photographs in a gallery."""
THUMBNAIL = Preprocess(resize=165, center_crop=144, mean=(0, 0, 0), std=(1, 1, 1))
"""The crop that the network sees, smaller, with values in [0, 1]."""
QUALITY = 72


def view(evaluation: Evaluation, images: Path | None, network_name: str | None) -> dict[str, Any]:
    """The data of the section.

    images: the folder of the photographs; None shows none. network_name: the evaluated network,
    unless the evaluation names it; None for an unknown one.
    """
    identity = evaluation.identity
    name = identity.get("network", network_name)
    classes = 0 if name is None else _classes(name)
    reference = identity.get("against") or "the reference"
    galleries = {
        "Different class, not a near tie": [one for one in evaluation.rows if _changed(*one)],
        "Hardest: smallest margin between the reference's first two classes": evaluation.rows,
    }
    return {
        "file": evaluation.path.name,
        "identity": identity,
        "reference": reference,
        "summary": summary(evaluation),
        "galleries": {
            title: [card(row, tie, images, classes, reference) for row, tie in hardest(rows)]
            for title, rows in galleries.items()
        },
    }


def summary(evaluation: Evaluation) -> Summary:
    """The evaluation in numbers; its file says which images are near ties."""
    rows = [row for row, _ in evaluation.rows]
    compared = any(row.reference for row in rows)
    return replace(
        summarise(rows, (), 0.0 if compared else None),
        near_ties=sum(bool(tie) for _, tie in evaluation.rows),
        changed=tuple(row for row, tie in evaluation.rows if _changed(row, tie)),
    )


def _changed(row: Row, tie: bool | None) -> bool:
    """Whether rounding does not explain the outcome: another class, or logits not finite."""
    if row.status != OK:
        return row.status != UNREADABLE
    return bool(row.reference) and not row.agree_top1 and not tie


def hardest(rows: Sequence[tuple[Row, bool | None]]) -> list[tuple[Row, bool | None]]:
    """The photographs with the smallest margins of the reference, smallest first."""
    known = [(row, tie) for row, tie in rows if row.margin is not None]
    return sorted(known, key=lambda found: (found[0].margin, found[0].file))[:SHOWN]


def _classes(name: str) -> int:
    """The number of classes of a network; 0 for an unknown one."""
    try:
        schedule = network(name)
    except UnknownName:
        return 0
    return schedule.shapes(1)[schedule.output][1]


def card(
    row: Row, tie: bool | None, images: Path | None, classes: int, reference: str
) -> dict[str, Any]:
    """A photograph and its candidate classes, each as (name, class, those who chose it)."""
    candidates = []
    for candidate in dict.fromkeys([*row.reference[:2], row.backend[0]]):
        chosen = {
            reference: row.reference[0] == candidate,
            "the backend": row.backend[0] == candidate,
            "its label": row.label == candidate,
        }
        name = class_name(candidate, classes) or f"class {candidate}"
        candidates.append((name, candidate, [who for who, is_so in chosen.items() if is_so]))
    picture, why = (None, "no image") if images is None else thumbnail(images, row.file)
    return {"row": row, "tie": tie, "candidates": candidates, "picture": picture, "why": why}


def thumbnail(folder: Path, file: str) -> tuple[str | None, str]:
    """(the crop that the network sees as a small JPEG in a `data:` address or None, why None).

    A file outside the folder is not read.
    """
    inside = PurePosixPath(file)
    if inside.is_absolute() or ".." in inside.parts:
        return None, "not read"
    try:
        pixels = preprocess_image(folder / inside, THUMBNAIL)
    except ImageError:
        return None, "cannot be read"
    rounded = np.rint(pixels * 255).astype(np.uint8).transpose(1, 2, 0)
    stream = BytesIO()
    Image.fromarray(rounded).save(stream, "JPEG", quality=QUALITY)
    return image(stream.getvalue(), "jpeg"), ""


__all__ = ["SHOWN", "hardest", "summary", "thumbnail", "view"]
