"""Records: what a run writes, what it leaves unchanged, and that the committed ones are fresh."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

import compiled
from commands import r18
from r18 import records
from r18.backend import DeviceInfo, Kernel, Resources
from r18.backend.registry import load_backend
from r18.cli.app import FOUND, REFUSED
from r18.errors import R18Error, UsageError
from r18.records.kinds import KINDS, Tuned, Verify
from r18_numba.catalogue import all_kernels
from r18_oracle.check.tally import Tally
from r18_oracle.findings import Finding
from r18_oracle.search import records as evidence
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.profiles import PROFILES, profile
from r18_oracle.search.verify import BackendResult, Request, Verification
from support import ROOT

H200 = DeviceInfo("cuda", "NVIDIA H200 (sm_90)", {"compute capability": "9.0"})


@dataclass(frozen=True)
class Compiled:
    """A kernel with the attributes that records read."""

    id: str
    digest: str = "d1"
    source_files: tuple[Path, ...] = ()
    targets: tuple[str, ...] = ("sm_90",)

    def resources(self, target: str) -> dict[str, Resources]:
        return {"f": Resources(32, 0, 0, 0)}

    def machine_code(self, target: str) -> str:
        return self.digest


class Catalogue:
    """A backend with the attributes that records read."""

    def __init__(self, *kernels: Compiled) -> None:
        self.listed = kernels

    def kernels(self) -> tuple[Any, ...]:
        return self.listed

    def probe(self) -> DeviceInfo:
        return H200

    def variants(self, kernel: Compiled) -> tuple[Compiled, ...]:
        return ()


def run_of(
    *kernels: Compiled,
    findings: tuple[Finding, ...] = (),
    device: DeviceInfo = H200,
    refused: tuple[str, ...] = (),
) -> Verification:
    reports = [
        KernelReport(
            "gpu",
            kernel.id,
            Tally() if kernel.id in refused else Tally(problems=7, ratio=0.5),
            next((f for f in findings if f.kernel == kernel.id and f.kind != "network"), None),
            network_problems=3,
        )
        for kernel in kernels
    ]
    result = BackendResult("gpu", device, reports, findings=list(findings))
    return Verification(Request(profile("thorough"), seed=4), [result])


def fault(kernel: str, kind: str = "exact") -> Finding:
    return Finding("exact", "gpu", kernel, None, kind, 0, "wrong", got=float("nan"))


def save(folder: Path, run: Verification, *kernels: Compiled) -> tuple[dict[str, Any], str]:
    backend: Any = Catalogue(*kernels)
    (said,) = evidence.save(run, {"gpu": backend}, folder)
    return record_in(folder), said


def record_in(folder: Path) -> dict[str, Any]:
    """The only record in a folder."""
    (path,) = folder.iterdir()
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def typed(record: dict[str, Any]) -> Verify:
    return msgspec.convert(record, Verify)


A, B = Compiled("gpu/relu/a/fp32"), Compiled("gpu/relu/b/fp32")


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (H200, "nvidia-h200"),
        (DeviceInfo("cuda", "NVIDIA H200, PyTorch 2.11.0"), "nvidia-h200"),
        (DeviceInfo("cuda", "NVIDIA GeForce RTX 4090 (sm_89)"), "nvidia-geforce-rtx-4090"),
        (DeviceInfo("cpu", "CPU (x86_64), NumPy 2.4"), "cpu"),
        (DeviceInfo("cuda", "???"), "cuda"),
    ],
)
def test_a_device_in_a_file_name(device: DeviceInfo, expected: str) -> None:
    assert records.slug("verify", device) == expected


def test_times_of_a_cpu_have_a_file_for_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only records of a CPU's times have a file per model; an unnamed model shares one."""
    host, info = DeviceInfo("cpu", "CPU (x86_64), NumPy 2.4"), tmp_path / "cpuinfo"
    monkeypatch.setattr("r18.cpu.INFO", info)
    info.write_text("model name\t: Intel(R) Xeon(R) Processor\nflags\t: avx512f amx_int8\n")

    def names(device: DeviceInfo) -> set[str]:
        return {records.path_of(tmp_path, what, device).name for what in records.KINDS}

    timed = {"bench", "ceilings", "profile", "evaluate"}
    others = {f"{what}-cpu.json" for what in records.KINDS.keys() - timed}
    assert names(host) == others | {f"{what}-intel-xeon-processor-amx-int8.json" for what in timed}
    assert names(H200) == {f"{what}-nvidia-h200.json" for what in records.KINDS}
    assert records.device_text(host).startswith("Intel(R) Xeon(R) Processor: ")
    assert ", AVX-512, AMX-INT8" in records.device_text(host)
    assert records.device_text(H200) == H200.name
    info.unlink()
    assert names(host) == {f"{what}-cpu.json" for what in records.KINDS}


