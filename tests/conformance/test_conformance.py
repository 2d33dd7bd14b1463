"""The suite for third parties: the guide's backend passes it, a broken one does not.

It is run as users run it once; after that in this process, with one worker for all runs.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commands import r18
from r18_oracle.search import replay, worker
from r18_oracle.search import verify as verify_module
from r18_oracle.search.worker import THREAD_VARIABLES, Pool
from support import ROOT

pytest_plugins = ["pytester"]

GUIDE = ROOT / "docs" / "write-your-backend.md"
MOST_LINES = 60
TWO_PAGES = 120
"""Lines of two pages of the guide."""

BROKEN = {
    "short_pool": ("x.mean(axis=(2, 3))", "x[..., 1:].mean(axis=(2, 3))"),
    "no_padding": ("constant_values=fill)", "mode='edge')"),
    "no_batchnorm": ("in zip(OPS, RULES)", "in zip(OPS, RULES) if op is not BatchNorm"),
}
"""The guide's backend with one change each: the module's name, the old text and the new text."""


def example() -> str:
    """The guide's backend, which is its only block of Python."""
    blocks = GUIDE.read_text("utf-8").split("```python\n")[1:]
    (block,) = (block.partition("```")[0] for block in blocks)
    return block


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's backend and the broken ones."""
    folder: Path = tmp_path_factory.mktemp("backends")
    (folder / "my_backend.py").write_text(example(), "utf-8")
    for name, (line, by) in BROKEN.items():
        assert example().count(line) == 1
        (folder / f"{name}.py").write_text(example().replace(line, by), "utf-8")
    return folder


def python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the folder, from which it imports; one thread, as the sizes are tiny."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("R18_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment |= dict.fromkeys(THREAD_VARIABLES, "1") | variables
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# -- the guide, in processes of its own --------------------------------------------------------


def test_the_guide_is_short_and_its_backend_complete() -> None:
    assert len(example().splitlines()) <= MOST_LINES
    text = GUIDE.read_text("utf-8").splitlines()
    assert len(text) <= TWO_PAGES
    assert max(map(len, text)) <= 100
    assert "$ r18 verify --backend my_backend:Backend" in text
    assert "$ pytest --pyargs r18_oracle.conformance --r18-backend my_backend:Backend" in text


def test_the_guides_backend_passes_the_suite_and_junit_says_so(folder: Path) -> None:
    """The guide's backend passes with the profile `brief`; the command below uses `quick`."""
    done = python(
        folder,
        *("-m", "pytest", "--pyargs", "r18_oracle.conformance"),
        *("--r18-backend", "my_backend:Backend", "--r18-network", "tiny"),
        *("--r18-profile", "brief", "--junit-xml", "out.xml"),
        R18_BACKEND="numpy",  # the option is the stronger one
    )
    assert done.returncode == 0, done.stdout
    (report,) = ElementTree.parse(folder / "out.xml").getroot()
    names = [case.attrib["name"] for case in report]
    assert len(names) > 30
    assert [report.attrib[n] for n in ("failures", "errors", "skipped")] == ["0", "0", "0"]
    assert "test_kernel[mine/conv2d/plain/fp32]" in names
    assert "test_network[my_backend:Backend/fp32]" in names


