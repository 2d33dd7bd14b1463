"""Every parser of files that are not trusted, with valid files for it."""

from __future__ import annotations

import io
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from PIL import Image, features

from quantised_weights import quantised_weights, sealed
from r18 import records
from r18.backend.tuned import Table, Timing
from r18.backend.tuned import read_table as read_tuned
from r18.errors import ManifestError
from r18.evaluate.journal import open_journal
from r18.evaluate.rows import OK, UNREADABLE, BatchRows, Row, Seen, Times
from r18.evaluate.salvage import salvage_journal
from r18.evaluate.sources import find_images
from r18.evaluate.summary import summarise
from r18.evaluate.tables import read_table, record, write_table
from r18.graph.ops import Conv2d, ConvMaxPool, Linear, MaxPool2d, Problem
from r18.graph.resnet import tiny
from r18.images.preprocess import Preprocess, preprocess_image
from r18.qdq import write_qdq
from r18.qdq.read import read_qdq
from r18.records.kinds import KINDS
from r18.weights import Weights, export_weights, load_weights
from r18_numpy import Backend as NumpyBackend
from r18_oracle.branches.reasons import Reasons
from r18_oracle.dumps.dumps import read_dump, write_dump
from r18_oracle.dumps.fixtures import make_fixture, read_fixture
from r18_oracle.findings import CHOICE, SILENCE, Finding, load
from r18_oracle.network.images import raw_file, seeded
from r18_oracle.ptx.accepted import Accepted
from r18_oracle.search.network_run import NetworkRun
from r18_oracle.xfails import load_expected
from support import ROOT
from whole_records import whole

IDENTITY = {"weights_sha256": "a" * 64, "backend": "numpy"}
ROWS = (
    Row("a.png", 3, OK, (3, 1, 2, 4, 5), (3, 1, 2, 5, 4), 2.5, seen=Seen("a" * 64, (1, 2, 3, 4))),
    Row("b/ü.png", None, OK, (6, 4, 1, 2, 3), (4, 6, 1, 2, 3), 0.5),
    Row("c.png", 4, UNREADABLE, error="truncated"),
)


@dataclass(frozen=True)
class Target:
    """A parser. file: the name of the damaged file in a folder, which `make` fills with valid ones.

    read: reads that file; also uses what it holds as far as a command would before it computes.
    weight: how many files of a run in CI it gets, compared with others.
    needs: the libraries without which it refuses every file.
    """

    name: str
    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    more: Callable[[], tuple[bytes, ...]] = tuple
    weight: float = 1.0
    needs: tuple[str, ...] = ()

    @cached_property
    def valid(self) -> tuple[bytes, ...]:
        """The contents of valid files."""
        with tempfile.TemporaryDirectory() as name:
            self.make(Path(name))
            return ((Path(name) / self.file).read_bytes(), *self.more())

    def put(self, folder: Path, data: bytes) -> None:
        if not (folder / ".made").exists():
            self.make(folder)
            (folder / ".made").touch()
        (folder / f"{self.file}-journal").unlink(missing_ok=True)
        (folder / self.file).write_bytes(data)

    def get(self, folder: Path) -> bytes:
        return (folder / self.file).read_bytes()


@cache
def weights() -> Weights:
    return load_weights("synthetic", tiny())


def exported(format: str) -> Callable[[Path], object]:
    return lambda folder: export_weights(
        folder / "w", weights(), tiny(), format=format, overwrite=True
    )


def alone(format: str) -> Callable[[Path], object]:
    """A maker of exports without the manifest, whose hashes would refuse every change."""

    def make(folder: Path) -> None:
        exported(format)(folder)
        (folder / "w.json").unlink()

    return make


def state(old: bool = False) -> bytes:
    import torch

    stream = io.BytesIO()
    tensors = {name: torch.tensor(array) for name, array in weights().items()}
    torch.save(tensors, stream, _use_new_zipfile_serialization=not old)
    return stream.getvalue()