def test_an_environment_names_what_decides_the_numbers() -> None:
    found = records.environment(H200)
    assert found["device"] == {
        "kind": "cuda",
        "name": "NVIDIA H200 (sm_90)",
        "compute capability": "9.0",
    }
    assert {"r18", "numpy", "torch"} <= found["packages"].keys()
    assert "driver" in found
    assert records.key_of(found) == records.key_of(json.loads(json.dumps(found)))
    assert records.key_of(found) != records.key_of(found | {"driver": "1.2"})
    assert "driver" not in records.environment(DeviceInfo("cpu", "a CPU"))


def test_a_version_of_a_type_of_its_own_is_recorded_as_its_text() -> None:
    class Version(str):
        pass

    found = records.environment(DeviceInfo("cpu", "a CPU", {"torch": Version("2.11.0")}))
    assert msgspec.to_builtins(found)["device"]["torch"] == "2.11.0"


# -- what a run writes -------------------------------------------------------------------------


def test_an_entry_says_what_was_run_and_on_what(tmp_path: Path) -> None:
    record, said = save(tmp_path, run_of(A), A)
    assert (tmp_path / "verify-nvidia-h200.json").exists()
    assert said.endswith("verify-nvidia-h200.json: 1 kernel of gpu recorded as verified")
    assert record["device"] == "NVIDIA H200 (sm_90)"
    entry = record["kernels"][A.id]
    assert (entry["digest"], entry["verified"], entry["problems"]) == ("d1", True, 7)
    assert (entry["profile"], entry["seed"], entry["network_problems"]) == ("thorough", 4, 3)
    assert (entry["error_over_bound"], entry["findings"]) == (0.5, [])
    assert {"refused", "checks", "date"} <= entry.keys()
    assert record["environments"][entry["environment"]]["device"]["name"] == H200.name


def test_a_run_of_some_kernels_leaves_the_others(tmp_path: Path) -> None:
    save(tmp_path, run_of(A, B), A, B)
    changed = Compiled(B.id, "d2")
    record, _ = save(tmp_path, run_of(changed), A, changed)
    assert {name: entry["digest"] for name, entry in record["kernels"].items()} == {
        A.id: "d1",
        B.id: "d2",
    }


def test_what_the_backend_no_longer_has_leaves_the_record(tmp_path: Path) -> None:
    other = Compiled("other/relu/c/fp32")
    save(tmp_path, run_of(A, B, other), A, B, other)
    record, _ = save(tmp_path, run_of(A), A)
    assert sorted(record["kernels"]) == [A.id, other.id]  # another backend's are not its to judge


def test_a_finding_takes_the_verdict_away_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, run_of(A, B), A, B)
    record, said = save(tmp_path, run_of(A, findings=(fault(A.id),)), A, B)
    entry = record["kernels"][A.id]
    assert entry["verified"] is False
    assert entry["findings"][0]["message"] == "wrong"
    assert said.endswith(f"0 kernels of gpu recorded as verified; NOT verified: {A.id}")
    assert record["kernels"][B.id]["verified"] is True


def test_a_finding_of_the_network_about_a_kernel_counts_too(tmp_path: Path) -> None:
    record, said = save(tmp_path, run_of(A, findings=(fault(A.id, "network"),)), A)
    assert record["kernels"][A.id]["verified"] is False
    assert "NOT verified" in said


def test_a_kernel_that_took_no_problem_is_not_verified(tmp_path: Path) -> None:
    record, said = save(tmp_path, run_of(A, B, refused=(A.id,)), A, B)
    assert record["kernels"][A.id]["verified"] is False
    assert said.endswith(f"NOT verified: {A.id}")


