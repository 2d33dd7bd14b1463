"""Fixtures that every test may use, and what tests in several processes need.

`make test` shares the files out to as many processes as there are cores, by pytest-xdist; a file
stays in one, so that what its tests share is made once. `python -m pytest FILE` needs none of it.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def _cores() -> int:
    """The CPUs of this process, as `r18.machine.cpus` has it; that one would load NumPy."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _share_threads(processes: int) -> None:
    """Each process has its share of the cores, but two threads at least: kernels cut their work by
    the number of threads, and would never do so with one. What the user has set stays.

    NOTE: libraries read the variables when they are loaded, so this comes before any of them.
    """
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, str(max(2, _cores() // processes)))
    # Who spins takes the time of the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share_threads(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a container may have fewer cores than its machine."""
    return _cores()


LONGEST = (
    *("check/test_faults.py", "check/test_differential.py"),
    *("backends/numba/test_numba_simulated.py", "backends/cupy/test_cupy_kernels.py"),
    *("dropin/test_torch_dropin.py", "dropin/test_int8.py", "docs/test_tutorial.py"),
    *("check/test_controls.py", "test_publishing.py", "test_checked.py"),
    *("mutation/test_cuda_mutants.py", "mutation/test_mutate.py"),
    *("backends/numba_cpu/test_numba_cpu_conv_maxpool.py", "dropin/test_family.py"),
    *("backends/cupy/test_cupy_ptx.py", "backends/numba_cpu/test_numba_cpu_bfloat16.py"),
    *("search/test_verify.py", "mutation/test_numba_cpu_mutants.py", "generate/test_stems.py"),
    *("sanitize/test_sanitize.py", "cli/test_cli.py", "dropin/test_dynamo.py"),
    *("probe/test_again.py", "search/test_campaign_choices.py", "docs/test_troubleshooting.py"),
    *("backends/numba_cpu/test_numba_cpu.py", "bench/test_profile.py"),
    *("conformance/test_conformance.py", "search/test_worker.py"),
)
"""The files that take longest, 280 seconds to 35 among three processes on two cores, come first, so
that no process is left alone with one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    gone = [name for name in LONGEST if not (HERE / name).is_file()]
    assert not gone, f"LONGEST names files that are gone: {gone}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


gc.disable()  # until every test file is imported: `pytest_collection_finish`


def pytest_collection_finish() -> None:
    _stay()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what libraries find left over as the process ends, they report


@pytest.fixture(scope="module", autouse=True)
def _one_file() -> Iterator[None]:
    yield
    _stay()


def _stay() -> None:
    """Leave all present objects out of later collections: they live to the end.

    PyTorch, Hypothesis and thousands of tests are millions of objects: a collection took a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def kernel_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the CUDA kernels, to be edited, from which entries are compiled."""
    from r18_cupy.cuda import compiler

    folder = tmp_path / "kernels"
    shutil.copytree(compiler.KERNELS, folder)
    monkeypatch.setattr(compiler, "KERNELS", folder)
    compiler._include_paths.cache_clear()
    yield folder
    compiler._include_paths.cache_clear()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared folder (photographs and trained weights): `R18_SHARED`, or beside the project."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("R18_SHARED") or beside)
    if not folder.is_dir():
        pytest.skip("no shared folder: set R18_SHARED")
    return folder
