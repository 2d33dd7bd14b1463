"""Dumps: checkpoints in a folder, and the diff of two of them.

A dump holds `input.bin`, a file for each checkpoint (`stem_pool.bin`, `layer2.0.conv1.bin`; raw,
little-endian, row-major, logical NCHW), and `manifest.json`:

    {
      "kind": "dump", "version": 1, "byte_order": "little",
      "backend": "numpy", "device": "…", "precision": "fp32", "fusion": "all",
      "network": "resnet18",
      "weights": {"source": "synthetic:0", "sha256": "…"},
      "input": {"source": "seed 0", "name": "input", "path": "input.bin",
                "shape": [2, 3, 224, 224], "dtype": "float32", "sha256": "…"},
      "kernels": {"conv1": "numpy/conv2d/im2col/fp32", …},
      "checkpoints": [
        {"name": "stem_pool", "path": "stem_pool.bin", "shape": [2, 64, 56, 56],
         "dtype": "float32", "sha256": "…"},
        …
      ]
    }

In int8 a checkpoint is stored in its integers, uint8 or int8, and has one field more, `"scale"`:
q · scale is the number. Logits are float32.

Checkpoints stand in network order. A folder of raw float32 files without a manifest, written by a
program in any language, can be one side of a diff: shapes and order then come from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from r18.backend import Array, Backend, CompileOptions, Program
from r18.errors import DumpError, plain, unknown
from r18.files import check_distinct
from r18.graph import scaling
from r18.graph.passes import fuse
from r18.graph.precision import FP8
from r18.graph.quantize import LEVEL, value_scales
from r18.graph.resnet import name_of
from r18.graph.schedule import Schedule, checkpoint_names, named_in
from r18.runtime.fusing import keeping_checkpoints, keeping_pools, schedule_for
from r18.weights import Weights
from r18.weights.precisions import (
    check_level,
    in_precision,
    is_quantized,
    quantization_of,
)
from r18_oracle.dumps.files import (
    Origin,
    TensorFile,
    check_free,
    check_tensor,
    field,
    objects,
    read_json,
    read_tensor,
    reading,
    sha256_of,
    tensor_file,
    whole_folder,
    write_json,
    write_tensor,
)
from r18_oracle.judge.compare import METRICS, Row, compare, first_bad, short, table
from r18_oracle.network.images import Images

MANIFEST = "manifest.json"
INPUT = "input"


@dataclass(frozen=True)
class Made:
    """The program and device that made a dump."""

    backend: str
    device: str
    precision: str
    fusion: str
    network: str
    weights: Origin
    input: Origin
    kernels: Mapping[str, str]


@dataclass(frozen=True)
class Dump:
    """Checkpoints in a folder, in network order. `made` is None for raw files without a manifest.

    `input` is the file of the images, None for raw files.
    """

    folder: Path
    checkpoints: tuple[TensorFile, ...]
    made: Made | None = None
    input: TensorFile | None = None

    def __str__(self) -> str:
        if self.made is None:
            return f"{self.folder} (raw float32 files)"
        m = self.made
        made = f"{m.backend} in {m.precision}, fusion '{m.fusion}', {m.device}"
        return f"{self.folder} ({plain(made)})"

    def checkpoint(self, name: str) -> TensorFile:
        """Raises `UnknownName`."""
        for file in self.checkpoints:
            if file.name == name:
                return file
        raise unknown("checkpoint", name, (file.name for file in self.checkpoints))

    def read(self, name: str) -> Array:
        """A checkpoint's array as it is stored. Raises `UnknownName`, `DumpError`."""
        return read_tensor(self.folder, self.checkpoint(name))

    def numbers(self, name: str) -> Array:
        """A checkpoint's numbers: of integers q · scale in float64. Raises as `read`."""
        array, scale = self.read(name), self.checkpoint(name).scale
        return array if scale is None else array.astype(np.float64) * scale


# -- writing -----------------------------------------------------------------------------------


