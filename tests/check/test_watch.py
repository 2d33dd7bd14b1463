"""What the oracle compares after each call: where the objects are that its names are bound to."""

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
