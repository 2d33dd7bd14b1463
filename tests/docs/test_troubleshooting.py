"""The troubleshooting page: every cause is planted, and its row's command prints what the row says.

Commands run as printed, but on the tiny network, which takes seconds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from commands import Done, r18
from planted import BY_NAME
from r18.backend import CompileOptions, Program
from r18.backend.registry import load_backend
from r18.graph.resnet import network
from r18.images.preprocess import Preprocess, preprocess_image
from r18.weights import load_weights
from r18_oracle.check.fence import fences_hold
from r18_oracle.findings import load
from r18_oracle.search import verify as verify_module
from r18_oracle.search.worker import Pool
from support import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
BATCH = 2
NETWORK = ("--network", "tiny")

PLANTED = {
    "stride": ["conv2d_stride_ignored_down", "conv2d_aligned_at_the_far_end"],
    "padding": ["conv2d_padding_replicates", "conv2d_padding_wraps"],
    "kernel flipped": ["conv2d_flipped_kernel", "conv2d_swapped_kernel_axes"],
    "lower precision": ["conv2d_factors_in_tf32", "conv2d_factors_in_float16"],
    "batch index": ["conv2d_first_image_only"],
    "eps": ["batchnorm_eps_of_another_framework", "batchnorm_eps_outside_root"],
    "variance as deviation": ["batchnorm_variance_as_deviation"],
    "mean": ["batchnorm_mean_ignored", "batchnorm_mean_after_scale"],
    "residual": ["add_first_input_twice", "add_subtracts"],
    "GAP divisor": ["gap_divisor_of_imagenet", "gap_divisor_less_one"],
    "FC transposed": ["linear_weight_transposed"],
    "strides swapped": ["conv2d_swapped_strides"],
    "pooling's padding": ["maxpool2d_padding_wins"],
    "NaN lost": ["maxpool2d_swallows_nan"],
    "tail": ["linear_tail_ignored"],
    "not all is written": ["conv2d_last_columns_unwritten", "conv2d_last_channels_unwritten"],
    "writes too far": ["conv2d_writes_past_the_end", "conv2d_writes_one_image_too_far"],
    "reads too far": ["relu_looks_past_its_input"],
    "old values": ["conv2d_accumulates_on_output", "conv2d_stale_border"],
    "order of summation": ["conv2d_changing_order"],
    "synchronisation": ["relu_synchronisation_dropped"],
    "input": ["relu_input_overwritten"],
    "state between calls": ["conv2d_session_without_stride"],
}
"""The causes that lie in a kernel: their words in bold on the page, with names of `planted`."""

OTHERS = {
    "preprocessing",
    "name",
    "device",
    "precision",
    "weights",
    "fixture",
    "synthetic weights",
}
"""The other causes, each with a test of its own."""


# -- the page ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a table: its first cell, the cause, the command, and the command's output."""

    first: str
    cause: str
    command: tuple[str, ...]
    shows: tuple[str, ...]


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def rows() -> dict[str, Row]:
    """The rows, by the cause's words in bold."""
    found: dict[str, Row] = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        bold = re.search(r"\*\*(.+?)\*\*", line)
        if line.startswith("| ") and bold:
            assert bold[1] not in found
            *_, cause, command, shows = cells
            found[bold[1]] = Row(cells[0], cause, quoted(command), quoted(shows))
    return found


ROWS = rows()


def test_every_cause_on_the_page_is_planted_here() -> None:
    assert set(ROWS) == set(PLANTED) | OTHERS
    assert {fault for faults in PLANTED.values() for fault in faults} <= set(BY_NAME)
    for row in ROWS.values():
        assert row.command, row
        assert row.shows, row


def test_the_commands_of_the_page_exist() -> None:
    page = PAGE.read_text("utf-8")
    commands = [c for c in quoted(page.replace("```", "")) if c.startswith("r18 ")]
    assert len(commands) > len(ROWS)
    for command in {shlex.split(c)[1] for c in commands}:
        assert r18(command, "--help").code == 0


# -- kernels -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("R18_BACKEND", raising=False)
        yield


