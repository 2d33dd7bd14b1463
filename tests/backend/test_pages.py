"""Host buffers in huge pages: aligned, apart from each other, given back."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from itertools import pairwise

import numpy as np
import pytest

from r18.backend import pages
from r18.backend.host import HostMemory
from r18.backend.pages import HUGE, SHARED, Pages

SIZES = (0, 1, 63, SHARED - 1, SHARED, SHARED + 1, 3 * SHARED, HUGE - 1, HUGE, HUGE + 65)


def test_buffers_are_aligned_writable_and_share_no_byte() -> None:
    made = Pages()
    found = [made.empty(nbytes, 64) for nbytes in SIZES * 3]
    assert [array.nbytes for array in found] == list(SIZES * 3)
    for number, array in enumerate(found):
        assert array.ctypes.data % 64 == 0
        array.fill(number)
    for number, array in enumerate(found):
        assert (array == number).all()
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in found if a.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_large_buffers_begin_huge_pages_and_others_share_them() -> None:
    made = Pages()
    first, second = made.empty(SHARED, 64), made.empty(SHARED, 64)
    assert first.ctypes.data % HUGE == 0
    assert second.ctypes.data == first.ctypes.data + SHARED
    assert made.empty(HUGE, 64).ctypes.data % HUGE == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_a_mapping_is_given_back_with_its_last_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Kept(mmap.mmap):
        def __init__(self, *arguments: int) -> None:
            mappings.append(weakref.ref(self))

    monkeypatch.setattr(pages.mmap, "mmap", Kept)
    made = Pages()
    buffer = made.empty(HUGE, 64)
    made.empty(HUGE, 64)  # the next mapping
    gc.collect()
    assert mappings[0]() is not None
    del buffer
    gc.collect()
    assert mappings[0]() is None


def test_threads_get_buffers_of_their_own() -> None:
    made, found = Pages(), []

    def take() -> None:
        found.extend(made.empty(SHARED, 64) for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({array.ctypes.data for array in found}) == 200


def test_what_no_system_has_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        HostMemory().empty(1 << 60)


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE", raising=False)
    array = Pages().empty(HUGE, 64)
    assert (array.nbytes, array.ctypes.data % 64) == (HUGE, 0)
    assert isinstance(array, np.ndarray)
