"""`r18 verify` and the conformance suite judge the same, and take the same expected failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import r18_numpy
from alike_backends import Chatty, Sharp, Typo
from commands import r18
from r18.backend import HostKernel, RoundingContract
from r18.errors import UsageError
from r18.graph.ops import Conv2d, Problem, ReLU
from r18.graph.precision import FP32, Precision
from r18_oracle.judge.declared import objection
from r18_oracle.search import verify as _  # noqa: F401  before the suite: it forgets its imports
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.profiles import profile
from r18_oracle.xfails import load_expected

pytest_plugins = ["pytester"]

ENTRY = """[[xfail]]
test = "test_kernel[alike/relu/{name}/fp32]"
reason = "known"
link = "https://example.org/issues/7"
"""


def suite(pytester: pytest.Pytester, *arguments: str) -> tuple[int, str]:
    done = pytester.runpytest_inprocess(
        *("--pyargs", "r18_oracle.conformance", "--r18-network", "tiny", *arguments)
    )
    return int(done.ret), f"{done.stdout}\n{done.stderr}"


def verify(name: str, *arguments: object) -> tuple[int, str]:
    done = r18(
        *("verify", "--backend", f"alike_backends:{name}", "--kernels", "alike/*", *arguments),
        *("--network", "tiny", "--workers", 1, "--findings", "findings"),
    )
    return done.code, done.out + done.err


# -- ids and contracts -------------------------------------------------------------------------


@pytest.mark.usefixtures("_in_a_folder")
def test_kernels_of_one_id_fail_in_both(pytester: pytest.Pytester) -> None:
    code, out = verify("Twice")
    assert code == 1
    assert "alike/relu/plain/fp32: coverage: several kernels have this id" in out
    (path,) = Path("findings").iterdir()
    assert r18("replay", path, "--backend", "alike_backends:Twice").code == 1
    code, out = suite(pytester, "--r18-backend", "alike_backends:Twice", "-k", "unique")
    assert code == pytest.ExitCode.TESTS_FAILED, out


def test_a_contract_may_claim_more_than_the_precision() -> None:
    kept, broken = Sharp().kernels()
    assert objection(kept) is None
    quick = profile("quick")
    assert run_campaign(Sharp(), kept, quick, 0, network_name=None).finding is None
    finding = run_campaign(Sharp(), broken, quick, 0, network_name=None).finding
    assert finding is not None
    assert finding.check == "bound"


def test_a_typo_in_an_algorithm_gets_the_nearest() -> None:
    (kernel,) = Typo().kernels()
    said = "the oracle has no error bound for 'exakt', did you mean 'exact'? known: exact"
    assert objection(kernel) == said
    finding = run_campaign(Typo(), kernel, profile("quick"), 0, network_name=None).finding
    assert finding is not None
    assert (finding.check, finding.message) == ("declaration", said)


@pytest.mark.parametrize(
    ("precision", "contract", "said"),
    [
        (
            FP32,
            ("zzz", "float32"),
            "the oracle has no error bound for 'zzz'; known: sum, winograd_f2x2, winograd_f4x4, "
            "transforms, exact",
        ),
        (
            FP32,
            ("sum", "float16"),
            "fp32 accumulates in float32, not in float16; known: float32, float64",
        ),
        (
            replace(FP32, name="fp33"),
            ("sum", "float32"),
            "its precision is 'fp33', did you mean 'fp32'? known: fp64, fp32, fp16x3, tf32, fp16, "
            "bf16, fp8, int8",
        ),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_those_that_are(
    precision: Precision, contract: tuple[str, str], said: str
) -> None:
    rule = RoundingContract(*contract, precision.storage)
    known = next(k for k in r18_numpy.Backend().kernels() if k.op is Conv2d)
    assert isinstance(known, HostKernel)
    assert objection(replace(known, precision=precision, contract=rule)) == said


# -- what is printed ---------------------------------------------------------------------------


@pytest.mark.usefixtures("_in_a_folder")
def test_json_stays_json_when_a_kernel_prints(capfd: pytest.CaptureFixture[str]) -> None:
    assert Chatty().kernels()[0].refusal(Problem(ReLU(), ((1, 1),))) is None
    capfd.readouterr()
    done = r18(
        *("verify", "--backend", "alike_backends:Chatty", "--kernels", "alike/*", "--json"),
        *("--network", "tiny", "--workers", 1),
    )
    assert json.loads(done.out)["findings"] == []
    assert capfd.readouterr().out == ""


# -- expected failures -------------------------------------------------------------------------


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_a_folder")
def test_expected_failures_are_strict_in_verify_too() -> None:
    Path("known.toml").write_text(ENTRY.format(name="wrong"))
    code, out = verify("Known", "--xfails", "known.toml", "--junit", "out.xml")
    assert code == 0, out
    assert "expected: alike/relu/wrong/fp32: exact: known (https://example.org/issues/7)" in out
    assert out.splitlines()[-1].endswith("no finding, 1 expected failure")
    assert 'failures="0"' in Path("out.xml").read_text()
    Path("known.toml").write_text(ENTRY.format(name="*"))
    code, out = verify("Known", "--xfails", "known.toml")
    assert code == 1
    assert "passes, though it is expected to fail: test_kernel[alike/relu/plain/fp32]" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[xfail", "cannot read"),
        ("[[xfail]]\ntest = " + "[" * 3000, "cannot read the expected failures of "),
        ("[[xfial]]\n", "unknown key 'xfial', did you mean 'xfail'?"),
        (ENTRY + 'because = "x"\n', "unknown key 'because'"),
        ('[[xfail]]\ntest = "a"\nreason = "b"\n', "lacks link"),
        (ENTRY.replace('"known"', "7"), "are texts"),
        (ENTRY.replace('"known"', '" "'), "are texts"),
        ("xfail = 3\n", "no array of tables".replace("no", "not an")),
    ],
)
def test_a_wrong_file_is_refused_by_both(
    tmp_path: Path, pytester: pytest.Pytester, text: str, said: str
) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"xfail|known") as error:
        load_expected(path)
    assert said in str(error.value)
    command = ("verify", "--backend", "alike_backends:Known", "--xfails", path)
    done = r18(*command)
    assert done.code == 2
    assert said in done.err


@pytest.mark.usefixtures("_in_a_folder")
def test_the_suite_refuses_an_unknown_key(pytester: pytest.Pytester) -> None:
    (pytester.path / "known.toml").write_text(ENTRY + 'because = "x"\n')
    options = "--r18-backend", "alike_backends:Known", "--r18-xfails", "known.toml"
    code, out = suite(pytester, *options, "-k", "unique")
    assert code == pytest.ExitCode.USAGE_ERROR, out
    assert "unknown key 'because'" in out


@pytest.mark.usefixtures("_in_a_folder")
def test_an_entry_of_no_kernel_is_refused() -> None:
    Path("known.toml").write_text(ENTRY.format(name="wrogn"))
    command = ("verify", "--backend", "alike_backends:Known", "--xfails", "known.toml")
    done = r18(*command, "--network", "tiny")
    assert done.code == 2
    assert "did you mean 'test_kernel[alike/relu/wrong/fp32]'?" in done.err
