"""Whether dumps of several backends agree within the error that each is allowed; see
`r18_oracle.dumps.dumps`.

`diff_dumps` has one tolerance for all checkpoints. Here it is derived: a program's allowed error at
a checkpoint is a multiple of the error of PyTorch's own arithmetic there against float64, in the
dump's precision, on the same weights and images (`r18.evaluate.margins`). Two correct programs
differ by at most the sum of their allowed errors. Only NumPy and PyTorch run; the device that wrote
a dump is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from r18.backend import Array, Backend
from r18.backend.registry import check_named, load_backend
from r18.errors import (
    BackendUnavailable,
    DumpError,
    UnknownName,
    UsageError,
    WeightsError,
    plain,
)
from r18.evaluate.margins import Allowance, multiple
from r18.graph.ops import Shape
from r18.graph.passes import fuse
from r18.graph.precision import FP8, INT8, Precision
from r18.graph.precision import precision as precision_of
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.weights import Weights, load_weights
from r18.weights.sources import check_source_named
from r18_oracle.dumps.dumps import Dump, Made, all_checkpoints, check_comparable, read_dump
from r18_oracle.dumps.files import read_tensor
from r18_oracle.judge.compare import json_number, short, table
from r18_oracle.loading import planned_kernels
from r18_oracle.network.images import Images
from r18_oracle.network.losses import Loss, LossSums
from r18_oracle.network.reference_runs import LayerRun, pytorch_run, reference_run

BATCH = 4
"""Images per run; more images take several runs."""


@dataclass(frozen=True)
class Apart:
    """How far two dumps are apart at a checkpoint.

    dumps:   their places in the order given.
    max_abs: the largest |a − b|; infinite where either side holds a NaN or infinity.
    allowed: the sum of both allowed errors.
    worst:   the coordinate of max_abs; its first index counts all images.
    values:  a and b there.
    """

    dumps: tuple[int, int]
    max_abs: float
    allowed: float
    worst: tuple[int, ...]
    values: tuple[float, float]

    @property
    def ratio(self) -> float:
        if self.max_abs == 0:
            return 0.0
        return self.max_abs / self.allowed if self.allowed else float("inf")

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def reason(self) -> str:
        one, other = (letter(place) for place in self.dumps)
        return (
            f"{one} and {other} are {self.ratio:.3g} times as far apart as their allowed errors: "
            f"{self.max_abs:.3g} of {self.allowed:.3g} at {self.worst}: "
            f"{self.values[0]:.9g} and {self.values[1]:.9g}"
        )


@dataclass(frozen=True)
class Agreed:
    """One checkpoint: each dump's error against float64, and the distance of each pair."""

    checkpoint: str
    shape: Shape
    losses: tuple[Loss, ...]
    pairs: tuple[Apart, ...]

    @property
    def ok(self) -> bool:
        return all(loss.ok for loss in self.losses) and all(pair.ok for pair in self.pairs)

    def reasons(self) -> list[str]:
        """The failures, in words."""
        alone = [
            f"{letter(place)}: {loss.reason()}"
            for place, loss in enumerate(self.losses)
            if not loss.ok
        ]
        return alone + [pair.reason() for pair in self.pairs if not pair.ok]

    def to_json(self) -> dict[str, Any]:
        def plain(data: Mapping[str, Any], **more: Any) -> dict[str, Any]:
            return {key: json_number(value) for key, value in (*data.items(), *more.items())}

        return {
            "checkpoint": self.checkpoint,
            "shape": list(self.shape),
            "ok": self.ok,
            "losses": [plain(asdict(loss), ok=loss.ok) for loss in self.losses],
            "pairs": [plain(asdict(pair), ratio=pair.ratio, ok=pair.ok) for pair in self.pairs],
        }


