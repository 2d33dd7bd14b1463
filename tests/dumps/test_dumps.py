"""Metrics, dumps, and the diff of two dumps: right, wrong, damaged, or from another program."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from typer.testing import CliRunner, Result

import r18_oracle.dumps.dumps as dumps_module
from commands import tool
from pooling_backends import Pooling
from r18.backend import Array, CompileOptions, Kernel, Program
from r18.backend.host import HostKernel
from r18.errors import (
    DumpError,
    NoKernel,
    ShapeError,
    UnknownName,
    UsageError,
)
from r18.graph.ops import Conv2d
from r18.graph.passes import fuse
from r18.graph.resnet import network
from r18.graph.schedule import CANONICAL, checkpoint_names
from r18.weights import Weights, load_weights
from r18_numpy import Backend as NumpyBackend
from r18_oracle.dumps.dumps import diff_dumps, read_dump, write_dump
from r18_oracle.dumps.files import TensorFile
from r18_oracle.judge.compare import compare, short
from r18_oracle.network.images import Images, chosen, raw_file, seeded

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TINY = network("tiny")
LAYER3_CHANNELS = 32


class WrongLayer3(NumpyBackend):
    """NumPy's backend with a convolution that is 1 % off if it makes layer3's channels."""

    name = "wrong-layer3"

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            replace(k, run=_off_in_layer3(k)) if isinstance(k, HostKernel) and k.op is Conv2d else k
            for k in super().kernels()
        )


def _off_in_layer3(kernel: HostKernel) -> Any:
    def run(op: Conv2d, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
        kernel.run(op, inputs, weights, out, workspace)
        if op.out_channels == LAYER3_CHANNELS:
            out *= 1.01

    return run


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_weights("synthetic", TINY)


@pytest.fixture(scope="module")
def dumped(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of the canonical checkpoints by NumPy; tests copy it before they damage it."""
    folder = tmp_path_factory.mktemp("dumps") / "numpy"
    write_dump(folder, NumpyBackend(), TINY, weights, seeded(TINY, 2))
    return folder


@pytest.fixture
def copy(dumped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dumped, tmp_path / "copy"))


def invoke(command: str, *args: object) -> Result:
    """Run one subcommand; errors of `R18Error` stay in `result.exception`, as `main` gets them."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(getattr(importlib.import_module(f"r18_oracle.cli.{command}"), command))
    return CliRunner().invoke(app, [str(arg) for arg in args])


def raw_copy(dump: Path, folder: Path) -> Path:
    """The folder that another program would write: only the checkpoints."""
    folder.mkdir()
    for file in dump.glob("*.bin"):
        if file.name != "input.bin":
            shutil.copy(file, folder)
    return folder


def edit(folder: Path, **fields: Any) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(data | fields))


def overwrite(folder: Path, name: str, change: Any, *, hashed: bool = True) -> None:
    """Change a checkpoint's values; with `hashed`, make the manifest agree."""
    entry = read_dump(folder).checkpoint(name)
    values = np.fromfile(folder / entry.path, "<f4").reshape(entry.shape)
    change(values)
    (folder / entry.path).unlink()
    written = dumps_module.write_tensor(folder, name, values)
    if hashed:
        data = json.loads((folder / "manifest.json").read_text())
        data["checkpoints"] = [
            written.to_json() if e["name"] == name else e for e in data["checkpoints"]
        ]
        (folder / "manifest.json").write_text(json.dumps(data))


# -- metrics -----------------------------------------------------------------------------------


FLOATS = st.floats(-1e300, 1e300)


@given(
    arrays.arrays(np.float64, (2, 3, 2), elements=FLOATS),
    arrays.arrays(np.float64, (2, 3, 2), elements=FLOATS),
)
def test_metrics_are_those_of_numpy(got: Array, expected: Array) -> None:
    found = compare(got, expected, 1.0)
    difference = np.abs(got - expected)
    assert found.max_abs == difference.max()
    assert difference[found.worst] == found.max_abs
    assert (found.got, found.expected) == (got[found.worst], expected[found.worst])
    assert math.isclose(found.mean_abs, difference.mean(), rel_tol=1e-12)
    assert found.ok is bool(difference.max() <= 1.0)
    assert -1 <= found.cosine <= 1
    assert found.nonfinite == 0