def test_environments_that_nothing_refers_to_are_dropped(tmp_path: Path) -> None:
    save(tmp_path, run_of(A, B), A, B)
    newer = DeviceInfo("cuda", H200.name, {"driver's CUDA": "99.0"})
    record, _ = save(tmp_path, run_of(A, device=newer), A, B)
    assert len(record["environments"]) == 2
    record, _ = save(tmp_path, run_of(B, device=newer), A, B)
    assert [e["device"]["driver's CUDA"] for e in record["environments"].values()] == ["99.0"]


def test_a_run_that_executed_nothing_records_nothing(tmp_path: Path) -> None:
    empty = Verification(Request(profile("thorough")), [BackendResult("gpu", H200)])
    backend: Any = Catalogue(A)
    assert evidence.save(empty, {"gpu": backend}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"record": "bench", "format": 1}', '{"format": 1}'])
def test_a_damaged_record_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "verify-nvidia-h200.json"
    path.write_text(text)
    backend: Any = Catalogue(A)
    with pytest.raises(UsageError, match="record"):
        evidence.save(run_of(A), {"gpu": backend}, tmp_path)
    assert path.read_text() == text


def test_the_command_line_writes_one(tmp_path: Path) -> None:
    """The command records right kernels as verified, and one that computes nothing as not."""
    short = r18("verify", "--backend", "numpy", "--profile", "quick", "--record")
    assert short.code == REFUSED
    assert "thorough or nightly, not of 'quick'" in short.err
    done = r18(
        *("verify", "--backend", "mutation_toy:Wrong", "--kernels", "toy/*", "--record"),
        *("--records", tmp_path, "--findings", tmp_path / "findings", "--workers", 1),
    )
    assert done.code == FOUND
    assert "NOT verified: toy/relu/maximum/fp32" in done.out
    (entry,) = json.loads((tmp_path / "verify-cpu.json").read_text())["kernels"].values()
    assert (entry["verified"], entry["digest"], entry["profile"]) == (False, None, "thorough")
    assert entry["findings"][0]["kernel"] == "toy/relu/maximum/fp32"


def test_what_is_sound_is_recorded_before_the_run_ends(tmp_path: Path) -> None:
    """A sound kernel is recorded at once; an aborted run loses only kernels in progress."""
    ended = patch.object(evidence, "save", side_effect=R18Error("the machine is gone"))
    with ended, patch.dict(PROFILES, thorough=replace(PROFILES["brief"], name="thorough")):
        done = r18(
            *("verify", "--backend", "faulty_backends:Right", "--kernels", "*/relu/*", "--record"),
            *("--records", tmp_path, "--findings", tmp_path / "findings", "--workers", 1),
        )
    assert (done.code, "the machine is gone" in done.err) == (REFUSED, True)
    record = typed(record_in(tmp_path))
    assert [entry.verified for entry in record.kernels.values()] == [True]


def test_a_part_of_a_run_leaves_the_other_parts(tmp_path: Path) -> None:
    backend: Any = Catalogue(A, B)
    for kernel in (A, B):
        (part,) = run_of(kernel).backends
        evidence.keep(part, Request(profile("thorough")), backend, tmp_path)
    assert sorted(record_in(tmp_path)["kernels"]) == [A.id, B.id]


def test_a_simulated_device_has_no_record(tmp_path: Path) -> None:
    (part,) = run_of(A, device=replace(H200, simulated=True)).backends
    backend: Any = Catalogue(A)
    assert evidence.keep(part, Request(profile("thorough")), backend, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_runs_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "new" / "verify-nvidia-h200.json"
    environment = msgspec.convert(records.environment(H200), records.Environment)

    def add(name: str) -> None:
        def with_mine(old: Verify | None) -> Verify:
            time.sleep(0.002)  # for the others to read what this one is about to replace
            found = (old.environments if old else {}) | {name: environment}
            return Verify(device=H200.name, environments=found, kernels={}, networks={})

        records.update(path, Verify, with_mine)

    names = [f"environment {index}" for index in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, names))
    found = records.load(path, Verify)
    assert found is not None
    assert found.environments.keys() == set(names)
    assert list(path.parent.iterdir()) == [path]


# -- what is stale -----------------------------------------------------------------------------