def write_dump(
    folder: str | Path,
    backend: Backend,
    schedule: Schedule,
    weights: Weights,
    images: Images,
    *,
    checkpoints: str | Sequence[str] = "canonical",
    options: CompileOptions = CompileOptions(),
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[TensorFile], None] | None = None,
) -> Dump:
    """Run a schedule (at level `none`) on a backend and write its checkpoints.

    checkpoints: as in `checkpoint_names`, of the schedule at `options.fusion` as the backend plans
                 it (`r18.runtime.fusing`) with the canonical checkpoints tapped, and those that are
                 named. All of integers: with each max-pooling in a step of its own.
    options:     batch and taps are set here, the others count.
    dtype:       float32 or float64 to round to; else as the program gives them. Integers stay.
    overwrite:   replace a dump that is there; anything else is never replaced.
    progress:    called with each checkpoint that was written.

    The folder appears whole or not at all. One checkpoint at a time is brought to the host; the
    program itself keeps all of them until the last is fetched. Values in e4m3 are written as the
    numbers that they stand for. Raises `DumpError`, and what
    compiling raises.
    """
    folder = Path(folder)
    images.check(schedule)
    options = replace(options, batch=images.batch, taps=())
    units = _units(schedule, weights, options)
    schedule, read = in_precision(schedule, weights, options)
    if is_quantized(schedule) and checkpoints == "all":
        # An explanation computes each step from its inputs.
        options = replace(options, kernels=keeping_pools(schedule) | dict(options.kernels))
    kept = keeping_checkpoints(schedule, options, named_in(checkpoints))
    planned = schedule_for(backend, schedule, kept)
    names = checkpoint_names(planned, checkpoints)
    check_free(folder, "dump", MANIFEST, overwrite)
    options = replace(options, taps=tuple(names))
    scales = _scales(schedule, weights)
    program = backend.compile(schedule, read, options)
    try:
        program.load(images.values)
        program.launch()
        program.synchronize()
        made = _made(backend, program, weights, images)
        with whole_folder(folder, "dump", MANIFEST, overwrite) as draft:
            image_file = write_tensor(draft, INPUT, images.values)
            files = []
            for name in names:
                scale = scales.get(schedule.value_of(name))
                stored = program.plan.tensors[schedule.value_of(name)].dtype.name
                kind = dtype if scale is None else stored
                values = program.fetch(name) * units.get(schedule.value_of(name), np.float32(1))
                files.append(write_tensor(draft, name, values, kind, scale))
                _check_shape(files[-1], backend.name, schedule, images.batch)
                if progress is not None:
                    progress(files[-1])
            write_dump_manifest(draft / MANIFEST, made, image_file, files)
    finally:
        program.close()
    return Dump(folder, tuple(files), made, image_file)


def _scales(schedule: Schedule, weights: Weights) -> dict[str, float]:
    """The scale of every value in integers; none of a schedule of floats."""
    if not is_quantized(schedule) or weights.quantization is None:
        return {}
    return value_scales(schedule, weights.quantization.scales)


def _units(schedule: Schedule, weights: Weights, options: CompileOptions) -> dict[str, np.float32]:
    """The scale of each value that an fp8 program computes in units of it; none in other
    precisions."""
    if options.precision != FP8.name:
        return {}
    check_level(options)
    folded = fuse(schedule, LEVEL)
    ranges = scaling.ranges_of(folded, quantization_of(weights, FP8.name))
    scales = scaling.value_scales(folded, ranges)
    return {value: np.float32(scale) for value, scale in scales.items()}


def _made(backend: Backend, program: Program, weights: Weights, images: Images) -> Made:
    plan = program.plan
    return Made(
        backend=backend.name,
        device=str(backend.probe()),
        precision=plan.options.precision,
        fusion=plan.options.fusion,
        network=name_of(plan.schedule),
        weights=Origin(weights.source, weights.sha256),
        input=Origin(images.source, sha256_of(images.values)),
        kernels=plan.kernel_ids(),
    )


def _check_shape(file: TensorFile, backend: str, schedule: Schedule, batch: int) -> None:
    expected = schedule.shapes(batch)[schedule.value_of(file.name)]
    if file.shape != expected:
        raise DumpError(
            f"backend '{backend}' gave checkpoint '{file.name}' as {file.shape}, "
            f"'{schedule.name}' makes it {expected}"
        )


def write_dump_manifest(path: Path, made: Made, image: TensorFile, files: list[TensorFile]) -> None:
    """Write the `manifest.json` of a dump."""
    data: dict[str, Any] = asdict(made)
    kernels = data.pop("kernels")
    data["input"] = {"source": made.input.source, **image.to_json()}
    checkpoints = [file.to_json() for file in files]
    write_json(path, "dump", data | {"kernels": kernels, "checkpoints": checkpoints})


# -- reading -----------------------------------------------------------------------------------