def test_metrics_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18_oracle.judge.compare.BLOCK", 7)
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((3, 5, 4)).astype(np.float32)
    got = expected.copy()
    got[2, 1, 3] += 5
    found = compare(got, expected, 1e-4)
    assert found.worst == (2, 1, 3)
    assert math.isclose(found.max_abs, 5, rel_tol=1e-6)
    a, b = got.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    assert math.isclose(found.cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel_tol=1e-14)
    same = compare(expected, expected, 0.0)
    assert same.ok
    assert math.isclose(same.cosine, 1, rel_tol=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["got", "expected", "both"])
def test_a_value_that_is_not_finite_is_always_bad(value: float, sides: str) -> None:
    got, expected = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)
    for side, array in (("got", got), ("expected", expected)):
        if sides in (side, "both"):
            array[1, 0] = value
    found = compare(got, expected, 1e30, scaled=True)
    assert not found.ok
    assert (found.nonfinite, found.worst, found.max_abs) == (1, (1, 0), math.inf)
    assert math.isnan(found.cosine)
    assert found.reason().startswith("1 value is not finite, the first at (1, 0): got ")
    text = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(text)["max_abs"] == "inf"


def test_zero_vectors_have_a_cosine() -> None:
    zero, one = np.zeros(3), np.ones(3)
    assert compare(zero, zero, 0).cosine == 1.0
    assert compare(zero, one, 0).cosine == 0.0


def test_scaled_tolerance_and_its_text() -> None:
    expected = np.array([100.0, 1.0])
    found = compare(expected + np.array([0, 5e-3]), expected, 1e-4, scaled=True)
    assert found.ok
    assert found.tolerance == 1e-4 * 100
    bad = compare(expected + np.array([0, 0.12]), expected, 1e-4)
    assert bad.reason() == "max_abs 0.12 > atol 1e-4 at (1,): got 1.12, expected 1"
    assert [short(x) for x in (1e-4, 2.5e-4, 1e-9, 0.1, 0, 12)] == [
        "1e-4",
        "2.5e-4",
        "1e-9",
        "0.1",
        "0",
        "12",
    ]


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ShapeError, match=r"cannot compare shape \(2,\) with the expected \(3,\)"):
        compare(np.ones(2), np.ones(3), 1)
    with pytest.raises(ShapeError, match="nothing to compare"):
        compare(np.ones((0, 2)), np.ones((0, 2)), 1)
    for atol in (-1, math.nan, math.inf):
        with pytest.raises(UsageError, match="atol must be finite and at least 0"):
            compare(np.ones(2), np.ones(2), atol)


# -- images ------------------------------------------------------------------------------------


def test_seeded_images_are_the_same_bits_everywhere() -> None:
    images = seeded(TINY, 2, seed=3)
    assert images.values.dtype == np.float32
    assert images.values.shape == (2, 3, 32, 32)
    assert dumps_module.sha256_of(images.values)[:16] == "edbb14c84eb6855a"
    assert np.array_equal(seeded(TINY, 1, seed=3).values, images.values[:1])
    assert not np.array_equal(images.values[0], images.values[1])
    assert abs(float(images.values.mean())) < 0.05
    assert abs(float(images.values.std()) - 1) < 0.05


def test_images_from_files(tmp_path: Path, dumped: Path, weights: Weights) -> None:
    again = raw_file(dumped / "input.bin", TINY.input_shape)
    assert np.array_equal(again.values, seeded(TINY, 2).values)
    (tmp_path / "short.bin").write_bytes(b"\0" * 100)
    with pytest.raises(UsageError, match="has 100 bytes, expected a multiple of 12288"):
        raw_file(tmp_path / "short.bin", TINY.input_shape)
    with pytest.raises(UsageError, match="cannot be read"):
        raw_file(tmp_path / "none.bin", TINY.input_shape)
    with pytest.raises(UsageError, match="--image and --input are two sources"):
        chosen(TINY, weights.preprocess, files=["a.png"], raw="b.bin")
    with pytest.raises(UsageError, match=r"--batch 3 does not fit the 2 samples of 'input\.bin'"):
        chosen(TINY, weights.preprocess, raw=dumped / "input.bin", batch=3)
    seeded(TINY, 1).values.tofile(tmp_path / "one.bin")
    with pytest.raises(UsageError, match=r"--batch 2 does not fit the 1 sample of 'one\.bin'"):
        chosen(TINY, weights.preprocess, raw=tmp_path / "one.bin", batch=2)
    with pytest.raises(UsageError, match="1 values that are NaN or infinite"):
        Images(np.array([[math.nan]], np.float32), "test")


