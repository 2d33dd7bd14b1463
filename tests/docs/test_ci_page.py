"""`docs/ci.md`: its test runs, its workflows are YAML, its profiles are those that there are."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from r18_oracle.search.profiles import PROFILES
from support import ROOT

TEXT = (ROOT / "docs" / "ci.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
KERNEL, TEST = (text for kind, text in BLOCKS if kind == "python")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "test_my_kernels.py").write_text(TEST, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not cuda"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_its_test_passes_and_would_fail(tmp_path: Path) -> None:
    """The page's test passes on its kernel, and fails on the same kernel without a bias."""
    wrong = KERNEL.replace("torch.addmm(b, x, w.T)", "x @ w.T")
    assert wrong != KERNEL
    right_folder, wrong_folder = tmp_path / "right", tmp_path / "wrong"
    for folder, kernel in ((right_folder, KERNEL), (wrong_folder, wrong)):
        folder.mkdir()
        (folder / "my_kernels.py").write_text(kernel, "utf-8")
    done = run(right_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    done = run(wrong_folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "verdict   wrong: " in done.stdout
    assert "r18 replay findings/" in done.stdout
    assert list((wrong_folder / "findings").glob("*.json"))


def test_its_workflows_are_jobs() -> None:
    jobs = [yaml.safe_load(text)["jobs"] for kind, text in BLOCKS if kind == "yaml"]
    assert [list(job) for job in jobs] == [["cpu"], ["gpu"]]
    for job in jobs:
        for name, settings in job.items():
            assert {"runs-on", "timeout-minutes", "steps"} <= settings.keys(), name
            assert all("run" in step or "uses" in step for step in settings["steps"])
    assert jobs[1]["gpu"]["env"]["KERNEL_PROFILE"] in PROFILES


def test_its_profiles_are_all_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \| ([\w ]+) \|", TEXT, re.MULTILINE)
    shares = {(1, 1): "all", (1, 2): "half of them or all", (3, 1): "a third of them"}
    assert rows == [
        (p.name, f"{p.examples:,}", f"{p.max_macs:,}", shares[p.every, p.twins])
        for p in PROFILES.values()
    ]


def test_its_extras_exist() -> None:
    """The extras on the page and in the Dockerfile exist."""
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    named = re.findall(r"'r18\[([\w,]+)\]'", TEXT) + re.findall(r"EXTRAS=([\w,]+)", TEXT)
    (built,) = re.findall(r"^ARG EXTRAS=([\w,]+)$", dockerfile, re.MULTILINE)
    assert len(named) == 3
    assert {name for names in (*named, built) for name in names.split(",")} <= EXTRAS.keys()


def test_the_container_is_given_what_the_wheel_is_made_from() -> None:
    """The container gets all files that the wheel is made from, and they exist. It is not built."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    given = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in given)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = {"r18" if name == "." else name for name in _where(project)}
    read = {project["project"]["readme"], *project["project"]["license-files"]}
    assert given >= {*folders, *read, "pyproject.toml", "MANIFEST.in"}


def _where(project: dict[str, dict[str, dict[str, dict[str, dict[str, list[str]]]]]]) -> list[str]:
    """The folders in which setuptools finds packages."""
    return project["tool"]["setuptools"]["packages"]["find"]["where"]