def test_what_has_changed_was_never_run_or_failed_is_stale(tmp_path: Path) -> None:
    wrong = Compiled("gpu/relu/wrong/fp32")
    record, _ = save(tmp_path, run_of(A, B, wrong, findings=(fault(wrong.id),)), A, B, wrong)
    now: list[Any] = [A, Compiled(B.id, "d2"), wrong, Compiled("gpu/relu/new/fp32")]
    backend: Any = Catalogue(*now)
    assert evidence.stale(backend, now, [typed(record)]) == {
        B.id: "has changed since it was verified",
        wrong.id: "failed when it was last run (exact)",
        "gpu/relu/new/fp32": "was never verified",
    }
    assert evidence.stale(backend, now[:1], []) == {A.id: "was never verified"}


def test_one_device_is_enough(tmp_path: Path) -> None:
    record, _ = save(tmp_path, run_of(A), A)
    here = typed(record)
    kernel: Any = Compiled(A.id, "d2")
    backend: Any = Catalogue(kernel)
    record["kernels"][A.id]["digest"] = "d2"
    there = typed(record)
    assert evidence.stale(backend, [kernel], [here]) == {A.id: "has changed since it was verified"}
    assert evidence.stale(backend, [kernel], [here, there]) == {}


def test_what_was_verified_before_it_had_choices_is_stale(tmp_path: Path) -> None:
    """A kernel's choices belong to its digest, so an old record without one of them is stale."""
    offered = [Compiled(f"{A.id}/small")]

    class Choosing(Catalogue):
        def variants(self, kernel: Compiled) -> tuple[Compiled, ...]:
            return tuple(offered) if kernel is A else ()

        def variant(self, kernel: Compiled, problem: Any) -> None:
            raise AssertionError("nothing is planned here")

    plain: Any = Catalogue(A, B)
    choosing: Any = Choosing(A, B)
    run = run_of(A, B)
    evidence.save(run, {"gpu": plain}, tmp_path)
    assert evidence.settled({"gpu": plain}, tmp_path) == {A.id, B.id}
    assert evidence.settled({"gpu": choosing}, tmp_path) == {B.id}
    run.backends[0].kernels[0].choices[offered[0].id] = Tally(problems=2)
    evidence.save(run, {"gpu": choosing}, tmp_path)
    assert evidence.settled({"gpu": choosing}, tmp_path) == {A.id, B.id}
    entry = record_in(tmp_path)["kernels"][A.id]
    assert (entry["choices"], entry["digest"] == A.digest) == ({offered[0].id: 2}, False)
    offered.append(Compiled(f"{A.id}/large"))
    assert evidence.settled({"gpu": choosing}, tmp_path) == {B.id}


def test_what_a_device_s_record_holds_is_settled(tmp_path: Path) -> None:
    wrong = Compiled("gpu/relu/wrong/fp32")
    backend: Any = Catalogue(A, Compiled(B.id, "d2"), wrong)
    assert evidence.settled({"gpu": backend}, tmp_path) == frozenset()
    save(tmp_path, run_of(A, B, wrong, findings=(fault(wrong.id),)), A, B, wrong)
    assert evidence.settled({"gpu": backend}, tmp_path) == {A.id}


# -- types -------------------------------------------------------------------------------------


def committed() -> list[Path]:
    return sorted((ROOT / records.FOLDER).glob("*.json"))


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_a_committed_record_decodes_and_encodes_to_the_same_bytes(
    path: Path, tmp_path: Path
) -> None:
    data = json.loads(path.read_text())
    kind = KINDS.get(path.stem.partition("-")[0])
    records.write(tmp_path / "again.json", msgspec.convert(data, kind or Tuned))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert kind is None or records.load(path, kind)


