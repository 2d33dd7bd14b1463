"""Changing one field of a dump's manifest or one bit of its tensors never passes unnoticed."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from flips import flip_bit, flipped, without
from r18.errors import DumpError
from r18.graph.resnet import tiny
from r18.weights import load_weights
from r18_numpy import Backend
from r18_oracle.dumps.dumps import MANIFEST, diff_dumps, read_dump, write_dump
from r18_oracle.dumps.files import read_tensor
from r18_oracle.network.images import seeded

DESCRIBED = ("backend", "device", "precision", "fusion", "kernels")
"""Fields on how a dump was made, in which two comparable dumps may differ."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dump, and a second one that tests change and restore."""
    folder = tmp_path_factory.mktemp("every_bit")
    for name in ("expected", "got"):
        write_dump(
            folder / name, Backend(), tiny(), load_weights("synthetic", tiny()), seeded(tiny(), 2)
        )
    return folder / "expected", folder / "got"


def looked_at(expected: Path, got: Path) -> Any:
    """Reads a dump in every way; raises `DumpError` for damage."""
    found = read_dump(got)
    assert found.input is not None
    read_tensor(got, found.input)
    assert diff_dumps(expected, got).ok
    return found


def test_every_field_of_a_dumps_manifest_is_looked_at(dumps: tuple[Path, Path]) -> None:
    expected, got = dumps
    path = got / MANIFEST
    text, pristine = path.read_text(), looked_at(expected, got)
    count = 0
    try:
        for where, data in (*flipped(json.loads(text)), *without(json.loads(text))):
            path.write_text(json.dumps(data))
            count += 1
            try:
                found = looked_at(expected, got)
            except DumpError:
                continue
            free = where[0] in DESCRIBED or where[-1] == "source" or where == ("input", "name")
            assert free, f"{where} was changed, and the file was accepted"
            changed = (astuple(found.made), found.input) != (astuple(pristine.made), pristine.input)
            assert changed, f"{where} was changed and does not arrive"
    finally:
        path.write_text(text)
    assert count > 10 * len(pristine.checkpoints)


def test_one_bit_of_every_tensor_of_a_dump_is_noticed(dumps: tuple[Path, Path]) -> None:
    expected, got = dumps
    files = read_dump(got)
    assert files.input is not None
    for file in (files.input, *files.checkpoints):
        for bit in (0, -1):
            flip_bit(got / file.path, bit)
            with pytest.raises(DumpError, match=rf"'{file.path}' has sha256"):
                looked_at(expected, got)
            flip_bit(got / file.path, bit)
    looked_at(expected, got)
