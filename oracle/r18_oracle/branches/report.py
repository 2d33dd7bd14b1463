"""The report of `r18 branches`: code that the problems left out, its kernels and the reasons."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r18.backend import Kernel
from r18_oracle.branches.measure import Measured, measure, sources
from r18_oracle.branches.reasons import Entry, Reasons
from r18_oracle.branches.untaken import Source, Untaken, of_functions, untaken
from r18_oracle.mutation.names import Names, Span
from r18_oracle.mutation.reach import reach, reaching
from r18_oracle.search.profiles import Profile, profile

WHOLE = (1, sys.maxsize)


@dataclass(frozen=True)
class Report:
    """The code of a backend's kernels that the problems of a profile did not execute.

    device:   where the kernels ran; None if only their host code was called.
    files, branches: how many modules and branches of host code were examined.
    functions: how many device functions were examined.
    without_reason: code left out without a reason, with the ids of its kernels.
    reasons:  code left out with a reason, and the reason.
    needless: entries that were not needed, for example because the kernels ran on a device.
    failed:   the error that stopped a kernel before its last problem, by the kernel's id.
    """

    backend: str
    profile: str
    device: str | None
    problems: int
    files: int
    branches: int
    functions: int
    without_reason: dict[Untaken, list[str]]
    reasons: dict[Untaken, str]
    needless: list[Entry]
    failed: dict[str, str]

    @property
    def clean(self) -> bool:
        """Whether no kernel failed, and everything that was left out has a reason."""
        return not self.without_reason and not self.failed

    def to_json(self) -> dict[str, Any]:
        """As plain data. Each `entry` goes into a file of reasons once its reason is filled in."""
        return {
            "backend": self.backend,
            "profile": self.profile,
            "device": self.device,
            "problems": self.problems,
            "files": self.files,
            "branches": self.branches,
            "functions": self.functions,
            "untaken": [
                {**_place(one), "kernels": kernels, "entry": _entry(one)}
                for one, kernels in self.without_reason.items()
            ],
            "reasons": [{**_place(one), "reason": reason} for one, reason in self.reasons.items()],
            "needless": [str(entry) for entry in self.needless],
            "failed": self.failed,
        }

    def text(self) -> str:
        """The text of the report: code left out without a reason, failed kernels, and the
        counts."""
        lines = []
        for one, kernels in self.without_reason.items():
            more = f" and {len(kernels) - 1} more" if len(kernels) > 1 else ""
            lines += [str(one), f"  of {kernels[0]}{more}"] if kernels else [str(one)]
        lines += [f"{kernel} was stopped: {why}" for kernel, why in self.failed.items()]
        how = f"on {self.device}" if self.device else "host code only, without the device"
        counts = [
            f"{self.problems} problems of '{self.profile}', {how}",
            f"{self.files} files, {self.branches} branches, {self.functions} device functions",
            f"{len(self.without_reason)} left out without a reason, {len(self.reasons)} with one",
        ]
        lines += [f"{self.backend}: {counts[0]}", *(f"  {count}" for count in counts[1:])]
        return "\n".join(lines)


def branches(
    backend: str,
    *,
    profile_name: str = "quick",
    network: str | None = "resnet18",
    seed: int = 0,
    reasons: Path | None = None,
    workers: int | None = None,
    on_kernel: Callable[[str], None] = lambda kernel: None,
) -> Report:
    """Report what the problems of a profile leave out of a backend's kernels.

    reasons: a file of entries by the backend's own name; by default our list. Raises what `measure`
    raises, `UnknownName` for a profile, and `UsageError` for a damaged or stale list.
    """
    how = profile(profile_name)
    if reasons is None:
        Reasons.of(backend)  # a damaged list is reported before the kernels run
    found = measure(backend, how, seed, network, workers=workers, on_kernel=on_kernel)
    own = found.backend.name if reasons is not None else backend
    return judged(found, backend, how, Reasons.of(own, reasons))


def judged(found: Measured, backend: str, how: Profile, reasons: Reasons) -> Report:
    """Make the report. Raises `UsageError` for an entry whose line no longer exists."""
    texts = {_name(found, path): Source.of(path) for path in sources(found.root)}
    reasons.check(backend, texts, found.declared)
    code = HostCode.of(found.root, found.backend.kernels(), found.compiled)
    left: list[Untaken] = []
    count = 0
    for file, spans in sorted(code.spans.items()):
        lines = found.lines[found.root / file if found.root.is_dir() else found.root]
        functions = of_functions(texts[file], spans)
        left += untaken(file, texts[file], lines, functions)
        inside = {*functions}
        count += sum(texts[file].owner(a) in inside for a, _ in lines.taken | lines.untaken)
    left += map(Untaken.device, sorted(found.declared.keys() - found.launched))
    entries = reasons.of_each(left)
    return Report(
        backend,
        how.name,
        found.device,
        found.problems,
        len(code.spans),
        count,
        len(found.declared),
        {one: _owners(one, code, found) for one, entry in entries.items() if entry is None},
        {one: entry.reason for one, entry in entries.items() if entry is not None},
        [entry for entry in reasons.entries if entry not in entries.values()],
        found.failed,
    )


@dataclass(frozen=True)
class HostCode:
    """Where the host code of a backend's kernels is; all files relative to the package.

    reaches: the definitions that each kernel reaches, by its id.
    spans: the lines of each file that count: the whole file if it is in some kernel's
           `host_files`; for a kernel without any, the definitions that it reaches. Modules of
           device code, and those with functions that Numba compiles, do not count: coverage.py
           does not see machine code, and the other functions in them only help to compile it.
    """

    reaches: dict[str, tuple[Span, ...]]
    spans: dict[str, list[tuple[int, int]]]

    @classmethod
    def of(cls, root: Path, kernels: Iterable[Kernel], compiled: set[str]) -> HostCode:
        names = Names(root)
        code = cls({}, {})
        for kernel in kernels:
            code.reaches[kernel.id] = reached = reach(kernel, root, names)
            counted = [file.resolve().relative_to(root).as_posix() for file in kernel.host_files]
            for file in counted:
                code.spans[file] = [WHOLE]
            for file, first, last in reached if not counted else ():
                spans = code.spans.setdefault(file, [])
                if (first, last) not in spans and WHOLE not in spans:
                    spans.append((first, last))
            compiled = compiled | {
                file.relative_to(root).as_posix()
                for file in map(Path.resolve, kernel.source_files)
                if file.is_relative_to(root)
            }
        for file in compiled & code.spans.keys():
            del code.spans[file]
        return code


def _owners(one: Untaken, code: HostCode, found: Measured) -> list[str]:
    """The kernels that declare a device function, or that reach a line of host code."""
    if not one.file:
        return found.declared[one.text]
    return reaching(one.file, one.line, code.reaches, code.reaches)


def _name(found: Measured, path: Path) -> str:
    return path.relative_to(found.root).as_posix() if path != found.root else path.name


def _place(one: Untaken) -> dict[str, Any]:
    return {"what": str(one), "file": one.file, "line": one.line, "to": one.to, "scope": one.scope}


def _entry(one: Untaken) -> dict[str, str]:
    """An entry of a file of reasons, with an empty reason."""
    if not one.file:
        return {"function": one.text, "reason": ""}
    entry = {"file": one.file, "scope": one.scope, "line": one.text}
    return {**entry, **({"to": one.to_text} if one.to_text else {}), "reason": ""}
