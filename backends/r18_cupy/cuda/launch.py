"""A kernel launch as data, and its execution on the device.

A kernel names in pure functions which functions it launches, on which grid and with which
arguments. Everything that touches CUDA is in `Launcher`, which tests replace. Launching is on the
hot path of every run, so whatever does not change is computed once per launch and device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from r18.backend import Buffer, Enqueue
from r18.errors import R18Error
from r18_cupy.cuda.compiler import Entry, architecture, capability, compile_entry
from r18_cupy.cuda.perturb import SYMBOL, Perturbation

Dim3 = tuple[int, int, int]

# CUDA's launch limits, for every compute capability in use.
MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
OVERLAP_CAPABILITY = (9, 0)  # programmatic dependent launch needs at least this
DEFAULT_SHARED = 48 * 1024  # bytes per block without opting in to more
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Role(Enum):
    """The role of a kernel's buffer."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"
    WORKSPACE = "workspace"


@dataclass(frozen=True)
class Pointer:
    """The address of one of the kernel's buffers plus `offset` bytes."""

    role: Role
    index: int = 0
    offset: int = 0


class Located(Protocol):
    """An argument computed from a buffer's address; see `tensor_map`."""

    @property
    def pointer(self) -> Pointer: ...

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The argument, for a buffer at this address."""
        ...


class LaunchError(R18Error):
    """The driver rejected a launch."""


NULL = np.uintp(0)  # a null pointer argument
X, OUT, WORKSPACE = Pointer(Role.INPUT), Pointer(Role.OUTPUT), Pointer(Role.WORKSPACE)
Argument = Pointer | Located | np.generic | np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class GridLaunch:
    """One launch of a `__global__` function.

    arguments: in the function's order: `Pointer`, `Located`, NumPy scalars of exactly the
    parameter's type, and structs as arrays of one element (see `struct`).
    shared_nbytes: dynamic shared memory per block.
    phase: its name in `Program.profile`, for kernels with several launches.
    overlaps: programmatic dependent launch: it may begin before the previous launch in the stream
    has ended, because the function itself waits before it reads or writes shared data (see
    kernels/common/dependent_launch.cuh). From compute capability 9.0 on.
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


class Buffers(NamedTuple):
    """The buffers of a call, by role."""

    inputs: Sequence[Buffer]
    weights: Sequence[Buffer]
    output: Buffer
    workspace: Buffer

    @property
    def addresses(self) -> Addresses:
        return _addresses(
            [_address(buffer) for buffer in self.inputs],
            _address(self.output),
            _address(self.workspace),
            _behind(self.weights),
        )


Addresses = tuple[int, ...]
"""The addresses of a call's buffers: output, workspace, inputs, then weights in reverse order.

The position of each follows from its role and index without knowing the counts; see `_place`.
"""


def _addresses(inputs: Sequence[int], output: int, workspace: int, behind: Addresses) -> Addresses:
    return (output, workspace, *inputs, *behind)


def _behind(weights: Sequence[Buffer]) -> Addresses:
    return tuple(_address(buffer) for buffer in reversed(weights))


def _address(buffer: Buffer) -> int:
    return cast(DeviceBuffer, buffer).address


def _place(pointer: Pointer) -> int:
    """The index of a pointer's buffer in `Addresses`; weights are counted from the end."""
    places = {
        Role.OUTPUT: 0,
        Role.WORKSPACE: 1,
        Role.INPUT: 2 + pointer.index,
        Role.WEIGHT: -1 - pointer.index,
    }
    return places[pointer.role]


# -- from data to the device -------------------------------------------------------------------


class _Moving(NamedTuple):
    """An argument computed from a buffer's address.

    position: among the arguments.
    place:    index of its buffer in `Addresses`.
    offset:   bytes from the start of the buffer.
    placed:   maps an address to the argument and the argument's own address; None if the argument
    is the address.
    """

    position: int
    place: int
    offset: int
    placed: Callable[[int], tuple[np.ndarray[Any, Any], int]] | None