def dump(folder: Path) -> None:
    if not (folder / "d").exists():
        write_dump(folder / "d", NumpyBackend(), tiny(), weights(), seeded(tiny()))


def use_dump(folder: Path) -> None:
    found = read_dump(folder / "d")
    str(found)
    for file in found.checkpoints:
        found.read(file.name)


def fixture(folder: Path) -> None:
    if not (folder / "f").exists():
        make_fixture(2, weights(), folder / "f", network_name="tiny", reference=NumpyBackend())


def use_fixture(folder: Path) -> None:
    found = read_fixture(folder / "f")
    found.read_input()
    found.read_expected()


CONV = Problem(Conv2d(3, 8, (3, 3), (2, 1), (1, 1), True, False, True), ((2, 3, 9, 7),))
POOL = Problem(
    ConvMaxPool(
        Conv2d(3, 8, (7, 7), (2, 2), (3, 3), True, False, True), MaxPool2d((3, 3), (2, 2), (1, 1))
    ),
    ((1, 3, 32, 32),),
)
FINDINGS = (
    Finding(
        "bound",
        "numpy",
        "numpy/conv2d/im2col/fp32",
        CONV,
        "normal",
        7,
        "off",
        (0, 1, 2, 3),
        1.0,
        2.0,
        0.5,
        {"rounding": "normal", "light": False, "variant": 0},
    ),
    Finding(
        "crash",
        "numpy",
        "numpy/conv_maxpool/im2col/fp32",
        POOL,
        "none",
        0,
        "died",
        details={SILENCE: 60.0},
    ),
    NetworkRun("tiny", "synthetic", "fp32", "all", 2, 0).finding("runs", "numpy", "raised"),
    Finding(
        "coverage",
        "numpy",
        "numpy/linear/gemm/fp32",
        Problem(Linear(8, 4), ((2, 8),)),
        "none",
        0,
        "idle",
        details={
            CHOICE: "numpy/linear/gemm/fp32/1",
            "profile": "quick",
            "network": "tiny",
            "batches": [1, 2],
        },
    ),
)


def findings() -> tuple[bytes, ...]:
    return tuple(json.dumps(one.to_json(), indent=1).encode() for one in FINDINGS)


def use_finding(folder: Path) -> None:
    found = load(folder / "f.json")
    found.describe("f.json")
    json.dumps(found.to_json())


def journal(folder: Path) -> None:
    path = folder / "t.csv.journal"
    path.unlink(missing_ok=True)
    with open_journal(path, IDENTITY, lambda: {"bound": 0.25}) as found:
        for place, row in enumerate(ROWS * 3):
            changed = Row(f"{place} {row.file}", *(getattr(row, n) for n in row.__slots__[1:]))
            found.append(BatchRows((changed,), Times(1.5, 3.0)))


def values() -> tuple[bytes, ...]:
    """Journals with sound pages and a changed value, so that rows are read at all."""
    made = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t.csv.journal"
        for column, table, value in (
            *(
                ("image", "images", text)
                for text in ("[]", "{}", "null", '{"file": 1}', "[" * 9999)
            ),
            *(("file", "images", text) for text in ("1", "[1]", '"x"')),
            *(("facts", "about", text) for text in ("[]", "1", '{"bound": "x"}')),
            *(("backend_ms", "times", text) for text in ("x", -1.0, float("inf"))),
            ("identity", "about", "[1]"),
        ):
            journal(Path(name))
            with closing(sqlite3.connect(path)) as database:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,))
                database.commit()
            made.append(path.read_bytes())
    return tuple(made)


def use_journal(folder: Path) -> None:
    never = {"bound": 0.25}
    with open_journal(folder / "t.csv.journal", IDENTITY, lambda: never) as found:
        bound = found.facts.get("bound")
        summarise(list(found.rows.values()), found.times, bound)
        for row in found.rows.values():
            record(row, bound)


