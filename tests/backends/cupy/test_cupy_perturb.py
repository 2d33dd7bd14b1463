"""Perturbed schedules without a GPU: the sites of the kernels' sources, their builds, the draws."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import r18_cupy.cuda.launch as launching
from cuda_support import entries
from r18.backend.digest import cuda_files
from r18.errors import UnknownName, UsageError
from r18_cupy.cuda import compiler
from r18_cupy.cuda.compiler import KERNELS, Binary, Entry, architecture, compile_entry
from r18_cupy.cuda.copy_late import late_copy
from r18_cupy.cuda.device import delay
from r18_cupy.cuda.launch import GridLaunch, Launcher
from r18_cupy.cuda.perturb import (
    HEADER,
    KINDS,
    PRELUDE,
    SYMBOL,
    Perturbation,
    SiteError,
    perturbed,
    perturbed_sources,
    sites,
)

HOPPER = (9, 0)
SOURCES = {
    path.relative_to(KERNELS).as_posix(): path.read_text("utf-8")
    for path in sorted(KERNELS.rglob("*"))
    if path.suffix in (".cu", ".cuh")
}
FAMILIES = (
    "hopper/implicit_gemm_wgmma",
    "hopper/implicit_gemm_wgmma_halo",
    "hopper/implicit_gemm_wgmma_persistent",
    "hopper/implicit_gemm_wgmma_pingpong",
    "hopper/implicit_gemm_wgmma_registers",
    "hopper/implicit_gemm_wgmma_stationary",
    "stem/few_channels_mma",
    "conv/winograd_gemm",
    "ops/softmax",
    "common/copy_late",
    "integers/hopper/implicit_gemm_wgmma",
    "integers/hopper/implicit_gemm_wgmma_halo",
    "integers/hopper/implicit_gemm_wgmma_resident",
)


# -- sites -------------------------------------------------------------------------------------


def test_every_source_is_understood_and_every_kind_of_site_is_there() -> None:
    found = Counter(site.rule.kind for file, text in SOURCES.items() for site in sites(text, file))
    assert found.keys() == set(KINDS) - {"host"}
    assert found["barrier"] >= 20
    assert min(found.values()) > 0


def test_every_wrapper_of_a_primitive_is_a_site() -> None:
    """Every function whose name says that it wraps a synchronising primitive is a site."""
    named = re.compile(
        r"__forceinline__ \w+ (\w*(?:wait|arrive|barrier|fence|launch_dependents|tma_load\w*|"
        r"tma_store|cp_async|cluster_load|cluster_send|cluster_store)\w*)\([^;{]*\)\s*{"
    )
    missing = []
    for file, text in SOURCES.items():
        spans = [(site.start, site.end) for site in sites(text, file)]
        for wrapper in named.finditer(text):
            body = wrapper.end(), text.index("\n}", wrapper.end())
            calm = wrapper[1].endswith("_commit") or wrapper[1] in CALLERS
            if not calm and not any(body[0] <= start < body[1] for start, _ in spans):
                missing.append(f"{file}: {wrapper[1]}")
    assert missing == []


CALLERS = ("await_copies", "fence_accumulator", "fence_registers")
"""Exceptions: `await_copies` calls a wrapper; the others only hold up the compiler."""


def test_a_new_instruction_needs_a_rule() -> None:
    text = 'void f() {\n  asm volatile("mbarrier.test_wait.b64 p, [%0], %1;" ::"r"(a));\n}\n'
    with pytest.raises(SiteError, match=r"x\.cuh:2: the instruction 'mbarrier\.test_wait\.b64'"):
        sites(text, "x.cuh")


@pytest.mark.parametrize(
    "call",
    ["__threadfence()", "__barrier_sync(1)", "atomicAdd(p, 1)", "cooperative_groups::sync(g)"],
)
def test_a_new_intrinsic_needs_a_rule(call: str) -> None:
    with pytest.raises(SiteError, match=r"x\.cu:1: '\w+' has no rule"):
        sites(f"void f() {{ {call}; }}", "x.cu")


def test_comments_and_exchanges_within_a_warp_are_no_sites() -> None:
    assert (
        sites("// __syncthreads();\n/* atomicAdd(p, 1) */ f(__shfl_sync(m, a, b));", "x.cu") == ()
    )


def test_a_barrier_in_an_expression_is_refused() -> None:
    with pytest.raises(SiteError, match=r"is not a statement of its own"):
        sites("void f() { g(1, __syncthreads()); }", "x.cu")


def test_two_synchronising_instructions_in_one_statement_are_refused() -> None:
    text = 'asm volatile("fence.proxy.async;\\n bar.sync 1, 128;" ::: "memory");'
    with pytest.raises(SiteError, match="several synchronising instructions"):
        sites(text, "x.cu")


# -- sources -----------------------------------------------------------------------------------


INSERTED = re.compile(
    r"\{ (if \(!r18_postpone\([^;]*\)\) \{ )?(r18_\w+\([\d, u]*\); )*(__syncwarp\(\); )?"
    r"|( r18_delay\([\d, u]*\);)? \}( \})?"
)


@pytest.mark.parametrize("file", SOURCES)
def test_a_perturbed_source_is_the_source_with_calls_inserted(file: str) -> None:
    """A perturbed source has calls inserted around statements, on their lines, nowhere else."""
    text = SOURCES[file]
    found = sites(text, file)
    changed = perturbed(text, file)
    if not found:
        assert changed == text
        return
    changed = changed.removeprefix(f'#include "{HEADER}"\n#line 1\n')
    assert changed.count("\n") == text.count("\n")
    ends = [0, *(at for site in found for at in (site.start, site.end)), len(text)]
    at = 0
    for begin, end in pairwise(ends):
        if begin == end:
            continue
        place = changed.index(text[begin:end], at)
        assert place == at == 0 or INSERTED.fullmatch(changed[at:place]), changed[at:place]
        at = place + end - begin
    assert at == len(changed)


def test_every_source_that_a_function_is_compiled_from_is_rewritten() -> None:
    """Sources in folders of any depth are rewritten; a missed one would be compiled unchanged."""
    rewritten = perturbed_sources(KERNELS)
    assert rewritten.keys() == {*SOURCES, HEADER}
    sources = {path for entry in entries() for path in cuda_files(entry.path, KERNELS)}
    assert {path.relative_to(KERNELS).as_posix() for path in sources} <= rewritten.keys()
    assert "r18_delay(" in rewritten["bytes/hopper/tile.cuh"]


def test_each_site_draws_for_itself() -> None:
    numbers = re.findall(r"r18_delay\(\d+, (\d+)u\)", "".join(perturbed_sources(KERNELS).values()))
    assert len(numbers) > 60
    assert len(set(numbers)) == len(numbers)


def test_stores_are_put_off_until_the_wait() -> None:
    text = perturbed(SOURCES["hopper/tma.cuh"], "hopper/tma.cuh")
    assert re.search(r"r18_postpone\(5, \d+u, 2, &map, column, row, 0, 0, source\)", text)
    assert re.search(r"r18_postpone\(5, \d+u, 3, &map, column, row, matrix, 0, source\)", text)
    assert 'r18_store_postponed(); asm volatile("cp.async.bulk.wait_group.read 0;"' in text
    begins = perturbed(SOURCES["hopper/mbarrier.cuh"], "hopper/mbarrier.cuh")
    assert "r18_postpone_none(); " in begins


def test_every_bulk_store_is_put_off() -> None:
    stores = [
        site
        for file, text in SOURCES.items()
        for site in sites(text, file)
        if ".global.shared" in site.instruction
    ]
    assert {len(site.operands) - 2 for site in stores} == {2, 3, 4}, "coordinates"
    assert {site.rule.kind for site in stores} == {"store"}


def test_a_warp_converges_before_instructions_of_all_its_lanes() -> None:
    """`__syncwarp` comes before instructions of a whole warp, since one lane may still sleep."""
    text = perturbed(SOURCES["hopper/wgmma.cuh"], "hopper/wgmma.cuh")
    assert '); __syncwarp(); asm volatile("wgmma.fence.sync.aligned;"' in text
    text = perturbed(SOURCES["hopper/pipeline.cuh"], "hopper/pipeline.cuh")
    assert '); __syncwarp(); asm volatile("bar.sync 1, %0;"' in text
    arrivals = perturbed(SOURCES["hopper/mbarrier.cuh"], "hopper/mbarrier.cuh")
    assert "__syncwarp" not in arrivals, "one lane arrives"


# -- builds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", FAMILIES)
def test_one_entry_of_each_family_compiles(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R18_CACHE", str(tmp_path))
    entry = next((e for e in entries() if e.source == source), Entry(source, "copy_late"))
    binary = compile_entry(entry, architecture(entry, HOPPER), perturbed=True)
    assert SYMBOL.encode() in binary.cubin
    assert "C75" not in binary.report, "the compiler serialises wgmma"
    assert binary.resources.spill_nbytes == 0


def test_the_plain_build_is_that_of_the_source_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain build compiles the unchanged source, and has another place in the cache."""
    monkeypatch.setenv("R18_CACHE", str(tmp_path))
    given: list[str] = []

    class Program:
        def __init__(self, source: str, kind: str, options: object) -> None:
            given.append(source)

        def compile(self, kind: str, logs: Any) -> Any:
            return SimpleNamespace(code=b"gap_nchw")

    core = SimpleNamespace(Program=Program, ProgramOptions=lambda **options: None)
    entry = next(e for e in entries() if e.symbol == "gap_nchw")
    compile_entry(entry, "sm_90", perturbed=True)
    monkeypatch.setattr(compiler, "_core", lambda: core)
    assert compile_entry(entry, "sm_90").cubin == b"gap_nchw"
    assert given == [entry.path.read_text("utf-8")]
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_an_error_in_a_perturbed_source_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R18_CACHE", str(tmp_path))
    entry = next(e for e in entries() if e.source == "ops/gap")
    texts = perturbed_sources(KERNELS)
    wrong = texts | {"ops/gap.cu": texts["ops/gap.cu"] + "nonsense;\n"}
    monkeypatch.setattr(compiler, "perturbed_sources", lambda folder: wrong)
    line = SOURCES["ops/gap.cu"].count("\n") + 1
    with pytest.raises(compiler.CompileError, match=rf"gap\.cu\({line}\): error") as raised:
        compile_entry(entry, "sm_90", perturbed=True)
    assert "gap.cu with delays does not compile for sm_90" in str(raised.value)


