"""The page of `r18 report`: it has the records' numbers, loads nothing, and works in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from jinja2 import UndefinedError
from PIL import Image

from browser import PHONE, browse, needs_chromium, on_a_phone
from commands import r18
from evaluate_support import numbered, photographs
from page_reader import Cell, Reader, assert_figure_is_safe
from r18 import records
from r18.bench.baselines import PEER
from r18.bench.error import error_cells
from r18.bench.profile import MODEL
from r18.bench.roofline import limits
from r18.errors import UnknownName, UsageError
from r18.evaluate.rows import NOT_FINITE, OK, UNREADABLE, Row
from r18.evaluate.tables import read_table, write_table
from r18.graph.resnet import resnet18
from r18.report import Evidence, gather, page, pictures
from r18.report.agreement import SHOWN, hardest, summary, thumbnail
from r18.report.evidence import grouped
from r18.report.page import missing
from r18.report.render import clean, environment
from r18.report.scale import fault, ratio_text, shade
from r18.report.speed import FAR, bars, summed
from support import ROOT
from whole_records import ceilings_of, whole

HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m"
SVG = "{http://www.w3.org/2000/svg}"

# -- evidence ----------------------------------------------------------------------------------


def timed(name: str, median: float, batch: int, **changes: Any) -> dict[str, Any]:
    """A row of a benchmark."""
    return {
        "backend": name,
        "algorithm": "",
        "steps": [],
        "median_ms": median,
        "p10_ms": median * 0.9,
        "p90_ms": median * 1.25,
        "ms_per_image": median / batch,
        "images_per_second": 1e3 * batch / median,
        "ratio": median / 2,
        "best_ratio": median / 1.5,
        "best_peer": "torchvision graph",
    } | changes


def group(precision: str, batch: int, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    kind = changes.pop("kind", "cuda")
    device = {"kind": kind, "name": "NVIDIA H200 (sm_90)" if kind == "cuda" else "a CPU"}
    return {
        "network": "resnet18",
        "precision": precision,
        "fusion": "all",
        "batch": batch,
        "date": "2026-11-20T10:00:00+00:00",
        "warmup": 50,
        "repeat": 1000,
        "environment": {"device": device, "packages": {"torch": "2.11.0"}, "driver": "580.1"},
        "machine": {"processor": "a processor", "cpus": 2, "threads": 2},
        "rows": rows,
    } | changes


STEPS = [
    {"step": "conv1", "kernel": "k/conv", "milliseconds": 0.25},
    {"step": "conv1", "kernel": "k/conv", "milliseconds": 0.5},
    {"step": "relayout image@nhwc", "kernel": "k/copy", "milliseconds": 0.125},
    {"step": "fc", "kernel": "k/dot", "milliseconds": 0.0625},
]
ERROR = {"relative": 3e-6, "images": 8, "reference": "float64"}
ON_GPU = {
    "resnet18/fp32/all/b64": group(
        "fp32",
        64,
        [
            timed("cupy", 3.5, 64),
            timed("cupy (direct)", 84.25, 64, algorithm="conv2d=direct"),
            timed(PEER, 7.0, 64, ratio=1.0),
            timed("torchvision graph", 6.75, 64, best_ratio=1.0),
        ],
    ),
    "resnet18/fp16/all/b1": group(
        "fp16", 1, [timed("cupy", 0.14, 1, ratio=None, best_ratio=None, best_peer="")]
    ),
    "resnet18/fp32/all/b1": group(
        "fp32", 1, [timed("cupy", 0.25, 1, steps=STEPS, error=ERROR, error_ratio=1.5)]
    ),
    "tiny/fp32/none/b1": group("fp32", 1, [timed("cupy", 0.5, 1)], network="tiny", fusion="none"),
}
ON_CPU = {"resnet18/fp32/all/b1": group("fp32", 1, [timed("numpy", 44.0, 1)], kind="cpu")}
CEILINGS: dict[str, Any] = {
    "record": "ceilings",
    "device": "NVIDIA H200 (sm_90)",
    "date": "2026-11-20T10:00:00+00:00",
    "threads": None,
    "rates": {"fp32": {"operations_per_second": 51e12}, "fp16": {"operations_per_second": 752e12}},
    "copy": {"bytes_per_second": 4.27e12},
}


def level(contender: str, cpu_ms: float, cuda_ms: float | None) -> dict[str, Any]:
    """A row of a profile."""
    ratios = {"cpu_ratio": cpu_ms / 2, "cuda_ratio": None if cuda_ms is None else cuda_ms / 4}
    times = {"contender": contender, "cpu_ms": cpu_ms, "cuda_ms": cuda_ms}
    return times | ratios | {"loss": None if cuda_ms is None else 0.125}


def profile(batch: int, *rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "backend": "cupy",
        "precision": "fp16",
        "batch": batch,
        "channels_last": False,
        "date": "2026-11-20T10:00:00+00:00",
        "repeat": 5,
        "weights": {"source": "synthetic:0"},
        "environment": ON_GPU["resnet18/fp32/all/b1"]["environment"],
        "machine": {"processor": "a processor", "cpus": 2},
        "rows": list(rows),
    } | changes


PROFILED: dict[str, Any] = {
    "device": "NVIDIA H200 (sm_90)",
    "groups": {
        "cupy/fp16/b64": profile(64, level(MODEL, 2.0, 4.0), level("all", 0.5, 1.25)),
        "cupy/fp16/b1/channels-last": profile(1, level(MODEL, 2.0, None), channels_last=True),
    },
}


def judged(**changes: Any) -> dict[str, Any]:
    """A kernel's entry in a record of a verification."""
    return {
        "date": "2026-11-20T10:00:00+00:00",
        "verified": True,
        "findings": [],
        "problems": 286,
        "refused": {},
        "error_over_bound": 0.25,
        "error_over_statistical_line": None,
    } | changes


NO_PLACE = ("inf", "nan", 0.0)
"""Errors that have no place on a logarithmic axis, as records store them."""


def step(name: str, ratio: object, **changes: Any) -> dict[str, Any]:
    plain = {"kernel": "k/conv", "problem": "conv2d", "ok": True, "check": "", "message": ""}
    return {"step": name, "ratio": ratio} | plain | changes


VERIFIED: dict[str, Any] = {
    "device": "NVIDIA H200 (sm_90)",
    "kernels": {
        "cupy/add/elementwise/fp32": judged(error_over_bound=0.0),
        "cupy/conv2d/direct/fp16": judged(error_over_bound=0.99997),
        "cupy/conv2d/direct/fp32": judged(error_over_statistical_line=1.5),
        "cupy/gap/tree/fp32": judged(findings=[{"check": "exact"}], verified=False),
        "cupy/linear/warp_dot/fp32": judged(problems=0, refused={"too narrow": 9}, verified=False),
    },
    "networks": {
        "cupy/resnet18/fp32/all": {
            "backend": "cupy",
            "precision": "fp32",
            "steps": [
                step("conv1", 0.5),
                step("fc", "inf", ok=False, check="bound", message="too far"),
            ],
            "checkpoints": [
                {"relative": 1.0, "own_relative": 1.0},
                {"relative": 6e-6, "own_relative": 1.5e-6},
            ],
        }
    },
}


def fate(status: str, **changes: Any) -> dict[str, Any]:
    """A mutant's entry in a record of a mutation run."""
    found = {"check": "bound"} if status == "killed" else None
    plain = {"status": status, "reason": "", "kernels": ["k/conv"], "finding": found}
    where = {"file": "a.py", "line": 7, "scope": "f", "operator": "constant"}
    change = {} if status == "killed" else where | {"before": "i + 1", "after": "i - 1"}
    return plain | change | changes


