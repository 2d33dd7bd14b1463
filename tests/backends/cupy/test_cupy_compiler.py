"""Compiling and its cache: error messages, what a cached file depends on, concurrent processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from r18_cupy.cuda import compiler
from r18_cupy.cuda.compiler import Binary, CompileError, Entry, compile_entry, compile_ptx

TARGET = "sm_90"
SOURCE = """#include "scale.cuh"
extern "C" __global__ void scale(float* x) {
  x[threadIdx.x] = scaled(x[threadIdx.x]) + BIAS;
}
"""
HEADER = """#pragma once
__device__ float scaled(float value) { return value * 2.0f; }
"""
ENTRY = Entry("scale", "scale", (("BIAS", 1),))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with one kernel and its header, and a cache that is empty."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "scale.cuh").write_text(HEADER)
    monkeypatch.setattr(compiler, "KERNELS", folder)
    monkeypatch.setenv("R18_CACHE", str(tmp_path / "cache"))
    compiler._include_paths.cache_clear()  # it has the folder's name
    yield folder
    compiler._include_paths.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """The entries that NVRTC compiles, in order."""
    asked: list[Entry] = []
    real = compiler._compile

    def compile_(entry: Entry, target: str) -> Binary:
        asked.append(entry)
        return real(entry, target)

    monkeypatch.setattr(compiler, "_compile", compile_)
    return asked


def cached(folder: Path) -> list[Path]:
    """The files in the cache next to the folder of kernels, drafts included."""
    return sorted(path for path in (folder.parent / "cache").rglob("*") if path.is_file())


# -- what an error says ------------------------------------------------------------------------


def test_an_error_names_file_line_and_flags(kernels: Path) -> None:
    (kernels / "scale.cu").write_text(SOURCE.replace("+ BIAS", "+ BIAS + nothing"))
    with pytest.raises(CompileError) as raised:
        compile_entry(ENTRY, TARGET)
    said = str(raised.value)
    assert said.startswith(f"scale.cu does not compile for {TARGET}: ")
    assert 'kernels/scale.cu(3): error: identifier "nothing" is undefined' in said
    assert said.endswith(f"flags: -std=c++17 -DBIAS=1 -arch={TARGET}")
    assert cached(kernels) == []


def test_an_error_in_a_header_names_the_header(kernels: Path) -> None:
    (kernels / "scale.cuh").write_text(HEADER.replace("2.0f", "two"))
    with pytest.raises(CompileError, match=r'scale\.cuh\(2\): error: identifier "two"'):
        compile_entry(ENTRY, TARGET)


def test_a_function_that_is_not_there_is_told(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"no function 'shift' in scale\.cu; is it extern"):
        compile_entry(Entry("scale", "shift", ENTRY.defines), TARGET)


# -- the cache ---------------------------------------------------------------------------------


def test_the_same_is_compiled_once(kernels: Path, compiled: list[Entry]) -> None:
    first = compile_entry(ENTRY, TARGET)
    assert compile_entry(ENTRY, TARGET) == first
    assert len(compiled) == len(cached(kernels)) == 1
    assert first.resources.registers > 0


@pytest.mark.parametrize("file", ["scale.cu", "scale.cuh"])
def test_what_a_source_or_a_header_of_ours_says_is_part_of_the_key(
    file: str, kernels: Path, compiled: list[Entry]
) -> None:
    before = compile_entry(ENTRY, TARGET)
    path = kernels / file
    path.write_text(path.read_text().replace("2.0f", "3.0f").replace("] = ", "] += "))
    assert compile_entry(ENTRY, TARGET).cubin != before.cubin
    assert len(compiled) == len(cached(kernels)) == 2


def test_flags_architecture_and_toolkit_are_part_of_the_key(
    kernels: Path, compiled: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_entry(ENTRY, TARGET)
    compile_entry(Entry("scale", "scale", (("BIAS", 2),)), TARGET)
    compile_entry(ENTRY, "sm_80")
    monkeypatch.setattr(compiler, "_toolkit", lambda: "another")
    compile_entry(ENTRY, TARGET)
    assert len(compiled) == len(cached(kernels)) == 4


def test_all_of_an_entry_is_part_of_its_digest(kernels: Path) -> None:
    """Every part of an entry is in its digest, which kernels and records use without the cache."""
    several = (
        ENTRY,
        Entry("scale", "other", ENTRY.defines),
        Entry("scale", "scale", (("BIAS", 2),)),
        Entry("scale", "scale", (("SHIFT", 1),)),
        Entry("scale", "scale", ENTRY.defines, "sm_90a"),
    )
    before = {entry.digest for entry in several}
    assert len(before) == len(several)
    (kernels / "scale.cuh").write_text(HEADER.replace("2.0f", "3.0f"))
    assert before.isdisjoint(entry.digest for entry in several)


def test_ptx_is_that_of_the_entry_and_of_the_target(kernels: Path) -> None:
    other = Entry("scale", "scale", (("BIAS", 2),))
    compile_ptx.cache_clear()
    found = [compile_ptx(e, t) for e in (ENTRY, other) for t in (TARGET, "sm_80", TARGET)]
    compile_ptx.cache_clear()  # other tests have other sources of this name
    assert found[:3] != found[3:]
    assert len(set(found)) == 4
    assert all(
        f".target {t}" in ptx for t, ptx in zip((TARGET, "sm_80", TARGET) * 2, found, strict=True)
    )


def test_a_toolkit_is_told_by_its_packages_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolkit is known by its package's version, since NVRTC's own number has no third part."""
    versions = {"nvidia-cuda-nvrtc": "13.2.86"}
    monkeypatch.setattr(compiler, "package_version", versions.get)
    before = compiler._toolkit.__wrapped__()
    versions["nvidia-cuda-nvrtc"] = "13.2.87"
    assert compiler._toolkit.__wrapped__() != before


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"report": "", "size": 9}\nshort', b"\0\1"])
def test_a_damaged_file_is_made_anew(damage: bytes, kernels: Path, compiled: list[Entry]) -> None:
    before = compile_entry(ENTRY, TARGET)
    (path,) = cached(kernels)
    path.write_bytes(damage)
    with pytest.warns(RuntimeWarning, match="is damaged, and compiled again"):
        again = compile_entry(ENTRY, TARGET)
    assert again.cubin == before.cubin
    assert len(compiled) == 2
    assert compiler._read(path, ENTRY.symbol) == again


