"""The documentation is correct: links and the site, tables from code and records, shown output."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from mkdocs.config import load_config
from PIL import Image

import r18
from r18 import records
from r18.backend.registry import AUTO_ORDER, installed
from r18.cli.app import COMMANDS, GROUP
from r18.evaluate.margins import ALGORITHM_MULTIPLE, CUT_OFF_MULTIPLE, END_TO_END_MULTIPLE
from r18.report.tables import rendered
from r18_oracle.judge.bounds import (
    DELTA,
    FORMATS,
    STAGE_ERROR,
    TENSOR_CORE_BLOCK,
    WINOGRAD_ROUNDINGS,
)
from r18_oracle.judge.roundings import FACTORS, HALF, LEAST_HALF, PAIR
from support import ROOT, output_of

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
BACKENDS = sorted((DOCS / "backends").glob("*.md"))

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


# -- links and lines ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}"


def test_the_pages_of_the_root_are_known() -> None:
    """The root has no other pages than the known ones, whatever folders tools leave behind."""
    names = {page.name for page in PAGES if page.parent == ROOT}
    assert names == {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}


def test_every_page_is_reached_from_the_index() -> None:
    reached, todo = set(), [DOCS / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in _LINK.findall(prose(page)))
        todo += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert set(DOCS.rglob("*.md")) <= reached


# -- the site ----------------------------------------------------------------------------------


def entries(nav: Any) -> Iterator[str]:
    """The pages in a navigation of mkdocs."""
    match nav:
        case str():
            yield nav
        case list():
            yield from (page for part in nav for page in entries(part))
        case dict():
            yield from (page for part in nav.values() for page in entries(part))


def test_the_navigation_names_every_page_once() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    named = list(entries(config.nav))
    generated = {"changelog.md", "contributing.md", "security.md"}
    ours = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(named) == sorted(ours | generated)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """The site builds as by `make docs`, without network; links to sources lead to copies."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in sorted(tmp_path.rglob("*.html")):
        text = page.read_text("utf-8")
        assert not re.findall(r'(?:src|<link[^>]+href)="https?://[^"]*"', text), page
        for link in re.findall(r'<a [^>]*href="([^"#:]+)', text):
            if page.name != "404.html" and link not in ("http", "https"):  # 404's are absolute
                assert (page.parent / unquote(link)).exists(), f"{page.name} links to {link}"
    assert (tmp_path / "contributing.html").is_file()
    assert "](" not in (tmp_path / "changelog.html").read_text("utf-8")


def test_what_the_site_is_made_of_is_shipped_and_ignored() -> None:
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert "build/" in ignored
    assert "\ninclude CHANGELOG.md" in "\n" + (ROOT / "MANIFEST.in").read_text("utf-8")


# -- the README --------------------------------------------------------------------------------


