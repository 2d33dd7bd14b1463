"""The page of `r18 verify --html`: well formed, self-contained, with the run's numbers."""

from __future__ import annotations

import base64
import hashlib
import importlib
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from browser import PHONE, browse, needs_chromium, on_a_phone
from page_reader import Reader, assert_figure_is_safe
from r18.report.scale import WITHIN, fault, shade
from r18_oracle.judge.pictures import error_map
from r18_oracle.search.verify_page import allowed, page
from r18_oracle.search.verify_text import junit
from report_support import (
    ABOUT,
    HOSTILE,
    MADE,
    clean,
    empty,
    failing,
    faulty,
    finding,
    hostile,
    loss,
    nothing_ran,
    read,
    reader_of,
    refusing,
    result,
    verification,
)

# -- the page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MADE)
def test_a_page_is_well_formed_and_loads_nothing(make: Any) -> None:
    text = page(make(), about=ABOUT)
    reader = Reader(text)
    assert text.encode("utf-8")
    assert not re.search(r"https?:|[^+/\w]//\w|@import|url\(|<iframe|<object|<embed", text)
    assert all(src.startswith("data:image/") for src in reader.attribute("src"))
    for figure in pictures(reader):
        assert_figure_is_safe(figure)
    links = {got.get("href") for tag, got in reader.elements if tag == "link"}
    assert links == {"data:,"}
    ids = reader.attribute("id")
    assert len(ids) == len(set(ids))
    anchors = [got["href"] for tag, got in reader.elements if tag == "a"]
    assert [a for a in anchors if not a or a[1:] not in ids] == []
    assert not [name for _, got in reader.elements for name in got if name.startswith("on")]


@pytest.mark.parametrize("make", MADE)
def test_only_its_own_script_may_run(make: Any) -> None:
    text = page(make(), about=ABOUT)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(
        got["content"] for _, got in Reader(text).elements if got.get("http-equiv") is not None
    )
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy


def test_what_is_hostile_is_shown_as_text() -> None:
    reader = reader_of(hostile)
    assert [tag for tag, _ in reader.elements].count("script") == 1
    shown = HOSTILE.replace("\x00", "�").replace("\ud800", "?").replace("\x1b", "�")
    assert any(shown in text for text in reader.texts)
    assert reader.heat("Step")[shown, shown, shown].value == "0.5"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (clean, "No finding"),
        (faulty, "5 findings"),
        (empty, "Nothing was executed"),
        (nothing_ran, "Nothing was executed"),
    ],
)
def test_the_verdict_is_the_first_thing(make: Any, words: str) -> None:
    reader = reader_of(make)
    assert reader.title == f"r18 verify: {words}"
    assert words in reader.texts
    assert make().closing() in reader.texts


def test_a_backend_that_ran_nothing_is_no_success() -> None:
    made = clean()
    made.backends.append(result("idle", [refusing("idle/add/one/fp32")]))
    assert read(made).title == "r18 verify: Not everything was executed"


@pytest.mark.parametrize("make", [clean, faulty])
def test_every_step_is_in_the_heat_map_with_its_number(make: Any) -> None:
    cells = reader_of(make).heat("Step")
    counted = 0
    for ours in make().backends:
        for report in ours.checkpoints:
            for one in report.steps:
                cell = cells[one.step, ours.name, report.precision]
                assert cell.value == repr(one.ratio)
                assert shade(one.ratio) in cell.kinds
                assert cell.text.startswith("✕ ") == fault(one.ratio)
                counted += 1
        for precision, reason in ours.skipped.items():
            column = [c for (_, *where), c in cells.items() if where == [ours.name, precision]]
            assert column
            assert all(
                "hatch" in c.kinds and reason in (c.attributes["title"] or "") for c in column
            )
    assert counted == sum(cell.value is not None for cell in cells.values())