def _moving(position: int, argument: Pointer | Located) -> _Moving:
    if isinstance(argument, Pointer):
        return _Moving(position, _place(argument), argument.offset, None)
    pointer = argument.pointer
    return _Moving(position, _place(pointer), pointer.offset, _remembering(argument.at))


def _remembering(
    at: Callable[[int], np.ndarray[Any, Any]],
) -> Callable[[int], tuple[np.ndarray[Any, Any], int]]:
    """The argument for an address, and its own address; cached, as allocators reuse addresses."""

    @lru_cache(maxsize=64)
    def placed(address: int) -> tuple[np.ndarray[Any, Any], int]:
        array = at(address)
        return array, int(array.ctypes.data)

    return placed


class _Bound:
    """A launch bound to one device, with everything constant precomputed.

    The driver's structs and argument words are built once, because building them takes longer than
    the launch. The driver copies them before its call returns.
    """

    def __init__(self, launch: GridLaunch, function: Any, *, overlaps: bool) -> None:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_nbytes
        if overlaps:  # programmatic dependent launch, CUDA C++ Programming Guide
            attribute = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._driver, self._config, self._launch = driver, config, launch
        self._done = driver.CUresult.CUDA_SUCCESS
        self._function = driver.CUfunction(function.ptr)
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._moving: list[_Moving] = []
        # Each argument's place in memory: one word if it is an address.
        count = len(launch.arguments)
        words, places = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        self._values: list[np.ndarray[Any, Any]] = []
        for position, argument in enumerate(launch.arguments):
            if isinstance(argument, np.generic | np.ndarray):
                self._values.append(np.atleast_1d(argument))
            else:
                self._values.append(words[position : position + 1])
                self._moving.append(_moving(position, argument))
        places[:] = [value.ctypes.data for value in self._values]
        self._words, self._places = memoryview(words), memoryview(places)
        self._arguments = int(places.ctypes.data)

    def enqueue(self, addresses: Addresses, stream: int) -> None:
        """Enqueue on the stream with this handle. Thread-safe."""
        held = []  # kept alive until the driver has copied it
        with self._lock:
            if stream != self._stream:
                self._config.hStream = self._driver.CUstream(stream)
                self._stream = stream
            for position, place, offset, placed in self._moving:
                address = addresses[place] + offset
                if placed is None:
                    self._words[position] = address
                else:
                    array, self._places[position] = placed(address)
                    held.append(array)
            (status,) = self._driver.cuLaunchKernelEx(
                self._config, self._function, self._arguments, 0
            )
        if status != self._done:
            launch = self._launch
            raise LaunchError(f"{status.name} from launching {launch.entry.label} on {launch.grid}")


