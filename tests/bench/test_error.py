"""The error of each row of a benchmark: its definition, its reference, and where it is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

from commands import r18
from r18.backend import Array, CompileOptions, DeviceInfo
from r18.backend.registry import load_backend
from r18.bench.baselines import PEER, Way
from r18.bench.contenders import contenders, peer_contender, program_contender
from r18.bench.error import (
    EXACT,
    INTEGERS,
    NONE,
    Error,
    error_cells,
    is_worse,
    relative,
    worse_words,
)
from r18.bench.rows import Contender, Row, with_ratios
from r18.bench.run import Result
from r18.bench.tables import table
from r18.bench.timing import bench
from r18.cpu import model_slug
from r18.errors import ShapeError, UsageError, WeightsError
from r18.graph.resnet import resnet18
from r18_oracle.network.checkpoints import seeded_images
from r18_oracle.network.output_errors import IMAGES, SEED, OutputErrors
from support import ROOT, random_weights

SMALL = resnet18(image_size=32, classes=12)
WEIGHTS = random_weights(SMALL)
NUMPY = load_backend("numpy")


@cache
def errors() -> OutputErrors:
    """An error computer for the small network; it computes its reference once."""
    return OutputErrors(SMALL, WEIGHTS)


def row(name: str = "x", ms: float = 10.0, **changes: Any) -> Row:
    return replace(Row(name, "a CPU", "cpu", "fp32", "all", 4, 1, 1, (ms,)), **changes)


# -- the number --------------------------------------------------------------------------------


def test_the_error_is_relative_in_the_norm_of_the_checkpoints() -> None:
    expected = np.array([[3.0, 0.0], [0.0, 4.0]])
    got = np.array([[3.0, 3e-3], [4e-3, 4.0]], np.float32)
    assert relative(got, expected) == pytest.approx(1e-3, rel=1e-6)
    assert relative(expected, expected) == 0
    assert relative(got, np.zeros((2, 2))) == np.inf
    got[0, 0] = np.nan
    assert relative(got, expected) == np.inf


@cache
def float64_logits() -> Array:
    """torchvision's own module in float64, which knows nothing of r18's steps."""
    module = torchvision.models.resnet18(num_classes=12).double().eval()
    state = {name: torch.from_numpy(np.array(array)) for name, array in WEIGHTS.items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    images = seeded_images(SMALL, IMAGES, SEED).values
    with torch.inference_mode():
        found: Array = module(torch.from_numpy(images).double()).numpy()
    return found


@pytest.mark.parametrize("batch", [1, 3, 8, 11])
def test_the_reference_is_float64_on_several_images_whatever_the_batch(batch: int) -> None:
    exact = float64_logits()
    contender = program_contender(
        "numpy", NUMPY.probe(), NUMPY, SMALL, WEIGHTS, CompileOptions(batch=batch)
    )
    given: list[bytes] = []
    runner: Any = contender.make()
    load = runner.load

    def noted(images: Array) -> None:
        given.extend(image.tobytes() for image in images)
        load(images)

    runner.load = noted
    found = errors().of(contender, runner)
    images = seeded_images(SMALL, IMAGES, SEED).values
    assert IMAGES == 8
    assert set(given) == {image.tobytes() for image in images}
    assert len(given) == batch * -(-IMAGES // batch)
    outputs = NUMPY.compile(SMALL, WEIGHTS, CompileOptions(batch=IMAGES))(images)
    alone = np.linalg.norm(outputs - exact) / np.linalg.norm(exact)
    assert found.images == IMAGES
    assert 1e-8 < found.relative < 1e-5
    if batch == IMAGES:
        assert found.relative == pytest.approx(alone, rel=1e-3)
    assert found.relative == pytest.approx(alone, rel=0.5)


@pytest.mark.parametrize(
    ("precision", "least", "most"), [("fp16", 1e-4, 1e-2), ("bf16", 1e-3, 0.1)]
)
def test_storage_in_few_bits_is_part_of_the_error(
    precision: str, least: float, most: float
) -> None:
    """The error includes rounding to storage: the reference has unrounded weights and images."""
    backend = load_backend("r18_torch:cpu")
    options = CompileOptions(batch=2, precision=precision)
    contender = program_contender("torch", backend.probe(), backend, SMALL, WEIGHTS, options)
    assert least < errors().of(contender, contender.make()).relative < most
    peer = peer_contender("cpu", SMALL, WEIGHTS, 2, precision, Way())
    assert least < errors().of(peer, peer.make()).relative < most


def test_a_program_of_other_weights_has_a_large_error() -> None:
    """Weights that are off by a thousandth give an error far above float32's."""
    rng = np.random.default_rng(1)
    off = {
        name: (array * (1 + 1e-3 * rng.standard_normal(array.shape))).astype(np.float32)
        for name, array in WEIGHTS.items()
    }
    options = CompileOptions(batch=2)
    right = program_contender("numpy", NUMPY.probe(), NUMPY, SMALL, WEIGHTS, options)
    wrong = program_contender("numpy", NUMPY.probe(), NUMPY, SMALL, off, options)
    small, large = (errors().of(one, one.make()).relative for one in (right, wrong))
    assert large > 100 * small


