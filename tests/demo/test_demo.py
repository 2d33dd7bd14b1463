"""`r18 demo`: its parts on a small network, what it leaves out, its second process, its picture."""

from __future__ import annotations

import io
import json
import os
import runpy
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import commands
from r18.backend import CompileOptions
from r18.backend.registry import get_backend
from r18.bench.error import relative
from r18.demo import heavy, parts, planted, speed
from r18.demo.layers import LayerByLayer, layers
from r18.demo.part import Part, Request
from r18.demo.parts import PICTURE, demo
from r18.demo.second import Second
from r18.errors import R18Error, UsageError, WeightsError
from r18.graph.resnet import network, resnet18
from r18.weights import load_weights, sources
from support import ROOT, own_time, random_weights

TOOL = ROOT / "tools" / "draw_demo_picture.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the demo runs."""
    return tmp_path_factory.mktemp("here")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Part]:
    """The parts on `tiny` and numpy, by their first words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("HYPOTHESIS_STORAGE_DIRECTORY", raising=False)
        return {part.title.split(",")[0]: part for part in demo(Request("tiny", "", "numpy"))}


def test_the_parts_come_in_order(found: dict[str, Part]) -> None:
    assert [part.title for part in found.values()] == [
        "the 5 most probable classes",
        "a planted bug: a global average that divides by H·W − 1",
        "speed, float32, one image at a time",
        "in a second process",
    ]
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


def test_the_speed_is_next_to_pytorch_s(found: dict[str, Part]) -> None:
    part = found["speed"]
    own, theirs = part.data["rows"]
    assert (own["name"], theirs["name"]) == ("numpy", "PyTorch, eager mode")
    for row in (own, theirs):
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert part.data["time_over_pytorch"] == own["median_ms"] / theirs["median_ms"]
    assert part.data["left_out"] == []
    assert all("error " in line and "e-0" in line for line in part.lines[:2])


@pytest.mark.usefixtures("found")
def test_no_file_is_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def test_what_took_the_time_is_said(found: dict[str, Part]) -> None:
    part = found["in a second process"]
    assert list(part.data["parts"]) == [
        "start of Python, imports",
        "PyTorch imported",
        "the oracle imported",
        "a planted bug",
        "PyTorch's network made",
        "PyTorch in float64",
        "PyTorch timed",
        "other",
    ]
    assert part.seconds == pytest.approx(sum(part.data["parts"].values()), abs=0.01)
    assert part.lines[1].split()[-1] == f"{part.data['parts']['PyTorch imported']:.3f}"


def test_without_pytorch_ours_is_timed_alone() -> None:
    class Without:
        """A second process that has no PyTorch."""

        def answer(self) -> str:
            return "it does not import"

    backend = get_backend("numpy")
    schedule = network("tiny")
    program = backend.compile(schedule, load_weights("synthetic", schedule), CompileOptions())
    second: Any = Without()
    part = speed.speed("auto", backend.probe(), program, speed.images_for(schedule), second)
    (row,) = part.data["rows"]
    assert row["name"] == "numpy"
    assert part.data["time_over_pytorch"] is None
    assert part.data["left_out"] == ["left out: PyTorch, eager mode: it does not import"]
    assert part.data["left_out"][0] in part.lines
    assert "error" not in part.lines[0]
    assert part.lines[1].startswith("numpy is the readable reference; ")


def test_the_ratio_is_by_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio to PyTorch compares medians of a run with fixed times."""
    from r18.bench.baselines import PEER
    from r18.bench.rows import Row, with_ratios
    from r18.bench.run import Result

    def row(name: str, *samples: float) -> Row:
        return Row(name, "CPU", "cpu", "fp32", "all", 1, 2, len(samples), samples)

    rows = with_ratios([row("numba-cpu", 10, 20, 21), row(PEER, 50, 50, 90)])
    result = Result(rows, [], {"machine": {}}, ())
    monkeypatch.setattr(Result, "warnings", [f"{PEER}: the machine is busy"])
    part = speed.part_of(result, [], "auto")
    assert part.data["time_over_pytorch"] == 0.4
    assert part.lines[0] == "      20 ms  numba-cpu (p10..p90 12..20.8)"
    assert part.lines[1] == "      50 ms  PyTorch, eager mode (p10..p90 50..82)"
    assert part.lines[2].startswith("numba-cpu runs at 2.50 times the speed of PyTorch, by medians")
    assert part.lines[-1] == "warning: PyTorch, eager mode: the machine is busy"


# -- PyTorch, layer by layer -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_pytorch_computes_what_torchvision_s_module_does(name: str) -> None:
    """PyTorch's stand-in gives torchvision's bits, so its time stands for torchvision's."""
    import torchvision

    schedule = network(name)
    weights = random_weights(schedule, 0)
    module = torchvision.models.get_model(name)
    values = {key: torch.from_numpy(array) for key, array in weights.items()}
    missing, unexpected = module.load_state_dict(values, strict=False)
    assert not unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing)
    images = torch.randn(1, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(layers(schedule, weights)(images), module.eval()(images))


def test_pytorch_in_float64_is_nearer_to_the_truth() -> None:
    schedule = network("tiny")
    weights = random_weights(schedule, 0)
    runner = LayerByLayer("cpu", schedule, weights, "fp32")
    (images,) = speed.images_for(schedule)
    runner.load(images)
    runner.run()
    (exact,) = runner.exact([images])
    assert exact.dtype == np.float64
    assert 0 < relative(runner.fetch(), exact) < 1e-5


# -- the second process ------------------------------------------------------------------------


class Served:
    """The object that a second process serves in these tests."""

    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise ValueError("on purpose")

    def end(self) -> None:
        os._exit(7)


def test_calls_are_answered_in_order() -> None:
    with closing(Second(Served)) as second:
        second.ask("double", 3)
        second.ask("double", 4)
        assert [second.answer(), second.answer()] == [6, 8]
        with pytest.raises(
            R18Error, match=r"(?s)the second process failed:.*ValueError: on purpose"
        ):
            second.call("fail")
        assert second.call("double", 5) == 10
        names = [name for name, _ in second.seconds()]
        assert names == ["start of Python, imports", "other", "total"]
        second.ask("end")
        with pytest.raises(R18Error, match="the second process ended with exit code 7"):
            second.answer()
        with pytest.raises(R18Error, match="the second process ended with exit code 7"):
            second.ask("double", 6)


# -- a planted bug -----------------------------------------------------------------------------


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

    monkeypatch.setattr(heavy, "hook", lambda name, asked_by: judge)
    part = heavy.bug()
    assert not part.ok
    assert said in part.lines

    monkeypatch.setattr("r18.demo.command.parts_of", lambda request: iter([part]))
    done = commands.r18("demo")
    assert done.code == 1
    assert said in done.out


def test_without_an_oracle_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.hooks.entry_points", lambda group: [])
    part = heavy.bug()
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
    output = commands.r18("demo", "--backend", "numpy").out
    assert output.startswith("one (1.5 s)\n  a line\n\n")
    assert "total" in output


# -- weights -----------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for PyTorch's downloads."""
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
    """A slow download is given up, and nothing of it is kept."""
    times = iter([0.0, 1.0, 21.0])
    blocks = iter([b"one", b"two", b"three"])

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return next(blocks)

    own_time(monkeypatch, sources, monotonic=lambda: next(times))
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
    """The stored picture is what the tool draws, up to JPEG's rounding, which varies by version."""
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
