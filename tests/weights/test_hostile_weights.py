"""Files of weights made to fool a reader, or to fill the memory, are refused with a message."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r18 import files
from r18.errors import WeightsError
from r18.graph.resnet import tiny
from r18.weights import Weights, export_weights, load_weights
from support import output_of


@pytest.fixture
def npz(tmp_path: Path, weights: Weights) -> Path:
    np.savez(tmp_path / "w.npz", **weights)
    return tmp_path / "w.npz"


@pytest.fixture
def pth(tmp_path: Path, weights: Weights) -> Path:
    torch.save({name: torch.tensor(array) for name, array in weights.items()}, tmp_path / "w.pth")
    return tmp_path / "w.pth"


def refused(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        load_weights(path, tiny())
    return str(caught.value)


@contextmanager
def little_memory(limit: int = 200 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# -- .npz ----------------------------------------------------------------------------------------


def rewritten(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Rewrite one member of an archive, with a matching checksum."""
    with zipfile.ZipFile(path) as archive:
        held = {info.filename: archive.read(info) for info in archive.infolist()}
    held[name] = change(held[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in held.items():
            archive.writestr(member, content)


def member(path: Path, name: str) -> int:
    """The offset of a member's array in an uncompressed archive."""
    data = path.read_bytes()
    return data.index(b"\x93NUMPY", data.index(name.encode()))


@pytest.mark.parametrize("place", [8, 200])
def test_a_flipped_bit_of_an_array_is_found(npz: Path, place: int) -> None:
    """A flipped bit is found in a value, and in the header's length, which would move values."""
    data = bytearray(npz.read_bytes())
    data[member(npz, "fc.weight.npy") + place] ^= 4
    npz.write_bytes(data)
    assert "damaged" in refused(npz)


def test_a_longer_header_is_found_though_the_checksum_fits(npz: Path) -> None:
    """A longer header, whose blanks replace a value, is found although the checksum matches."""

    def moved(data: bytes) -> bytes:
        data = data[:8] + struct.pack("<H", struct.unpack("<H", data[8:10])[0] + 4) + data[10:]
        return data[:127] + b"    " + data[127:128] + data[132:]  # the first value is gone

    rewritten(npz, "fc.weight.npy", moved)
    assert "'fc.weight.npy' is damaged: it ends after" in refused(npz)


def test_what_follows_an_array_is_refused(npz: Path) -> None:
    rewritten(npz, "fc.weight.npy", lambda data: data + b"\0\0\0\0")
    assert "'fc.weight.npy' is damaged: more follows its" in refused(npz)


def test_a_header_of_gigabytes_is_not_read(npz: Path) -> None:
    size = 60 << 20
    long = b"\x93NUMPY\x02\x00" + struct.pack("<I", size) + b" " * size
    rewritten(npz, "fc.weight.npy", lambda _: long)
    with little_memory(30 << 20):
        assert "a header of 62,914,560 bytes" in refused(npz)


def test_an_archive_of_a_million_names_is_not_listed(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", b"")
    entry = stream.getvalue()
    (tmp_path / "w.npz").write_bytes(entry[:31] + entry[31:78] * 1_000_000 + entry[78:])
    with little_memory(100 << 20):
        assert "1,000,000 members" in refused(tmp_path / "w.npz")


ONCE = """
import os
from pathlib import Path
from r18 import files
from r18.graph.resnet import tiny
from r18.weights import export_weights, load_weights
path, weights = Path({path!r}), load_weights("synthetic", tiny())
if path.suffix == ".pth":
    import torch
    torch.save({{name: torch.tensor(array) for name, array in weights.items()}}, path)
else:
    export_weights(path, weights, tiny(), format=path.suffix[1:])
    path.with_suffix(".json").unlink()
opened, reads, plain, real = [], [], os.open, files.read_all
def watched(name, *arguments, **others):
    opened.append(str(name))
    return plain(name, *arguments, **others)
def swapped(stream):
    data = real(stream)
    reads.append(path)
    path.write_bytes(b"something else")
    return data
os.open, files.read_all = watched, swapped
print(load_weights(path, tiny()) == weights, opened.count(str(path)), len(reads))
"""


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pth"])
def test_a_file_is_opened_once(suffix: str, tmp_path: Path) -> None:
    """A file is opened once, so it cannot be swapped between check and read."""
    assert output_of(ONCE.format(path=str(tmp_path / f"w.{suffix}"))) == "True 1 1"


# -- .pth ----------------------------------------------------------------------------------------


def test_a_flipped_bit_of_a_checkpoint_is_found(pth: Path) -> None:
    data = bytearray(pth.read_bytes())
    data[data.index(b"data/3") + 200] ^= 1
    pth.write_bytes(data)
    assert "Bad CRC-32" in refused(pth)


class Copies:
    """A megabyte of text that is encoded again and again: a short pickle fills any memory."""

    def __reduce__(self) -> Any:
        import _codecs

        return _codecs.encode, ("x" * (1 << 20), "latin1")


def bomb(path: Path, pickled: bytes, old: bool) -> None:
    if old:
        head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}))
        path.write_bytes(head + pickled + pickle.dumps([], 2))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3")


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_that_copies_is_refused(tmp_path: Path, old: bool) -> None:
    once = b"h\x00X\x06\x00\x00\x00latin1\x86R"
    text = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
    start = b"\x80\x02c_codecs\nencode\nq\x010" + text + b"q\x000]"
    bomb(tmp_path / "w.pth", start + b"(" + (b"h\x01" + once) * 20_000 + b"e.", old)
    with little_memory():
        assert "its pickle copies more than any state_dict holds" in refused(tmp_path / "w.pth")


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_of_many_small_things_is_refused(
    tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small objects are refused: a dictionary takes 64 bytes, and one byte of a pickle."""
    monkeypatch.setattr("r18.weights.pickles.MOST_PICKLED", 1 << 16)
    bomb(tmp_path / "w.pth", b"\x80\x02(" + b"}" * (4 << 20) + b"l.", old)
    with little_memory(20 << 20):
        assert "its pickle has more than 65,536 bytes" in refused(tmp_path / "w.pth")


def test_a_memo_of_gigabytes_is_not_allocated(tmp_path: Path) -> None:
    bomb(tmp_path / "w.pth", b"\x80\x02]r\xff\xff\xff\x0f.", False)
    with little_memory(20 << 20):
        assert "holds a list, expected a state_dict" in refused(tmp_path / "w.pth")


def test_compressed_members_are_refused(pth: Path) -> None:
    with zipfile.ZipFile(pth) as archive:
        held = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(pth, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    assert "is compressed, as PyTorch never does" in refused(pth)


# -- what is no file -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".pth", ".safetensors"])
def test_devices_pipes_and_sparse_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.symlink_to("/dev/zero")
    assert "not a regular file, but a device" in refused(path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file, but a FIFO" in refused(path)
    path.unlink()
    with path.open("wb") as stream:
        stream.truncate(files.WEIGHTS_LIMIT + 1)
    assert "bytes are too many" in refused(path)


@pytest.mark.parametrize("what", ["fifo", "device"])
def test_a_sidecar_is_a_regular_file(what: str, tmp_path: Path, weights: Weights) -> None:
    path = export_weights(tmp_path / "w.npz", weights, tiny(), format="npz")
    sidecar = path.with_suffix(".json")
    sidecar.unlink()
    if what == "fifo":
        os.mkfifo(sidecar)
    else:
        sidecar.symlink_to("/dev/zero")
    assert "not a regular file" in refused(path)
