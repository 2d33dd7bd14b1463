"""`ptxcheck`: apply the rules to the PTX of a backend's kernels. It needs no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from r18.backend import DeviceFunction, Kernel
from r18.backend.registry import load_backend
from r18.errors import UsageError, unknown_kernel
from r18.graph.ops import Problem
from r18_oracle.loading import with_choices
from r18_oracle.ptx.accepted import Accepted, Entry
from r18_oracle.ptx.disorder import Disorder
from r18_oracle.ptx.parse import PtxError, functions
from r18_oracle.ptx.rules import disorders
from r18_oracle.search.campaign import network_problems

BATCHES = (1, 8, 64)
"""The batch sizes of the network's problems, which determine the functions that kernels launch."""


@dataclass
class Ordering:
    """The functions of a backend's kernels, and where they violate the rules.

    functions: the checked functions by label, each with the kernels that launch it.
    disorders: the violations by label, without the accepted ones. accepted: those, with their
    entries. unreached: kernels that accepted no problem.
    """

    target: str
    functions: dict[str, list[str]] = field(default_factory=dict)
    disorders: dict[str, tuple[Disorder, ...]] = field(default_factory=dict)
    accepted: dict[str, dict[Disorder, Entry]] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether there are functions of every kernel, and every violation is accepted."""
        return bool(self.functions) and not self.disorders and not self.unreached

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "target": self.target,
            "functions": self.functions,
            "disorders": {
                label: [_data(one) for one in found] for label, found in self.disorders.items()
            },
            "accepted": {
                label: [{**_data(one), "reason": entry.reason} for one, entry in found.items()]
                for label, found in self.accepted.items()
            },
            "unreached": self.unreached,
        }

    def text(self) -> str:
        """The violations with their kernels, the kernels without functions, and the counts."""
        lines = []
        for label, found in self.disorders.items():
            kernels = self.functions[label]
            more = f" and {len(kernels) - 1} more" if len(kernels) > 1 else ""
            lines += [f"{label}\n  of {kernels[0]}{more}", *(f"  {one}" for one in found)]
        lines += [
            f"{kernel} accepted no problem, so its functions are not known"
            for kernel in self.unreached
        ]
        count = sum(map(len, self.disorders.values()))
        verdict = f"{count or 'no'} ordering violation{'' if count == 1 else 's'}"
        if self.accepted:
            verdict += f", {sum(map(len, self.accepted.values()))} accepted with a reason"
        return "\n".join([*lines, f"{len(self.functions)} functions for {self.target}: {verdict}"])


def check(
    backend: str,
    *,
    target: str = "sm_90",
    kernels: str = "*",
    network: str = "resnet18",
    reasons: Path | None = None,
    on_kernel: Callable[[str], None] = lambda kernel: None,
) -> Ordering:
    """Check the functions that a backend's kernels launch on `target`.

    kernels: a glob over kernel ids. network: its problems and a kernel's own `extra_problems`
    determine which functions the kernel launches. reasons: a file of accepted violations by the
    backend's own name; by default our list. Raises `UnknownName` if no kernel matches, `UsageError`
    if no kernel that matches is compiled to PTX, and for a damaged list or an entry that matches
    nothing in its function, `PtxError` for PTX that the parser does not understand, and what
    compiling raises.
    """
    loaded = load_backend(backend)
    accepted = Accepted.of(backend if reasons is None else loaded.name, reasons)
    known = [*with_choices(loaded, loaded.kernels())]
    chosen = [kernel for kernel in known if fnmatchcase(kernel.id, kernels)]
    if not chosen:
        raise unknown_kernel(kernels, [kernel.id for kernel in known])
    found = Ordering(target)
    verdicts: dict[DeviceFunction, tuple[Disorder, ...]] = {}
    violations: dict[str, list[Disorder]] = {}
    for kernel in chosen:
        on_kernel(kernel.id)
        taken = False
        for function in _launched(kernel, target, network):
            taken = True
            if function not in verdicts:
                verdicts[function] = _judged(function)
                violations.setdefault(function.label, []).extend(verdicts[function])
            names = found.functions.setdefault(function.label, [])
            if kernel.id not in names:
                names.append(kernel.id)
        if not taken:
            found.unreached.append(kernel.id)
    if not found.functions:
        raise UsageError(
            f"no kernel of '{backend}' matching '{kernels}' is compiled to PTX for {target}\n"
            "  a kernel has PTX if its class overrides Kernel.functions, as r18_cupy's do"
        )
    declared = {label for kernel in known for label in kernel.function_labels()}
    accepted.check(backend, violations, found.functions, declared | found.functions.keys())
    for label, every in violations.items():
        entries = {one: accepted.entry(label, one) for one in every}
        if left := tuple(one for one, entry in entries.items() if entry is None):
            found.disorders[label] = left
        if known_ones := {one: entry for one, entry in entries.items() if entry is not None}:
            found.accepted[label] = known_ones
    return found


def first_violation(
    kernel: Kernel,
    target: str,
    network: str | None,
    accepted: Accepted,
    on_function: Callable[[str], None] = lambda label: None,
) -> Disorder | None:
    """The first violation that is not accepted in the functions that a kernel launches.

    network: None for the kernel's own problems only. on_function: called with each label. Raises
    `PtxError` and what compiling raises.
    """
    checked: set[DeviceFunction] = set()
    for function in _launched(kernel, target, network):
        if function in checked:
            continue
        checked.add(function)
        on_function(function.label)
        for one in _judged(function):
            if accepted.entry(function.label, one) is None:
                return one
    return None


def _data(one: Disorder) -> dict[str, Any]:
    return {"rule": one.rule, "lines": list(one.lines), "message": one.message}


def _launched(kernel: Kernel, target: str, network: str | None) -> Iterator[DeviceFunction]:
    for problem in _problems(kernel, network):
        if kernel.refusal(problem) is None:
            yield from kernel.functions(problem, target)


def _problems(kernel: Kernel, network: str | None) -> Iterable[Problem]:
    ours = network_problems(network, BATCHES) if network is not None else ()
    return (*ours, *kernel.extra_problems)


@lru_cache(maxsize=256)
def _judged(function: DeviceFunction) -> tuple[Disorder, ...]:
    for one in functions(function.ptx):
        if one.name == function.symbol:
            return disorders(one, constants=function.constants, overlaps=function.overlaps)
    raise PtxError(f"the PTX of '{function.label}' has no function '{function.symbol}'")
