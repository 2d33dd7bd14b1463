"""compute-sanitizer: its reports, running a backend under it, and the record."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import r18
from r18.backend import DeviceInfo
from r18.backend.registry import load_backend
from r18.cli.app import FOUND, REFUSED
from r18.errors import R18Error, UsageError
from r18.report.tables import sanitize_table
from r18_oracle.mutation.mutants import Mutant, Target, mutants_of
from r18_oracle.mutation.sanitizing import Heard, heard, importing
from r18_oracle.mutation.trial import copied
from r18_oracle.sanitize.inside import BROKEN, Broken, TimeIsUp, exercise
from r18_oracle.sanitize.record import Record, verdict
from r18_oracle.sanitize.run import TOOLS, KernelResult, Part, Request, Runner, find, parts
from r18_oracle.sanitize.tool_report import Complaint, parse
from r18_oracle.search.profiles import profile

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
SEVERAL = tuple(f"toy/relu/{name}/fp32" for name in "abc")

Script = dict[str, Any]


def stand_in(folder: Path, script: Script) -> Path:
    """An executable that plays the script; see `sanitizer_stand_in`."""
    source = Path(__file__).parents[1].joinpath("sanitizer_stand_in.py").read_text()
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)
    (folder / "script.json").write_text(json.dumps(script))
    return path


def calls(folder: Path) -> list[dict[str, Any]]:
    """The arguments and variables of each process."""
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def asked(folder: Path) -> list[tuple[str, ...]]:
    """The kernels of each process."""
    return [tuple(json.loads(call["arguments"][-1])["kernels"]) for call in calls(folder)]


def request(*kernels: str, **changes: Any) -> Request:
    return Request("mutation_toy:Backend", kernels, network="tiny", **changes)


def several(**changes: Any) -> Request:
    return Request("sanitize_toy:Several", SEVERAL, network=None, **changes)


@pytest.fixture
def path_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)


@pytest.mark.usefixtures("path_of_tests")
def test_a_clean_run(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": [{"log": CLEAN, "command": "run"}]})
    (result,) = Runner(program, request(KERNEL)).part(Part("memcheck", (KERNEL,)))
    assert (result.tool, result.kernel, result.verdict) == ("memcheck", KERNEL, "clean")
    assert (result.errors, result.broken, result.complaints) == (0, "", ())
    assert result.problems > 20
    (call,) = calls(tmp_path)
    arguments = " ".join(call["arguments"])
    assert call["pool"] == "0"
    assert arguments.startswith("--tool memcheck --report-api-errors no --target-processes all")


@pytest.mark.usefixtures("path_of_tests")
def test_errors_are_counted_and_shown(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": [{"log": MEMCHECK}]})
    (result,) = Runner(program, request(KERNEL)).part(Part("memcheck", (KERNEL,)))
    assert (result.verdict, result.errors) == ("FAIL", 5)
    assert result.complaints[0].function == "conv2d_direct"


@pytest.mark.usefixtures("path_of_tests")
@pytest.mark.parametrize("log", [None, "========= COMPUTE-SANITIZER\n"])
def test_a_log_without_a_summary_is_not_clean(tmp_path: Path, log: str | None) -> None:
    program = stand_in(tmp_path, {"initcheck": [{"log": log}]})
    (result,) = Runner(program, request(KERNEL)).part(Part("initcheck", (KERNEL,)))
    assert (result.verdict, result.errors) == ("a log without a summary", None)


@pytest.mark.usefixtures("path_of_tests")
def test_errors_are_laid_to_the_kernel_that_has_them_alone(tmp_path: Path) -> None:
    """Errors in a process's log are attributed by running each of its kernels alone."""
    guilty = SEVERAL[1]
    turn = {"log": MEMCHECK, "guilty": guilty, "else": CLEAN}
    program = stand_in(tmp_path, {"memcheck": turn})
    results = Runner(program, several()).part(Part("memcheck", SEVERAL))
    assert {r.kernel: r.verdict for r in results} == {
        kernel: "FAIL" if kernel == guilty else "clean" for kernel in SEVERAL
    }
    assert asked(tmp_path) == [SEVERAL, *((kernel,) for kernel in SEVERAL)]


