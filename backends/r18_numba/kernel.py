"""The base class of this backend's kernels, their buffers, and common launch grids."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from r18.backend import Array, Buffer, Kernel, RoundingContract, Stream
from r18.backend.digest import PythonSources, combined
from r18.graph.ops import Layout, Op, Problem
from r18.graph.precision import FP16, FP32, Precision
from r18_numba.target import simulated

PRECISIONS = (FP32, FP16)
DEVICE = Path(__file__).parent / "kernels"
# Without the modules that affect no result: each change there would make all kernels stale.
SOURCES = PythonSources(Path(__file__).parent, frozenset({"target.py", "device.py"}))
MOST_ELEMENTS = 2**31 - 1
"""Largest tensor: counts are passed as 32-bit integers."""

THREADS = 256
SIMULATED_THREADS = 4
SIMULATED_BLOCKS = 2
"""The grid of grid-stride kernels in the simulator, where each thread is a Python thread."""


@dataclass(frozen=True, eq=False)
class NumbaKernel(Kernel):
    """A kernel with device code in `r18_numba.kernels`."""

    op: ClassVar[type[Op]]
    algorithm: ClassVar[str]
    arithmetic: ClassVar[str]  # of the rounding contract
    layout: ClassVar[Layout] = Layout.NCHW
    deterministic: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    in_place: ClassVar[bool] = False

    precision: Precision
    contract: RoundingContract = field(init=False)

    def __post_init__(self) -> None:
        p = self.precision
        object.__setattr__(
            self, "contract", RoundingContract(self.arithmetic, p.accumulate, p.storage)
        )

    @property
    def id(self) -> str:
        return f"numba/{self.op.name}/{self.algorithm}/{self.precision.name}"

    @property
    def simulates(self) -> bool:
        """Whether the simulator runs it in good time, with a greenlet for each CUDA thread."""
        return True

    @property
    def storage(self) -> Any:
        """The NumPy scalar type of stored tensors. Device code converts with it."""
        return self.precision.dtype.type

    @property
    def digest(self) -> str:
        """sha256 over host and device code. Numba's version is in the record, not in here."""
        return combined([self.id, SOURCES.digest(type(self))])

    @property
    def source_files(self) -> tuple[Path, ...]:
        return tuple(path for path in SOURCES.files(type(self)) if path.is_relative_to(DEVICE))

    def refusal(self, problem: Problem) -> str | None:
        if (wrong_op := super().refusal(problem)) is not None:
            return wrong_op
        sizes = (elements(shape) for shape in (*problem.inputs, problem.output))
        if max(sizes) > MOST_ELEMENTS:
            return f"a tensor has more than {MOST_ELEMENTS:,} elements"
        return self.objection(problem)

    def objection(self, problem: Problem) -> str | None:
        """Why this kernel does not take a problem of its op, other than the problem's size."""
        return None

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        return tuple(uploaded(array) for array in self.packed(problem, weights))

    def packed(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """The weights as device code reads them; here only rounded to the storage format."""
        return tuple(map(self.precision.stored, weights, problem.op.weights()))

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        from r18_numba.device import NumbaStream

        if not isinstance(stream, NumbaStream):
            raise TypeError(f"a Numba kernel was given a {type(stream).__name__}")
        arrays = Arrays(problem.op, self.precision, inputs, weights, output, workspace)
        self.launch(problem, arrays, stream)

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        """Enqueue the launches into a `NumbaStream`."""
        raise NotImplementedError


class Arrays:
    """A call's buffers as 1-d device arrays, each in its own storage format."""

    def __init__(
        self,
        op: Op,
        precision: Precision,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
    ) -> None:
        from r18_numba.device import numba_buffer

        self.inputs = tuple(
            numba_buffer(buffer).as_array(dtype.type)
            for buffer, dtype in zip(inputs, precision.input_dtypes(op), strict=True)
        )
        self.out = numba_buffer(output).as_array(precision.output_dtype(op).type)
        self._weights = weights
        self._workspace = workspace
        self._storage = precision.dtype.type

    def weight(self, place: int, dtype: Any = None) -> Any:
        """A packed weight, in the kernel's storage format unless another is given."""
        from r18_numba.device import numba_buffer

        return numba_buffer(self._weights[place]).as_array(dtype or self._storage)

    def scratch(self, *sizes: int) -> list[Any]:
        """The workspace as consecutive float32 arrays of these sizes."""
        from r18_numba.device import numba_buffer

        whole = numba_buffer(self._workspace).as_array(np.float32)
        ends = accumulate(sizes)
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def elements(shape: tuple[int, ...]) -> int:
    """The number of elements of a tensor, as an exact integer."""
    return int(np.prod(shape, dtype=object))


def uploaded(array: Array) -> Buffer:
    """A device buffer that holds the array."""
    from r18_numba.device import NumbaMemory

    memory = NumbaMemory()
    buffer = memory.empty(array.nbytes)
    memory.upload(array, buffer)
    return buffer


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


Dim3 = tuple[int, int, int]


def grid_stride(count: int) -> tuple[Dim3, Dim3]:
    """Grid and block for a grid-stride kernel over `count` elements."""
    if simulated():
        return (SIMULATED_BLOCKS, 1, 1), (SIMULATED_THREADS, 1, 1)
    return (ceil_div(count, THREADS), 1, 1), (THREADS, 1, 1)


def reducing(count: int) -> Dim3:
    """The block, a power of two of threads, for a kernel that reduces `count` values per block."""
    most = SIMULATED_THREADS if simulated() else THREADS
    return (min(most, max(2, 1 << (count - 1).bit_length())), 1, 1)