def test_every_kernel_is_in_the_heat_map_with_its_number() -> None:
    cells = reader_of(clean).heat("Kernel")
    assert {key: cell.value for key, cell in cells.items() if cell.value is not None} == {
        ("conv2d/tiled", "ours", "fp32"): "0.25",
        ("relu/max", "ours", "fp16"): "0.0",
        ("conv2d/tiled/8x8", "theirs", "fp32"): "0.99997",
    }
    refused = cells["add/one", "theirs", "fp32"]
    assert (refused.text, refused.kinds) == ("refused", {"hatch"})
    assert "refused 9: no strides" in (refused.attributes["title"] or "")
    failed = reader_of(faulty).heat("Kernel")
    assert failed["conv2d/tiled", "ours", "fp32"].value == "4.0"
    assert failed["conv2d/tiled", "ours", "fp32"].text == "✕ bound"
    assert failed["gap/mean", "ours", "fp32"].value == "inf"
    assert failed["odd id", "ours", "–"].value == "4.0"


def test_a_precision_that_only_one_backend_has_leaves_the_others_empty() -> None:
    cells = reader_of(clean).heat("Step")
    assert cells["pack", "ours", "fp16"].value == "0.0"
    other = cells["pack", "theirs", "fp32"]
    assert (other.text, other.kinds) == ("·", {"none"})


@pytest.mark.parametrize("make", [clean, faulty])
def test_the_numbers_along_the_network_are_those_of_the_losses(make: Any) -> None:
    rows = reader_of(make).plain("checkpoint")
    losses = [
        (row.name, row.loss)
        for ours in make().backends
        for report in ours.checkpoints
        for row in report.checkpoints
    ]
    assert len(rows) == len(losses)
    for cells, (name, lost) in zip(rows, losses, strict=True):
        numbers = (lost.relative, lost.own_relative, allowed(lost), lost.ratio, lost.max_abs)
        assert cells[0].text == name
        assert [c.value for c in cells[1:-1]] == [repr(n) for n in (*numbers, lost.cosine)]
        assert cells[-1].text == str(lost.coordinate)


def test_what_is_allowed_is_relative_to_the_reference() -> None:
    assert allowed(loss(1e-7)) == pytest.approx(8e-7)
    assert allowed(loss(0.0)) == pytest.approx(8e-7)
    assert math.isnan(allowed(loss(0.0, 0.0)))


def test_kernels_with_their_problems_refusals_checks_and_seconds() -> None:
    reader = reader_of(clean)
    rows = {row[0].text: row for row in reader.plain("kernel") if len(row) == 7}
    for ours in clean().backends:
        for report in ours.kernels:
            cells = rows[report.kernel]
            assert cells[1].text == report.verdict
            assert cells[2].text == str(report.tally.problems)
            assert cells[3].text == str(report.tally.refused.total())
            assert cells[6].value == repr(report.seconds)
    _, table = next((c, r) for c, r in reader.tables if c == "checks")
    assert [cell.text for cell in table[0]] == ["kernel", "runs", "exact", "bound"]
    assert [cell.text for cell in table[1][1:]] == ["40", "12", "11"]
    reasons = next(rows for kind, rows in reader.tables if kind == "plain reasons")
    assert [cell.text for cell in reasons[0]] == ["theirs/add/one/fp32", "9 ×", "no strides"]


def test_what_was_not_run_is_named_with_its_reason() -> None:
    said = reader_of(clean).said("left-out")
    assert "ours: the network 'tiny' only; its kernels with --backend ours" in said
    assert "ours, the network in int8: no int8 kernel takes conv1" in said
    assert "theirs" not in said
    assert "left-out" not in reader_of(faulty).attribute("id")
    assert HOSTILE[:10] in reader_of(hostile).said("left-out")


def test_a_failed_check_stands_in_the_table_of_checks() -> None:
    _, table = next((c, r) for c, r in reader_of(faulty).tables if c == "checks")
    names = [cell.text for cell in table[0]]
    assert table[1][names.index("bound")].text == "✕ 11"
    assert table[2][names.index("crash")].text == "✕"