MUTANTS = {
    "a/conv.py:7:4:arithmetic:0:aaaaaa": fate("killed"),
    "a/conv.py:8:4:arithmetic:0:bbbbbb": fate("killed", finding={"check": "runs"}),
    "a/conv.py:9:4:constant:1:cccccc": fate("killed"),
    "a/conv.py:10:4:axes:0:dddddd": fate("survived", kernels=["k/a", "k/b", "k/c", "k/d"]),
    "b.py:1:0:constant:0:eeeeee": fate("invalid"),
    "b.py:2:0:constant:0:ffffff": fate("equivalent", reason="the same machine code"),
    "b.py:3:0:constant:0:abcdef": fate("survived"),  # and judged by hand since
}
MUTATED: dict[str, Any] = {
    "device": "a CPU",
    "backends": {
        "numba-cpu": {
            "date": "2026-11-21T10:00:00+00:00",
            "profile": "quick",
            "limit": 40,
            "mutants": 8,
            "killed": 3,
            "survived": 1,
            "equivalent": 3,
            "invalid": 1,
            "left": 32,
            "score": 75.0,
            "results": MUTANTS,
            "by_hand": {
                "b.py:3:0:constant:0:abcdef": "A hint.",
                "b.py:4:0:constant:0:abcdef": "A hint.",
            },
        }
    },
}


def sanitized(name: str, **changes: Any) -> dict[str, Any]:
    """A tool's entry in a record of the sanitizer; `changes` are of its last kernel."""
    kernels = {"k/add": {"problems": 40, "errors": 0}, "k/conv": {"problems": 7, "errors": 0}}
    kernels["k/conv"] |= changes
    bad = kernels["k/conv"]["errors"] or "broken" in changes
    return {
        "date": "2026-11-21T10:00:00+00:00",
        "errors": kernels["k/conv"]["errors"] or 0,
        "verdict": "FAIL" if bad else "clean",
        "missing": 0,
        "kernels": kernels,
    }


RACE = {"what": "Race reported between Write access", "function": "tile", "count": 3}
SANITIZED: dict[str, Any] = {
    "device": "NVIDIA H200 (sm_90)",
    "sanitizer": "compute-sanitizer 2025.3",
    "tools": {
        "memcheck": sanitized("memcheck"),
        "racecheck": sanitized("racecheck", errors=3, complaints=[RACE]),
        "initcheck": sanitized("initcheck", errors=None, broken="it crashed"),
        "synccheck": sanitized("synccheck") | {"kernels": {}, "missing": 2},
    },
}


def written(folder: Path, **changes: dict[str, Any] | None) -> Path:
    """Records of all kinds in a folder; a change of None leaves one out."""
    made: dict[str, dict[str, Any] | None] = {
        "bench-nvidia-h200": {"device": "NVIDIA H200 (sm_90)", "groups": ON_GPU},
        "bench-cpu": {"device": "a CPU", "groups": ON_CPU},
        "ceilings-nvidia-h200": CEILINGS,
        "profile-nvidia-h200": PROFILED,
        "verify-nvidia-h200": VERIFIED,
        "mutate-cpu": MUTATED,
        "sanitize-nvidia-h200": SANITIZED,
    }
    made |= {name.replace("_", "-"): data for name, data in changes.items()}
    for name, data in made.items():
        if data is not None:
            head = {"record": name.partition("-")[0], "format": records.FORMAT}
            records.write(folder / f"{name}.json", whole(head | data))
    return folder


ROWS = [
    Row("a.png", 3, OK, (3, 4, 5, 6, 7), (3, 4, 5, 6, 7), 2.5),
    Row("near.png", 8, OK, (9, 8, 5, 6, 7), (8, 9, 5, 6, 7), 0.001),
    Row("wrong.png", 1, OK, (2, 1, 5, 6, 7), (1, 4, 2, 6, 7), 0.75),
    Row("spoiled.png", 1, NOT_FINITE, error="3 of 10 logits of the backend are not finite"),
    Row("damaged.png", None, UNREADABLE, error="no image"),
]
BOUND = 0.002
ABOUT: dict[str, Any] = {
    "identity": {
        "network": "tiny",
        "backend": "cupy",
        "precision": "fp16",
        "against": "torch",
        "against_precision": "fp32",
        "version": "0.1.0",
    },
    "facts": {"bound": BOUND},
}
DIFF = {
    "expected": "dumps/a (numpy)",
    "got": "dumps/b (cupy)",
    "atol": 1e-4,
    "ok": False,
    "first_bad": "layer1",
    "checkpoints": [
        {
            "checkpoint": "stem_pool",
            "shape": [1, 64, 56, 56],
            "max_abs": 2e-5,
            "mean_abs": 1e-6,
            "cosine": 0.999999,
            "worst": [0, 1, 2, 3],
            "tolerance": 1e-4,
            "ok": True,
        },
        {
            "checkpoint": "layer1",
            "shape": [1, 64, 56, 56],
            "max_abs": "inf",
            "mean_abs": "inf",
            "cosine": "nan",
            "worst": [0, 0, 0, 0],
            "tolerance": 1e-4,
            "ok": False,
        },
    ],
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Evidence of all kinds, read from files."""
    folder: Path = tmp_path_factory.mktemp("everything")
    images = photographs(folder / "images", ["a.png", "near.png"])
    path = folder / "evaluation.parquet"
    write_table(path, ROWS, BOUND, ABOUT)
    return gather(written(folder / "records"), path, images, diff=DIFF)


@pytest.fixture(scope="module")
def its_page(everything: Evidence) -> str:
    return page(everything)


@pytest.fixture(scope="module")
def its_pictures(everything: Evidence) -> dict[str, str]:
    return pictures(everything)


def figures(text: str, title: str) -> list[str]:
    """The figures with this heading."""
    found = re.findall(r"<figure class=\"chart\">.*?</figure>", text, re.DOTALL)
    return [one for one in found if f"<h3>{title}" in one]


def lengths(figure: str, column: int) -> list[tuple[str, float, float]]:
    """(name, number, length in hundredths) of each bar in a column of a figure's table."""
    rows = (row for _, table in Reader(figure).tables for row in table if len(row) > column)
    return [
        (row[0].text, float(row[column].value or "nan"), share(row[column], "part"))
        for row in rows
        if "bar" in row[column].kinds and row[column].value is not None
    ]


def share(cell: Cell, name: str) -> float:
    """A length in the style of a bar's cell, in hundredths; NaN where there is none."""
    found = re.search(rf"--{name}:([\d.]+)%", cell.attributes.get("style") or "")
    return float(found[1]) if found else math.nan


def drawn(picture: str) -> list[tuple[str, str, float]]:
    """(name, number as written, width in pixels) of each bar of a picture, panel by panel."""
    root = ElementTree.fromstring(picture)
    found = []
    for panel in root.iter(f"{SVG}g"):
        if not (panel.get("id") or "").startswith("axes_"):
            continue
        texts = [text.text or "" for text in panel.iter(f"{SVG}text")]
        rows = [one for one in panel if (one.get("id") or "").startswith("bar-")]
        for index, bar in enumerate(rows):
            (path,) = bar.iter(f"{SVG}path")
            xs = [float(x) for x in re.findall(r"[ML] ([\d.]+)", path.attrib["d"])]
            name, number = texts[2 * index : 2 * index + 2]
            found.append((name, number, max(xs) - min(xs)))
    return found


def compared(picture: str) -> dict[str, float]:
    """The width of each bar and the place of each dot in a picture of speed and error, by id."""
    found = {}
    for mark in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        name = mark.get("id") or ""
        if name.startswith("speed-"):
            (path,) = mark.iter(f"{SVG}path")
            xs = [float(x) for x in re.findall(r"[ML] ([\d.]+)", path.attrib["d"])]
            found[name] = max(xs) - min(xs)
        elif name.startswith("error-"):
            (dot,) = mark.iter(f"{SVG}use")
            found[name] = float(dot.attrib["x"])
    return found


def same_drawing(one: str, other: str) -> bool:
    """The same texts at the same places, the same bars and dots; the markup may differ, as between
    versions of matplotlib."""

    def seen(text: str) -> list[tuple[str | None, float, float]]:
        texts = ElementTree.fromstring(text).iter(f"{SVG}text")
        return [(t.text, round(float(t.get("x", 0))), round(float(t.get("y", 0)))) for t in texts]

    widths = [[round(width) for _, _, width in drawn(text)] for text in (one, other)]
    marks = [{name: round(x) for name, x in compared(text).items()} for text in (one, other)]
    return seen(one) == seen(other) and widths[0] == widths[1] and marks[0] == marks[1]


# -- the page ----------------------------------------------------------------------------------


def test_a_page_is_well_formed_and_loads_nothing(its_page: str) -> None:
    text = its_page
    reader = Reader(text)
    assert not re.search(r"https?:|@import|url\(|<iframe|<object|<embed", text)
    kinds = [src.partition(",")[0] for src in reader.attribute("src")]
    assert kinds == [*["data:image/svg+xml;base64"] * 3, *["data:image/jpeg;base64"] * 2]
    ids = reader.attribute("id")
    names = [
        "speed",
        "layers",
        "fusion",
        "bounds",
        "mutants",
        "sanitizers",
        "agreement",
        "checkpoints",
    ]
    assert ids == [*names, "missing", "tip"]
    assert [got["href"] for name, got in reader.elements if name == "a"] == [
        f"#{i}" for i in ids[:-1]
    ]
    assert not [name for _, got in reader.elements for name in got if name.startswith("on")]


def test_only_its_own_script_may_run(its_page: str) -> None:
    text = its_page
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policies = [got["content"] for _, got in Reader(text).elements if got.get("http-equiv")]
    assert policies == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    ]


