"""Evaluations of small networks: batches, near ties, corrupt images, kills, and the command."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import Done, r18
from evaluate_support import (
    KILL_AT,
    Rolled,
    image_set,
    numbered,
    photographs,
    request,
    run,
    twins,
    weights,
)
from quantised_weights import quantised_weights
from r18.cpu import model_slug
from r18.errors import R18Error, UnknownName, UsageError, WeightsError
from r18.evaluate.decode import Decoded
from r18.evaluate.margins import Allowance, calls, is_tie, unit_roundoff
from r18.evaluate.pair import Pair, _roundoff
from r18.evaluate.record import save
from r18.evaluate.request import Request
from r18.evaluate.rows import OK, UNREADABLE
from r18.evaluate.run import Progress, check_ready, journal_of
from r18.evaluate.sources import Item
from r18.graph.precision import FP32, FP64, INT8
from r18.graph.resnet import tiny
from r18.images.preprocess import preprocess_batch
from r18.machine import machine
from r18.report.tables import rendered
from r18.weights.manifest import write_manifest
from support import ROOT, run_python


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven photographs; the fifth file is no image."""
    path = photographs(tmp_path_factory.mktemp("images"), numbered(11))
    (path / numbered(11)[4]).write_bytes(b"\x89PNG and nothing that follows")
    return path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


# -- the margin rule ---------------------------------------------------------------------------


def test_calls_and_ties() -> None:
    expected = np.array([[1.0, 3.0, 2.5], [2.0, 2.0, 0.0]])
    first, second = calls(np.array([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]]), expected, first_image=7)
    assert (first.image, first.margin, first.first, first.second, first.got) == (7, 0.5, 1, 2, 2)
    assert (second.image, second.margin, second.first, second.second) == (8, 0.0, 0, 1)
    assert first.is_tie(0.25)
    assert not first.is_tie(0.24)
    assert is_tie(0.0, 0.0)


def test_what_may_be_lost() -> None:
    assert unit_roundoff("bfloat16") == 2.0**-8
    known = {"fp64": -53, "fp32": -24, "fp16x3": -23, "tf32": -11, "fp16": -11, "bf16": -8}
    assert {name: _roundoff(name) for name in known} == {n: 2.0**e for n, e in known.items()}
    with pytest.raises(UnknownName, match="unknown floating-point format 'int8'"):
        Allowance.of(INT8, 8)
    assert Allowance.of(FP32, 8).most(1e-5, 1.0) == 8e-5
    assert Allowance.of(FP32, 8).most(0.0, 3.0) == 8 * 2.0**-24
    assert Allowance.of(FP64, 8).most(1e-5, 1.0) == pytest.approx(16e-5 * 2.0**-29)


# -- a run -------------------------------------------------------------------------------------


