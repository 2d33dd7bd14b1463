"""`r18 demo`: its parts on a small network, what it leaves out, and its picture."""

from __future__ import annotations

import io
import json
import runpy
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import commands
from r18.demo import parts, planted
from r18.demo.parts import PICTURE, Part, Request, demo
from r18.errors import UsageError, WeightsError
from r18.graph.resnet import resnet18
from r18.weights import sources
from support import ROOT

TOOL = ROOT / "tools" / "draw_demo_picture.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Part]:
    """The parts on `tiny` and numpy, by their first words."""
    return {part.title.split(",")[0]: part for part in demo(Request("tiny", "", "numpy"))}


def test_the_parts_come_in_order(found: dict[str, Part]) -> None:
    classes, speed, bug = found.values()
    assert [classes.title, speed.title] == [
        "the 5 most probable classes",
        "speed, float32, one image at a time",
    ]
    assert bug.title == "a planted bug: a global average that divides by H·W − 1"
    assert all(part.ok and part.seconds > 0 for part in found.values())


def test_the_classes_are_those_of_classify(found: dict[str, Part]) -> None:
    part = next(iter(found.values()))
    done = commands.r18(
        *("classify", PICTURE, "--network", "tiny", "--weights", "synthetic"),
        *("--backend", "numpy", "--json"),
    )
    assert part.data["top"] == json.loads(done.out)["images"][0]["top"]
    assert part.data["weights"] == "synthetic:0"
    assert part.lines[-1] == "synthetic weights were never trained: these classes mean nothing"
    assert part.lines[-2].startswith("weights 'imagenet' exist for resnet18, resnet34")


def test_the_speed_is_that_of_bench(found: dict[str, Part]) -> None:
    part = found["speed"]
    (row,) = part.data["rows"]
    assert row["name"] == "numpy"
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert part.data["time_over_pytorch"] is None
    (left_out,) = part.data["left_out"]
    assert left_out.endswith("torchvision has no 'tiny'")
    assert left_out in part.lines


def test_the_ratio_is_by_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of which the times are known."""
    from r18.bench.rows import Row, with_ratios
    from r18.bench.run import Result

    def row(name: str, *samples: float) -> Row:
        return Row(name, "CPU", "cpu", "fp32", "all", 1, 2, len(samples), samples)

    rows = with_ratios([row("numba-cpu", 10, 20, 21), row(parts.PEER, 50, 50, 90)])
    result = Result(rows, [], {"machine": {}}, ())
    monkeypatch.setattr(Result, "warnings", ["the machine is busy"])
    monkeypatch.setattr(parts, "run_bench", lambda request, on_left_out: result)
    part = parts._speed(Request(), "synthetic:0")
    assert part.data["time_over_pytorch"] == 0.4
    assert part.lines[0] == "      20 ms  numba-cpu (p10..p90 12..20.8)"
    assert part.lines[1].endswith("PyTorch in eager mode (p10..p90 50..82)")
    assert part.lines[2].startswith("numba-cpu runs at 2.50 times the speed of PyTorch, by medians")
    assert part.lines[-1] == "warning: the machine is busy"


def test_the_bug_is_found_and_the_mended_kernel_accepted(found: dict[str, Part]) -> None:
    part = found["a planted bug: a global average that divides by H·W − 1"]
    assert "verdict   wrong: " in part.data["found"]
    assert "gap() 1×1×1×1 → 1×1" in part.data["found"]
    assert part.data["false_alarm"] == ""
    assert part.lines[-1] == "divided by H·W, it passes every check"
    assert any(
        "r18 check r18.demo.planted:divides_by_one_less --like adaptive_avg_pool2d" in line
        for line in part.lines
    )


def test_the_planted_kernel_is_wrong_by_one() -> None:
    x = np.arange(12, dtype=np.float32).reshape(1, 2, 2, 3)
    assert planted.mended(x).ravel().tolist() == [2.5, 8.5]
    assert planted.divides_by_one_less(x).ravel().tolist() == [3.0, 10.199999809265137]


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("", "", "NOT FOUND: the oracle is at fault, please report it"),
        ("a finding", "another", "A FALSE ALARM of the oracle, please report it:"),
    ],
)
def test_an_oracle_at_fault_is_an_error(
    wrong: str, right: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(kernel: Any, like: str, **options: Any) -> None:
        if finding := wrong if kernel is planted.divides_by_one_less else right:
            raise AssertionError(finding)

    monkeypatch.setattr(parts, "hook", lambda name, asked_by: judge)
    part = parts._bug()
    assert not part.ok
    assert said in part.lines

    monkeypatch.setattr("r18.demo.command.parts_of", lambda request: iter([part]))
    done = commands.r18("demo")
    assert done.code == 1
    assert said in done.out


def test_without_an_oracle_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.hooks.entry_points", lambda group: [])
    part = parts._bug()
    assert part.ok
    assert part.lines == (
        "left out:",
        "finding it needs the oracle, which is not installed",
        "  pip install 'r18[oracle]'",
    )


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def made(request: Request) -> Any:
        asked.append(request)
        yield Part("one", ("a line",), 1.5, True, {"top": []})

    monkeypatch.setattr("r18.demo.command.parts_of", made)
    done = commands.r18("demo", "--json", "--backend", "numpy", "--network", "tiny")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["parts"] == [{"title": "one", "seconds": 1.5, "ok": True, "top": []}]
    assert {"start of Python, imports", "total"} <= data["seconds"].keys()
    assert asked == [Request("tiny", "", "numpy")]
    told = commands.r18("demo", "--backend", "numpy").out
    assert told.startswith("one (1.5 s)\n  a line\n\n")
    assert "total" in told


# -- weights -----------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of PyTorch's."""
    monkeypatch.setattr(sources, "_hub", lambda: tmp_path)
    return tmp_path / "checkpoints"


