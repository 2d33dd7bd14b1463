"""compute-sanitizer: reading its reports, running a backend under it, and what is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import r18
from r18.backend import DeviceInfo
from r18.cli.app import FOUND, REFUSED
from r18.errors import UsageError
from r18.registry import load_backend
from r18_oracle.campaign import profile
from r18_oracle.sanitize import Request, ToolResult, find, run_tool, save
from r18_oracle.sanitized import BROKEN, Broken, exercise
from r18_oracle.sanitizer_report import Complaint, parse

CLEAN = """\
========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at conv2d_direct+0x1b0
=========     by thread (37,0,0) in block (2,0,0)
=========     Access to 0x7f32c5a00400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f32c5a00200 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x2fb4e2] in libcuda.so.1
=========         Host Frame: at main+0x12 in python3.11
=========
========= Invalid __global__ write of size 4 bytes
=========     at conv2d_direct+0x1b0
=========     by thread (38,0,0) in block (2,0,0)
=========
========= Invalid __shared__ read of size 16 bytes
=========     at void gemm<(int)128>(float const *, float *)+0x2c0 in gemm.cuh:41
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 5 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sgemm_tiled+0x460
=========     and Read access at sgemm_tiled+0x7a0 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x88 in split_k_reduce(float const *)
=========     by thread (7,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at winograd_gemm+0x15520
=========     by thread (128,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


# -- reports -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "errors", "complaints"),
    [
        (CLEAN, 0, []),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, []),
        (
            MEMCHECK,
            5,
            [
                Complaint("Invalid __global__ write of size 4 bytes", "conv2d_direct", 2),
                Complaint("Invalid __shared__ read of size 16 bytes", "gemm", 1),
            ],
        ),
        (RACECHECK, 1, [Complaint("Race reported between Write access", "sgemm_tiled", 1)]),
        (
            INITCHECK,
            1,
            [
                Complaint(
                    "Uninitialized __global__ memory read of size 4 bytes", "split_k_reduce", 1
                )
            ],
        ),
        (
            SYNCCHECK,
            1,
            [Complaint("Barrier error detected. Divergent thread(s) in block", "winograd_gemm", 1)],
        ),
    ],
)
def test_reports(text: str, errors: int, complaints: list[Complaint]) -> None:
    report = parse(text)
    assert report.errors == errors
    assert list(report.complaints) == complaints


def test_a_log_that_breaks_off_has_no_count() -> None:
    broken = MEMCHECK.partition("========= ERROR SUMMARY")[0]
    assert parse(broken).errors is None
    assert len(parse(broken).complaints) == 2
    assert parse("").errors is None


def test_a_complaint_in_words() -> None:
    assert str(Complaint("Race", "gemm", 3)) == "Race in gemm (3 times)"
    assert str(Complaint("Race", "", 1)) == "Race"


# -- a tool on a backend -----------------------------------------------------------------------

KERNEL = "toy/relu/maximum/fp32"


def stand_in(folder: Path, script: dict[str, list[dict[str, Any]]]) -> Path:
    """An executable that plays the script; see `sanitizer_stand_in`."""
    source = Path(__file__).with_name("sanitizer_stand_in.py").read_text()
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)
    (folder / "script.json").write_text(json.dumps(script))
    return path


def request(*kernels: str, **changes: Any) -> Request:
    return Request("mutation_toy:Backend", kernels, network="tiny", **changes)


