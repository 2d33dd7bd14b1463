"""Memory ordering in the PTX of the CUDA kernels: none is missing, and each planted one is seen."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from commands import r18
from r18.backend import DeviceFunction
from r18.errors import UsageError
from r18_cupy import Backend
from r18_cupy.cuda import compiler
from r18_cupy.cuda.compiler import Entry
from r18_cupy.kernel import CudaKernel, launches_of
from r18_oracle.loading import with_choices
from r18_oracle.ptx.accepted import Accepted
from r18_oracle.ptx.check import BATCHES, check
from r18_oracle.ptx.disorder import Disorder
from r18_oracle.ptx.parse import functions
from r18_oracle.ptx.rules import disorders
from r18_oracle.search.campaign import network_problems

TARGET = "sm_90a"
GATHER, SPLIT_K = "hopper/implicit_gemm_wgmma", "hopper/cluster_split_k.cuh"
BYTES = "integers/hopper/implicit_gemm_wgmma"
BYTES_KERNEL, UNROLLED = "bytes/hopper/gather_kernel.cuh", "#pragma unroll\n"
KERNEL, HALO = "hopper/gather_kernel.cuh", "hopper/implicit_gemm_wgmma_halo"
ARRIVE, RELAXED = "cluster_arrive();\n", "cluster_arrive_relaxed();\n"
ONE, FIRST = "if (threadIdx.x == 0)", "if (index == blockIdx.x)"
PERSISTENT, STEM = "hopper/implicit_gemm_wgmma_persistent", "stem/few_channels_wgmma"
PINGPONG, TURN = "hopper/implicit_gemm_wgmma_pingpong", "if (nth < TURNS)"
STATIONARY = "hopper/implicit_gemm_wgmma_stationary"
LAST = "    if (storing) tma_store_wait();  // the last outputs have been read\n"
WAIT, FENCE = "wait_for_previous_launch();\n", "fence_async_proxy();\n"
INTEGERS, FLOATS = "integers/stem_wgmma", "TILE_IMAGE=3"
STAGED = "bytes/hopper/stem_kernel.cuh"
FENCED = f"        {FENCE[:-1]}  // wgmma reads them\n"
POOLED, QHALO = "ops/gap_linear", "integers/hopper/implicit_gemm_wgmma_halo"
TOGETHER, ALL = "  __syncwarp();\n", "    wgmma_wait<0>();\n"
STARTED = "    cluster_wait();  // all CTAs have initialised their mbarriers\n"
ADDED = "    const auto load_added = [&] {\n"
JOINED = ("  cluster_wait();\n#else", "#else")
LEFT = ("  __syncwarp();\n  cluster_wait();\n#endif\n}", "#endif\n}")
STORED = "which may still read the memory of `out`"
SETTLED = "  at.settle();\n  "
RELEASE = "    if (lane == 0) mbarrier_arrive(empty(turn));\n"


def swapped(first: str, second: str) -> tuple[str, str]:
    """Two lines in this order, and in the other order."""
    return first + second, second + first


PLANTED = [
    ("proxy-fence", GATHER, "", KERNEL, f"    {FENCE}", ""),
    ("store-wait", GATHER, "", KERNEL, "      tma_store_wait();\n", ""),
    ("store-wait", GATHER, "", KERNEL, "      tma_store_commit();\n", ""),
    ("launch-wait", GATHER, "", KERNEL, f"    {ONE} {{\n      {WAIT}", f"    {ONE} {{\n"),
    ("launch-wait", GATHER, "", "hopper/gather.cuh", f"  {WAIT}", ""),
    ("launch-wait", GATHER, "TILE_PARTS=8", KERNEL, f"{ADDED}      {WAIT}", ADDED),
    ("cluster-order", GATHER, "TILE_PARTS=8", SPLIT_K, STARTED, ""),
    ("cluster-order", BYTES, "TILE_PARTS=8", SPLIT_K, STARTED, ""),
    ("launch-wait", BYTES, "TILE_PARTS=8", BYTES_KERNEL, f"  {WAIT}{UNROLLED}", UNROLLED),
    ("cluster-order", POOLED, "TILE_CLUSTER=4", f"{POOLED}.cu", f"  {ARRIVE}", f"  {RELAXED}"),
    ("cluster-order", POOLED, "TILE_CLUSTER=4", f"{POOLED}.cu", *JOINED),
    ("cluster-order", POOLED, "TILE_CLUSTER=4", f"{POOLED}.cu", *LEFT),
    (
        "cluster-order",
        "hopper/winograd_cluster",
        "TILE_M=40",
        "hopper/winograd_cluster.cu",
        "  cluster_wait();\n",
        "",
    ),
    ("init-fence", GATHER, "", "hopper/pipeline.cuh", "    mbarrier_init_fence();\n", ""),
    ("retry", GATHER, "", "hopper/mbarrier.cuh", "  } while (!ended);", "  } while (false);"),
    ("proxy-fence", GATHER, "SPLIT=1", "hopper/products.cuh", f"  {FENCE}", ""),
    ("proxy-fence", HALO, "", f"{HALO}.cu", f"  {FENCE}", ""),
    ("store-wait", HALO, "", f"{HALO}.cu", "    tma_store_wait();\n", ""),
    ("launch-wait", HALO, "", f"{HALO}.cu", f"    {WAIT}", ""),
    ("launch-wait", HALO, "", f"{HALO}.cu", f"      {WAIT}", ""),
    ("proxy-fence", PERSISTENT, "", f"{PERSISTENT}.cu", f"    {FENCE}", ""),
    ("store-wait", PERSISTENT, "", f"{PERSISTENT}.cu", f"    {ONE} tma_store_wait();\n", ""),
    ("launch-wait", PERSISTENT, "", f"{PERSISTENT}.cu", f"      {FIRST} {WAIT}", ""),
    ("proxy-fence", PINGPONG, "", f"{PINGPONG}.cu", f"    {FENCE}", ""),
    ("store-wait", PINGPONG, "", f"{PINGPONG}.cu", "      tma_store_wait();\n", ""),
    ("launch-wait", PINGPONG, "", f"{PINGPONG}.cu", f"      {WAIT}", ""),
    ("launch-wait", PINGPONG, "", f"{PINGPONG}.cu", f"      {TURN} {WAIT}", ""),
    ("products-wait", PERSISTENT, "", f"{PERSISTENT}.cu", "      wgmma_wait<0>();\n", ""),
    ("products-wait", PINGPONG, "", f"{PINGPONG}.cu", "    wgmma_wait<0>();\n", ""),
    ("products-wait", HALO, "", f"{HALO}.cu", "  wgmma_wait<0>();\n", ""),
    ("proxy-fence", STATIONARY, "TILE_GROUPS_K=1", f"{STATIONARY}.cu", f"    {FENCE}", ""),
    ("proxy-fence", STATIONARY, "SPLIT=1", f"{STATIONARY}.cu", f"      {FENCE}", ""),
    ("store-wait", STATIONARY, "", f"{STATIONARY}.cu", LAST, ""),
    ("launch-wait", STATIONARY, "", "hopper/stationary.cuh", f"{SETTLED}{WAIT}", ""),
    ("launch-wait", STATIONARY, "", "hopper/stationary.cuh", f"    {WAIT}", ""),
    ("launch-wait", STATIONARY, "", f"{STATIONARY}.cu", f"      if (turns == 0) {WAIT}", ""),
    ("products-fence", STATIONARY, "", "hopper/stationary.cuh", "    wgmma_fence();\n", ""),
    ("products-wait", STATIONARY, "", "hopper/stationary.cuh", "    wgmma_wait<0>();\n", ""),
    ("proxy-fence", STEM, "", f"{STEM}.cu", f"      {FENCE}", ""),
    ("proxy-fence", STEM, "", f"{STEM}.cu", f"    {FENCE[:-1]}  // wgmma reads them\n", ""),
    ("proxy-fence", STEM, "", f"{STEM}.cu", f"  {FENCE[:-1]}  // wgmma reads them\n", ""),
    ("launch-wait", STEM, "", f"{STEM}.cu", f"    {WAIT}", ""),
    ("launch-wait", STEM, "", f"{STEM}.cu", f"  {WAIT[:-1]}  // {STORED}\n", ""),
    ("init-fence", STEM, "", f"{STEM}.cu", "    mbarrier_init_fence();\n", ""),
    ("proxy-fence", INTEGERS, FLOATS, STAGED, FENCED, ""),
    ("launch-wait", "ops/gap", "", "ops/gap.cu", f"  {WAIT}", ""),
    ("aligned", GATHER, "TILE_PARTS=8", SPLIT_K, *swapped(f"  {TOGETHER}", STARTED)),
    ("aligned", POOLED, "TILE_CLUSTER=4", f"{POOLED}.cu", *swapped(TOGETHER, f"  {ARRIVE}")),
    ("products-fence", STEM, "", f"{STEM}.cu", "  wgmma_fence();\n", ""),
    ("products-fence", QHALO, "", f"{QHALO}.cu", "        wgmma_fence();\n", ""),
    ("release-wait", QHALO, "", f"{QHALO}.cu", "        wgmma_wait<1>();", "        ;"),
    ("release-wait", STEM, "", f"{STEM}.cu", *swapped(ALL, RELEASE)),
]
"""The rule that finds it; the kernel's source, and a macro of its build; the edited file, the old
text, and the new text."""


SOURCES = (
    GATHER,
    "hopper/implicit_gemm_wgmma_registers",
    HALO,
    PERSISTENT,
    PINGPONG,
    STATIONARY,
    STEM,
    "ops/gap",
)


@cache
def kernels() -> tuple[CudaKernel, ...]:
    backend = Backend()
    every = with_choices(backend, backend.kernels())
    return tuple(kernel for kernel in every if isinstance(kernel, CudaKernel))


@cache
def launched(source: str, macro: str) -> tuple[Entry, DeviceFunction]:
    """The first entry of a source, with a given macro, that the network launches."""

    def wanted(entry: Entry) -> bool:
        return entry.source == source and (not macro or macro in entry.label.split())

    for kernel in kernels():
        if not any(map(wanted, kernel.entries())):
            continue
        for problem in network_problems("resnet18", BATCHES):
            if kernel.refusal(problem) is None:
                launches = launches_of(kernel, problem)
                for launch, function in zip(
                    launches, kernel.functions(problem, TARGET), strict=True
                ):
                    if wanted(launch.entry):
                        return launch.entry, function
    raise AssertionError(f"the network launches no {source} with {macro}")


def violations(function: DeviceFunction, ptx: str) -> list[Disorder]:
    """The function's violations that are not accepted."""
    (entry,) = (one for one in functions(ptx) if one.name == function.symbol)
    found = disorders(entry, constants=function.constants, overlaps=function.overlaps)
    accepted = Accepted.of("cupy")
    return [one for one in found if accepted.entry(function.label, one) is None]


