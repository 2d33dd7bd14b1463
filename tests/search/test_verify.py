"""`r18 verify` and `r18 replay`: faults, crashes and hangs are found, saved and replayed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

import faulty_backends
from campaigns import kept
from commands import Done, r18
from faulty_backends import MENDED, Faulty
from r18.backend.registry import load_backend
from r18.cli.app import main
from r18.errors import R18Error, UnknownName
from r18.graph.ops import Conv2d, Problem, Softmax
from r18.graph.resnet import network
from r18_oracle.findings import Finding, load
from r18_oracle.search import replay as replay_module
from r18_oracle.search import verify as verify_module
from r18_oracle.search import verify_text
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.coverage import coverage_findings, program_refusal, unavailable
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.search.profiles import PROFILES, Profile
from r18_oracle.search.replay import replay_finding
from r18_oracle.search.verify import BackendResult, Request, Verification, verify
from r18_oracle.search.worker import THREAD_VARIABLES, Pool

SHORT = Profile("short", 15, 1_024, 50_000, (1,), False, 2, 3, 8)
"""The profile `quick` with a shorter limit on a worker's silence."""
FAULTS = {
    "faulty/relu/sleeping/fp32": "hang",
    "faulty/maxpool2d/plain/fp32": "exact",
    "faulty/softmax/crashing/fp32": "crash",
    "faulty/add/raising/fp32": "runs",
    "faulty/gap/one_less/fp32": "bound",
    "faulty/conv2d/swapped/fp32": "exact",
    "faulty/gap/idle/fp32": "coverage",
}
KERNELS = [kernel.id for kernel in Faulty().kernels()]
TRUSTED = ("--backend", "faulty_backends:Faulty")
"""The option that names the backend, which a file alone may not decide."""
NETWORK = "faulty_backends:Faulty/program/all/fp32"


def named(backend: str) -> str:
    return f"faulty_backends:{backend}"


@pytest.fixture(scope="module", autouse=True)
def _variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have workers use one thread each, as they compute little, and choose no backend."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("R18_BACKEND", raising=False)
        patched.setenv(MENDED, str(tmp_path_factory.mktemp("state") / "mended"))
        for name in THREAD_VARIABLES:
            patched.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def pool(_variables: None) -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture
def one_worker(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "run_jobs", kept(pool))
    monkeypatch.setattr(replay_module, "run_jobs", kept(pool))


@pytest.fixture
def mended() -> Iterator[None]:
    """Mend the faults until the test ends."""
    flag = Path(os.environ[MENDED])
    flag.touch()
    yield
    flag.unlink()


# -- one run with every kind of fault ----------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of the command, what it computed, and its files. sound: reports during the run."""

    done: Done
    verification: Verification
    sound: list[BackendResult]
    findings: Path
    junit: Path

    def finding(self, kernel: str) -> Finding:
        """A kernel's own finding, or the network's."""
        found = {
            "network" if finding.kind == "network" else finding.kernel: finding
            for finding in self.verification.findings
        }
        assert len(found) == len(self.verification.findings)
        return found[kernel]

    def file(self, kernel: str) -> Path:
        return self.findings / self.finding(kernel).file_name


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("faulty")
    findings, junit = folder / "findings", folder / "reports" / "junit.xml"
    made: list[Verification] = []
    sound: list[BackendResult] = []

    def recorded(*arguments: Any, **options: Any) -> Verification:
        made.append(verify(*arguments, **options | {"on_sound": sound.append}))
        return made[-1]

    with patch.dict(PROFILES, short=SHORT), patch.object(verify_module, "verify", recorded):
        done = r18(
            *("verify", "--network", "tiny", "--profile", "short", "--precision", "fp32"),
            *("--backend", named("Faulty"), "--findings", findings, "--junit", junit),
            *("--workers", 2),
        )
    assert done.code == 1, done.err
    return Run(done, made[0], sound, findings, junit)


