"""Tensor maps and overlapping launches without a GPU: the calls to the driver."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from r18.graph.ops import Add, Problem
from r18.graph.precision import FP32
from r18_cupy.bytes.tensor_map import ByteIm2colMap, ByteMap
from r18_cupy.catalogue import kernels_for
from r18_cupy.cuda import launch as launching
from r18_cupy.cuda import tensor_map
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.device import CupyMemory
from r18_cupy.cuda.launch import (
    NULL,
    OUT,
    Buffers,
    GridLaunch,
    Launcher,
    LaunchError,
    Pointer,
    Role,
    X,
)
from r18_cupy.cuda.tensor_map import NBYTES, Im2colMap, MatrixMap, PatchMap, TensorMapError

ADDRESS = 4096


class Told:
    """The driver's types, with calls that are only recorded."""

    def __init__(self, status: str = "CUDA_SUCCESS") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status = getattr(driver.CUresult, status)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("cuTensorMap", "cuLaunch")):
            return getattr(driver, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            return self.status, driver.CUtensorMap()

        return call


def call_of(encoded: Any) -> tuple[str, tuple[Any, ...]]:
    """The call that encodes a map, with plain integers."""
    stand_in = Told()
    encoded.encode(stand_in, ADDRESS)
    ((name, arguments),) = stand_in.calls
    plain = tuple([int(v) for v in a] if isinstance(a, list) else a for a in arguments)
    return name, plain


def test_a_matrix() -> None:
    name, (kind, rank, address, extents, pitches, box, steps, *modes) = call_of(
        MatrixMap(X, "float16", rows=72, columns=640, box_rows=128)
    )
    assert name == "cuTensorMapEncodeTiled"
    assert kind == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    assert (rank, address) == (2, ADDRESS)
    assert (extents, pitches, box, steps) == ([640, 72], [1280], [64, 128], [1, 1])
    assert modes[1] == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B


def test_a_stack_of_matrices() -> None:
    _, (_, rank, _, extents, pitches, box, steps, *_) = call_of(
        MatrixMap(OUT, "float32", rows=49, columns=32, box_rows=7, matrices=5)
    )
    assert rank == 3
    assert (extents, pitches) == ([32, 49, 5], [128, 49 * 128])
    assert (box, steps) == ([32, 7, 1], [1, 1, 1])


def test_a_patch() -> None:
    _, (kind, rank, _, extents, pitches, box, steps, *_) = call_of(
        PatchMap(X, "bfloat16", (2, 64, 11, 13), height=6, width=15)
    )
    assert kind == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert rank == 4
    assert (extents, pitches) == ([64, 13, 11, 2], [128, 13 * 128, 11 * 13 * 128])
    assert (box, steps) == ([64, 15, 6, 1], [1, 1, 1, 1])


def test_pixels_of_windows() -> None:
    """The driver's im2col map has width before height; ours has height first."""
    pixels = Im2colMap(X, "float16", (2, 24, 9, 11), (3, 5), (2, 1), (1, 2), run=64)
    name, (_, rank, _, extents, pitches, lower, upper, channels, run, steps, *_) = call_of(pixels)
    assert name == "cuTensorMapEncodeIm2col"
    assert rank == 4
    assert (extents, pitches) == ([24, 11, 9, 2], [48, 11 * 48, 9 * 11 * 48])
    assert (lower, upper) == ([-2, -1], [2 - 4, 1 - 2])
    assert (channels, run, steps) == (64, 64, [1, 1, 2, 1])


@pytest.mark.parametrize("row", [64, 128])
def test_boxes_of_bytes(row: int) -> None:
    """Extents and boxes are passed innermost first, and the swizzle spans the box's rows."""
    name, (kind, rank, address, extents, pitches, box, steps, *modes) = call_of(
        ByteMap(X, (96, 13, 11, 2), (row, 15, 6, 1))
    )
    assert name == "cuTensorMapEncodeTiled"
    assert kind == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert (rank, address) == (4, ADDRESS)
    assert (extents, pitches) == ([96, 13, 11, 2], [96, 13 * 96, 11 * 13 * 96])
    assert (box, steps) == ([row, 15, 6, 1], [1, 1, 1, 1])
    assert modes == byte_modes(row)


@pytest.mark.parametrize("row", [64, 128])
def test_bytes_of_windows(row: int) -> None:
    """The driver's im2col map of bytes has width before height; ours has height first."""
    pixels = ByteIm2colMap(
        X, "uint8", (2, 48, 9, 11), (3, 5), (2, 1), (1, 2), run=240, channels=row
    )
    name, (kind, rank, address, extents, pitches, lower, upper, channels, run, steps, *modes) = (
        call_of(pixels)
    )
    assert name == "cuTensorMapEncodeIm2col"
    assert kind == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert (rank, address) == (4, ADDRESS)
    assert (extents, pitches) == ([48, 11, 9, 2], [48, 11 * 48, 9 * 11 * 48])
    assert (lower, upper) == ([-2, -1], [2 - 4, 1 - 2])
    assert (channels, run, steps) == (row, 240, [1, 1, 2, 1])
    assert modes == byte_modes(row)
    assert pixels.refusal() is None
    thin = replace(pixels, shape=(2, 24, 9, 11))
    assert thin.refusal() == "pixels of whole 16 bytes, got 24 channels"


def byte_modes(row: int) -> list[Any]:
    """The modes: no interleaving, rows swizzled over their length, zeros outside."""
    swizzles = driver.CUtensorMapSwizzle
    return [
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        {64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B}[row],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ]


def test_a_map_is_an_argument_of_128_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Told()
    monkeypatch.setattr("cuda.bindings.driver", stand_in)
    monkeypatch.setattr(tensor_map, "_encoded", tensor_map._encoded.__wrapped__)
    pixels = ByteIm2colMap(X, "uint8", (1, 64, 4, 4), (1, 1), (1, 1), (0, 0), 16, 64)
    for one in (MatrixMap(X, "float32", 4, 32, 4), ByteMap(X, (64, 4), (64, 4)), pixels):
        argument = one.at(ADDRESS)
        assert (argument.shape, argument.nbytes) == ((1,), NBYTES)


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.bindings.driver", Told("CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(TensorMapError, match="INVALID_VALUE from encoding MatrixMap"):
        MatrixMap(X, "float32", 4, 33, 4).at(ADDRESS)


# -- overlapping launches ----------------------------------------------------------------------


class Loaded(Launcher):
    """A launcher whose functions are already loaded."""

    def device(self) -> int:
        return 0

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        self.digits = capability

    def capability(self, device: int) -> tuple[int, int]:
        return self.digits

    def function(self, entry: Entry) -> Any:
        return SimpleNamespace(ptr=77)


def overlapping(
    monkeypatch: pytest.MonkeyPatch, stand_in: Told, capability: tuple[int, int] = (9, 0)
) -> GridLaunch:
    monkeypatch.setattr("cuda.bindings.driver", stand_in)
    launch = GridLaunch(
        Entry("relayout", "relayout"),
        (3, 2, 1),
        (160, 1, 1),
        (X, Pointer(Role.WEIGHT), np.int32(5)),
        shared_nbytes=1024,
        overlaps=True,
    )
    at = [SimpleNamespace(address=address, nbytes=64) for address in (512, 1024)]
    buffers: Any = Buffers((at[0],), (at[1],), at[0], at[0])
    Loaded(capability).launch(launch, buffers.addresses, SimpleNamespace(ptr=99))
    return launch


def test_an_overlapping_launch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Reading(Told):
        def __getattr__(self, name: str) -> Any:
            if name != "cuLaunchKernelEx":
                return super().__getattr__(name)

            def call(config: Any, function: Any, addresses: int, extra: int) -> tuple[Any]:
                # The arguments live as long as the call.
                places = (ctypes.c_uint64 * 3).from_address(addresses)
                read.append(ctypes.c_uint64.from_address(places[0]).value)
                read.append(ctypes.c_uint64.from_address(places[1]).value)
                read.append(ctypes.c_int32.from_address(places[2]).value)
                self.calls.append((name, (config, function)))
                return (self.status,)

            return call

    stand_in = Reading()
    overlapping(monkeypatch, stand_in)
    assert read == [512, 1024, 5]
    ((_, (config, function)),) = stand_in.calls
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.sharedMemBytes) == (160, 1024)
    assert (int(config.hStream), int(function)) == (99, 77)
    (attribute,) = config.attrs
    assert attribute.value.programmaticStreamSerializationAllowed == 1


