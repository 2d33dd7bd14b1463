"""Networks in fp8 against float64: checkpoints, commands, and the judge of benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commands import r18
from faults.scaled import FAULTS
from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.backend.registry import get_backend
from r18.bench.baselines import peers_precision
from r18.bench.contenders import program_contender
from r18.errors import DumpError, WeightsError
from r18.graph.resnet import tiny
from r18.weights import load_weights
from r18.weights.manifest import write_manifest
from r18_oracle.dumps.agreement import compare_by_bounds
from r18_oracle.dumps.dumps import read_dump
from r18_oracle.network.checkpoint_report import CheckpointReport, text
from r18_oracle.network.checkpoints import Shared, compare_checkpoints, seeded_images
from r18_oracle.network.outputs import judge_of
from spoiled_kernels import Altered

BACKENDS = ("numpy", "torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fp8") / "w"
    write_manifest(made, quantised_weights(), tiny())
    return made


def compare(name: str, **options: object) -> CheckpointReport:
    weights, images = load_weights("synthetic", tiny()), seeded_images(tiny(), 2)
    return compare_checkpoints(
        get_backend(name), tiny(), weights, images, precision="fp8", **options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_checkpoint_is_within_what_pytorch_loses(name: str) -> None:
    shared = Shared()
    for _ in range(2):  # the second reads what the first has kept
        report = compare(name, taps="all", shared=shared)
        assert report.ok, text(report)
        assert len(report.checkpoints) > 20
        assert all(step.ratio <= 1 for step in report.steps)
        logits = next(row.loss for row in report.checkpoints if row.name == "logits")
        # Most of either loss is that of storing, which is the same.
        assert 0.5 * logits.own_rms < logits.rms < 2 * logits.own_rms
        assert logits.own_relative < 0.3
    assert len(shared.calibrated) == 1


def test_a_fault_names_its_step() -> None:
    wrong = next(one.kernel for one in FAULTS if one.kernel.algorithm == "cut")
    weights, images = load_weights("synthetic", tiny()), seeded_images(tiny(), 2)
    kernels = {"layer2.0.conv1": wrong.id}
    report = compare_checkpoints(
        Altered(wrong), tiny(), weights, images, precision="fp8", kernels=kernels
    )
    assert not report.ok
    assert {step.step for step in report.steps if step.check} == {"layer2.0.conv1"}


# -- commands ----------------------------------------------------------------------------------


def test_a_dump_holds_numbers_not_units(folder: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "fp8"):
        out = str(tmp_path / precision)
        made = ("--network", "tiny", "--weights", str(folder), "--backend", "numpy")
        r18("dump", *made, "--precision", precision, "--fusion", "all", "--out", out)
    dumps = [read_dump(tmp_path / precision) for precision in ("fp32", "fp8")]
    for one, other in zip(*(dump.checkpoints for dump in dumps), strict=True):
        exact, found = (
            np.fromfile(dump.folder / file.path, "<f4").astype(np.float64)
            for dump, file in zip(dumps, (one, other), strict=True)
        )
        assert np.linalg.norm(found - exact) < 0.6 * np.linalg.norm(exact), one.name
    with pytest.raises(DumpError, match="is in fp8, whose error follows from scales"):
        compare_by_bounds([tmp_path / precision for precision in ("fp32", "fp8")])


def test_a_plan_needs_no_weights() -> None:
    shown = r18("plan", "--network", "tiny", "--backend", "numpy", "--precision", "fp8").out
    assert "numpy/sconv2d/im2col/fp8" in shown
    assert "numpy/scale/divide/fp8" in shown


# -- benchmarks --------------------------------------------------------------------------------


def test_a_row_is_judged_by_the_scaled_network() -> None:
    weights = quantised_weights()
    options = CompileOptions(batch=2, precision="fp8")
    backend = get_backend("numpy")
    device = backend.probe()
    contender = program_contender("numpy", device, backend, tiny(), weights, options)
    judge = judge_of(tiny(), weights, ["fp8"])
    runner = contender.make()
    try:
        assert 0 < judge.loss(contender, runner) <= 1
        assert 0.001 < judge.error(contender, runner).relative < 0.6
    finally:
        runner.close()
    with pytest.raises(WeightsError, match="fp8 takes its scales from one"):
        judge_of(tiny(), load_weights("synthetic", tiny()), ["fp8"]).loss(contender, runner)


def test_peers_run_what_they_have() -> None:
    assert peers_precision("fp8", "cuda") == "fp16"
    assert peers_precision("fp8", "cpu") == "fp32"
