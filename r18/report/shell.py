"""What a page is made in: one file with its style and its script, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files

from r18.report.markup import Markup, tag

STYLES = ("palette.css", "page.css")
"""Of every page, in `r18.report`."""
SCRIPT = "page.js"


def document(
    title: str,
    header: Markup,
    sections: Sequence[tuple[str, str, Sequence[str | None]]],
    footer: str,
    styles: Iterable[str] = (),
) -> str:
    """The whole document.

    sections: (id, title, contents) of each; the page links to them. styles: sheets besides those
    of every page, as text.
    """
    script = asset("r18.report", SCRIPT)
    sheets = [asset("r18.report", name) for name in STYLES]
    links = [tag("a", title, href=f"#{name}") for name, title, _ in sections]
    body = [
        header,
        tag("nav", *links, aria_label="On this page") if links else None,
        tag(
            "main",
            *(tag("section", tag("h2", name), *what, id=at) for at, name, what in sections),
        ),
        tag("footer", footer),
        tag("script", Markup(script)),
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup("".join([*sheets, *styles]))),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def asset(package: str, name: str) -> str:
    """A file that lies beside a package's modules."""
    return files(package).joinpath(name).read_text("utf-8")


def _policy(script: str) -> str:
    """Nothing is loaded, and no script runs but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )


__all__ = ["asset", "document"]
