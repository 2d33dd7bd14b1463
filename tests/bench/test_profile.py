"""The profile: rows, ratios, traces, and both ways to request it. No times are asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import commands
from commands import r18
from r18.backend import DeviceInfo
from r18.bench import profile as profiling
from r18.bench.profile import LEVELS, MODEL, Report, Row, profile
from r18.bench.profile_record import save
from r18.cpu import model_slug
from r18.errors import BackendUnavailable, R18Error, UnknownName, UsageError
from r18.graph.resnet import resnet18
from r18.machine import machine
from r18.report.tables import rendered
from r18_numpy import Backend
from r18_oracle.network.outputs import drop_in_judge
from support import ROOT, random_weights

SIZE = 32
SCHEDULE = resnet18(classes=5, image_size=SIZE)
WEIGHTS = random_weights(SCHEDULE)
QUICK = ("--image-size", SIZE, "--repeat", 1)


def profiled(**options: Any) -> Report:
    return profile("numpy", "cpu", SCHEDULE, WEIGHTS, **{"repeat": 2, "batches": (1,), **options})


def test_every_contender_at_every_batch() -> None:
    messages: list[str] = []
    report = profiled(batches=(1, 3), progress=messages.append)
    names = (MODEL, *LEVELS)
    assert [(row.batch, row.contender) for row in report.rows] == [
        (batch, name) for batch in (1, 3) for name in names
    ]
    assert (report.backend, report.precision, report.skipped) == ("numpy", "fp32", ())
    assert report.device.startswith("CPU, ")
    for row in report.rows:
        (model,) = (r for r in report.rows if (r.batch, r.contender) == (row.batch, MODEL))
        assert row.cpu_ms > 0
        assert row.cpu_ratio == row.cpu_ms / model.cpu_ms
        assert row.cuda_ms is row.cuda_ratio is None
    assert set(messages) == {f"batch {batch}: {name}" for batch in (1, 3) for name in names}


def test_the_best_of_the_rounds_counts() -> None:
    """A row has the best round of each column separately."""
    runs = {
        MODEL: [profiling._Run(4.0, 3.0, None), profiling._Run(5.0, 2.0, None)],
        "all": [profiling._Run(2.0, 1.0, None), profiling._Run(1.0, 1.5, None)],
    }
    model, fast = profiling._rows(8, runs, {"all": 0.5})
    assert (model.loss, fast.loss) == (None, 0.5)
    assert (model.cpu_ms, model.cuda_ms, model.cpu_ratio, model.cuda_ratio) == (4, 2, 1, 1)
    assert (fast.cpu_ms, fast.cuda_ms, fast.cpu_ratio, fast.cuda_ratio) == (1, 1, 0.25, 0.5)


def test_contenders_take_turns() -> None:
    messages: list[str] = []
    profiled(repeat=3, levels=("all",), progress=messages.append)
    first, second = (f"batch 1: {name}" for name in (MODEL, "all"))
    assert messages == [first, second, first, second, second, first, first, second]


def test_the_module_computes_what_the_drop_ins_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiled modules have the given weights, and each level fuses what its name says."""
    seen: dict[str, torch.Tensor] = {}
    calls_of = profiling._rounds

    def watched(torch_: Any, calls: Any, images: Any, *rest: Any) -> Any:
        seen.update({name: call(images) for name, call in calls.items()})
        assert {n: getattr(c, "fuse", MODEL) for n, c in calls.items()} == {n: n for n in calls}
        assert torch.equal(calls["all"].conv1.weight, torch.from_numpy(WEIGHTS["conv1.weight"]))
        return calls_of(torch_, calls, images, *rest)

    monkeypatch.setattr(profiling, "_rounds", watched)
    profiled(repeat=1)
    assert set(seen) == {MODEL, *LEVELS}
    for name in LEVELS:
        torch.testing.assert_close(seen[name], seen[MODEL], rtol=1e-4, atol=1e-4)


def test_a_level_without_kernels_is_left_out_with_the_reason() -> None:
    report = profiled(precision="fp16", repeat=1)
    assert [row.contender for row in report.rows] == [MODEL]
    assert [skipped.contender for skipped in report.skipped] == list(LEVELS)
    assert all("in fp16" in skipped.reason for skipped in report.skipped)


def test_traces_are_chromes(tmp_path: Path) -> None:
    profiled(repeat=1, levels=("all",), traces=tmp_path / "traces")
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == ["all-batch1.json", f"{MODEL}-batch1.json"]
    for file, operator in zip(files, ("r18::resnet18", "aten::conv2d"), strict=True):
        names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert {operator, "r18 profile"} <= names