def test_the_same_evidence_gives_the_same_page(everything: Evidence, its_page: str) -> None:
    assert page(everything) == its_page


def test_what_is_hostile_is_shown_as_text(tmp_path: Path) -> None:
    row = timed(HOSTILE, 1.0, 1, steps=[{"step": HOSTILE, "kernel": HOSTILE, "milliseconds": 1.0}])
    groups = {"g": group("fp32", 1, [row]) | {"fusion": HOSTILE}}
    groups["g"]["environment"]["device"]["name"] = HOSTILE
    kernels = {f"{HOSTILE}/{HOSTILE}/{HOSTILE}/{HOSTILE}": judged(refused={HOSTILE: 1})}
    mutant = fate("survived", before=HOSTILE, after=HOSTILE, kernels=[HOSTILE])
    mutated = MUTATED["backends"]["numba-cpu"] | {"results": {HOSTILE: mutant}}
    mutated |= {"by_hand": {HOSTILE + ":": HOSTILE}, "profile": HOSTILE}
    complaint = {"what": HOSTILE, "function": HOSTILE, "count": 2}
    kernel = {"problems": 1, "errors": 2, "complaints": [complaint], "broken": HOSTILE}
    tool = sanitized(HOSTILE) | {"verdict": HOSTILE, "kernels": {HOSTILE: kernel}}
    folder = written(
        tmp_path / "records",
        bench_nvidia_h200={"groups": groups},
        verify_nvidia_h200={"device": HOSTILE, "kernels": kernels, "networks": {}},
        mutate_cpu={"device": HOSTILE, "backends": {HOSTILE: mutated}},
        sanitize_nvidia_h200={"device": HOSTILE, "sanitizer": HOSTILE, "tools": {HOSTILE: tool}},
    )
    path = tmp_path / "evaluation.csv"
    write_table(path, [Row(HOSTILE, 1, OK, (1, 2), (2, 1), 0.5, HOSTILE), ROWS[0]], BOUND, {})
    diff = DIFF | {"expected": HOSTILE, "first_bad": HOSTILE}
    evidence = gather(folder, path, photographs(tmp_path / "i", ["a.png"]), diff=diff)
    text = page(evidence)
    reader = Reader(text)
    assert [name for name, _ in reader.elements].count("script") == 1
    shown = HOSTILE.replace("\x1b", "�")
    assert sum(shown in said for said in reader.texts) >= 20
    odd = next(g for g in evidence.groups if g.data["fusion"] == HOSTILE)
    usual = replace(odd, data={**odd.data, "fusion": "all"})
    for picture in pictures(replace(evidence, groups=(usual,))).values():
        assert shown in "".join(ElementTree.fromstring(picture).itertext())


# -- throughput and latency --------------------------------------------------------------------


def test_every_number_is_the_record_s(its_page: str) -> None:
    text = its_page
    ceilings = ceilings_of(CEILINGS)
    for recorded in ON_GPU.values():
        name, fusion, batch = recorded["network"], recorded["fusion"], recorded["batch"]
        title = f"{recorded['precision']}, batch {batch}"
        title += "" if name == "resnet18" else f", network {name}, fusion {fusion}"
        found = [one for one in figures(text, f"{title}</h3>") if "H200" in one]
        assert len(found) == 1
        rows = sorted(recorded["rows"], key=lambda row: row["median_ms"])
        table = Reader(found[0]).plain("")
        assert [cells[0].text for cells in table] == [row["backend"] for row in rows]
        for cells, row in zip(table, rows, strict=True):
            keys = ("images_per_second", "median_ms", "ms_per_image", "p10_ms", "p90_ms")
            keys += ("ratio", "best_ratio")
            numbers = [None if row[key] is None else repr(row[key]) for key in keys]
            assert [cell.value for cell in cells[1:8]] == numbers
            assert [cell.text for cell in cells[8:10]] == list(error_cells(row))
            if name == "resnet18":
                precision = recorded["precision"]
                floors = limits(resnet18(), precision, "all", batch, ceilings).values()
                floor = sum(one.floor_ms for one in floors)
                assert float(cells[10].value or "nan") == pytest.approx(floor / row["median_ms"])


def test_bars_are_as_long_as_the_numbers_say(its_page: str) -> None:
    found = figures(its_page, "fp32, batch 64</h3>")[0]
    fast, slow = lengths(found, 1), lengths(found, 2)
    rows = sorted(ON_GPU["resnet18/fp32/all/b64"]["rows"], key=lambda row: row["median_ms"])
    assert [(n, x) for n, x, _ in fast] == [(r["backend"], r["images_per_second"]) for r in rows]
    assert [(n, x) for n, x, _ in slow] == [(r["backend"], r["median_ms"]) for r in rows]
    for one in (fast, slow):
        units = [length / number for _, number, length in one]
        assert units == pytest.approx([units[0]] * len(units), rel=0.02)
    assert max(length for _, _, length in slow) == 100


def test_kinds_of_contenders_look_different(its_page: str) -> None:
    found = figures(its_page, "fp32, batch 64</h3>")[0]
    assert re.findall(r'<tr class="(\w+)">', found) == ["ours", "peer", "peer", "one"]


def test_the_roofline_is_the_sum_of_the_floors(everything: Evidence, its_page: str) -> None:
    found = next(g for g in everything.groups if (g.precision, g.batch) == ("fp32", 64))
    floors = limits(
        resnet18(),
        "fp32",
        "all",
        64,
        ceilings_of(CEILINGS),
    )
    assert found.floors == floors
    floor = sum(one.floor_ms for one in floors.values())
    text = figures(its_page, "fp32, batch 64</h3>")[0]
    caption = text.partition("<figcaption>")[2]
    assert re.findall(r'value="([^"]+)"', caption) == [repr(1e3 * 64 / floor), repr(floor)]
    for row in Reader(text).plain(""):
        for cell, line in ((row[1], 1e3 * 64 / floor), (row[2], floor)):
            unit = share(cell, "part") / float(cell.value or "nan")
            assert share(cell, "mark") == pytest.approx(line * unit, rel=0.02)


def test_without_ceilings_there_is_no_roofline_and_the_page_says_so(its_page: str) -> None:
    text = its_page
    headed = figures(text, "fp32, batch 1</h3>")
    (found,) = (one for one in headed if "a processor, 2 threads" in one)
    assert "--mark" not in found
    assert "No roofline: the ceilings of the device were not measured." in found
    assert "a roofline of cpu: " in Reader(text).said("missing")


def test_ceilings_of_other_threads_are_no_roofline(tmp_path: Path) -> None:
    other = CEILINGS | {"device": "a CPU", "threads": 16}
    found = gather(written(tmp_path, ceilings_cpu=other)).groups
    (cpu,) = (one for one in found if one.device == "cpu")
    assert (cpu.floor_ms, cpu.why) == (None, "timed with 2 threads, the ceilings with 16")
    same = gather(written(tmp_path, ceilings_cpu=other | {"threads": 2})).groups
    assert next(one for one in same if one.device == "cpu").floors