def test_the_peer_of_integers_on_a_gpu_is_compared_with_float64() -> None:
    """PyTorch's int8 row on a GPU is compared with float64, since PyTorch runs float16 there; see
    `peers_precision`."""
    fp16 = peer_contender("cpu", SMALL, WEIGHTS, 8, "fp16", Way())
    as_int8 = replace(fp16, precision="int8", device=DeviceInfo("cuda", "a GPU"))
    runner = fp16.make()
    assert errors().of(as_int8, runner) == errors().of(fp16, runner)
    ours = replace(fp16, name="ours", precision="int8")
    with pytest.raises(WeightsError, match="no quantisation"):
        errors().of(ours, runner)


def test_outputs_of_another_shape_have_no_error() -> None:
    class Short:
        load = run = staticmethod(lambda *images: None)
        fetch = staticmethod(lambda: np.zeros((8, 3), np.float32))

    contender = peer_contender("cpu", SMALL, WEIGHTS, 8, "fp32", Way())
    short: Any = Short()
    message = r"put out \(3,\) per image, 'resnet18' makes it \(12,\)"
    with pytest.raises(ShapeError, match=message):
        errors().of(contender, short)


# -- next to PyTorch ---------------------------------------------------------------------------


def test_errors_are_divided_by_those_of_the_same_kind_precision_and_batch() -> None:
    rows = [
        row(error=Error(3e-6, 8)),
        row(error=Error(3e-6, 8), batch=8),
        row(error=Error(3e-3, 8), precision="fp16"),
        row(PEER, error=Error(2e-6, 8)),
        row(PEER, error=Error(1e-3, 8), precision="fp16"),
        row(Way("graph").name, error=Error(1e-6, 8)),
        row(),
    ]
    ratios = [found.error_ratio for found in with_ratios(rows)]
    assert ratios == [pytest.approx(1.5), None, pytest.approx(3), 1, 1, 0.5, None]


def test_there_is_no_ratio_to_nothing_or_to_another_reference() -> None:
    some, none = Error(1e-6, 8), Error(0.0, 8)
    assert some.over(none) is None
    assert none.over(some) == 0
    assert Error(np.inf, 8).over(some) is None
    assert Error(0.0, 8, INTEGERS).over(some) is None
    assert some.over(Error(1e-6, 8, INTEGERS)) is None


def test_the_runs_own_peers_give_the_ratios_and_the_twin_too() -> None:
    """A run's own peer gives the error ratios; fp16x3 shares PyTorch's fp32 run."""
    own, peer = contenders({"numpy": NUMPY}, SMALL, WEIGHTS)
    field = [own, peer, replace(peer, precision="fp16x3", twin=peer)]
    rows = bench(field, warmup=0, repeat=1, error_of=errors().of)
    by_name = {(found.backend, found.precision): found for found in rows}
    assert by_name.keys() == {("numpy", "fp32"), (PEER, "fp32"), (PEER, "fp16x3")}
    ours, theirs, twin = by_name.values()
    assert ours.error is not None
    assert theirs.error is not None
    assert ours.error_ratio == ours.error.relative / theirs.error.relative
    assert 0.1 < ours.error_ratio < 10
    assert theirs.error_ratio == twin.error_ratio == 1
    assert twin.error == theirs.error


def test_errors_are_measured_when_everything_is_timed_and_one_that_is_not_has_a_reason() -> None:
    seen: list[str] = []

    def error_of(contender: Contender, runner: Any) -> Error:
        seen.append(contender.name)
        if contender.name == "b":
            raise UsageError("no finite result\n  more")
        return Error(2e-6, 8)

    class Runner:
        arena_nbytes = weight_nbytes = None
        kernels: Mapping[str, int] = {}

        def __init__(self, name: str) -> None:
            self.name = name

        def load(self, images: Array) -> None: ...
        def run(self) -> None: ...
        def close(self) -> None: ...

        def time(self, clock: Any) -> float:
            assert seen == []
            return 1.0

    device = DeviceInfo("cpu", "a CPU")
    field: list[Any] = [
        Contender(name, device, "fp32", "all", (1, 3, 4, 4), lambda name=name: Runner(name))
        for name in "ab"
    ]
    first, second = bench(field, warmup=0, repeat=1, error_of=error_of)
    assert seen == ["a", "b"]
    assert (first.error, first.no_error) == (Error(2e-6, 8), "")
    assert (second.error, second.no_error) == (None, "no finite result")
    seen.clear()
    plain, _ = bench(field, warmup=0, repeat=1)
    assert (plain.error, plain.no_error) == (None, "")


# -- who says so -------------------------------------------------------------------------------


