"""A hook of mkdocs: pages of the repository outside docs/, and links to its sources, in the site.

CHANGELOG.md, CONTRIBUTING.md and SECURITY.md become pages. A source file that a page links to is
copied into the site as text, so that the site needs no server and no other host.
"""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    ROOT / f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")
}

_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)")


def place(target: Path) -> str:
    """Where a file of the repository is in the site: below docs/, a page, or a copy as text."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    if target in PAGES:
        return PAGES[target]
    name = f"source/{target.relative_to(ROOT).as_posix()}"
    return name if target.suffix in (".json", ".svg") else f"{name}.txt"


def linked(text: str, page: Path) -> set[Path]:
    """The files that a page links to."""
    return {(page.parent / link).resolve() for _, link in _LINK.findall(text)}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages outside docs/, and every source that some page links to."""
    for page, name in PAGES.items():
        files.append(File.generated(config, name, content=page.read_text("utf-8")))
    pages = [*DOCS.rglob("*.md"), *PAGES]
    targets = set().union(*(linked(page.read_text("utf-8"), page) for page in pages))
    for target in sorted(targets):
        if target.is_file() and not target.is_relative_to(DOCS) and target not in PAGES:
            files.append(File.generated(config, place(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to where their targets are in the site."""
    here = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == here), DOCS / here)

    def rewritten(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if not target.is_file():  # mkdocs reports it
            return link[0]
        return link[1] + relpath(place(target), str(Path(here).parent))

    return _LINK.sub(rewritten, markdown)
