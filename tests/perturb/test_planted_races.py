"""Perturbation finds each race that is planted in a copy of the CuPy backend. On a GPU.

A missing proxy fence, a relaxed cluster arrival, and a CTA that exits while others may read its
shared memory are not here, as delays do not show them; `tests/backends/cupy/test_cupy_ptx.py`
plants them for `r18 ptxcheck`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from r18.errors import BackendUnavailable
from r18_cupy import Backend
from r18_oracle.check.perturbed import CHECK
from support import ROOT

SECONDS = 120
"""The seconds in which a race has to show."""
CALM_SECONDS = 30
"""The seconds of a run without a race, which need not reach every problem."""
GATHER, STREAM = "implicit_gemm_wgmma/fp16/nhwc", "implicit_gemm_wgmma_stream/fp16/nhwc"
PROGRAM = "program/fp16"


@dataclass(frozen=True)
class Race:
    """A fault: edits to a file of the package, and the kernel or program that shows it."""

    what: str
    runs: str
    file: str
    edits: tuple[tuple[str, str], ...]


RACES = (
    Race(
        "a slot is released before the store has read it",
        f"cupy/conv2d/{STREAM}",
        "kernels/hopper/implicit_gemm_wgmma_persistent.cu",
        (("    if (threadIdx.x == 0) tma_store_wait();\n", ""),),
    ),
    Race(
        "outputs overwrite stages that another warpgroup still multiplies",
        f"cupy/conv2d/{GATHER}",
        "kernels/hopper/gather_kernel.cuh",
        (("    consumers_barrier();  // all stages have been read; the outputs over", "//"),),
    ),
    Race(
        "a stage is released before it is multiplied",
        f"cupy/conv2d/{GATHER}",
        "kernels/hopper/implicit_gemm_wgmma.cu",
        (
            (
                "      mbarrier_wait(pipeline.full(state.stage), state.phase);\n",
                "      mbarrier_wait(pipeline.full(state.stage), state.phase);\n"
                "      if (elected) mbarrier_arrive(pipeline.empty(state.stage));\n",
            ),
            ("      if (k > 0 && elected) mbarrier_arrive(pipeline.empty(before));\n", ""),
            ("    if (count > 0 && elected) mbarrier_arrive(pipeline.empty(before));\n", ""),
        ),
    ),
    Race(
        "pixels are read before the previous launch has ended",
        f"cupy/conv2d/{GATHER}",
        "kernels/hopper/gather.cuh",
        (("  wait_for_previous_launch();\n", ""),),
    ),
    Race(
        "sums are added up before those of other CTAs have arrived",
        f"cupy/conv2d/{GATHER}",
        "kernels/hopper/cluster_split_k.cuh",
        (("    arrivals.wait();\n", ""),),
    ),
    Race(
        "a tile is overwritten before every warp has read it",
        "cupy/linear/tiled/fp32",
        "kernels/ops/linear_tiled.cu",
        (("    __syncthreads();  // the previous tile has been read\n", ""),),
    ),
    Race(
        "a batch is launched before it has arrived",
        PROGRAM,
        "cuda/program.py",
        (("        self._cuda.wait_event(slot.ready)\n", ""),),
    ),
    Race(
        "a batch is copied over one that is still read",
        PROGRAM,
        "cuda/program.py",
        (("            self._copies.wait_event(slot.free)\n", ""),),
    ),
)
RUN = """
import json, sys, time
import r18_cupy
from r18_oracle.check.perturbed import Delays
from r18_oracle.perturb.tasks import perturb_kernel, perturb_program
from r18_oracle.search.profiles import profile
runs, seconds = sys.argv[1:]
asked = dict(
    backend="cupy",
    delays=Delays(tuple(range(16))),
    deadline=time.monotonic() + float(seconds),
    announce=lambda problem, kind, seed: None,
)
if runs.startswith("program/"):
    result = perturb_program(precision=runs.removeprefix("program/"), **asked)
else:
    how = profile("quick")
    result = perturb_kernel(kernel=runs, how=how, seed=0, network_name="resnet18", **asked)
finding = result.finding
print(json.dumps(dict(
    file=r18_cupy.__file__,
    verdict=result.verdict,
    late=result.late,
    check=finding and finding.check,
    said=finding.message if finding else result.broken,
)))
"""


@pytest.fixture(scope="module")
def _gpu() -> None:
    try:
        device = Backend().probe()
    except BackendUnavailable as error:
        pytest.skip(f"needs a GPU: {error.cause}")
    if device.details["compute capability"] != "9.0":
        pytest.skip(f"needs compute capability 9.0: {device}")


def planted(race: Race | None, folder: Path) -> Path:
    """A copy of the package in a folder, with the race if there is one."""
    copied = folder / "r18_cupy"
    source = ROOT / "backends" / "r18_cupy"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    if race is not None:
        path = copied / race.file
        text = path.read_text("utf-8")
        for old, new in race.edits:
            assert text.count(old) == 1, f"{race.file} has not once: {old}"
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
    return copied


def said(race: Race | None, runs: str, folder: Path, seconds: int) -> dict[str, str]:
    """The verdicts of perturbation on the copy, from a process that imports it."""
    copied = planted(race, folder)
    path = [folder, ROOT, ROOT / "backends", ROOT / "oracle"]
    others = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    variables = {"PYTHONPATH": os.pathsep.join([*map(str, path), *others])}
    done = subprocess.run(
        [sys.executable, "-c", RUN, runs, str(seconds)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60 + 2 * seconds,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).parent == copied
    return found


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.what)
def test_a_race_can_be_planted(race: Race, tmp_path: Path) -> None:
    """The kernel of each race exists, and the lines that it changes. No GPU is needed."""
    assert race.runs in {PROGRAM, *(kernel.id for kernel in Backend().kernels())}
    planted(race, tmp_path)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("race", RACES, ids=lambda race: race.what)
def test_a_planted_race_is_found(race: Race, tmp_path: Path) -> None:
    found = said(race, race.runs, tmp_path, SECONDS)
    print(f"\n{race.what}: {found['said']}")
    assert found["verdict"] == "FAIL"
    assert race.runs == PROGRAM or found["check"] == CHECK


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("runs", sorted({race.runs for race in RACES}))
def test_without_a_race_nothing_is_found(runs: str, tmp_path: Path) -> None:
    found = said(None, runs, tmp_path, CALM_SECONDS)
    assert (found["verdict"], found["said"]) == ("ok", "")
