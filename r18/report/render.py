"""HTML from the templates: one file that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from r18.errors import UsageError
from r18.report import scale

if TYPE_CHECKING:
    import jinja2

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


def document(page: str, sections: Sequence[tuple[str, str]], **values: Any) -> str:
    """A whole page.

    page: its template, and the folder of the templates of its sections.
    sections: (id, title) of each; the template of a section is `<page>/<id>.html.j2`.
    values: what the templates use; text is escaped.
    """
    check_libraries()
    from markupsafe import Markup

    script, style = (_asset(name) for name in ("page.js", "page.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment().get_template(f"{page}.html.j2")
    text = template.render(
        values,
        page=page,
        sections=sections,
        script=Markup(script),
        style=Markup(style),
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'",
    )
    return clean(text)


def check_libraries() -> None:
    """Raise `UsageError` if the libraries that pages and figures need are not installed."""
    try:
        for name in ("jinja2", "matplotlib"):
            import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"pages and figures need {error.name}, which is not installed\n"
            "  pip install 'r18[report]'"
        ) from None


def clean(text: str) -> str:
    """Text without control characters and unpaired surrogates, which no document may hold."""
    return _CONTROL.sub("�", text.encode("utf-8", "replace").decode())


def image(data: bytes, kind: str) -> str:
    """The `data:` address of an image."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@cache
def environment() -> jinja2.Environment:
    """Escapes every value; an undefined name is an error."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("r18.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("shade", "fault", "short", "ratio_text", "decimal"):
        made.filters[name] = getattr(scale, name)
    made.filters["exact"] = lambda number: repr(float(number))
    made.globals["within"] = scale.WITHIN
    return made


def _asset(name: str) -> str:
    return files("r18.report").joinpath("templates", name).read_text("utf-8")


__all__ = ["check_libraries", "clean", "document", "environment", "image"]