def test_a_flipped_bit_of_machine_code_is_not_served(kernels: Path, compiled: list[Entry]) -> None:
    before = compile_entry(ENTRY, TARGET)
    (path,) = cached(kernels)
    held = bytearray(path.read_bytes())
    held[-len(before.cubin) // 2] ^= 1
    path.write_bytes(held)
    with pytest.warns(RuntimeWarning, match="is damaged, and compiled again"):
        assert compile_entry(ENTRY, TARGET).cubin == before.cubin
    assert compile_entry(ENTRY, TARGET).cubin == before.cubin
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(
    kernels: Path, compiled: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernels.parent / "file").write_text("no folder")
    monkeypatch.setenv("R18_CACHE", str(kernels.parent / "file" / "cache"))
    first, second = (compile_entry(ENTRY, TARGET) for _ in range(2))
    assert first.cubin == second.cubin
    assert len(compiled) == 2


def test_processes_that_ask_for_the_same_at_once_all_get_it_whole(kernels: Path) -> None:
    """Processes that compile one entry at once all get it, and leave one file and no draft."""
    code = f"""
import sys, hashlib, pathlib
from r18_cupy.cuda import compiler
compiler.KERNELS = pathlib.Path({str(kernels)!r})
entry = compiler.Entry("scale", "scale", (("BIAS", 1),))
compiler._toolkit()
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(compiler.compile_entry(entry, {TARGET!r}).cubin).hexdigest())
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    digests = {process.communicate("go\n", timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(digests) == 1
    (path,) = cached(kernels)
    compiler._read(path, "scale")
