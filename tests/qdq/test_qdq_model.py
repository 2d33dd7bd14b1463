"""Quantised networks as QDQ models, and the values inside ONNX Runtime and OpenVINO."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from commands import r18
from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.bench.baselines.integers import peer_integers
from r18.bench.baselines.onnxruntime import made_session
from r18.cpu import cpu
from r18.errors import UsageError, WeightsError
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization
from r18.graph.quantize import quantized
from r18.graph.resnet import tiny
from r18.qdq import qdq_model, write_qdq
from r18.records import load
from r18.records.kinds import Explain
from r18.report.tables import rendered
from r18.weights.manifest import write_manifest
from r18.weights.precisions import in_precision, quantization_of
from r18.weights.synthetic import synthetic_weights
from r18_oracle.network.reasons import explain_values
from r18_oracle.ops.integers.arithmetics import (
    AGAIN,
    PAIRS,
    TIE,
    UNEXPLAINED,
    explain_quotient,
    quotients,
)
from r18_oracle.ops.integers.pairs import CHANNELS, WINDOW
from support import images

WEIGHTS = quantised_weights()
FOUND = quantization_of(WEIGHTS)
INTEGERS = quantized(fuse(tiny(), "all"))
X = images(tiny(), 2)
PEERS = [("onnxruntime", True), ("onnxruntime", False), ("openvino", True)]
HAS = {*cpu().instructions}
SATURATES = "AVX2" in HAS and not HAS & {"AVX-VNNI", "AVX-512 VNNI"}
"""Whether libraries add products of integers in saturating pairs on this CPU."""


def of_numpy(weights: Any = WEIGHTS, x: Any = X) -> dict[str, Any]:
    """Every value by the numpy backend."""
    values = tuple(step.output for step in INTEGERS.steps)
    options = CompileOptions(precision="int8", batch=2, taps=values)
    program = load_backend("numpy").compile(*in_precision(tiny(), weights, options), options)
    program(x)
    return {value: program.fetch(value) for value in values} | {"image": x}


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread on CPUs without VNNI: on several, OpenVINO 2026.4.1 computes a pixel of the tiny
    network's first strided 1×1 convolution (8 channels) now and then from another pixel: the first
    pixel of a thread, from what the thread before it read last."""
    if SATURATES:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qdq") / "w"
    write_manifest(made, WEIGHTS, tiny())
    return made


# -- the model ---------------------------------------------------------------------------------


def test_a_model_says_what_the_schedule_says() -> None:
    taps = tuple(step.output for step in INTEGERS.steps[:-1])
    model = qdq_model(tiny(), FOUND, batch=2, taps=taps)
    assert (model.ir_version, model.opset_import[0].version) == (8, 17)
    names = [one.name for one in model.graph.output]
    assert names == ["fc", *taps]
    session = made_session(model.SerializeToString(), optimised=False)  # each node as it stands
    got = dict(zip(names, session.run(None, {"image": X}), strict=True))
    ours = of_numpy()
    for name in taps:
        assert got[name].dtype == np.dtype(INTEGERS.storage[name])
        apart = np.abs(got[name].astype(int) - ours[name].astype(int))
        assert apart.max() <= 1, name
        assert np.mean(apart != 0) < 0.01, name
    np.testing.assert_allclose(got["fc"], ours["fc"], atol=0.05)


@pytest.mark.parametrize(
    ("bits", "unpack", "opset", "kind"),
    [
        (4, False, 21, TensorProto.INT4),
        (4, True, 17, TensorProto.INT8),
        (2, False, 17, TensorProto.INT8),
    ],
)
def test_narrow_weights(bits: int, unpack: bool, opset: int, kind: int) -> None:
    weights = quantised_weights(bits)
    model = qdq_model(tiny(), quantization_of(weights), batch=2, unpack=unpack)
    assert model.opset_import[0].version == opset
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    stored = held["layer2.0.conv1.weight"]
    assert stored.data_type == kind
    expected = quantization_of(weights).weights["layer2.0.conv1"].integers
    np.testing.assert_array_equal(numpy_helper.to_array(stored).astype(np.int8), expected)
    (logits,) = made_session(model.SerializeToString()).run(None, {"image": X})
    np.testing.assert_allclose(logits, of_numpy(weights)["fc"], atol=0.1)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch of at least 1, got 0"):
        qdq_model(tiny(), FOUND, batch=0)
    with pytest.raises(WeightsError, match="hold no quantisation"):
        write_qdq(tmp_path / "m.onnx", tiny(), synthetic_weights(tiny()))
    write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS)
    with pytest.raises(WeightsError, match="exists; --force replaces a file"):
        write_qdq(tmp_path / "m.onnx", tiny(), WEIGHTS)


