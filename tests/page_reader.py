"""A reader of pages: their elements, texts and tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = frozenset({"br", "img", "link", "meta"})


def assert_figure_is_safe(figure: ElementTree.Element) -> None:
    """A figure is drawn on white without CSS variables, and refers to no other file."""
    text = ElementTree.tostring(figure, encoding="unicode")
    assert not re.search(r"<script|var\(|@import|<image", text)
    links = re.findall(r"""url\(([^)]*)\)|href=["']([^"']*)""", text)
    assert all((address or href).startswith("#") for address, href in links)
    first = next(one for one in figure.iter() if one.tag.endswith("path"))
    assert "fill: #ffffff" in (first.get("style") or "")


class Cell:
    """A cell of a table: its text, and the exact number that it shows."""

    def __init__(self, attributes: dict[str, str | None]) -> None:
        self.attributes = attributes
        self.text = ""
        self.value: str | None = None

    @property
    def kinds(self) -> set[str]:
        return set((self.attributes.get("class") or "").split())


class Reader(HTMLParser):
    """A page's elements and tables, without `small` notes; all are closed, and as they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[tuple[str, list[list[Cell]]]] = []
        self.preformatted: list[str] = []
        self.title = ""
        self.sections: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        got = dict(attrs)
        assert len(got) == len(attrs), f"an attribute twice: {attrs}"
        self.elements.append((tag, got))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "section":
            self.sections[got["id"] or ""] = []
        if tag == "table":
            self.tables.append((got.get("class") or "", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][1][-1].append(Cell(got))
        elif tag == "data" and "table" in self.stack:
            self.tables[-1][1][-1][-1].value = got["value"]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "section" in self.stack:
            self.sections[next(reversed(self.sections))].append(data)
        if self.stack[-1:] == ["pre"]:
            self.preformatted.append(data)
        if self.stack == ["html", "head", "title"]:
            self.title += data
        if {"td", "th"} & set(self.stack) and "small" not in self.stack:
            self.tables[-1][1][-1][-1].text += data

    def attribute(self, name: str) -> list[str]:
        return [got[name] or "" for _, got in self.elements if name in got]

    def said(self, section: str) -> str:
        """The text of the section with that id."""
        return "".join(self.sections[section])

    def heat(self, corner: str) -> dict[tuple[str, str, str], Cell]:
        """(row, backend, precision) → cell of the heat map with that corner."""
        rows = next(r for c, r in self.tables if c.startswith("heat") and r[0][0].text == corner)
        backends = [c.text for c in rows[0][1:] for _ in range(int(c.attributes["colspan"] or 0))]
        columns = list(zip(backends, [c.text for c in rows[1]], strict=True))
        return {
            (row[0].text, *column): cell
            for row in rows[2:]
            for column, cell in zip(columns, row[1:], strict=True)
        }

    def plain(self, head: str) -> list[list[Cell]]:
        """The rows of the tables whose first heading is `head`."""
        return [row for _, rows in self.tables if rows[0][0].text == head for row in rows[1:]]
