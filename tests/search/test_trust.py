"""What a file may cause is limited: no import of its own, no weights, no folder's modules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import r18
from r18.backend.registry import check_named
from r18.errors import UsageError, WeightsError
from r18.graph.resnet import tiny
from r18.weights import export_weights, load_weights
from r18_numpy import Backend as NumpyBackend
from r18_oracle.dumps.dumps import write_dump
from r18_oracle.dumps.fixtures import make_fixture
from r18_oracle.findings import RUN, Finding, load, save
from r18_oracle.network.images import seeded
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.search.replay import check_trusted

EVIL = """
import os
open(os.path.join(os.path.dirname(__file__), "it-ran"), "w").close()
from r18_numpy import Backend
"""
RUNS = NetworkRun("tiny", "synthetic", "fp32", "none", 1, 0)


def finding(backend: str, weights: str = "synthetic") -> Finding:
    details = {RUN: {**vars(RUNS), "weights": weights}}
    label = f"{backend}/program/none/fp32"
    return Finding("runs", backend, label, None, "network", 0, "x", details=details)


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module that leaves a mark when it is imported."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def ran(folder: Path) -> bool:
    return (folder / "it-ran").exists()


def test_a_finding_does_not_say_what_is_imported(evil: Path) -> None:
    path = save(finding("evil:Backend"), evil)
    done = r18("replay", path)
    assert done.code == 2
    assert "names the backend 'evil:Backend', a module that would be imported" in done.err
    assert "--backend" in done.err
    assert r18("replay", path, "--backend", "numpy").code == 2
    assert not ran(evil)
    done = r18("replay", path, "--backend", "evil:Backend")
    assert (done.code, done.out[:5]) == (0, "gone:"), done.err
    assert ran(evil)
    assert load(path).describe(path).endswith(f"r18 replay {path} --backend evil:Backend")


def test_a_finding_does_not_say_which_file_is_read(tmp_path: Path) -> None:
    path = export_weights(
        tmp_path / "w.npz", load_weights("synthetic", tiny()), tiny(), format="npz"
    )
    one = finding("numpy", str(path))
    with pytest.raises(WeightsError, match=r"names the weights '.*w.npz'.*\n.*--weights"):
        check_trusted(one, tmp_path / "f.json")
    with pytest.raises(UsageError, match="is of the weights"):
        check_trusted(one, tmp_path / "f.json", weights="synthetic")
    check_trusted(one, tmp_path / "f.json", weights=str(path))
    check_trusted(finding("numpy"), tmp_path / "f.json")
    assert one.command("f.json") == f"r18 replay f.json --weights {path}"


def test_a_dump_does_not_say_what_is_imported_or_read(evil: Path) -> None:
    weights = load_weights("synthetic", tiny())
    file = export_weights(evil / "w.npz", weights, tiny(), format="npz")
    for name in ("a", "b"):
        write_dump(evil / name, NumpyBackend(), tiny(), weights, seeded(tiny()))
        text = json.loads((evil / name / "manifest.json").read_text())
        text["backend"], text["weights"]["source"] = "evil:Backend", str(file)
        (evil / name / "manifest.json").write_text(json.dumps(text))
    said = r18("diff", "a", "b", "--bounds", "--weights", "synthetic")
    assert said.code == 2
    assert "the dump 'a' names the backend 'evil:Backend'" in said.err
    assert not ran(evil)
    said = r18("diff", "a", "b", "--bounds", "--backend", "evil:Backend")
    assert "the dump 'a' names the weights" in said.err
    more = ("--backend", "evil:Backend", "--weights", file)
    assert r18("diff", "a", "b", "--bounds", *more).code == 0
    assert ran(evil)
    assert "--backend is for --bounds" in r18("diff", "a", "b", "--backend", "evil:Backend").err


def test_a_fixture_does_not_say_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_weights(
        tmp_path / "w.npz", load_weights("synthetic", tiny()), tiny(), format="npz"
    )
    weights = load_weights(str(file), tiny())
    make_fixture(2, weights, tmp_path / "step2", network_name="tiny")
    asked = ("step", 2, "--fixture", tmp_path, "--backend", "numpy", "--repeat", 1)
    said = r18(*asked)
    assert said.code == 2
    assert "names the weights" in said.err
    said = r18(
        "step", 2, "--fixture", tmp_path, "--backend", "numpy", "--weights", file, "--repeat", 1
    )
    assert said.code == 0, said.err


def test_installed_backends_may_be_named_by_anybody() -> None:
    check_named("numpy", "the file")
    check_named("a:b", "the file", ["a:b"])
    with pytest.raises(UsageError, match=r"the file names the backend 'a:b\\x1b'"):
        check_named("a:b\x1b", "the file", ["a:b"])


def test_workers_do_not_import_from_the_current_folder_first(tmp_path: Path) -> None:
    """Workers import the user's backend from the current folder, but after installed modules."""
    (tmp_path / "mine.py").write_text("from r18_numpy import Backend\n")
    for name in ("signal", "socket", "threading", "pickle", "numpy", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the folder was imported from')\n")
    console = shutil.which("r18", path=str(Path(sys.executable).parent))
    command = [console, "verify", "--backend", "mine:Backend", "--kernels", "numpy/relu/*/fp32"]
    mine = ("PYTHONPATH", "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    done = subprocess.run(
        [*command, "--network", "tiny", "--workers", "1", "--findings", str(tmp_path / "found")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the folder was imported from" not in done.stdout + done.stderr


def test_the_module_is_the_command_in_any_folder(tmp_path: Path) -> None:
    """`python -m r18` imports nothing from the current folder."""
    (tmp_path / "typer.py").write_text("raise SystemExit('the folder was imported from')\n")
    command = [sys.executable, "-m", "r18", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout[:4]) == (0, "r18 "), done.stderr
