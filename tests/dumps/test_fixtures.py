"""Step fixtures: their content, running them, and damaged or foreign ones."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

import commands
import r18_oracle.dumps.fixtures as fixtures_module
from quantised_weights import quantised_weights
from r18.backend import Array, Backend, CompileOptions, Kernel
from r18.backend.host import HostKernel
from r18.errors import BackendUnavailable, DumpError, UnknownName, UsageError
from r18.graph.ops import ReLU
from r18.graph.resnet import network
from r18.weights import Weights, export_weights, load_weights
from r18_numpy import Backend as NumpyBackend
from r18_oracle.cli.fixtures import parse_steps
from r18_oracle.cli.step import FLOATS
from r18_oracle.dumps.dumps import diff_dumps, read_dump, write_dump
from r18_oracle.dumps.fixtures import (
    STEPS,
    Fixture,
    find_fixture,
    make_e2e,
    make_fixture,
    read_fixture,
    reference_backend,
    run_step,
    step_schedule,
)
from r18_oracle.network.images import seeded

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TINY = network("tiny")


class LeakyReLU(NumpyBackend):
    """NumPy's backend with a ReLU that passes a tenth of negative values."""

    name = "leaky"

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            replace(k, run=_leak) if isinstance(k, HostKernel) and k.op is ReLU else k
            for k in super().kernels()
        )