def test_a_precision_without_a_rate_has_no_roofline(tmp_path: Path) -> None:
    groups = {"g": group("tf32", 1, [timed("cupy", 1.0, 1)])}
    found = gather(written(tmp_path, bench_nvidia_h200={"groups": groups})).groups
    (one,) = (g for g in found if g.device == "nvidia-h200")
    assert one.why.startswith("no rate of tf32 was measured")


@pytest.mark.parametrize("mark", [20.0, 12.0, 5.0, 31.0])
def test_a_mark_is_to_scale_unless_it_is_far_away(mark: float) -> None:
    found = [re.findall(r"([\d.]+)%", style) for style in bars([10.0, 4.0], [mark, mark])]
    assert float(found[0][0]) / float(found[1][0]) == pytest.approx(2.5, rel=1e-3)
    if mark > FAR * 10:
        assert found == [["100.00"], ["40.00"]]
    else:
        assert float(found[0][1]) == pytest.approx(mark * float(found[0][0]) / 10, rel=1e-2)
        assert max(map(float, found[0])) == 100


def test_bars_of_nothing_have_no_length() -> None:
    assert bars([]) == []
    assert bars([0.0]) == ["--part:0.00%"]


# -- time per layer ----------------------------------------------------------------------------


def test_the_steps_are_the_record_s_with_their_phases_together(its_page: str) -> None:
    (found,) = figures(its_page, "cupy, fp32, batch 1 ")
    times = {"conv1": 0.75, "relayout image@nhwc": 0.125, "fc": 0.0625}
    assert {name: number for name, number, _ in lengths(found, 1)} == times
    assert summed({"steps": STEPS})[0] == ("conv1", "k/conv", 0.75)
    table = Reader(found).plain("step")
    floors = limits(
        resnet18(),
        "fp32",
        "all",
        1,
        ceilings_of(CEILINGS),
    )
    for cells in table[:-1]:
        name = cells[0].text
        assert cells[1].value == repr(times[name])
        assert cells[3].value == (repr(floors[name].floor_ms) if name in floors else None)
        assert cells[5].text == (floors[name].binds if name in floors else "–")
    assert table[-1][1].value == repr(sum(times.values()))
    assert found.count("--mark:") == 2  # no floor is known of a relayout


def test_a_program_that_fuses_the_pooling_is_held_to_the_floor_of_both(tmp_path: Path) -> None:
    """A fused program has its own floors, others have theirs; the roofline is the lower one."""
    fused, *apart = (
        {"step": step, "kernel": f"k/{op}/a/fp32", "milliseconds": 0.5}
        for step, op in (
            ("conv1", "conv2d_maxpool2d"),
            ("conv1", "conv2d"),
            ("maxpool", "maxpool2d"),
        )
    )
    rows = [
        timed("cupy", 1.0, 1, steps=[fused], kernels={fused["kernel"]: 1}),
        timed("torch", 2.0, 1, steps=apart, kernels={one["kernel"]: 1 for one in apart}),
    ]
    groups = {"g": group("fp32", 1, rows)}
    found = gather(written(tmp_path, bench_nvidia_h200={"groups": groups}, bench_cpu=None))
    (only,) = found.groups
    asked = (
        resnet18(),
        "fp32",
        "all",
        1,
        ceilings_of(CEILINGS),
    )
    plain, pooled = limits(*asked), limits(*asked, fused=["conv2d_maxpool2d"])
    assert only.floors_of(rows[0]) == pooled
    assert only.floors_of(rows[1]) == plain
    assert only.floor_ms == sum(one.floor_ms for one in pooled.values())
    assert only.floor_ms < sum(one.floor_ms for one in plain.values())
    ours, theirs = (
        Reader(figures(page(found), f"{name}, fp32, batch 1 ")[0]).plain("step")
        for name in ("cupy", "torch")
    )
    assert ours[0][3].value == repr(pooled["conv1"].floor_ms)
    assert theirs[0][3].value == repr(plain["conv1"].floor_ms)
    assert theirs[1][3].value == repr(plain["maxpool"].floor_ms)


def test_the_roofline_is_that_of_the_algorithm_that_multiplies_least(tmp_path: Path) -> None:
    """Each step has its own kernel's floor, and the caption says where the ceilings come from."""
    direct, winograd = "cupy/conv2d/direct/fp32", "cupy/conv2d/winograd_f4x4/fp32"
    steps = [
        {"step": "layer1.0.conv1", "kernel": winograd, "milliseconds": 0.5},
        {"step": "layer1.0.conv2", "kernel": direct, "milliseconds": 0.5},
    ]
    rows = [
        timed("cupy", 1.0, 1, steps=steps, kernels={winograd: 1, direct: 1}),
        timed("torch", 2.0, 1, kernels={"torch/conv2d/cudnn/fp32": 1}),
    ]
    groups = {"g": group("fp32", 1, rows)}
    evidence = gather(written(tmp_path, bench_nvidia_h200={"groups": groups}, bench_cpu=None))
    (only,) = evidence.groups
    asked = resnet18(), "fp32", "all", 1, ceilings_of(CEILINGS)
    plain, least = limits(*asked), limits(*asked, algorithms=["winograd_f4x4"])
    own = {name: one for name, one in least.items() if name != "layer1.0.conv2"}
    assert only.floors_of(rows[0]) == plain | own
    assert only.floors_of(rows[1]) == only.floors == plain
    floor = sum(one.floor_ms for one in (plain | own).values())
    assert only.floor_ms == pytest.approx(floor)
    assert floor < sum(one.floor_ms for one in plain.values())
    text = figures(page(evidence), "fp32, batch 1</h3>")[0]
    caption = text.partition("<figcaption>")[2]
    assert re.search(r"ms, with fp32 [\d.]+ TFLOP/s by a library, copy [\d.]+ TB/s by a", caption)
    shown = Reader(figures(page(evidence), "cupy, fp32, batch 1 ")[0]).plain("step")
    floors = [row[3].value for row in shown[:2]]
    assert floors == [
        repr((plain | own)[f"layer1.0.{name}"].floor_ms) for name in ("conv1", "conv2")
    ]


def test_a_library_s_rate_of_int8_is_no_roofline() -> None:
    rates = CEILINGS["rates"] | {"int8": {"operations_per_second": 9e14}}
    record = CEILINGS | {"rates": rates}
    data = group("int8", 1, [timed("cupy", 1.0, 1)])
    library = grouped("nvidia-h200", data, ceilings_of(record))
    assert (library.floor_ms, library.floors) == (None, {})
    assert library.why == "only a library's rate of int8 was measured: no bound"
    burst, sustained = ({"per_second": rate, "best": 2e15, "runs": 9} for rate in (2e15, 1e15))
    found = {"wgmma": {"burst": burst, "sustained": sustained, "how": "wgmma"}}
    both = grouped("nvidia-h200", data, ceilings_of(record | {"instructions": {"int8": found}}))
    assert both.floor_ms is not None
    assert both.ceiling.startswith("int8 2,000 TFLOP/s by wgmma in bursts, copy ")


def test_without_times_of_steps_the_page_says_which_command_makes_them(tmp_path: Path) -> None:
    groups = {"g": group("fp32", 1, [timed("cupy", 1.0, 1)])}
    text = page(gather(written(tmp_path, bench_nvidia_h200={"groups": groups})))
    reader = Reader(text)
    assert "layers" not in reader.attribute("id")
    assert "time per layer: r18 bench --per-step --record" in reader.said("missing")


# -- fusion levels -----------------------------------------------------------------------------


def test_the_levels_are_the_profile_s(its_page: str) -> None:
    text = its_page
    (found,) = figures(text, "cupy, fp16, batch 64</h3>")
    cpu, cuda = lengths(found, 1), lengths(found, 3)
    assert [(name, number) for name, number, _ in cuda] == [(MODEL, 4.0), ("all", 1.25)]
    assert [(name, number) for name, number, _ in cpu] == [(MODEL, 2.0), ("all", 0.5)]
    assert re.findall(r'<tr class="(\w+)">', found) == ["peer", "ours"]
    rows = [[cell.value for cell in cells[1:]] for cells in Reader(found).plain("")]
    assert rows == [
        ["2.0", "1.0", "4.0", "1.0", "0.125"],
        ["0.5", "0.25", "1.25", "0.3125", "0.125"],
    ]
    assert "the best of 5 profiled runs, weights synthetic:0." in found
    (other,) = figures(text, "cupy, fp16, batch 1, channels-last</h3>")
    assert lengths(other, 3) == []  # a CPU has no CUDA time


