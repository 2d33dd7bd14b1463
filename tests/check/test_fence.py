"""Fences: a touch outside a buffer is seen, on either side and however far, and nothing else is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import mutation_toy
from faults import Backend
from faults.conv import linear
from faults.fault import kernel
from r18.backend import Array
from r18.backend.host import HostKernel
from r18.graph.ops import Linear, Problem
from r18_oracle.cases import Case
from r18_oracle.check import fence
from r18_oracle.check.call import Prepared
from r18_oracle.generate.inputs import make_case

Arrays = tuple[Array, ...]

pytestmark = pytest.mark.skipif(
    not fence.fences_hold(), reason="this system does not tell what memory was touched"
)


def read(address: int) -> None:
    ctypes.string_at(address, 1)


def write(address: int) -> None:
    ctypes.memset(address, 0, 1)


@pytest.mark.parametrize("nbytes", [0, 1, 64, 100, 4096, 5000, 3 << 20])
def test_what_lies_between_fences_may_be_used(nbytes: int) -> None:
    fenced = fence.Fenced(nbytes, 64)
    assert (fenced.array.nbytes, fenced.array.ctypes.data % 64) == (nbytes, 0)
    fenced.array[...] = 7
    assert fenced.array.sum(dtype=np.int64) == 7 * nbytes
    assert fenced.touched() is None


@pytest.mark.parametrize("touch", [read, write])
@pytest.mark.parametrize("far", [0, 1, fence.FENCE_NBYTES - 1])
def test_a_touch_is_seen_on_either_side(touch: Callable[[int], None], far: int) -> None:
    past, before = fence.Fenced(8192, 64), fence.Fenced(8192, 64)
    touch(past.array.ctypes.data + 8192 + far)
    touch(before.array.ctypes.data - 1 - far)
    assert (past.touched(), before.touched()) == ("past the end", "before the beginning")


def test_what_alignment_adds_is_no_trespass() -> None:
    fenced = fence.Fenced(100, 64)
    read(fenced.array.ctypes.data + 127)
    assert fenced.touched() is None
    read(fenced.array.ctypes.data + 128)
    assert fenced.touched() == "past the end"


def looking(at: Callable[[Array, Arrays, Array, Array], int]) -> HostKernel:
    """A right Linear that also reads the byte at an address that `at` computes from (x, weights,
    out, workspace)."""

    def run(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        linear(op, inputs, weights, out, workspace)
        read(at(inputs[0], weights, out, workspace))

    plain = kernel("fault", Linear, "looking", run)
    return replace(plain, scratch=lambda problem: 4096)


def after(array: Array) -> int:
    return array.ctypes.data + array.nbytes


def trespass(one: HostKernel, case: Case) -> str | None:
    backend = Backend()
    return fence.trespass(backend, one, case, Prepared.of(backend.memory, one, case))


@pytest.mark.parametrize(
    ("at", "seen"),
    [
        (lambda x, w, out, space: after(x) - 1, None),
        (lambda x, w, out, space: after(x), "past the end of the input 0"),
        (lambda x, w, out, space: x.ctypes.data - 5000, "before the beginning of the input 0"),
        (lambda x, w, out, space: after(w[0]), "past the end of the prepared weight 0"),
        (lambda x, w, out, space: after(w[1]), "past the end of the prepared weight 1"),
        (lambda x, w, out, space: after(out), "past the end of the output"),
        (lambda x, w, out, space: after(space), "past the end of the workspace"),
    ],
)
def test_every_buffer_of_a_call_is_fenced(
    at: Callable[[Array, Arrays, Array, Array], int], seen: str | None
) -> None:
    wrong = looking(at)
    case = make_case(wrong, Problem(Linear(16, 32), ((2, 16),)), "normal", 0)
    found = trespass(wrong, case)
    assert found == (None if seen is None else f"touched memory {seen} buffer")


def test_only_memory_of_the_host_is_fenced() -> None:
    backend = mutation_toy.Backend()
    assert fence.fenceable(backend)
    backend.memory = object()  # type: ignore[assignment]
    assert not fence.fenceable(backend)


def test_a_kernel_is_given_what_it_is_given_elsewhere() -> None:
    """With fences a kernel gets the same inputs, and its weights in its own packed form."""
    got: list[Arrays] = []

    def run(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        assert not any(weight.flags.writeable for weight in weights)
        got.append((inputs[0].copy(), *(weight.copy() for weight in weights)))
        linear(op, inputs, (weights[0].T, weights[1]), out, workspace)

    turned = replace(
        kernel("fault", Linear, "turned", run),
        pack=lambda op, weights: (np.ascontiguousarray(weights[0].T), weights[1]),
    )
    case = make_case(turned, Problem(Linear(3, 5), ((2, 3),)), "normal", 0)
    assert trespass(turned, case) is None
    ((x, w, bias),) = got
    np.testing.assert_array_equal(x, case.inputs[0])
    np.testing.assert_array_equal(w, case.weights[0].T)
    np.testing.assert_array_equal(bias, case.weights[1])