def test_without_a_network_the_weights_are_synthetic(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = []

    def urlopen(url: str, timeout: float) -> None:
        timeouts.append(timeout)
        raise OSError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    weights, why = parts._weights("", resnet18())
    assert weights.source == "synthetic:0"
    assert why == (
        "weights 'imagenet' are not in PyTorch's cache and cannot be downloaded: no route"
    )
    assert timeouts == [parts.DOWNLOAD_SECONDS]


def test_a_slow_download_is_given_up(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is kept."""
    times = iter([0.0, 1.0, 21.0])
    blocks = iter([b"one", b"two", b"three"])

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return next(blocks)

    monkeypatch.setattr(sources.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Slow())
    with pytest.raises(WeightsError, match="cannot be downloaded: incomplete after 20 s"):
        sources.imagenet_weights(resnet18(), 20.0)
    assert list(hub.iterdir()) == []
    assert next(blocks) == b"three"


def test_weights_that_are_asked_for_have_no_substitute(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        next(demo(Request("tiny", str(tmp_path / "none.pth"), "numpy")))
    with pytest.raises(UsageError, match="seed"):
        next(demo(Request("tiny", "synthetic:x", "numpy")))


# -- the picture -------------------------------------------------------------------------------


def test_the_picture_is_what_the_tool_draws() -> None:
    """Up to what JPEG rounds, which another version of its library may do in another way."""
    drawn = runpy.run_path(str(TOOL))["drawn"]()
    with Image.open(PICTURE) as image:
        kept = np.asarray(image.convert("RGB"), np.int16)
    assert kept.shape == drawn.shape == (320, 400, 3)
    assert np.abs(kept - drawn).mean() < 4
    assert np.abs(kept - drawn[:, ::-1]).mean() > 10  # the bound would notice another picture


def test_the_tool_writes_it(tmp_path: Path) -> None:
    done = commands.tool("draw_demo_picture", "--out", tmp_path / "it.jpg")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{tmp_path / 'it.jpg'}: 400×320, ")
    with Image.open(tmp_path / "it.jpg") as image:
        assert image.size == (400, 320)