# -- error over bound --------------------------------------------------------------------------


def test_every_kernel_is_in_the_heat_map_with_its_number(its_page: str) -> None:
    cells = Reader(its_page).heat("Kernel")
    assert {key: cell.value for key, cell in cells.items() if cell.value is not None} == {
        ("add/elementwise", "cupy", "fp32"): "0.0",
        ("conv2d/direct", "cupy", "fp16"): "0.99997",
        ("conv2d/direct", "cupy", "fp32"): "0.25",
        ("gap/tree", "cupy", "fp32"): "inf",
    }
    assert cells["gap/tree", "cupy", "fp32"].text == "✕ exact"
    assert "warn" in cells["conv2d/direct", "cupy", "fp32"].kinds
    refused = cells["linear/warp_dot", "cupy", "fp32"]
    assert (refused.text, refused.kinds) == ("refused", {"hatch"})
    assert "refused 9: too narrow" in (refused.attributes["title"] or "")


def test_every_step_is_in_the_heat_map_with_its_number(its_page: str) -> None:
    cells = Reader(its_page).heat("Step")
    assert {key: cell.value for key, cell in cells.items()} == {
        ("conv1", "cupy", "fp32"): "0.5",
        ("fc", "cupy", "fp32"): "inf",
    }
    assert "bound: too far" in (cells["fc", "cupy", "fp32"].attributes["title"] or "")


# -- mutants -----------------------------------------------------------------------------------


def test_the_mutants_are_the_record_s(its_page: str) -> None:
    reader = Reader(its_page)
    rows = {cells[0].text: [cell.text for cell in cells[1:]] for cells in reader.plain("file")}
    assert rows == {
        "a/conv.py": ["4", "3", "1", "0", "0", "75.0 %"],
        "b.py": ["4", "0", "0", "3", "1", "–"],
        "all": ["8", "3", "1", "3", "1", "75.0 %"],
    }
    said = reader.said("mutants")
    for words in (
        *("75.00 %caught: 3 of 4", "1survived", "3equivalent", "1do not compile"),
        *("32not judged yet", "A fair sample of 40, profile quick, 2026-11-21."),
        "Stopped early: the score covers the first 8 of the sample.",
    ):
        assert words in said, said
    assert "that are recorded" not in said  # as many as the score is of
    assert "3of 4 mutants caught" in "".join(reader.texts)


def test_a_score_of_other_files_is_shown_next_to_the_first(everything: Evidence) -> None:
    run = everything.mutated["cpu"]["backends"]["numba-cpu"]
    keys = ("kernels", "files", "mutants", "killed", "survived", "equivalent", "invalid")
    sample = {key: run[key] for key in keys if key in run}
    sample |= {"killed": 9, "survived": 1, "score": 90.0, "limit": 12, "left": 2}
    run = run | {"samples": {"integers/*": sample | {"date": "2026-11-24T00:00:00+00:00"}}}
    changed = {"cpu": dict(everything.mutated["cpu"]) | {"backends": {"numba-cpu": run}}}
    said = Reader(page(replace(everything, mutated=changed))).said("mutants")
    words = (
        "integers/*: 9 of 10 caught, 90.00 %, in a fair sample of 12; 2 not judged yet, 2026-11-24."
    )
    assert words in said, said


def test_survivors_are_shown_with_their_change(its_page: str) -> None:
    reader = Reader(its_page)
    (row,) = reader.plain("where")
    assert [cell.text for cell in row] == [
        *("a/conv.py:10", "i + 1", "i - 1"),
        "k/a, k/b, and 2 more",
    ]
    assert {row[0].text: row[1].text for row in reader.plain("check")} == {
        "bound": "2",
        "runs": "1",
    }
    reasons = [rows for _, rows in reader.tables if rows[0][-1].text == "A hint."]
    assert [[cell.text for cell in row] for rows in reasons for row in rows] == [
        ["b.py:3, b.py:4", "A hint."]
    ]


def test_what_was_judged_beyond_the_sample_is_said(tmp_path: Path) -> None:
    run = MUTATED["backends"]["numba-cpu"]
    changed = {"backends": {"numba-cpu": run | {"mutants": 5, "left": 0, "limit": None}}}
    said = Reader(page(gather(written(tmp_path, mutate_cpu=MUTATED | changed)))).said("mutants")
    assert "All mutants, profile quick, 2026-11-21. The table has all 8 that are recorded." in said
    assert "not judged yet" not in said


# -- sanitizers --------------------------------------------------------------------------------


def test_the_sanitizers_are_the_record_s(its_page: str) -> None:
    reader = Reader(its_page)
    rows = [[cell.text for cell in cells] for cells in reader.plain("tool")]
    assert rows == [
        ["memcheck", "clean", "2", "47", "0", "0"],
        ["racecheck", "✕ FAIL", "2", "47", "3", "0"],
        ["initcheck", "✕ FAIL", "2", "47", "0", "0"],
        ["synccheck", "clean", "0", "0", "0", "2"],
    ]
    kernels = next(rows for _, rows in reader.tables if rows[0][1].text == "memcheck")
    assert [[cell.text for cell in cells] for cells in kernels[1:]] == [
        ["k/add", "0", "0", "0", "not run"],
        ["k/conv", "0", "✕ 3", "✕ did not finish", "not run"],
    ]
    said = reader.said("sanitizers")
    assert "✕ racecheck k/convRace reported between Write access in tile (3 times)" in said
    assert "✕ initcheck k/convdid not finish: it crashed" in said
    assert "3errors in 6 runs under a sanitizer" in "".join(reader.texts)


# -- agreement ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_an_evaluation_is_read_as_it_was_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"evaluation{suffix}"
    write_table(path, ROWS, BOUND, ABOUT)
    rows, about = read_table(path)
    assert [row for row, _ in rows] == ROWS
    assert [tie for _, tie in rows] == [False, True, False, None, None]
    assert about == (ABOUT if suffix == ".parquet" else {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("file,status", "status,file"), "heading is not that of an evaluation"),
        (("a.png,ok", "a.png,good"), "'good' is no status"),
        (("0.001", "nan"), "'nan' is no finite number"),
        (("a.png,ok,3,", "a.png,ok,three,"), "'three' is no class"),
        (("2.5,true", "2.5"), "line 2 has not 18 columns"),
    ],
)
def test_a_damaged_evaluation_is_refused(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    path = tmp_path / "evaluation.csv"
    write_table(path, ROWS, BOUND, {})
    text = path.read_text("utf-8")
    assert change[0] in text
    path.write_text(text.replace(*change, 1), "utf-8")
    with pytest.raises(UsageError, match=words):
        read_table(path)


def test_an_evaluation_of_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing is known about '.json'; known are .csv and"):
        read_table(tmp_path / "evaluation.json")
    with pytest.raises(UsageError, match=r"cannot be read: .*No such file"):
        read_table(tmp_path / "evaluation.csv")
    (tmp_path / "evaluation.parquet").write_text("no table")
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "evaluation.parquet")


def test_the_agreement_is_the_evaluation_s(everything: Evidence, its_page: str) -> None:
    assert everything.evaluation is not None
    found = summary(everything.evaluation)
    assert (found.images, found.unreadable, found.compared) == (5, 1, 4)
    assert (found.agree_top1, found.agree_top5, found.near_ties) == (1, 2, 1)
    assert [row.file for row in found.changed] == ["wrong.png", "spoiled.png"]
    reader = Reader(its_page)
    said = reader.said("agreement")
    assert "cupy in fp16 compared with torch in fp32 on 5 images (evaluation.parquet)." in said
    for words in ("25.00 %the same class first: 1 images", "1near ties", "2changed class"):
        assert words in said, said
    accuracy = "25.00 %top-1 of the backend, 4 labelled; top-5 75.00 %"
    assert accuracy in said


