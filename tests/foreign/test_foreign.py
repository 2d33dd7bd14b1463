"""Kernels of other libraries: some through `r18 check`, their known faults, and the record."""

from __future__ import annotations

import ast
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import tool
from r18 import records
from r18.cpu import cpu
from r18.errors import UnknownName
from r18.records.kinds import Check
from r18.report.tables import rendered
from support import ROOT

HERE = Path(__file__).parent
FILES = sorted(path for path in HERE.glob("*_*.py") if path != Path(__file__))
PAGE = (ROOT / "docs" / "check.md").read_text("utf-8")
MOST_LINES = 10
MOST_SECONDS = 60
LEAST_FUNCTIONS = 20

TOOL = runpy.run_path(str(ROOT / "tools" / "check_foreign.py"))


def record() -> Check:
    found = records.load(ROOT / records.FOLDER / "check-cpu.json", Check)
    assert found is not None
    return found


# -- through the command -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch_cpu.py:max_pool2d", "numpy_cpu.py:mean"])
def test_a_function_is_checked_and_recorded(name: str, tmp_path: Path) -> None:
    done = tool("check_foreign", name, "--profile", "brief", "--record", "--records", tmp_path)
    assert done.code == 0, done.err
    assert ": right: it " in done.out
    found = records.load(tmp_path / "check-cpu.json", Check)
    assert found is not None
    ((key, entry),) = found.functions.items()
    assert key == name.replace(".py:", "/")
    assert entry.ok
    assert entry.problems >= 3
    assert entry.found == entry.contract
    assert entry.seconds < MOST_SECONDS
    assert found.runs[entry.run].profile == "brief"


def test_a_library_that_is_missing_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = 'LIBRARY, NEEDS = "Nothing", ("no_such_module",)\n'
    (tmp_path / "no_cpu.py").write_text(source, "utf-8")
    foreign = TOOL["Foreign"].of(tmp_path / "no_cpu.py")
    with pytest.raises(TOOL["Skipped"], match="Nothing: no_such_module is not installed"):
        foreign.device()


def test_a_fault_of_other_instructions_is_not_expected_here(tmp_path: Path) -> None:
    """A fault of other instructions is not expected here; the record keeps the other CPU's
    result."""
    text = (
        'LIBRARY, NEEDS = "PyTorch", ("torch",)\nFAULTS = {"relu": "of another CPU"}\n'
        'FAULTS_WITH = {"relu": "no CPU\'s"}\n'
        '@r18.check.kernel(like="relu", arrays="torch")\ndef relu(x):\n    return x\n'
    )
    file = tmp_path / "other_cpu.py"
    file.write_text(text, "utf-8")
    foreign = TOOL["Foreign"].of(file)
    assert foreign.lacking("relu") == "no CPU's"
    known = next(iter(cpu().instructions), "")
    assert replace(foreign, faults_with={"relu": known}).lacking("relu") == ""
    assert replace(foreign, faults_with={}).lacking("relu") == ""
    file.write_text(text.replace('FAULTS_WITH = {"relu"', 'FAULTS_WITH = {"gelu"'), "utf-8")
    with pytest.raises(UnknownName, match="unknown fault"):
        TOOL["Foreign"].of(file)


def test_a_run_of_nothing_is_refused() -> None:
    done = tool("check_foreign", "torch_cpu.py:conv3d")
    assert (done.code, done.out) == (2, "")
    assert "did you mean 'conv2d'?" in done.err


# -- the faults are the libraries' ---------------------------------------------------------------


def of_onednn(instructions: str) -> pytest.MarkDecorator:
    """Skip if the CPU lacks instructions, for which oneDNN has other kernels that are right."""
    reason = f"needs {instructions}"
    return pytest.mark.skipif(instructions not in cpu().instructions, reason=reason)


