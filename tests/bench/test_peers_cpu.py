"""ONNX Runtime and OpenVINO as peers: correct by the oracle, bound once, with the right threads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino
import pytest
import torch

from commands import r18
from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.bench.baselines import Way
from r18.bench.baselines.exported import Exported
from r18.bench.baselines.onnxruntime import OnnxRuntime
from r18.bench.baselines.openvino import OpenVino, made_request
from r18.bench.baselines.torchvision import Torchvision
from r18.bench.contenders import contenders, peer_contender, program_contender
from r18.bench.rows import Contender
from r18.bench.timing import bench
from r18.cli.app import FOUND
from r18.cpu import model_slug
from r18.errors import (
    BackendUnavailable,
    ProgramClosed,
    ShapeError,
    UnknownName,
    UsageError,
    WeightsError,
)
from r18.graph.resnet import network, resnet18, tiny
from r18.graph.schedule import Schedule
from r18.machine import set_threads, thread_count
from r18.weights.manifest import write_manifest
from r18.weights.synthetic import synthetic_weights
from r18_oracle.network.outputs import judge_of, output_loss
from support import Array, images, output_of, random_weights

CLASSES = {"onnxruntime": OnnxRuntime, "openvino": OpenVino}
NETWORK = tiny()
X = images(NETWORK, 2)


@cache
def weights_of(name: str) -> Mapping[str, Array]:
    return synthetic_weights(network(name))


def peer_of(mode: str, schedule: Schedule = NETWORK, batch: int = 2) -> Exported:
    return CLASSES[mode]("cpu", schedule, random_weights(schedule), batch, "fp32")


@pytest.fixture(params=CLASSES)
def peer(request: pytest.FixtureRequest) -> Iterator[Exported]:
    found = peer_of(request.param)
    yield found
    found.close()


def loss(contender: Contender, schedule: Schedule, weights: Mapping[str, Array]) -> Any:
    runner = contender.make()
    try:
        return output_loss(contender, runner, schedule, weights)
    finally:
        runner.close()


# -- right -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", CLASSES)
@pytest.mark.parametrize(("name", "batch"), [("tiny", 1), ("tiny", 5), ("resnet18", 1)])
def test_logits_lose_no_more_than_a_backends_may(mode: str, name: str, batch: int) -> None:
    schedule, weights = network(name), weights_of(name)
    contender = peer_contender("cpu", schedule, weights, batch, "fp32", Way(mode))
    found = loss(contender, schedule, weights)
    assert found.ok, found.reason()
    assert found.own_rms > 0
    assert found.allowed_rms < 1e-4 * found.rms / found.relative  # the rule is not a loose one


@pytest.mark.parametrize("mode", ["eager", "openvino"])
def test_logits_in_bfloat16_lose_no_more_than_a_backends_may(mode: str) -> None:
    """bfloat16 logits lose no more than a backend's may, and more than float32's would."""
    schedule = resnet18(image_size=64, classes=12)
    weights = random_weights(schedule)
    contender = peer_contender("cpu", schedule, weights, 2, "bf16", Way(mode))
    try:
        found = loss(contender, schedule, weights)
    except BackendUnavailable as error:
        pytest.skip(f"this CPU has no bfloat16: {error}")
    assert found.ok, found.reason()
    assert found.relative > 1e-4


def test_openvino_is_asked_for_the_precision_and_must_compute_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Compiled:
        taken = "bf16"

        def get_property(self, name: str) -> Any:
            assert name == "INFERENCE_PRECISION_HINT"
            return Named(self.taken)

        def create_infer_request(self) -> str:
            return "a request"

    class Named:
        def __init__(self, name: str) -> None:
            self.to_string = lambda: name

    def compiled(core: Any, model: Any, device: str, settings: dict[str, Any]) -> Compiled:
        asked.append(settings["INFERENCE_PRECISION_HINT"])
        return Compiled()

    monkeypatch.setattr(openvino.Core, "compile_model", compiled)
    monkeypatch.setattr(openvino.Core, "read_model", lambda core, model: model)
    assert made_request(b"", "bf16") == "a request"
    assert asked == ["bf16"]
    monkeypatch.setattr(Compiled, "taken", "f32")
    with pytest.raises(BackendUnavailable, match="asked for bf16, it computes in f32 here"):
        made_request(b"", "bf16")
    assert made_request(b"") == "a request"
    assert asked == ["bf16", "bf16", "f32"]


def test_torchvision_has_channels_last_where_bfloat16_is_faster_so() -> None:
    for precision, layout in (
        ("fp32", torch.contiguous_format),
        ("bf16", torch.channels_last),
    ):
        small = resnet18(image_size=64, classes=12)
        peer = Torchvision("cpu", small, random_weights(small), precision)
        peer.load(images(small, 2))
        assert peer._images.is_contiguous(memory_format=layout)
        assert peer._module.layer1[0].conv1.weight.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("mode", CLASSES)
def test_a_softmax_behind_the_logits(mode: str) -> None:
    schedule = tiny(softmax=True)
    found = peer_of(mode, schedule)
    found.load(X)
    found.run()
    assert found.fetch().shape == (2, 10)
    assert np.allclose(found.fetch().sum(axis=1), 1)


def test_backends_and_torchvision_are_judged_by_the_same_rule() -> None:
    schedule, weights = NETWORK, weights_of("tiny")
    field = contenders({"numpy": load_backend("numpy")}, schedule, weights, peers="all")
    rows = bench(field, warmup=0, repeat=1, judge=judge_of(schedule, weights, ["fp32"]).loss)
    assert [row.backend for row in rows] == ["numpy", "onnxruntime", "openvino"]
    assert all(row.loss is not None and 0 < row.loss <= 1 for row in rows)
    small = resnet18(image_size=64, classes=12)
    eager = peer_contender("cpu", small, random_weights(small), 2, "fp64", Way())
    assert 0 < loss(eager, small, random_weights(small)).ratio <= 1


@pytest.mark.parametrize("mode", CLASSES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w | {"bn1.running_var": w["bn1.running_var"] + np.float32(1e-4)},
        lambda w: w | {"layer4.0.conv2.weight": np.roll(w["layer4.0.conv2.weight"], 1, axis=3)},
        lambda w: w | {"fc.bias": w["fc.bias"] * np.float32(1 + 1e-3)},
        lambda w: w | {"fc.bias": np.full_like(w["fc.bias"], np.nan)},
    ],
    ids=["variance", "shifted taps", "bias", "not finite"],
)
def test_a_network_of_slightly_other_weights_is_wrong(mode: str, damage: Any) -> None:
    weights = random_weights(NETWORK)
    runner = CLASSES[mode]("cpu", NETWORK, damage(weights), 1, "fp32")
    contender = peer_contender("cpu", NETWORK, weights, 1, "fp32", Way(mode))
    assert not output_loss(contender, runner, NETWORK, weights).ok
    assert judge_of(NETWORK, weights, ["fp32"]).loss(contender, runner) > 1


def test_outputs_that_cannot_be_judged() -> None:
    weights = weights_of("tiny")
    backend = load_backend("numpy")
    options = CompileOptions(batch=1)
    contender = program_contender("x", backend.probe(), backend, NETWORK, weights, options)

    class Short:
        load = run = staticmethod(lambda *images: None)
        fetch = staticmethod(lambda: np.zeros((1, 3), np.float32))

    short: Any = Short()
    with pytest.raises(ShapeError, match=r"'x' put out \(1, 3\), 'tiny' makes it \(1, 10\)"):
        output_loss(contender, short, NETWORK, weights)
    whole = peer_contender("cpu", NETWORK, weights, 1, "int8", Way())
    with pytest.raises(UnknownName, match="int8"):
        output_loss(whole, short, NETWORK, weights)
    with pytest.raises(WeightsError, match="no quantisation, and int8 computes with integers"):
        judge_of(NETWORK, weights, ["fp32", "int8"])


# -- how they run ------------------------------------------------------------------------------


def test_input_and_output_are_bound_once(peer: Exported) -> None:
    """Input and output are bound once: `load` and `fetch` use the library's own memory."""
    program = load_backend("numpy").compile(
        NETWORK, random_weights(NETWORK), CompileOptions(batch=2)
    )
    where = (peer._images.ctypes.data, peer._output.ctypes.data)
    assert all(address % 64 == 0 for address in where)
    kept = []
    for x in (X, images(NETWORK, 2, seed=1)):
        peer.load(x)
        peer.run()
        kept.append(peer.fetch())
        expected = program(x)
        assert np.abs(kept[-1] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert not np.array_equal(*kept)
    assert (peer._images.ctypes.data, peer._output.ctypes.data) == where
    assert peer.steps() == []


def test_a_run_is_timed_by_the_clock(peer: Exported) -> None:
    peer.load(X)
    ticks = iter([1.0, 1.5])
    assert peer.time(lambda: next(ticks)) == 500.0
    assert np.abs(peer.fetch()).max() > 0


def test_a_closed_peer_does_not_run(peer: Exported) -> None:
    peer.close()
    with pytest.raises(ProgramClosed, match="was used after it was closed"):
        peer.run()


def test_they_are_asked_for_our_threads_and_all_that_they_optimise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    session, compiled = onnxruntime.InferenceSession, openvino.Core.compile_model

    def spied(path: str, options: Any, **others: Any) -> Any:
        asked.append((options, others))
        return session(path, options, **others)

    def spied_too(core: Any, model: Any, device: str, settings: dict[str, Any]) -> Any:
        asked.append((device, settings))
        return compiled(core, model, device, settings)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spied)
    monkeypatch.setattr(openvino.Core, "compile_model", spied_too)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for mode in CLASSES:
        peer_of(mode).close()
    (options, others), (device, settings) = asked
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert (options.intra_op_num_threads, options.graph_optimization_level) == (1, level)
    assert others == {"providers": ["CPUExecutionProvider"]}
    assert device == "CPU"
    assert settings == {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": 1,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    for mode, words in {"onnxruntime": "1 threads, ONNX", "openvino": "1 threads, Open"}.items():
        about = peer_contender("cpu", NETWORK, {}, 1, "fp32", Way(mode))
        assert words in about.device.name


@pytest.mark.parametrize("mode", CLASSES)
@pytest.mark.parametrize(
    ("kind", "precision", "cause"),
    [
        ("cuda", "fp32", "a peer on the CPU, not on cuda"),
        ("cpu", "fp16", "no fp16 on cpu"),
        ("cpu", "fp64", "no fp64 on cpu"),
    ],
)
def test_what_they_are_no_peers_in(mode: str, kind: str, precision: str, cause: str) -> None:
    contender = peer_contender(kind, NETWORK, {}, 1, precision, Way(mode))
    assert not contender.required
    with pytest.raises(BackendUnavailable, match=cause):
        contender.make()


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "openvino"])
def test_a_missing_package_is_named_with_its_remedy(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None  # importing it raises ImportError
from r18.errors import BackendUnavailable
from r18.bench.baselines import Way, device_words, made
from r18.graph.resnet import tiny
from r18.weights.synthetic import synthetic_weights
weights = synthetic_weights(tiny())
for mode in ("onnxruntime", "openvino"):
    try:
        made(Way(mode), "cpu", tiny(), weights, 1, "fp32").close()
        print(mode, "runs")
    except BackendUnavailable as error:
        assert device_words(Way(mode), "cpu") == "cpu"
        print(mode, error.cause.split(":")[0], error.remedy)
"""
    without = "it does not import pip install 'r18[peers]'"
    assert output_of(code).splitlines() == [
        f"{mode} {without if missing in ('onnx', mode) else 'runs'}" for mode in CLASSES
    ]


# -- threads -----------------------------------------------------------------------------------


def test_the_count_is_the_variables_else_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.machine.cpus", lambda: 7)
    for said, expected in {"3": 3, "3,2": 3, "": 7, "0": 7, "many": 7}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert thread_count() == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_count() == 7
    with pytest.raises(UsageError, match="at least 1 thread, got 0"):
        set_threads(0)


COUNTS = """
from r18.machine import set_threads, thread_count
{before}
set_threads(1)
import os, numba, torch, r18_numpy.threads
print(thread_count(), r18_numpy.threads.thread_count(), torch.get_num_threads(),
      numba.get_num_threads(), os.environ.get("NUMBA_NUM_THREADS"))
"""


@pytest.mark.parametrize(
    ("before", "variable"), [("", "1"), ("import numba, torch, r18_numpy.threads", "2")]
)
def test_libraries_are_told_before_and_after_they_are_loaded(before: str, variable: str) -> None:
    env = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    said = output_of(COUNTS.format(before=before), env=env)
    assert said == f"1 1 1 1 {variable}"


def test_numba_cannot_be_given_more_than_it_was_loaded_with() -> None:
    code = """
import numba
from r18.errors import UsageError
from r18.machine import set_threads, thread_count
try:
    set_threads(3)
except UsageError as error:
    print(str(error).replace(chr(10), " "), thread_count())
"""
    said = output_of(code, env={"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"})
    assert said == (
        "Numba was loaded with 2 threads and cannot have 3   "
        "set NUMBA_NUM_THREADS=3 before Python starts 2"
    )


# -- the command -------------------------------------------------------------------------------

BENCH = ("bench", "--backends", "numpy", "--network", "tiny", "--batch", 1, "--repeat", 1)


def test_the_command_times_and_judges_all_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr("r18.cli.bench.set_threads", counts.append)
    done = r18(
        *BENCH, "--peers", "all", "--threads", 1, "--check", "--record", "--records", tmp_path
    )
    assert done.code == 0, done.err
    assert counts == [1]
    assert "outputs of 3 rows judged against float64: at most 0." in done.out
    (group,) = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text())["groups"].values()
    assert [row["backend"] for row in group["rows"]] == ["numpy", "onnxruntime", "openvino"]
    assert group["rows"][0]["best_peer"] in CLASSES
    assert all(0 < row["loss"] <= 1 for row in group["rows"])
    assert all(row["ratio"] is None for row in group["rows"])  # torchvision has no tiny
    assert group["machine"]["threads"] == thread_count()
    assert {"onnx", "onnxruntime", "openvino"} <= group["environment"]["packages"].keys()
    assert not any("graph" in left["contender"] for left in group["skipped"])


def test_what_suits_no_device_is_left_out_with_a_reason() -> None:
    done = r18(*BENCH, "--peers", "graph")
    assert done.code == 0
    assert "left out: torchvision graph, fp32, batch 1: 'graph' is for CUDA graphs" in done.err


@pytest.mark.parametrize("precision", ["fp8", "fp32,fp8"])
def test_fp8_has_no_peers_on_a_cpu(tmp_path: Path, precision: str) -> None:
    """PyTorch would run in float32 there, so not even as the twin of the row of fp32."""
    write_manifest(tmp_path / "w", quantised_weights(), tiny())
    given = ("--weights", tmp_path / "w", "--precision", precision, "--json")
    done = r18(*BENCH, *given, "--peers", "eager,onnxruntime,openvino")
    assert done.code == 0, done.err
    for name in ("torchvision eager", "onnxruntime", "openvino"):
        assert f"left out: {name}, fp8, batch 1: it has no fp8 on cpu" in done.err
    rows = [row for row in json.loads(done.out)["rows"] if row["precision"] == "fp8"]
    assert [row["backend"] for row in rows] == ["numpy"]
    assert rows[0]["error_ratio"] is None


def test_a_wrong_output_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenVino, "fetch", lambda self: self._output + np.float32(1e-3))
    done = r18(*BENCH, "--peers", "all", "--check", "--record", "--records", tmp_path, "--json")
    assert done.code == FOUND
    assert "left out: openvino, fp32, batch 1: its output is wrong: it loses" in done.err
    data = json.loads(done.out)
    assert [row["backend"] for row in data["rows"]] == ["numpy", "onnxruntime"]
    assert {row["best_peer"] for row in data["rows"]} == {"onnxruntime"}
    (group,) = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text())["groups"].values()
    assert [row["backend"] for row in group["rows"]] == ["numpy", "onnxruntime"]
    assert any("its output is wrong" in left["reason"] for left in group["skipped"])


def test_nothing_is_judged_unless_asked() -> None:
    done = r18(*BENCH, "--json")
    assert done.code == 0
    assert [row["loss"] for row in json.loads(done.out)["rows"]] == [None]