def test_the_hardest_come_first_with_their_candidates(its_page: str) -> None:
    text = its_page
    cards = re.findall(r'<article class="photo">(.*?)</article>', text, re.DOTALL)
    files = [re.findall(r"<h3>(.*?)</h3>", card)[0] for card in cards]
    assert files == ["wrong.png", "near.png", "wrong.png", "a.png"]
    near = cards[1]
    listed = re.findall(r"<li><b>(.*?)</b><small>(.*?)</small></li>", near)
    assert listed == [
        ("class 8", "class 8: torch, its label"),
        ("class 9", "class 9: the backend"),
    ]
    assert "near tie" in near
    assert 'value="0.001"' in near
    wrong = re.findall(r"<li><b>(.*?)</b>", cards[0])
    assert wrong == ["class 1", "class 4", "class 2"]  # the backend chose a third one
    assert "different class" in cards[0]
    assert "cannot be read" in cards[0]  # there is no such file
    assert "same class" in cards[3]


def test_imagenet_s_classes_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.csv"
    write_table(path, ROWS, BOUND, {})
    folder = written(tmp_path / "records")
    named = page(gather(folder, path, network="resnet18"))
    assert "<b>great white shark</b><small>class 2: the backend</small>" in named
    for network in ("tiny", None):
        assert "<b>class 2</b>" in page(gather(folder, path, network=network))
    assert "A backend compared with the reference on 5 images" in named
    assert "the photographs themselves: r18 report --images DIR" in Reader(named).said("missing")


@pytest.mark.parametrize("asked", [None, "resnet18", "tiny"])
def test_a_csv_does_not_say_its_network(tmp_path: Path, asked: str | None) -> None:
    path, target = tmp_path / "evaluation.csv", tmp_path / "report.html"
    write_table(path, ROWS, BOUND, ABOUT)
    network = () if asked is None else ("--network", asked)
    given = ("--records", written(tmp_path / "records"), "--evaluation", path, *network)
    done = r18("report", *given, "--out", target)
    assert done.code == 0, done.err
    text = target.read_text("utf-8")
    assert ("great white shark" in text) is (asked == "resnet18")
    assert ("<b>class 2</b>" in text) is (asked != "resnet18")
    said = Reader(text).said("missing")
    hint = "the names of classes: r18 report --network NAME"
    assert (hint in said) is (asked is None), said


def test_the_network_of_an_evaluation_is_known_and_its_own(tmp_path: Path) -> None:
    plain, telling = tmp_path / "evaluation.csv", tmp_path / "evaluation.parquet"
    write_table(plain, ROWS, BOUND, ABOUT)
    write_table(telling, ROWS, BOUND, ABOUT)
    folder = written(tmp_path / "records")
    with pytest.raises(UnknownName, match="unknown network 'resnet19', did you mean 'resnet18'"):
        gather(folder, plain, network="resnet19")
    with pytest.raises(UsageError) as refused:
        gather(folder, telling, network="resnet50")
    assert str(refused.value) == (
        f"--network resnet50: '{telling}' says that 'tiny' was evaluated\n"
        "  leave out --network, or name another evaluation"
    )
    for same in ("tiny", "tiny:classes=10"):
        assert gather(folder, telling, network=same).evaluation is not None
    given = ("--records", folder, "--evaluation", plain, "--network", "resnet19")
    done = r18("report", *given, "--out", tmp_path / "r.html")
    assert (done.code, done.out) == (2, "")
    assert "unknown network 'resnet19', did you mean 'resnet18'?" in done.err
    assert not (tmp_path / "r.html").exists()


def test_no_more_than_some_photographs_are_shown() -> None:
    many = [
        (replace(ROWS[0], file=name, margin=1.0 / (i + 1)), False)
        for i, name in enumerate(numbered(3 * SHOWN))
    ]
    margins = sorted(1.0 / (i + 1) for i in range(3 * SHOWN))
    assert [row.margin for row, _ in hardest(many)] == margins[:SHOWN]