def _leak(op: ReLU, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    np.maximum(inputs[0], inputs[0] * 0.1, out=out)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_weights("synthetic", TINY)


@pytest.fixture(scope="module")
def made(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every step's fixture of the tiny network at batch 2, by NumPy in float64."""
    folder = tmp_path_factory.mktemp("fixtures")
    for step in STEPS:
        make_tiny(step, weights, folder / f"step{step}", batch=2)
    return folder


def make_tiny(step: int, weights: Weights, folder: Path, **options: Any) -> Fixture:
    options = {"reference": NumpyBackend(), **options}
    return make_fixture(step, weights, folder, network_name="tiny", **options)


def invoke(command: str, *args: object) -> Result:
    """Run one subcommand; errors of `R18Error` stay in `result.exception`, as `main` gets them."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(getattr(importlib.import_module(f"r18_oracle.cli.{command}"), command))
    return CliRunner().invoke(app, [str(arg) for arg in args])


def edit(folder: Path, **fields: Any) -> None:
    data = json.loads((folder / "fixture.json").read_text())
    (folder / "fixture.json").write_text(json.dumps(data | fields))


# -- what they hold ----------------------------------------------------------------------------


def test_steps_are_the_networks_parts() -> None:
    names = {step: [s.name for s in step_schedule(step, "tiny").steps] for step in STEPS}
    assert names[2] == ["conv1", "bn1", "relu"]
    assert names[3][0] == "layer1.0.conv1"
    assert names[6][-1] == "layer4.0.relu_1"
    assert names[7] == ["avgpool", "fc", "softmax"]
    whole = [s.name for s in network("tiny", softmax=True).steps if s.name != "maxpool"]
    assert [name for step in STEPS for name in names[step]] == whole
    resnet = step_schedule(5)
    assert (resnet.input_shape, resnet.shapes(1)[resnet.output]) == (
        (128, 28, 28),
        (1, 256, 14, 14),
    )
    with pytest.raises(UnknownName, match="unknown step '1'"):
        step_schedule(1)


def test_a_fixture_holds_input_and_expected_output(made: Path, weights: Weights) -> None:
    for step in STEPS:
        fixture = read_fixture(made / f"step{step}")
        images, expected = fixture.read_input(), fixture.read_expected()
        assert (fixture.step, fixture.network, fixture.seed) == (step, "tiny", 0)
        assert fixture.weights.sha256 == weights.sha256
        assert fixture.reference.startswith("numpy in fp64 on CPU")
        assert images.dtype == expected.dtype == np.float32
        assert bool((images < 0).any()) is (step == 2)  # behind a ReLU nothing is negative
        program = NumpyBackend().compile(
            fixture.schedule, weights, CompileOptions(2, precision="fp64", fusion="none")
        )
        assert np.array_equal(program(images).astype(np.float32), expected)
        raw = np.fromfile(made / f"step{step}" / "expected.bin", "<f4")
        assert np.array_equal(raw, expected.ravel())
    np.testing.assert_allclose(expected.sum(axis=1), 1, rtol=1e-6)  # step 7 ends in a softmax
    assert expected.max() > 0.3  # a flat one would hide most faults below the tolerance


def test_the_reference_is_torch_where_there_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_backend("numpy").name == "numpy"
    monkeypatch.setattr(fixtures_module, "REFERENCES", ("no_such_module:Backend", "numpy"))
    assert reference_backend().name == "numpy"
    monkeypatch.setattr(fixtures_module, "REFERENCES", ("no_such_module:Backend",))
    with pytest.raises(BackendUnavailable, match="Backend: no module 'no_such_module'"):
        reference_backend()
    monkeypatch.undo()
    pytest.importorskip("torch")
    assert reference_backend().name == "torch"


def test_torch_and_numpy_make_the_same_fixture(
    made: Path, weights: Weights, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    other = make_tiny(3, weights, tmp_path / "step3", batch=2, reference=reference_backend())
    ours = read_fixture(made / "step3")
    assert other.input.sha256 == ours.input.sha256
    np.testing.assert_allclose(other.read_expected(), ours.read_expected(), rtol=1e-6, atol=1e-12)


# -- running -----------------------------------------------------------------------------------


def backends() -> list[Any]:
    return [
        pytest.param("numpy", id="numpy"),
        pytest.param("r18_torch:cpu", id="torch"),
        pytest.param("numba-cpu", id="numba-cpu"),
    ]


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("fusion", ["none", "all"])
def test_every_step_runs_within_its_tolerance(
    made: Path, weights: Weights, name: str, fusion: str
) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    backend: Backend = fixtures_module.get_backend(name)
    for step in STEPS:
        fixture = read_fixture(made / f"step{step}")
        result = run_step(fixture, backend, weights, fusion=fusion, repeat=1)
        assert result.ok, result.text()
        assert result.comparison.max_abs < 1e-5
        if fusion == "none":
            steps = [t.step for t in result.times if not t.step.startswith("relayout ")]
            assert steps == [step.name for step in fixture.schedule.steps]
        assert result.text().endswith("[OK] within atol 1e-4")
    if name == "numba-cpu":  # float32 alone
        return
    double = run_step(fixture, backend, weights, precision="fp64", repeat=1)
    assert double.comparison.max_abs < 1e-7  # the expected values' own rounding


def test_a_wrong_kernel_fails_its_step(made: Path, weights: Weights) -> None:
    result = run_step(read_fixture(made / "step2"), LeakyReLU(), weights, repeat=1)
    assert not result.ok
    lines = result.text().splitlines()
    assert lines[0] == "step 2 of tiny: image to relu, batch 2, weights synthetic:0"
    assert [line.split()[0] for line in lines[5:9]] == ["conv1", "bn1", "relu", "total"]
    assert lines[-2].startswith("max_abs ")
    assert lines[-1].startswith("[FAIL] max_abs ")
    assert " > atol 1e-4 at (" in lines[-1]
    assert "expected 0" in lines[-1]
    assert run_step(read_fixture(made / "step2"), LeakyReLU(), weights, atol=10, repeat=1).ok


def test_other_weights_are_refused(made: Path) -> None:
    other = load_weights("synthetic:5", TINY)
    with pytest.raises(DumpError) as caught:
        run_step(read_fixture(made / "step2"), NumpyBackend(), other)
    assert "was made with other weights: synthetic:0 (sha256 " in str(caught.value)
    assert "these are synthetic:5 (sha256 " in str(caught.value)
    assert "run it with --weights synthetic:0" in str(caught.value)
    advice = "`r18 fixtures --network tiny --weights synthetic:5 --steps 2 --batch 2 --seed 0 "
    assert f"{advice}--outdir {made} --force`" in str(caught.value)


# -- damage ------------------------------------------------------------------------------------


def test_nothing_is_half_written(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step2"
    make_tiny(2, weights, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def stop(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(fixtures_module, "write_json", stop)
    with pytest.raises(DumpError, match=r"cannot write a fixture to '.*step2': no space left"):
        make_tiny(2, weights, folder, seed=1, overwrite=True)
    with pytest.raises(DumpError, match="no space left"):
        make_tiny(3, weights, tmp_path / "step3")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
    monkeypatch.undo()
    with pytest.raises(DumpError, match="one is there already\n  replace it with --force"):
        make_tiny(2, weights, folder, seed=1)
    assert make_tiny(2, weights, folder, seed=1, overwrite=True).seed == 1
    write_dump(tmp_path / "dump", NumpyBackend(), TINY, weights, seeded(TINY))
    with pytest.raises(DumpError, match="it is no fixture"):
        make_tiny(2, weights, tmp_path / "dump", overwrite=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "dump"}, "kind is 'dump', this r18 reads 'fixture'"),
        ({"step": "2"}, "the field 'step' must be of type int, got '2'"),
        ({"tolerance": float("nan")}, "NaN is not a JSON number"),
        ({"tolerance": -1.0}, "the tolerance is -1.0"),
        ({"step": 3}, "'input' has shape (2, 3, 32, 32), step 3 of tiny at batch 2 has (2, 8, 8"),
        ({"weights": None}, "the field 'weights' must be of type dict, got None"),
    ],
)
def test_damaged_descriptions(
    made: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(made / "step2", tmp_path / "copy"))
    edit(folder, **fields)
    with pytest.raises(DumpError) as caught:
        read_fixture(folder)
    assert message in str(caught.value)


def test_a_long_name_does_not_fill_the_message(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "step2", tmp_path / "copy"))
    described = json.loads((folder / "fixture.json").read_text())["input"]
    edit(folder, step=3, input=described | {"name": "a" * 5000})
    with pytest.raises(DumpError, match="aaa…' has shape") as caught:
        read_fixture(folder)
    assert len(str(caught.value)) < 1000


def test_damaged_tensors(made: Path, weights: Weights, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "step2", tmp_path / "copy"))
    values = np.fromfile(folder / "expected.bin", "<f4")
    (values + 1).tofile(folder / "expected.bin")
    with pytest.raises(DumpError, match=r"expected\.bin' has sha256"):
        run_step(read_fixture(folder), NumpyBackend(), weights)
    (folder / "input.bin").unlink()
    with pytest.raises(DumpError, match=r"there is no 'input\.bin'"):
        run_step(read_fixture(folder), NumpyBackend(), weights)
    with pytest.raises(DumpError, match=r"holds no fixture\.json, so it is no fixture"):
        read_fixture(tmp_path)


# -- end to end --------------------------------------------------------------------------------


def test_end_to_end_fixtures_are_a_dump_of_the_reference(weights: Weights, tmp_path: Path) -> None:
    images = seeded(TINY, 2)
    made = make_e2e(tmp_path / "e2e", TINY, weights, images, reference=NumpyBackend())
    assert made.made is not None
    assert (made.made.precision, made.made.fusion) == ("fp64", "none")
    assert {file.dtype for file in read_dump(tmp_path / "e2e").checkpoints} == {"float32"}
    write_dump(tmp_path / "run", NumpyBackend(), TINY, weights, images)
    assert diff_dumps(tmp_path / "e2e", tmp_path / "run").ok


# -- command line ------------------------------------------------------------------------------


def test_fixtures_and_step_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ("--network", "tiny")
    result = invoke("fixtures", "--steps", "2,6-7", "--reference", "numpy", *tiny)
    assert result.exit_code == 0, result.exception
    assert result.stdout.splitlines()[1] == (
        "saved: step 6 [1, 32, 2, 2] to [1, 64, 1, 1] -> exports/fixtures/step6"
    )
    again = invoke("fixtures", "--steps", "2", *tiny)
    assert isinstance(again.exception, DumpError)
    run = invoke("step", 7, "--backend", "numpy")
    assert run.exit_code == 0, run.exception
    assert run.stdout.endswith("[OK] within atol 1e-4\n")
    bad = invoke("step", 2, "--backend", f"{__name__}:LeakyReLU")
    assert bad.exit_code == 1
    assert "[FAIL] max_abs " in bad.stdout
    as_json = json.loads(invoke("step", 2, "--backend", "numpy", "--json").stdout)
    assert as_json["ok"] is True
    assert [stage["step"] for stage in as_json["stages"]] == ["conv1", "bn1", "relu"]
    folder = Path("exports/fixtures")
    assert find_fixture(folder, 2) == find_fixture(folder / "step2", 2) == folder / "step2"
    other = invoke("step", 3, "--fixture", "exports/fixtures/step2", "--backend", "numpy")
    assert str(other.exception).startswith(
        "the fixture 'exports/fixtures/step2' is of step 2, asked for 3"
    )
    network_ = invoke("step", 2, "--network", "resnet18", "--backend", "numpy")
    assert "is of network tiny, asked for resnet18" in str(network_.exception)
    wrong = invoke("step", 2, "--weights", "synthetic:3", "--backend", "numpy")
    assert "was made with other weights" in str(wrong.exception)
    nowhere = invoke("step", 2, "--fixture", "nowhere", "--backend", "numpy")
    assert isinstance(nowhere.exception, DumpError)
    assert not Path("nowhere").exists()


def test_a_step_makes_its_fixture_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fixtures_module, "REFERENCES", ("numpy",))
    export_weights(tmp_path / "weights", weights, TINY)
    args = ("--network", "tiny", "--manifest", "weights", "--backend", "numpy")
    first = invoke("step", 5, *args)
    assert first.exit_code == 0, first.exception
    assert first.stderr.endswith("\nno fixture in exports/fixtures/step5 yet: making it\n")
    assert read_fixture("exports/fixtures/step5").weights.source == "weights"
    second = invoke("step", 5, "--backend", "numpy")
    assert "repeat it if that is what you want, with --weights" in str(second.exception)
    assert "with --weights weights; imagenet and synthetic need no" in str(second.exception)
    second = invoke("step", 5, "--backend", "numpy", "--weights", "weights")
    assert second.exit_code == 0
    assert "making it" not in second.stderr
    unknown_ = invoke("step", 8, *args)
    assert str(unknown_.exception).startswith("unknown step '8'")
    assert "making it" not in unknown_.stderr
    both = invoke("step", 5, "--weights", "synthetic", "--manifest", "weights")
    assert isinstance(both.exception, UsageError)


def test_every_place_of_a_set_is_checked_before_the_first_fixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("--network", "tiny", "--outdir", "set", "--reference", "numpy")
    assert invoke("fixtures", *common, "--steps", "4").exit_code == 0
    taken = invoke("fixtures", *common, "--steps", "2-7")
    assert str(taken.exception) == (
        "cannot write the fixture 'set/step4': one is there already\n"
        "  replace it with --force (overwrite=True), or choose another folder"
    )
    (tmp_path / "set" / "step7").write_text("a file")
    forced = invoke("fixtures", *common, "--steps", "2-7", "--force")
    assert "'set/step7': it is a file or a link; name a folder" in str(forced.exception)
    unknown_ = invoke("fixtures", *common, "--steps", "2-3,8")
    assert str(unknown_.exception).startswith("unknown step '8'")
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["step4", "step7"]
    again = invoke("fixtures", *common, "--steps", "2-3,3,5-6")
    assert again.exit_code == 0, again.exception
    assert [line.split()[2] for line in again.stdout.splitlines()] == ["2", "3", "5", "6"]


def test_places_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "step2").write_text("a file")
    absent = ("--weights", tmp_path / "absent.npz")
    for force in ((), ("--force",)):
        done = invoke("fixtures", "--network", "tiny", "--outdir", tmp_path, *absent, *force)
        assert "it is a file or a link; name a folder" in str(done.exception)


@pytest.mark.parametrize("outdir", ["link", "link/below"])
def test_a_link_that_leads_nowhere_is_no_folder(
    outdir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("nowhere")
    done = invoke("fixtures", "--network", "tiny", "--outdir", outdir, "--steps", "7")
    said = str(done.exception)
    assert said.startswith(f"cannot write the fixture '{outdir}/step7': '")
    assert said.endswith("link' is a link that leads nowhere; choose another place")
    Path("nowhere").mkdir()
    done = invoke("fixtures", "--network", "tiny", "--outdir", outdir, "--steps", "7")
    assert done.exit_code == 0, done.exception
    assert (Path("nowhere") / Path(outdir, "step7").relative_to("link") / "input.bin").exists()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_step_of_a_quantised_network_is_refused_at_once(
    precision: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("step", 3, "--backend", "numpy", "--precision", precision)
    said = (
        f"a step cannot run in {precision}: fixtures are of float networks, and {precision} takes "
        f"a quantised one\n  compare two backends instead: `r18 dump --precision {precision}` with "
        "each, and then `r18 diff`"
    )
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == said
    assert done.stderr == ""  # neither a backend was probed nor a fixture made
    with pytest.raises(UsageError) as caught:
        run_step(
            read_fixture(made / "step3"), NumpyBackend(), quantised_weights(), precision=precision
        )
    assert str(caught.value) == said
    assert precision not in FLOATS
    assert invoke("step", "--help").stdout.count(precision) == 0


def test_step_ranges() -> None:
    assert parse_steps("2-7") == [2, 3, 4, 5, 6, 7]
    assert parse_steps("3") == [3]
    assert parse_steps("2, 5-6") == [2, 5, 6]
    assert parse_steps("3,3") == [3]
    assert parse_steps("4,2,2,3-4,3") == [4, 2, 3]
    for text in ("", "a", "2-", "-3", "2-x", "7-2", "2,7-3"):
        with pytest.raises(UsageError, match="--steps"):
            parse_steps(text)


@pytest.mark.parametrize("tool", ["make_step_fixture", "make_e2e_fixtures"])
def test_tools(tool: str, tmp_path: Path, weights: Weights) -> None:
    export_weights(tmp_path / "weights", weights, TINY)
    args = ["--manifest", tmp_path / "weights", "--outdir", tmp_path / "out"]
    args += ["--network", "tiny"] + (["--step", "4"] if tool == "make_step_fixture" else [])
    ran = subprocess.run(
        [sys.executable, TOOLS / f"{tool}.py", *args], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    again = commands.tool(tool, *args)  # something is there already
    assert again.code == 2
    assert again.err.startswith(f"{tool}: cannot write the ")
    if tool == "make_step_fixture":
        assert read_fixture(tmp_path / "out" / "step4").network == "tiny"
    else:
        assert read_dump(tmp_path / "out").made is not None
