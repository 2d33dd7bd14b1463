"""The base class of all kernels: declared data, pure launches, one way to enqueue."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from r18.backend import (
    Array,
    Buffer,
    DeviceFunction,
    Enqueue,
    Kernel,
    Memory,
    Resources,
    RoundingContract,
    Stream,
)
from r18.backend.digest import PythonSources, combined, cuda_files
from r18.graph.ops import Layout, Op, Problem
from r18.graph.precision import Precision
from r18_cupy.cuda import launch as launching
from r18_cupy.cuda.compiler import (
    ARCHITECTURES,
    KERNELS,
    Entry,
    architecture,
    capability,
    compile_entry,
    compile_ptx,
)
from r18_cupy.cuda.launch import Argument, Buffers, GridLaunch, Pointer, Role

if TYPE_CHECKING:
    from r18_cupy.cuda.device import CupyStream

# C++ type of each storage format; common/storage.cuh converts between them and float.
STORAGE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
MAX_ELEMENTS = 2**31 - 1  # of a tensor: kernels use 32-bit indices
# Modules that decide the result of no kernel are left out, or each change would touch them all.
HOST = PythonSources(
    Path(__file__).parent,
    frozenset({"kernel.py", "cuda/launch.py", "cuda/compiler.py", "cuda/device.py"}),
)


@dataclass(frozen=True, eq=False)
class CudaKernel(Kernel):
    """A kernel that consists of launches. A subclass is one algorithm; see `r18.backend.Kernel`.

    Subclasses implement `launches` (pure), `entries` (everything that `launches` may name) and,
    where needed, `refuses`, `scratch` and `pack`.
    """

    op: ClassVar[type[Op]]
    algorithm: ClassVar[str]

    precision: Precision
    layout: Layout = Layout.NCHW

    deterministic: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    in_place: ClassVar[bool] = False
    minimum_capability: ClassVar[tuple[int, int]] = (7, 5)
    # The only architecture it runs on, if it needs architecture-specific instructions (`sm_90a`).
    family: ClassVar[str | None] = None

    @property
    def tile(self) -> str:
        """The last part of the id, if the algorithm has several tiles."""
        return ""

    @property
    def id(self) -> str:
        parts = ["cupy", self.op.name, self.algorithm, self.precision.name]
        if self.layout is Layout.NHWC:
            parts.append("nhwc")
        return "/".join([*parts, self.tile] if self.tile else parts)

    @property
    @abstractmethod
    def contract(self) -> RoundingContract: ...

    @property
    def variant_of(self) -> str | None:
        """The kernel of the same id without a tile: it chooses."""
        return self.id.rpartition("/")[0] if self.tile else None

    @property
    def storage(self) -> tuple[str, str]:
        """The macro that names the storage type."""
        return ("STORAGE", STORAGE[self.precision.storage])

    @property
    def formats(self) -> tuple[tuple[str, str | int], ...]:
        """The macros that name the storage type, and the rounding of outputs to tf32."""
        rounds = self.contract.output == "tf32"
        return (self.storage, *((("TF32_OUTPUT", 1),) if rounds else ()))

    @abstractmethod
    def entries(self) -> tuple[Entry, ...]:
        """Every function that `launches` may name, for any problem."""

    @abstractmethod
    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        """The launches that compute the problem, in order. Pure."""

    def refuses(self, problem: Problem) -> str | None:
        """Why this algorithm rejects a problem of its op, or None. Pure."""
        return None

    def scratch(self, problem: Problem) -> int:
        """Bytes of workspace. Pure."""
        return 0

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Pack float32 or float64 weights for the device. Default: rounded to the storage format.
        Pure.
        """
        return tuple(map(self.precision.stored, weights, problem.op.weights()))

    # -- the protocol --------------------------------------------------------------------------

    def refusal(self, problem: Problem) -> str | None:
        if (wrong_op := super().refusal(problem)) is not None:
            return wrong_op
        for shape in (*problem.inputs, problem.output):
            if math.prod(shape) > MAX_ELEMENTS:
                return f"indexes with 32 bits; a tensor of shape {shape} has too many elements"
        return self.refuses(problem)

    def workspace(self, problem: Problem) -> int:
        return self.scratch(problem)

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        from r18_cupy.cuda.device import CupyMemory

        memory = CupyMemory()
        buffers = []
        for array in self.pack(problem, weights):
            buffers.append(memory.empty(array.nbytes))
            memory.upload(array, buffers[-1])
        return tuple(buffers)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        addresses = Buffers(inputs, weights, output, workspace).addresses
        cuda = cast("CupyStream", stream)
        for launch in launches_of(self, problem):
            launching.LAUNCHER.launch(launch, addresses, cuda.cuda)
            cuda.mark(launch.phase)

    def bind(self, problem: Problem, weights: tuple[Buffer, ...], memory: Memory) -> Enqueue:
        """Launch by addresses, without buffer objects."""
        return launching.LAUNCHER.bind(launches_of(self, problem), weights)

    @property
    def digest(self) -> str:
        """sha256 over all code that decides the results: device sources, flags and host modules."""
        entries = sorted(entry.digest for entry in self.entries())
        return combined([self.id, HOST.digest(type(self)), *entries])

    @property
    def source_files(self) -> tuple[Path, ...]:
        paths = {entry.path for entry in self.entries()}
        return tuple(sorted({file for path in paths for file in cuda_files(path, KERNELS)}))

    @property
    def host_files(self) -> tuple[Path, ...]:
        return HOST.files(type(self))

    @property
    def targets(self) -> tuple[str, ...]:
        if self.family is not None:
            return (self.family,)
        families = {entry.family for entry in self.entries() if entry.family}
        common = [name for name in ARCHITECTURES if capability(name) >= self.minimum_capability]
        return (*common, *sorted(families))

    def runs_on(self, device: tuple[int, int]) -> bool:
        """Whether the kernel runs on a device of this compute capability."""
        if self.family is not None:
            return capability(self.family) == device
        return device >= self.minimum_capability

    def resources(self, target: str) -> dict[str, Resources]:
        return {
            entry.label: compile_entry(entry, target).resources
            for entry in self._launched_on(capability(target))
            if architecture(entry, capability(target)) == target
        }

    def functions(self, problem: Problem, target: str) -> tuple[DeviceFunction, ...]:
        return tuple(
            DeviceFunction(
                launch.entry.label,
                launch.entry.symbol,
                compile_ptx(launch.entry, architecture(launch.entry, capability(target))),
                frozenset(i for i, one in enumerate(launch.arguments) if _is_constant(one)),
                launch.overlaps,
            )
            for launch in launches_of(self, problem)
        )

    def function_labels(self, problem: Problem | None = None) -> tuple[str, ...]:
        if problem is None:
            return tuple(entry.label for entry in self.entries())
        return tuple(launch.entry.label for launch in launches_of(self, problem))

    def machine_code(self, target: str) -> str:
        digest = hashlib.sha256()
        device = capability(target)
        for entry in self._launched_on(device):
            digest.update(compile_entry(entry, architecture(entry, device)).cubin)
        return digest.hexdigest()

    def _launched_on(self, device: tuple[int, int]) -> tuple[Entry, ...]:
        """The entries that a device of this compute capability launches."""
        if not self.runs_on(device):
            return ()
        return tuple(
            entry
            for entry in self.entries()
            if entry.family is None or capability(entry.family) == device
        )


def _is_constant(argument: Argument) -> bool:
    """Whether an argument names memory that no launch writes: weights, or none at all."""
    pointer = argument if isinstance(argument, Pointer) else getattr(argument, "pointer", None)
    return pointer is None or pointer.role is Role.WEIGHT


@lru_cache(maxsize=4096)
def launches_of(kernel: CudaKernel, problem: Problem) -> tuple[GridLaunch, ...]:
    """`kernel.launches(problem)`, cached because every run enqueues it."""
    return kernel.launches(problem)