# -- draws -------------------------------------------------------------------------------------

DRAWS = """
#include <cstdio>
#define __device__
#define __forceinline__ inline
#include "perturb.cuh"
int main() {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const Perturbation of{seed, 1u << 2, 3, 8000};
    for (unsigned cta = 0; cta < 64; ++cta) {
      for (unsigned warp = 0; warp < 8; ++warp) {
        std::printf("%u ", r18_drawn(of, 2, 77, cta, warp, 0));
        std::printf("%u ", r18_drawn(of, 1, 77, cta, warp, 0));
      }
    }
  }
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_seed_delays_some_warps_and_another_seed_others(tmp_path: Path) -> None:
    (tmp_path / "draws.cpp").write_text(DRAWS)
    program = tmp_path / "draws"
    command = ["c++", f"-I{PRELUDE.parent}", "-o", str(program), str(tmp_path / "draws.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    drawn = np.array(said.split(), int).reshape(4, 64, 8, 2)
    delays, other_kind = drawn[..., 0], drawn[..., 1]
    assert not other_kind.any(), "only the kinds that are asked for"
    assert set(np.unique(delays)) == {0, 1000, 2000, 4000, 8000}
    late = delays > 0
    shares = late.mean(axis=(1, 2))
    assert ((shares > 0.2) & (shares < 0.5)).all(), shares
    for one in range(4):
        for other in range(one):
            assert (late[one] != late[other]).any()
    assert late.all(axis=2).any(), "a whole CTA is late"
    assert (late.any(axis=2) & ~late.all(axis=2)).any(), "a warp alone is late"


def test_the_words_are_the_fields_of_the_devices_struct() -> None:
    fields = re.search(r"struct alignas\(16\) Perturbation {(.*?)};", PRELUDE.read_text(), re.S)
    assert fields is not None
    names = re.findall(r"unsigned (\w+);", fields[1])
    assert names == ["seed", "kinds", "mask", "nanoseconds"]
    words = Perturbation.of(5, ["arrive", "wait"]).words
    assert (words.dtype, words.tolist()) == (np.uint32, [5, 0b11, 3, 8000])
    assert Perturbation.of(6, None).words.tolist() == [6, 2 ** len(KINDS) - 1, 15, 8000]
    assert Perturbation.of(0, ()).words[1] == 0


def test_seeds_and_kinds_are_checked() -> None:
    with pytest.raises(UnknownName, match="did you mean 'arrive'"):
        Perturbation.of(0, ["arive"])
    with pytest.raises(UsageError, match="a number from 0 to 2³² − 1, got -1"):
        Perturbation.of(-1, None)


# -- the host ----------------------------------------------------------------------------------


class Kept(Launcher):
    """A launcher without a device that keeps the launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[GridLaunch, Any]] = []

    def launch(self, launch: GridLaunch, addresses: tuple[int, ...], stream: Any) -> None:
        self.launched.append((launch, stream))


