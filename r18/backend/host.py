"""Memory, streams and kernels for backends that compute on the host, synchronously.

A CPU backend needs only functions over NumPy arrays: `HostKernel` makes a kernel of one. Its
allocator, `HostMemory`, and its stream, `HostStream`, are every backend's defaults.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from r18.backend.device import Array, Buffer, Memory, Stream
from r18.backend.kernel import (
    Kernel,
    RoundingContract,
    input_dtype,
    input_layout,
    output_layout,
)
from r18.graph.ops import Layout, Op, Problem, Shape
from r18.graph.precision import Precision


class HostBuffer:
    """A span of host bytes; `array` is its uint8 view."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def view(self, offset: int, nbytes: int) -> HostBuffer:
        """The bytes [offset, offset + nbytes), shared with this buffer."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"view [{offset}, {offset + nbytes}) of a buffer of {self.nbytes}")
        return HostBuffer(self.array[offset : offset + nbytes])

    def as_array(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """This buffer's leading bytes as an array; shares memory."""
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        return self.array[:nbytes].view(dtype).reshape(shape)


class HostMemory(Memory):
    """Host bytes in 64-byte aligned buffers (a cache line, and an AVX-512 vector)."""

    alignment = 64
    adopts = True

    def empty(self, nbytes: int) -> HostBuffer:
        raw = np.empty(nbytes + self.alignment, np.uint8)
        start = -raw.ctypes.data % self.alignment
        return HostBuffer(raw[start : start + nbytes])

    def upload(self, array: Array, buffer: Buffer) -> None:
        source = np.ascontiguousarray(array)
        host(buffer).as_array(source.shape, source.dtype)[...] = source

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        return host(buffer).as_array(shape, dtype).copy()

    def fill(self, buffer: Buffer, byte: int) -> None:
        host(buffer).array.fill(byte)

    def adopt(self, address: int, nbytes: int, owner: object) -> HostBuffer:
        return HostBuffer(np.asarray(_Span(address, nbytes, owner)) if nbytes else _NOTHING)

    def adopt_stream(self, handle: int) -> HostStream:
        return HostStream()


class _Span:
    """Another owner's bytes, described by NumPy's array interface; the array keeps this alive."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


_NOTHING = np.empty(0, np.uint8)  # an address of no bytes may be null


def host(buffer: Buffer) -> HostBuffer:
    """The buffer as a `HostBuffer`; raises `TypeError` for another device's."""
    if not isinstance(buffer, HostBuffer):
        raise TypeError(f"a host kernel was given a {type(buffer).__name__}")
    return buffer


@dataclass(frozen=True)
class HostEvent:
    """A reading of the monotonic clock, in seconds."""

    seconds: float

    def milliseconds_since(self, earlier: HostEvent) -> float:
        return (self.seconds - earlier.seconds) * 1e3


class HostStream(Stream):
    """Work is done when it is enqueued, so there is nothing to wait for."""

    def synchronize(self) -> None:
        pass

    def record(self) -> HostEvent:
        return HostEvent(time.perf_counter())


class HostFunction(Protocol):
    """What a `HostKernel` runs: fill `out` from the inputs and the prepared weights.

    Arrays are dense, in the kernel's layout and storage dtype, pixels in theirs; `workspace` is
    uint8 of the size that the kernel declares.
    """

    def __call__(
        self,
        op: Any,
        inputs: tuple[Array, ...],
        weights: tuple[Array, ...],
        out: Array,
        workspace: Array,
    ) -> None: ...


@dataclass(frozen=True, eq=False)
class HostKernel(Kernel):
    """A kernel made of a function over NumPy arrays. See `r18.backend.Kernel` for the fields.

    refuses: the refusal of a problem of this kernel's op.
    scratch: the workspace in bytes.
    pack:    the stored form of the weights, from rounded arrays; unchanged by default.
    """

    backend: str
    op: type[Op]
    algorithm: str
    precision: Precision
    contract: RoundingContract
    run: HostFunction
    layout: Layout = Layout.NCHW
    reads: Layout | None = None
    edges: tuple[int, ...] = ()
    extra_problems: tuple[Problem, ...] = ()
    deterministic: bool = True
    batch_invariant: bool = False
    in_place: bool = False
    refuses: Callable[[Problem], str | None] | None = None
    scratch: Callable[[Problem], int] | None = None
    pack: Callable[[Any, tuple[Array, ...]], tuple[Array, ...]] | None = None

    @property
    def id(self) -> str:
        name = f"{self.backend}/{self.op.name}/{self.algorithm}/{self.precision.name}"
        return f"{name}/from_{self.reads.value}" if self.reads else name

    def refusal(self, problem: Problem) -> str | None:
        wrong_op = super().refusal(problem)
        return self.refuses(problem) if self.refuses and wrong_op is None else wrong_op

    def workspace(self, problem: Problem) -> int:
        return self.scratch(problem) if self.scratch else 0

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        specs = problem.op.weights()
        stored = tuple(map(self.precision.stored, weights, specs))
        if self.pack:
            stored = self.pack(problem.op, stored)
        return tuple(PackedWeight.of(array) for array in stored)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        given, dtype = input_dtype(problem, self.precision), self.precision.dtype
        with np.errstate(all="ignore"):  # NaN and Inf are values here; see r18.backend
            self.run(
                problem.op,
                tuple(
                    host(buffer).as_array(input_layout(self, problem).physical(shape), given)
                    for buffer, shape in zip(inputs, problem.inputs, strict=True)
                ),
                tuple(cast(PackedWeight, buffer).packed for buffer in weights),
                host(output).as_array(output_layout(self, problem).physical(problem.output), dtype),
                host(workspace).array,
            )


class PackedWeight(HostBuffer):
    """A host buffer that remembers the shape and dtype its kernel packed it in."""

    __slots__ = ("packed",)

    packed: Array

    @classmethod
    def of(cls, array: Array) -> PackedWeight:
        buffer = HostMemory().empty(array.nbytes)
        packed = buffer.as_array(array.shape, array.dtype)
        packed[...] = array
        packed.flags.writeable = False
        weight = cls(buffer.array)
        weight.packed = packed
        return weight