@pytest.mark.parametrize("held", [b"\\documentclass{book}", b"mine", b"\x08\x08", b"PK\x03\x04"])
def test_a_file_that_is_no_model_is_never_replaced(tmp_path: Path, held: bytes) -> None:
    path = tmp_path / "thesis.tex"
    path.write_bytes(held)
    with pytest.raises(WeightsError) as refused:
        write_qdq(path, tiny(), WEIGHTS, overwrite=True)
    assert str(refused.value) == f"'{path}' is no ONNX model; name another file, or delete it"
    assert path.read_bytes() == held
    path.write_bytes(b"")
    for _ in ("an empty file", "an earlier export"):
        write_qdq(path, tiny(), WEIGHTS, overwrite=True)
    assert onnx.load(path).producer_name == "r18"


def test_the_command_exports_a_model(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    common = ("export", "--network", "tiny", "--weights", folder, "--out")
    done = r18(*common, path, "--format", "qdq", "--batch", 2)
    assert done.code == 0, done.err
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    done = r18(*common, tmp_path / "bin", "--batch", 2)
    assert (done.code, "are for --format qdq, not bin" in done.err) == (2, True)


# -- the peers ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(("mode", "optimised"), PEERS)
def test_every_element_inside_a_peer_is_explained(mode: str, optimised: bool) -> None:
    theirs = peer_integers(mode, tiny(), FOUND, X, optimised=optimised) | {"image": X}
    found = explain_values(tiny(), FOUND, of_numpy(), theirs)
    assert found.unexplained == 0
    assert not found.total(0), "numpy computes as specified"
    for row in found.rows:
        assert row.differ <= row.inherited + sum(row.sides[1].classes.values())
    assert bool(found.total(1)[PAIRS]) == (SATURATES and optimised)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("scale", [0.0187, 0.02, 0.020683466])
def test_integers_of_openvino_are_known_and_explained(scale: float) -> None:
    """OpenVINO adds 128 s · (255 / (127 s + 128 s)) before it rounds. In float32 that is not 128
    for the first and the last scale. Numbers are then off by up to 4.2 roundings of 128 scales,
    zeros by 1.7."""
    unit = np.float32(scale)
    found = replace(FOUND, scales=FOUND.scales | {"image": unit})
    ties = np.random.default_rng(3).integers(-128, 127, X.shape) + 0.5
    x = np.nextafter((ties * unit).astype(np.float32), np.float32(9))
    theirs = peer_integers("openvino", tiny(), found, x)["image.int8"]
    assert np.abs(theirs - np.clip(x / unit, -128, 127)).max() <= 0.5 + 2**-13
    wrong, reasons = explain_quotient(x, unit, "int8", theirs.astype(np.float64))
    assert wrong.any()
    assert (reasons.unexplained, reasons.arithmetic != "") == (0, True)


def test_an_image_may_be_quantised_again_where_it_is_read() -> None:
    """An image may be quantised again in the convolution: the output shows a tie rounded away from
    zero, the convolution does not."""
    quantize, conv1 = INTEGERS.steps[0], INTEGERS.steps[1]
    scale = np.float32(FOUND.scales["image"])
    x = X.copy()
    x[0, 1, 6, 9] = np.float32(2.5) * scale
    assert np.float32(x[0, 1, 6, 9]) / scale == 2.5
    values = of_numpy(x=x)
    shown = values[quantize.output].copy()
    assert shown[0, 1, 6, 9] == 2
    shown[0, 1, 6, 9] = 3
    dump = values | {quantize.output: shown}
    found = explain_values(tiny(), FOUND, dump, dump)
    rows = {row.step: row.sides[0] for row in found.rows}
    assert found.unexplained == 0
    assert dict(rows[quantize.name].classes) == {TIE: 1}
    assert set(rows[conv1.name].classes) == {AGAIN}
    assert rows[conv1.name].arithmetic == AGAIN
    wrong = values[conv1.output].copy()
    wrong[1, 0, 3, 3] += 1
    dump |= {conv1.output: wrong}
    (row,) = (r for r in explain_values(tiny(), FOUND, dump, dump).rows if r.step == conv1.name)
    assert row.sides[0].unexplained == 1


def test_an_image_may_be_quantised_otherwise_where_it_is_read() -> None:
    """An image may be shown as specified, while the convolution reads a tie rounded away from
    zero."""
    conv1 = INTEGERS.steps[1]
    scale = np.float32(FOUND.scales["image"])
    x = X.copy()
    x[0, 1, 6, 9] = np.float32(2.5) * scale
    assert np.float32(x[0, 1, 6, 9]) / scale == 2.5
    shown = of_numpy(x=x)
    above = x.copy()
    above[0, 1, 6, 9] = np.float32(2.6) * scale
    dump = shown | {conv1.output: of_numpy(x=above)[conv1.output]}
    (row,) = (r for r in explain_values(tiny(), FOUND, dump, dump).rows if r.step == conv1.name)
    assert set(row.sides[0].classes) == {AGAIN}
    assert row.sides[0].arithmetic == f"{AGAIN} (ties: away from zero)"


def test_an_image_may_be_counted_from_the_least_integer_where_it_is_read() -> None:
    """The same where the convolution reads an image that is added to 128 before it is rounded."""
    conv1 = INTEGERS.steps[1]
    scale = np.float32(FOUND.scales["image"])
    ties = np.random.default_rng(3).integers(-128, 127, X.shape) + 0.5
    x = np.nextafter((ties * scale).astype(np.float32), np.float32(9))
    way, read = next(found for found in quotients(x, scale, "int8") if found[0].bias == "scaled")
    behind = of_numpy(x=(read * scale).astype(np.float32))[conv1.output]
    dump = of_numpy(x=x) | {conv1.output: behind}
    (row,) = (r for r in explain_values(tiny(), FOUND, dump, dump).rows if r.step == conv1.name)
    assert row.sides[0].classes[AGAIN] > 500
    assert (row.sides[0].unexplained, row.sides[0].arithmetic) == (0, f"{AGAIN} ({way.name})")


def heavy() -> Quantization:
    """Weights whose products saturate in pairs in every layer, with outputs of middling size."""
    rng = np.random.default_rng(1)
    found = {}
    for name, weight in FOUND.weights.items():
        shape = weight.integers.shape
        drawn = rng.integers(60, 128, shape) * rng.choice([-1, 1], shape)
        scale = np.full_like(weight.scale, 0.1 / np.prod(shape[1:]) ** 0.5)
        found[name] = replace(weight, integers=drawn.astype(np.int8), scale=scale)
    return replace(FOUND, weights=found)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("mode", ["onnxruntime", "openvino"])
def test_pairs_of_products_saturate_where_a_cpu_has_no_vnni(mode: str) -> None:
    """Pairs of products saturate on CPUs without VNNI, but not in ONNX Runtime's residuals and
    logits, which are float32."""
    weights = heavy()
    values = peer_integers(mode, tiny(), weights, X) | {"image": X}
    found = explain_values(tiny(), weights, values, values)
    short = {row.step for row in found.rows if PAIRS in " ".join(row.sides[0].classes)}
    sums = {step.name for step in INTEGERS.steps if step.name in weights.weights}
    in_float = {step for step in sums if step == "fc" or step.endswith(".conv2")}
    if SATURATES:
        assert found.unexplained == 0
        assert short == (sums - in_float if mode == "onnxruntime" else sums)
        (first,) = (row.sides[0] for row in found.rows if row.step == "conv1")
        assert first.arithmetic == (WINDOW if mode == "onnxruntime" else CHANNELS)
    else:
        assert not short


@pytest.mark.usefixtures("steady")
def test_bench_times_and_judges_peers_in_int8(folder: Path) -> None:
    common = ("bench", "--backends", "numpy", "--network", "tiny", "--weights", folder)
    done = r18(
        *common,
        *("--precision", "int8", "--batch", 2, "--repeat", 1, "--check", "--json"),
        *("--peers", "onnxruntime,openvino"),
    )
    result = json.loads(done.out)
    rows = {row["backend"]: row for row in result["rows"]}
    if SATURATES:  # they are wrong, and the reason says by what
        assert done.code == 1, done.err
        assert set(rows) == {"numpy"}
        skipped = {one["contender"]: one["reason"] for one in result["skipped"]}
        for peer in ("onnxruntime", "openvino"):
            said = skipped[f"{peer}, int8, batch 2"]
            assert "pairs of products saturate at 16 bits, as on CPUs without VNNI" in said
            assert "no known arithmetic" not in said
    else:
        assert done.code == 0, done.err
        assert set(rows) == {"numpy", "onnxruntime", "openvino"}
    assert {row["precision"] for row in rows.values()} == {"int8"}
    assert all(row["loss"] == 0 for row in rows.values())


def test_dumps_of_a_peer_are_explained_by_the_command(folder: Path, tmp_path: Path) -> None:
    common = ("--network", "tiny", "--weights", folder, "--precision", "int8", "--batch", 2)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    done = r18("dump", "--backend", "numpy", *common, "--checkpoints", "all", "--out", ours)
    assert done.code == 0, done.err
    done = r18("dump", "--peer", "onnxruntime", *common, "--unoptimised", "--out", theirs)
    assert done.code == 0, done.err
    diff = ("diff", ours, theirs, "--explain", "--weights", folder)
    done = r18(*diff)
    assert done.code == 0, done.err
    assert done.out.strip().endswith(f"0 {UNEXPLAINED}")
    _recorded(diff, done.out, ours, theirs, tmp_path / "records")
    # One unit in one element, which no arithmetic gives.
    manifest = json.loads((theirs / "manifest.json").read_text())
    (entry,) = (one for one in manifest["checkpoints"] if one["name"] == "layer3.0.relu")
    path = theirs / entry["path"]
    values = np.frombuffer(path.read_bytes(), np.uint8).copy()
    values[np.flatnonzero((values > 9) & (values < 200))[0]] += 3
    path.write_bytes(values.tobytes())
    from r18_oracle.dumps.files import sha256_of

    entry["sha256"] = sha256_of(values, entry["dtype"])
    (theirs / "manifest.json").write_text(json.dumps(manifest))
    done = r18(*diff, "--json")
    assert done.code == 1
    wrong = {
        row["step"]: count
        for row in json.loads(done.out)["steps"]
        if (count := row["sides"][1]["classes"].get(UNEXPLAINED))
    }
    assert wrong.pop("layer3.0.conv1") == 1
    assert wrong.keys() <= {"layer3.0.conv2"}  # which did not read what the dump now holds


def _recorded(diff: tuple[Any, ...], said: str, ours: Path, theirs: Path, folder: Path) -> None:
    """Check that the counts are recorded and make the table, unless a dump is no specification."""
    kept = ("--record", "--records", folder)
    done = r18(*diff, *kept)
    assert (done.code, done.out) == (0, said)
    (entry,) = load(folder / "explain-cpu.json", Explain).entries.values()
    assert (entry.expected, entry.got) == ("numpy", "onnxruntime, unoptimised")
    assert entry.unexplained == 0
    assert [step.step for step in entry.steps if step.logits] == ["fc"]
    counts: Counter[str] = Counter()
    for step in entry.steps:
        counts.update(step.classes)
    total = sum(step.elements for step in entry.steps)
    block = (
        "<!-- table: explain device=cpu network=tiny peers=onnxruntime_unoptimised -->\n"
        "<!-- /table -->\n"
    )
    lines = rendered(block, folder).splitlines()
    assert f"| elements | {total:,} |" in lines
    own = sum(sum(step.classes.values()) for step in entry.steps if not step.logits)
    assert f"| integers that a step computes differently | {own} |" in lines
    assert "| **unexplained** | 0 |" in lines
    for kind, count in counts.items():
        assert f"{count:,} {kind}" in said
    with pytest.raises(UsageError, match="the record holds no 'tiny/numpy/openvino'"):
        rendered(block.replace("onnxruntime_unoptimised", "openvino"), folder)
    turned = r18("diff", theirs, ours, *diff[3:], *kept)
    assert turned.code == 2
    assert "is not as specified" in turned.err
    assert "--record is for --explain" in r18("diff", ours, theirs, "--record").err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--peer", "openvino"), "give it with --precision int8"),
        (("--unoptimised",), "--unoptimised is for --peer"),
        (("--peer", "eager", "--precision", "int8"), "peer with integers"),
    ],
)
def test_wrong_requests_for_dumps(
    options: tuple[str, ...], words: str, folder: Path, tmp_path: Path
) -> None:
    common = ("--network", "tiny", "--weights", folder, "--out", tmp_path / "d")
    done = r18("dump", *common, *options)
    assert done.code == 2
    assert words in done.err