def test_every_image_is_in_the_table_once(folder: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    done = run(folder, tmp_path / "t.csv", on_progress=seen.append)
    rows = table(tmp_path / "t.csv")
    assert [row["file"] for row in rows] == numbered(11)
    assert [row["file"] for row in rows if row["status"] != OK] == [numbered(11)[4]]
    assert rows[4]["status"] == UNREADABLE
    assert rows[4]["error"].startswith("not an image of a known format")
    assert not journal_of(tmp_path / "t.csv").exists()
    summary = done.summary
    assert (summary.images, summary.unreadable, summary.compared) == (11, 1, 10)
    assert summary.agree_top1 == summary.agree_top5 == 10
    assert summary.changed == ()
    assert summary.bound is not None
    assert 0 < summary.bound < 1e-2
    assert [progress.done for progress in seen] == [0, 3, 6, 9, 11]
    assert seen[-1] == Progress(11, 11, 0, 10, 10)


def test_the_classes_are_those_of_the_programs(folder: Path, tmp_path: Path) -> None:
    """Classes are the program's at every batch size: padding leaks nowhere, rows stay in order."""
    from r18.backend import CompileOptions
    from r18.backend.registry import load_backend
    from r18.graph.resnet import tiny

    names = [name for index, name in enumerate(numbered(11)) if index != 4]
    pixels = preprocess_batch([folder / name for name in names], weights().preprocess)
    program = load_backend("numpy").compile(tiny(), weights(), CompileOptions(10, "fp64"))
    exact = program(pixels)
    for batch in (1, 4, 11):
        out = tmp_path / f"{batch}.csv"
        run(folder, out, request(batch=batch))
        rows = {row["file"]: row for row in table(out)}
        for name, logits in zip(names, exact, strict=True):
            order = [str(index) for index in np.argsort(-logits)[:5]]
            assert [rows[name][f"reference_{place}"] for place in range(1, 6)] == order
            assert [rows[name][f"backend_{place}"] for place in range(1, 6)] == order
            ends = np.sort(logits)
            assert float(rows[name]["margin"]) == pytest.approx(ends[-1] - ends[-2], rel=1e-9)


def test_programs_take_turns_and_times_are_an_image(folder: Path) -> None:
    ticks = iter(range(1000))
    pair = Pair(request(batch=4), weights(), clock=lambda: float(next(ticks)))
    item = Item("x")
    image = preprocess_batch([folder / numbered(11)[0]], weights().preprocess)[0]
    found = pair.evaluate([item], [Decoded(image)])
    pair.close()
    assert found.times is not None
    assert (found.times.backend_ms, found.times.reference_ms) == (250.0, 250.0)


def test_without_a_reference(folder: Path, tmp_path: Path) -> None:
    done = run(folder, tmp_path / "t.csv", request(against=None))
    assert (done.summary.compared, done.summary.bound, done.summary.speedup) == (0, None, None)
    assert len(done.running) == 1
    assert table(tmp_path / "t.csv")[0]["reference_1"] == ""
    assert table(tmp_path / "t.csv")[0]["agree_top1"] == ""


def test_a_precision_that_the_reference_lacks(folder: Path) -> None:
    """NumPy has no float16, so its loss is float32's, scaled by the ratio of roundoffs."""
    pair = Pair(request(against_precision="fp32"), weights())
    names = [folder / name for name in numbered(3)]
    pixels = preprocess_batch(names, weights().preprocess)
    plain = pair.bound(pixels)
    exact = pair._exact(pixels)
    narrow = pair._loss("fp16", exact, pixels)
    assert narrow == pytest.approx(pair._loss("fp32", exact, pixels) * 2**13)
    assert 0 < plain < narrow
    pair.close()


# -- wrong backends ----------------------------------------------------------------------------


def test_other_classes_are_found(folder: Path, tmp_path: Path) -> None:
    summary = run(
        folder, tmp_path / "t.csv", request(backend=f"{Rolled.__module__}:Rolled")
    ).summary
    assert summary.agree_top1 == 0
    assert len(summary.changed) == 10


def test_logits_that_are_not_finite_are_found(folder: Path, tmp_path: Path) -> None:
    summary = run(folder, tmp_path / "t.csv", request(backend="evaluate_support:Spoiled")).summary
    assert [row.file for row in summary.changed] == [numbered(11)[i] for i in (0, 3, 6, 9)]
    assert "1 of 10 logits of the backend are not finite" in summary.changed[0].error
    assert summary.agree_top1 == 6


@pytest.mark.parametrize(("gap", "ties"), [(8e-6, 10), (0.5, 0)])
def test_near_ties_are_no_findings(folder: Path, tmp_path: Path, gap: float, ties: int) -> None:
    """Two exchanged classes are a near tie within rounding, and a wrong class beyond it."""
    file = tmp_path / "twins.npz"
    np.savez(file, **dict(twins(gap)))  # type: ignore[arg-type]
    made = request(backend="evaluate_support:Swapped")
    asked = replace(made, weights=str(file), weights_sha256=twins(gap).sha256)
    summary = run(folder, tmp_path / "t.csv", asked).summary
    assert (summary.compared, summary.agree_top1, summary.agree_top5) == (10, 0, 10)
    assert summary.near_ties == ties
    assert len(summary.changed) == 10 - ties
    assert {row["near_tie"] for row in table(tmp_path / "t.csv") if row["near_tie"]} == {
        "true" if ties else "false"
    }


# -- going on ----------------------------------------------------------------------------------


class Stop(Exception):
    """An exception that interrupts a run in these tests."""


def interrupted(folder: Path, out: Path, after: int, asked: Request | None = None) -> None:
    def stop(progress: Progress) -> None:
        if progress.done >= after:
            raise Stop

    with pytest.raises(Stop):
        run(folder, out, asked, on_progress=stop)


def test_a_run_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "whole.csv")
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    interrupted(folder, out, 9)
    seen: list[Progress] = []
    summary = run(folder, out, on_progress=seen.append).summary
    assert [progress.done for progress in seen] == [9, 11]
    assert seen[-1] == Progress(11, 11, 9, 10, 10)
    assert out.read_text() == (tmp_path / "whole.csv").read_text()
    assert (summary.images, summary.agree_top1) == (11, 10)


