"""Mutants of a backend's sources: small mechanical changes, each with an identity of its own."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from r18.backend.registry import installed, load_backend
from r18.errors import BackendUnavailable
from r18_oracle.mutation import cuda_edits, python_edits


@dataclass(frozen=True)
class Language:
    """How to mutate sources of one language; `LANGUAGES` says by which file names it goes.

    edits:   (operator, scope, start, end, text) of every change to a source: text takes the place
             of source[start:end], scope is the function that the change is in.
    meaning: of (source, start, end, text): a value that is equal for changes to a source that
             differ in form alone; None for what is no program at all. Mutants that mean what the
             original (text = "" at an empty span) or an earlier mutant means are dropped.
    compiled: it is compiled to machine code of its own, which tells whether a mutant is a program,
             and another one; see `r18.backend.Kernel`.
    """

    edits: Callable[[str], Iterator[python_edits.Edit]]
    meaning: Callable[[str, int, int, str], object | None]
    compiled: bool = False


CUDA = Language(cuda_edits.edits, cuda_edits.meaning, compiled=True)
LANGUAGES = {
    ".py": Language(python_edits.edits, python_edits.meaning),
    ".cu": CUDA,
    ".cuh": CUDA,
}


@dataclass(frozen=True)
class Mutant:
    """One change to one file.

    file:   relative to the package, with forward slashes. scope: the function it is in.
    line, column: of the change, counted from 1. index: tells mutants of one operator at one
    place apart.
    before, after: the whole lines that the change touches, dedented; with the scope they outlive
    edits elsewhere in the file. occurrence: counts, from 1, equal changes in one scope.
    source: the file with the change made.
    """

    file: str
    scope: str
    operator: str
    line: int
    column: int
    index: int
    before: str
    after: str
    occurrence: int
    source: str

    @property
    def compiled(self) -> bool:
        """Whether it is a change to device code."""
        return LANGUAGES[Path(self.file).suffix].compiled

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What it is, wherever in its scope it stands by now."""
        return (self.file, self.scope, self.before, self.after, self.occurrence)

    @property
    def id(self) -> str:
        digest = hashlib.sha256(self.before.encode()).hexdigest()[:6]
        return f"{self.file}:{self.line}:{self.column}:{self.operator}:{self.index}:{digest}"

    def diff(self, original: str) -> str:
        """The change as a unified diff."""
        lines = difflib.unified_diff(
            original.splitlines(keepends=True),
            self.source.splitlines(keepends=True),
            f"a/{self.file}",
            f"b/{self.file}",
        )
        return "".join(lines)


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file that means something of its own, in the order of the source."""
    language = LANGUAGES[Path(file).suffix]
    seen: set[object] = {None}
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    places: Counter[tuple[int, int, str]] = Counter()
    changes: Counter[tuple[str, str, str]] = Counter()
    for operator, scope, start, end, text in language.edits(source):
        meaning = language.meaning(source, start, end, text)
        if meaning in seen or meaning == language.meaning(source, start, start, ""):
            continue
        seen.add(meaning)
        first = bisect_right(starts, start) - 1
        last = bisect_right(starts, max(start, end - 1))
        before = source[starts[first] : starts[last]]
        after = source[starts[first] : start] + text + source[end : starts[last]]
        before, after = (textwrap.dedent(lines).strip() for lines in (before, after))
        column = start - starts[first] + 1
        found.append(
            Mutant(
                file,
                scope,
                operator,
                first + 1,
                column,
                places[first, column, operator],
                before,
                after,
                changes[scope, before, after] + 1,
                source[:start] + text + source[end:],
            )
        )
        places[first, column, operator] += 1
        changes[scope, before, after] += 1
    return found


def sample(mutants: Sequence[Mutant], limit: int | None, seed: int) -> list[Mutant]:
    """The first `limit` of them, or all, in an order that follows from the seed and what they are.

    A mutant's place says nothing about it: of each operator, any first part has about its share.
    So a run that stops early has seen a fair sample, the one of a smaller limit.
    """
    decks: dict[str, list[tuple[float, int]]] = {}
    for position, mutant in enumerate(mutants):
        decks.setdefault(mutant.operator, []).append((_draw(seed, *mutant.key), position))
    order: list[tuple[float, int]] = []
    for operator, deck in decks.items():
        offset = _draw(seed, operator)  # or all decks would begin with one at the same place
        order += [
            ((rank + offset) / len(deck), position)
            for rank, (_, position) in enumerate(sorted(deck))
        ]
    return [mutants[position] for _, position in sorted(order)[:limit]]


def _draw(*words: object) -> float:
    """A number in [0, 1) that looks like chance, and is the same for the same words."""
    digest = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


# -- a backend's sources -----------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A backend whose sources are mutated: its name, and the top-level package or module it is.

    path: the package's folder, or the file of a single module.
    own: the folder in the package, empty for all of it, that is the backend's; without `others`,
    the folders in there that are other backends'.
    """

    backend: str
    package: str
    path: Path
    own: str = ""
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: str) -> Target:
        """Of a name as `load_backend` takes it; raises what that raises."""
        module = type(load_backend(backend)).__module__
        package = module.partition(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise BackendUnavailable(backend, f"there is no module '{package}' with a source")
        origin = Path(spec.origin)
        if not spec.submodule_search_locations:
            return cls(backend, package, origin)
        root = origin.parent
        own = _folder(root, module)
        found = {
            _folder(root, point.module)
            for point in installed().values()
            if point.module.partition(".")[0] == package
        }
        inside = sorted(folder for folder in found if folder != own and _in(folder, own))
        return cls(backend, package, root, own, tuple(inside))

    def sources(self) -> dict[str, str]:
        """The text of every file of the backend's that can be mutated, as `texts`."""
        return {
            name: text
            for name, text in self.texts().items()
            if _in(name, self.own) and not any(_in(name, other) for other in self.others)
        }

    def texts(self) -> dict[str, str]:
        """The text of every source of the package, by its name in there, in order."""
        if self.path.is_file():
            return {self.path.name: self.path.read_text("utf-8")}
        files = sorted(p for p in self.path.rglob("*") if p.suffix in LANGUAGES)
        return {p.relative_to(self.path).as_posix(): p.read_text("utf-8") for p in files}


def _folder(root: Path, module: str) -> str:
    """The innermost package that a module is or is in: its folder, as seen from the outermost."""
    parts = module.split(".")[1:]
    if parts and not root.joinpath(*parts).is_dir():
        parts.pop()
    return "/".join(parts)


def _in(name: str, folder: str) -> bool:
    return not folder or name == folder or name.startswith(f"{folder}/")
