"""Dumps of several backends compared by their bounds: right, wrong, and unrelated dumps."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import r18
from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.errors import DumpError, R18Error, UsageError, WeightsError
from r18.evaluate.margins import ALGORITHM_MULTIPLE, END_TO_END_MULTIPLE
from r18.graph.resnet import network
from r18.graph.schedule import CANONICAL
from r18.weights import load_weights
from r18_oracle.dumps.agreement import BATCH, Agreement, compare_by_bounds
from r18_oracle.dumps.dumps import write_dump
from r18_oracle.dumps.files import sha256_of
from r18_oracle.network.checkpoints import compare_checkpoints
from r18_oracle.network.images import Images, seeded
from tiled_backend import TILE

TINY = network("tiny")
COUNT = BATCH + 1
BACKENDS = ("numpy", "torch", "numba-cpu")


def dump(folder: Path, backend: str, **more: Any) -> Path:
    images: Images = more.pop("images", None) or seeded(TINY, COUNT)
    weights = load_weights(more.pop("weights", "synthetic"), TINY)
    options = CompileOptions(
        precision=more.pop("precision", "fp32"), fusion=more.pop("fusion", "all")
    )
    write_dump(folder, load_backend(backend), TINY, weights, images, options=options, **more)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Dumps of three backends; tests copy them before they damage them."""
    folder = tmp_path_factory.mktemp("dumps")
    return [dump(folder / name, name) for name in BACKENDS]


@pytest.fixture
def copies(three: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(one, tmp_path / one.name)) for one in three]


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields), "utf-8")


def change(folder: Path, name: str, value: Callable[[Any], Any], index: Any = ...) -> None:
    """Give a checkpoint other values at an index, and the manifest the new hash."""
    path, manifest = folder / f"{name}.bin", folder / "manifest.json"
    data = json.loads(manifest.read_text())
    (entry,) = (entry for entry in data["checkpoints"] if entry["name"] == name)
    values = np.fromfile(path, "<f4").reshape(entry["shape"])
    values[index] = value(values[index])
    values.tofile(path)
    entry["sha256"] = sha256_of(values)
    manifest.write_text(json.dumps(data), "utf-8")


def bad(report: Agreement) -> list[str]:
    return [row.checkpoint for row in report.rows if not row.ok]


# -- what it says of right and wrong dumps -----------------------------------------------------


def test_a_dump_of_a_plan_with_a_tile_agrees(three: list[Path], tmp_path: Path) -> None:
    tiled = dump(tmp_path / "tiled", "tiled_backend:Tiled")
    assert TILE.id in json.loads((tiled / "manifest.json").read_text())["kernels"].values()
    report = compare_by_bounds([three[0], tiled], backends=["tiled_backend:Tiled"])
    assert report.ok


def test_right_backends_agree(three: list[Path]) -> None:
    said: list[tuple[int, int]] = []
    report = compare_by_bounds(three, progress=lambda done, count: said.append((done, count)))
    assert report.ok
    assert report.images == COUNT
    assert said == [(0, COUNT), (BATCH, COUNT), (COUNT, COUNT)]
    assert [row.checkpoint for row in report.rows] == list(CANONICAL)
    assert {len(row.pairs) for row in report.rows} == {3}
    assert report.closing().startswith("all 7 checkpoints agree: no two dumps are farther apart")


@pytest.mark.parametrize(
    ("backend", "precision", "fusion"),
    [
        ("numpy", "fp32", "all"),
        ("torch", "fp16", "all"),
        ("torch", "bf16", "none"),
        ("numpy", "fp64", "all"),
    ],
)
def test_what_a_dump_may_lose_is_what_its_backend_may(
    backend: str, precision: str, fusion: str, three: list[Path], tmp_path: Path
) -> None:
    """A dump may lose what `r18 verify` computes for its backend, which runs the backend itself."""
    images, weights = seeded(TINY, COUNT), load_weights("synthetic", TINY)
    dumped = dump(tmp_path / "dump", backend, precision=precision, fusion=fusion, dtype="float64")
    expected = compare_checkpoints(
        load_backend(backend), TINY, weights, images, precision=precision, fusion=fusion
    )
    losses = {row.name: row.loss for row in expected.checkpoints}
    report = compare_by_bounds([dumped, three[0]])
    assert report.multiples[0] == expected.multiple
    for row in report.rows:
        mine, theirs = row.losses[0], losses[row.checkpoint]
        assert mine.allowed_max == pytest.approx(theirs.allowed_max, rel=1e-9)
        assert mine.allowed_rms == pytest.approx(theirs.allowed_rms, rel=1e-9)
        assert mine.max_abs == pytest.approx(theirs.max_abs, rel=0.5)  # other sums at batch 4 and 5
    assert report.ok