@pytest.mark.parametrize(("capability", "count"), [((8, 9), 0), ((9, 0), 1), ((12, 0), 1)])
def test_launches_overlap_where_the_device_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int
) -> None:
    stand_in = Launched()
    overlapping(monkeypatch, stand_in, capability)
    assert [attributes for _, attributes, _ in stand_in.read] == [count]


class Launched(Told):
    """The driver with launches that read what it would read: stream, attributes, addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, int, list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        if name != "cuLaunchKernelEx":
            return super().__getattr__(name)

        def call(config: Any, function: Any, addresses: int, extra: int) -> tuple[Any]:
            places = (ctypes.c_uint64 * 3).from_address(addresses)
            words = [ctypes.c_uint64.from_address(place).value for place in places]
            self.read.append((int(config.hStream), config.numAttrs, words))
            return (self.status,)

        return call


@dataclass(frozen=True)
class Sum:
    """An argument that depends on an address: the address plus 1000."""

    pointer: Pointer
    asked: list[int]

    def at(self, address: int) -> Any:
        self.asked.append(address)
        return np.array([address + 1000], np.uint64)


def test_a_launch_is_worked_out_once_and_follows_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = Launched()
    monkeypatch.setattr("cuda.bindings.driver", stand_in)
    located = Sum(Pointer(Role.WEIGHT, 1), [])
    arguments = (located, Pointer(Role.WORKSPACE, offset=3), np.uint64(7))
    launch = GridLaunch(Entry("relayout", "relayout"), (1, 1, 1), (32, 1, 1), arguments)
    launcher = Loaded()
    for weight, scratch, stream in ((64, 128, 9), (64, 256, 9), (512, 256, 0), (64, 128, 9)):
        at = [SimpleNamespace(address=address, nbytes=64) for address in (0, weight, scratch)]
        buffers: Any = Buffers((at[0],), at[:2], at[0], at[2])
        launcher.launch(launch, buffers.addresses, SimpleNamespace(ptr=stream))
    assert stand_in.read == [
        (9, 0, [1064, 131, 7]),
        (9, 0, [1064, 259, 7]),
        (0, 0, [1512, 259, 7]),
        (9, 0, [1064, 131, 7]),
    ]
    assert located.asked == [64, 512]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collects the threads, and devices, whose context was made current."""
    made: list[tuple[int, int]] = []

    def make_current(device: int) -> None:
        made.append((threading.get_ident(), device))
        launching._threads.ready.add(device)

    monkeypatch.setattr(launching, "_threads", launching._Threads())
    monkeypatch.setattr(launching, "_make_current", make_current)
    return made


