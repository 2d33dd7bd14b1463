"""A backend's mutants, and the facts about them before the run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from r18.backend.registry import checked_backend
from r18.errors import UsageError, unknown
from r18_oracle.mutation.equivalents import judged
from r18_oracle.mutation.mutants import LANGUAGES, Mutant, Target, mutants_of
from r18_oracle.mutation.names import Names, Span
from r18_oracle.mutation.reach import aside, device_code, reach

SHOWN = 12
"""Known mutants that a message about an unknown one names: those of its kind on nearby lines."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The mutants of a backend.

    If all kernels declare their device sources, device code that no kernel uses is not mutated. Nor
    are files that only microbenchmarks and the like need.

    reasons: the reason for each equivalent mutant, by id. texts: every unchanged source of the
    package. reaches: the source lines of each kernel, by its id, in the backend's order.
    """

    target: Target
    mutants: tuple[Mutant, ...]
    reasons: Mapping[str, str]
    texts: Mapping[str, str]
    reaches: Mapping[str, tuple[Span, ...]]
    _codes: dict[str, str] = field(default_factory=dict)
    _digests: dict[tuple[str, ...], str] = field(default_factory=dict)

    @classmethod
    def of(cls, backend: str) -> Plan:
        """The plan of a backend. Raises `UsageError` for a stale list of equivalent mutants."""
        target = Target.of(backend)
        sources = target.sources()
        names = Names(target.path)
        loaded = checked_backend(backend)
        kernels = loaded.kernels()
        reaches = {
            kernel.id: (*reach(kernel, target.path, names), *device_code(kernel, target.path))
            for kernel in kernels
        }
        declared = all(kernel.digest is not None for kernel in kernels)
        held = {span[0] for spans in reaches.values() for span in spans}
        unrun = aside(type(loaded), target.path, names) - held
        mutants = [
            mutant
            for file, source in sources.items()
            if file not in unrun
            and (not declared or file in held or not LANGUAGES[Path(file).suffix].compiled)
            for mutant in mutants_of(file, source)
        ]
        if not mutants:
            raise UsageError(f"backend '{backend}' has no source that can be mutated")
        return cls(target, tuple(mutants), judged(backend, mutants), target.texts(), reaches)

    def find(self, name: str) -> Mutant:
        """The mutant of that id; raises `UnknownName`."""
        for mutant in self.mutants:
            if mutant.id == name:
                return mutant
        file, line, kind = ([*name.split(":"), "", "", ""][index] for index in (0, 1, 3))
        alike = [m.id for m in self.mutants if m.id.split(":")[::3][:2] == [file, kind]]
        near = sorted(alike, key=lambda one: abs(int(one.split(":")[1]) - _number(line)))[:SHOWN]
        near = near or sorted({m.file for m in self.mutants})[:SHOWN]
        raise unknown("mutant", name, near, hint="`r18 mutate --list` prints all of them.")

    def diff(self, mutant: Mutant) -> str:
        return mutant.diff(self.texts[mutant.file])

    def digest(self, kernels: Iterable[str], mutant: Mutant | None = None) -> str:
        """A shortened sha256 of these kernels' code, with a mutant's change if one is given.

        Neither comments nor docstrings count, nor the line that the change is on.
        """
        chosen = tuple(kernels)
        if chosen not in self._digests:
            files = sorted({span[0] for kernel in chosen for span in self.reaches[kernel]})
            self._digests[chosen] = _sha256(*chosen, *map(self._code, files))
        if mutant is None:
            return self._digests[chosen][:16]
        own = self._code(mutant.file)
        return _sha256(self._digests[chosen], own, *map(str, mutant.key))[:16]

    def _code(self, file: str) -> str:
        """A digest of a file's code."""
        if file not in self._codes:
            language = LANGUAGES.get(Path(file).suffix)
            text = self.texts[file]
            self._codes[file] = _sha256(file, language.code(text) if language else text)
        return self._codes[file]


def _sha256(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Pace:
    """How long an unchanged kernel's trial took, and its longest silence, in seconds."""

    seconds: float
    silence: float


def eager(kernels: Iterable[str], paces: Mapping[str, Pace]) -> list[str]:
    """The kernels in the order in which they are shown a mutant, the most promising first.

    One kernel of each algorithm, then a second of each, and so on; cheap ones first.
    """

    def seconds(kernel: str) -> float:
        return paces[kernel].seconds if kernel in paces else 0.0

    decks: dict[str, list[str]] = {}
    for kernel in sorted(kernels, key=seconds):
        decks.setdefault("/".join(kernel.split("/")[1:3]), []).append(kernel)
    ranked = [
        (rank, seconds(kernel), kernel)
        for deck in decks.values()
        for rank, kernel in enumerate(deck)
    ]
    return [kernel for _, _, kernel in sorted(ranked)]


def patience(kernels: Iterable[str], paces: Mapping[str, Pace], most: float) -> int:
    """The silence limit in seconds, far above the longest silence of the unchanged kernels.

    most: the largest limit, which applies when no pace is known.
    """
    silences = [paces[kernel].silence for kernel in kernels if kernel in paces]
    return min(round(most), round(10 + 4 * max(silences))) if silences else round(most)


def _number(text: str) -> int:
    """The line number in an id; 0 for a text that is not a number."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0