def test_a_pair_is_as_far_apart_as_it_is_and_may_be_by_both(three: list[Path]) -> None:
    report = compare_by_bounds(three)
    row = report.rows[-1]
    values = [np.fromfile(one / f"{row.checkpoint}.bin", "<f4").astype(float) for one in three]
    for pair in row.pairs:
        one, other = pair.dumps
        apart = np.abs(values[one] - values[other])
        assert pair.max_abs == apart.max()
        assert np.ravel_multi_index(pair.worst, row.shape) == apart.argmax()
        assert pair.values == (values[one][apart.argmax()], values[other][apart.argmax()])
        assert pair.allowed == row.losses[one].allowed_max + row.losses[other].allowed_max
        assert pair.ratio == pair.max_abs / pair.allowed


def test_the_kernels_of_a_dump_decide_by_how_much(copies: list[Path]) -> None:
    plain, _, other = copies
    kernels = {"conv1": "numba-cpu/conv2d/implicit_gemm/fp32"}
    edit(other, kernels=kernels)
    assert compare_by_bounds([plain, other]).multiples == (END_TO_END_MULTIPLE,) * 2
    kernels["layer1.0.conv1"] = "numba-cpu/conv2d/winograd_f4x4/fp32"
    edit(other, kernels=kernels)
    multiple = ALGORITHM_MULTIPLE["winograd_f4x4"]
    assert compare_by_bounds([plain, other]).multiples == (END_TO_END_MULTIPLE, multiple)


def test_the_dump_that_is_off_is_named_and_the_others_are_not(copies: list[Path]) -> None:
    change(copies[1], "layer3", lambda old: old * 1.01, (COUNT - 1, 3))
    report = compare_by_bounds(copies)
    assert not report.ok
    assert bad(report) == ["layer3"]
    (row,) = (row for row in report.rows if not row.ok)
    assert [loss.ok for loss in row.losses] == [True, False, True]
    assert [pair.dumps for pair in row.pairs if pair.ok] == [(0, 2)]
    assert row.pairs[0].ratio > row.pairs[2].ratio  # c may lose more than a, and hides more
    assert row.losses[1].coordinate[:2] == (COUNT - 1, 3)
    closing = report.closing()
    assert closing.startswith("first bad checkpoint: layer3 (b: loses ")
    assert "; a and b are " in closing
    assert "times as far apart as their allowed errors" in closing


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_bad_even_on_both_sides(value: float, copies: list[Path]) -> None:
    for one in copies[:2]:
        change(one, "gap", lambda old: value, (0, 0))
    report = compare_by_bounds(copies)
    assert bad(report) == ["gap"]
    (row,) = (row for row in report.rows if not row.ok)
    assert [pair.ratio for pair in row.pairs] == [math.inf] * 3
    assert [loss.nonfinite for loss in row.losses] == [1, 1, 0]
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["first_bad"] == "gap"


def test_levels_and_all_checkpoints(tmp_path: Path) -> None:
    names = "conv1,layer1.0.conv1,logits"
    one = dump(tmp_path / "one", "numpy", fusion="none", checkpoints=names)
    other = dump(tmp_path / "other", "torch", fusion="none", precision="fp16", checkpoints=names)
    report = compare_by_bounds([one, other])
    assert report.ok
    assert [row.checkpoint for row in report.rows] == names.split(",")


# -- dumps that do not belong together ---------------------------------------------------------


def refused(dumps: list[Path], kind: type[R18Error] = DumpError, **more: Any) -> str:
    with pytest.raises(R18Error) as caught:
        compare_by_bounds(dumps, **more)
    assert type(caught.value) is kind
    return str(caught.value)