def read_dump(folder: str | Path) -> Dump:
    """The dump in a folder, with its manifest and the files' sizes checked; reads no tensor.

    Raises `DumpError`.
    """
    folder = _folder(folder)
    path = folder / MANIFEST
    if not path.exists():
        raise DumpError(f"'{folder}' holds no {MANIFEST}, so it is no dump; `r18 dump` writes one")
    data = read_json(path, "dump")
    with reading(path):
        image = field(data, "input", dict)
        made = Made(
            **{
                name: field(data, name, str)
                for name in ("backend", "device", "precision", "fusion", "network")
            },
            weights=Origin.from_json(field(data, "weights", dict)),
            input=Origin.from_json(image),
            kernels=field(data, "kernels", dict),
        )
        files = [tensor_file(entry) for entry in objects(data, "checkpoints")]
        dump = Dump(folder, tuple(files), made, tensor_file(image))
        names = [file.name for file in files]
        if not names:
            raise DumpError("it lists no checkpoints")
        check_distinct("checkpoint", names, DumpError)
    for file in files:
        check_tensor(folder, file)
    return dump


def read_raw(folder: str | Path, like: Dump) -> Dump:
    """A folder of float32 files without a manifest, as a dump of the shapes and order of `like`.

    Each `NAME.bin` in it must be one of `like`'s checkpoints, and each of these must be there, in
    its size; `input.bin` and other kinds of files are left alone. Raises `DumpError`.
    """
    folder = _folder(folder)
    files = {path.stem: path.name for path in sorted(folder.glob("*.bin"))}
    names = [file.name for file in like.checkpoints]
    files.pop(INPUT, None)
    _same_names(like.folder, names, folder, list(files))
    raw = [TensorFile(f.name, files[f.name], f.shape) for f in like.checkpoints]
    for file in raw:
        check_tensor(folder, file)
    return Dump(folder, tuple(raw))


def read_pair(expected: str | Path, got: str | Path) -> tuple[Dump, Dump]:
    """Two dumps; one may be a folder of raw files. Raises `DumpError`."""
    folders = [_folder(expected), _folder(got)]
    dumps = [read_dump(f) if (f / MANIFEST).exists() else None for f in folders]
    match dumps:
        case [Dump() as a, Dump() as b]:
            return a, b
        case [Dump() as a, None]:
            return a, read_raw(folders[1], a)
        case [None, Dump() as b]:
            return read_raw(folders[0], b), b
    raise DumpError(
        f"neither '{folders[0]}' nor '{folders[1]}' has a {MANIFEST}\n"
        "  shapes and order come from there: write one side with `r18 dump`"
    )


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise DumpError(f"'{folder}' " + ("is no folder" if folder.exists() else "does not exist"))
    return folder


# -- comparing ---------------------------------------------------------------------------------


def all_checkpoints(count: int, does: str, do: str) -> str:
    """All checkpoints of a comparison with a verb, in the singular or the plural."""
    return f"the only checkpoint {does}" if count == 1 else f"all {count} checkpoints {do}"


@dataclass(frozen=True)
class Report:
    """The diff of two dumps, in network order; `expected` and `got` describe them.

    identical: both are in integers, and every file has the same bytes.
    question: about the weights of the one side, where the other has no manifest; else ''.
    """

    expected: str
    got: str
    atol: float
    rows: tuple[Row, ...]
    identical: bool = False
    question: str = ""

    @property
    def ok(self) -> bool:
        return first_bad(self.rows) is None

    def closing(self) -> str:
        """The last line: all agree, or the first bad one and why."""
        bad = first_bad(self.rows)
        if bad is None and self.identical:
            said = all_checkpoints(len(self.rows), "is", "are")
            return f"{said} identical, byte for byte"
        if bad is None:
            said = all_checkpoints(len(self.rows), "agrees", "agree")
            return f"{said} within atol {short(self.atol)}"
        return f"first bad checkpoint: {bad.checkpoint} ({bad.comparison.reason()})"

    def text(self) -> str:
        """The text of the comparison: the dumps, the table, and the closing line."""
        head = f"expected: {self.expected}\ngot:      {self.got}"
        heads = ("checkpoint", "shape", *METRICS, "worst at", "verdict")
        lines = [
            (
                row.checkpoint,
                "×".join(map(str, row.shape)),
                *row.comparison.metrics(),
                str(row.comparison.worst),
                row.verdict,
            )
            for row in self.rows
        ]
        parts = [head, table(heads, lines), self.closing()]
        # Other weights are wrong from the first checkpoint on.
        if self.question and first_bad(self.rows) is self.rows[0]:
            parts[-1] += f"\n{self.question}"
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        bad = first_bad(self.rows)
        return {
            "expected": self.expected,
            "got": self.got,
            "atol": self.atol,
            "ok": self.ok,
            "identical": self.identical,
            "question": self.question,
            "first_bad": None if bad is None else bad.checkpoint,
            "checkpoints": [row.to_json() for row in self.rows],
        }


