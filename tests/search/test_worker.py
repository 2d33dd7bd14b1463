"""Isolation: a worker may die or hang; its parent reports the cause and continues."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import hostile_kernels
import worker_tasks
from r18.ends import signal_name
from r18.errors import BackendUnavailable, R18Error, UsageError
from r18_oracle import stacks
from r18_oracle.findings import STACKS, Failed, Finding, failed
from r18_oracle.search import isolation, worker
from r18_oracle.search.worker import THREAD_VARIABLES, Job, Outcome, Pool, run_jobs
from r18_oracle.slate import Slate

ASKED = pytest.mark.skipif(stacks.SIGNAL is None, reason="no signal asks a process on Windows")


def run(*jobs: Job, workers: int = 2) -> list[Outcome]:
    return list(run_jobs(jobs, workers=workers))


def job(task: str, silence_seconds: float = 60.0, **arguments: int | str) -> Job:
    return Job(getattr(worker_tasks, task), arguments, "toy", f"toy/{task}", silence_seconds)


def test_every_job_has_one_outcome_and_results_come_back() -> None:
    outcomes = run(*(job("double", number=n) for n in range(5)))
    assert sorted(o.result for o in outcomes) == [0, 2, 4, 6, 8]
    assert all(o.finding is None for o in outcomes)


def test_a_deadline_leaves_what_is_not_done_and_keeps_what_is() -> None:
    jobs = [job("double", number=1), job("hang", 600), job("double", number=2)]
    started = time.monotonic()
    outcomes = list(run_jobs(jobs, workers=2, deadline=started + 15))
    assert sorted(outcome.result for outcome in outcomes) == [2, 4]
    assert time.monotonic() - started < 300, "it waited for the job that hangs"
    assert list(run_jobs(jobs, workers=2, deadline=started)) == []


def test_a_worker_starts_processes_as_any_program_does() -> None:
    """A worker has the default start method. Numba makes a lock when it is imported, and with
    `forkserver` the lock has a name; `r18 verify` warned of it when workers were killed."""
    (outcome,) = run(job("start_method"))
    assert outcome.result == multiprocessing.get_start_method()


@pytest.mark.parametrize(
    ("task", "check", "message", "width"),
    [
        ("segmentation_fault", "crash", "died of SIGSEGV", 3),
        ("leave", "crash", "exited with code 3", 5),
        ("killed", "crash", "died of SIGKILL (the system may be out of memory)", 6),
    ],
)
def test_a_death_is_a_finding_with_the_problem_that_caused_it_and_the_run_goes_on(
    task: str, check: str, message: str, width: int
) -> None:
    outcomes = run(job(task), *(job("double", number=n) for n in range(3)), workers=1)
    assert len(outcomes) == 4
    (lost,) = (o for o in outcomes if o.finding)
    finding = lost.finding
    assert finding is not None
    assert (finding.check, finding.kernel) == (check, f"toy/{task}")
    assert message in finding.message
    assert finding.problem == worker_tasks.problem(width)
    assert sorted(o.result for o in outcomes if not o.finding) == [0, 2, 4]


def test_a_hang_is_ended_after_its_time_limit() -> None:
    outcomes = run(job("hang", silence_seconds=1.0), job("double", number=4))
    (lost,) = (o for o in outcomes if o.finding)
    assert lost.finding is not None
    assert lost.finding.check == "hang"
    assert "no sign of life for 1 s" in lost.finding.message
    assert (lost.finding.problem, lost.finding.kind, lost.finding.seed) == (
        worker_tasks.problem(4),
        "exact",
        8,
    )
    assert [o.result for o in outcomes if not o.finding] == [8]


def hung(outcome: Outcome) -> tuple[str, str]:
    """The place where a worker hung for half a second, and its stacks or an empty string."""
    assert outcome.finding is not None
    assert outcome.finding.check == "hang"
    assert outcome.finding.problem == worker_tasks.problem(12)
    said, _, stood = outcome.finding.message.partition("; ")
    assert said == "the worker process gave no sign of life for 0.5 s and was ended"
    return stood, outcome.finding.details.get(STACKS, "")


def line_of(function: Callable[..., object], offset: int) -> str:
    """The line of `worker_tasks` that is `offset` lines below the first of a function."""
    name, first = function.__name__, function.__code__.co_firstlineno
    return f"{name} (worker_tasks.py:{first + offset})"


@ASKED
def test_a_hang_says_where_its_worker_stood(capfd: pytest.CaptureFixture[str]) -> None:
    """A hang names its place: in Python, in C with the lock or without, and in deep calls."""
    names = ("loop", "pause", "deadlock", "in_depth")
    looping, pausing, locked, deep = map(hung, run(*(job(n, 0.5) for n in names), workers=1))
    in_loop = f"{line_of(worker_tasks._turn, 2)}, called by {line_of(worker_tasks.loop, 3)}"
    assert looping[0] == f"it stood in {in_loop}"
    assert pausing[0] == f"it stood in {line_of(worker_tasks.pause, 4)}"
    assert locked[0] == f"it stood in {line_of(worker_tasks.deadlock, 6)}"
    below = [line_of(worker_tasks.in_depth, offset) for offset in (4, 3)]
    assert deep[0] == f"it stood in {', called by '.join([in_loop, *below])}"
    main, other = locked[1].split("Thread 2, most recent call first:\n")
    assert main.startswith("Main thread, most recent call first:\n  File")
    assert main.endswith(" in deadlock\n")
    assert other.split("\n")[0].endswith(" in _wait_for")
    assert "_serve" not in "".join((looping[1], pausing[1], locked[1]))
    assert capfd.readouterr() == ("", "")


@ASKED
@pytest.mark.parametrize("task", ["ignore", "handle", "block", "remove_the_answer"])
def test_a_worker_that_does_not_answer_is_ended_all_the_same(task: str) -> None:
    with Pool(1) as pool:
        (first,) = pool.run([job("process_id")])
        assert pool._folder is not None
        arguments = {"folder": pool._folder.name} if task == "remove_the_answer" else {}
        began = time.monotonic()
        lost, again = pool.run([job(task, 0.5, **arguments), job("process_id")])
        assert time.monotonic() - began < 60, "it waited for the worker"
    stood, text = hung(lost)
    if task == "block" and text:  # a thread of a library has taken the signal
        assert stood == f"it stood in {line_of(worker_tasks.block, 3)}"
    else:
        assert (stood, text) == ("", "")
    assert lost.seconds < 0.5 + stacks.ANSWER_SECONDS + 5
    assert again.result != first.result


def test_where_nothing_can_be_asked_a_hang_has_its_time_limit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without signals, as on Windows, a hang reports only its time limit."""
    monkeypatch.setattr(stacks, "SIGNAL", None)
    assert hung(*run(job("loop", 0.5))) == ("", "")