def test_each_fault_is_found_and_the_run_goes_on(faulty: Run) -> None:
    (result,) = faulty.verification.backends
    assert [report.kernel for report in result.kernels] == KERNELS
    verdicts = {report.kernel: report.verdict for report in result.kernels}
    assert {kernel for kernel, verdict in verdicts.items() if verdict != "ok"} == set(FAULTS)
    found = faulty.verification.findings
    assert [(f.kernel, f.check) for f in found[:-1]] == list(FAULTS.items())
    assert (found[-1].kernel, found[-1].kind) == ("faulty/maxpool2d/plain/fp32", "network")


def test_what_a_kernel_ended_in_is_told_with_its_problem(faulty: Run) -> None:
    for kernel, message in {
        "faulty/softmax/crashing/fp32": "the worker process died of SIGSEGV",
        "faulty/relu/sleeping/fp32": "the worker process gave no sign of life for 8 s",
        "faulty/add/raising/fp32": "raised MemoryError in fail (faulty_backends.py:",
        "faulty/gap/idle/fp32": "took none of the problems it was offered, though fp32 is "
        "available here; it refuses this problem: not today",
    }.items():
        finding = faulty.finding(kernel)
        assert finding.message.startswith(message)
        assert finding.problem is not None
        assert finding.problem.op.name == kernel.split("/")[1]


def test_the_smallest_problem_that_shows_a_fault_is_told(faulty: Run) -> None:
    gap = faulty.finding("faulty/gap/one_less/fp32").problem
    assert gap is not None
    assert gap.inputs[0] in {(1, 1, 1, 2), (1, 1, 2, 1)}
    conv = faulty.finding("faulty/conv2d/swapped/fp32").problem
    assert conv is not None
    assert isinstance(conv.op, Conv2d)
    assert conv.op.stride[0] != conv.op.stride[1]
    assert conv.macs < 100


def test_a_crash_and_a_hang_are_shrunk_in_workers_of_their_own(faulty: Run) -> None:
    assert faulty.finding("faulty/softmax/crashing/fp32").problem == Problem(Softmax(), ((1, 1),))
    hang = faulty.finding("faulty/relu/sleeping/fp32").problem
    assert hang is not None
    assert set(hang.inputs[0]) == {1}


def test_the_network_names_the_step_where_it_diverges_first(faulty: Run) -> None:
    step = faulty.finding("network")
    assert step.details["step"] == "maxpool"
    assert step.message.startswith("step 'maxpool', given the reference's values: error exceeds")
    table = faulty.done.out.split("against float64\n")[1].splitlines()[2:10]
    verdicts = {row.split("  ")[0]: row.split()[-1] for row in table}
    assert verdicts["stem_pool"] == verdicts["logits"] == "FAIL"


def test_each_finding_is_printed_with_all_that_shows_it(faulty: Run) -> None:
    summary, *texts = faulty.done.out.split("\n\nfaulty/")
    assert summary.splitlines()[-1] == faulty.verification.closing()
    assert f": {len(KERNELS)} kernels on " in faulty.verification.closing()
    assert " problems and 1 network in " in faulty.verification.closing()
    assert faulty.verification.closing().endswith(" s: 8 findings")
    likewise = "faulty/conv2d/swapped/fp32"  # its message is another kernel's
    assert f"  and 1 more kernel: {likewise}\n" in faulty.done.out
    findings = [found for found in faulty.verification.findings if found.kernel != likewise]
    for finding, text in zip(findings, texts, strict=True):
        first, *lines = (line.strip() for line in text.splitlines())
        lines = [line for line in lines if not line.startswith("and 1 more kernel: ")]
        assert f"faulty/{first}" == f"{finding.kernel}: {finding.check}: {finding.message}"
        shown = [f"problem   {finding.problem}", f"input     {finding.kind}, seed {finding.seed}"]
        if finding.coordinate is not None:
            shown.append(f"worst     at {finding.coordinate}: got {finding.got}")
            shown.append(f"expected {finding.expected}, bound {finding.bound}")
        if "stacks" in finding.details:
            shown.append("stood     Main thread, most recent call first:")
            shown += (line.strip() for line in finding.details["stacks"].split("\n")[1:])
        assert lines[:-1] == shown
        *_, written, option, backend = shlex.split(lines[-1])
        path = Path(written)
        assert lines[-1] == f"replay    r18 replay {path} --backend {finding.backend}"
        assert (option, backend) == ("--backend", "faulty_backends:Faulty")
        assert path.parent == faulty.findings
        assert path.stat().st_size - len(finding.details.get("stacks", "")) < 2_000
        assert load(path) == finding
    values = [f for f in faulty.verification.findings if f.check in ("exact", "bound")]
    assert all(f.coordinate is not None for f in values)