def test_the_first_run_of_a_profile_is_not_recorded() -> None:
    ran: list[int] = []

    def call(images: torch.Tensor) -> torch.Tensor:
        ran.append(len(ran))
        return torch.relu(images) if len(ran) > 1 else torch.tanh(images)

    run = profiling._profiled(torch, call, torch.ones(2))
    names = [event.name for event in run.profiler.events()]
    assert ran == [0, 1]
    assert "aten::tanh" not in names
    assert names.count("aten::relu") == names.count("r18 profile") == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"levels": ("al",)}, UnknownName, "did you mean 'all'"),
        ({"precision": "int8"}, UnknownName, "unknown precision of a profile 'int8'"),
        ({"batches": ()}, UsageError, r"different batches of at least 1, got \[\]"),
        ({"batches": (1, 1)}, UsageError, r"got \[1, 1\]"),
        ({"repeat": 0}, UsageError, "at least 1 round"),
    ],
)
def test_wrong_requests(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        profiled(**options)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="sees no device of kind 'cuda'"):
        profile("numpy", "cuda", SCHEDULE, WEIGHTS)


# -- judged ------------------------------------------------------------------------------------


def test_every_output_is_judged_against_float64() -> None:
    """Every output is judged against float64, with several images, by its own kernels' bound."""
    report = profiled(repeat=1, batches=(1, 3), judge=drop_in_judge(SCHEDULE, WEIGHTS, "fp32"))
    assert report.wrong == ()
    assert len(report.rows) == 8
    for row in report.rows:
        assert row.loss is not None
        assert 0 < row.loss < 1
    doubled = profiled(repeat=1, precision="fp64", judge=drop_in_judge(SCHEDULE, WEIGHTS, "fp64"))
    assert all(0 < (row.loss or 0) < 1 for row in doubled.rows)


def test_a_judge_is_told_what_computes() -> None:
    asked: list[tuple[Any, ...]] = []

    def judge(name: str, batch: int, run: Any, level: str, algorithms: Any) -> float:
        logits = run(np.zeros((batch, 3, SIZE, SIZE), np.float32))
        asked.append((name, batch, logits.shape, logits.dtype, level, set(algorithms)))
        return 0.25

    report = profiled(repeat=1, batches=(2,), judge=judge)
    own = {k.contract.algorithm for k in Backend().kernels() if k.precision.name == "fp32"}
    shape = ((2, 5), np.float64)
    assert asked == [
        (MODEL, 2, *shape, "none", set()),
        ("add_relu", 2, *shape, "add_relu", set()),
        ("conv_bn_relu", 2, *shape, "conv_bn_relu", own),
        ("all", 2, *shape, "all", own),
    ]
    assert [row.loss for row in report.rows] == [0.25] * 4


@pytest.mark.parametrize("loss", [1.5, float("inf"), float("nan")])
def test_what_is_wrong_is_no_row(loss: float) -> None:
    report = profiled(repeat=1, judge=lambda name, *_: loss if name == "all" else 0.5)
    assert [row.contender for row in report.rows] == [MODEL, "add_relu", "conv_bn_relu"]
    (wrong,) = report.wrong
    assert wrong.contender == "all"
    assert f"it loses {loss:.3g} times what it may against float64 at batch 1" in wrong.reason
    with pytest.raises(R18Error, match="torchvision's module is wrong itself"):
        profiled(repeat=1, judge=lambda name, *_: loss)


# -- records -----------------------------------------------------------------------------------


def made(batches: tuple[int, ...], cuda_ms: float | None = 2.0) -> Report:
    rows = []
    for batch in batches:
        for name, cpu, part in ((MODEL, 4.0, 1.0), ("all", 1.0, 0.25)):
            cuda = (None, None) if cuda_ms is None else (cuda_ms * part, part)
            rows.append(Row(name, batch, cpu, cuda[0], part, cuda[1], 0.125))
    return Report("a GPU, PyTorch 2.11.0", "cupy", "fp16", tuple(rows), ())


GPU = DeviceInfo("cuda", "NVIDIA H200 (sm_90)")
ABOUT = {
    "repeat": 5,
    "weights": {"source": "synthetic:0", "sha256": "s"},
    "machine": machine() | {"processor": "a processor", "cpus": 16},
    "skipped": [],
}


def test_a_later_run_replaces_what_it_measured(tmp_path: Path) -> None:
    path = save(made((1, 64)), GPU, ABOUT, tmp_path)
    assert path == tmp_path / "profile-nvidia-h200.json"
    before = json.loads(path.read_text())["groups"]
    assert list(before) == ["cupy/fp16/b1", "cupy/fp16/b64"]
    save(made((64,), cuda_ms=3.0), GPU, ABOUT, tmp_path)
    save(made((64,), cuda_ms=1.0), GPU, ABOUT, tmp_path, channels_last=True)
    after = json.loads(path.read_text())["groups"]
    assert list(after) == [*before, "cupy/fp16/b64/channels-last"]
    assert after["cupy/fp16/b1"] == before["cupy/fp16/b1"]
    times = [[row["cuda_ms"] for row in group["rows"]] for group in after.values()]
    assert times == [[2.0, 0.5], [3.0, 0.75], [1.0, 0.25]]


