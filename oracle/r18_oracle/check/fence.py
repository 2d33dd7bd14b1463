"""Fences: untouched pages next to the buffers of a call, which show reads outside a buffer.

A value that is read past the end of a buffer and not used changes no result; it crashes only where
the memory of the process ends. The operating system makes a page resident when it is first touched,
also by a read, and `mincore` says which pages are resident. If a buffer ends where untouched pages
begin, they show what a call has touched, and no access faults.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from functools import cache
from typing import Any

import numpy as np

from r18.backend import (
    Array,
    Backend,
    Buffer,
    Kernel,
    Launch,
    input_layout,
    upload,
)
from r18.backend.host import HostBuffer, HostMemory, PackedWeight, host
from r18.runtime.arena import aligned
from r18_oracle.cases import Case
from r18_oracle.check.call import Prepared
from r18_oracle.judge.reference import kernel_running

FENCE_NBYTES = 1 << 20
"""The size of a fence, enough for an image read one image too far. It only uses addresses."""


class Fenced:
    """`nbytes` of memory that end where a fence begins, up to alignment.

    The other fence ends up to a page before them.
    """

    def __init__(self, nbytes: int, alignment: int) -> None:
        size = aligned(nbytes, alignment)
        self._inside = aligned(size, mmap.PAGESIZE)
        self._map = mmap.mmap(-1, FENCE_NBYTES + self._inside + FENCE_NBYTES)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # or one touch could bring many pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes: Array = np.frombuffer(self._map, np.uint8)
        start = FENCE_NBYTES + self._inside - size
        self.array = self._bytes[start : start + nbytes]

    def touched(self) -> str | None:
        """The fence that was touched, "before the beginning" or "past the end", or None."""
        begin = self._bytes.ctypes.data
        if _given(begin + FENCE_NBYTES + self._inside):
            return "past the end"
        return "before the beginning" if _given(begin) else None


def _given(address: int) -> bool:
    """Whether any page of the fence at this address is resident."""
    pages = (ctypes.c_ubyte * (FENCE_NBYTES // mmap.PAGESIZE))()
    asked = _mincore()(ctypes.c_void_p(address), ctypes.c_size_t(FENCE_NBYTES), pages)
    if asked != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return bool((np.frombuffer(pages, np.uint8) & 1).any())


@cache
def _mincore() -> Any:
    return ctypes.CDLL(None, use_errno=True).mincore


@cache
def fences_hold() -> bool:
    """Whether `mincore` works on this system; some report every page as resident."""
    try:
        probe = Fenced(1, 1)
        clean = probe.touched() is None
        _ = probe._bytes[-1]
        return clean and probe.touched() == "past the end"
    except (AttributeError, OSError, TypeError):  # no `mincore`, or no library to look it up in
        return False


def fenceable(backend: Backend) -> bool:
    """Whether fences work for a backend: it uses host memory, on a system with `mincore`."""
    return isinstance(backend.memory, HostMemory) and fences_hold()


def trespass(backend: Backend, kernel: Kernel, case: Case, prepared: Prepared) -> str | None:
    """Run the kernel on the case between fences; a sentence about the first fence it touched.

    Prepared weights of types other than those of `r18.backend.host` are not moved.
    """
    problem, fences = prepared.problem, dict[str, Fenced]()

    def buffer(name: str, nbytes: int) -> HostBuffer:
        fences[name] = Fenced(nbytes, HostMemory.alignment)
        return HostBuffer(fences[name].array)

    with kernel_running():
        scratch_nbytes = kernel.workspace(problem)
    inputs = tuple(buffer(f"input {i}", array.nbytes) for i, array in enumerate(case.inputs))
    for array, to in zip(case.inputs, inputs, strict=True):
        upload(backend.memory, array, input_layout(kernel, problem), array.dtype, to)
    weights = tuple(
        _moved(weight, buffer(f"prepared weight {i}", weight.nbytes))
        for i, weight in enumerate(prepared.weights)
    )
    output = buffer("output", math.prod(problem.output) * case.output_dtype.itemsize)
    workspace = buffer("workspace", scratch_nbytes)
    stream = backend.stream()
    with kernel_running():
        Launch(kernel, problem, inputs, weights, output, workspace).enqueue(stream)
        stream.synchronize()
    for name, fence in fences.items():
        if (where := fence.touched()) is not None:
            return f"touched memory {where} of the {name} buffer"
    return None


def _moved(weight: Buffer, to: HostBuffer) -> Buffer:
    """A copy of the weight in other memory, of the same type."""
    if type(weight) not in (HostBuffer, PackedWeight):
        return weight
    to.array[...] = host(weight).array
    if not isinstance(weight, PackedWeight):
        return to
    moved = PackedWeight(to.array)
    moved.packed = to.as_array(weight.packed.shape, weight.packed.dtype)
    moved.packed.flags.writeable = False
    return moved