@pytest.mark.usefixtures("path_of_tests")
def test_a_new_process_goes_on_after_a_kernel_that_broke(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": {"log": CLEAN, "command": "run"}})
    wrong = "toy/relu/raises/fp32"
    both = Request("sanitize_toy:Backend", (wrong, KERNEL), network=None)
    broken, right = Runner(program, both).part(Part("memcheck", both.kernels))
    assert (broken.kernel, broken.verdict, right.kernel) == (wrong, "FAIL", KERNEL)
    assert "RuntimeError: an illegal address" in broken.broken
    assert right.verdict == "clean"
    assert asked(tmp_path) == [both.kernels, (KERNEL,)]


@pytest.mark.usefixtures("path_of_tests")
@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ({"log": CLEAN, "command": "nothing", "code": 3}, "ended with code 3"),
        ({"log": CLEAN, "command": "nothing"}, "said nothing"),
        ({"log": CLEAN, "command": "nothing", "sleep": 60}, "said nothing for 1 s and was ended"),
    ],
)
def test_a_process_that_comes_to_nothing(tmp_path: Path, turn: dict[str, Any], why: str) -> None:
    program = stand_in(tmp_path, {"synccheck": [turn]})
    runner = Runner(program, request(KERNEL, seconds=1.0))
    (result,) = runner.part(Part("synccheck", (KERNEL,)))
    assert why in result.broken
    assert result.verdict == "FAIL"


# -- side by side, and in time -----------------------------------------------------------------


def test_parts_are_small_enough_for_all_jobs_and_large_enough_to_be_worth_a_process() -> None:
    names = [f"k{number}" for number in range(92)]
    todo = parts({"memcheck": names, "racecheck": names, "initcheck": names[:2]}, 16)
    assert {part.tool for part in todo[:3]} == {"memcheck", "racecheck", "initcheck"}
    assert max(len(part.kernels) for part in todo) == 3
    for tool in ("memcheck", "racecheck"):
        assert [k for part in todo if part.tool == tool for k in part.kernels] == names
    assert [part.kernels for part in parts({"memcheck": names[:13]}, 1)] == [
        ("k0", "k1", "k2", "k3"),
        ("k4", "k5", "k6", "k7"),
        ("k8", "k9", "k10", "k11"),
        ("k12",),
    ]
    assert max(len(part.kernels) for part in parts({"memcheck": names}, 1)) == 6
    assert parts({"memcheck": []}, 4) == []