# -- writing and reading -----------------------------------------------------------------------


def test_round_trip(dumped: Path, weights: Weights) -> None:
    dump = read_dump(dumped)
    assert [file.name for file in dump.checkpoints] == list(CANONICAL)
    assert dump.made is not None
    assert (dump.made.backend, dump.made.precision, dump.made.fusion) == ("numpy", "fp32", "all")
    assert dump.made.weights.sha256 == weights.sha256
    assert dump.made.kernels["conv1"] == "numpy/conv2d/im2col/fp32"
    assert dump.checkpoint("layer2").shape == (2, 16, 4, 4)
    program = NumpyBackend().compile(TINY, weights, CompileOptions(2, taps=CANONICAL))
    logits = program(seeded(TINY, 2).values)
    assert np.array_equal(dump.read("logits"), logits)
    for name in CANONICAL:
        assert np.array_equal(dump.read(name), program.fetch(name))
    raw = np.fromfile(dumped / "layer2.bin", "<f4").reshape(2, 16, 4, 4)
    assert np.array_equal(raw, program.fetch("layer2"))
    with pytest.raises(UnknownName, match="did you mean 'layer4'"):
        dump.read("layer5")


def test_all_checkpoints_are_torchvisions_module_paths(weights: Weights, tmp_path: Path) -> None:
    names = checkpoint_names(TINY, "all")
    assert {"conv1", "bn1", "relu", "layer2.0.conv1", "layer2.0", "layer2", "fc"} <= set(names)
    assert "image" not in names
    assert names.index("conv1") < names.index("stem_pool") < names.index("layer2.0.downsample.0")
    options = CompileOptions(fusion="none", precision="fp64")
    folder = tmp_path / "all"
    dump = write_dump(
        folder, NumpyBackend(), TINY, weights, seeded(TINY), checkpoints="all", options=options
    )
    assert (folder / "layer2.0.conv1.bin").stat().st_size == 16 * 4 * 4 * 8
    assert dump.read("layer2").dtype == np.float64
    assert diff_dumps(folder, folder).ok


def test_checkpoints_by_name(weights: Weights) -> None:
    assert checkpoint_names(TINY, "logits, layer2.0.conv1,logits") == ["layer2.0.conv1", "logits"]
    with pytest.raises(UnknownName, match="unknown checkpoint 'layer9', did you mean"):
        checkpoint_names(TINY, ["layer9"])
    with pytest.raises(UsageError, match="no checkpoints of 'tiny' are asked for"):
        checkpoint_names(TINY, ",")


