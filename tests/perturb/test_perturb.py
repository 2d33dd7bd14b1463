"""Perturbed schedules without a device: findings, their replay, and the record."""

from __future__ import annotations

import json
import math
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

import perturb_toy
from r18.backend.registry import load_backend
from r18.errors import UnknownName, UsageError
from r18.graph.ops import Problem, ReLU
from r18.records import load
from r18.records.kinds import Perturb
from r18.report.tables.judged import perturb_table
from r18_oracle.check.perturbed import SEEDS, Delays, Perturbed
from r18_oracle.cli.perturb import perturb as command
from r18_oracle.findings import PERTURB, Failed, Finding, save
from r18_oracle.findings import load as load_finding
from r18_oracle.loading import kernel_of
from r18_oracle.perturb import session as sessions
from r18_oracle.perturb.record import Record
from r18_oracle.perturb.session import Perturbation, perturb
from r18_oracle.perturb.tasks import Result, perturb_kernel, perturb_program
from r18_oracle.search.profiles import profile
from r18_oracle.search.replay import check_sound, replay_finding

TOY = "perturb_toy:Backend"
RACES, DIES = "toy/relu/races/fp32", "toy/relu/dies/fp32"
OPTIONS: dict[str, Any] = {"network": None, "seeds": 5, "jobs": 1}


def found(result: Perturbation, name: str) -> Finding:
    (finding,) = (one.finding for one in result.results if one.name == name)
    assert finding is not None
    return finding


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Perturbation:
    """A recorded run on the toy's kernels."""
    return perturb(TOY, records_folder=tmp_path_factory.mktemp("records"), **OPTIONS)


def alone(backend: str, kernel: str, *seeds: int, kinds: tuple[str, ...] | None = None) -> Result:
    """The result for one kernel, in this process."""
    return perturb_kernel(
        backend=backend,
        kernel=kernel,
        how=profile("quick"),
        seed=0,
        network_name=None,
        delays=Delays(seeds, kinds),
        deadline=math.inf,
        announce=lambda problem, kind, seed: None,
    )


# -- what is found -----------------------------------------------------------------------------


def test_a_race_is_found_with_its_seed_and_its_kind_of_site(session: Perturbation) -> None:
    verdicts = {result.name: result.verdict for result in session.results}
    assert verdicts == {"toy/relu/right/fp32": "ok", RACES: "FAIL", DIES: "FAIL"}
    finding = found(session, RACES)
    assert finding.check == "perturb"
    assert finding.message == (
        "with delays of seed 3 at copy: 1 of 1 elements differ from those without delays"
    )
    assert finding.details[PERTURB] == {"seeds": [3], "kinds": ["copy"]}
    assert finding.got == 7.0
    assert finding.bound == 0.0
    assert (session.left, session.ok) == (0, False)
    right = next(result for result in session.results if result.verdict == "ok")
    assert right.calls == 6 * right.problems > 60, "one call without delays, and five seeds"
    assert session.text().endswith("(wait, copy, host): 2 failed")


def test_a_lost_worker_is_a_finding_with_every_seed(session: Perturbation) -> None:
    died = found(session, DIES)
    assert died.check == "perturb"
    assert "one of 5 seeds at wait, copy, host: crash: the worker process died of" in died.message
    assert died.details[PERTURB] == {"seeds": [0, 1, 2, 3, 4], "kinds": list(perturb_toy.KINDS)}


def test_a_kind_that_is_not_asked_for_is_not_late() -> None:
    assert alone(TOY, RACES, 3, kinds=("wait", "host")).verdict == "ok"


def test_an_exception_is_a_finding() -> None:
    raised = alone("perturb_toy:Wrong", "toy/relu/raises/fp32", 0, 3).finding
    assert raised is not None
    assert raised.message == (
        "with delays of seed 3 at every kind of site: raised RuntimeError: an illegal address"
    )


def test_a_kernel_that_is_wrong_with_nothing_late_says_so() -> None:
    wrong = alone("perturb_toy:Wrong", "toy/relu/wrong/fp32", 0).finding
    assert wrong is not None
    assert wrong.message.startswith("without delays: the error exceeds the bound")
    assert wrong.details[PERTURB] == {"seeds": [0], "kinds": []}


def test_a_kernel_that_is_not_deterministic_is_judged_by_its_bound() -> None:
    backend = load_backend(TOY)
    loose = copy(kernel_of(backend, RACES))
    loose.__dict__["deterministic"] = False
    problem = Problem(ReLU(), ((1, 2, 3, 3),))
    with pytest.raises(Failed, match=r"seed 3 at copy: the error exceeds the bound"):
        Perturbed(backend, TOY, Delays((1, 3))).examine(loose, problem, 0, "normal")


def test_a_program_that_launches_too_early_is_found() -> None:
    asked: dict[str, Any] = {
        "backend": "perturb_toy:Programs",
        "precision": "fp32",
        "deadline": math.inf,
        "announce": lambda problem, kind, seed: None,
    }
    right = perturb_program(delays=Delays((0, 1), perturb_toy.KINDS), **asked)
    assert (right.verdict, right.problems, right.calls) == ("ok", 12, 24)
    assert right.name == "perturb_toy:Programs/program/all/fp32"
    early = perturb_program(delays=Delays((2, 3), perturb_toy.KINDS), **asked)
    assert early.verdict == "FAIL"
    assert early.broken == ("with delays of seed 3: batch 1 of 12 differs from that without delays")
    assert perturb_program(delays=Delays((3,), ("wait",)), **asked).verdict == "ok"