def test_what_has_no_finding_is_told_at_once(faulty: Run) -> None:
    """Each kernel that passed is reported at once, without refusals and the network."""
    (result,) = faulty.verification.backends
    blamed = {finding.kernel for finding in result.findings}
    right = [r.kernel for r in result.kernels if r.verdict == "ok" and r.kernel not in blamed]
    assert right
    assert all((part.findings, part.checkpoints) == ([], []) for part in faulty.sound)
    reported = [report.kernel for part in faulty.sound for report in part.kernels]
    assert sorted(reported) == sorted(right)


def test_the_table_shows_verdicts_and_refusals(faulty: Run) -> None:
    rows = [line.split() for line in faulty.done.out.splitlines() if line.startswith("faulty/")]
    shown = {row[0]: row[-1] for row in rows if row[-1] in ("ok", "FAIL", "refused")}
    (result,) = faulty.verification.backends
    assert shown == {report.kernel: report.verdict for report in result.kernels}
    count = sum(result.kernels[-1].tally.refused.values())
    assert f"refused: {count} problems by faulty/gap/idle/fp32: not today\n" in faulty.done.out


def test_json_holds_everything(faulty: Run) -> None:
    data = json.loads(json.dumps(verify_text.to_json(faulty.verification), allow_nan=False))
    assert (data["executed"], data["profile"], data["network"]) == (True, "short", "tiny")
    assert [Finding.from_json(f) for f in data["findings"]] == faulty.verification.findings
    (backend,) = data["backends"]
    assert backend["device"]["name"] == "plain NumPy"
    kernels = {kernel["kernel"]: kernel for kernel in backend["kernels"]}
    assert list(kernels) == KERNELS
    assert kernels["faulty/conv2d/plain/fp32"]["network_problems"] > 10
    assert kernels["faulty/conv2d/plain/fp32"]["checks"]["bound"] > 10
    assert kernels["faulty/gap/idle/fp32"]["refused"]["not today"] > 0
    assert backend["checkpoints"][0]["checkpoints"][-2]["name"] == "logits"
    assert backend["skipped"] == {}


def test_junit_is_xml_and_counts_whatever_a_kernel_raises(faulty: Run) -> None:
    (suite,) = ElementTree.parse(faulty.junit).getroot()
    assert suite.attrib["name"] == named("Faulty")
    counts = [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == [len(KERNELS) + 1, 8, 0, 0]
    cases = {case.attrib["name"]: list(case) for case in suite}
    assert set(cases) == {*KERNELS, NETWORK}
    failures = {name: case[0].attrib["type"] for name, case in cases.items() if case}
    assert failures == FAULTS | {NETWORK: "checkpoint"}
    (raised,) = cases["faulty/add/raising/fp32"]
    message = raised.attrib["message"]
    assert message.startswith("raised MemoryError in fail (faulty_backends.py:")
    assert message.endswith("): out of device memory�")
    (wrong,) = cases["faulty/conv2d/swapped/fp32"]
    assert "expected" in str(wrong.text)


def test_junit_skips_a_kernel_of_a_precision_that_is_not_to_be_had(faulty: Run) -> None:
    """JUnit skips a kernel of an unavailable precision, with the reason; of an available one,
    `verify` makes a finding."""
    (busy,) = faulty.verification.backends
    report = KernelReport("mine", "mine/gap/plain/tf32")
    report.tally.refused["no tensor cores"] += 3
    result = BackendResult("mine", busy.device, [report])
    (case,) = ElementTree.fromstring(verify_text.junit(verification(result)).encode()).iter(
        "testcase"
    )
    assert [(c.tag, c.attrib["message"]) for c in case] == [
        ("skipped", "refused every problem: no tensor cores")
    ]


# -- replay ------------------------------------------------------------------------------------


def replay_here(finding: Finding) -> Finding | None:
    """Replay a finding in this process."""
    return replay_finding(finding=finding, announce=lambda problem, kind, seed: None)


@pytest.mark.parametrize(
    "kernel",
    [
        "faulty/gap/one_less/fp32",
        "faulty/add/raising/fp32",
        "faulty/gap/idle/fp32",
        "network",
        "faulty/softmax/crashing/fp32",
    ],
)
@pytest.mark.usefixtures("one_worker")
def test_a_finding_is_replayed_to_the_bit(faulty: Run, kernel: str) -> None:
    path = faulty.file(kernel)
    done = r18("replay", path, *TRUSTED)
    assert (done.code, done.err) == (1, "")
    assert done.out == f"{load(path).describe(path)}\nthe same finding, to the bit\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no signal asks a process there")