def test_the_readmes_first_screen_has_what_a_visitor_needs() -> None:
    """Forty lines show a picture, a table of five rows, how to install, a finding, and a link."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    first = lines[: lines.index("## Commands")]
    assert len(first) <= 41  # with the empty line before the next heading
    text = "\n".join(first)
    assert "![" in text
    assert len([line for line in first if line.startswith("| ")]) == 2 + 5
    assert "pip install" in text
    assert "r18 replay exports/findings/" in text
    assert "](docs/README.md)" in text


def test_the_readmes_program_runs(tmp_path: Path) -> None:
    """README's program runs, with weights that need no network."""
    text = (ROOT / "README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name in re.findall(r"\w+\.jpg", code):
        Image.linear_gradient("L").convert("RGB").save(tmp_path / name)
    code = code.replace('"imagenet"', '"synthetic"')
    printed = output_of(f"import os; os.chdir({str(tmp_path)!r})\n{code}\nprint(logits.shape)")
    assert printed.strip() == "(2, 1000)"


def test_the_program_of_the_page_about_integers_runs() -> None:
    """The page's program runs on the small network, with logits as near as int8 allows."""
    text = (DOCS / "integers.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    said = output_of(code.replace("resnet18", "tiny").replace("graph.tiny", "graph.resnet"))
    decibels, unit = said.split()
    assert unit == "dB"
    assert int(decibels) >= 15


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == r18.__version__
    assert cited["license"] == "MIT"


def test_what_github_reads_is_well_formed() -> None:
    forms = sorted((ROOT / ".github").rglob("*.yml"))
    assert {form.stem for form in forms} == {
        "ci",
        "nightly",
        "config",
        "new-kernel",
        "wrong-result",
    }
    for form in forms:
        data = yaml.safe_load(form.read_text("utf-8"))
        if form.stem in ("new-kernel", "wrong-result"):
            assert {"name", "description", "body"} <= set(data)
            ids = [part["id"] for part in data["body"]]
            assert len(set(ids)) == len(ids)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert {"run": ".ci/run"} in workflow["jobs"]["check"]["steps"]
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text("utf-8"))
    assert set(nightly["jobs"]) == {"fuzz", "verify", "compile", "faults"}


# -- prose -------------------------------------------------------------------------------------


def test_the_english_keeps_to_our_style() -> None:
    """The pages have at most one phrase of `tools/count_words.py` a thousand lines."""
    pages = [page for page in PAGES if page.name != "report.md"]
    tool = str(ROOT / "tools" / "count_words.py")
    command = [sys.executable, tool, "--limit", "1", *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _breaks(link: re.Match[str]) -> str:
    """The line breaks in a link, which stand for it."""
    return "\n" * link[0].count("\n")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_is_wrapped(page: Path) -> None:
    """Prose is at most 104 columns wide, without links; tables and output may be wider."""
    made = re.compile(r"^<!-- (\w+): .*?^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)
    for line in _LINK.sub(_breaks, made.sub("", prose(page))).splitlines():
        assert not line.startswith(("+ ", "* ")), f"a line of a formula, or a list: {line}"
        assert len(line) <= 104 or line.startswith(("|", "<!--")), line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_that_are_shown_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    shown = re.findall(r"(?:^\$ (?:\w+=\S+ )?|`)r18 ([a-z]+)\b", text, re.MULTILINE)
    brought = {entry.name for entry in entry_points(group=GROUP)}
    assert set(shown) <= {*COMMANDS, *brought}, name_of(page)


# -- tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_of_measurements_are_the_records(page: Path) -> None:
    text = page.read_text("utf-8")
    hint = f"run python tools/make_tables.py {name_of(page)}"
    assert rendered(text, ROOT / records.FOLDER) == text, hint


def test_tables_of_kernels_are_what_the_backends_declare() -> None:
    """The kernel tables are the backends', in a process in which Numba simulated nothing yet."""
    tool = ROOT / "tools" / "make_kernel_tables.py"
    code = (
        f"import runpy, sys; sys.argv = ['make_kernel_tables', '--check']; "
        f"runpy.run_path({str(tool)!r}, run_name='__main__')"
    )
    said = output_of(code)
    pages = sorted((DOCS / "backends").rglob("*.md"))
    assert said.splitlines() == [f"{page.name}: as the backends say" for page in pages]


def test_a_changed_table_is_made_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n<!-- kernels: numpy -->\nold\n<!-- /kernels -->\n\nb\n", "utf-8")
    tool = str(ROOT / "tools" / "make_kernel_tables.py")
    check = [sys.executable, tool, "--check", str(page)]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1
    made = runpy.run_path(tool)["rendered"](page.read_text("utf-8"))
    assert "| conv2d | im2col | 2 | fp32 fp64 | NCHW | sum | deterministic |" in made
    assert made.startswith("a\n\n<!-- kernels: numpy -->\n\n| op |")
    assert made.endswith("\n<!-- /kernels -->\n\nb\n")


def test_there_is_a_page_for_each_backend_in_the_order_of_auto() -> None:
    ours = [name for name, point in installed().items() if point.module.startswith("r18_")]
    assert {page.stem for page in BACKENDS} == set(ours) == set(AUTO_ORDER)
    index = (DOCS / "README.md").read_text("utf-8")
    linked = re.findall(r"^\| \[`([\w-]+)`\]\(backends/", index, re.MULTILINE)
    assert linked == list(AUTO_ORDER)


@pytest.mark.parametrize("page", BACKENDS, ids=lambda page: page.stem)
def test_a_backends_page_says_everything(page: Path) -> None:
    more = sorted(page.with_suffix("").glob("*.md"))  # a backend may have several pages
    text = "\n".join(one.read_text("utf-8") for one in (page, *more))
    assert text.startswith(f"# `{page.stem}`: ")
    assert f"<!-- kernels: {'r18_torch:cpu' if page.stem == 'torch' else page.stem} -->" in text
    for heading in ("Kernels", "What it is and is not", "How it was verified", "Limits"):
        assert f"\n## {heading}\n" in text
    for word in ("**Layout", "**Precision", "**Contract**", "pip install"):
        assert word in text


# -- the bounds --------------------------------------------------------------------------------

BOUNDS = DOCS / "bounds.md"


def test_the_program_of_the_bounds_page_prints_what_is_shown(tmp_path: Path) -> None:
    """The bounds page's program prints the text shown, up to percentages, which depend on NumPy."""
    text = BOUNDS.read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = tmp_path / "bounds_page.py"
    script.write_text(code, "utf-8")
    printed = output_of(f"import runpy; runpy.run_path({str(script)!r})")
    number = re.compile(r"\d+(?=%)")
    assert number.sub("", printed).split() == number.sub("", shown).split()
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    assert all(abs(int(got) - int(said)) <= 1 for got, said in pairs), printed


def test_the_bounds_page_has_the_constants_of_the_code() -> None:
    text = " ".join(BOUNDS.read_text("utf-8").split())
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

    def power(value: float) -> str:
        exponent = value.hex().partition("p")[2]
        return "2" + str(int(exponent)).translate(digits)

    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn"):
        u, eta = FORMATS[name].u, FORMATS[name].eta
        subnormal = {"float64": "2⁻¹⁰⁷⁴"}.get(name) or power(eta)
        shown = "e4m3" if name == "float8_e4m3fn" else name
        assert f"| {shown} | {power(u)} | {subnormal} |" in text
    small, middle, large = (WINOGRAD_ROUNDINGS[tile] for tile in (2, 4, 6))
    assert f"n = C + {small}, C + {middle} and C + {large}" in text
    assert f"η = {STAGE_ERROR:g}u for each doubling" in text
    assert DELTA == 1e-6
    assert "δ = 10⁻⁶" in text
    assert TENSOR_CORE_BLOCK == 4
    assert "b is taken as 4" in text
    assert END_TO_END_MULTIPLE == 8
    assert "**8 = √64**" in text
    assert ALGORITHM_MULTIPLE == {"winograd_f4x4": 20}
    assert "it is **20**" in text
    pair = FACTORS[PAIR]
    assert f"| fp16x2, a pair for a factor | {power(pair.u)} | {power(pair.eta)} |" in text
    assert f"a = {power(HALF)} of |v|, or d = {power(LEAST_HALF)}" in text
    assert (
        f"with u = {power(pair.u)} (11 bits, 11 bits and a sign) and ε = {power(pair.eta / 2)}"
        in text
    )
    assert f"Beyond {pair.largest:.0f} no pair" in text
    assert CUT_OFF_MULTIPLE == 8
    assert "In fp16x3 it is **8 times** that" in text