# -- replays -----------------------------------------------------------------------------------


def test_a_finding_is_replayed_from_its_file(session: Perturbation, tmp_path: Path) -> None:
    finding = load_finding(save(found(session, RACES), tmp_path))
    check_sound(finding)
    quiet: dict[str, Any] = {"announce": lambda problem, kind, seed: None}
    assert replay_finding(finding=finding, **quiet) == finding
    calm = replace(finding, details=finding.details | {PERTURB: {"seeds": [1], "kinds": None}})
    assert replay_finding(finding=calm, **quiet) is None


@pytest.mark.parametrize(
    "damaged",
    [None, {}, {"seeds": [], "kinds": None}, {"seeds": [-1], "kinds": None}, {"seeds": [0]}],
)
def test_damaged_delays_are_refused(session: Perturbation, damaged: Any) -> None:
    finding = found(session, RACES)
    with pytest.raises(UsageError, match="are not delays"):
        check_sound(replace(finding, details=finding.details | {PERTURB: damaged}))


# -- the session and its record ----------------------------------------------------------------


def test_the_record_holds_each_kernel_and_is_continued(session: Perturbation) -> None:
    path = session.path
    assert path is not None
    assert path.name == "perturb-a-toy.json"
    record = load(path, Perturb)
    assert record is not None
    assert record.device == "A Toy (sm_90)"
    (run,) = record.runs.values()
    assert (run.profile, run.network, run.seeds) == ("quick", None, 5)
    assert run.kinds == list(perturb_toy.KINDS)
    entry = record.kernels[RACES]
    assert entry.digest == "toy"
    before = path.read_bytes()
    again = perturb(TOY, records_folder=path.parent, **OPTIONS)
    assert (again.known, len(again.results)) == (3, 3)
    assert found(again, RACES) == found(session, RACES)
    assert path.read_bytes() == before


def test_time_that_is_up_leaves_the_rest(session: Perturbation) -> None:
    """When time is up the rest is left, and nothing is known about other seeds."""
    assert session.path is not None
    options = OPTIONS | {"seeds": 3, "minutes": 0, "records_folder": session.path.parent}
    before = session.path.read_bytes()
    done = perturb(TOY, **options)
    assert (done.known, done.left, done.ok) == (0, 3, False)
    assert "STOPPED early; with --record the same command continues" in done.text()
    assert session.path.read_bytes() == before


def test_a_program_is_recorded_by_its_label(tmp_path: Path) -> None:
    backend = load_backend(TOY)
    asked: dict[str, Any] = {"profile": "quick", "network": None, "seed": 0, "seeds": 1}
    record = Record(tmp_path, backend.probe(), backend, kinds=["host"], **asked)
    record.write([Result("toy/program/all/fp32", 6, 6, broken="wrong", seconds=0.5)])
    written = load(record.path, Perturb)
    assert written is not None
    program = written.programs["toy/program/all/fp32"]
    assert (program.batches, program.broken, written.kernels) == (6, "wrong", {})
    table = perturb_table({"device": "a-toy"}, tmp_path)
    assert list(table.rows) == [("toy", "programs", "1", "", "6", "1")]
    assert next(iter(table.captions)).startswith("A Toy (sm_90), 1 seeds of delays, ")


def test_the_table_counts_what_ran_and_what_was_found(session: Perturbation) -> None:
    assert session.path is not None
    table = perturb_table({"device": "a-toy"}, session.path.parent)
    problems, calls = (
        sum(getattr(one, name) for one in session.results) for name in ("problems", "calls")
    )
    findings = sum(1 for one in session.results if one.finding)
    assert findings
    row = ("kernels", "3", str(problems), str(calls), str(findings))
    assert [one[1:] for one in table.rows] == [row]


def test_requests_are_checked() -> None:
    with pytest.raises(UsageError, match="cannot perturb its schedule\n  to support this"):
        perturb("numpy")
    with pytest.raises(UsageError, match="name the backend"):
        perturb("auto")
    with pytest.raises(UnknownName, match="unknown kernel 'toy/relu/race/fp32'"):
        perturb(TOY, kernels="toy/relu/race/fp32")
    with pytest.raises(UnknownName, match="unknown profile 'quck'"):
        perturb(TOY, profile_name="quck")


def test_the_command(
    session: Perturbation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run(backend: str, **options: Any) -> Perturbation:
        asked.append((backend, options))
        return session

    monkeypatch.setattr(sessions, "perturb", run)
    app = Typer()
    app.command()(command)
    options = ["--network", "none", "--kinds", "wait,copy", "--findings", str(tmp_path)]
    done = CliRunner().invoke(app, ["--backend", TOY, *options])
    assert done.exit_code == 1
    assert f"{RACES}: perturb: with delays of seed 3 at copy" in done.output
    assert f"r18 replay {tmp_path}/toy-relu-races-fp32.perturb" in done.output
    assert len(list(tmp_path.glob("*.json"))) == 2
    ((backend, given),) = asked
    assert (backend, given["network"], given["kinds"]) == (TOY, None, ["wait", "copy"])
    assert (given["seeds"], given["records_folder"]) == (SEEDS, None)
    done = CliRunner().invoke(app, ["--json", *options])
    said = json.loads(done.stdout)
    assert sorted(one["verdict"] for one in said["results"]) == ["FAIL", "FAIL", "ok"]
