"""PyTorch's files read without PyTorch: equal to PyTorch's reading, and left to it otherwise."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r18.errors import WeightsError
from r18.graph.resnet import tiny
from r18.weights import Weights, load_weights
from r18.weights.state_dicts import _Storage, _tensor, read_plain
from r18.weights.tensors import Tensor
from support import output_of
from test_imports import BLOCK

PATH = Path("w.pth")
OLD = {"_use_new_zipfile_serialization": False}
each_format = pytest.mark.parametrize("options", [{}, OLD], ids=["archive", "old"])


def saved(content: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def same(found: dict[str, Any], content: dict[str, Any]) -> None:
    assert list(found) == list(content)
    for name, value in content.items():
        read = found[name]
        if isinstance(value, dict):
            same(read, value)
        elif isinstance(value, torch.Tensor):
            assert isinstance(read, Tensor)
            assert (read.dtype, read.shape) == (str(value.dtype)[6:], tuple(value.shape))
            if value.dtype is not torch.bfloat16:  # NumPy has none, and no schedule takes it
                assert read.read().tobytes() == value.detach().numpy().tobytes()
        else:
            assert read == value


@each_format
def test_tensors_of_every_format_and_shape(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    content: dict[str, Any] = OrderedDict(
        (f"{dtype}.{len(shape)}", torch.tensor(rng.normal(size=shape) * 9).to(dtype))
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
        for shape in ((), (0,), (5,), (3, 1, 2), (2, 3, 1, 4))
    )
    content["module.parameter"] = torch.nn.Parameter(torch.ones(2, 3))
    content["nested"] = {"epoch": 3, "name": "a", "lr": 0.5, "best": torch.arange(4)}
    found = read_plain(PATH, saved(content, **options))
    assert found is not None
    same(found, content)


@each_format
def test_tensors_that_share_a_storage(options: dict[str, Any]) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    content = {"whole": whole, "rows": whole[1:3], "one": whole[2, 3], "narrow": whole[:, :1][:1]}
    found = read_plain(PATH, saved(content, **options))
    assert found is not None
    same(found, content)


@each_format
def test_a_model_s_own_state_dict(options: dict[str, Any]) -> None:
    """A model's own state dict is read, with its modules' versions, which are no values."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    found = read_plain(PATH, saved(model.state_dict(), **options))
    assert found is not None
    same(found, dict(model.state_dict()))


@each_format
@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(1)],
        {1: torch.ones(1)},
        {"a": None},
        {"a": [torch.ones(1)]},
        {"a": torch.ones(2, 3).t()},
        {"a": torch.ones(1).expand(3)},
        {"a": torch.ones(4)[::2]},
        {"a": torch.ones(2, dtype=torch.uint8)},
        {"a": torch.ones(2, dtype=torch.complex64)},
        {"a": torch.ones(2).to_sparse()},
        {"a": torch.ones(2, device="meta")},
        {"a": torch.Size([1])},
        {"a": {"b": torch.float32}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_what_is_left_to_pytorch(content: object, options: dict[str, Any]) -> None:
    assert read_plain(PATH, saved(content, **options)) is None


def test_where_a_tensor_was_does_not_matter() -> None:
    content = {"a": torch.arange(6, dtype=torch.float32)}

    def moved(pickled: bytes) -> bytes:
        assert pickled.count(b"\x03\x00\x00\x00cpu") == 1
        return pickled.replace(b"\x03\x00\x00\x00cpu", b"\x06\x00\x00\x00cuda:3")

    found = read_plain(PATH, rewritten(saved(content), "data.pkl", moved))
    assert found is not None
    same(found, content)
    elsewhere = rewritten(saved(content), "data.pkl", lambda p: p.replace(b"\x00cpu", b"\x00xyz"))
    assert read_plain(PATH, elsewhere) is None


def rewritten(data: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with one member changed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(stream, "w") as after:
        changed = 0
        for member in before.infolist():
            content = before.read(member)
            if member.filename.partition("/")[2] == name:
                content, changed = change(content), changed + 1
            after.writestr(member.filename, content)
    assert changed == 1
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("data/0", lambda content: content[:-4]),
        ("data/0", lambda content: content + b"\0\0\0\0"),
        ("byteorder", lambda content: b"big"),
        ("data.pkl", lambda content: content[:-20]),
        ("data.pkl", lambda content: content.replace(b"FloatStorage", b"DoubleStorage")),
        # The count of the storage, the offset, and an extent of the tensor.
        ("data.pkl", lambda content: content.replace(b"K\x18t", b"K\x19t")),
        ("data.pkl", lambda content: content.replace(b"QK\x00K\x04", b"QK\x01K\x04")),
        ("data.pkl", lambda content: content.replace(b"QK\x00K\x04", b"QK\x00K\x05")),
    ],
)
def test_values_that_are_not_there_are_not_read(
    name: str, change: Callable[[bytes], bytes]
) -> None:
    data = saved({"a": torch.arange(24, dtype=torch.float32).reshape(4, 6)})
    assert read_plain(PATH, data) is not None
    damaged = rewritten(data, name, change)
    assert damaged != rewritten(data, name, lambda content: content)
    assert read_plain(PATH, damaged) is None