@of_onednn("AVX-512 BF16")
def test_onednn_spreads_nan_to_an_output_that_its_pixel_does_not_reach() -> None:
    """oneDNN spreads NaN from the middle pixel of three, which a stride of 2 never reads."""
    x = torch.tensor([1.0, float("nan"), 2.0], dtype=torch.bfloat16).reshape(1, 1, 1, 3)
    w = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    wide = torch.nn.functional.conv2d(x.double(), w.double(), stride=(1, 2))
    assert wide.flatten().tolist() == [1.0, 2.0]
    assert torch.nn.functional.conv2d(x, w, stride=(1, 2)).isnan().any()


def test_onnx_runtime_loses_nan_in_a_maximum() -> None:
    run = adapter("onnxruntime_cpu", "onnxruntime")["run"]
    x = np.full((1, 1, 1, 1), np.nan, np.float32)
    found = run("MaxPool", x, kernel_shape=(1, 1), strides=(1, 1))
    assert found.item() == np.finfo(np.float32).min


@of_onednn("AVX-512")
def test_openvino_strides_the_rows_of_one_channel_and_column() -> None:
    convolved = adapter("openvino_cpu", "openvino")["conv2d"]
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 8, 1)
    w = np.ones((8, 1, 1, 7), np.float32)
    expected = np.repeat(x, 8, axis=1)  # the middle of each window, whatever the stride is
    assert np.array_equal(convolved(x, w, None, 1, (0, 3)), expected)
    assert not np.array_equal(convolved(x, w, None, (1, 2), (0, 3)), expected)


def test_openvino_gives_numbers_for_a_row_with_nan() -> None:
    softmax = adapter("openvino_cpu", "openvino")["softmax"]
    row = np.array([[1.0, np.nan]], np.float32)
    assert torch.softmax(torch.from_numpy(row).double(), 1).isnan().all()
    assert not np.isnan(softmax(row)).all()


def test_scipy_leaves_small_weights_out() -> None:
    correlated = adapter("scipy_cpu", "scipy")["ndimage_correlate"]
    x, w = np.full((1, 1, 1, 1), 1e20), np.full((1, 1, 1, 1), 1e-16)
    assert correlated(x, 4 * w).item() == pytest.approx(4e4)
    assert correlated(x, 2 * w).item() == 0.0  # 2e4


def adapter(name: str, needs: str) -> dict[str, Any]:
    """The functions of a file; skips by name if its library is missing."""
    pytest.importorskip(needs)
    return runpy.run_path(str(HERE / f"{name}.py"))


FAULTY = {path.stem: TOOL["Foreign"].of(path).faults for path in FILES}


# -- the files and the record ----------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_adapters_are_short(path: Path) -> None:
    """Adapters are short, since the library's kernel is to be judged, not code around it."""
    marked = TOOL["Foreign"].of(path).functions
    assert marked
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in marked:
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MOST_LINES, node.name


def test_the_record_has_every_function_that_runs_on_a_cpu() -> None:
    functions = {
        f"{path.stem}/{name}"
        for path in FILES
        for name, arrays in TOOL["Foreign"].of(path).functions.items()
        if arrays in ("torch", "numpy")
    }
    assert set(record().functions) == functions
    assert len(functions) >= LEAST_FUNCTIONS


def test_no_false_alarm_and_no_function_takes_a_minute() -> None:
    """Functions fail only for a reason that their file declares, with a finding, in time."""
    for name, entry in record().functions.items():
        assert entry.seconds < MOST_SECONDS, name
        file, _, function = name.partition("/")
        assert entry.fault == FAULTY[file].get(function, ""), name
        assert entry.ok is not bool(entry.fault), name
        assert entry.ok or entry.findings, name
        assert entry.found is not None, (name, entry.notes)


def test_the_page_has_the_table_of_the_record() -> None:
    assert rendered(PAGE, ROOT / records.FOLDER) == PAGE, "run python tools/make_tables.py"
    for name in record().functions:
        assert f"| `{name}` |" in PAGE
