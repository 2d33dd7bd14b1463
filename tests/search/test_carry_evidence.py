"""tools/carry_evidence.py: evidence stays where nothing that a device gets has changed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from r18 import records
from r18.errors import UsageError
from r18.records.kinds import Verify
from r18_cupy import Backend
from r18_cupy.ops.elementwise import ReLUKernel
from support import ROOT, tool_module

KERNEL = "cupy/relu/elementwise/fp32"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_module("carry_evidence")


@pytest.fixture(scope="module")
def before(tool: ModuleType) -> dict[str, str]:
    return parts(tool)


def parts(tool: ModuleType) -> dict[str, str]:
    found: dict[str, str] = tool.parts_of(Backend(), request_of(tool))
    return found


def request_of(tool: ModuleType) -> Any:
    return tool.Request(KERNEL, "sm_90", "brief", 0, "resnet18")


def entry_of() -> Any:
    found = records.load_all(ROOT / records.FOLDER, Verify)
    return found["nvidia-h200"].kernels[KERNEL]


def test_the_same_kernel_is_the_same(tool: ModuleType, before: dict[str, str]) -> None:
    assert int(before["problems"]) > 5
    assert parts(tool) == before


CHANGES = {
    "launches": ("launches", lambda made: lambda *args: tuple(grown(one) for one in made(*args))),
    "packed weights": ("pack", lambda made: lambda *args: (*made(*args), np.zeros(1))),
    "machine code": ("machine_code", lambda made: lambda *args: made(*args) + "0"),
}


def grown(launch: Any) -> Any:
    x, y, z = launch.grid
    return replace(launch, grid=(x + 1, y, z))


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen_and_named(
    what: str, tool: ModuleType, before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, changed = CHANGES[what]
    made = getattr(ReLUKernel, name)
    monkeypatch.setattr(ReLUKernel, name, changed(made))
    now = parts(tool)
    assert tool.differences(before, now) == [what]
    entry = replaced(entry_of(), before["digest"])
    with pytest.raises(UsageError, match=f"other {what} than at abc"):
        tool.carried(entry, before, now, "abc")


def replaced(entry: Any, digest: str) -> Any:
    return msgspec.structs.replace(entry, digest=digest)


def test_the_record_gets_the_digest_and_the_revision(
    tool: ModuleType, before: dict[str, str]
) -> None:
    old = {**before, "digest": "old"}
    entry = replaced(entry_of(), "old")
    made = tool.carried(entry, old, before, "abc")
    assert (made.digest, made.carried) == (before["digest"], "abc")
    assert replaced(made, "old").problems == entry.problems


def test_evidence_of_another_revision_is_refused(tool: ModuleType, before: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="does not cover it at abc"):
        tool.carried(replaced(entry_of(), "older"), before, before, "abc")


def test_an_argument_that_cannot_be_compared_is_refused(tool: ModuleType) -> None:
    with pytest.raises(UsageError, match="cannot compare arguments of type object"):
        tool.plain(("x", object()))


def test_a_checkout_that_is_not_imported_is_refused(tool: ModuleType) -> None:
    """Where the packages come from elsewhere, nothing is compared."""
    with pytest.raises(UsageError, match="could not be compared"):
        tool.asked(ROOT / "docs", "cupy", [request_of(tool)])


def test_a_revision_that_is_not_there_is_named(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-revision"):
        tool.carry("no-such-revision", "cupy", KERNEL, tmp_path)


def test_a_name_stands_for_its_commit(tool: ModuleType) -> None:
    """The record keeps the commit: HEAD is another one tomorrow."""
    commit = tool.commit_of("HEAD")
    assert re.fullmatch(r"[0-9a-f]{8,}", commit)
    assert tool.git("rev-parse", "HEAD").startswith(commit)