def test_damaged_values_are_told_when_they_are_read() -> None:
    data = saved({"a": torch.arange(24, dtype=torch.float32), "b": torch.ones(3)})
    values = np.arange(24, dtype=np.float32).tobytes()
    assert data.count(values) == 1
    found = read_plain(PATH, data.replace(values, values[:-1] + b"\x42"))
    assert found is not None
    assert found["b"].read().tolist() == [1, 1, 1]
    with pytest.raises(WeightsError, match=r"weights 'w.pth': '\w+/data/0' is damaged: Bad CRC-32"):
        found["a"].read()


def test_a_name_in_the_file_does_not_fill_the_message() -> None:
    """A local header with a name of 5,000 bytes, values included, does not fill the message."""
    data = saved({"a": torch.zeros(2000)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (start,) = (i.header_offset for i in archive.infolist() if i.filename.endswith("data/0"))
    longer = data[: start + 26] + (5000).to_bytes(2, "little") + data[start + 28 :]
    found = read_plain(PATH, longer)
    assert found is not None
    with pytest.raises(WeightsError, match=r"'\w+/data/0' is damaged: File name in") as raised:
        found["a"].read()
    assert len(str(raised.value)) < 300


def test_nothing_is_copied_as_often_as_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied as often as a pickle names it: a shape's list, an OrderedDict's pairs."""
    storage = _Storage("float32", 6, bytes)
    assert _tensor(storage, 0, (2, 3), (3, 1)).shape == (2, 3)
    with pytest.raises(ValueError, match="no tuple"):
        _tensor(storage, 0, [2, 3], [3, 1])
    pairs = pickle.dumps([(str(i), i) for i in range(20)], 2)[:-1]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02ccollections\nOrderedDict\n" + pairs + b"\x85R.")
    found = read_plain(PATH, stream.getvalue())
    assert found == {str(i): i for i in range(20)}
    monkeypatch.setattr("r18.weights.pickles.MOST_COPIED", 19)
    assert read_plain(PATH, stream.getvalue()) is None


def test_old_files_that_end_too_early() -> None:
    data = saved({"a": torch.arange(24, dtype=torch.float32), "b": torch.ones(3)}, **OLD)
    assert read_plain(PATH, data) is not None
    for end in range(0, len(data), 7):
        assert read_plain(PATH, data[:end]) is None


@each_format
def test_reading_needs_no_pytorch(
    options: dict[str, Any], tmp_path: Path, weights: Weights
) -> None:
    state = {name: torch.tensor(array) for name, array in weights.items()}
    torch.save(state, tmp_path / "w.pth", **options)
    code = f"""
from r18.graph.resnet import tiny
from r18.weights import load_weights
print(load_weights({str(tmp_path / "w.pth")!r}, tiny()).sha256)
"""
    assert output_of(BLOCK + code) == weights.sha256
    assert load_weights(tmp_path / "w.pth", tiny()) == weights


@each_format
def test_what_needs_pytorch_says_so(options: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3).t()}, tmp_path / "w.pth", **options)
    code = f"""
from r18.errors import WeightsError
from r18.graph.resnet import tiny
from r18.weights import load_weights
try:
    load_weights({str(tmp_path / "w.pth")!r}, tiny())
except WeightsError as error:
    print(error)
"""
    assert output_of(BLOCK + code) == (
        f"weights '{tmp_path / 'w.pth'}': it is no plain state_dict, and reading it needs PyTorch, "
        "which is not installed\n  pip install 'r18[torch]'"
    )
