"""The oracle's check after each call: its names still refer to the same objects."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from r18_oracle.check import watch


class Sly:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_addresses_are_those_of_the_objects(count: int) -> None:
    objects = tuple([Sly(), *vars(np).values(), *range(1000)][:count])
    expected = b"".join(id(found).to_bytes(watch._POINTER, sys.byteorder) for found in objects)
    assert watch._by_numpy(objects) == expected
    if sys.implementation.name == "cpython":
        assert watch._references is watch._by_layout
        assert watch._by_layout(objects) == expected


def test_an_object_that_equals_everything_is_another_one() -> None:
    before, after = (Sly(), 1), (Sly(), 1)
    assert before == after
    assert watch._references(before) != watch._references(after)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="CPython 3.13 has no version tags")
def test_a_replaced_name_changes_the_version_of_its_dictionary() -> None:
    assert watch.HAS_TAGS
    before = watch.Process.now()
    versions = before.bindings.versions()
    assert versions == before.bindings.versions() != []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "add", np.subtract)
        assert before.bindings.versions() != versions
        assert before.change() == "replaced add in numpy"
    assert before.change() is None


def test_without_versions_the_addresses_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HAS_TAGS", False)
    monkeypatch.setattr(watch, "_latest", [])
    before = watch.Process.now()
    assert before.versions == before.bindings.versions() == []
    monkeypatch.setattr(np, "add", np.subtract)
    assert before.change() == "replaced add in numpy"