def diff_dumps(
    expected: str | Path,
    got: str | Path,
    *,
    atol: float = 1e-4,
    allow_different_input: bool = False,
) -> Report:
    """Compare the dump `got` with the dump `expected`, checkpoint by checkpoint.

    A checkpoint is bad where max_abs is above `atol`, or any value on either side is NaN or
    infinite. Integers are compared as integers if both sides have the same scale, and as numbers
    otherwise. No more than two checkpoints are in memory. Raises `DumpError` when a side is damaged
    or lacks a checkpoint that the other has, shapes or networks differ, or (unless
    `allow_different_input`) their weights or inputs do.
    """
    a, b = read_pair(expected, got)
    check_comparable(a, b, allow_different_input)
    rows = tuple(_rows(a, b, atol))
    return Report(str(a), str(b), atol, rows, _identical(a, b), _question(a, b))


def _question(a: Dump, b: Dump) -> str:
    """Of raw files and a dump: the dump's weights, which the raw files cannot confirm; else ''."""
    if a.made is not None and b.made is not None:
        return ""
    folder, made = (a.folder, a.made) if a.made is not None else (b.folder, b.made)
    assert made is not None  # `read_pair` refuses two folders of raw files
    return (
        f"the dump at {folder} was made with weights {plain(made.weights.source)}; did your "
        "program use these?"
    )


def _identical(a: Dump, b: Dump) -> bool:
    """Whether two dumps in integers have equal files."""
    if not (any(f.scale for f in a.checkpoints) and any(f.scale for f in b.checkpoints)):
        return False
    return all(
        replace(file, path="") == replace(b.checkpoint(file.name), path="")
        for file in a.checkpoints
    )


def _rows(expected: Dump, got: Dump, atol: float) -> Iterator[Row]:
    for file in expected.checkpoints:
        same = file.scale == got.checkpoint(file.name).scale
        # Without names of their own, the arrays are dropped before the next ones are read.
        comparison = compare(_read(got, file, same), _read(expected, file, same), atol)
        yield Row(file.name, file.shape, comparison)


def _read(dump: Dump, file: TensorFile, as_stored: bool) -> Array:
    return dump.read(file.name) if as_stored else dump.numbers(file.name)


def check_comparable(a: Dump, b: Dump, allow_different_input: bool | None = None) -> None:
    """Raise `DumpError` unless two dumps have the same network, weights, input and checkpoints.

    allow_different_input: true lets weights and input differ; None where nothing can.
    """
    instead = "" if allow_different_input is None else ", or pass --allow-different-input"
    _same_names(
        a.folder, [f.name for f in a.checkpoints], b.folder, [f.name for f in b.checkpoints]
    )
    if a.made and b.made:
        if a.made.network != b.made.network:
            raise DumpError(
                f"the dumps are of different networks: '{a.folder}' of '{a.made.network}', "
                f"'{b.folder}' of '{b.made.network}'\n  write both with the same --network"
            )
        for what, ours, theirs in (
            ("weights", a.made.weights, b.made.weights),
            ("input", a.made.input, b.made.input),
        ):
            if ours.sha256 != theirs.sha256 and not allow_different_input:
                raise DumpError(
                    f"the dumps have different {what}: '{a.folder}' {ours.source} (sha256 "
                    f"{ours.sha256[:16]}…), '{b.folder}' {theirs.source} (sha256 "
                    f"{theirs.sha256[:16]}…)\n"
                    f"  write both from the same {what}{instead}"
                )
    for file in a.checkpoints:
        other = b.checkpoint(file.name).shape
        if file.shape != other:
            raise DumpError(
                f"checkpoint '{file.name}' has shape {file.shape} in '{a.folder}' and {other} in "
                f"'{b.folder}'\n  write both with the same network and batch"
            )


def _same_names(one: Path, ours: list[str], other: Path, theirs: list[str]) -> None:
    """Both sides hold the same checkpoints, or `DumpError`: nothing is skipped."""
    here, there = set(ours), set(theirs)
    lacks = [
        f"'{folder}' lacks {plain(', '.join(missing))}, which the other has"
        for folder, missing in (
            (one, [name for name in theirs if name not in here]),
            (other, [name for name in ours if name not in there]),
        )
        if missing
    ]
    if lacks:
        raise DumpError(
            "\n  ".join(
                [
                    "the dumps do not hold the same checkpoints",
                    *lacks,
                    "write both with the same --checkpoints and --fusion; nothing is skipped",
                ]
            )
        )


__all__ = [
    "MANIFEST",
    "Dump",
    "Made",
    "Report",
    "all_checkpoints",
    "check_comparable",
    "diff_dumps",
    "read_dump",
    "read_pair",
    "read_raw",
    "write_dump",
    "write_dump_manifest",
]