def test_other_input_weights_or_checkpoints(three: list[Path], tmp_path: Path) -> None:
    seed = dump(tmp_path / "seed", "numpy", images=seeded(TINY, COUNT, 1))
    said = refused([*three, seed])
    assert said.startswith(f"the dumps have different input: '{three[0]}' seed 0 (sha256 ")
    assert said.endswith("\n  write both from the same input")
    weights = dump(tmp_path / "weights", "numpy", weights="synthetic:1")
    assert "the dumps have different weights: " in refused([three[0], weights])
    fewer = dump(tmp_path / "fewer", "numpy", checkpoints="logits")
    assert f"'{fewer}' lacks stem_pool, layer1" in refused([three[0], fewer])


def test_weights_that_are_elsewhere_or_not_those(copies: list[Path], tmp_path: Path) -> None:
    moved, sha256 = tmp_path / "gone.npz", load_weights("synthetic", TINY).sha256
    for one in copies:
        edit(one, weights={"source": str(moved), "sha256": sha256})
    assert refused(copies, WeightsError) == (
        f"the dump '{copies[0]}' names the weights '{moved}', a file or folder of this machine\n"
        f"  repeat it if that is what you want, with --weights {moved}; "
        "imagenet and synthetic need no such word"
    )
    for one in copies:
        edit(one, weights={"source": "imagenet", "sha256": sha256})  # which has no tiny
    said = refused(copies)
    assert said.startswith(f"the weights of '{copies[0]}' are missing: ")
    assert said.endswith("\n  give the source of the dumps' weights with --weights")
    assert compare_by_bounds(copies, weights="synthetic").ok
    said = refused(copies, weights="synthetic:1")
    assert said.startswith(f"'synthetic:1' are not the weights of '{copies[0]}': sha256 ")
    refused(copies, WeightsError, weights=str(tmp_path / "absent.npz"))


def test_a_folder_without_a_manifest_says_nothing_of_its_bounds(copies: list[Path]) -> None:
    (copies[1] / "manifest.json").unlink()
    assert f"'{copies[1]}' holds no manifest.json" in refused(copies)


def test_kernels_and_backends_that_are_not_known_here(copies: list[Path]) -> None:
    edit(copies[2], kernels={"conv1": "numba-cpu/conv2d/future/fp32"})
    said = refused(copies)
    assert "by kernels that backend 'numba-cpu' does not list here: numba-cpu/conv2d/future" in said
    edit(copies[2], backend="elsewhere")
    assert "its backend 'elsewhere' is not available: unknown backend 'elsewhere'" in refused(
        copies
    )
    for one in copies:
        edit(one, network="alexnet")
    assert "is of an unknown network: unknown network 'alexnet'" in refused(copies)


def test_one_checkpoint_is_named_in_the_singular(tmp_path: Path) -> None:
    names = ("numpy", "torch")
    dumps = [dump(tmp_path / name, name, checkpoints="logits") for name in names]
    closing = compare_by_bounds(dumps).closing()
    assert closing.startswith("the only checkpoint agrees: no two dumps are farther apart than ")


def test_how_many(three: list[Path]) -> None:
    assert "2 to 26 dumps" in refused(three[:1], UsageError)
    assert "got 27" in refused(three * 9, UsageError)


# -- the command -------------------------------------------------------------------------------


def test_the_command(copies: list[Path]) -> None:
    done = r18("diff", *copies, "--bounds")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith(f"a: {copies[0]} (numpy in fp32, fusion 'all', CPU")
    assert lines[0].endswith("may lose 8 times what PyTorch loses")
    assert lines[4].split() == [*("checkpoint", "shape"), *"abc", "a-b", "a-c", "b-c", "verdict"]
    assert lines[-1].startswith("all 7 checkpoints agree")
    change(copies[0], "stem_pool", lambda old: old * 2)
    done = r18("diff", *copies[:2], "--bounds", "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert (found["ok"], found["first_bad"]) == (False, "stem_pool")
    assert found["checkpoints"][0]["pairs"][0]["dumps"] == [0, 1]
    assert [loss["ok"] for loss in found["checkpoints"][0]["losses"]] == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bounds", "--atol", "1"], "--atol cannot be given with --bounds"),
        (["--bounds", "--allow-different-input"], "--allow-different-input cannot be given"),
        (["--weights", "synthetic"], "--weights is for --bounds, which was not given"),
        (["third"], "more than two dumps are for --bounds, which was not given"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    done = r18("diff", "one", "other", *options)
    assert done.code == 2
    assert message in done.err