def test_findings_alike_but_for_their_problems_share_a_card() -> None:
    reader = reader_of(faulty)
    cards = [tag for tag, _ in reader.elements if tag == "article"]
    assert len(cards) == 4
    assert sum("r18 replay exports/findings/" in text for text in reader.texts) == 4
    assert "4.0" not in reader.texts
    assert {"1.0", "1.5", "0.125"} <= set(reader.texts)


def test_where_a_worker_hung_is_on_its_card() -> None:
    stood = f'Main thread, most recent call first:\n  File "/mine.py", line 7 in {HOSTILE}'
    reader = read(verification([result("ours", [failing("odd id", details={"stacks": stood})])]))
    assert "Where it stood" in reader.texts
    (shown,) = (text for text in reader.preformatted if text.startswith("Main thread, "))
    assert shown.split("\n")[1].startswith('  File "/mine.py", line 7 in <script>alert(1)')
    assert "Where it stood" not in reader_of(faulty).texts


def test_without_a_folder_no_line_to_replay() -> None:
    assert "r18 replay" not in page(faulty(), about=ABOUT)


# -- summary and pictures ----------------------------------------------------------------------


def test_the_summary_counts_everything_judged() -> None:
    """The summary counts every kernel and step in one column of shades, and names the worst."""
    (rows,) = (rows for kind, rows in reader_of(clean).tables if kind == "heat lanes")
    head, *lanes = [[cell.text.strip() for cell in row] for row in rows]
    assert head[1:9] == ["exact", *(f"≤ {edge:g}" for edge in WITHIN), "above 1"]
    judged = {lane[0]: [int(n) for n in lane[1:9] if n != "·"] for lane in lanes if len(lane) > 2}
    assert {name: sum(counts) for name, counts in judged.items()} == {
        "ours fp32": 5,
        "ours fp16": 6,
        "ours int8": 0,
        "theirs fp32": 5,
    }
    assert lanes[0][9:] == ["0.99997", "step layer1.0.conv2"]
    assert ["", "network not run: no int8 kernel takes conv1"] in lanes
    (rows,) = (rows for kind, rows in reader_of(faulty).tables if kind == "heat lanes")
    _, bad, odd = rows
    assert [cell.text.strip() for cell in bad][8:] == ["✕ 6", "NaN", "step fc"]
    assert [cell.text.strip() for cell in odd][8:] == ["✕ 1", "4", "odd id"]


@pytest.mark.parametrize("make", [clean, faulty])
def test_the_figure_along_the_network_names_every_checkpoint(make: Any) -> None:
    runs = [run for ours in make().backends for run in ours.checkpoints]
    drawn = ["".join(figure.itertext()) for figure in pictures(reader_of(make))]
    assert len(drawn) == len(runs)
    for text, run in zip(drawn, runs, strict=True):
        assert all(row.name in text for row in run.checkpoints)
        assert "8 × PyTorch's" in text


def test_a_figure_is_the_same_for_the_same_numbers() -> None:
    assert page(faulty(), about=ABOUT) == page(faulty(), about=ABOUT)


@pytest.mark.parametrize(
    "picture",
    [None, 3, {}, {"shape": [1]}, {"shape": [1, 1, 2, 2], "cell": [1, 1], "plane": ["1 2", "x"]}],
)
def test_a_picture_that_is_none_is_left_out(picture: object) -> None:
    made = faulty()
    made.backends[0].findings[:] = [finding(details={"picture": picture})]
    reader = read(made)
    assert maps(reader) == []
    assert "article" in {tag for tag, _ in reader.elements}


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (2, 2, 2, 2, 3)])
def test_a_picture_of_any_number_of_axes_is_drawn(shape: tuple[int, ...]) -> None:
    made = faulty()
    worst = tuple(extent - 1 for extent in shape)
    picture = error_map(np.full(shape, 2.0), worst)
    made.backends[0].findings[:] = [finding(details={"picture": picture}, coordinate=worst)]
    assert maps(read(made))[0] == picture["plane"]