@pytest.mark.usefixtures("current")
def test_bound_launches_follow_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound launches follow changed addresses, as they follow buffers; weights stay the same."""
    stand_in = Launched()
    monkeypatch.setattr("cuda.bindings.driver", stand_in)
    located = Sum(Pointer(Role.WEIGHT, 1), [])
    inputs = (X, Pointer(Role.INPUT, 1), Pointer(Role.WEIGHT, 0, 5))
    behind = (located, Pointer(Role.WORKSPACE, offset=3), OUT)
    grid, block = (1, 1, 1), (32, 1, 1)
    launches = [
        GridLaunch(Entry("relayout", "relayout"), grid, block, arguments)
        for arguments in (inputs, behind)
    ]
    launcher = Loaded()
    weights: Any = [SimpleNamespace(address=address) for address in (512, 1024)]
    enqueue = launcher.bind(launches, weights)
    enqueue([16, 32], 64, 128, 9)
    enqueue([48, 32], 64, 0, 0)
    assert stand_in.read == [
        (9, 0, [16, 32, 517]),
        (9, 0, [2024, 131, 64]),
        (0, 0, [48, 32, 517]),
        (0, 0, [2024, 3, 64]),
    ]
    del stand_in.read[:]
    at: Any = [SimpleNamespace(address=address) for address in (16, 32, 64, 128)]
    for launch in launches:
        buffers = Buffers(at[:2], weights, at[2], at[3])
        launcher.launch(launch, buffers.addresses, SimpleNamespace(ptr=9))
    assert stand_in.read == [(9, 0, [16, 32, 517]), (9, 0, [2024, 131, 64])]


@pytest.mark.usefixtures("current")
def test_a_bound_kernel_launches_what_it_enqueues(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Launched()
    monkeypatch.setattr("cuda.bindings.driver", stand_in)
    monkeypatch.setattr(launching, "LAUNCHER", Loaded())
    problem = Problem(Add(relu=True), ((2, 3, 4, 5),) * 2)
    kernel = next(k for k in kernels_for((9, 0)) if k.op is Add and k.precision is FP32)
    kernel.bind(problem, (), CupyMemory())([16, 32], 16, 0, 9)
    at: Any = [SimpleNamespace(address=address) for address in (16, 32, 0)]
    stream: Any = SimpleNamespace(cuda=SimpleNamespace(ptr=9), mark=lambda phase: None)
    kernel.enqueue(problem, tuple(at[:2]), (), at[0], at[2], stream)
    assert stand_in.read == [(9, 0, [16, 32, 16])] * 2


def test_each_thread_has_the_context_before_it_launches(
    monkeypatch: pytest.MonkeyPatch, current: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr("cuda.bindings.driver", Launched())
    launch = GridLaunch(Entry("relayout", "relayout"), (1, 1, 1), (32, 1, 1), (X, OUT, NULL))
    enqueue = Loaded().bind([launch], ())

    def twice() -> None:
        enqueue([16], 32, 0, 9)
        enqueue([16], 32, 0, 9)

    twice()
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert [device for _, device in current] == [0, 0]
    assert len(set(current)) == 2


def test_a_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Told):
        def __getattr__(self, name: str) -> Any:
            if name == "cuLaunchKernelEx":
                return lambda *arguments: (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
            return super().__getattr__(name)

    with pytest.raises(LaunchError, match=r"INVALID_VALUE from launching relayout on \(3, 2, 1\)"):
        overlapping(monkeypatch, Failing())