def use_salvage(folder: Path) -> None:
    """Rename a damaged journal and put another in its place; both are removed for the next file."""
    path = folder / "t.csv.journal"
    try:
        salvage_journal(path, IDENTITY)
        use_journal(folder)
    finally:
        for made in folder.glob("t.csv.journal.*"):
            made.unlink()


def photographs(folder: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(folder / name)


def labels(name: str, text: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        photographs(folder)
        (folder / name).write_text(text)

    return make


def use_labels(name: str) -> Callable[[Path], object]:
    return lambda folder: find_images(folder, 10, folder / name).sha256


def table(name: str) -> Callable[[Path], object]:
    return lambda folder: write_table(folder / name, ROWS, 0.25, {"identity": IDENTITY})


def shipped_records() -> tuple[bytes, ...]:
    small = [json.dumps(whole({"record": kind})).encode() for kind in KINDS]
    return (*small, (ROOT / "exports/records/ceilings-amd-epyc-avx-512.json").read_bytes())


def use_record(folder: Path) -> None:
    path = folder / "r.json"
    try:
        kind = KINDS[json.loads(path.read_bytes())["record"]]
    except Exception:
        kind = KINDS["bench"]
    records.load(path, kind)


def tuned(folder: Path) -> None:
    choices = {"fp32": {str(CONV): {1: Timing("a/b", 1.5), 8: Timing("a/c", 2.5)}}}
    Table("device", choices).write(folder / "t.json")


def images() -> tuple[bytes, ...]:
    made = []
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (24, 20, 3), np.uint8), "RGB")
    formats = ["JPEG", "GIF", "BMP", "TIFF", "PPM"] + ["WEBP"] * features.check("webp")
    for format in formats:
        stream = io.BytesIO()
        image.save(stream, format)
        made.append(stream.getvalue())
    return tuple(made)


def manifest(folder: Path) -> None:
    shutil.rmtree(folder / "w", ignore_errors=True)
    exported("bin")(folder)


def quantised(folder: Path) -> None:
    shutil.rmtree(folder / "q", ignore_errors=True)
    export_weights(folder / "q", quantised_weights(4), tiny())


def use_quantised(folder: Path) -> None:
    """Read quantised weights, also with a digest that matches the damage, as an attacker would."""
    path = folder / "q" / "manifest.json"
    try:
        load_weights(folder / "q", tiny())
    except ManifestError as error:
        stated = re.search(r"quant\.sha256 is \w{16}…, and the block has (\w{16})…", str(error))
        if stated is None:
            raise
        data = json.loads(path.read_bytes())
        data["quant"]["sha256"] = sealed(data["quant"])
        path.write_text(json.dumps(data))
        load_weights(folder / "q", tiny())


def qdq(bits: int = 8) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        return write_qdq(Path(name) / "m.onnx", tiny(), quantised_weights(bits)).read_bytes()


XFAILS = """\
[[xfail]]
test = "test_kernel[mine/conv2d/*]"
reason = "subnormals are flushed"
link = "https://example.org/issues/7"
"""
REASONS = {
    "mine": [
        {"reason": "r", "file": "a.py", "scope": "f", "line": "if a:", "to": "return b"},
        {"reason": "r", "function": "tiled<4>"},
    ],
    "other": [],
}
ACCEPTED = {
    "mine": [{"reason": "r", "function": "f T=1", "rule": "proxy-fence", "message": "m 'st.x'"}],
    "other": [],
}

SMALL = Preprocess.for_image_size(32)

