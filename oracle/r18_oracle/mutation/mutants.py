"""Mutants of a backend's sources: small mechanical changes, each with a stable identity."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from r18.backend.digest import cuda_tokens
from r18.backend.registry import installed, load_backend
from r18.errors import BackendUnavailable
from r18_oracle.mutation.edits import KINDS, STATE, Edit, cuda, cuda_state, python, python_state


@dataclass(frozen=True)
class Language:
    """How to mutate sources of one language; `LANGUAGES` maps file suffixes to languages.

    edits:   for each kind of mutant, in the order of `KINDS`, a function that yields every change
             to a source as (operator, scope, start, end, text): text replaces source[start:end],
             scope is the function that the change is in.
    meaning: (source, start, end, text) → a value that is equal for changes that differ only in
             form; None for a syntax error. Mutants with the meaning of the original (text = "" at
             an empty span) or of an earlier mutant of their kind are dropped.
    code:    a source without what no mutant's fate depends on: comments, docstrings, layout.
    compiled: sources are compiled to machine code ahead of a call, which shows whether a mutant
             is valid and differs from the original; see `r18.backend.Kernel`.
    """

    edits: Mapping[str, Callable[[str], Iterator[Edit]]]
    meaning: Callable[[str, int, int, str], object | None]
    code: Callable[[str], str]
    compiled: bool = False


CUDA = Language(
    {"tokens": cuda.edits, "state": cuda_state.edits}, cuda.meaning, cuda_tokens, compiled=True
)
LANGUAGES = {
    ".py": Language(
        {"tokens": python.edits, "state": python_state.edits}, python.meaning, python.code
    ),
    ".cu": CUDA,
    ".cuh": CUDA,
}


@dataclass(frozen=True)
class Mutant:
    """One change to one file.

    file:   relative to the package, with forward slashes. scope: the function it is in.
    line, column: of the change, from 1. index: distinguishes mutants of one operator at one place.
    before, after: the whole lines that the change touches, dedented; together with the scope they
    stay valid when the rest of the file is edited. occurrence: numbers equal changes in one scope,
    from 1.
    source: the changed file.
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
        """Whether it changes device code."""
        return LANGUAGES[Path(self.file).suffix].compiled

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return kind_of(self.id)

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The mutant's identity, independent of its line number."""
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


def file_of(name: str) -> str:
    """The file of the mutant with this id."""
    return name.rsplit(":", 5)[0]


def placeless(name: str) -> str:
    """The id without its line, which changes with the lines above it."""
    file, _, *others = name.rsplit(":", 5)
    return ":".join((file, *others))


def operator_of(name: str) -> str:
    """The operator of the mutant with this id."""
    return name.split(":")[-3]


def kind_of(name: str) -> str:
    """The kind of the mutant with this id, one of `KINDS`."""
    return "state" if operator_of(name) in STATE else "tokens"


def mutants_of(file: str, source: str, kinds: Collection[str] = KINDS) -> list[Mutant]:
    """Every mutant of a file, without those of equal meaning: kind by kind, in source order."""
    language = LANGUAGES[Path(file).suffix]
    chosen = [edits for kind, edits in language.edits.items() if kind in kinds]
    return [mutant for edits in chosen for mutant in _mutants(file, source, language, edits)]


def _mutants(
    file: str,
    source: str,
    language: Language,
    edits: Callable[[str], Iterator[Edit]],
) -> Iterator[Mutant]:
    seen: set[object] = {None}
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    places: Counter[tuple[int, int, str]] = Counter()
    changes: Counter[tuple[str, str, str]] = Counter()
    for operator, scope, start, end, text in edits(source):
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
        yield Mutant(
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
        places[first, column, operator] += 1
        changes[scope, before, after] += 1


def sample(mutants: Sequence[Mutant], limit: int | None, seed: int) -> list[Mutant]:
    """The first `limit` mutants, or all, in an order determined by the seed and their keys.

    Any prefix contains each operator in about its overall proportion. A run that stops early has
    therefore judged a fair sample: the one of a smaller limit.
    """
    decks: dict[str, list[tuple[float, int]]] = {}
    for position, mutant in enumerate(mutants):
        decks.setdefault(mutant.operator, []).append((_draw(seed, *mutant.key), position))
    order: list[tuple[float, int]] = []
    for operator, deck in decks.items():
        offset = _draw(seed, operator)  # otherwise all decks would begin at the same place
        order += [
            ((rank + offset) / len(deck), position)
            for rank, (_, position) in enumerate(sorted(deck))
        ]
    return [mutants[position] for _, position in sorted(order)[:limit]]


def _draw(*words: object) -> float:
    """A pseudorandom number in [0, 1), determined by the words."""
    digest = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


# -- a backend's sources -----------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A backend whose sources are mutated: its name, and its top-level package or module.

    path: the package's folder, or the file of a single module.
    own: the backend's folder in the package, empty for all of it.
    others: folders within `own` that belong to other backends.
    """

    backend: str
    package: str
    path: Path
    own: str = ""
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: str) -> Target:
        """The target of a backend named as in `load_backend`; raises what that raises."""
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
        """The backend's own files among `texts`."""
        return {
            name: text
            for name, text in self.texts().items()
            if _in(name, self.own) and not any(_in(name, other) for other in self.others)
        }

    def texts(self) -> dict[str, str]:
        """The text of every source of the package, by its relative path, sorted."""
        if self.path.is_file():
            return {self.path.name: self.path.read_text("utf-8")}
        files = sorted(p for p in self.path.rglob("*") if p.suffix in LANGUAGES)
        return {p.relative_to(self.path).as_posix(): p.read_text("utf-8") for p in files}


def _folder(root: Path, module: str) -> str:
    """The folder of the innermost package that a module is or is in, relative to the outermost."""
    parts = module.split(".")[1:]
    if parts and not root.joinpath(*parts).is_dir():
        parts.pop()
    return "/".join(parts)


def _in(name: str, folder: str) -> bool:
    return not folder or name == folder or name.startswith(f"{folder}/")