def test_a_hang_is_told_with_where_its_worker_stood(faulty: Run) -> None:
    """A hang's stack is in the run's output, in JUnit's, and in the finding's file."""
    finding = faulty.finding("faulty/relu/sleeping/fp32")
    line = faulty_backends.sleep.__code__.co_firstlineno + 1
    assert f" and was ended; it stood in sleep (faulty_backends.py:{line}), " in finding.message
    stood = "  stood     Main thread, most recent call first:\n"
    assert finding.details["stacks"].split("\n")[1].endswith(f", line {line} in sleep")
    assert stood in faulty.done.out
    assert stood in faulty.junit.read_text("utf-8")
    assert load(faulty.file("faulty/relu/sleeping/fp32")) == finding


def test_a_hang_is_replayed_with_the_patience_that_it_was_found_with(faulty: Run) -> None:
    finding = faulty.finding("faulty/relu/sleeping/fp32")
    others = {"campaign", "stacks"}
    details = {key: value for key, value in finding.details.items() if key not in others}
    assert details == {"silence_seconds": 8, "rounding": finding.kind, "light": False}
    assert finding.details["campaign"]["profile"]["call_seconds"] == 8


@pytest.mark.usefixtures("mended", "one_worker")
def test_replay_says_when_a_fault_is_gone(faulty: Run) -> None:
    kernel = "faulty/gap/one_less/fp32"
    done = r18("replay", faulty.file(kernel), *TRUSTED)
    assert done.code == 0, done.out
    problem = faulty.finding(kernel).problem
    assert done.out == f"gone: {kernel}: no 'bound' finding on {problem}\n"
    for finding in faulty.verification.findings:
        assert replay_here(finding) is None


@pytest.mark.usefixtures("one_worker")
def test_another_fault_is_told_from_the_one_saved(faulty: Run, tmp_path: Path) -> None:
    data = json.loads(faulty.file("faulty/gap/one_less/fp32").read_text("utf-8"))
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data | {"message": "another"}), "utf-8")
    done = r18("replay", path, *TRUSTED)
    assert done.code == 1
    assert done.out.endswith("another finding than the one saved\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "faulty/gap/one-less/fp32"}, "did you mean 'faulty/gap/one_less/fp32'?"),
        ({"details": {"run": {"network": "tiny"}}}, "a damaged finding"),
        ({"check": "coverage"}, "a damaged finding"),
    ],
)
@pytest.mark.usefixtures("one_worker")
def test_replay_refuses_a_finding_that_is_none(
    faulty: Run, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = json.loads(faulty.file("faulty/gap/one_less/fp32").read_text("utf-8"))
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data | change), "utf-8")
    done = r18("replay", path, *TRUSTED)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


# -- exit codes --------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_worker")
def test_no_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run without findings, of the environment's backend, has exit code 0 and valid JSON."""
    monkeypatch.setenv("R18_BACKEND", named("Right"))
    monkeypatch.chdir(tmp_path)
    done = r18("verify", "--network", "tiny", "--kernels", "faulty/[rs]*", "--json")
    assert (done.code, done.err) == (0, "")
    data = json.loads(done.out)
    (backend,) = data["backends"]
    assert backend["name"] == named("Right")
    kernels = ["faulty/relu/plain/fp32", "faulty/softmax/plain/fp32"]
    assert [kernel["kernel"] for kernel in backend["kernels"]] == kernels
    problems = sum(kernel["problems"] for kernel in backend["kernels"])
    assert data["closing"].startswith(f"{named('Right')}: 2 kernels on {problems} problems and 0 ")
    assert data["closing"].endswith("s: no finding")
    assert not (tmp_path / "exports").exists()