@pytest.fixture(scope="module")
def pool(_variables: None) -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture
def one_worker(pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use one worker for all runs, as starting one takes seconds, and a new folder for files."""

    def kept(jobs: Any, *, workers: Any = None, **options: Any) -> Any:
        return pool.run(jobs, **options)

    monkeypatch.setattr(verify_module, "run_jobs", kept)
    monkeypatch.chdir(tmp_path)


def run(command: str, backend: str, *more: str) -> Done:
    """Run a command of the page, with the backend for `$BACKEND`."""
    program, *arguments = shlex.split(command.replace("$BACKEND", backend))
    assert program == "r18"
    return r18(*arguments, *more)


def verified(cause: str, fault: str) -> Done:
    (command,) = ROWS[cause].command
    return run(command, f"planted:FAULT.{fault}", *NETWORK)


@pytest.mark.parametrize(
    ("cause", "fault"), [(cause, fault) for cause, faults in PLANTED.items() for fault in faults]
)
@pytest.mark.usefixtures("one_worker")
def test_the_rows_command_shows_a_kernels_fault(cause: str, fault: str) -> None:
    if cause == "reads too far" and not fences_hold():
        pytest.skip("this system does not tell what memory was touched")
    done = verified(cause, fault)
    assert done.code == 1, done.err
    if cause in SHOWN:
        assert re.search(SHOWN[cause], done.out), done.out
    else:
        for shown in ROWS[cause].shows[:1]:
            assert shown in done.out, done.out


SHOWN = {
    "stride": r"stride=(?!1×1,)\d+×\d+",
    "kernel flipped": r"kernel_size=(?!1×1,)\d+×\d+",
    "padding": r"padding=(?!0×0\))\d+×\d+",
    "GAP divisor": r"gap\(\) 1×1×\d+×\d+ → 1×1|got inf",
    "strides swapped": r"stride=(\d+)×(?!\1,)\d+",
    "FC transposed": r"linear\(in_features=(?!1,)\d+, out_features=(?!1\))\d+\)",
    "tail": r"in_features=(?!\d*[048],)\d+",
}
"""Patterns for output that varies; the page shows one example of it."""


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("eps", "batchnorm_eps_of_another_framework"),
        ("eps", "batchnorm_eps_outside_root"),
        ("variance as deviation", "batchnorm_variance_as_deviation"),
    ],
)
@pytest.mark.usefixtures("one_worker")
def test_eps_and_variance_are_told_apart_by_size(cause: str, fault: str, tmp_path: Path) -> None:
    """A wrong eps is off by less than 1,000 times the bound, a wrong variance by over 10,000."""
    assert verified(cause, fault).code == 1
    (path,) = (tmp_path / "exports" / "findings").glob("*.json")
    finding = load(path)
    assert finding.got is not None
    assert finding.expected is not None
    assert finding.bound is not None
    ratio = abs(finding.got - finding.expected) / finding.bound
    assert (1 < ratio < 1e3) if cause == "eps" else ratio > 1e4


# -- checkpoints -------------------------------------------------------------------------------


def dumped(backend: str, folder: Path) -> Path:
    done = r18(
        *("dump", "--backend", backend, "--checkpoints", "all", "--out", folder),
        *NETWORK,
        *("--batch", BATCH),
    )
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped("torch", tmp_path_factory.mktemp("dumps") / "right")


def first_bad(done: Done) -> str | None:
    found = re.search(r"first bad checkpoint: (\S+)", done.out)
    assert done.code == bool(found), done
    return found[1] if found else None


AT_CHECKPOINTS = [
    (cause, fault)
    for cause, faults in PLANTED.items()
    if ROWS[cause].first.startswith("`")
    for fault in faults
]


@pytest.mark.parametrize(("cause", "fault"), AT_CHECKPOINTS)
def test_the_first_bad_checkpoint_is_the_rows(
    cause: str, fault: str, right: Path, tmp_path: Path
) -> None:
    mine = dumped(f"planted:FAULT.{fault}", tmp_path / "mine")
    atol = ("--atol", "1e-5") if cause == "eps" else ()
    assert first_bad(r18("diff", right, mine, *atol)) == quoted(ROWS[cause].first)[0]


def test_there_is_a_row_for_each_part_of_the_network() -> None:
    firsts = {quoted(ROWS[cause].first)[0] for cause, _ in AT_CHECKPOINTS}
    assert {"conv1", "bn1", "layer1.0.add", "gap", "logits"} <= firsts


UNSEEN = [
    "conv2d_swapped_strides",
    "maxpool2d_padding_wins",
    "maxpool2d_swallows_nan",
    "linear_tail_ignored",
]


@pytest.mark.parametrize("fault", UNSEEN)
def test_what_the_network_does_not_show(fault: str, right: Path, tmp_path: Path) -> None:
    mine = dumped(f"planted:FAULT.{fault}", tmp_path / "mine")
    assert first_bad(r18("diff", right, mine)) is None


# -- preprocessing -----------------------------------------------------------------------------


def as_bgr(image: Image.Image) -> np.ndarray[Any, Any]:
    return preprocess_image(Image.merge("RGB", image.split()[::-1]))


def not_scaled(image: Image.Image) -> np.ndarray[Any, Any]:
    right = preprocess_image(image)
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (MEAN, STD))
    pixels: np.ndarray[Any, Any] = (right * std + mean) * 255
    return pixels


def not_normalised(image: Image.Image) -> np.ndarray[Any, Any]:
    pixels: np.ndarray[Any, Any] = not_scaled(image) / 255
    return pixels


def of_another_network(image: Image.Image) -> np.ndarray[Any, Any]:
    half = (0.5, 0.5, 0.5)
    return preprocess_image(image, Preprocess(mean=half, std=half))


def without_antialiasing(image: Image.Image) -> np.ndarray[Any, Any]:
    width, height = image.size
    scale = 256 / min(width, height)
    size = (round(width * scale), round(height * scale))
    return preprocess_image(image.resize(size, Image.Resampling.NEAREST))


def another_crop(image: Image.Image) -> np.ndarray[Any, Any]:
    return preprocess_image(image, Preprocess(resize=224))


MEAN, STD = Preprocess().mean, Preprocess().std
WRONG = [as_bgr, not_scaled, not_normalised, of_another_network, without_antialiasing, another_crop]


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph with colours, and details that a resize must not skip."""
    path: Path = tmp_path_factory.mktemp("photos") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    pixels[..., 0] //= 2
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def first_layer() -> Iterator[Program]:
    schedule = network("resnet18")
    first = schedule.between(schedule.input, "conv1")
    program = load_backend("numpy").compile(
        first, load_weights("synthetic", schedule), CompileOptions(fusion="none")
    )
    yield program
    program.close()


def written(folder: Path, image: np.ndarray[Any, Any], first_layer: Program) -> None:
    """Write the files of a program in another language: its input and its first layer's output."""
    folder.mkdir()
    image[None].astype("<f4").tofile(folder / "image.bin")
    first_layer(image[None].astype(np.float32)).astype("<f4").tofile(folder / "conv1.bin")


def test_preprocessing(
    photo: Path, first_layer: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preprocessing mistakes show in the input of ResNet-18, to which a photograph is scaled."""
    monkeypatch.chdir(photo.parent)
    dump, diff = ROWS["preprocessing"].command
    out = tmp_path / "right"
    assert run(dump.replace("--out right", f"--out {out}"), "").code == 0
    picture = Image.open(photo)
    written(tmp_path / "mine", preprocess_image(picture), first_layer)
    assert first_bad(r18("diff", out, tmp_path / "mine")) is None
    (shown,) = ROWS["preprocessing"].shows
    for number, wrong in enumerate(WRONG):
        mine = tmp_path / f"mine{number}"
        written(mine, wrong(picture), first_layer)
        done = run(diff.replace("right mine", f"{out} {mine}"), "")
        assert done.code == 1, wrong
        assert shown in done.out, wrong


# -- what does not run -------------------------------------------------------------------------


def test_an_unknown_name() -> None:
    row = ROWS["name"]
    done = r18("plan", "--backend", "nunpy")
    assert done.code == 2
    assert quoted(row.first)[0] in done.err
    assert row.shows[0] in done.err
    assert "numpy" in run(row.command[0], "").out


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is installed without its device is listed with the cause and remedy."""
    info = tmp_path / "lost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[r18.backends]\nlost = lost_backend:Backend\n")
    (tmp_path / "lost_backend.py").write_text(
        "from r18.errors import BackendUnavailable\n"
        "def Backend():\n"
        "    raise BackendUnavailable('lost', 'no device was found', 'Plug one in.')\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the process that lists backends
    row = ROWS["device"]
    done = r18("dump", "--backend", "lost", "--out", tmp_path / "dump")
    assert done.code == 2
    assert quoted(row.first)[0] in done.err
    done = run(row.command[0], "")
    assert done.code == 0
    assert re.search(rf"^lost +{row.shows[0]}", done.out, re.MULTILINE)
    assert "lost: no device was found\n  Plug one in." in done.out


def test_a_precision_without_a_kernel() -> None:
    row = ROWS["precision"]
    done = run(row.command[0], "numpy", *NETWORK)
    assert done.code == 2
    assert quoted(row.first)[0] in done.err
    assert row.shows[0] in done.err


def test_dumps_of_other_weights_or_input(right: Path, tmp_path: Path) -> None:
    row = ROWS["weights"]
    for name, option in (("weights", ("--weights", "synthetic:1")), ("input", ("--seed", "1"))):
        mine = tmp_path / name
        done = r18(
            *("dump", "--backend", "numpy", "--out", mine, "--checkpoints", "all"),
            *NETWORK,
            *("--batch", BATCH, *option),
        )
        assert done.code == 0
        done = run(row.command[0].replace("right mine", f"{right} {mine}"), "")
        assert done.code == 2
        assert quoted(row.first)[0] in done.err
        assert row.shows[0] + name in done.err


def test_a_fixture_of_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert r18("fixtures", "--outdir", "fixtures", "--steps", "7", *NETWORK).code == 0
    row = ROWS["fixture"]
    done = run(row.command[0], "numpy", *NETWORK)
    assert done.code == 2
    assert quoted(row.first)[0] in done.err
    assert row.shows[0] in done.err


def test_synthetic_weights(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photo.parent)
    row = ROWS["synthetic weights"]
    done = run(row.command[0], "numpy")
    assert done.code == 0
    assert quoted(row.first)[0] in done.err
    assert row.shows[0] in done.err


def test_the_demonstration_has_one_right_kernel_and_a_finding_for_each_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "r18_oracle.demo:Backend"
    assert name in PAGE.read_text("utf-8")
    done = r18("verify", "--backend", name, "--profile", "quick", *NETWORK)
    assert done.code == 1
    wrong = {k.id for k in load_backend(name).kernels() if "/right/" not in k.id}
    found = {
        finding.kernel
        for path in (tmp_path / "exports" / "findings").glob("*.json")
        if (finding := load(path)).check != "coverage"
    }
    assert len(wrong) == 4
    assert found == wrong