def broken_rules(function: DeviceFunction, ptx: str) -> set[str]:
    return {one.rule for one in violations(function, ptx)}


@pytest.mark.parametrize(
    ("source", "macro"), [*((source, "") for source in SOURCES), (INTEGERS, FLOATS)]
)
def test_no_order_is_missing(source: str, macro: str) -> None:
    """One entry of each kernel family breaks no rule; `r18 ptxcheck` checks all entries."""
    _, function = launched(source, macro)
    assert function.overlaps
    assert broken_rules(function, function.ptx) == set()


@pytest.mark.parametrize(("rule", "source", "macro", "file", "old", "new"), PLANTED)
def test_a_planted_disorder_is_seen(
    rule: str, source: str, macro: str, file: str, old: str, new: str, kernel_sources: Path
) -> None:
    entry, function = launched(source, macro)
    assert broken_rules(function, function.ptx) == set()
    path = kernel_sources / file
    text = path.read_text("utf-8")
    assert f"\n{old}" in text, f"{file} has no such line: {old}"
    path.write_text(text.replace(f"\n{old}", f"\n{new}"), "utf-8")
    assert rule in broken_rules(function, compiler.compile_ptx.__wrapped__(entry, TARGET))


def test_another_kind_of_violation_is_not_accepted(kernel_sources: Path) -> None:
    """A new violation at the place of an accepted one, of the same rule, is still reported."""
    entry, function = launched(INTEGERS, FLOATS)
    path = kernel_sources / STAGED
    path.write_text(path.read_text("utf-8").replace(FENCED, ""), "utf-8")
    found = violations(function, compiler.compile_ptx.__wrapped__(entry, TARGET))
    assert [one.message for one in found] == [
        "a generic write to shared memory reaches 'mbarrier.arrive.shared::cta.b64' without "
        "fence.proxy.async, and the async proxy is used after it"
    ]