def test_the_host_comes_late_where_the_seed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(perturbation: Perturbation | None) -> list[int]:
        launcher = Kept()
        launcher.perturbation = perturbation
        monkeypatch.setattr(launching, "LAUNCHER", launcher)
        for stream in range(40):
            delay(cast(Any, stream))
        assert all(launch is late_copy(0) for launch, _ in launcher.launched)
        return [stream for _, stream in launcher.launched]

    assert turns(None) == []
    assert turns(Perturbation.of(0, ["wait"])) == []
    one, other = turns(Perturbation.of(0, None)), turns(Perturbation.of(1, None))
    assert one != other
    assert turns(Perturbation.of(0, None)) == one
    assert all(10 < len(found) < 30 for found in (one, other))


def test_perturbed_functions_are_loaded_next_to_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Perturbed functions are loaded next to plain ones; modules with sites get each new seed."""
    asked: list[bool] = []

    def compiled(entry: Entry, target: str, *, perturbed: bool = False) -> Binary:
        asked.append(perturbed)
        has_sites = perturbed and entry.symbol == "gap_nchw"
        return Binary(entry.symbol, SYMBOL.encode() if has_sites else b"", "")

    class Module:
        def load(self, cubin: bytes) -> None: ...

        def get_function(self, symbol: str) -> object:
            return object()

    synchronized = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        Device=lambda number: synchronized, function=SimpleNamespace(Module=Module)
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launching, "compile_entry", compiled)
    seeds: list[int] = []
    launcher = Launcher()
    monkeypatch.setattr(launcher, "device", lambda: 0)
    monkeypatch.setattr(launcher, "capability", lambda device: HOPPER)
    monkeypatch.setattr(
        launcher,
        "_tell",
        lambda module: seeds.append(launcher.perturbation.seed if launcher.perturbation else -1),
    )
    gap = next(e for e in entries() if e.symbol == "gap_nchw")
    calm = next(e for e in entries() if e.symbol == "elementwise_add")
    plain = launcher.function(gap)
    launcher.perturb(Perturbation.of(3, None))
    late = launcher.function(gap)
    launcher.function(calm)
    launcher.perturb(Perturbation.of(4, None))
    assert launcher.function(gap) is late
    launcher.perturb(None)
    assert launcher.function(gap) is plain is not late
    assert asked == [False, True, True]
    assert seeds == [3, 4]