@dataclass(frozen=True)
class Agreement:
    """The comparison of several dumps.

    dumps: a description of each. multiples: each dump's allowed multiple of PyTorch's error.
    rows: the checkpoints in network order.
    """

    dumps: tuple[str, ...]
    multiples: tuple[float, ...]
    images: int
    rows: tuple[Agreed, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> tuple[Agreed, Apart]:
        """The pair that is nearest to its allowance, or farthest beyond it."""
        found = [(row, pair) for row in self.rows for pair in row.pairs]
        return max(found, key=lambda pair: pair[1].ratio)

    def closing(self) -> str:
        """The last line: all agree, or the first bad checkpoint and why."""
        for row in self.rows:
            if not row.ok:
                return f"first bad checkpoint: {row.checkpoint} ({'; '.join(row.reasons())})"
        row, pair = self.worst
        one, other = (letter(place) for place in pair.dumps)
        said = all_checkpoints(len(self.rows), "agrees", "agree")
        return (
            f"{said}: no two dumps are farther apart than {pair.ratio:.3g} of the error allowed to "
            f"both ({row.checkpoint}, {one} and {other})"
        )

    def text(self) -> str:
        """The text of the comparison: the dumps, the table, and the closing line."""
        head = [
            f"{letter(place)}: {dump}, may lose {short(multiple)} times what PyTorch loses"
            for place, (dump, multiple) in enumerate(zip(self.dumps, self.multiples, strict=True))
        ]
        letters = [letter(place) for place in range(len(self.dumps))]
        heads = ["checkpoint", "shape", *letters]
        heads += ["-".join(pair) for pair in combinations(letters, 2)]
        lines = [
            [
                row.checkpoint,
                "×".join(map(str, row.shape)),
                *(f"{loss.ratio:.3f}" for loss in row.losses),
                *(f"{pair.ratio:.3f}" for pair in row.pairs),
                "ok" if row.ok else "BAD",
            ]
            for row in self.rows
        ]
        said = (
            "a: error against float64 / error allowed to a;  "
            "a-b: largest |a − b| / sum of both allowed errors"
        )
        shown = table([*heads, "verdict"], lines, numbers=heads[2:])
        return "\n".join([*head, "", shown, "", said, "", self.closing()])

    def to_json(self) -> dict[str, Any]:
        bad = next((row.checkpoint for row in self.rows if not row.ok), None)
        return {
            "dumps": list(self.dumps),
            "multiples": list(self.multiples),
            "images": self.images,
            "ok": self.ok,
            "first_bad": bad,
            "checkpoints": [row.to_json() for row in self.rows],
        }


def letter(place: int) -> str:
    """How a report calls a dump: a, b, …"""
    return chr(ord("a") + place)


def compare_by_bounds(
    folders: Sequence[str | Path],
    *,
    weights: str | None = None,
    backends: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Agreement:
    """Compare two dumps or more with float64, and every two with each other.

    The images are those in the dumps. The weights are loaded from the source in the first dump's
    manifest, or from `weights`, and must have the hash in the manifests. `backends` are what the
    user names, by name or as module:attr: a dump's own word loads installed backends only, and no
    file of weights. A checkpoint is bad if a
    dump's error exceeds its allowed error (`Loss`), if two dumps differ by more than the sum of
    both, or if a value is NaN or infinite.

    progress: called with the number of finished images and of all images.

    Raises `UsageError` for fewer than two dumps or more than 26; `DumpError` if one is damaged,
    has no manifest, or differs from the first in network, weights, input or checkpoints, if its
    kernels are unknown here, or if the weights have another hash; and what
    `reference_run` and `Allowance.of` raise.
    """
    if not 2 <= len(folders) <= 26:
        raise UsageError(f"give 2 to 26 dumps to compare by their bounds, got {len(folders)}")
    dumps = [read_dump(folder) for folder in folders]
    first = dumps[0]
    for other in dumps[1:]:
        check_comparable(first, other)
    schedule = _network(first)
    given = _given(backends)
    sides = [_Side.of(dump, schedule, given) for dump in dumps]
    images = _images(first, schedule)
    loaded = weights_of(first, schedule, weights)
    count = images.batch
    names = [file.name for file in first.checkpoints]
    sums = {name: _Sums(sides) for name in names}
    for start in range(0, count, BATCH):
        if progress is not None:
            progress(start, count)
        part = images.values[start : start + BATCH]
        runs = _Runs(schedule, loaded, part, sides, names)
        for name in names:
            tensors = [dump.read(name)[start : start + BATCH] for dump in dumps]
            sums[name].add(tensors, *runs.take(name), start)
    if progress is not None:
        progress(count, count)
    rows = tuple(
        Agreed(file.name, file.shape, *sums[file.name].found()) for file in first.checkpoints
    )
    return Agreement(
        tuple(map(str, dumps)), tuple(side.allowance_multiple for side in sides), count, rows
    )


# -- what the dumps say ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """The facts that a dump's allowed error depends on."""

    fused: Schedule
    precision: Precision
    allowance_multiple: float

    @classmethod
    def of(cls, dump: Dump, schedule: Schedule, given: Mapping[str, Backend]) -> _Side:
        made = _made(dump)
        if made.precision == INT8.name:
            raise DumpError(
                f"'{dump.folder}' is in int8, where the bound is 0: nothing may be lost\n"
                "  compare integers by equality: r18 diff without --bounds"
            )
        if made.precision == FP8.name:
            raise DumpError(
                f"'{dump.folder}' is in fp8, whose error follows from scales that a dump does not "
                "hold\n  verify the network: r18 verify --precision fp8"
            )
        fused = fuse(schedule, made.fusion)
        unknown = [f.name for f in dump.checkpoints if f.name not in fused.taps]
        if unknown:
            raise DumpError(
                f"'{dump.folder}' has checkpoints that '{schedule.name}' at level "
                f"'{made.fusion}' lacks: {', '.join(unknown)}"
            )
        shapes = fused.shapes(dump.checkpoints[0].shape[0])
        for file in dump.checkpoints:
            wanted = shapes[fused.value_of(file.name)]
            if file.shape != wanted:
                raise DumpError(
                    f"checkpoint '{file.name}' in '{dump.folder}' has shape {file.shape}, "
                    f"expected {wanted} from '{schedule.name}'"
                )
        precision = precision_of(made.precision)
        return cls(fused, precision, multiple(_algorithms(dump, given), precision))

    @property
    def allowance(self) -> Allowance:
        return Allowance.of(self.precision, self.allowance_multiple)

    @property
    def yardstick(self) -> tuple[str, str]:
        """The key of the dump's `pytorch_run`."""
        return self.precision.name, self.fused.level


def _made(dump: Dump) -> Made:
    assert dump.made is not None  # `read_dump` reads no raw files
    return dump.made


def _network(dump: Dump) -> Schedule:
    try:
        return network(_made(dump).network)
    except UnknownName as error:
        raise DumpError(f"'{dump.folder}' is of an unknown network: {error}") from None


def _given(names: Sequence[str]) -> dict[str, Backend]:
    """The backends that the user named, by that name and by the name in their dumps."""
    loaded = {name: load_backend(name) for name in names}
    return {backend.name: backend for backend in loaded.values()} | loaded


def _algorithms(dump: Dump, given: Mapping[str, Backend]) -> set[str]:
    """The algorithms in the contracts of the kernels that made the dump."""
    made = _made(dump)
    try:
        if made.backend not in given:
            check_named(made.backend, f"the dump '{dump.folder}'")
        backend = given.get(made.backend) or load_backend(made.backend)
        known = planned_kernels(backend)
    except (UnknownName, BackendUnavailable) as error:
        raise DumpError(
            f"the allowed error of '{dump.folder}' depends on its kernels, and its backend "
            f"'{plain(made.backend)}' is not available: {error}\n"
            "  install the backend here; its device is not needed"
        ) from None
    missing = sorted(set(made.kernels.values()) - known.keys())
    if missing:
        raise DumpError(
            f"'{dump.folder}' was made by kernels that backend '{plain(made.backend)}' does not "
            f"list here: {plain(', '.join(missing))}\n"
            "  write the dump again with the installed r18 and backend"
        )
    return {known[kernel].contract.algorithm for kernel in made.kernels.values()}


def _images(dump: Dump, schedule: Schedule) -> Images:
    assert dump.input is not None
    values = read_tensor(dump.folder, dump.input)
    images = Images(np.asarray(values, np.float32), _made(dump).input.source)
    images.check(schedule)
    return images


def weights_of(dump: Dump, schedule: Schedule, asked: str | None) -> Weights:
    """The weights of a dump: of the source asked for, else the one that it names.

    Raises `WeightsError` for a file or folder that only the dump names, and `DumpError` where they
    are other ones, or cannot be loaded.
    """
    origin = _made(dump).weights
    if asked is None:
        check_source_named(origin.source, f"the dump '{dump.folder}'")
    source = origin.source if asked is None else asked
    say = "  give the source of the dumps' weights with --weights"
    try:
        loaded = load_weights(source, schedule)
    except (WeightsError, UnknownName) as error:
        if asked is not None:
            raise
        raise DumpError(f"the weights of '{dump.folder}' are missing: {error}\n{say}") from None
    if loaded.sha256 != origin.sha256:
        raise DumpError(
            f"'{source}' are not the weights of '{dump.folder}': sha256 {loaded.sha256[:16]}…, "
            f"its manifest has {origin.source} with {origin.sha256[:16]}…\n{say}"
        )
    return loaded


# -- a batch -----------------------------------------------------------------------------------


class _Runs:
    """The reference run, and a run in PyTorch's own arithmetic for each yardstick."""

    def __init__(
        self,
        schedule: Schedule,
        weights: Mapping[str, Array],
        images: Array,
        sides: Sequence[_Side],
        names: Sequence[str],
    ) -> None:
        self._sides = sides
        takes = [sides[0].fused.value_of(name) for name in names]
        self._reference = reference_run(schedule, weights, images, takes)
        self._own: dict[tuple[str, str], LayerRun] = {}
        for side in sides:
            if side.yardstick not in self._own:
                run = pytorch_run(schedule, side.fused, weights, side.precision)
                takes = [side.fused.value_of(name) for name in names]
                self._own[side.yardstick] = run(images, takes)

    def take(self, name: str) -> tuple[Array, list[Array]]:
        """A checkpoint's values in float64, and in the PyTorch run of each side."""
        expected = self._reference.take(self._sides[0].fused.value_of(name))
        own: dict[tuple[str, str], Array] = {}
        for side in self._sides:
            if side.yardstick not in own:
                own[side.yardstick] = self._own[side.yardstick].take(side.fused.value_of(name))
        return expected, [own[side.yardstick] for side in self._sides]


@dataclass
class _Far:
    """The largest distance of two dumps so far."""

    max_abs: float = -1.0
    worst: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)

    def add(self, a: Array, b: Array, first_image: int) -> None:
        wide, other = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(wide - other)
        apart[~(np.isfinite(wide) & np.isfinite(other))] = np.inf
        at = np.unravel_index(int(apart.argmax()), apart.shape)
        if apart[at] > self.max_abs:
            self.max_abs = float(apart[at])
            self.worst = (first_image + int(at[0]), *(int(i) for i in at[1:]))
            self.values = float(wide[at]), float(other[at])


@dataclass
class _Sums:
    """The sums of one checkpoint over batches: scalars, no arrays."""

    sides: Sequence[_Side]
    losses: list[LossSums] = field(default_factory=list)
    pairs: dict[tuple[int, int], _Far] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = [LossSums() for _ in self.sides]
        self.pairs = {pair: _Far() for pair in combinations(range(len(self.sides)), 2)}

    def add(
        self, tensors: Sequence[Array], expected: Array, own: Sequence[Array], first: int
    ) -> None:
        for sums, got, lost in zip(self.losses, tensors, own, strict=True):
            sums.add_own(lost, expected)
            sums.add(got, expected, first)
        for (one, other), far in self.pairs.items():
            far.add(tensors[one], tensors[other], first)

    def found(self) -> tuple[tuple[Loss, ...], tuple[Apart, ...]]:
        losses = tuple(
            sums.loss(side.allowance) for sums, side in zip(self.losses, self.sides, strict=True)
        )
        pairs = tuple(
            Apart(
                pair,
                far.max_abs,
                losses[pair[0]].allowed_max + losses[pair[1]].allowed_max,
                far.worst,
                far.values,
            )
            for pair, far in self.pairs.items()
        )
        return losses, pairs


__all__ = ["Agreed", "Agreement", "Apart", "compare_by_bounds"]