def test_a_table_of_the_record(tmp_path: Path) -> None:
    save(made((1, 64)), GPU, ABOUT, tmp_path)
    save(made((1,), cuda_ms=None), DeviceInfo("cpu", "a CPU"), ABOUT, tmp_path)

    def table(options: str) -> list[str]:
        text = f"<!-- table: profile {options} -->\n<!-- /table -->\n"
        return rendered(text, tmp_path).splitlines()[2:-2]

    of = "device=nvidia-h200 precisions=fp16 batches="
    assert table(f"{of}64")[:4] == [
        "| fuse | precision | batch | CPU ms | / torchvision | CUDA ms | / torchvision | "
        "error / allowed |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
        f"| {MODEL} | fp16 | 64 | 4 | 1.00 | 2 | 1.00 | 0.125 |",
        "| all | fp16 | 64 | 1 | 0.25 | 0.5 | 0.25 | 0.125 |",
    ]
    caption = table(f"{of}1,64")[-1]
    assert caption.startswith("NVIDIA H200 (sm_90), PyTorch ")
    assert ": the best of 5 profiled runs, weights synthetic:0. Each run reads" in caption
    assert caption.endswith("so the last-level cache (a GPU's L2) holds what fits of them.")
    assert "CUDA" not in table(f"device={model_slug()} precisions=fp16 batches=1")[0]
    for options in (f"{of}2", f"{of}1 memory=channels-last", f"{of}1 backend=numba"):
        with pytest.raises(UsageError, match="has no profile of '"):
            table(options)


# -- the command and the tool ------------------------------------------------------------------


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    done = r18("profile", "--backend", "numpy", "--batch", "1,2", *QUICK, "--trace", tmp_path / "t")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("CPU, ")
    assert lines[1] == "backend numpy, fp32, weights synthetic:0, best of 1"
    (head,) = (index for index, line in enumerate(lines) if "CPU ms" in line)
    assert "CUDA" not in lines[head]
    found = [line.split()[:2] for line in lines[head + 2 : head + 10]]
    assert found == [[str(batch), name] for batch in (1, 2) for name in (MODEL, *LEVELS)]
    assert len(list((tmp_path / "t").iterdir())) == 8


def test_the_command_judges_and_records(tmp_path: Path) -> None:
    asked = ("--backend", "numpy", "--batch", "1", "--fusion", "all", "--repeat", 1)
    done = r18("profile", *asked, "--check", "--record", "--records", tmp_path)
    assert done.code == 0, done.err
    path = tmp_path / f"profile-{model_slug()}.json"
    assert f"recorded in {path}" in done.err
    (found,) = json.loads(path.read_text())["groups"].values()
    assert [row["contender"] for row in found["rows"]] == [MODEL, "all"]
    assert "loss / allowed" in done.out
    for row in found["rows"]:
        assert f"{row['cpu_ms']:.3f}" in done.out
        assert f"{row['loss']:.3f}" in done.out
    assert (found["backend"], found["repeat"], found["skipped"]) == ("numpy", 1, [])


def test_a_wrong_output_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "r18_oracle.network.outputs.drop_in_judge",
        lambda *_: lambda name, *_: 2.0 * (name == "all"),
    )
    done = r18("profile", "--backend", "numpy", "--batch", "1", *QUICK, "--check")
    assert done.code == 1
    assert "left out: all: its output is wrong: it loses 2 times" in done.err
    assert " all " not in done.out


def test_the_command_prints_json() -> None:
    done = r18("profile", "--backend", "numpy", "--batch", "1", *QUICK, "--fusion", "all", "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert [row["contender"] for row in data["rows"]] == [MODEL, "all"]
    assert data["backend"] == "numpy"
    assert data["weights"]["source"] == "synthetic:0"
    assert data["machine"]["cpus"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "nunpy"), "did you mean 'numpy'"),
        (("--backend", "numpy", "--batch", "1,x"), "--batch takes integers"),
        (("--backend", "numpy", "--fusion", "al"), "did you mean 'all'"),
        (("--backend", "torch", "--batch", "1"), "cannot adopt PyTorch's tensors"),
        (("--backend", "numpy", "--record"), "leave out --image-size"),
    ],
)
def test_the_command_refuses_wrong_requests(arguments: tuple[str, ...], message: str) -> None:
    done = r18("profile", *arguments, *QUICK)
    assert done.code == 2
    assert message in done.err


def test_the_tool_is_the_command(tmp_path: Path) -> None:
    tool = str(ROOT / "tools" / "resnet_profile.py")
    options = subprocess.run(
        [sys.executable, tool, "--help"], capture_output=True, text=True, check=True, timeout=300
    )
    assert "--fusion" in options.stdout
    command = ("--backend", "numpy", "--batch", "1", "--fusion", "all", *QUICK)
    done = commands.tool("resnet_profile", *command)
    assert done.code == 0, done.err
    assert [MODEL in done.out, " all " in done.out] == [True, True]
    refused = commands.tool("resnet_profile", "--backend", "nunpy")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("resnet_profile: unknown backend 'nunpy'")