def test_without_a_reference_there_is_nothing_to_agree_with(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.csv"
    write_table(path, [Row("a.png", 3, OK, (3, 4, 5, 6, 7))], None, {})
    said = Reader(page(gather(written(tmp_path / "records"), path))).said("agreement")
    assert "without a reference" in said
    assert "same class first" not in said
    assert "top-1 of the backend, 1 labelled" in said


def test_a_thumbnail_is_what_the_network_sees(tmp_path: Path) -> None:
    left = np.zeros((60, 90, 3), np.uint8)
    left[:, 45:] = (250, 120, 10)
    Image.fromarray(left).save(tmp_path / "half.png")
    data, why = thumbnail(tmp_path, "half.png")
    assert data is not None
    assert why == ""
    seen = Image.open(BytesIO(base64.b64decode(data.partition(",")[2])))
    assert (seen.size, seen.format, seen.mode) == ((144, 144), "JPEG", "RGB")
    pixels = np.asarray(seen).astype(int)
    assert np.abs(pixels[:, :60]).max() < 12
    assert np.abs(pixels[:, 84:] - [250, 120, 10]).max() < 12
    assert len(data) < 20_000


@pytest.mark.parametrize("file", ["../half.png", "/etc/half.png", "a/../../half.png"])
def test_a_file_outside_of_the_folder_is_not_read(tmp_path: Path, file: str) -> None:
    photographs(tmp_path, ["half.png"])
    inside = tmp_path / "images"
    inside.mkdir()
    assert thumbnail(inside, file) == (None, "not read")


# -- checkpoints -------------------------------------------------------------------------------


def test_the_checkpoints_are_those_of_the_diff(its_page: str) -> None:
    reader = Reader(its_page)
    rows = reader.plain("checkpoint")
    assert [cells[0].text for cells in rows] == ["stem_pool", "layer1"]
    assert [cells[2].value for cells in rows] == ["2e-05", "inf"]
    assert [cells[3].value for cells in rows] == [repr(2e-5 / 1e-4), "inf"]
    assert [cells[5].value for cells in rows] == ["0.999999", "nan"]
    assert rows[1][2].text == "✕ ∞"
    assert "The first bad checkpoint is layer1, within 0.0001." in reader.said("checkpoints")


# -- what is missing ---------------------------------------------------------------------------


def test_all_that_is_there_leaves_nothing_out(everything: Evidence) -> None:
    left = [g for g in everything.groups if g.device != "cpu"]
    run = MUTATED["backends"]["numba-cpu"] | {"left": 0}
    mutated = {"cpu": MUTATED | {"backends": {"numba-cpu": run}}}
    reader = Reader(page(replace(everything, groups=tuple(left), mutated=mutated)))
    assert "missing" not in reader.attribute("id")


def test_what_is_missing_is_named_with_its_command(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.csv"
    write_table(path, ROWS, BOUND, {})
    reader = Reader(page(gather(tmp_path / "nowhere", path)))
    assert reader.attribute("id") == ["agreement", "missing", "tip"]
    said = reader.said("missing")
    for words in (
        "throughput and latency: r18 bench --peers all --record",
        "fusion levels: r18 profile --backend NAME --check --record on the device",
        "error over bound: r18 verify --record",
        "mutants: r18 mutate --backend NAME --record",
        "errors of memory: r18 sanitize --backend NAME --record on a GPU",
        "the photographs themselves: r18 report --images DIR",
        "checkpoints of two dumps: r18 dump; r18 report --dumps EXPECTED GOT",
    ):
        assert words in said
    only = {"bench_nvidia_h200": None, "bench_cpu": None}
    folder = written(tmp_path / "records", **only)
    said = Reader(page(gather(folder))).said("missing")
    assert "agreement on photographs: r18 evaluate --images DIR --out FILE;" in said
    more = "32 more mutants of numba-cpu: r18 mutate --backend numba-cpu --limit 40 --record"
    assert more in said
    networks: dict[str, Any] = {"networks": {}}
    folder = written(tmp_path / "records", verify_nvidia_h200=VERIFIED | networks, **only)
    said = Reader(page(gather(folder))).said("missing")
    assert "error over bound of each step: r18 verify --record" in said


def test_what_is_missing_can_be_asked_for_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.csv"
    write_table(path, ROWS, BOUND, {})
    absent = {what: command for what, command, _ in missing(gather(tmp_path / "nowhere", path))}
    assert absent["time per layer"] == "r18 bench --per-step --record"
    photographs = "r18 report --images DIR --evaluation FILE"
    assert absent["the photographs themselves"] == photographs
    assert absent["the names of classes"] == "r18 report --network NAME --evaluation FILE"


def test_the_footer_says_what_was_read(tmp_path: Path, everything: Evidence) -> None:
    path = tmp_path / "evaluation.csv"
    write_table(path, ROWS, BOUND, {})

    def footer(evidence: Evidence) -> str:
        (said,) = re.findall(r"<footer>(.*?)</footer>", page(evidence))
        return str(said)

    begin, end = "Made by r18 report from ", "; every number comes from there."
    alone = gather(tmp_path / "nowhere", path)
    assert footer(alone) == f"{begin}the evaluation evaluation.csv{end}"
    folder = written(tmp_path / "records")
    assert footer(gather(folder)) == f"{begin}the records in {folder.as_posix()}{end}"
    both = f"the records in {folder.as_posix()} and the evaluation evaluation.csv"
    assert footer(gather(folder, path)) == f"{begin}{both}{end}"
    compared = replace(alone, diff=everything.diff)
    assert footer(compared) == f"{begin}the evaluation evaluation.csv and two dumps{end}"


def test_a_named_folder_of_records_that_is_missing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "evaluation.csv", ROWS, BOUND, {})
    given = ("--evaluation", "evaluation.csv", "--out", "r.html")
    done = r18("report", "--records", "nope", *given)
    assert done.code == 0, done.err
    assert done.err == (
        "warning: --records 'nope': no such folder, so the page has no records\n"
        "  name the folder that --record wrote to, or leave out --records: the default is "
        f"'{records.FOLDER}'\nwrote r.html\n"
    )
    assert r18("report", *given).err == "wrote r.html\n"  # the default folder may be missing


def test_nothing_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to report: .* holds no record of bench"):
        gather(tmp_path)
    with pytest.raises(UsageError, match=r"nothing to report: there is no folder of records"):
        gather(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no such folder; name the one that was evaluated"):
        gather(written(tmp_path), images=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="give --evaluation, too"):
        gather(written(tmp_path), images=tmp_path)
    path = tmp_path / "evaluation.csv"
    write_table(path, ROWS, BOUND, {})
    with pytest.raises(UsageError, match=r"none of the 5 images of .* is in it, such as 'a.png'"):
        gather(written(tmp_path), path, tmp_path)


RECORDS = [
    *("bench-nvidia-h200", "profile-nvidia-h200", "verify-nvidia-h200"),
    *("mutate-cpu", "sanitize-nvidia-h200"),
]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_lacks_something_is_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path) / f"{name}.json"
    whole = json.loads(path.read_text("utf-8"))

    def places(data: Any) -> Any:
        """Every object in the record whose keys a page may read."""
        yield data
        for key in ("groups", "kernels", "networks", "backends", "results", "tools"):
            entries = data.get(key, {})
            for entry in entries.values() if isinstance(entries, dict) else ():
                yield from places(entry)
        for rows in ("rows", "steps", "complaints"):
            for row in data.get(rows, ()):
                yield from places(row)

    refused = set()
    for index, found in enumerate(places(whole)):
        for key in set(found) - {"record", "format"}:
            changed = json.loads(json.dumps(whole))
            del list(places(changed))[index][key]
            path.write_text(json.dumps(changed), "utf-8")
            said = refusal(tmp_path)
            assert said is None or (f"`{key}`" in said and f"{name}.json" in said)
            refused |= {key} if said else set()
    least = (
        {"rows", "median_ms"},
        {"rows", "loss"},
        {"problems", "ratio"},
        {"score", "status"},
        {"errors", "what"},
    )
    assert any(refused >= keys for keys in least)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_another_form_is_refused(tmp_path: Path, name: str) -> None:
    """A record of another form is refused with a message, wherever it differs."""
    path = written(tmp_path) / f"{name}.json"
    whole = json.loads(path.read_text("utf-8"))

    def spoiled(data: Any, *, inside: bool = False) -> Any:
        """Replace one part of the record at a time; yields the key of that part."""
        for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
            if isinstance(value, str) or (key not in PARTS and not inside):
                continue
            for other in (3, None, "words", True):
                data[key] = other
                yield key
            data[key] = value
            entries = key in PARTS and key not in FACTS and not names(value)
            yield from spoiled(value, inside=entries)

    def names(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)

    for _ in spoiled(whole):
        path.write_text(json.dumps(whole), "utf-8")
        said = refusal(tmp_path)
        assert said is not None
        assert f"{name}.json' is damaged or of an older r18: " in said


FACTS = {"environment", "machine", "device"}
"""Tables whose entries are plain values."""
PARTS = FACTS - {"device"} | {
    *("groups", "rows", "steps", "kernels", "networks", "backends", "results", "tools"),
    "complaints",
}


def refusal(folder: Path) -> str | None:
    """The message if a folder is refused; None if its page is made."""
    try:
        page(gather(folder))
    except UsageError as error:
        return str(error)
    return None


# -- pictures ----------------------------------------------------------------------------------


def test_pictures_have_the_largest_batch_for_throughput_and_the_smallest_for_latency(
    everything: Evidence,
    its_pictures: dict[str, str],
) -> None:
    made = its_pictures
    assert list(made) == ["speed-and-error.svg", "throughput.svg", "latency.svg"]
    fast, slow = (drawn(made[name]) for name in ("throughput.svg", "latency.svg"))
    # fp32 at batch 64 without its single algorithm, fp16 at its only batch; and the GPU first.
    floors = {(g.device, g.precision, g.batch): g.floor_ms for g in everything.groups}
    floor = floors["nvidia-h200", "fp32", 64]
    assert floor is not None
    assert [name for name, _, _ in fast] == ["cupy", "torchvision graph", PEER, "cupy", "numpy"]
    assert fast[0][1] == f"{1e3 * 64 / 3.5:,.0f}  {floor / 3.5:.0%}"
    assert fast[2][1] == f"{1e3 * 64 / 7.0:,.0f}  {floor / 7.0:.0%}"
    assert [width / fast[0][2] for _, _, width in fast[1:3]] == pytest.approx([3.5 / 6.75, 0.5])
    assert [(name, said) for name, said, _ in slow] == [
        ("cupy", "0.2500"),
        ("cupy", "0.1400"),
        ("numpy", "44.00"),
    ]
    for text in made.values():
        root = ElementTree.fromstring(text)
        width, tall = (float(root.attrib[key]) for key in ("width", "height"))
        assert root.attrib["viewBox"] == f"0 0 {width:g} {tall:g}"
        assert_figure_is_safe(root)
        for one in root.iter(f"{SVG}text"):
            assert 0 <= float(one.get("x", 0)) <= width
            assert 0 <= float(one.get("y", 0)) <= tall


def test_a_picture_has_speed_and_error_next_to_pytorch(its_pictures: dict[str, str]) -> None:
    """A picture shows speed as bars, error as dots on a logarithmic axis, the speedup in words."""
    picture = its_pictures["speed-and-error.svg"]
    marks = compared(picture)
    assert list(marks) == [
        f"{what}-fp32-{whose}"
        for what, order in (("speed", ("r18", "torch")), ("error", ("torch", "r18")))
        for whose in order
    ]
    assert marks["speed-fp32-r18"] / marks["speed-fp32-torch"] == pytest.approx(6.75 / 3.5, 1e-3)
    texts = [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    rates = [f"{1e3 * 64 / ms:,.0f}" for ms in (3.5, 6.75)]
    assert {*rates, "fp32", f"{6.75 / 3.5:.2f}×", "r18", "PyTorch"} <= set(texts)
    assert "ResNet-18, batch 64, NVIDIA H200 (sm_90)" in texts
    # With the ends of the axis 0.3 decades outside, four times the error is 0.6 decades of 1.2.
    assert marks["error-fp32-r18"] - marks["error-fp32-torch"] == pytest.approx(296 / 2, abs=0.5)


def test_without_both_errors_there_is_no_picture_of_them(everything: Evidence) -> None:
    ends = [{"relative": 1e-6, "own_relative": error} for error in NO_PLACE]
    for networks in ({}, *({"cupy/resnet18/fp32/all": {"checkpoints": [end]}} for end in ends)):
        verified = {"nvidia-h200": VERIFIED | {"networks": networks}}
        made = pictures(replace(everything, verified=verified))
        assert list(made) == ["throughput.svg", "latency.svg"]
    assert "speed-and-error.svg" not in pictures(replace(everything, verified={}))


def test_without_usual_times_there_are_no_pictures(everything: Evidence) -> None:
    odd = tuple(g for g in everything.groups if g.data["network"] == "tiny")
    assert pictures(replace(everything, groups=odd)) == {}
    assert pictures(replace(everything, groups=())) == {}


def test_the_pictures_in_the_documents_are_those_of_the_records() -> None:
    """The documents' pictures match the records; `r18 report --svg docs/pictures` remakes them."""
    made = pictures(gather(ROOT / records.FOLDER))
    folder = ROOT / "docs" / "pictures"
    assert {path.name for path in folder.glob("*.svg")} == set(made)
    for name, text in made.items():
        assert same_drawing((folder / name).read_text("utf-8"), text), name


# -- the command -------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_the_pictures(tmp_path: Path) -> None:
    folder = written(tmp_path / "records")
    target, svg = tmp_path / "pages" / "report.html", tmp_path / "pictures"
    done = r18("report", "--records", folder, "--out", target, "--svg", svg)
    assert done.code == 0, done.err
    assert target.read_text("utf-8") == page(gather(folder))
    made = pictures(gather(folder))
    assert {path.name: path.read_text("utf-8") for path in svg.iterdir()} == made
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_the_command_compares_dumps(tmp_path: Path) -> None:
    for name, precision in (("a", "fp32"), ("b", "fp64")):
        asked = ("--network", "tiny", "--backend", "numpy", "--precision", precision)
        done = r18("dump", "--out", tmp_path / name, *asked)
        assert done.code == 0, done.err
    target = tmp_path / "report.html"
    dumps = ("--dumps", tmp_path / "a", tmp_path / "b")
    done = r18("report", "--records", tmp_path / "none", *dumps, "--out", target)
    assert done.code == 0, done.err
    compared = json.loads(r18("diff", tmp_path / "a", tmp_path / "b", "--json").out)
    rows = Reader(target.read_text("utf-8")).plain("checkpoint")
    assert [(cells[0].text, float(cells[2].value or "nan")) for cells in rows] == [
        (found["checkpoint"], found["max_abs"]) for found in compared["checkpoints"]
    ]


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
@pytest.mark.parametrize("command", ["report --out", "verify --backend numpy --html"])
def test_without_its_libraries_a_page_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, command: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    done = r18(*command.split(), tmp_path / "page.html", "--records", written(tmp_path / "records"))
    assert (done.code, done.out) == (2, "")
    assert f"need {library}, which is not installed\n  pip install 'r18[report]'" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["records"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is nothing to report"),
        (("--evaluation", "none.csv"), "the evaluation 'none.csv' cannot be read"),
        (("--dumps", "no", "where"), "'no' does not exist"),
    ],
)
def test_a_wrong_request_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    target = tmp_path / "report.html"
    done = r18("report", "--records", tmp_path / "none", *arguments, "--out", target)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_no_times_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "records", bench_nvidia_h200=None, bench_cpu=None)
    done = r18("report", "--records", folder, "--out", tmp_path / "r.html", "--svg", tmp_path / "s")
    assert done.code == 2
    assert "holds no times of resnet18, fusion all" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["records"]