def test_explaining_refuses_other_options_and_dumps(folder: Path, tmp_path: Path) -> None:
    common = ("--network", "tiny", "--weights", folder, "--backend", "numpy")
    for name, precision in (("a", "int8"), ("b", "fp32")):
        done = r18("dump", *common, "--precision", precision, "--out", tmp_path / name)
        assert done.code == 0, done.err
    a, b = tmp_path / "a", tmp_path / "b"
    asked = ("--explain", "--weights", folder)
    assert "--atol cannot be given with --explain" in r18("diff", a, a, *asked, "--atol", 1).err
    assert "write both dumps with --checkpoints all" in r18("diff", a, a, *asked).err
    assert "is not in int8: only integers are explained" in r18("diff", b, b, *asked).err


# -- onnxruntime #32132 ------------------------------------------------------------------------


def test_fusing_moves_ties_in_onnx_runtime() -> None:
    """github.com/microsoft/onnxruntime/issues/32132: it occurs in versions 1.29 and 1.32.

    Sums of multiples of 0.1 · 0.2 over 0.16 are ties. QLinearConv, fused, rounds them as specified
    here; the separate nodes add products in float32, which then are no ties.
    """
    rng = np.random.default_rng(0)
    weight = rng.integers(-3, 4, (8, 4)).astype(np.int8)
    q = rng.integers(0, 60, (1, 4, 16, 16))
    sx, sw, sy = np.float32(0.1), np.float32(0.2), np.float32(0.16)
    held = {
        "sx": np.array(sx),
        "sy": np.array(sy),
        "zero": np.zeros((), np.uint8),
        "w": weight.reshape(8, 4, 1, 1),
        "sw": np.full(8, sw),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "sx", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "sw"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "sy", "zero"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "ties",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, q.shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, (1, 8, 16, 16))],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, ir_version=8, opset_imports=opset).SerializeToString()
    feed = {"x": q.astype(np.float32) * sx}
    fused, simulated = (
        made_session(model, optimised=optimised).run(None, feed)[0].astype(int)
        for optimised in (True, False)
    )
    sums = np.einsum("oc,nchw->nohw", weight.astype(int), q)
    numbers = sums.astype(np.float32) * (sx * sw / sy)
    np.testing.assert_array_equal(fused, np.clip(np.rint(numbers), 0, 255))
    moved = fused != simulated
    assert moved.sum() > 10
    assert np.abs(fused - simulated).max() == 1
    exact = sums[moved] * 0.1 * 0.2 / 0.16
    np.testing.assert_allclose(np.abs(exact - np.floor(exact)), 0.5, atol=1e-6)
