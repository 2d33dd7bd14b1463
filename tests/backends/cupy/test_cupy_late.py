"""The delayed copy by which the oracle checks whether CUDA kernels wait, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import r18_cupy
import r18_cupy.cuda.launch as launching
from cuda_support import ARCHITECTURES, parameters
from r18_cupy.catalogue import all_kernels
from r18_cupy.cuda.compiler import compile_entry
from r18_cupy.cuda.copy_late import BLOCKS, ENTRY, NANOSECONDS, THREADS, late_copy
from r18_cupy.cuda.device import AdoptedBuffer, CupyStream, OverlappingStream
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, X
from r18_oracle.search.campaign import network_problems


def test_it_compiles_for_every_architecture() -> None:
    for target in ARCHITECTURES:
        assert compile_entry(ENTRY, target).resources.spill_nbytes == 0


def test_its_arguments_are_the_functions() -> None:
    x, out, *sizes = late_copy(1000).arguments
    assert (x, out) == (X, OUT)
    declared = parameters(ENTRY)
    assert declared[:2] == ["pointer", "pointer"]
    assert [type(size) for size in sizes] == declared[2:]
    assert sizes == [1000, NANOSECONDS]


def test_it_is_no_overlapping_launch_itself_and_leaves_room_for_the_next() -> None:
    launch = late_copy(1 << 30)
    assert not launch.overlaps
    assert (launch.grid, launch.block) == ((BLOCKS, 1, 1), (THREADS, 1, 1))
    assert launch.shared_nbytes == 0
    largest = max(
        call.block[0]
        for kernel in all_kernels()
        for problem in network_problems("resnet18", (1,))
        if type(problem.op) is kernel.op and kernel.refusal(problem) is None
        for call in kernel.launches(problem)
        if call.overlaps
    )
    blocks = -(-BLOCKS // MULTIPROCESSORS)
    assert largest + blocks * THREADS <= 2048, "threads of a multiprocessor"


def test_a_stream_copies_late_from_one_buffer_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    class Noted:
        def launch(self, launch: GridLaunch, addresses: tuple[int, ...], stream: Any) -> None:
            seen.append((launch, addresses, stream))

    monkeypatch.setattr(launching, "LAUNCHER", Noted())
    cuda = SimpleNamespace(ptr=7)
    assert not CupyStream(cast(Any, cuda)).overlapping
    stream = OverlappingStream(cast(Any, cuda))
    assert stream.overlapping
    stream.copy_late(AdoptedBuffer(4096, 48, None), AdoptedBuffer(8192, 48, None))
    ((launch, addresses, where),) = seen
    assert launch is late_copy(48)
    output, _, source = addresses
    assert (output, source) == (8192, 4096)
    assert where is cuda


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((7, 5), False), ((8, 9), False), ((9, 0), True)]
)
def test_streams_overlap_where_launches_do(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], overlaps: bool
) -> None:
    launcher = SimpleNamespace(device=lambda: 3, capability={3: capability}.__getitem__)
    monkeypatch.setattr(launching, "LAUNCHER", launcher)
    monkeypatch.setattr(r18_cupy, "_cupy", lambda: None)
    monkeypatch.setattr(CupyStream, "__init__", lambda self: None)
    assert r18_cupy.Backend().stream().overlapping is overlaps
