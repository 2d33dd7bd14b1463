"""Every command in int8: weights with a quantisation compute, others get a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import r18 as package
from commands import r18
from quantised_weights import quantised_weights
from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.bench import roofline_run
from r18.bench.ceilings import _int8
from r18.bench.contenders import program_contender
from r18.bench.error import INTEGERS, Error
from r18.bench.roofline import Ceilings, limit
from r18.errors import NoKernel, UsageError, WeightsError
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantize import integer_weights, quantized
from r18.graph.resnet import resnet18, tiny
from r18.images.preprocess import Preprocess
from r18.weights import load_weights
from r18.weights.manifest import write_manifest
from r18.weights.precisions import in_precision
from r18_oracle.network.outputs import IntegerYardstick, judge_of

NUMPY = load_backend("numpy")
INT = CompileOptions(precision="int8")
SAY = "r18 quantize --weights synthetic:0 --images FOLDER --out OUT"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("int8") / "w"
    write_manifest(made, quantised_weights(), tiny())
    return made


def images(count: int = 3) -> np.ndarray:
    shape = (count, *tiny().input_shape)
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


# -- what a program is compiled from -----------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_int8_computes_with_the_integers_of_the_folder(bits: int, tmp_path: Path) -> None:
    weights = quantised_weights(bits)
    write_manifest(tmp_path / "w", weights, tiny())
    assert weights.quantization is not None
    folded = fuse(tiny(), "all")
    options = CompileOptions(precision="int8", batch=3)
    read = integer_weights(folded, weights.quantization)
    expected = NUMPY.compile(quantized(folded, bits), read, options)(images())
    program = package.compile("tiny", tmp_path / "w", "numpy", precision="int8", batch=3)
    np.testing.assert_array_equal(program(images()), expected)
    normalize = Preprocess().normalize
    pixels = package.compile(
        "tiny", tmp_path / "w", "numpy", precision="int8", batch=1, pixels=normalize
    )
    assert pixels(np.zeros((1, 3, 32, 32), np.uint8)).shape == (1, 10)


def test_every_other_precision_reads_the_floats() -> None:
    weights = quantised_weights()
    for name in ("fp32", "fp64"):
        schedule, read = in_precision(tiny(), weights, CompileOptions(precision=name))
        assert schedule is not None
        assert read is weights
    found, read = in_precision(tiny(), weights, INT)
    assert in_precision(found, read, INT) == (found, read)
    again, _ = in_precision(fuse(tiny(), "all"), weights, INT)
    assert again == found


def test_what_has_no_integers() -> None:
    floats = load_weights("synthetic", tiny())
    with pytest.raises(WeightsError, match="'synthetic:0' hold no quantisation") as caught:
        in_precision(tiny(), floats, INT)
    assert SAY in str(caught.value)
    with pytest.raises(WeightsError, match="r18 quantize --weights SOURCE"):
        package.compile("tiny", dict(floats), "numpy", precision="int8")
    with pytest.raises(UsageError, match=r"at fusion level 'all'.*asked for 'none'"):
        in_precision(tiny(), quantised_weights(), CompileOptions(precision="int8", fusion="none"))


# -- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("dump", "--backend", "numpy", "--out", "OUT", "--network", "tiny"),
        ("bench", "--backends", "numpy", "--batch", "1", "--network", "tiny"),
        (
            *("evaluate", "--images", "IMAGES", "--network", "tiny", "--backend", "numpy"),
            *("--against", "numpy", "--weights", "synthetic", "--out", "OUT.csv"),
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_weights_without_a_block_are_told(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "images" / "a.png")
    where = {"OUT": tmp_path / "o", "OUT.csv": tmp_path / "o.csv", "IMAGES": tmp_path / "images"}
    done = r18(*(where.get(word, word) for word in arguments), "--precision", "int8")
    assert done.code == 2
    assert SAY in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"images"}


def test_classify_says_it_too(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    done = r18(
        *("classify", tmp_path / "a.png", "--precision", "int8"),
        *("--backend", "numpy", "--weights", "synthetic"),
    )
    assert done.code == 2
    assert SAY in done.err


def test_evaluate(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for index in range(3):
        pixels = rng.integers(0, 256, (40, 40, 3)).astype(np.uint8)
        Image.fromarray(pixels, "RGB").save(tmp_path / "images" / f"{index}.png")
    done = r18(
        *("evaluate", "--images", tmp_path / "images", "--weights", folder, "--network", "tiny"),
        *("--backend", "numpy", "--precision", "int8", "--against", "numpy"),
        *("--against-precision", "fp64", "--out", tmp_path / "o.csv", "--json"),
    )
    assert done.code in (0, 1)
    data = json.loads(done.out)
    assert data["request"]["precision"] == "int8"
    assert data["request"]["weights_sha256"] == quantised_weights().sha256
    assert data["images"] == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_plan_needs_no_weights(bits: int) -> None:
    done = r18(
        *("plan", "--backend", "numpy", "--network", "tiny", "--precision", "int8"),
        *("--bits", bits, "--json"),
    )
    assert done.code == 0
    data = json.loads(done.out)
    assert [step["step"] for step in data["steps"]] == [
        s.name for s in quantized(fuse(tiny(), "all"), bits).steps
    ]
    by_name = {step["step"]: step for step in data["steps"]}
    assert by_name["quantize"]["bytes"] == 3 * 32 * 32
    assert by_name["conv1"]["bytes"] == 8 * 16 * 16, "a byte a value"
    wrong = r18("plan", "--backend", "numpy", "--precision", "int8", "--fusion", "none")
    assert wrong.code == 2
    assert "int8 is computed at fusion level 'all'" in wrong.err
    assert r18("plan", "--backend", "numpy", "--precision", "int8", "--bits", 3).code == 2


def test_bench(folder: Path) -> None:
    """`bench` in int8 judges every output, which is either right or wrong."""
    done = r18(
        *("bench", "--backends", "numpy", "--precision", "int8,fp32", "--batch", "2"),
        *("--network", "tiny", "--weights", folder, "--repeat", 1, "--warmup", 0),
        *("--check", "--per-step", "--from-host", "--json"),
    )
    assert done.code == 0, done.err
    rows = [row for row in json.loads(done.out)["rows"] if row["backend"] == "numpy"]
    assert {row["precision"] for row in rows} == {"int8", "fp32"}
    (row,) = (row for row in rows if row["precision"] == "int8")
    assert row["loss"] == 0
    assert row["error"] == {"relative": 0.0, "images": 8, "reference": "integers"}
    assert row["error_ratio"] is None
    assert row["kernels"]["numpy/qconv2d/im2col/int8"] == 12
    assert len(row["steps"]) == 16
    assert "it has no int8 on cpu" in done.err or "torchvision has no 'tiny'" in done.err


def test_a_wrong_integer_is_found(folder: Path) -> None:
    weights = load_weights(folder, tiny())
    contender = program_contender("numpy", NUMPY.probe(), NUMPY, tiny(), weights, INT)
    judge = judge_of(tiny(), weights, {"int8", "fp32"})
    runner = contender.make()
    assert judge.loss(contender, runner) == 0.0
    assert judge.error(contender, runner) == Error(0.0, 8, INTEGERS)

    class Off:
        """A runner with one logit one bit off."""

        def __getattr__(self, name: str) -> object:
            return getattr(runner, name)

        def fetch(self) -> np.ndarray:
            found = runner.fetch()
            found[0, 3] = np.nextafter(found[0, 3], np.float32(np.inf))
            return found

    assert judge.loss(contender, Off()) == np.inf  # type: ignore[arg-type]
    assert 0 < judge.error(contender, Off()).relative < 1e-6  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="hold no quantisation"):
        IntegerYardstick(tiny(), load_weights("synthetic", tiny()))


def test_algorithms_of_integers(folder: Path) -> None:
    done = r18(
        *("bench", "--backends", "numpy", "--precision", "int8", "--batch", "1", "--json"),
        *("--network", "tiny", "--weights", folder, "--repeat", 1, "--warmup", 0),
        *("--algorithms", "qconv2d=im2col"),
    )
    assert done.code == 0, done.err
    names = {row["backend"] for row in json.loads(done.out)["rows"]}
    assert "numpy (im2col)" in names


def test_a_roofline_counts_bytes_of_integers(folder: Path) -> None:
    ceilings = Ceilings("cpu", {"int8": 1e12}, 1e9)
    weights = load_weights(folder, tiny())
    found = roofline_run.timed(
        NUMPY, NUMPY.probe(), tiny(), weights, [INT], 0, 1, lambda text: None
    )
    ((plan, row),) = found
    lines = roofline_run.lines(plan, row.steps, ceilings)
    assert [line.step for line in lines] == [step.name for step in plan.steps]
    conv = quantized(fuse(resnet18(), "all")).problems(1)["layer1.0.conv1"]
    cost = limit(conv, INT8, ceilings)
    assert cost.operations == 2 * 56 * 56 * 64 * 64 * 9
    assert cost.nbytes == 2 * 64 * 56 * 56 + 64 * 64 * 9 + 2 * 4 * 64


def test_the_rate_of_int8_on_a_cpu() -> None:
    work, seconds, how = _int8(64, 1)
    assert work == 2 * 64**3
    assert min(seconds) > 0
    assert how.startswith("PyTorch ")


def test_a_backend_without_integers_says_so() -> None:
    with pytest.raises(NoKernel, match="no kernel takes"):
        package.compile("tiny", quantised_weights(), "r18_oracle.demo:Backend", precision="int8")