TARGETS = (
    Target("npz", "w.npz", alone("npz"), lambda f: load_weights(f / "w.npz", tiny()), weight=0.4),
    Target(
        "safetensors",
        "w.safetensors",
        alone("safetensors"),
        lambda f: load_weights(f / "w.safetensors", tiny()),
        weight=0.5,
        needs=("safetensors",),
    ),
    Target(
        "pth",
        "w.pth",
        lambda f: (f / "w.pth").write_bytes(state()),
        lambda f: load_weights(f / "w.pth", tiny()),
        lambda: (state(old=True),),
        weight=0.3,
        needs=("torch",),
    ),
    Target(
        "sidecar",
        "w.json",
        exported("npz"),
        lambda f: load_weights(f / "w.npz", tiny()),
        weight=0.4,
    ),
    Target(
        "manifest", "w/manifest.json", manifest, lambda f: load_weights(f / "w", tiny()), weight=0.4
    ),
    Target(
        "tensor", "w/fc.weight.bin", manifest, lambda f: load_weights(f / "w", tiny()), weight=0.2
    ),
    Target("quantised manifest", "q/manifest.json", quantised, use_quantised),
    Target("integers", "q/fc.int_weight.bin", quantised, use_quantised, weight=0.2),
    Target("dump", "d/manifest.json", dump, use_dump, weight=0.5),
    Target("fixture", "f/fixture.json", fixture, use_fixture),
    Target(
        "finding",
        "f.json",
        lambda f: (f / "f.json").write_bytes(findings()[0]),
        use_finding,
        findings,
        2,
    ),
    Target("journal", "t.csv.journal", journal, use_journal, values, weight=0.3),
    Target("salvage", "t.csv.journal", journal, use_salvage, values, weight=0.3),
    Target(
        "csv labels",
        "l.csv",
        labels("l.csv", "file,label\na.png,1\nb.png,2\n"),
        use_labels("l.csv"),
        weight=2,
    ),
    Target(
        "text labels", "l.txt", labels("l.txt", "a.png 1\nb.png 2\n"), use_labels("l.txt"), weight=2
    ),
    Target("table", "t.csv", table("t.csv"), lambda f: read_table(f / "t.csv")),
    Target(
        "parquet",
        "t.parquet",
        table("t.parquet"),
        lambda f: read_table(f / "t.parquet"),
        weight=0.5,
        needs=("pyarrow",),
    ),
    Target(
        "record",
        "r.json",
        lambda f: (f / "r.json").write_bytes(shipped_records()[0]),
        use_record,
        shipped_records,
        2,
    ),
    Target(
        "tuned", "t.json", tuned, lambda f: read_tuned(f / "t.json").best(CONV, "fp32"), weight=2
    ),
    Target(
        "image",
        "i.png",
        lambda f: Image.new("RGB", (9, 7)).save(f / "i.png"),
        lambda f: preprocess_image(f / "i.png", SMALL),
        images,
    ),
    Target(
        "raw images",
        "i.raw",
        lambda f: np.ones(tiny().input_shape, "<f4").tofile(f / "i.raw"),
        lambda f: raw_file(f / "i.raw", tiny().input_shape),
        weight=0.2,
    ),
    Target(
        "QDQ model",
        "m.onnx",
        lambda f: (f / "m.onnx").write_bytes(qdq()),
        lambda f: read_qdq(f / "m.onnx", tiny()),
        lambda: (qdq(4),),
        weight=0.4,
        needs=("onnx",),
    ),
    Target(
        "expected failures",
        "x.toml",
        lambda f: (f / "x.toml").write_text(XFAILS),
        lambda f: [str(one) for one in load_expected(f / "x.toml")],
    ),
    Target(
        "reasons",
        "r.json",
        lambda f: (f / "r.json").write_text(json.dumps(REASONS)),
        lambda f: [str(one) for one in Reasons.of("mine", f / "r.json").entries],
    ),
    Target(
        "accepted violations",
        "a.json",
        lambda f: (f / "a.json").write_text(json.dumps(ACCEPTED)),
        lambda f: [str(one) for one in Accepted.of("mine", f / "a.json").entries],
    ),
)
"""The parsers: of weights, models, dumps, findings, evaluations, records, images and lists."""
