"""Agreement with a reference on photographs, and the hardest of them: the closest calls."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from r18.errors import ImageError, UnknownName
from r18.evaluate.rows import OK, UNREADABLE, Row
from r18.evaluate.summary import Accuracy, Summary, share, summarise
from r18.graph.schedule import network
from r18.images.labels import class_name
from r18.images.preprocess import Preprocess, preprocess_image
from r18.report.evidence import Evaluation
from r18.report.markup import Markup, tag
from r18.report.scale import short, value

SHOWN = 12
"""Photographs that are shown at most."""
THUMBNAIL = Preprocess(resize=165, center_crop=144, mean=(0, 0, 0), std=(1, 1, 1))
"""What the network sees of a photograph, smaller, with values in [0, 1]."""
QUALITY = 72


def section(evaluation: Evaluation, images: Path | None, network_name: str) -> Iterator[Markup]:
    """The contents of the section.

    images: the folder of the photographs; None shows none. network_name: of the evaluation,
    unless its file says.
    """
    identity = evaluation.about.get("identity", {})
    classes = _classes(identity.get("network", network_name))
    found = summary(evaluation)
    reference = identity.get("against") or "the reference"
    yield tag("p", _sentence(evaluation.path, identity, found, reference))
    yield tag("ul", *_tiles(found, reference), class_="tiles")
    closest = hardest(evaluation.rows)
    wrong = hardest([found for found in evaluation.rows if _changed(*found)])
    for title, rows in (
        ("Another class, and no near tie", wrong),
        ("The hardest: the reference's first two classes are closest", closest),
    ):
        if rows:
            cards = (_card(row, tie, images, classes, reference) for row, tie in rows)
            yield tag("h3", title)
            yield tag("div", *cards, class_="photos")


def summary(evaluation: Evaluation) -> Summary:
    """The evaluation in numbers; which images are near ties its file says."""
    rows = [row for row, _ in evaluation.rows]
    compared = any(row.reference for row in rows)
    return replace(
        summarise(rows, (), 0.0 if compared else None),
        near_ties=sum(bool(tie) for _, tie in evaluation.rows),
        changed=tuple(row for row, tie in evaluation.rows if _changed(row, tie)),
    )


def _changed(row: Row, tie: bool | None) -> bool:
    """Another class, or no finite logits, which rounding does not explain."""
    if row.status != OK:
        return row.status != UNREADABLE
    return bool(row.reference) and not row.agree_top1 and not tie


def hardest(rows: Sequence[tuple[Row, bool | None]]) -> list[tuple[Row, bool | None]]:
    """The closest calls of the reference, the closest first."""
    known = [(row, tie) for row, tie in rows if row.margin is not None]
    return sorted(known, key=lambda found: (found[0].margin, found[0].file))[:SHOWN]


def _classes(name: str) -> int:
    """How many classes a network has; 0 for one that is not known."""
    try:
        schedule = network(name)
    except UnknownName:
        return 0
    return schedule.shapes(1)[schedule.output][1]


def _sentence(path: Path, identity: Mapping[str, Any], found: Summary, reference: str) -> str:
    who = "A backend"
    if "backend" in identity:
        who = f"{identity['backend']} in {identity['precision']}"
    if not found.compared:
        return f"{who} over {found.images} images, without a reference ({path.name})."
    if "against_precision" in identity:
        reference += f" in {identity['against_precision']}"
    return f"{who} beside {reference} over {found.images} images ({path.name})."


def _tiles(found: Summary, reference: str) -> Iterator[Markup]:
    def tile(number: float, text: str, words: str) -> Markup:
        return tag("li", tag("b", value(number, text)), tag("span", words))

    def right(accuracy: Accuracy, who: str) -> Markup:
        text = share(accuracy.top1, accuracy.images)
        words = f"top-1 of {who}, {accuracy.images} labelled; top-5 "
        return tile(accuracy.top1, text, words + share(accuracy.top5, accuracy.images))

    yield tile(found.images, f"{found.images:,}", "images")
    if found.unreadable:
        yield tile(found.unreadable, str(found.unreadable), "could not be read")
    if found.compared:
        for number, words in (
            (found.agree_top1, "the same class first"),
            (found.agree_top5, "the same five classes first"),
        ):
            yield tile(number, share(number, found.compared), f"{words}: {number:,} images")
        yield tile(found.near_ties, f"{found.near_ties:,}", "near ties: rounding may change them")
        yield tile(len(found.changed), f"{len(found.changed):,}", "came out as another class")
    if found.accuracy is not None:
        yield right(found.accuracy, "the backend")
    if found.reference_accuracy is not None:
        yield right(found.reference_accuracy, reference)


# -- photographs -------------------------------------------------------------------------------


def _card(row: Row, tie: bool | None, images: Path | None, classes: int, reference: str) -> Markup:
    """A photograph, the candidates, and who chose which."""
    candidates = list(dict.fromkeys([*row.reference[:2], row.backend[0]]))
    if row.agree_top1:
        chip = tag("span", "same class", class_="chip good")
    elif tie:
        chip = tag("span", "near tie", class_="chip void")
    else:
        chip = tag("span", "✕ another class", class_="chip bad")
    assert row.margin is not None
    listed = []
    for candidate in candidates:
        chosen = {
            reference: row.reference[0] == candidate,
            "the backend": row.backend[0] == candidate,
            "its label": row.label == candidate,
        }
        words = ", ".join(who for who, is_so in chosen.items() if is_so)
        note = f"class {candidate}" + (f": {words}" if words else "")
        named = class_name(candidate, classes) or f"class {candidate}"
        listed.append(tag("li", tag("b", named), tag("small", note)))
    picture, why = (None, "") if images is None else thumbnail(images, row.file)
    alternative = f"photograph {row.file}"
    shown = (
        tag("span", why or "no image", class_="blank hatch")
        if picture is None
        else tag("img", src=picture, alt=alternative, width=96, height=96)
    )
    return tag(
        "article",
        tag("div", shown, tag("ol", *listed), class_="shown"),
        tag("p", chip, tag("span", "margin ", value(row.margin, short(row.margin, 3)))),
        tag("h3", row.file),
        class_="photo",
    )


def thumbnail(folder: Path, file: str) -> tuple[str | None, str]:
    """What the network sees of a photograph as a small JPEG in a `data:` address; or None and why.

    A file that is not below the folder is not read.
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
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}", ""


__all__ = ["SHOWN", "hardest", "section", "summary", "thumbnail"]