@pytest.fixture
def path_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.usefixtures("path_of_tests")
def test_a_clean_run(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": [{"log": CLEAN}]})
    told: list[tuple[str, str]] = []
    result = run_tool(program, "memcheck", request(KERNEL), lambda t, k: told.append((t, k)))
    assert (result.verdict, result.errors, result.broken) == ("clean", 0, {})
    assert result.problems[KERNEL] > 20
    assert result.device == DeviceInfo("cpu", "a toy")
    assert told == [("memcheck", KERNEL)]
    (call,) = (json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines())
    arguments = " ".join(call["arguments"])
    assert call["pool"] == "0"
    assert arguments.startswith("--tool memcheck --report-api-errors no --target-processes all")


@pytest.mark.usefixtures("path_of_tests")
def test_errors_are_counted_and_shown(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": [{"log": MEMCHECK}]})
    result = run_tool(program, "memcheck", request(KERNEL))
    assert (result.verdict, result.errors) == ("FAIL", 5)
    assert result.complaints[0].function == "conv2d_direct"


@pytest.mark.usefixtures("path_of_tests")
@pytest.mark.parametrize("log", [None, "========= COMPUTE-SANITIZER\n"])
def test_a_log_without_a_summary_is_not_clean(tmp_path: Path, log: str | None) -> None:
    program = stand_in(tmp_path, {"initcheck": [{"log": log}]})
    assert run_tool(program, "initcheck", request(KERNEL)).verdict == "1 logs without a summary"


@pytest.mark.usefixtures("path_of_tests")
def test_a_new_process_goes_on_after_a_kernel_that_broke(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": [{"log": CLEAN}, {"log": CLEAN}]})
    backend = "sanitize_toy:Backend"
    asked = Request(backend, ("toy/relu/raises/fp32", KERNEL), network=None)
    result = run_tool(program, "memcheck", asked)
    assert list(result.problems) == [KERNEL]
    assert "RuntimeError: an illegal address" in result.broken["toy/relu/raises/fp32"]
    assert result.verdict == "FAIL"


@pytest.mark.usefixtures("path_of_tests")
@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ({"log": CLEAN, "run": False, "code": 3}, "ended with code 3"),
        ({"log": CLEAN, "run": False}, "said nothing"),
        ({"log": CLEAN, "run": False, "sleep": 60}, "said nothing for 1 s and was ended"),
    ],
)
def test_a_process_that_comes_to_nothing(tmp_path: Path, turn: dict[str, Any], why: str) -> None:
    program = stand_in(tmp_path, {"synccheck": [turn]})
    result = run_tool(program, "synccheck", request(KERNEL, seconds=1.0))
    assert why in result.broken[KERNEL]
    assert result.verdict == "FAIL"


def test_each_call_has_buffers_of_its_own() -> None:
    backend = load_backend("mutation_toy:Backend")
    (kernel,) = backend.kernels()
    sizes: list[int] = []
    empty = backend.memory.empty
    backend.memory.empty = lambda nbytes: (sizes.append(nbytes), empty(nbytes))[1]  # type: ignore[method-assign]
    taken = exercise(backend, kernel, profile("quick"), 0, "tiny")
    assert taken > 20
    assert len(sizes) == 3 * taken  # input, output, workspace


def test_a_call_that_raises_ends_it_at_once() -> None:
    backend = load_backend("sanitize_toy:Backend")
    with pytest.raises(Broken, match="RuntimeError: an illegal address"):
        exercise(backend, backend.kernels()[0], profile("quick"), 0, None)
    assert BROKEN != 0


# -- where it is -------------------------------------------------------------------------------


def test_it_is_found_on_the_path_in_cuda_home_and_where_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = stand_in(tmp_path / "bin", {})
    assert find() == program
    assert find(str(program)) == program
    with pytest.raises(UsageError, match="no executable"):
        find("/no/such/tool")
    program.unlink()
    if not Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        with pytest.raises(UsageError, match="comes with the CUDA toolkit"):
            find()


# -- the record --------------------------------------------------------------------------------


def result_of(tool: str, problems: dict[str, int], **changes: Any) -> ToolResult:
    gpu = DeviceInfo("cuda", "NVIDIA H200 (sm_90)")
    return ToolResult(tool, problems, device=gpu, **changes)


def test_a_record_keeps_what_was_not_run_again(tmp_path: Path) -> None:
    backend = load_backend("cupy")
    first, second = (kernel.id for kernel in backend.kernels()[:2])
    both, one = Request("cupy", (first, second)), Request("cupy", (second,))
    path = save([result_of("memcheck", {first: 5, second: 6})], both, backend, "cs 1", tmp_path)
    assert path == tmp_path / "sanitize-nvidia-h200.json"
    bad = result_of("memcheck", {}, broken={second: "crashed"})
    save([bad, result_of("racecheck", {second: 1})], one, backend, "cs 1", tmp_path)
    tools = json.loads(path.read_text())["tools"]
    assert list(tools) == ["memcheck", "racecheck"]
    assert tools["memcheck"]["verdict"] == "FAIL"
    assert tools["memcheck"]["kernels"][first]["problems"] == 5
    assert tools["memcheck"]["kernels"][second]["broken"] == "crashed"
    save([result_of("memcheck", {second: 7})], one, backend, "cs 1", tmp_path)
    tools = json.loads(path.read_text())["tools"]
    assert (tools["memcheck"]["verdict"], tools["memcheck"]["errors"]) == ("clean", 0)
    data = json.loads(path.read_text())
    data["tools"]["memcheck"]["kernels"][first]["digest"] = "another"
    path.write_text(json.dumps(data))
    save([result_of("memcheck", {second: 7})], one, backend, "cs 1", tmp_path)
    assert list(json.loads(path.read_text())["tools"]["memcheck"]["kernels"]) == [second]


def test_after_errors_every_kernel_is_to_be_run_again(tmp_path: Path) -> None:
    backend = load_backend("cupy")
    first, second = (kernel.id for kernel in backend.kernels()[:2])
    both, one = Request("cupy", (first, second)), Request("cupy", (second,))
    faulty = result_of("memcheck", {first: 5, second: 6}, errors=3)
    save([faulty], both, backend, "cs 1", tmp_path)
    path = save([result_of("memcheck", {second: 6})], one, backend, "cs 1", tmp_path)
    assert path is not None
    assert list(json.loads(path.read_text())["tools"]["memcheck"]["kernels"]) == [second]


def test_nothing_is_recorded_where_no_device_was_reached(tmp_path: Path) -> None:
    backend = load_backend("cupy")
    assert save([ToolResult("memcheck")], Request("cupy", ()), backend, "cs", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


# -- the command -------------------------------------------------------------------------------


@pytest.mark.usefixtures("path_of_tests")
def test_the_command_line(tmp_path: Path) -> None:
    script = {"memcheck": [{"log": CLEAN}], "racecheck": [{"log": RACECHECK}]}
    program = stand_in(tmp_path, script)
    done = r18(
        *("sanitize", "--backend", "mutation_toy:Backend", "--tools", "memcheck,racecheck"),
        *("--network", "none", "--sanitizer", program, "--record", "--records", tmp_path),
    )
    assert done.code == FOUND
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert any(line.startswith("memcheck 1 ") and line.endswith(" 0 clean") for line in lines)
    assert any(line.startswith("racecheck 1 ") and line.endswith(" 1 FAIL") for line in lines)
    assert "Race reported between Write access in sgemm_tiled" in done.out
    assert "compute-sanitizer Version 2025.3.1.0 (build 1)" in done.out
    assert (tmp_path / "sanitize-cpu.json").exists()


def test_wrong_requests() -> None:
    assert "did you mean 'memcheck'" in r18("sanitize", "--tools", "memchek").err
    done = r18("sanitize", "--kernels", "cupy/nothing/*")
    assert done.code == REFUSED
    assert "unknown kernel" in done.err


def test_the_pool_is_off_only_when_asked() -> None:
    """CuPy is stood in for: its allocator is set before the first buffer is taken."""
    code = """
import sys, types
cupy = types.ModuleType("cupy")
cupy.cuda = types.SimpleNamespace(
    set_allocator=lambda a: print("allocator", a), alloc=lambda nbytes: print("bytes", nbytes)
)
sys.modules["cupy"] = cupy
from r18_cupy.device import CupyMemory
CupyMemory().empty(16)
"""

    def said(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | variables,
        )
        return done.stdout.strip()

    assert said(R18_CUPY_POOL="0") == "allocator None\nbytes 16"
    assert said() == "bytes 16"