def test_a_picture_on_the_page_has_the_cells_of_the_finding() -> None:
    made = faulty()
    picture = made.findings[0].details["picture"]
    assert maps(read(made))[:2] == [picture["plane"], picture["outer"]]


def maps(reader: Reader) -> list[list[str]]:
    """The rows of each map of errors, which the page has as text too."""
    return [text.splitlines() for text in reader.preformatted]


def pictures(reader: Reader) -> list[ElementTree.Element]:
    """The SVG figures of a page."""
    found = [src for src in reader.attribute("src") if src.startswith("data:image/svg+xml;base64,")]
    return [ElementTree.fromstring(base64.b64decode(src.partition(",")[2])) for src in found]


# -- the command -------------------------------------------------------------------------------


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(importlib.import_module("r18_oracle.cli.verify").verify)
    target = tmp_path / "pages" / "verify.html"
    asked = "--backend numpy --network tiny --kernels */relu/*/fp32 --workers 1 --html"
    done = CliRunner().invoke(app, [*asked.split(), str(target)])
    assert done.exit_code == 0, done.output
    reader = Reader(target.read_text("utf-8"))
    assert reader.title == "r18 verify: No finding"
    assert reader.heat("Kernel")["relu/maximum", "numpy", "fp32"].value == "0.0"
    assert [p.name for p in target.parent.iterdir()] == ["verify.html"]


def test_an_earlier_page_and_junit_file_may_be_replaced(tmp_path: Path) -> None:
    module = importlib.import_module("r18_oracle.cli.verify")
    file = tmp_path / "out"
    file.write_text(page(empty(), about=ABOUT), "utf-8")
    module.check_page(file, "--html")
    suite = '<testsuite name="pytest"/>'
    declared = f'<?xml version="1.0"?>\n<!-- made\nby us -->\n{suite}'
    for text in (
        *(junit(make()) for make in (clean, faulty, empty)),
        suite,
        declared,
        f"\ufeff{suite}",
    ):
        file.write_text(text, "utf-8")
        module._check_junit(file, "--junit")


# -- in a browser ------------------------------------------------------------------------------

PROBE = """
const cell = document.querySelector("table.heat td[title]");
cell?.focus();
const shades = [...document.querySelectorAll(".legend .swatch, .heat td")]
  .filter((element) => /\\b[qf]\\d/.test(element.className));
const seen = {
  width: innerWidth,
  scroll: document.documentElement.scrollWidth,
  tip: cell ? document.getElementById("tip").textContent === cell.title : null,
  contrast: Math.min(...shades.map(contrast)),
  ground: light(getComputedStyle(document.body).backgroundColor),
};
"""


@needs_chromium
@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
@pytest.mark.parametrize("make", [clean, faulty])
def test_in_a_browser(make: Any, scheme: str, dark: bool, tmp_path: Path) -> None:
    """The browser logs nothing; on a phone the page fits, cells are legible and tips show."""
    seen, console = on_a_phone(page(make(), about=ABOUT), PROBE, tmp_path, dark=dark)
    assert console == []
    assert seen["scroll"] <= seen["width"] == PHONE
    assert seen["tip"] is True
    assert seen["contrast"] >= 4.5
    assert (seen["ground"] < 0.1) == dark


@needs_chromium
def test_a_browser_runs_no_script_but_the_page_s_own(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text(page(clean(), about=ABOUT), "utf-8")
    assert browse(target, tmp_path) == ("r18 verify: No finding", [])
    planted = "<script>document.title = 'planted'</script></body>"
    target.write_text(page(clean(), about=ABOUT).replace("</body>", planted), "utf-8")
    title, console = browse(target, tmp_path)
    assert title == "r18 verify: No finding"
    assert "Content Security Policy" in " ".join(console)