def test_every_kind_has_a_committed_record() -> None:
    found = {path.stem.partition("-")[0] for path in committed()}
    assert found == {*KINDS, "tuned"}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            ("kernels", A.id, "problems"),
            "7",
            f"Expected `int`, got `str` - at `$.kernels['{A.id}']",
        ),
        (("kernels", A.id, "problems"), -1, "Expected `int` >= 0"),
        (("kernels", A.id, "verified"), 1, "Expected `bool`, got `int`"),
        (("kernels", A.id, "colour"), "red", "unknown field `colour` - at `$.kernels['"),
        (("kernels", A.id, "digest"), ..., f"field `digest` - at `$.kernels['{A.id}']`"),
        (("kernels", A.id), [], f"Expected `object`, got `array` - at `$.kernels['{A.id}']`"),
        (
            ("kernels", A.id, "checks"),
            {"x": 1, "y": "2"},
            "`$.kernels['gpu/relu/a/fp32'].checks['y']",
        ),
        (("kernels",), ..., "missing required field `kernels`"),
        (("networks",), None, "Expected `object`, got `null` - at `$.networks`"),
        (("device",), 9, "Expected `str`, got `int` - at `$.device`"),
        (("extra",), 9, "contains unknown field `extra`"),
    ],
)
def test_what_is_wrong_in_a_record_is_named_with_its_place(
    tmp_path: Path, place: tuple[str, ...], value: object, said: str
) -> None:
    """An error in a record names the file, the path to the value and what is expected, and leaves
    the file unchanged."""
    record, _ = save(tmp_path, run_of(A, B), A, B)
    *way, last = place
    target: Any = record
    for key in way:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    (path,) = tmp_path.iterdir()
    records.write(path, record)
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        evidence.settled({"gpu": Catalogue(A, B)}, tmp_path)  # type: ignore[dict-item]
    assert said in str(caught.value)
    assert f"the record '{path}' is damaged or of an older r18: " in str(caught.value)
    assert str(caught.value).endswith(records.REMEDY)
    with pytest.raises(UsageError):
        save(tmp_path, run_of(A), A, B)
    assert path.read_bytes() == before


def test_an_environment_names_its_device(tmp_path: Path) -> None:
    record, _ = save(tmp_path, run_of(A), A)
    (environment,) = record["environments"].values()
    del environment["device"]["name"]
    with pytest.raises(msgspec.ValidationError, match="`name` in `device`"):
        typed(record)


# -- the committed records ---------------------------------------------------------------------


UNRECORDED = "No record of a GPU holds them yet."
"""The sentence on a backend's page until its first record exists."""


def cuda_kernels(backend: str) -> list[Kernel]:
    """A GPU backend's kernels, even in a process that works with numba's simulator."""
    kernels: Any = all_kernels() if backend == "numba" else load_backend(backend).kernels()
    return [kernel for kernel in kernels if kernel.digest is not None]


@pytest.mark.parametrize("backend", ["cupy", "numba"])
def test_every_cuda_kernel_is_verified_as_it_stands(backend: str) -> None:
    """A changed kernel has to be verified again, on any GPU, and its record committed.

    Before a backend's first record its page says so; once one kernel is in a record
    all have to be.
    """
    kernels: Any = cuda_kernels(backend)
    assert len(kernels) > 20
    found = records.load_all(ROOT / records.FOLDER, Verify)
    recorded = any(name.startswith(f"{backend}/") for r in found.values() for name in r.kernels)
    page = ROOT / "docs" / "backends" / f"{backend}.md"
    assert (UNRECORDED in page.read_text("utf-8")) is not recorded, (
        f"{page}: '{UNRECORDED}' is to be there as long as that is so, and no longer"
    )
    reasons = evidence.stale(load_backend(backend), kernels, found.values()) if recorded else {}
    lines = [f"  {name} {reason}" for name, reason in reasons.items()]
    assert not reasons, "\n".join(
        [
            f"{len(reasons)} of {len(kernels)} kernels are not verified as they stand:",
            *lines,
            f"records found: {', '.join(found) or 'none'} in {records.FOLDER}",
            f"On a machine with a GPU: r18 verify --backend {backend} --record",
            f"or, of some kernels: r18 verify --backend {backend} --record --kernels 'GLOB'",
        ]
    )


@pytest.mark.skipif(
    not compiled.toolkit().startswith("13.0, package 13.0.88"), reason="another NVRTC"
)
def test_a_kernel_that_numba_compiles_is_known_by_its_sources(tmp_path: Path) -> None:
    """Numba's kernels are known by source digests; the first record makes all others stale."""
    one, *others = cuda_kernels("numba")
    assert not one.targets
    record, _ = save(tmp_path, run_of(one), one)  # type: ignore[arg-type]
    every: Any = [one, *others]
    backend = load_backend("numba")
    assert evidence.stale(backend, every, [typed(record)]) == {
        k.id: "was never verified" for k in every[1:]
    }
    record["kernels"][every[0].id]["digest"] = "that of older sources"
    assert evidence.stale(backend, every[:1], [typed(record)]) == {
        every[0].id: "has changed since it was verified"
    }
