"""`r18 kernels`: what a backend's kernels are, and what their functions take of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer
from rich.console import Console
from tabulate import tabulate

from r18.backend import Kernel, Resources, RoundingContract
from r18.backend.registry import checked_backend
from r18.cli.options import (
    AsJson,
    BackendName,
    asked_backend,
    chosen_backend,
    listed,
    print_result,
)
from r18.errors import UsageError, unknown_kernel
from r18.inner_loops import look
from r18.machine import cpus
from r18.progress import progress_bar

Architectures = Annotated[
    str,
    typer.Option(
        help="Compile for these, such as sm_90 or sm_80,sm_90a, or for none. "
        "[all that a kernel is meant for]"
    ),
]
Assembly = Annotated[
    bool,
    typer.Option(
        "--assembly",
        help="Compile kernels of the CPU again, and print the assembly of their inner loops.",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="With the assembly, the share of the instruction's peak that each kernel reaches. "
        "While nothing else runs.",
    ),
]

Usage = dict[str, dict[str, Resources]]
"""The resources of a kernel's functions, by architecture, then by function."""


def kernels(
    backend: BackendName = None,
    pattern: Annotated[
        str, typer.Option("--kernels", metavar="GLOB", help="Only kernels whose id matches.")
    ] = "*",
    arch: Architectures = "",
    assembly: Assembly = False,
    measure: Measure = False,
    as_json: AsJson = False,
) -> None:
    """List a backend's kernels, the preferred one for an op and precision first.

    Contracts say how a kernel rounds; edges are the sizes at which its behaviour changes. Of
    kernels that are compiled from sources of their own, a second table has a line for each
    function and architecture: registers a thread, static shared memory a block, stack and spilled
    bytes a thread. No device is touched; compiled functions are cached.

    With --assembly, only kernels that multiply on the CPU are listed: how many multiplying
    instructions their fullest inner loop has among how many, and what all their loops spill.
    """
    asked, of_cpu = asked_backend(backend), assembly or measure
    probed = of_cpu or asked == "auto"  # LLVM aborts on an instruction that the CPU lacks
    chosen = chosen_backend(asked)[0] if probed else checked_backend(asked)
    every = chosen.kernels()
    found = [kernel for kernel in every if fnmatchcase(kernel.id, pattern)]
    if not found:
        raise unknown_kernel(pattern, [k.id for k in every])
    if of_cpu:
        with Console(stderr=True).status("compiling") as status:
            result = look(chosen, found, measure=measure, progress=status.update)
        print_result(result, as_json)
        return
    compiled = [kernel for kernel in found if kernel.targets]
    asked_targets = listed(arch, "--arch") if arch else None
    if asked_targets not in (None, ["none"]) and not compiled:
        raise UsageError(f"--arch is for compiled kernels, and '{asked}' has none of those")
    used: list[Usage] = [{} for _ in found]
    if compiled and asked_targets != ["none"]:
        with progress_bar() as bar:
            bar.start(sum(len(asked_targets or kernel.targets) for kernel in compiled))
            used = compile_kernels(found, asked_targets, bar.advance)
    if as_json:
        rows = [_json(kernel, usage) for kernel, usage in zip(found, used, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(kernel_table(found))
    lines = resource_lines(found, used)
    if lines:
        headers = ("kernel", "function", "arch", "registers", "shared B", "stack B", "spilled B")
        align = ("left", "left", "left", *("right",) * 4)
        typer.echo(f"\n{tabulate(lines, headers, disable_numparse=True, colalign=align)}")
    spilling = sorted({line[0] for line in lines if line[-1] != "0"})
    told = f"; {len(spilling)} spill: {', '.join(spilling)}" if spilling else ""
    told = told or ("; none spills" if lines else "")
    typer.echo(f"\n{len(found)} kernels, {len(lines)} compiled functions{told}")


def compile_kernels(
    kernels: Sequence[Kernel],
    targets: Sequence[str] | None,
    done: Callable[[str], None] = lambda what: None,
) -> list[Usage]:
    """The resources of each kernel's functions, in the order given; empty for one that has none.

    targets: architectures; None for those that each kernel is meant for. Several are compiled at
    once. `done` is called for each finished kernel and architecture. Raises the compiler's error.
    """

    def build(kernel: Kernel, target: str) -> dict[str, Resources]:
        return dict(kernel.resources(target))

    with ThreadPoolExecutor(cpus()) as pool:
        pending = [
            {
                target: pool.submit(build, kernel, target)
                for target in (
                    targets if targets is not None and kernel.targets else kernel.targets
                )
            }
            for kernel in kernels
        ]
        found: list[Usage] = []
        try:
            for kernel, jobs in zip(kernels, pending, strict=True):
                usage: Usage = {}
                for target, job in jobs.items():
                    usage[target] = job.result()
                    done(f"{kernel.id} for {target}")
                found.append(usage)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def kernel_table(kernels: Sequence[Kernel]) -> str:
    """A line a kernel: what it declares."""
    rows = [
        (
            kernel.id,
            kernel.layout.value,
            contract_words(kernel.contract),
            " ".join(str(edge) for edge in kernel.edges),
            *(
                "yes" if flag else ""
                for flag in (kernel.deterministic, kernel.batch_invariant, kernel.in_place)
            ),
        )
        for kernel in kernels
    ]
    headers = (
        "kernel",
        "layout",
        "rounding",
        "edges",
        "deterministic",
        "batch invariant",
        "in place",
    )
    return tabulate(rows, headers, disable_numparse=True)


def contract_words(contract: RoundingContract) -> str:
    """A rounding contract in a few words: `sum float32 → float16, truncates`."""
    words = f"{contract.algorithm} {contract.accumulate}"
    if contract.output != contract.accumulate:
        words += f" → {contract.output}"
    if contract.truncates:
        words += ", truncates"
    if contract.blocks > 1:
        words += f", {contract.blocks} blocks"
    return words + (", stored sum" if contract.stored_sum else "")


def resource_lines(kernels: Sequence[Kernel], used: Sequence[Usage]) -> list[tuple[str, ...]]:
    """(kernel, function, architecture, registers, shared, stack, spilled), all as text."""
    return [
        (kernel.id, label, target, *(str(value) for value in asdict(resources).values()))
        for kernel, usage in zip(kernels, used, strict=True)
        for target, functions in usage.items()
        for label, resources in functions.items()
    ]


def _json(kernel: Kernel, usage: Usage) -> dict[str, Any]:
    data: dict[str, Any] = {
        "kernel": kernel.id,
        "op": kernel.op.name,
        "algorithm": kernel.algorithm,
        "precision": kernel.precision.name,
        "layout": kernel.layout.value,
        "contract": asdict(kernel.contract),
        "edges": list(kernel.edges),
        "deterministic": kernel.deterministic,
        "batch_invariant": kernel.batch_invariant,
        "in_place": kernel.in_place,
    }
    if kernel.digest is not None:
        data["digest"] = kernel.digest
    if kernel.targets:
        data["functions"] = [
            {"function": label, "target": target} | asdict(resources)
            for target, functions in usage.items()
            for label, resources in functions.items()
        ]
    return data