def test_a_run_that_was_stopped_before_its_table_writes_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    interrupted(folder, out, 11)
    seen: list[Progress] = []
    run(folder, out, on_progress=seen.append)
    assert [progress.done for progress in seen] == [11]
    assert [row["file"] for row in table(out)] == numbered(11)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"precision": "fp64"}, "precision: fp32 there, fp64 now"),
        ({"batch": 4}, "batch: 3 there, 4 now"),
        ({"backend": "evaluate_support:Rolled"}, "backend: numpy there, evaluate_support:Rolled"),
        ({"against": None}, "against: numpy there, None now"),
        ({"version": "0.0"}, "request is of r18 0.0"),
    ],
)
def test_results_of_another_request_are_never_mixed(
    folder: Path, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    with pytest.raises(R18Error, match=match):
        run(folder, out, request(**change))
    run(folder, out)


def test_other_weights_and_other_images_are_never_mixed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    interrupted(folder, out, 3)
    file = tmp_path / "twins.npz"
    np.savez(file, **dict(twins(0.5)))  # type: ignore[arg-type]
    other = replace(request(), weights=str(file), weights_sha256=twins(0.5).sha256)
    with pytest.raises(UsageError, match=r"weights_sha256: .*… there, .*… now"):
        run(folder, out, other)
    with pytest.raises(UsageError, match="images_sha256: "):
        run(photographs(tmp_path / "others", numbered(4)), out)
    with pytest.raises(WeightsError, match="the file here is another one"):
        replace(request(), weights=str(file)).load()
    summary = run(folder, out, other, restart=True).summary
    assert summary.images == 11


def test_a_finished_table_is_not_replaced_unasked(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    out.write_text("mine")
    with pytest.raises(UsageError, match=r"results of an earlier evaluation\n.*--restart"):
        run(folder, out)
    assert out.read_text() == "mine"
    run(folder, out, restart=True)
    assert len(table(out)) == 11


NO_TABLE = "is no table of r18 evaluate; name another file, or delete it"


def test_a_list_of_labels_is_not_called_an_earlier_evaluation(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "labels.csv"
    out.write_text("a.png,3\n")
    with pytest.raises(UsageError) as refused:
        run(folder, out)
    assert str(refused.value) == (
        f"'{out}' {NO_TABLE}\n"
        "  it does not hold the results of an earlier evaluation\n"
        "  --restart would replace it all the same, if it is no list of labels"
    )
    assert not journal_of(out).exists()


@pytest.mark.parametrize("text", ["a.png,3\n", '"', "file,status\n", "\xff\n" * 9000])
def test_a_run_that_goes_on_replaces_no_other_file(folder: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "labels.csv"
    interrupted(folder, out, 3)
    out.write_text(text, "latin-1")
    kept = journal_of(out).read_bytes()
    with pytest.raises(UsageError, match=NO_TABLE):
        run(folder, out)
    assert (out.read_text("latin-1"), journal_of(out).read_bytes()) == (text, kept)
    out.unlink()
    assert run(folder, out).resumed


def test_a_parquet_file_of_something_else_is_never_replaced(folder: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    out = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"file": ["a.png"], "label": [3]}), out)
    mine = out.read_bytes()
    for held in (mine, b"mine", mine[:-9]):
        out.write_bytes(held)
        for restart in (False, True):
            with pytest.raises(UsageError) as refused:
                run(folder, out, restart=restart)
            assert str(refused.value) == f"'{out}' {NO_TABLE}"
        assert out.read_bytes() == held
    out.unlink()
    run(folder, out)
    with pytest.raises(UsageError, match=r"results of an earlier evaluation\n.*--restart"):
        check_ready(out, restart=False)
    check_ready(out, restart=True)


def test_an_earlier_table_next_to_a_journal_is_replaced(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    run(folder, out)
    earlier = out.read_bytes()
    out.unlink()
    interrupted(folder, out, 3)
    out.write_bytes(earlier.replace(b"\n", b"\r\n"))  # as an editor saves it
    assert run(folder, out).resumed
    assert out.read_bytes() == earlier


def test_an_empty_file_and_a_pipe_may_be_there(folder: Path, tmp_path: Path) -> None:
    out, pipe = tmp_path / "t.csv", tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    check_ready(pipe, restart=False)
    out.touch()
    interrupted(folder, out, 3)
    assert journal_of(out).exists(), "the file was taken for one that another run wrote just now"
    assert run(folder, out).resumed
    assert len(table(out)) == 11


# -- the command -------------------------------------------------------------------------------

TINY = ("--network", "tiny", "--weights", "synthetic", "--backend", "numpy", "--batch", 4)
ITSELF = ("--against", "numpy", "--against-precision", "fp64")


def command(folder: Path, out: Path, *more: object) -> Done:
    return r18("evaluate", "--images", folder, "--out", out, *TINY, *ITSELF, *more)


def lines(text: str) -> dict[str, str]:
    return dict(line.split(" = ") for line in text.splitlines() if " = " in line)


@pytest.mark.parametrize("given", ["", "labels.csv", "none"])
def test_the_list_of_labels_is_never_replaced(folder: Path, tmp_path: Path, given: str) -> None:
    images = tmp_path / "images"
    shutil.copytree(folder, images)
    labels = images / "labels.csv"
    labels.write_text("file,label\n" + "".join(f"{name},0\n" for name in numbered(11)))
    before = labels.read_bytes()
    named = ("--labels", images / given if given == labels.name else given) if given else ()
    done = command(images, labels, "--restart", *named)
    assert done.code == 2
    assert f"--out '{labels}' is a list of labels: name another file" in done.err
    assert labels.read_bytes() == before


def test_a_reference_that_does_not_exist_is_named(folder: Path, tmp_path: Path) -> None:
    done = command(folder, tmp_path / "t.csv", "--against", "nonne")
    assert done.code == 2
    assert "unknown reference 'nonne', did you mean 'none'?" in done.err
    assert "Give --against one of these, or 'module:attr'." in done.err


def test_the_command_prints_the_numbers(folder: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    run(folder, tmp_path / "first.csv")
    classes = [row["backend_1"] or "0" for row in table(tmp_path / "first.csv")]
    classes[0] = str((int(classes[0]) + 1) % 10)
    listed = "".join(f"{n},{c}\n" for n, c in zip(numbered(11), classes, strict=True))
    labels.write_text("file,label\n" + listed)
    done = command(
        folder,
        tmp_path / "t.csv",
        "--labels",
        labels,
        "--against",
        "r18_torch:cpu",
        "--against-precision",
        "fp32",
    )
    assert done.code == 0, done.err
    found = lines(done.out)
    assert list(found) == [
        "images",
        "unreadable",
        "agree_top1",
        "agree_top5",
        "near_ties",
        "accuracy",
        "torch_accuracy",
        "torch_ms",
        "backend_ms",
        "speedup",
    ]
    assert (found["images"], found["unreadable"]) == ("11", "1")
    assert found["agree_top1"] == "10 (100.00 %)"
    assert found["accuracy"].startswith("top-1 90.00 %, top-5 ")
    assert found["accuracy"].endswith(" of 10")
    assert float(found["speedup"]) > 0
    assert f"UNREADABLE: {numbered(11)[4]}: not an image of a known format" in done.out
    assert "images: 11 in " in done.err
    assert "against: torch, CPU" in done.err
    assert f"results in {tmp_path / 't.csv'}" in done.err


def test_a_record_in_int8_says_how_it_was_quantised(folder: Path, tmp_path: Path) -> None:
    """Each quantisation has its own entry in the record and its own row in the table."""
    kept = tmp_path / "records"
    path = kept / f"evaluate-{model_slug()}.json"
    for bits in (8, 4):
        write_manifest(tmp_path / f"w{bits}", quantised_weights(bits), tiny())
        options = ("--weights", tmp_path / f"w{bits}", "--precision", "int8", "--restart")
        asked = ("--record", "--records", kept, "--labels", "none")
        done = r18(
            *("evaluate", "--images", folder, "--out", tmp_path / "t.csv", "--network", "tiny"),
            *("--backend", "numpy", "--against", "numpy", "--against-precision", "fp64"),
            *(*options, *asked),
        )
        assert done.code in (0, 1), done.err
        assert f"recorded in {path}" in done.err
    entries = json.loads(path.read_text())["entries"]
    assert [name.split("/")[2] for name in entries] == [
        *("int8-w4-nearest-minmax", "int8-w8-nearest-minmax")
    ]
    block = "<!-- table: {} images=IMAGES network=tiny -->\n<!-- /table -->"
    block = block.replace("IMAGES", folder.name)
    cpu = model_slug()
    quantised = rendered(block.format(f"quantised device={cpu} backend=numpy"), kept).splitlines()
    rows = [row for row in quantised if row.startswith("| int")]
    same = [(one["agree_top1"], one["agree_top5"]) for one in reversed(entries.values())]
    assert rows == [
        f"| int{bits} | nearest | minmax | 3 | numpy fp64 | 10 | {first} | {five} |"
        for bits, (first, five) in zip((8, 4), same, strict=True)
    ]
    both = rendered(block.format(f"evaluate devices={cpu} precisions=int8"), kept)
    assert "| int8 (W4 nearest, minmax) |" in both
    with pytest.raises(UsageError, match=r"has an evaluation of .* in fp32"):
        rendered(block.format(f"evaluate devices={cpu} precisions=fp32"), kept)
    with pytest.raises(UsageError, match=r"no evaluation of .* in int8"):
        rendered(block.format(f"quantised device={cpu}"), kept)


def test_the_command_records_and_a_document_quotes_it(folder: Path, tmp_path: Path) -> None:
    """The record and the document's row also say how much of a run an earlier one had done."""
    kept, out = tmp_path / "records", tmp_path / "t.csv"
    first, again = ("--record", "--records", kept), ("--restart",)
    done = command(folder, out, *first, "--labels", "none")
    assert done.code == 0, done.err
    cpu = model_slug()
    path = kept / f"evaluate-{cpu}.json"
    assert f"recorded in {path}" in done.err
    data = json.loads(command(folder, out, "--labels", "none", "--json", *again).out)
    ((name, found),) = json.loads(path.read_text())["entries"].items()
    assert name == f"tiny/numpy/fp32/b{found['batch']}/numpy-fp64/{folder.name}"
    same = ("images", "compared", "agree_top1", "near_ties", "bound", "accuracy")
    assert [found[key] for key in same] == [data[key] for key in same]
    assert (found["changed"], found["not_read"]) == (0, 1)
    assert (found["workers"], found["resumed"], found["accuracy"]) == (None, 0, None)
    assert found["images_per_second"] == pytest.approx(11 / found["seconds"])
    assert str(folder.parent) not in path.read_text()
    text = (
        f"<!-- table: evaluate devices={cpu} images={folder.name} network=tiny -->\n<!-- /table -->"
    )
    row = rendered(text, kept).splitlines()[4]
    start = f"| numpy | {cpu} | fp32 | {found['batch']} | numpy fp64 | 11 | 10 | 0 |  | "
    assert row.startswith(start)
    with pytest.raises(UsageError, match=f"no record of {cpu} has an evaluation of 'x'"):
        rendered(text.replace(folder.name, "x"), kept)
    with pytest.raises(UsageError, match=r"has an evaluation of '.*' with cupy"):
        rendered(text.replace(" network", " backends=cupy network"), kept)


def test_a_resumed_run_says_how_much_was_done(folder: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "t.csv", on_progress=stop)
    done = run(folder, tmp_path / "t.csv")
    assert 0 < done.resumed < 11
    assert done.seconds > 0
    images = image_set(folder)
    path = save(done, request(), images, {"machine": machine()}, tmp_path, workers=2)
    ((name, found),) = json.loads(path.read_text())["entries"].items()
    assert name.endswith(f"/{folder.name}/2-workers")
    assert found["resumed"] == done.resumed
    new = 11 - done.resumed
    assert found["images_per_second"] == pytest.approx(new / done.seconds)


def test_the_command_as_json(folder: Path, tmp_path: Path) -> None:
    done = command(folder, tmp_path / "t.csv", "--json")
    data = json.loads(done.out)
    assert done.code == 0
    assert (data["images"], data["agree_top1"], data["unreadable"]) == (11, 10, 1)
    assert [row["file"] for row in data["not_read"]] == [numbered(11)[4]]
    assert data["request"]["weights_sha256"] == weights().sha256
    assert [line["name"] for line in data["running"]] == ["numpy", "numpy"]


def test_images_that_the_list_leaves_out_are_counted(folder: Path, tmp_path: Path) -> None:
    images, out = numbered(11), tmp_path / "t.csv"
    for listed, said in (
        (images, ""),
        (images[1:], f"1 image of {folder} is not in l.csv: left out\n"),
        ([f"./{images[0]}"], f"10 images of {folder} are not in l.csv: left out\n"),
    ):
        labels = tmp_path / "l.csv"
        labels.write_text("file,label\n" + "".join(f"{name},1\n" for name in listed))
        done = command(folder, out, "--labels", labels, "--restart")
        assert ("left out" in done.err) is bool(said)
        assert said in done.err


def test_another_class_exits_1_and_is_named(folder: Path, tmp_path: Path) -> None:
    done = command(folder, tmp_path / "t.csv", "--backend", "evaluate_support:Rolled")
    assert done.code == 1
    assert "agree_top1 = 0 (0.00 %)" in done.out
    wrong = [line for line in done.out.splitlines() if line.startswith("WRONG: ")]
    assert len(wrong) == 10
    assert wrong[0].startswith(f"WRONG: {numbered(11)[0]}: class ")
    assert " by a margin of " in wrong[0]


def test_near_ties_exit_0_and_nothing_but_them_exits_2(folder: Path, tmp_path: Path) -> None:
    for gap, code in ((8e-6, 2), (0.5, 1)):
        np.savez(tmp_path / f"{gap}.npz", **dict(twins(gap)))  # type: ignore[arg-type]
        swapped = ("--weights", tmp_path / f"{gap}.npz", "--backend", "evaluate_support:Swapped")
        done = command(folder, tmp_path / f"{gap}.csv", *swapped)
        assert done.code == code, done.out
    assert "near_ties = 0 with a margin of at most " in done.out


def test_no_readable_image_exits_2(tmp_path: Path) -> None:
    bad = tmp_path / "images"
    bad.mkdir()
    for name in ("a.png", "b.jpg"):
        (bad / name).write_bytes(b"nothing")
    done = command(bad, tmp_path / "t.csv")
    assert (done.code, lines(done.out)) == (2, {"images": "2", "unreadable": "2"})
    assert "no image could be read" in done.err
    assert {row["status"] for row in table(tmp_path / "t.csv")} == {UNREADABLE}


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (("--out", "t.txt"), "nothing is known about '.txt'"),
        (("--images", "nowhere"), "no such folder"),
        (("--backend", "nunpy"), "did you mean 'numpy'"),
        (("--against", "nunpy"), "did you mean 'numpy'"),
        (("--workers", 2, "--scheduler", "x"), "give one of the two"),
        (("--scheduler", "x", "--backend", "auto"), "--scheduler needs --backend NAME"),
    ],
)
def test_refusals(folder: Path, tmp_path: Path, more: Sequence[object], match: str) -> None:
    done = command(folder, tmp_path / "t.csv", *more)
    assert (done.code, done.out) == (2, "")
    assert match in done.err
    assert not (tmp_path / "t.csv").exists()


def process(folder: Path, out: Path, **env: str) -> Any:
    """The command in its own process, on a backend that kills it at a given run."""
    argv = ["r18", "evaluate", "--images", folder, "--out", out, *TINY, *ITSELF]
    argv = [str(word) for word in (*argv, "--backend", "evaluate_support:Killed")]
    code = f"import sys; sys.argv = {argv!r}; from r18.cli import main; main()"
    return run_python(code, path=[ROOT / "tests"], env=env)


def test_a_killed_run_loses_and_repeats_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    killed = process(folder, out, **{KILL_AT: "3"})
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    with closing(sqlite3.connect(journal_of(out))) as database:
        kept = [json.loads(file) for (file,) in database.execute("SELECT file FROM images")]
    assert kept == numbered(8)
    done = process(folder, out)
    assert done.returncode == 0, done.stderr
    assert "going on: 8 of 11 images are done" in done.stderr
    assert lines(done.stdout)["agree_top1"] == "10 (100.00 %)"
    command(folder, tmp_path / "whole.csv")
    assert out.read_text() == (tmp_path / "whole.csv").read_text()
    assert not journal_of(out).exists()