STEMS = "cupy/[qs]conv2d_maxpool2d/*"


def test_accepted_violations_are_counted_with_their_reasons() -> None:
    done = r18("ptxcheck", "--backend", "cupy", "--kernels", STEMS)
    assert done.code == 0, done.out
    assert "no ordering violations, 4 accepted with a reason" in done.out
    data = check("cupy", kernels=STEMS).to_json()
    assert data["disorders"] == {}
    ours = [one for one in Accepted.of("cupy").entries if "few_channels_wgmma" in one.function]
    assert {label: one["reason"] for label, (one,) in data["accepted"].items()} == {
        entry.function: entry.reason for entry in ours
    }


def test_an_entry_counts_only_where_its_function_was_checked(tmp_path: Path) -> None:
    """An accepted entry is needed only if its function was checked; an unknown one is an error."""
    path = tmp_path / "a.json"
    _, function = launched("ops/gap", "")
    entry = {"function": function.label, "rule": "retry", "message": "m", "reason": "r"}
    path.write_text(json.dumps({"cupy": [entry]}), "utf-8")
    assert check("cupy", kernels="cupy/gap/*").clean
    assert not check("cupy", kernels=STEMS, reasons=path).clean
    with pytest.raises(UsageError, match=r"lists 1 violation\(s\) of 'cupy' that were not found"):
        check("cupy", kernels="cupy/gap/*", reasons=path)
    path.write_text(json.dumps({"cupy": [{**entry, "function": "nowhere"}]}), "utf-8")
    with pytest.raises(UsageError, match="nowhere: retry: m"):
        check("cupy", kernels=STEMS, reasons=path)


