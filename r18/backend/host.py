"""Memory, streams and kernels for backends that compute on the host, synchronously.

A CPU backend needs only functions over NumPy arrays: `HostKernel` makes a kernel of one. Its
allocator, `HostMemory`, and its stream, `HostStream`, are every backend's defaults.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from r18.backend.device import Array, Buffer, Memory, Stream
from r18.backend.fields import field_objection, missing_return, named
from r18.backend.kernel import (
    Kernel,
    RoundingContract,
    input_layout,
    output_layout,
)
from r18.backend.pages import Pages
from r18.errors import UsageError, show
from r18.graph.ops import Layout, Op, Problem, Shape
from r18.graph.precision import Precision


class HostBuffer:
    """A span of host bytes; `array` is its uint8 view."""

    __slots__ = ("__weakref__", "array")

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


_PAGES = Pages()


class HostMemory(Memory):
    """Host bytes in 64-byte aligned buffers (a cache line, and an AVX-512 vector), large ones in
    huge pages where there are any (`r18.backend.pages`)."""

    alignment = 64
    adopts = True

    def empty(self, nbytes: int) -> HostBuffer:
        return HostBuffer(_PAGES.empty(nbytes, self.alignment))

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
    """The function of a `HostKernel`: fill `out` from the inputs and the prepared weights.

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

    Raises `UsageError` for a field of the wrong type, or a `run` that r18 could not call.
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
    extras: frozenset[str] = frozenset()
    deterministic: bool = True
    batch_invariant: bool = False
    in_place: bool = False
    refuses: Callable[[Problem], str | None] | None = None
    scratch: Callable[[Problem], int] | None = None
    pack: Callable[[Any, tuple[Array, ...]], tuple[Array, ...]] | None = None

    def __post_init__(self) -> None:
        if wrong := _objection(self):
            raise UsageError(f"HostKernel {show(self.algorithm)}: {wrong}")

    @property
    def id(self) -> str:
        name = f"{self.backend}/{self.op.name}/{self.algorithm}/{self.precision.name}"
        return f"{name}/from_{self.reads.value}" if self.reads else name

    def refusal(self, problem: Problem) -> str | None:
        wrong_op = super().refusal(problem)
        if self.refuses is None or wrong_op is not None:
            return wrong_op
        reason: object = self.refuses(problem)
        if reason is None or (isinstance(reason, str) and reason.strip()):
            return reason
        raise self._returned("refuses", "None (accepted) or a sentence (why not)", show(reason))

    def workspace(self, problem: Problem) -> int:
        if self.scratch is None:
            return 0
        nbytes: object = self.scratch(problem)
        if isinstance(nbytes, int | np.integer) and nbytes >= 0:
            return int(nbytes)
        found = named(nbytes) + missing_return(nbytes)
        raise self._returned("scratch", "a number of bytes, 0 or more", found)

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        specs = problem.op.weights()
        stored = tuple(map(self.precision.stored, weights, specs))
        if self.pack:
            stored = self._arrays(self.pack(problem.op, stored))
        return tuple(PackedWeight.of(array) for array in stored)

    def _arrays(self, packed: Any) -> tuple[Array, ...]:
        """What `pack` returned; raises `UsageError` if that is no tuple of arrays."""
        several = isinstance(packed, tuple | list)
        if several and all(isinstance(array, np.ndarray) for array in packed):
            return tuple(packed)
        found = "one array" if isinstance(packed, np.ndarray) else named(packed)
        raise self._returned("pack", "a tuple of arrays", found + missing_return(packed))

    def _returned(self, what: str, wanted: str, found: str) -> UsageError:
        title = f"HostKernel {show(self.algorithm)}"
        return UsageError(f"{title}: {what} must return {wanted}, not {found}")

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        given = self.precision.input_dtypes(problem.op)
        dtype = self.precision.output_dtype(problem.op)
        with np.errstate(all="ignore"):  # NaN and Inf are values here; see r18.backend
            self.run(
                problem.op,
                tuple(
                    host(buffer).as_array(input_layout(self, problem).physical(shape), stored)
                    for buffer, shape, stored in zip(inputs, problem.inputs, given, strict=True)
                ),
                tuple(cast(PackedWeight, buffer).packed for buffer in weights),
                host(output).as_array(output_layout(self, problem).physical(problem.output), dtype),
                host(workspace).array,
            )


CALL = ("op", "inputs", "weights", "out", "workspace")
"""The parameters of a `HostKernel`'s `run`."""
PACK = ("op", "weights")
"""Those of its `pack`."""
HOST_FIELDS = (
    *("op", "precision", "contract", "layout", "reads", "extras", "edges"),
    "extra_problems",
)
"""The fields of a `HostKernel` that every kernel has; its `id` follows from others."""


def _objection(kernel: HostKernel) -> str | None:
    """A sentence about a kernel's first field of the wrong type, with the remedy; or None."""
    for what in ("backend", "algorithm"):
        name: object = getattr(kernel, what)
        if not isinstance(name, str):
            return f"{what} must be a string, not {show(name)}"
        if not name or "/" in name or any(c.isspace() for c in name):
            return f"the name of its {what} may not be empty or contain '/' or spaces: {show(name)}"
    if wrong := field_objection(kernel, HOST_FIELDS):
        return wrong
    for what in ("refuses", "scratch", "pack"):
        if (function := getattr(kernel, what)) is not None and not callable(function):
            arguments = "op, weights" if what == "pack" else "problem"
            given = f"lambda {arguments}: {show(function)}"
            return f"{what} must be a function of the {arguments.replace(',', ' and')}: {given}"
    return _call_objection("run", kernel.run, CALL) or (
        _call_objection("pack", kernel.pack, PACK) if kernel.pack else None
    )


def _call_objection(what: str, function: object, arguments: tuple[str, ...]) -> str | None:
    """Why a function cannot be called with what r18 gives it, as far as Python knows its signature;
    or None."""
    calls = f"r18 calls {what}({', '.join(arguments)})"
    if not callable(function):
        return f"{what} must be a function, not {named(function)}: {calls}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return f"{calls}, and this one is {getattr(function, '__name__', what)}{signature}"
    return None


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