@pytest.mark.usefixtures("one_worker")
def test_nothing_executed_is_no_success() -> None:
    done = r18("verify", "--network", "tiny", "--backend", named("Refusing"))
    assert done.code == 2, done.out
    assert done.out.endswith("no finding; nothing was executed, so nothing is verified\n")
    assert "not run in fp32: faulty/conv2d/plain/fp32: not today" in done.out
    assert " by 8 kernels: not today" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernels", "faulty/gop/*"), "unknown kernel 'faulty/gop/*', did you mean 'faulty/gap/"),
        (("--profile", "quik"), "unknown profile 'quik', did you mean 'quick'?"),
        (("--network", "resnet19"), "did you mean 'resnet18'?"),
        (("--precision", "fp23"), "did you mean 'fp32'?"),
        (("--fusion", "most"), "unknown fusion level 'most'"),
        (("--weights", "synthetics"), "did you mean 'synthetic'?"),
        (("--backend", "nompy"), "unknown backend 'nompy', did you mean 'numpy'?"),
        (
            ("--backend", "no_such_module:Backend"),
            "no module 'no_such_module' in the",
        ),
    ],
)
@pytest.mark.usefixtures("one_worker")
def test_a_wrong_request_is_refused(arguments: tuple[str, ...], message: str) -> None:
    done = r18("verify", "--backend", named("Right"), "--network", "tiny", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def verification(*results: BackendResult, kernels: str = "*") -> Verification:
    return Verification(Request(SHORT, kernels), list(results))


def test_every_backend_that_was_named_must_run_something(faulty: Run) -> None:
    (busy,) = faulty.verification.backends
    idle = BackendResult("idle", busy.device)
    assert verification(busy).executed
    assert not verification(busy, idle).executed
    assert "nothing was executed on idle, so" in verification(busy, idle).closing()
    assert verification(busy, idle, kernels="faulty/*").executed
    assert not verification().executed


def test_a_kernel_that_only_crashed_was_executed() -> None:
    """A kernel that only crashed counts as executed, or a crash would look like a wrong request."""
    device = load_backend(named("Right")).probe()
    finding = Finding("crash", "mine", "mine/relu/plain/fp32", None, "exact", 0, "died")
    assert verification(BackendResult("mine", device, findings=[finding])).executed


def test_a_job_that_came_to_no_end_is_no_success() -> None:
    backends = {named("Right"): load_backend(named("Right"))}
    with (
        patch.object(verify_module, "run_jobs", lambda jobs, **options: iter(())),
        pytest.raises(R18Error, match="1 of 1 jobs have no outcome"),
    ):
        verify(backends, Request(SHORT, kernels="*/relu/*", workers=1))


def test_a_time_limit_leaves_kernels_and_says_so() -> None:
    backends = {named("Right"): load_backend(named("Right"))}
    done = verify(backends, Request(SHORT, kernels="*/relu/*", minutes=0))
    assert len(done.left) == 1
    assert not done.ok
    assert f"the time limit left {done.left[0]}" in done.closing()
    assert done.backends[0].kernels == []
    assert verify(backends, Request(SHORT, kernels="*/relu/*", minutes=60)).left == ()


def test_what_is_settled_is_not_run_again() -> None:
    backends = {named("Right"): load_backend(named("Right"))}
    (result,) = verify(backends, Request(SHORT, kernels="*/relu/*")).backends
    (report,) = result.kernels
    request = Request(SHORT, kernels="*/relu/*", settled=frozenset({report.kernel}))
    (again,) = verify(backends, request).backends
    assert (again.kernels, again.findings) == ([], [])
    assert not again.executed


def test_an_unknown_kernel_in_the_library() -> None:
    backends = {named("Right"): load_backend(named("Right"))}
    with pytest.raises(UnknownName, match="A glob over ids works too"):
        verify(backends, Request(SHORT, kernels="numpy/*"))


# -- programs, and what is missing -------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(pool: Pool) -> Verification:
    """A verification of programs without kernels, which are searched above."""
    names = [named(name) for name in ("RaisingProgram", "WithoutSoftmax", "CrashingProgram")]
    request = Request(SHORT, network="tiny", precisions=("fp32", "fp16"))
    with (
        patch.object(verify_module, "_kernels", lambda *_: []),
        patch.object(verify_module, "run_jobs", kept(pool)),
    ):
        return verify({name: load_backend(name) for name in names}, request)


def one(verification: Verification, kernel: str) -> Finding:
    (finding,) = (f for f in verification.findings if f.kernel == kernel)
    return finding


def test_a_program_that_crashes_is_a_finding(programs: Verification) -> None:
    crash = one(programs, f"{named('CrashingProgram')}/program/all/fp32")
    assert (crash.check, crash.problem) == ("crash", None)
    run = NetworkRun("tiny", "synthetic", "fp32", "all", SHORT.samples, 0)
    assert crash.details == {"silence_seconds": 8, "run": asdict(run)}


def test_a_program_that_raises_is_a_finding(programs: Verification) -> None:
    raised = one(programs, f"{named('RaisingProgram')}/program/all/fp32")
    assert (raised.check, raised.problem) == ("runs", None)
    assert "raised MemoryError in compile (faulty_backends.py:" in raised.message
    assert replay_here(raised) == raised


def test_every_op_of_the_network_needs_a_kernel(programs: Verification) -> None:
    missing = one(programs, f"{named('WithoutSoftmax')}/softmax/*/fp32")
    assert missing.check == "coverage"
    assert missing.message == "no fp32 kernel takes this problem of tiny"
    assert str(missing.problem).startswith("softmax() 1×10")
    assert replay_here(missing) == missing