def test_the_oracles_own_failure_comes_back_as_the_exception_that_it_is() -> None:
    (outcome,) = run(job("fail"))
    assert isinstance(outcome.result, RuntimeError)
    assert outcome.finding is None


def test_progress_names_the_problem_under_way() -> None:
    seen: list[tuple[str, object]] = []
    list(
        run_jobs(
            [job("double", number=1)],
            on_progress=lambda j, problem: seen.append((j.kernel, problem)),
        )
    )
    assert seen == [("toy/double", worker_tasks.problem(2))]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_what_is_prepared_is_what_workers_are_forked_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` sets the variables of a pool, or each worker would be a new interpreter."""
    monkeypatch.setattr(worker, "_SERVED", [])
    asked = []
    monkeypatch.setattr(worker.forkserver, "ensure_running", lambda: asked.append(dict(os.environ)))
    worker.prepare(3)
    (early,) = asked
    kept = early["OMP_NUM_THREADS"], early["PYTHONSAFEPATH"]
    with worker._environment(worker._variables(worker.Pool(3)._threads, "elsewhere")):
        assert worker._context().get_start_method() == "forkserver"
        assert (os.environ["OMP_NUM_THREADS"], os.environ["PYTHONSAFEPATH"]) == kept
    assert len(asked) == 2


def test_closing_early_ends_the_workers() -> None:
    outcomes = run_jobs([job("double", number=1), job("hang")], workers=2)
    assert next(outcomes).result == 2
    outcomes.close()  # would block for ten minutes if the hanging worker were waited for


def test_a_pool_keeps_its_workers_between_runs() -> None:
    with Pool(workers=1) as pool:
        first = [o.result for o in pool.run([job("process_id")])]
        assert [o.result for o in pool.run([job("process_id")])] == first
        list(pool.run([job("leave")]))
        assert [o.result for o in pool.run([job("process_id")])] != first


def test_a_result_that_says_so_ends_its_worker() -> None:
    with Pool(workers=1) as pool:
        (first,) = pool.run([job("spent")])
        (again,) = pool.run([job("process_id")])
    assert again.result != first.result.process_id


def test_a_job_whose_worker_dies_while_its_parent_is_busy_is_not_lost() -> None:
    jobs = [job("killed")]
    outcomes = list(run_jobs(jobs, workers=1, on_progress=lambda j, problem: time.sleep(0.5)))
    assert [o.finding is not None and o.finding.check for o in outcomes] == ["crash"]


def test_a_failed_check_survives_the_way_between_processes() -> None:
    problem = worker_tasks.problem(3)
    finding = Finding("exact", "mine", "mine/relu/plain/fp32", problem, "exact", 0, "not right")
    error = pickle.loads(pickle.dumps(failed(finding)))
    assert isinstance(error, Failed)
    assert type(error) is type(failed(finding)) is not type(failed(replace(finding, check="runs")))
    assert error.finding == finding


def test_an_exception_that_does_not_survive_it_is_told_in_words() -> None:
    outcomes = run(job("fail_in_its_own_way"), job("double", number=1), workers=1)
    assert str(outcomes[0].result) == "TwoParts: the oracle's, own fault"
    assert outcomes[1].result == 2


def test_workers_write_where_they_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPOTHESIS_STORAGE_DIRECTORY", raising=False)
    with Pool(workers=1) as pool:
        (kept,) = [Path(o.result) for o in pool.run([job("hypothesis_home")])]
        assert kept.is_dir()
        assert list(kept.iterdir())
    assert not kept.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("openmp", "threads", "expected"),
    [
        (None, 3, {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3"}),
        ("2", 3, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}),
        ("2,1", 3, {"OMP_NUM_THREADS": "2,1", "MKL_NUM_THREADS": "2"}),
        ("8", 3, {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "3"}),
    ],
)
def test_no_library_gets_more_threads_than_the_user_allows_openmp(
    monkeypatch: pytest.MonkeyPatch, openmp: str | None, threads: int, expected: dict[str, str]
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if openmp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    with Pool(workers=1, threads=threads) as pool:
        (outcome,) = pool.run([job("variables")])
    assert expected.items() <= outcome.result.items()


def test_jobs_of_a_kin_go_to_one_worker_while_others_have_other_work() -> None:
    kin = [replace(job("process_id"), kin=name) for name in "ab"]
    with Pool(workers=2) as pool:
        first, again = ({o.job.kin: o.result for o in pool.run(js)} for js in (kin, kin[::-1]))
    assert first["a"] != first["b"]
    assert first == again


def test_what_backends_raise_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BackendUnavailable("mine", "no device", "plug one in")))
    assert (error.name, error.cause, error.remedy) == ("mine", "no device", "plug one in")


# -- isolation ---------------------------------------------------------------------------------


def crash_of(outcome: Outcome) -> Finding:
    assert outcome.finding is not None
    assert outcome.finding.check == "crash"
    return outcome.finding


def test_signals_without_a_name_are_named_by_their_number() -> None:
    outcomes = run(job("real_time_signal", number=3), job("double", number=1), workers=1)
    assert crash_of(outcomes[0]).message == "the worker process died of SIGRTMIN+3"
    assert crash_of(outcomes[0]).problem == worker_tasks.problem(7)
    assert outcomes[1].result == 2
    first = int(signal.SIGRTMIN)
    assert signal_name(first) == "SIGRTMIN"
    assert signal_name(first - 1) == f"signal {first - 1}"  # the C library's own
    assert signal_name(9) == "SIGKILL"


def test_prints_of_a_kernel_do_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    (outcome,) = run(job("prints"))
    assert outcome.result == "done"
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split("\n")) == ["", "from C", "from Python", "to the last stdout"]


def test_what_cannot_be_said_or_read_is_short() -> None:
    unprintable, wordy, long, junk, double = run(
        *map(job, ("fail_without_words", "fail_at_length", "answer_at_length")),
        *(job("write_to_the_pipe"), job("double", number=1)),
        workers=1,
    )
    assert isinstance(unprintable.result, R18Error)
    said = "Unprintable, which cannot be printed: its text raises ValueError"
    assert str(unprintable.result) == said
    assert str(wordy.result) == f"RuntimeError: {'x' * 2000}… (50,000,000 characters)"
    assert "had an answer of 50,000,0" in crash_of(long).message
    assert crash_of(long).problem == worker_tasks.problem(8)
    assert "sent an unreadable message: UnpicklingError" in crash_of(junk).message
    assert crash_of(junk).problem == worker_tasks.problem(9)
    assert double.result == 2


def test_a_kernel_that_forks_or_cannot_be_quoted_is_a_finding() -> None:
    jobs = [
        Job(hostile_kernels.examined, {"index": index}, "toy", "toy/relu")
        for index in range(len(hostile_kernels.KERNELS))
    ]
    outcomes = run(*jobs, job("double", number=1), workers=1)
    found = [outcome.result for outcome in outcomes[:-1]]
    line = hostile_kernels.KERNELS[2].__code__.co_firstlineno + 1
    assert [finding.check for finding in found] == ["global_state", "global_state", "runs", "runs"]
    assert [finding.message for finding in found[:3]] == [
        "the call left a child process",
        "the call left a child process",
        f"raised Unprintable in _raises_the_unprintable (hostile_kernels.py:{line}), "
        "which cannot be printed: its text raises ValueError",
    ]
    assert len(found[3].message) < 2100
    assert outcomes[-1].result == 2


@pytest.mark.parametrize("how", ["remove", "empty", "overwrite"])
def test_a_spoiled_slate_costs_neither_process_its_life(how: str) -> None:
    """A spoiled slate crashes neither process, and the last announcement is still read."""
    with Pool(1) as pool:
        list(pool.run([job("process_id")]))
        assert pool._folder is not None
        folder = pool._folder.name
        lost, double = pool.run(
            [job("spoil_the_slate", folder=folder, how=how), job("double", number=1)]
        )
    assert crash_of(lost).message == "the worker process exited with code 6"
    assert (crash_of(lost).problem, crash_of(lost).seed) == (worker_tasks.problem(14), 18)
    assert double.result == 2


def test_what_a_slate_does_not_hold_is_announced_all_the_same() -> None:
    """Long announcements go through the pipe, and the parent knows which one was the last."""
    jobs = [job("announce_at_length", short=short) for short in (0, 1)]
    long, short, double = run(*jobs, job("double", number=1), workers=1)
    assert (crash_of(long).problem, crash_of(long).seed) == (worker_tasks.problem(16), 20)
    assert (crash_of(short).problem, crash_of(short).seed) == (worker_tasks.problem(17), 21)
    assert double.result == 2


def test_a_worker_without_a_slate_announces_through_its_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker whose slate was removed before it opened it announces through its pipe."""
    made = worker.Slate.__init__

    def make(slate: Slate, path: Path, *, create: bool = False) -> None:
        made(slate, path, create=create)
        path.unlink()

    monkeypatch.setattr(worker.Slate, "__init__", make)
    seen: list[object] = []
    (lost,) = run_jobs([job("leave")], on_progress=lambda j, problem: seen.append(problem))
    assert crash_of(lost).problem == worker_tasks.problem(5)
    assert seen == [worker_tasks.problem(5)]


def test_a_job_is_not_said_to_do_what_the_one_before_did() -> None:
    """A job that dies before announcing anything is not blamed for the previous job's problem."""
    jobs = [job("double", number=1), job("die_in_silence")]
    _, lost = run_jobs(jobs, workers=1)
    assert crash_of(lost).problem is None


def test_children_end_with_their_worker(tmp_path: Path) -> None:
    """A worker's children end with it, or they would hold the pipe open that shows its death."""
    file = tmp_path / "child"
    lost, double = run(
        job("leave_a_child_and_die", file=str(file)), job("double", number=1), workers=1
    )
    assert crash_of(lost).message == "the worker process exited with code 5"
    assert double.result == 2
    assert ended(int(file.read_text()))


def ended(process_id: int) -> bool:
    """Whether a process is gone, or dead and not waited for, within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is limited; a worker has some 100 MB with its tasks' imports."""
    monkeypatch.setenv(isolation.MEMORY, "0.5")
    lost, double = run(job("take_memory", nbytes=2**30), job("double", number=1), workers=1)
    finding = crash_of(lost)
    assert "GiB of memory and was ended: all workers together may use 0.5 GiB" in finding.message
    assert "R18_WORKER_MEMORY sets another limit" in finding.message
    assert finding.problem == worker_tasks.problem(10)
    assert double.result == 2


def test_the_memory_limit_is_a_share_or_what_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(isolation.MEMORY, raising=False)
    monkeypatch.setattr("r18.machine.CGROUP", tmp_path)
    assert isolation.memory_limit() == int(0.8 * psutil.virtual_memory().total)
    (tmp_path / "memory.max").write_text("max\n")
    assert isolation.memory_limit() == int(0.8 * psutil.virtual_memory().total)
    (tmp_path / "memory.max").write_text("1000000\n")
    assert isolation.memory_limit() == 800_000
    monkeypatch.setenv(isolation.MEMORY, "1.5")
    assert isolation.memory_limit() == 3 * 2**29
    for wrong in ("much", "0", "-1", "inf", "nan"):
        monkeypatch.setenv(isolation.MEMORY, wrong)
        with pytest.raises(UsageError, match=f"number of GiB above 0, got '{wrong}'"):
            Pool(1)


def test_a_worker_leads_a_group_of_its_own() -> None:
    with Pool(workers=1) as pool:
        (outcome,) = pool.run([job("process_id")])
        assert os.getpgid(outcome.result) == outcome.result != os.getpgrp()


def test_a_worker_has_nothing_of_another_and_the_variables_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, read_on_import in ((1, "1"), (2, "1"), (3, "2")):  # the last is a new interpreter
        monkeypatch.setenv("R18_OF_THIS_TEST", str(number))
        monkeypatch.setenv("OPENBLAS_OF_THIS_TEST", read_on_import)
        (outcome,) = run(job("keep", number=number))
        kept, variables, backends = outcome.result
        assert kept == [number]
        assert variables["R18_OF_THIS_TEST"] == str(number)
        assert variables["OPENBLAS_OF_THIS_TEST"] == read_on_import
        assert not backends


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_worker_is_forked_unless_a_library_would_read_another_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(job("double", number=1))
    (server,) = worker._SERVED
    for name in os.environ:
        if name.startswith(worker.READ_ON_IMPORT):
            monkeypatch.delenv(name)
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    assert worker._context().get_start_method() == "forkserver"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker._context().get_start_method() == "spawn"