@pytest.mark.parametrize(
    ("change", "times", "said"),
    [
        ({"reason": " "}, 1, "has no reason"),
        ({"message": ""}, 1, "has no message"),
        ({}, 2, "is listed twice"),
        ({"line": 3}, 1, "cannot read the accepted violations of"),
    ],
)
def test_a_damaged_list_is_refused(
    tmp_path: Path, change: dict[str, object], times: int, said: str
) -> None:
    path = tmp_path / "a.json"
    entry = {"function": "f", "rule": "retry", "message": "m", "reason": "r"}
    path.write_text(json.dumps({"cupy": [entry]}), "utf-8")
    assert len(Accepted.of("cupy", path).entries) == 1
    path.write_text(json.dumps({"cupy": [{**entry, **change}] * times}), "utf-8")
    with pytest.raises(UsageError, match=said):
        Accepted.of("cupy", path)


def test_the_command_reports_functions_and_orders() -> None:
    done = r18("ptxcheck", "--backend", "cupy", "--kernels", "cupy/gap/*/fp32*")
    assert done.code == 0, done.out
    assert done.out.endswith("functions for sm_90: no ordering violations\n")


def test_the_command_refuses_what_has_no_ptx() -> None:
    done = r18("ptxcheck", "--backend", "numpy")
    assert done.code == 2
    assert "no kernel of 'numpy' matching '*' is compiled to PTX for sm_90" in done.err
    unknown = r18("ptxcheck", "--backend", "cupy", "--kernels", "cupy/gop/*")
    assert unknown.code == 2
    assert "unknown kernel 'cupy/gop/*'" in unknown.err
