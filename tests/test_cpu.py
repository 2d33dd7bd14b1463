"""The CPU facts of a machine, read from files as Linux has them."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from commands import r18
from r18 import cpu as module
from r18.cpu import Cpu, cpu, model, model_slug
from r18.machine import has_cuda_driver, machine
from r18.records.kinds import CpuFacts

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp bf16\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: a folder for the files of Linux."""
    monkeypatch.setattr(module, "SYSTEM", tmp_path)
    monkeypatch.setattr(module, "INFO", tmp_path / "cpuinfo")
    return tmp_path


def machine_of(system: Path, monkeypatch: pytest.MonkeyPatch, usable: tuple[int, ...]) -> None:
    """Write two packages of two cores with two threads, siblings 4 apart, as Linux numbers them."""
    (system / "cpuinfo").write_text(XEON)
    for thread in range(8):
        topology = system / "cpu" / f"cpu{thread}" / "topology"
        write(topology / "physical_package_id", str(thread % 4 // 2))
        write(topology / "core_id", str(thread % 2))
        caches = system / "cpu" / f"cpu{thread}" / "cache"
        mine, package = f"{thread % 4},{thread % 4 + 4}", "0-1,4-5" if thread % 4 < 2 else "2-3,6-7"
        for index, (level, kind, size, sharers) in enumerate(
            [
                ("1", "Data", "48K", mine),
                ("1", "Instruction", "32K", mine),
                ("2", "Unified", "2048K", mine),
                ("3", "Unified", "300M", package),
            ]
        ):
            for name, value in zip(
                ("level", "type", "size", "shared_cpu_list"),
                (level, kind, size, sharers),
                strict=True,
            ):
                write(caches / f"index{index}" / name, value)
    for node, threads in enumerate(("0-1,4-5", "2-3,6-7")):
        write(system / "node" / f"node{node}" / "cpulist", threads)
    monkeypatch.setattr(module, "threads", lambda: usable)


def test_a_whole_machine(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(system, monkeypatch, tuple(range(8)))
    found = cpu()
    assert found == Cpu(
        "Intel(R) Xeon(R) Processor",
        threads=8,
        cores=4,
        nodes=2,
        instructions=("AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16", "AMX-INT8", "AMX-BF16"),
        caches=(("L1d", 48 << 10), ("L2", 2 << 20), ("L3", 300 << 20)),
        sharing=(("L1d", 2), ("L2", 2), ("L3", 4)),
    )
    assert str(found) == (
        "Intel(R) Xeon(R) Processor: 8 threads of 4 cores in 2 NUMA nodes, AVX2, AVX-512, "
        "AVX-512 VNNI, AVX-512 BF16, AMX-INT8, AMX-BF16, L1d 48 KiB for 2 threads, "
        "L2 2 MiB for 2 threads, L3 300 MiB for 4 threads"
    )


@pytest.mark.parametrize(
    ("usable", "cores", "nodes", "of_l3"),
    [((0, 4), 1, 1, 2), ((0, 1), 2, 1, 2), ((0, 3), 2, 2, 1), ((6,), 1, 1, 1)],
    ids=["two threads of one core", "two cores", "two packages", "one thread"],
)
def test_what_a_process_may_use(
    system: Path,
    monkeypatch: pytest.MonkeyPatch,
    usable: tuple[int, ...],
    cores: int,
    nodes: int,
    of_l3: int,
) -> None:
    """Two threads of one core are distinguished from two cores, which are twice as fast."""
    machine_of(system, monkeypatch, usable)
    found = cpu()
    assert (found.threads, found.cores, found.nodes) == (len(usable), cores, nodes)
    assert dict(found.sharing)["L3"] == of_l3


def test_arm_has_features(system: Path) -> None:
    (system / "cpuinfo").write_text(ARM)
    assert cpu().instructions == ("NEON", "NEON dot products", "NEON BF16")


def test_a_system_that_tells_nothing(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.platform, "processor", lambda: "arm")
    monkeypatch.setattr(module, "threads", lambda: (0,))
    assert cpu() == Cpu("arm", threads=1)
    assert str(cpu()) == "arm: 1 thread"


@pytest.mark.parametrize(("text", "numbers"), [("0-2,8", {0, 1, 2, 8}), ("", set()), ("x", set())])
def test_a_list_of_numbers(tmp_path: Path, text: str, numbers: set[int]) -> None:
    write(tmp_path / "list", text)
    assert module._numbers(tmp_path / "list") == numbers
    assert module._numbers(tmp_path / "missing") == set()


def test_records_and_the_listing_tell_it() -> None:
    here = cpu()
    recorded = machine()
    assert (recorded["processor"], recorded["cpus"]) == (here.name, here.threads)
    assert msgspec.to_builtins(msgspec.convert(recorded["cpu"], CpuFacts)) == recorded["cpu"]
    assert str(here) in r18("backends").out.splitlines()


# -- NVIDIA's driver ---------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the library that is loaded here is Linux's")
def test_a_driver_is_there_if_one_of_its_libraries_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18.machine.CUDA_DRIVERS", ("libnone.so.1", "libnone.so.2"))
    assert not has_cuda_driver()
    monkeypatch.setattr("r18.machine.CUDA_DRIVERS", ("libnone.so.1", "libm.so.6"))
    assert has_cuda_driver()


# -- a model in a file's name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words", "slug"),
    [
        ("AMD EPYC", "AMD EPYC", "amd-epyc"),
        ("Intel(R) Xeon(R) Processor", "Intel Xeon Processor", "intel-xeon-processor"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon CPU", "intel-xeon-cpu"),
        ("AMD EPYC 9R14 96-Core Processor", "AMD EPYC 9R14 Processor", "amd-epyc-9r14-processor"),
        (
            "Intel(R) Core(TM) i7-9700K CPU @ 3600 MHz",
            "Intel Core i7-9700K CPU",
            "intel-core-i7-9700k-cpu",
        ),
        (
            "Intel Xeon Processor (SapphireRapids)",
            "Intel Xeon Processor (SapphireRapids)",
            "intel-xeon-processor-sapphirerapids",
        ),
        ("../(R)/", "..//", "cpu"),
    ],
)
def test_a_model_without_its_decoration(system: Path, name: str, words: str, slug: str) -> None:
    assert model(name) == words
    (system / "cpuinfo").write_text(f"model name\t: {name}\n")
    assert model_slug() == slug


@pytest.mark.parametrize(
    ("name", "flags", "words", "slug"),
    [
        ("AMD EPYC", "avx2", "AMD EPYC (AVX2)", "amd-epyc-avx2"),
        ("AMD EPYC", "avx2 avx512f", "AMD EPYC (AVX-512)", "amd-epyc-avx-512"),
        ("AMD EPYC 9R14 Processor", "avx2", "AMD EPYC 9R14 Processor", "amd-epyc-9r14-processor"),
        ("AMD EPYC", "fpu", "AMD EPYC", "amd-epyc"),
        ("", "avx2", "", "cpu"),
    ],
)
def test_a_hidden_model_is_told_by_its_instructions(
    system: Path, name: str, flags: str, words: str, slug: str
) -> None:
    (system / "cpuinfo").write_text(f"model name\t: {name}\nflags\t: {flags}\n")
    assert model_slug() == slug
    assert model(name, cpu().instructions) == words


@pytest.mark.parametrize("text", [ARM, ""])
def test_a_cpu_without_a_model_is_cpu(system: Path, text: str) -> None:
    (system / "cpuinfo").write_text(text)
    assert model_slug() == "cpu"