def test_the_plugin_costs_other_projects_nothing(tmp_path: Path) -> None:
    """The plugin, which every run of pytest loads, imports nothing heavy."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n"
        "def test_what_is_loaded(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('r18')\n"
        "    heavy = {'torch', 'numpy', 'hypothesis', 'r18', 'r18_oracle.search.worker'}\n"
        "    assert not heavy & set(sys.modules)\n",
        "utf-8",
    )
    done = python(tmp_path, "-m", "pytest", "test_other.py", R18_BACKEND="no_such_backend")
    assert done.returncode == 0, done.stdout


# -- broken backends, in this process ----------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _one_worker(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        patched.delenv("R18_BACKEND", raising=False)
        with Pool(1) as pool:

            class Kept:
                def __init__(self, workers: int | None = None) -> None: ...
                def __enter__(self) -> Pool:
                    return pool

                def __exit__(self, *error: object) -> None: ...

            def kept(jobs: Any, *, workers: Any = None, **options: Any) -> Any:
                return pool.run(jobs, **options)

            patched.setattr(worker, "Pool", Kept)
            patched.setattr(verify_module, "run_jobs", kept)
            patched.setattr(replay, "run_jobs", kept)
            yield


def suite(pytester: pytest.Pytester, *arguments: str) -> tuple[int, str]:
    """Runs the conformance suite; returns its exit code and output."""
    done = pytester.runpytest_inprocess(
        *("--pyargs", "r18_oracle.conformance", "--r18-network", "tiny", *arguments)
    )
    return int(done.ret), f"{done.stdout}\n{done.stderr}"


def test_the_guides_backend_is_verified_by_the_command() -> None:
    done = r18("verify", "--backend", "my_backend:Backend", "--network", "tiny")
    assert done.code == 0, done.out
    assert " and 1 network in " in done.out.splitlines()[-1]
    assert done.out.endswith("s: no finding\n")


def test_the_guides_backend_takes_four_names_from_the_core() -> None:
    """A backend for the CPU needs only four names from `r18.backend`."""
    imports = [node for node in ast.parse(example()).body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if node.module == "r18.backend" for alias in node.names}
    assert names == {"Backend", "DeviceInfo", "HostKernel", "RoundingContract"}


def test_the_guides_backend_is_timed_by_the_command() -> None:
    timed = r18(
        *("bench", "--backends", "my_backend:Backend,numpy", "--network", "tiny", "--batch", 2),
        *("--warmup", 0, "--repeat", 1, "--peers", "eager", "--per-step", "--check", "--json"),
    )
    assert timed.code == 0, timed.err
    rows = {row["backend"]: row for row in json.loads(timed.out)["rows"]}
    assert {"my_backend:Backend", "numpy"} <= set(rows)
    mine = rows["my_backend:Backend"]
    assert mine["median_ms"] > 0
    assert "mine/conv2d/plain/fp32" in {step["kernel"] for step in mine["steps"]}


def test_the_guides_backend_dumps_checkpoints_that_agree_with_numpys(tmp_path: Path) -> None:
    for backend in ("numpy", "my_backend:Backend", "no_padding:Backend"):
        done = r18(
            *("dump", "--backend", backend, "--network", "tiny", "--fusion", "all"),
            *("--out", tmp_path / backend.partition(":")[0]),
        )
        assert done.code == 0, done.err
    assert r18("diff", tmp_path / "numpy", tmp_path / "my_backend").code == 0
    broken = r18("diff", tmp_path / "numpy", tmp_path / "no_padding")
    assert broken.code == 1
    assert "stem_pool" in broken.out


def test_a_broken_kernel_fails_with_what_to_run(pytester: pytest.Pytester) -> None:
    code, out = suite(
        pytester,
        *("--r18-backend", "short_pool:Backend", "--r18-kernels", "mine/gap/*"),
        *("-k", "test_kernel"),
    )
    assert code == pytest.ExitCode.TESTS_FAILED, out
    assert "mine/gap/plain/fp32: " in out
    assert (
        "  again     pytest --pyargs r18_oracle.conformance -k test_kernel "
        "--r18-backend short_pool:Backend --r18-kernels 'mine/gap/plain/fp32' "
        "--r18-profile quick --r18-seed 0 --r18-network tiny\n"
    ) in out


def test_a_broken_network_fails_with_what_to_run(pytester: pytest.Pytester) -> None:
    code, out = suite(pytester, "--r18-backend", "no_padding:Backend", "-k", "test_network")
    assert code == pytest.ExitCode.TESTS_FAILED, out
    step = "step 'conv1', given the reference's values: error exceeds the bound"
    assert f"mine/conv2d/plain/fp32: checkpoint: {step}" in out
    assert (
        "  again     r18 verify --backend no_padding:Backend --network tiny --precision fp32 "
        "--fusion all --profile quick --seed 0\n"
    ) in out


def test_an_op_without_a_kernel_fails(pytester: pytest.Pytester) -> None:
    code, out = suite(pytester, "--r18-backend", "no_batchnorm:Backend", "-k", "every_problem")
    assert code == pytest.ExitCode.TESTS_FAILED, out
    message = "coverage: no fp32 kernel takes this problem of tiny, nor "
    assert f"no_batchnorm:Backend/batchnorm/*/fp32: {message}" in out


def expected_failure(op: str) -> str:
    return (
        f'[[xfail]]\ntest = "test_kernel[mine/{op}/*]"\n'
        'reason = "pools one pixel too few"\nlink = "https://example.org/issues/7"\n'
    )


def test_expected_failures_are_strict(pytester: pytest.Pytester) -> None:
    """Of two expected failures, one passes, so the run fails until its line is removed."""
    listed = expected_failure("gap") + expected_failure("relu")
    (pytester.path / "known.toml").write_text(listed, "utf-8")
    code, out = suite(
        pytester,
        *("--r18-backend", "short_pool:Backend", "--r18-kernels", "mine/[gr]*"),
        *("-k", "test_kernel", "-rx", "--r18-xfails", "known.toml"),
    )
    assert code == pytest.ExitCode.TESTS_FAILED, out
    assert "XFAIL" in out
    assert "pools one pixel too few (https://example.org/issues/7)" in out
    assert "[XPASS(strict)]" in out
    assert "test_kernel[mine/relu/plain/fp32]" in out
    assert "1 failed, " in out
    assert "1 xfailed" in out


# -- requests that make no sense ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--r18-backend", "nompy"), "unknown backend 'nompy', did you mean 'numpy'?"),
        (("--r18-kernels", "mine/gop/*"), "did you mean 'mine/gap/plain/fp32'?"),
        (("--r18-profile", "quik"), "unknown profile 'quik', did you mean 'quick'?"),
        (("--r18-network", "resnet19"), "unknown network 'resnet19', did you mean 'resnet18'?"),
        (("--r18-xfails", "no-reason.toml"), "no-reason.toml: an [[xfail]] lacks link, reason"),
        (("--r18-xfails", "no-match.toml"), "no test matches 'test_kernel[mine/gop/*]'"),
        (("--r18-xfails", "none.toml"), "cannot read the expected failures of none.toml"),
    ],
)
def test_a_wrong_request_is_a_usage_error(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("R18_BACKEND", "my_backend:Backend")
    (pytester.path / "no-reason.toml").write_text('[[xfail]]\ntest = "test_kernel*"\n', "utf-8")
    (pytester.path / "no-match.toml").write_text(expected_failure("gop"), "utf-8")
    code, out = suite(pytester, *arguments)
    assert code == pytest.ExitCode.USAGE_ERROR, out
    assert message in out


def test_the_variable_takes_names_separated_by_commas(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`R18_BACKEND` takes several names, separated by commas, as `r18 verify` does."""
    monkeypatch.setenv("R18_BACKEND", "my_backend:Backend, auto")
    code, out = suite(pytester, "-k", "probe", "-v")
    assert code == 0, out
    assert "test_probe_says_what_it_runs_on[my_backend:Backend]" in out
    assert "2 passed" in out
