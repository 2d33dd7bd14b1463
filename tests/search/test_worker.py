"""Isolation: a worker may die or hang; its parent says of what, and goes on."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest

import worker_tasks
from r18.errors import BackendUnavailable
from r18_oracle.findings import Failed, Finding, failed
from r18_oracle.search.worker import THREAD_VARIABLES, Job, Outcome, Pool, run_jobs


def run(*jobs: Job, workers: int = 2) -> list[Outcome]:
    return list(run_jobs(jobs, workers=workers))


def job(task: str, silence_seconds: float = 60.0, **arguments: int) -> Job:
    return Job(getattr(worker_tasks, task), arguments, "toy", f"toy/{task}", silence_seconds)


def test_every_job_has_one_outcome_and_results_come_back() -> None:
    outcomes = run(*(job("double", number=n) for n in range(5)))
    assert sorted(o.result for o in outcomes) == [0, 2, 4, 6, 8]
    assert all(o.finding is None for o in outcomes)


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