@pytest.mark.usefixtures("path_of_tests")
def test_several_processes_run_side_by_side(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": {"log": CLEAN}, "racecheck": {"log": CLEAN}})
    todo = [Part(tool, SEVERAL[:1]) for tool in ("memcheck", "racecheck")]
    found = [r for results in Runner(program, several(), jobs=2).run(todo) for r in results]
    assert {(r.tool, r.kernel) for r in found} == {(p.tool, *p.kernels) for p in todo}
    assert {r.verdict for r in found} == {"clean"}


@pytest.mark.usefixtures("path_of_tests")
def test_whoever_stops_listening_ends_what_runs(tmp_path: Path) -> None:
    sleeps = {"log": CLEAN, "command": "nothing", "sleep": 600}
    program = stand_in(tmp_path, {"memcheck": {"log": CLEAN}, "racecheck": sleeps})
    runner = Runner(program, several(), jobs=2)
    todo = [Part("memcheck", SEVERAL[:1]), Part("racecheck", SEVERAL[:1])]
    results = runner.run([*todo, *todo])
    assert [r.tool for r in next(results)] == ["memcheck"]
    results.close()  # comes back, though there are ten minutes to sleep


@pytest.mark.usefixtures("path_of_tests")
def test_what_there_is_no_time_for_has_no_result(tmp_path: Path) -> None:
    """A late kernel has no result; the process ends normally, and finished kernels count."""
    both = Request("sanitize_toy:Slow", (KERNEL, "toy/relu/slow/fp32"), network=None)
    program = stand_in(tmp_path, {"memcheck": {"log": CLEAN, "command": "run"}})
    started = time.monotonic()
    known = Runner(program, both).part(Part("memcheck", (KERNEL,)))
    took = time.monotonic() - started
    deadline = time.monotonic() + 2 * took + 3  # the slow kernel takes far longer than this
    found = Runner(program, both, deadline=deadline).part(Part("memcheck", both.kernels))
    assert found == known
    late = Runner(program, both, deadline=time.monotonic())
    assert list(late.run([Part("memcheck", (KERNEL,))])) == [[]]
    assert len(calls(tmp_path)) == 2


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


def test_time_that_is_up_ends_it_before_the_next_call() -> None:
    backend = load_backend("mutation_toy:Backend")
    with pytest.raises(TimeIsUp):
        exercise(backend, backend.kernels()[0], profile("quick"), 0, None, time.monotonic())


# -- mutants -----------------------------------------------------------------------------------

CUDA_TOY = "cuda_toy:Backend"


def mutant_of_the_toy(value: str) -> Mutant:
    """A mutant of the toy's kernel, which writes another expression."""
    source = Target.of(CUDA_TOY).sources()["relu.cu"]
    changed = source.replace("fmaxf(x[i], 0.0f) + 0.0f;", f"{value};")
    return replace(mutants_of("relu.cu", source)[0], source=changed)


def heard_of(folder: Path, script: Script, deadline: float = math.inf) -> Heard:
    """The tools' result on a mutant of the toy; the script says what each tool reports."""
    program = stand_in(folder, {tool: {"log": CLEAN} for tool in TOOLS} | script)
    mutant = mutant_of_the_toy("fmaxf(x[i], 0.0f)")
    asked = Request(CUDA_TOY, (KERNEL,), network=None)
    return heard(program, Target.of(CUDA_TOY), mutant, asked, 1, deadline)


@pytest.mark.usefixtures("path_of_tests")
def test_a_tool_that_complains_of_a_mutant_alone_has_found_it(tmp_path: Path) -> None:
    found = heard_of(tmp_path, {"racecheck": [{"log": RACECHECK}, {"log": CLEAN}]}).finding
    assert found is not None
    assert (found.check, found.kernel) == ("racecheck", KERNEL)
    assert found.message == "Race reported between Write access in sgemm_tiled"
    tests = str(Path(__file__).parents[1])
    *changed, unchanged = [
        call["path"] for call in calls(tmp_path) if call["arguments"][1] == "racecheck"
    ]
    assert [path.endswith(f"changed{os.pathsep}{tests}") for path in changed] == [True]
    assert unchanged == tests


@pytest.mark.usefixtures("path_of_tests")
def test_a_mutant_that_no_tool_complains_of_is_not_found(tmp_path: Path) -> None:
    assert heard_of(tmp_path, {}) == Heard(clean=True)
    assert len(calls(tmp_path)) == len(TOOLS)
    assert heard_of(tmp_path, {"synccheck": {"log": None}}) == Heard()
    assert heard_of(tmp_path, {}, time.monotonic()) == Heard()


@pytest.mark.usefixtures("path_of_tests")
def test_a_tool_that_complains_of_the_unchanged_kernel_too_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(R18Error, match="racecheck finds errors in the unchanged toy/relu"):
        heard_of(tmp_path, {"racecheck": {"log": RACECHECK}})


@pytest.mark.usefixtures("path_of_tests")
def test_what_runs_under_the_tools_is_the_copy(tmp_path: Path) -> None:
    mutant = mutant_of_the_toy("no_such_thing")
    root = copied(Target.of(CUDA_TOY), tmp_path / "changed", {mutant.file: mutant.source})
    program = stand_in(tmp_path, {"memcheck": {"log": CLEAN, "command": "run"}})
    asked = Request(CUDA_TOY, (KERNEL,), network=None)
    part = Part("memcheck", (KERNEL,))
    (result,) = Runner(program, asked, variables=importing(root)).part(part)
    assert "no_such_thing" in result.broken
    (result,) = Runner(program, asked).part(part)
    assert result.verdict == "clean"


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

H200 = DeviceInfo("cuda", "NVIDIA H200 (sm_90)")


def record_of(folder: Path, backend: Any, **changes: Any) -> Record:
    return Record(folder, H200, backend, Request("cupy", (), **changes), "cs 1")


def clean(tool: str, kernel: str, problems: int = 5) -> KernelResult:
    return KernelResult(tool, kernel, problems, 0)


def bad(tool: str, kernel: str) -> KernelResult:
    complaint = Complaint("Invalid __global__ write of size 4 bytes", "gemm", 2)
    return KernelResult(tool, kernel, 5, 2, (complaint,), "RuntimeError: an illegal address")


def test_a_record_keeps_what_was_not_run_again(tmp_path: Path) -> None:
    backend = load_backend("sanitize_toy:Several")
    first, second = sorted(kernel.id for kernel in backend.kernels()[:2])  # as a record has them
    record = record_of(tmp_path, backend)
    record.write([clean("memcheck", first), clean("memcheck", second, 6)])
    assert record.path == tmp_path / "sanitize-nvidia-h200.json"
    later = record_of(tmp_path, backend)
    later.write([bad("memcheck", second), clean("racecheck", second)])
    tools = json.loads(record.path.read_text())["tools"]
    assert list(tools) == ["memcheck", "racecheck"]
    assert (tools["memcheck"]["verdict"], tools["memcheck"]["errors"]) == ("FAIL", 2)
    assert tools["memcheck"]["missing"] == len(backend.kernels()) - 2
    assert tools["memcheck"]["kernels"][first]["problems"] == 5
    assert tools["memcheck"]["kernels"][second]["broken"] == "RuntimeError: an illegal address"
    assert tools["memcheck"]["kernels"][second]["complaints"][0]["function"] == "gemm"
    again = record_of(tmp_path, backend)
    everything = again.fresh(["memcheck"], [first, second])
    assert everything == [clean("memcheck", first), bad("memcheck", second)]
    again.write([clean("memcheck", second, 7)])
    tools = json.loads(record.path.read_text())["tools"]
    assert (tools["memcheck"]["verdict"], tools["memcheck"]["errors"]) == ("clean", 0)
    table = sanitize_table({"device": "nvidia-h200"}, tmp_path)
    assert list(table.rows) == [
        ("memcheck", "2", "12", "0", "clean"),
        ("racecheck", "1", "5", "0", "clean"),
    ]


def test_what_is_fresh_is_of_the_same_sources_and_problems(tmp_path: Path) -> None:
    backend = load_backend("sanitize_toy:Several")
    first, second = sorted(kernel.id for kernel in backend.kernels()[:2])  # as a record has them
    record = record_of(tmp_path, backend)
    record.write([clean("memcheck", first), clean("memcheck", second)])

    def fresh(**changes: Any) -> list[str]:
        found = record_of(tmp_path, backend, **changes).fresh(["memcheck"], [first, second])
        return [result.kernel for result in found]

    assert fresh() == [first, second]
    assert fresh(seconds=9.0) == [first, second]
    assert fresh(profile="ci") == fresh(seed=1) == fresh(network=None) == []
    assert record_of(tmp_path, backend).fresh(["racecheck"], [first]) == []
    data = json.loads(record.path.read_text())
    data["tools"]["memcheck"]["kernels"][first]["digest"] = "another"
    data["tools"]["memcheck"]["kernels"]["unlike/relu/x/fp32"] = {
        **data["tools"]["memcheck"]["kernels"][second],
        "digest": None,
    }
    record.path.write_text(json.dumps(data))
    assert fresh() == [second]
    record_of(tmp_path, backend).write([clean("memcheck", second)])
    left = json.loads(record.path.read_text())["tools"]["memcheck"]["kernels"]
    assert list(left) == [second, "unlike/relu/x/fp32"]  # the second is of another backend


def test_what_was_run_before_a_kernel_had_choices_is_not_fresh(tmp_path: Path) -> None:
    backend = load_backend(CUDA_TOY)
    (kernel,) = backend.kernels()
    record_of(tmp_path, backend).write([clean("memcheck", kernel.id)])
    assert record_of(tmp_path, backend).fresh(["memcheck"], [kernel.id])

    class Choosing(type(backend)):  # type: ignore[misc]
        def kernels(self) -> tuple[Any, ...]:
            return (kernel,)

        def variants(self, kernel: Any) -> tuple[Any, ...]:
            return (SimpleNamespace(id=f"{kernel.id}/a"), SimpleNamespace(id=f"{kernel.id}/b"))

        def variant(self, kernel: Any, problem: Any) -> None:
            raise AssertionError("nothing is planned here")

    record = record_of(tmp_path, Choosing())
    assert record.fresh(["memcheck"], [kernel.id]) == []
    record.write([clean("memcheck", kernel.id)])
    assert record_of(tmp_path, Choosing()).fresh(["memcheck"], [kernel.id])
    assert record_of(tmp_path, backend).fresh(["memcheck"], [kernel.id]) == []


def test_kernels_of_no_known_sources_are_never_fresh(tmp_path: Path) -> None:
    backend = load_backend("mutation_toy:Backend")
    record = Record(tmp_path, backend.probe(), backend, request(KERNEL), "cs 1")
    record.write([clean("memcheck", KERNEL)])
    again = Record(tmp_path, backend.probe(), backend, request(KERNEL), "cs 1")
    assert again.fresh(["memcheck"], [KERNEL]) == []


def test_a_verdict_is_the_worst() -> None:
    unread = KernelResult("memcheck", "a", 3, None)
    idle = KernelResult("memcheck", "b", 0, 0)
    assert verdict([]) == "nothing ran"
    assert verdict([clean("memcheck", "c")]) == "clean"
    assert verdict([clean("memcheck", "c"), idle]) == "nothing ran"
    assert verdict([clean("memcheck", "c"), idle, unread]) == "a log without a summary"
    assert verdict([clean("memcheck", "c"), unread, bad("memcheck", "d")]) == "FAIL"


# -- the command -------------------------------------------------------------------------------


def row_of(out: str, tool: str) -> list[str]:
    return next(line.split() for line in out.splitlines() if line.startswith(f"{tool} "))


@pytest.mark.usefixtures("path_of_tests")
def test_the_command_line(tmp_path: Path) -> None:
    script = {"memcheck": [{"log": CLEAN}], "racecheck": [{"log": RACECHECK}]}
    program = stand_in(tmp_path, script)
    done = r18(
        *("sanitize", "--backend", "mutation_toy:Backend", "--tools", "memcheck,racecheck"),
        *("--network", "none", "--sanitizer", program, "--record", "--records", tmp_path),
        *("--jobs", 1),
    )
    assert done.code == FOUND
    assert row_of(done.out, "memcheck")[1:3] == ["1", "0"]
    assert row_of(done.out, "memcheck")[-2:] == ["0", "clean"]
    assert row_of(done.out, "racecheck")[-2:] == ["1", "FAIL"]
    assert f"{KERNEL}: FAIL\n    Race reported between Write access in sgemm_tiled" in done.out
    assert "compute-sanitizer Version 2025.3.1.0 (build 1)" in done.out
    assert (tmp_path / "sanitize-cpu.json").exists()


@pytest.mark.usefixtures("path_of_tests")
def test_the_same_command_goes_on_where_it_stopped(tmp_path: Path) -> None:
    program = stand_in(tmp_path, {"memcheck": {"log": CLEAN}})

    def run(*options: object) -> tuple[int, str, set[str]]:
        """Run the command; returns its exit code, its output, and the kernels that it ran."""
        (tmp_path / "calls.jsonl").write_text("")
        done = r18(
            *("sanitize", "--backend", "sanitize_toy:Several", "--tools", "memcheck"),
            *("--network", "none", "--sanitizer", program, "--record", "--records", tmp_path),
            *options,
        )
        return done.code, done.out, {name for names in asked(tmp_path) for name in names}

    code, out, ran = run("--minutes", 0)
    assert (code, ran) == (FOUND, set())
    assert "STOPPED early: 3 are left" in out
    code, out, ran = run("--kernels", SEVERAL[2])
    assert (code, ran) == (0, {SEVERAL[2]})
    code, out, ran = run("--minutes", 30)
    assert (code, ran) == (0, set(SEVERAL) - {SEVERAL[2]})
    assert row_of(out, "memcheck")[1:3] == ["3", "0"]
    assert "1 of these results are from the record" in out
    assert run()[2] == set()
    assert run("--again", "--jobs", 2)[2] == set(SEVERAL)
    path = tmp_path / "sanitize-cpu.json"
    assert json.loads(path.read_text())["tools"]["memcheck"]["missing"] == 0


def test_wrong_requests() -> None:
    assert "did you mean 'memcheck'" in r18("sanitize", "--tools", "memchek").err
    done = r18("sanitize", "--kernels", "cupy/nothing/*")
    assert done.code == REFUSED
    assert "unknown kernel" in done.err


def test_the_pool_is_off_only_when_asked() -> None:
    """CuPy's pool is off only if requested, before the first buffer; a stand-in shows the calls."""
    code = """
import sys, types
cupy = types.ModuleType("cupy")
cupy.cuda = types.SimpleNamespace(
    set_allocator=lambda a: print("allocator", a),
    alloc=lambda nbytes: print("bytes", nbytes) or types.SimpleNamespace(ptr=512),
)
sys.modules["cupy"] = cupy
from r18_cupy.cuda.device import CupyMemory
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