def test_a_target_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    done = r18("report", "--records", written(tmp_path / "records"), "--out", tmp_path)
    assert done.code == 2
    assert "is a folder; name a file in it" in done.err
    (tmp_path / "file").write_text("")
    done = r18(
        "report", "--records", tmp_path / "records", "--out", tmp_path / "file" / "page.html"
    )
    assert done.code == 2
    assert re.search("cannot write '.*/file/page.html': .*; choose another place", done.err)


def test_a_file_that_is_no_page_is_not_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("keep")
    asked = ("report", "--records", written(tmp_path / "records"), "--out", notes)
    done = r18(*asked)
    assert done.code == 2
    assert f"--out '{notes}' is no page; name another file, or delete it" in done.err
    assert notes.read_text() == "keep"
    notes.write_text("")
    assert r18(*asked).code == 0
    assert r18(*asked).code == 0, "its own page may be replaced"


# -- what pages are made of --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "kind"),
    [
        (0.0, "q0"),
        (1e-9, "q1"),
        (0.05, "q4"),
        (1.0, "q6"),
        (np.nextafter(1.0, 2), "f1"),
        (1e9, "f3"),
        (math.inf, "f3"),
        (math.nan, "f3"),
    ],
)
def test_a_shade_tells_a_fault_from_what_is_within_the_bound(ratio: float, kind: str) -> None:
    assert shade(ratio) == kind
    assert fault(ratio) == kind.startswith("f")


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.99997, "0.99997"),
        (1.0000001, "1.0000001"),
        (0.0234567, "0.023"),
        (1.2e-5, "1.2e−5"),
        (455.7, "456"),
        (3.2e7, "3.2e7"),
        (math.inf, "∞"),
        (math.nan, "NaN"),
    ],
)
def test_a_ratio_says_on_which_side_of_one_it_is(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


def test_values_are_escaped_and_cleaned() -> None:
    template = environment().from_string('<b title="{{ value }}">{{ value }}</b>')
    said = clean(template.render(value=f"{HOSTILE}\ud800"))
    assert said.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&#34;&#39;�[31m?") == 2
    with pytest.raises(UndefinedError):
        environment().from_string("{{ value }}").render()


# -- in a browser ------------------------------------------------------------------------------

PROBE = """
const cells = [...document.querySelectorAll("td.bar data")].map((one) => one.parentNode);
const shades = [...document.querySelectorAll(".legend .swatch, .heat td")]
  .filter((element) => /\\b[qf]\\d/.test(element.className));
const cell = document.querySelector(".heat td[title]");
cell.click();
const card = getComputedStyle(document.querySelector(".chart")).backgroundColor;
const seen = {
  width: innerWidth,
  scroll: document.documentElement.scrollWidth,
  tip: document.getElementById("tip").textContent === cell.title,
  contrast: Math.min(
    ...shades.map(contrast),
    ...cells.map((one) => between(getComputedStyle(one).color, card)),
  ),
  smallest: Math.min(...cells.map((one) => parseFloat(getComputedStyle(one).fontSize))),
  sizes: cells.map((one) => getComputedStyle(one).backgroundSize.split(", ")[1].split(" ")[0]),
  images: [...document.images].map((image) => image.naturalWidth),
  numbers: [...document.querySelectorAll("table data")].map((one) => Number(one.value)),
  ground: light(getComputedStyle(document.body).backgroundColor),
};
"""


@needs_chromium
@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_in_a_browser(its_page: str, scheme: str, dark: bool, tmp_path: Path) -> None:
    """In a browser the console is silent; on a phone the page fits; bars are to scale."""
    text = its_page
    seen, console = on_a_phone(text, PROBE, tmp_path, dark=dark)
    assert console == []
    assert seen["scroll"] <= seen["width"] == PHONE
    assert seen["tip"] is True
    assert seen["contrast"] >= 4.5
    assert seen["smallest"] >= 12
    assert seen["images"] == [880, 880, 880, 144, 144]
    assert (seen["ground"] < 0.1) == dark
    parts = re.findall(r'class="bar" style="--part:([\d.]+)%', text)
    assert [float(size.removesuffix("%")) for size in seen["sizes"]] == [float(p) for p in parts]
    recorded = [row for group in (*ON_GPU.values(), *ON_CPU.values()) for row in group["rows"]]
    for row in recorded:
        assert row["ms_per_image"] in seen["numbers"]
        assert row["images_per_second"] in seen["numbers"]


@needs_chromium
def test_a_picture_in_a_browser(its_pictures: dict[str, str], tmp_path: Path) -> None:
    for name, text in its_pictures.items():
        (tmp_path / name).write_text(text, "utf-8")
        title, console = browse(tmp_path / name, tmp_path)
        assert title.endswith(" of ResNet-18")
        assert console == []