def said(**changes: Any) -> tuple[str, str]:
    return error_cells(json.loads(json.dumps(row(**changes).to_json())))


def test_cells() -> None:
    some = Error(2.34e-6, 8)
    assert said() == (NONE, NONE)
    assert said(error=some) == ("2.3e-06", NONE)
    assert said(error=some, error_ratio=0.5, ratio=0.5) == ("2.3e-06", "0.50")
    assert said(error=some, error_ratio=1.004, ratio=0.5) == ("2.3e-06", "1.00")
    assert said(error=some, error_ratio=1.2, ratio=0.5) == ("2.3e-06", "1.20 (worse)")
    assert said(error=some, error_ratio=1.2, ratio=1.0) == ("2.3e-06", "1.20")  # not faster
    assert said(error=some, error_ratio=1.2) == ("2.3e-06", "1.20")
    assert said(error=Error(np.inf, 8), ratio=0.5) == ("inf", f"{NONE} (worse)")
    assert said(error=Error(0.0, 8, INTEGERS), ratio=0.5) == (EXACT, EXACT)
    assert said(error=Error(1e-8, 8, INTEGERS), ratio=0.5) == ("1.0e-08", NONE)


def test_a_fast_row_with_a_worse_error_is_told() -> None:
    host = {"cpus": 2, "threads": 2, "load_average": None}
    peer = row(PEER, 20.0, error=Error(1e-6, 8))
    fast = row(error=Error(2.5e-6, 8))
    slow = row(ms=40.0, error=Error(2.5e-6, 8))
    for ours, expected in ((fast, True), (slow, False), (row(error=Error(9e-7, 8)), False)):
        rows = with_ratios([ours, peer])
        warnings = Result(rows, [], {"machine": host}, ()).warnings
        words = "x, fp32, batch 4: 0.50 of PyTorch's time, but 2.50 times its error against float64"
        assert warnings == ([words] if expected else [])
        assert is_worse(rows[0].to_json()) == expected
    broken = row(error=Error(np.inf, 8), ratio=0.5).to_json()
    assert worse_words(broken).endswith("0.50 of PyTorch's time, but no finite output")


def test_the_table_has_errors_if_they_were_asked_for() -> None:
    assert "error" not in table([row()])
    rows = with_ratios([row(error=Error(3e-6, 8)), row(PEER, 20.0, error=Error(1e-6, 8))])
    head, _, ours, peer = table(rows).splitlines()
    assert "error / torchvision eager" in head
    assert ours.split()[-3:] == ["3.0e-06", "3.00", "(worse)"]
    assert peer.split()[-2:] == ["1.0e-06", "1.00"]
    without = table([row(no_error="no oracle")]).splitlines()[2]
    assert without.split()[-2:] == [NONE, NONE]


QUICK = ("bench", "--backends", "numpy", "--network", "tiny", "--batch", 2, "--repeat", 1)


def test_the_command_measures_and_records_errors(tmp_path: Path) -> None:
    done = r18(*QUICK, "--record", "--records", tmp_path, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["error_ratio"] == "error / torchvision eager"
    (found,) = data["rows"]
    assert 1e-8 < found["error"]["relative"] < 1e-5
    assert found["loss"] is None  # judged only with --check
    (group,) = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text())["groups"].values()
    (recorded,) = group["rows"]
    assert recorded["error"] == found["error"]
    assert recorded["error_ratio"] is None  # torchvision has no 'tiny'
    assert "no_error" not in recorded


def test_without_an_oracle_rows_say_so_and_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r18.hooks.entry_points", lambda group: [])
    done = r18(*QUICK, "--record", "--records", tmp_path)
    why = "the error of each row needs the oracle, which is not installed"
    assert done.code == 0, done.err
    assert f"left out: errors against float64: {why}" in done.err
    (group,) = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text())["groups"].values()
    (recorded,) = group["rows"]
    assert (recorded["error"], recorded["no_error"]) == (None, why)
    refused = r18(*QUICK, "--check")
    assert refused.code == 2
    assert "--check needs the oracle, which is not installed" in refused.err


def test_a_record_from_before_errors_is_kept_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / f"bench-{model_slug()}.json"
    shipped = ROOT / "exports" / "records" / "bench-amd-epyc-avx-512.json"  # of any CPU
    old = json.loads(shipped.read_text("utf-8"))
    for group in old["groups"].values():
        for found in group["rows"]:
            for name in ("error", "no_error", "error_ratio", "cold"):
                found.pop(name, None)
    path.write_text(json.dumps(old, indent=1), "utf-8")
    done = r18(*QUICK, "--record", "--records", tmp_path)
    assert done.code == 0, done.err
    new = json.loads(path.read_text("utf-8"))
    added = new["groups"].pop("tiny/fp32/all/b2")
    assert new["groups"] == old["groups"]
    assert added["rows"][0]["error"]["images"] == IMAGES