class Launcher:
    """Loads functions into the current device and launches them. Thread-safe.

    perturbation: the delays; None for the kernels as they are. See `perturb`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[tuple[int, Entry, bool], Any] = {}
        self._shared: dict[int, int] = {}
        self._bound = lru_cache(maxsize=4096)(self._bind)
        self._perturbed: list[tuple[int, Any]] = []  # devices and modules with delays
        self._turn = 0  # of the host, since the last `perturb`
        self.perturbation: Perturbation | None = None

    def device(self) -> int:
        """The number of the current device, whose context is current in this thread."""
        found = _get_device()()
        if found not in _threads.ready:
            _make_current(found)
        return found

    def capability(self, device: int) -> tuple[int, int]:
        """A device's compute capability."""
        import cupy

        return capability(f"sm_{cupy.cuda.Device(device).compute_capability}")

    def function(self, entry: Entry) -> Any:
        """The entry's CuPy function on the current device, compiled and loaded on first use."""
        import cupy

        device = self.device()
        perturbed = self.perturbation is not None
        key = (device, entry, perturbed)
        found = self._functions.get(key)
        if found is None:
            target = architecture(entry, self.capability(device))
            binary = compile_entry(entry, target, perturbed=perturbed)
            with self._lock:
                if key not in self._functions:
                    module = cupy.cuda.function.Module()
                    module.load(binary.cubin)
                    self._functions[key] = module.get_function(entry.symbol)
                    if perturbed and SYMBOL.encode() in binary.cubin:  # it has sites
                        self._perturbed.append((device, module))
                        self._tell(module)
                found = self._functions[key]
        return found

    def perturb(self, perturbation: Perturbation | None) -> None:
        """Delay the kernels that are bound from now on, and those that were bound with delays.

        None: kernels bound from now on have no delays. Waits for the current device.
        """
        import cupy

        device = self.device()
        cupy.cuda.Device(device).synchronize()
        self.perturbation, self._turn = perturbation, 0
        if perturbation is not None:
            with self._lock:
                for where, module in self._perturbed:
                    if where == device:
                        self._tell(module)

    def delays_host(self) -> bool:
        """Whether the host's next copy, run or branch is delayed."""
        if self.perturbation is None:
            return False
        self._turn += 1
        return self.perturbation.delays_host(self._turn)

    def _tell(self, module: Any) -> None:
        """Write the seed and the kinds to a module with delays, and wait for it."""
        from cuda.bindings import driver

        assert self.perturbation is not None
        words = self.perturbation.words
        address = driver.CUdeviceptr(int(module.get_global_var(SYMBOL)))
        (copied,) = driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes)
        (waited,) = driver.cuCtxSynchronize()
        for status in (copied, waited):
            if status != driver.CUresult.CUDA_SUCCESS:
                raise LaunchError(f"{status.name} from writing {SYMBOL}")

    def _allow_shared(self, function: Any, nbytes: int) -> None:
        """Raise the function's dynamic shared memory limit, once."""
        from cupy.cuda import driver

        if self._shared.get(function.ptr, 0) < nbytes:
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, nbytes)
            self._shared[function.ptr] = nbytes

    def _bind(self, device: int, launch: GridLaunch, perturbed: bool) -> _Bound:
        function = self.function(launch.entry)
        if launch.shared_nbytes > DEFAULT_SHARED or perturbed:  # delays take some, too
            self._allow_shared(function, launch.shared_nbytes)
        overlaps = launch.overlaps and self.capability(device) >= OVERLAP_CAPABILITY
        return _Bound(launch, function, overlaps=overlaps)

    def launch(self, launch: GridLaunch, addresses: Addresses, stream: Any) -> None:
        """Enqueue a launch on a CuPy stream."""
        bound = self._bound(self.device(), launch, self.perturbation is not None)
        bound.enqueue(addresses, stream.ptr)

    def bind(self, launches: Sequence[GridLaunch], weights: Sequence[Buffer]) -> Enqueue:
        """The launches on the current device, with those weights; see `r18.backend.Kernel.bind`."""
        device = self.device()
        perturbed = self.perturbation is not None
        bound = [self._bound(device, launch, perturbed) for launch in launches]
        behind = _behind(weights)

        def enqueue(inputs: Sequence[int], output: int, workspace: int, stream: int) -> None:
            if device not in _threads.ready:
                _make_current(device)
            addresses = _addresses(inputs, output, workspace, behind)
            for launch in bound:
                launch.enqueue(addresses, stream)

        return enqueue


class _Threads(threading.local):
    """Per thread, the devices whose context has been made current."""

    def __init__(self) -> None:
        self.ready: set[int] = set()


_threads = _Threads()


def _make_current(device: int) -> None:
    """Make the device's context current through the CUDA runtime; the driver API does not do it."""
    from cuda.bindings import driver
    from cupy.cuda import runtime

    _, context = driver.cuCtxGetCurrent()
    if not int(context):
        runtime.free(0)
    _threads.ready.add(device)


@cache
def _get_device() -> Callable[[], int]:
    from cupy.cuda.device import get_device_id

    return cast(Callable[[], int], get_device_id)


LAUNCHER = Launcher()
"""The launcher; tests replace it."""