@pytest.mark.usefixtures("mended")
def test_what_programs_lacked_may_be_gone(programs: Verification) -> None:
    for finding in programs.findings:
        if not finding.kernel.endswith("/fp16"):
            assert replay_here(finding) is None


def test_a_precision_that_was_asked_for_and_cannot_be_run_is_a_finding(
    programs: Verification,
) -> None:
    for result in programs.backends:
        reason = "precisions with kernels for conv2d: fp32"
        assert result.skipped == {"fp16": reason}
        (finding,) = (f for f in result.findings if f.kernel.endswith("/fp16"))
        assert finding.kernel == f"{result.name}/program/all/fp16"
        assert finding.message == f"cannot run tiny in fp16: {reason}"
        assert replay_here(finding) == finding
    suites = ElementTree.fromstring(verify_text.junit(programs).encode())
    assert [int(suite.attrib["failures"]) for suite in suites] == [2, 2, 2]
    assert [int(suite.attrib["skipped"]) for suite in suites] == [0, 0, 0]


def test_a_kernel_that_raises_when_asked_what_it_takes_stops_nothing() -> None:
    def refuses(problem: object) -> str:
        raise KeyError("no such tile")

    backend = load_backend(named("Right"))
    broken = [k.__class__(**{**vars(k), "refuses": refuses}) for k in backend.kernels()]
    with patch.object(type(backend), "kernels", lambda self: tuple(broken)):
        assert program_refusal(backend, network("tiny"), "fp32", "all") is None
        (finding,) = coverage_findings("mine", backend, "tiny", (1,), 0)
    assert finding.message == "the refusal() of a kernel raised KeyError: 'no such tile'"


def test_a_precision_that_is_not_to_be_had_is_no_fault() -> None:
    """An unavailable precision, like tf32 on a CPU, is shown with the reason and is no fault."""
    assert unavailable(load_backend(named("Refusing")), "fp32") == "not today"
    assert coverage_findings("mine", load_backend(named("Refusing")), "tiny", (1,), 0) == []
    assert unavailable(load_backend(named("Right")), "fp32") is None


def test_the_command_has_its_name_however_it_was_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = ["/somewhere/__main__.py", "verify", "--help"]
    with patch.object(sys, "argv", started), pytest.raises(SystemExit):
        main()
    assert "Usage: r18 verify [OPTIONS]" in capsys.readouterr().out