def test_nothing_is_half_written(weights: Weights, tmp_path: Path) -> None:
    def stop(file: TensorFile) -> None:
        if file.name == "layer2":
            raise RuntimeError("pulled the plug")

    args = (NumpyBackend(), TINY, weights, seeded(TINY))
    with pytest.raises(RuntimeError, match="pulled the plug"):
        write_dump(tmp_path / "new", *args, progress=stop)
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "old"
    write_dump(folder, *args)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RuntimeError, match="pulled the plug"):
        write_dump(folder, *args, progress=stop, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_only_a_dump_is_replaced(weights: Weights, copy: Path, tmp_path: Path) -> None:
    args = (NumpyBackend(), TINY, weights, seeded(TINY))
    with pytest.raises(DumpError, match="one is there already\n  replace it with --force"):
        write_dump(copy, *args)
    write_dump(copy, *args, overwrite=True)
    assert read_dump(copy).checkpoint("logits").shape == (1, 10)
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(DumpError, match=r"it is no dump, it holds 'notes\.txt'"):
        write_dump(copy, *args, overwrite=True)
    other = tmp_path / "export"
    other.mkdir()
    (other / "manifest.json").write_text('{"version": 1}')
    with pytest.raises(DumpError, match="it is no dump"):
        write_dump(other, *args, overwrite=True)
    with pytest.raises(DumpError, match="it is a file or a link"):
        write_dump(other / "manifest.json", *args)
    assert (copy / "notes.txt").exists()


class Tracked:
    """Counts how many of the arrays that pass through it are alive."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Array]] = []
        self.most = 0

    def add(self, array: Array) -> Array:
        self.seen.append(weakref.ref(array))
        self.most = max(self.most, sum(ref() is not None for ref in self.seen))
        return array


def test_one_checkpoint_in_memory_when_writing_and_two_when_comparing(
    weights: Weights, dumped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, read = Tracked(), Tracked()

    class Watching(NumpyBackend):
        def compile(self, *args: Any) -> Program:
            program: Any = super().compile(*args)
            fetch = program.fetch
            program.fetch = lambda name=None: fetched.add(fetch(name))
            return program  # type: ignore[no-any-return]

    write_dump(tmp_path / "watched", Watching(), TINY, weights, seeded(TINY, 2))
    assert (len(fetched.seen), fetched.most) == (7, 1)
    real = dumps_module.read_tensor
    monkeypatch.setattr(dumps_module, "read_tensor", lambda *a: read.add(real(*a)))
    assert diff_dumps(dumped, tmp_path / "watched").ok
    assert (len(read.seen), read.most) == (14, 2)


def test_errors_before_anything_is_written(weights: Weights, tmp_path: Path) -> None:
    folder, numpy = tmp_path / "out", NumpyBackend()
    with pytest.raises(ShapeError, match=r"samples of \(3, 64, 64\), 'tiny' takes \(3, 32, 32\)"):
        write_dump(folder, numpy, TINY, weights, seeded(network("tiny", image_size=64)))
    with pytest.raises(UnknownName, match="values inside fused steps do not exist"):
        write_dump(folder, numpy, TINY, weights, seeded(TINY), checkpoints=["layer1.0.bn1"])
    options = CompileOptions(precision="fp16")
    with pytest.raises(NoKernel, match="precisions with kernels for conv2d: fp32, fp64"):
        write_dump(folder, numpy, TINY, weights, seeded(TINY), options=options)
    assert list(tmp_path.iterdir()) == []


# -- the diff ----------------------------------------------------------------------------------


def test_numpy_and_torch_agree_at_every_level(weights: Weights, tmp_path: Path) -> None:
    torch = pytest.importorskip("r18_torch").cpu()
    reference, images = tmp_path / "torch", seeded(TINY, 2)
    options = CompileOptions(precision="fp64", fusion="none")
    write_dump(reference, torch, TINY, weights, images, options=options)
    for level in ("none", "all"):
        folder = tmp_path / level
        write_dump(
            folder, NumpyBackend(), TINY, weights, images, options=CompileOptions(fusion=level)
        )
        report = diff_dumps(reference, folder)
        assert report.closing() == "all 7 checkpoints agree within atol 1e-4"
        assert [row.checkpoint for row in report.rows] == list(CANONICAL)


def test_programs_agree_whether_they_fuse_the_pooling_or_not(
    weights: Weights, tmp_path: Path
) -> None:
    images, options = seeded(TINY, 2), CompileOptions(fusion="all")
    apart, fused, more = (tmp_path / name for name in ("apart", "fused", "more"))
    write_dump(apart, NumpyBackend(), TINY, weights, images, options=options)
    made = write_dump(fused, Pooling(), TINY, weights, images, options=options)
    assert made.made.kernels["conv1"] == "faulty/conv2d_maxpool2d/plain/fp32"
    assert "maxpool" not in made.made.kernels
    assert diff_dumps(apart, fused).ok
    every = write_dump(more, Pooling(), TINY, weights, images, checkpoints="all", options=options)
    names = {checkpoint.name for checkpoint in every.checkpoints}
    assert names == set(fuse(TINY, "all").taps) - {TINY.input, "relu"}
    with pytest.raises(UnknownName, match="unknown checkpoint 'relu'"):
        write_dump(more, Pooling(), TINY, weights, images, checkpoints="relu,fc", options=options)


def test_a_wrong_kernel_is_found_where_it_begins(
    weights: Weights, dumped: Path, tmp_path: Path
) -> None:
    write_dump(tmp_path / "wrong", WrongLayer3(), TINY, weights, seeded(TINY, 2))
    report = diff_dumps(dumped, tmp_path / "wrong")
    assert [row.checkpoint for row in report.rows if row.ok] == ["stem_pool", "layer1", "layer2"]
    assert report.closing().startswith("first bad checkpoint: layer3 (max_abs ")
    assert " > atol 1e-4 at (" in report.closing()
    data = report.to_json()
    assert (data["ok"], data["first_bad"]) == (False, "layer3")
    bad = data["checkpoints"][3]
    assert (bad["ok"], len(bad["worst"]), bad["shape"]) == (False, 4, [2, 32, 2, 2])


@pytest.mark.parametrize("side", [0, 1])
def test_nan_on_one_side_is_bad(dumped: Path, copy: Path, side: int) -> None:
    def spoil(values: Array) -> None:
        values[1, 3] = math.nan

    overwrite(copy, "layer4", spoil)
    report = diff_dumps(*((dumped, copy) if side else (copy, dumped)), atol=1e30)
    assert not report.ok
    assert "first bad checkpoint: layer4 (1 value is not finite, the first at (1, 3, 0, 0)" in (
        report.closing()
    )


@pytest.mark.parametrize("side", [0, 1])
def test_raw_files_of_another_program_may_be_one_side(
    dumped: Path, tmp_path: Path, side: int
) -> None:
    raw = raw_copy(dumped, tmp_path / "raw")
    (raw / "log.txt").write_text("not a tensor")
    (raw / "input.bin").write_bytes(b"whatever it was run on")

    def both() -> tuple[Path, Path]:
        return (dumped, raw) if side else (raw, dumped)

    assert diff_dumps(*both()).ok
    values = np.fromfile(raw / "gap.bin", "<f4")
    values[5] += 1
    values.tofile(raw / "gap.bin")
    assert diff_dumps(*both()).closing().startswith("first bad checkpoint: gap (max_abs 1 >")
    values.astype("<f8").tofile(raw / "gap.bin")
    with pytest.raises(DumpError, match=r"gap\.bin' has 1024 bytes, expected 512: shape \[2, 64\]"):
        diff_dumps(*both())
    (raw / "gap.bin").unlink()
    with pytest.raises(DumpError, match=r"raw' lacks gap, which the other has"):
        diff_dumps(*both())


@pytest.mark.parametrize("side", [0, 1])
def test_raw_files_that_are_wrong_from_the_start_are_asked_for_their_weights(
    dumped: Path, tmp_path: Path, side: int
) -> None:
    raw = raw_copy(dumped, tmp_path / "raw")
    question = (
        f"\nthe dump at {dumped} was made with weights synthetic:0; did your program use these?"
    )

    def text() -> str:
        return diff_dumps(*((dumped, raw) if side else (raw, dumped))).text()

    def spoil(name: str) -> None:
        (np.fromfile(raw / f"{name}.bin", "<f4") + 1).tofile(raw / f"{name}.bin")

    assert question not in text()
    spoil("gap")
    assert question not in text()  # weights that were others would be wrong before
    spoil("stem_pool")
    assert text().endswith(question)


def test_extra_raw_file(dumped: Path, tmp_path: Path) -> None:
    raw = raw_copy(dumped, tmp_path / "raw")
    shutil.copy(raw / "gap.bin", raw / "layer5.bin")
    with pytest.raises(DumpError) as caught:
        diff_dumps(dumped, raw)
    assert str(caught.value) == (
        "the dumps do not hold the same checkpoints\n"
        f"  '{dumped}' lacks layer5, which the other has\n"
        "  write both with the same --checkpoints and --fusion; nothing is skipped"
    )


def test_two_raw_folders_and_no_folder(dumped: Path, tmp_path: Path) -> None:
    raw = raw_copy(dumped, tmp_path / "raw")
    with pytest.raises(DumpError, match=r"neither '.*' nor '.*' has a manifest\.json"):
        diff_dumps(raw, raw)
    with pytest.raises(DumpError, match="nowhere' does not exist"):
        diff_dumps(dumped, tmp_path / "nowhere")
    with pytest.raises(DumpError, match=r"gap\.bin' is no folder"):
        diff_dumps(raw / "gap.bin", dumped)
    export = tmp_path / "export"
    export.mkdir()
    (export / "manifest.json").write_text('{"version": 1, "tensors": []}')
    with pytest.raises(DumpError, match="it belongs to an export of weights, not to a dump"):
        diff_dumps(dumped, export)
    with pytest.raises(DumpError, match=r"raw' holds no manifest\.json, so it is no dump"):
        read_dump(raw)


def test_missing_and_extra_checkpoints_are_errors(
    dumped: Path, weights: Weights, tmp_path: Path
) -> None:
    few = tmp_path / "few"
    args = (NumpyBackend(), TINY, weights, seeded(TINY, 2))
    write_dump(few, *args, checkpoints="stem_pool,fc,logits")
    for pair in ((dumped, few), (few, dumped)):
        with pytest.raises(DumpError) as caught:
            diff_dumps(*pair)
        assert f"'{few}' lacks layer1, layer2, layer3, layer4, gap, which" in str(caught.value)
        assert f"'{dumped}' lacks fc, which the other has" in str(caught.value)


def test_other_input_weights_network_or_batch(
    dumped: Path, weights: Weights, tmp_path: Path
) -> None:
    numpy = NumpyBackend()
    write_dump(tmp_path / "seed", numpy, TINY, weights, seeded(TINY, 2, seed=1))
    with pytest.raises(DumpError, match=r"different input: .* seed 0 \(sha256 .* seed 1 \(sha256"):
        diff_dumps(dumped, tmp_path / "seed")
    assert not diff_dumps(dumped, tmp_path / "seed", allow_different_input=True).ok
    other = load_weights("synthetic:1", TINY)
    write_dump(tmp_path / "weights", numpy, TINY, other, seeded(TINY, 2))
    with pytest.raises(DumpError, match="pass --allow-different-input") as e:
        diff_dumps(dumped, tmp_path / "weights")
    assert f"different weights: '{dumped}' synthetic:0 (sha256 " in str(e.value)
    assert f"'{tmp_path / 'weights'}' synthetic:1 (sha256 " in str(e.value)
    write_dump(tmp_path / "batch", numpy, TINY, weights, seeded(TINY, 1))
    with pytest.raises(DumpError, match=r"'stem_pool' has shape \(2, 8, 8, 8\) in .* \(1, 8, 8, 8"):
        diff_dumps(dumped, tmp_path / "batch", allow_different_input=True)
    edit(tmp_path / "seed", network="resnet18")
    with pytest.raises(DumpError, match=r"different networks: .* of 'tiny', .* of 'resnet18'"):
        diff_dumps(dumped, tmp_path / "seed", allow_different_input=True)


# -- damage ------------------------------------------------------------------------------------


def test_damaged_files(dumped: Path, copy: Path) -> None:
    def add_one(values: Array) -> None:
        values += 1

    overwrite(copy, "gap", add_one, hashed=False)
    with pytest.raises(DumpError, match=r"gap\.bin' has sha256 .*…, expected"):
        diff_dumps(dumped, copy)
    (copy / "gap.bin").write_bytes(b"short")
    with pytest.raises(
        DumpError, match=r"gap\.bin' has 5 bytes, expected 512: shape \[2, 64\] in flo"
    ):
        read_dump(copy)
    (copy / "gap.bin").unlink()
    with pytest.raises(DumpError, match=r"there is no 'gap\.bin' in the folder"):
        read_dump(copy)
    (copy / "gap.bin").symlink_to(dumped / "gap.bin")
    with pytest.raises(DumpError, match="link out of the folder"):
        read_dump(copy)
    (copy / "gap.bin").unlink()
    (copy / "gap.bin").mkdir()
    with pytest.raises(DumpError, match="is not a regular file"):
        read_dump(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "export"}, "kind is 'export', this r18 reads 'dump'"),
        ({"version": 2}, "version is 2, this r18 reads 1"),
        ({"version": True}, "version is True, this r18 reads 1"),
        ({"byte_order": "big"}, "byte_order is 'big'"),
        ({"checkpoints": []}, "it lists no checkpoints"),
        ({"checkpoints": [1]}, "'checkpoints' must be a list of objects, got 1"),
        ({"checkpoints": {}}, "the field 'checkpoints' must be of type list"),
        ({"network": 1}, "the field 'network' must be of type str, got 1"),
        ({"weights": {"source": "x"}}, "the field 'sha256' is missing"),
        ({"weights": {"source": "x", "sha256": "0"}}, "must be 64 lowercase hex digits, got '0'"),
    ],
)
def test_damaged_manifests(copy: Path, fields: dict[str, Any], message: str) -> None:
    edit(copy, **fields)
    with pytest.raises(DumpError) as caught:
        read_dump(copy)
    assert message in str(caught.value)
    assert str(copy / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("path", "../gap.bin", "the path '../gap.bin' is not a plain file name"),
        ("path", "/etc/passwd", "is not a plain file name"),
        ("path", "..", "is not a plain file name"),
        ("path", "C:x", "is not a plain file name"),
        ("shape", [2, -64], "[2, -64] is not a shape"),
        ("shape", [2, 1 << 40], "is not a shape"),
        ("shape", [True], "is not a shape"),
        ("dtype", "float16", "the dtype 'float16' is not one of float32, float64"),
        ("sha256", "xyz", "sha256 of 'gap' must be 64 lowercase hex digits"),
        ("name", "logits", "the checkpoint 'logits' appears 2 times"),
        ("shape", [2, 65], "has 512 bytes, expected 520: shape [2, 65] in float32"),
    ],
)
def test_damaged_entries(copy: Path, field: str, value: object, message: str) -> None:
    entries = json.loads((copy / "manifest.json").read_text())["checkpoints"]
    for entry in entries:
        if entry["name"] == "gap":
            entry[field] = value
    edit(copy, checkpoints=entries)
    with pytest.raises(DumpError) as caught:
        read_dump(copy)
    assert message in str(caught.value)


def test_manifests_that_are_not_json(copy: Path) -> None:
    for text, message in (
        ("{", "not JSON"),
        ("[]", r"expected a JSON object, got \[\]"),
        ('{"kind": "dump", "kind": "dump"}', "the field 'kind' appears 2 times"),
        ("[" * 100_000, "not JSON"),
    ):
        (copy / "manifest.json").write_text(text)
        with pytest.raises(DumpError, match=message):
            read_dump(copy)
    (copy / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DumpError, match="not JSON"):
        read_dump(copy)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def fuzzed(dumped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(dumped, tmp_path_factory.mktemp("fuzz") / "dump"))


@settings(max_examples=150)
@given(data=st.data())
def test_any_damage_to_a_manifest_is_a_dump_error_or_harmless(
    data: st.DataObject, dumped: Path, fuzzed: Path
) -> None:
    """Replacing any node of the manifest by any JSON is a dump error or harmless."""
    manifest = json.loads((dumped / "manifest.json").read_text())
    node: Any = manifest
    while True:
        key = data.draw(
            st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
        )
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON)
    (fuzzed / "manifest.json").write_text(json.dumps(manifest))
    try:
        dump = read_dump(fuzzed)
        for file in dump.checkpoints:
            dump.read(file.name)
    except DumpError:
        pass


# -- command line ------------------------------------------------------------------------------


def test_dump_and_diff_commands(tmp_path: Path) -> None:
    a, b, wrong = tmp_path / "a", tmp_path / "b", tmp_path / "wrong"
    common = ("--network", "tiny", "--batch", 2)
    first = invoke("dump", "--out", a, "--backend", "numpy", *common)
    assert first.exit_code == 0, first.output
    assert "saved: layer3 [2, 32, 2, 2] -> layer3.bin\n" in first.stdout
    assert (
        invoke("dump", "--out", b, "--backend", "numpy", "--fusion", "none", *common).exit_code == 0
    )
    same = invoke("diff", a, b)
    assert same.exit_code == 0
    assert same.stdout.endswith("\nall 7 checkpoints agree within atol 1e-4\n")
    backend = f"{__name__}:WrongLayer3"
    assert invoke("dump", "--out", wrong, "--backend", backend, *common).exit_code == 0
    found = invoke("diff", a, wrong)
    assert found.exit_code == 1
    assert "\nfirst bad checkpoint: layer3 (max_abs " in found.stdout
    assert found.stdout.count("BAD") == 4
    as_json = invoke("diff", a, wrong, "--json", "--atol", "1e-5")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["first_bad"] == "layer3"
    missing = invoke("diff", a, tmp_path / "none")
    assert isinstance(missing.exception, DumpError)
    again = invoke("dump", "--out", a, "--backend", "numpy", *common)
    assert isinstance(again.exception, DumpError)
    forced = invoke("dump", "--out", a, "--backend", "numpy", *common, "--force")
    assert forced.exit_code == 0
    everything = invoke(
        "dump", "--out", tmp_path / "all", "--backend", "numpy", "--checkpoints", "all", *common
    )
    assert "saved: layer2.0.conv1 [2, 16, 4, 4]" in everything.stdout
    unknown = invoke("dump", "--out", tmp_path / "x", "--backend", "nompy", *common)
    assert isinstance(unknown.exception, UnknownName)
    assert "did you mean 'numpy'" in str(unknown.exception)


def test_dump_command_of_a_file(tmp_path: Path, dumped: Path) -> None:
    args = ("--backend", "numpy", "--network", "tiny")
    result = invoke("dump", "--out", tmp_path / "a", *args, "--input", dumped / "input.bin")
    assert result.exit_code == 0, result.exception
    assert diff_dumps(dumped, tmp_path / "a").ok
    from PIL import Image

    Image.new("RGB", (50, 40), (200, 30, 90)).save(tmp_path / "red.png")
    result = invoke("dump", "--out", tmp_path / "b", *args, "--image", tmp_path / "red.png")
    assert result.exit_code == 0, result.exception
    made = read_dump(tmp_path / "b").made
    assert made is not None
    assert made.input.source == "red.png"


@pytest.mark.parametrize("option", ["--input", "--image"])
def test_a_seed_is_refused_next_to_a_file(option: str, tmp_path: Path, dumped: Path) -> None:
    args = ("--backend", "numpy", "--network", "tiny", "--out", tmp_path / "a")
    for seed in (0, 2):
        result = invoke("dump", *args, option, dumped / "input.bin", "--seed", seed)
        assert isinstance(result.exception, UsageError)
        assert str(result.exception) == (
            f"--seed {seed} is for seeded images, not for {option}; leave one out"
        )
    assert not (tmp_path / "a").exists()
    assert invoke("dump", *args, "--seed", 2).exit_code == 0
    made = read_dump(tmp_path / "a").made
    assert made is not None
    assert made.input.source == "seed 2"


def test_one_checkpoint_is_named_in_the_singular(tmp_path: Path) -> None:
    args = ("--backend", "numpy", "--network", "tiny", "--checkpoints", "logits")
    result = invoke("dump", *args, "--out", tmp_path / "a")
    assert result.stdout.splitlines()[-1].startswith("dumped: 1 checkpoint -> ")
    same = invoke("diff", tmp_path / "a", tmp_path / "a")
    assert same.stdout.endswith("\nthe only checkpoint agrees within atol 1e-4\n")


def test_the_tool_is_the_same_diff(dumped: Path, weights: Weights, tmp_path: Path) -> None:
    write_dump(tmp_path / "wrong", WrongLayer3(), TINY, weights, seeded(TINY, 2))
    command = [sys.executable, TOOLS / "diag_e2e_compare.py", "--torch_dir", dumped]
    ran = subprocess.run(
        [*command, "--dump_dir", dumped], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    for folder, code in ((tmp_path / "wrong", 1), (tmp_path / "none", 2)):
        done = tool("diag_e2e_compare", "--torch_dir", dumped, "--cuda_dir", folder)
        assert done.code == code, done.err
    assert done.err == f"diag_e2e_compare: '{tmp_path / 'none'}' does not exist\n"
