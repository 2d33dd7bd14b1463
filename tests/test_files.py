"""The one opener, and every reader of a file that somebody names: no FIFO, no device, no end.

The tests also check what messages quote from such files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r18 import records
from r18.backend.tuned import read_table as read_tuned
from r18.errors import DumpError, R18Error, UsageError, plain, show, unknown
from r18.evaluate.journal import open_journal
from r18.evaluate.sources import find_images
from r18.evaluate.tables import read_table
from r18.files import Refused, open_file, read_bytes, read_object
from r18.graph.resnet import tiny
from r18.images.preprocess import preprocess_image
from r18.records.kinds import Evaluate
from r18.weights import load_weights
from r18.weights.manifest import load_manifest
from r18_oracle.cli.fixtures import parse_steps
from r18_oracle.dumps.dumps import _same_names, read_dump
from r18_oracle.dumps.fixtures import read_fixture
from r18_oracle.findings import load as load_finding
from r18_oracle.network.images import raw_file, seeded


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def journal(path: Path) -> None:
    with open_journal(path, {}, dict, restart=True):
        pass


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("w.npz", lambda path: load_weights(path, tiny())),
    "manifest": ("m.json", load_manifest),
    "export": ("manifest.json", lambda path: load_weights(path.parent, tiny())),
    "dump": ("manifest.json", lambda path: read_dump(path.parent)),
    "fixture": ("fixture.json", lambda path: read_fixture(path.parent)),
    "finding": ("f.json", load_finding),
    "record": ("r.json", lambda path: records.load(path, Evaluate)),
    "tuned": ("t.json", read_tuned),
    "labels": ("l.csv", lambda path: find_images(path.parent, 10, path)),
    "table": ("t.csv", read_table),
    "parquet": ("t.parquet", read_table),
    "journal": ("t.csv.journal", journal),
    "image": ("i.png", preprocess_image),
    "raw": ("i.bin", lambda path: raw_file(path, (3, 32, 32))),
}


@pytest.mark.parametrize("make", [a_fifo, a_device, a_folder, a_sparse_file])
@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_regular_file_of_a_sane_size_is_refused(
    kind: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    name, read = READERS[kind]
    make(tmp_path / name)
    with pytest.raises(
        R18Error, match=r"regular file|too many|a folder|no journal|no manif|out of"
    ):
        read(tmp_path / name)
    assert (tmp_path / name).exists()


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(Refused, match=r"5 bytes are too many \(at most 4\)"):
        read_bytes(path, 4)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", 1)
    with pytest.raises(OSError, match="null byte"):
        read_bytes("a\0b", 1)
    with open_file("/proc/self/status", 1000) as stream:  # a regular file, and 0 bytes, it says
        assert stream.read(1)
    with pytest.raises(Refused, match="changed while it was read"):
        read_bytes("/proc/self/status", 1000)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '"\x1b[2J"',
        "[]",
        "\udcff",
    ],
)
def test_json_is_an_object_or_refused_in_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as caught:
        read_object(tmp_path / "f", 1 << 20, UsageError)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


# -- quotes --------------------------------------------------------------------------------------

NASTY = "\x1b[2J\x07\r\x9b\u202e\udcff" + "x" * 10_000


def test_a_quote_is_short_and_obeyed_by_no_terminal() -> None:
    for text in (plain(NASTY), show(NASTY), plain("a\nb"), show([NASTY])):
        assert text.isprintable()
        assert len(text) <= 200
    assert plain("né") == "né"
    assert plain("a\nb") == r"a\nb"
    assert show("a" * 100) == "'" + "a" * 76 + "…" + "a'"
    assert len(plain("\x1b" * 200)) <= 200
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert show(nested) == "a list, deeply nested"


def test_a_message_holds_no_control_characters() -> None:
    assert str(R18Error(NASTY[:20] + "\nnext")) == (
        "\\x1b[2J\\x07\\r\\x9b\\u202e\\udcff" + "x" * 11 + "\nnext"
    )
    message = str(unknown("thing", NASTY, [NASTY, "b"]))
    assert message.replace("\n", "").isprintable()
    assert len(message) < 700
    many = str(unknown("thing", "name", (f"name{index}" for index in range(50_000))))
    assert "and 49000 more" in many


# -- absurd numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["1-99999999999", "2-" + "9" * 5000, "9" * 100])
def test_absurd_steps_are_refused(steps: str) -> None:
    with pytest.raises(UsageError, match="goes beyond the steps, 2-7"):
        parse_steps(steps)


@pytest.mark.parametrize("batch", [10**7, 10**30])
def test_absurd_batches_are_refused(batch: int) -> None:
    from r18.backend import CompileOptions

    with pytest.raises(UsageError, match="ask for fewer images"):
        seeded(tiny(), batch * 10)
    with pytest.raises(UsageError, match="batch must be from 1 to 1,048,576"):
        CompileOptions(batch=batch)


# -- many names ----------------------------------------------------------------------------------


def test_fifty_thousand_names_take_no_quadratic_time(tmp_path: Path) -> None:
    """Resolving fifty thousand names stays fast; pairwise comparison would take minutes."""
    entry = {"shape": [1], "dtype": "float32", "sha256": "0" * 64}
    names = [f"{index:05}" + "x" * 20 for index in range(50_000)]
    head = {"kind": "dump", "version": 1, "byte_order": "little", "kernels": {}}
    head |= dict.fromkeys(("backend", "device", "precision", "fusion", "network"), "x")
    head |= {"weights": {"source": "x", "sha256": "0" * 64}}
    head |= {"input": {"source": "x", "name": "input", "path": "input.bin", **entry}}
    listed = [{"name": name, "path": f"{name}.bin", **entry} for name in names]
    (tmp_path / "manifest.json").write_text(json.dumps(head | {"checkpoints": listed}))
    with pytest.raises(DumpError, match="there is no '00000"):
        read_dump(tmp_path)
    (tmp_path / "manifest.json").write_text(
        json.dumps(head | {"checkpoints": [*listed, listed[0]]})
    )
    with pytest.raises(DumpError, match=r"the checkpoint '00000x*' appears 2 times"):
        read_dump(tmp_path)
    with pytest.raises(DumpError, match="'a' lacks 00001"):
        _same_names(Path("a"), names[:1], Path("b"), [*names, "new"])
    (tmp_path / "l.txt").write_text("".join(f"{name} 1\n" for name in [*names, names[0]]))
    with pytest.raises(UsageError, match="is listed twice"):
        find_images(tmp_path, 10, tmp_path / "l.txt")
