"""Corners: every op has some, they are small, and they are what they are said to be."""

from __future__ import annotations

import pytest

from r18.ops import OPS, Conv2d, MaxPool2d, Op, Relayout
from r18_oracle.campaign import profile
from r18_oracle.corners import corners

QUICK = profile("quick")


def quick(op: type[Op]) -> list[Op]:
    return [p.op for p in corners(op, QUICK.max_elements, QUICK.max_macs)]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_op_has_corners_and_the_quick_profile_has_room_for_them(op: type[Op]) -> None:
    everything = corners(op, 10**9, 10**12)
    assert everything
    assert all(type(problem.op) is op for problem in everything)
    assert len(set(everything)) == len(everything)
    assert corners(op, QUICK.max_elements, QUICK.max_macs) == everything
    assert len(corners(op, 10, 10)) < len(everything)


@pytest.mark.parametrize("op", [Conv2d, MaxPool2d])
def test_windows_whose_axes_differ(op: type[Op]) -> None:
    found = [o for o in quick(op) if isinstance(o, Conv2d | MaxPool2d)]
    for setting in ("kernel_size", "stride", "padding"):
        pairs = [getattr(o, setting) for o in found]
        assert any(h < w for h, w in pairs)
        assert any(h > w for h, w in pairs)
    assert any(s > k for o in found for s, k in zip(o.stride, o.kernel_size, strict=True))


def test_padding_on_one_axis_alone() -> None:
    pads = {o.padding for o in quick(Conv2d) if isinstance(o, Conv2d)}
    assert {(0, 1), (1, 0), (0, 0)} <= pads


def test_every_pair_of_layouts() -> None:
    pairs = {(o.source, o.target) for o in quick(Relayout) if isinstance(o, Relayout)}
    assert len(pairs) == 4
