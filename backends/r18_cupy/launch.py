"""One launch as data, and the way from it to the device.

A kernel says in pure functions which functions it launches, on which grid, with which arguments;
everything that touches CUDA is `Launcher`, which tests replace.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from r18.backend import Buffer
from r18.errors import R18Error
from r18_cupy.compiler import Entry, architecture, compile_entry

Dim3 = tuple[int, int, int]

# Limits of CUDA on a launch, of every compute capability in use.
MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
DEFAULT_SHARED = 48 * 1024  # bytes a block may have without being allowed more
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Role(Enum):
    """Which of a kernel's buffers."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"
    WORKSPACE = "workspace"


@dataclass(frozen=True)
class Pointer:
    """The address of one of the kernel's buffers, `offset` bytes in."""

    role: Role
    index: int = 0
    offset: int = 0


class Located(Protocol):
    """An argument that follows from a buffer's address: see `tensor_map`."""

    @property
    def pointer(self) -> Pointer: ...

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The argument, for a buffer at this address."""
        ...


class LaunchError(R18Error):
    """The driver does not launch a kernel."""


NULL = np.uintp(0)  # a pointer argument that is not given
X, OUT, WORKSPACE = Pointer(Role.INPUT), Pointer(Role.OUTPUT), Pointer(Role.WORKSPACE)
Argument = Pointer | Located | np.generic | np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class GridLaunch:
    """One launch of a `__global__` function.

    arguments: in the function's order: `Pointer` and what follows from one (`Located`), NumPy
               scalars of exactly the parameter's type, and structs as arrays of one element (see
               `struct`).
    shared_nbytes: dynamic shared memory a block.
    phase:     the name under which `Program.profile` shows it, where a kernel has several.
    overlaps:  it may begin before the launch before it in the stream has ended, because the
               function itself waits for that before it reads or writes what others do (see
               kernels/dependent_launch.cuh); from compute capability 9.0 on.
    """

    entry: Entry
    grid: Dim3
    block: Dim3
    arguments: tuple[Argument, ...]
    shared_nbytes: int = 0
    phase: str = ""
    overlaps: bool = False

    def __post_init__(self) -> None:
        if not all(1 <= g <= limit for g, limit in zip(self.grid, MAX_GRID, strict=True)):
            raise ValueError(f"{self.entry.symbol}: grid {self.grid} is outside 1..{MAX_GRID}")
        if not 1 <= int(np.prod(self.block)) <= MAX_THREADS:
            raise ValueError(f"{self.entry.symbol}: {self.block} is not 1..{MAX_THREADS} threads")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def struct(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A structured array of one element as an argument passed by value."""
    return array.reshape(1).view(np.dtype((np.void, array.dtype.itemsize)))


class DeviceBuffer(Protocol):
    """A buffer with an address on the device."""

    @property
    def address(self) -> int: ...


@dataclass(frozen=True)
class Buffers:
    """The buffers that a kernel was given, by role."""

    inputs: Sequence[Buffer]
    weights: Sequence[Buffer]
    output: Buffer
    workspace: Buffer

    def resolved(self, argument: Argument) -> np.generic | np.ndarray[Any, Any]:
        """The argument's value, now that there are buffers."""
        if isinstance(argument, Pointer):
            return self.address(argument)
        if isinstance(argument, np.generic | np.ndarray):
            return argument
        return argument.at(int(self.address(argument.pointer)))

    def address(self, pointer: Pointer) -> np.uintp:
        buffer: Any = {
            Role.INPUT: self.inputs,
            Role.WEIGHT: self.weights,
            Role.OUTPUT: (self.output,),
            Role.WORKSPACE: (self.workspace,),
        }[pointer.role][pointer.index]
        return np.uintp(buffer.address + pointer.offset)


class Launcher:
    """Loads functions into the current device and launches them. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[tuple[int, Entry], Any] = {}
        self._shared: dict[int, int] = {}

    def function(self, entry: Entry) -> Any:
        """The entry's CuPy function on the current device, compiled and loaded when new."""
        import cupy

        device = cupy.cuda.Device()
        key = (device.id, entry)
        found = self._functions.get(key)
        if found is None:
            capability = device.compute_capability
            target = architecture(entry, (int(capability[:-1]), int(capability[-1])))
            binary = compile_entry(entry, target)
            with self._lock:
                if key not in self._functions:
                    module = cupy.cuda.function.Module()
                    module.load(binary.cubin)
                    self._functions[key] = module.get_function(entry.symbol)
                found = self._functions[key]
        return found

    def _allow_shared(self, function: Any, nbytes: int) -> None:
        """Raise the function's limit of dynamic shared memory, once."""
        from cupy.cuda import driver

        if self._shared.get(function.ptr, 0) < nbytes:
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, nbytes)
            self._shared[function.ptr] = nbytes

    def launch(self, launch: GridLaunch, buffers: Buffers, stream: Any) -> None:
        """Put a launch into a CuPy stream."""
        function = self.function(launch.entry)
        if launch.shared_nbytes > DEFAULT_SHARED:
            self._allow_shared(function, launch.shared_nbytes)
        arguments = tuple(map(buffers.resolved, launch.arguments))
        if launch.overlaps:
            _launch_overlapping(function.ptr, launch, arguments, stream.ptr)
        else:
            function(launch.grid, launch.block, arguments, launch.shared_nbytes, stream=stream)


def _launch_overlapping(
    function: int,
    launch: GridLaunch,
    arguments: Sequence[np.generic | np.ndarray[Any, Any]],
    stream: int,
) -> None:
    """A programmatic dependent launch (CUDA C++ Programming Guide), which CuPy does not offer."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_nbytes
    config.hStream = driver.CUstream(stream)
    config.attrs = [attribute]
    config.numAttrs = 1
    values = [np.atleast_1d(argument) for argument in arguments]  # live until the call has copied
    addresses = np.array([value.ctypes.data for value in values], np.uint64)
    (status,) = driver.cuLaunchKernelEx(
        config, driver.CUfunction(function), addresses.ctypes.data, 0
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{status.name} from launching {launch.entry.label} on {launch.grid}")


LAUNCHER = Launcher()
"""The one launcher; tests put a stand-in in its place."""
