"""HTML and SVG, escaped by construction: text becomes markup only by way of `tag`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"br", "img", "link", "meta"})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f￾￿]")


class Markup(str):
    """Text that is markup already; any other `str` is escaped where it is put in."""

    __slots__ = ()


def tag(
    name: str, /, *children: str | None, **attributes: str | int | float | bool | None
) -> Markup:
    """An element. `class_` and `data_tip` are the attributes `class` and `data-tip`.

    An attribute that is None or False is left out, one that is True has no value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escaped(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening) if name in VOID else Markup(f"{opening}{joined(children)}</{name}>")


def scrolled(content: Markup, said: str) -> Markup:
    """Content that may be wider than the page, in a box that scrolls; `said` names it."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=said)


def joined(parts: Iterable[str | None], between: str = "") -> Markup:
    """Parts one after another; text among them is escaped."""
    return Markup(escaped(between).join(escaped(part) for part in parts if part is not None))


def escaped(text: str) -> Markup:
    """Text as markup, also what no document may hold: control characters, halves of a pair."""
    if isinstance(text, Markup):
        return text
    whole = text.encode("utf-8", "replace").decode()
    return Markup(html.escape(_CONTROL.sub("�", whole)))


__all__ = ["VOID", "Markup", "escaped", "joined", "scrolled", "tag"]
