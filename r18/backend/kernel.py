"""One implementation of one op, and its promises."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from r18.backend.device import Array, Buffer, Memory, Stream
from r18.errors import UsageError
from r18.graph.ops import Layout, Op, Problem, Relayout
from r18.graph.precision import Precision, dtype_of, holder_of

Enqueue = Callable[[Sequence[int], int, int, int], None]
"""A function of the inputs' addresses, those of output and workspace (0 for none), and the stream's
handle."""


@dataclass(frozen=True)
class RoundingContract:
    """A kernel's promise about rounding: everything that its error bound depends on.

    algorithm:  the derivation that applies: "sum" (products summed in any order), "winograd_f2x2",
                "winograd_f4x4", "transforms" (a sum, an FFT or Winograd's F(6×6), as a library
                chooses), "elementwise", "exact" (moves or compares values), "batchnorm",
                "scale_shift", "mean", "mean_sum" (products of means), "stored_mean_sum" (of means
                that are rounded to storage), "softmax", "normalize", "integer" (exact sums, and
                the roundings of `r18.graph.quantized`), "scaled_sum" and "scale" (those of
                `r18.graph.scaled`).
    accumulate: the format in which sums are kept.
    truncates:  sums are cut off instead of rounded to nearest, as tensor cores do.
    blocks:     T, the number of partial sums of at most ⌈K/T⌉ of an output's K products each that
                are then added pairwise; bias and residual are not blocked. 1 claims nothing
                about the order.
    promoted:   p, where truncated sums hold at most p products before they are added to a sum that
                is rounded to nearest, and each tap has at most one such sum for every p channels.
                0: sums are truncated to their end. With split factors it applies to the products
                of first halves.
    output:     the format to which the result is rounded once where it is narrower than
                `accumulate`: the one that it is stored in, or tf32, whose numbers float32 holds (to
                nearest, ties away from zero), where a layer that follows multiplies in it.
    stored_sum: the sum is rounded to `output` before bias, residual and ReLU are applied, as an
                epilogue in a separate launch must.
    fraction:   f, where sums are truncated to f bits after the leading one of the largest term,
                fewer than `accumulate` has. 0: to all that it has.
    factors:    the format in which factors are multiplied, where the kernel keeps more of them than
                the precision's `multiply` does, such as Winograd's transformed ones in float32.
                "" for the precision's: more is not claimed.
    """

    algorithm: str
    accumulate: str
    output: str
    truncates: bool = False
    blocks: int = 1
    stored_sum: bool = False
    factors: str = ""
    promoted: int = 0
    fraction: int = 0

    def __post_init__(self) -> None:
        dtype_of(self.accumulate), holder_of(self.output)
        if self.factors:
            dtype_of(self.factors)
        if self.blocks < 1:
            raise UsageError(f"a contract needs at least one block, got {self.blocks}")
        if self.promoted and (self.promoted < 0 or not self.truncates or self.blocks > 1):
            raise UsageError("only sums that are truncated, in one block, are promoted")
        if self.fraction and (self.fraction < 1 or not self.truncates):
            raise UsageError("only sums that are truncated keep fewer bits of fraction")


@dataclass(frozen=True)
class Resources:
    """The resources of a multiprocessor that a compiled function uses, as the assembler reports
    them.

    registers: per thread. shared_nbytes: static, per block. stack_nbytes and spill_nbytes: local
    memory per thread, and the part of it that holds spilled registers (stores and loads).
    """

    registers: int
    shared_nbytes: int
    stack_nbytes: int
    spill_nbytes: int


@dataclass(frozen=True)
class DeviceFunction:
    """A compiled function as one launch calls it.

    label:     its name and macros.
    symbol:    its name in `ptx`, the PTX of its module.
    constants: positions of the parameters that are no address, or the address or tensor map of
               weights: what they name is not written by any launch.
    overlaps:  whether the launch may begin before the previous one has ended.
    """

    label: str
    symbol: str
    ptx: str
    constants: frozenset[int]
    overlaps: bool


@dataclass(frozen=True)
class HostCode:
    """The machine code that a kernel runs on the host.

    instruction: that its inner loops multiply with, as the assembler names it.
    assembly:    the text, with the compiler's comments on spilled registers if it has any.
    """

    instruction: str
    assembly: str


class Kernel(ABC):
    """One implementation of one op. Its attributes and pure methods need no device.

    id:        `backend/op/algorithm/precision[/tile]`.
    op, algorithm, precision, contract: no default; `contract` is the rounding contract.
    layout:    of the activations, at least of the output; NCHW by default.
    reads:     the layout of the inputs where it is not `layout`; None by default.
    deterministic:   the same inputs give the same bits, on every run and in every stream; True.
    batch_invariant: a sample's result has the same bits whatever batch it is in; False.
    in_place:  the output buffer may be the first input's; False.
    edges:     sizes at which behaviour changes (tiles, vector widths); tests aim at them.
    extra_problems: problems that take a path through the kernel which no size reveals (filters that
               outgrow a cache); tests run them too.
    extras:    the further abilities of a convolution that it computes: `groups`, `dilation` (see
               `Op.extras`). Empty by default: it refuses problems that ask for one.
    variant_of: the id of the kernel that chooses this one by the problem's size, such as one tile;
               None for a kernel that no other chooses. See `Backend.variants`.

    For a kernel compiled from its own sources, so that records can tell whether it has changed:

    digest:    sha256 over everything that decides its results: device sources, flags, host code.
               None, the default, for a kernel that is not compiled from sources.
    source_files: the files of device code, the backend's own headers included.
    host_files: the Python modules that `digest` counts; () where it is None.
    targets:   architectures that it can be compiled for without a device, named as the compiler
               names them, such as `sm_90`; `resources` and `machine_code` then work.
    """

    # Read-only to callers and the type checker. At run time there is no property, so that a
    # subclass may use dataclass fields, class attributes or properties.
    if TYPE_CHECKING:

        @property
        def id(self) -> str: ...
        @property
        def op(self) -> type[Op]: ...
        @property
        def algorithm(self) -> str: ...
        @property
        def precision(self) -> Precision: ...
        @property
        def contract(self) -> RoundingContract: ...
        @property
        def layout(self) -> Layout: ...
        @property
        def reads(self) -> Layout | None: ...
        @property
        def deterministic(self) -> bool: ...
        @property
        def batch_invariant(self) -> bool: ...
        @property
        def in_place(self) -> bool: ...
        @property
        def edges(self) -> tuple[int, ...]: ...
        @property
        def extra_problems(self) -> tuple[Problem, ...]: ...
        @property
        def extras(self) -> frozenset[str]: ...
        @property
        def variant_of(self) -> str | None: ...
        @property
        def digest(self) -> str | None: ...
        @property
        def source_files(self) -> tuple[Path, ...]: ...
        @property
        def host_files(self) -> tuple[Path, ...]: ...
        @property
        def targets(self) -> tuple[str, ...]: ...

    else:
        layout = Layout.NCHW
        reads = None
        deterministic = True
        batch_invariant = False
        in_place = False
        edges = ()
        extra_problems = ()
        extras = frozenset()
        variant_of = None
        digest = None
        source_files = ()
        host_files = ()
        targets = ()

    def refusal(self, problem: Problem) -> str | None:
        """Why this kernel does not take the problem, or None. Pure.

        By default it takes every problem of its op that asks for no further `extras`.
        """
        if type(problem.op) is not self.op:
            return f"computes {self.op.name}, not {problem.op.name}"
        for name, value in problem.op.extras.items():
            if name not in self.extras:
                return f"computes no {self.op.name} with {name}={value}"
        return None

    def workspace(self, problem: Problem) -> int:
        """Scratch bytes that `enqueue` needs; 0 by default. Pure."""
        return 0

    @abstractmethod
    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        """Bring float32 or float64 host weights (in `op.weights()` order) into device form, once.

        Rounding (see `Precision.weight_dtype`), relayout, transforms, packing. A weight that the op
        stores as integers may be given as these.
        """

    @abstractmethod
    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        """Put the work in the stream: no allocation, no synchronisation."""

    def bind(self, problem: Problem, weights: tuple[Buffer, ...], memory: Memory) -> Enqueue:
        """`enqueue` for one problem by addresses, on the device that is current now.

        Work that is the same in every run can be done here once. That device is current at each
        call too. A stream's handle is one for `Memory.adopt_stream`. The caller keeps the weights,
        and at each call the memory at the addresses, alive. Safe from several threads; phases are
        not traced. By default every call adopts its addresses and calls `enqueue`, for which the
        memory has to be one that `adopts`.
        """
        dtypes = self.precision.input_dtypes(problem.op)
        sizes = [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(problem.inputs, dtypes, strict=True)
        ]
        output_nbytes = math.prod(problem.output) * self.precision.output_dtype(problem.op).itemsize
        scratch = self.workspace(problem)

        def enqueue(inputs: Sequence[int], output: int, workspace: int, stream: int) -> None:
            self.enqueue(
                problem,
                tuple([memory.adopt(a, n, None) for a, n in zip(inputs, sizes, strict=True)]),
                weights,
                memory.adopt(output, output_nbytes, None),
                memory.adopt(workspace, scratch, None),
                memory.adopt_stream(stream),
            )

        return enqueue

    def resources(self, target: str) -> Mapping[str, Resources]:
        """The resources of each of its functions on `target`, by a label of its name and macros.

        Empty for an architecture that it does not run on. Raises `R18Error` for a source that does
        not compile, with file, line and flags.
        """
        return {}

    def functions(self, problem: Problem, target: str) -> tuple[DeviceFunction, ...]:
        """The functions that it launches for a problem on `target`, in their order.

        `r18 ptxcheck` reads them. By default none: only a kernel that is compiled to PTX has any.
        Raises as `resources` does.
        """
        return ()

    def function_labels(self, problem: Problem | None = None) -> tuple[str, ...]:
        """The labels of `functions` for a problem, or of all functions that it may launch for one.

        `r18 branches` compares the two. Pure: nothing is compiled. By default none.
        """
        return ()

    def machine_code(self, target: str) -> str:
        """sha256 over the machine code of its functions on `target`, in their order.

        Sources with the same hash cannot be told apart there. Raises as `resources` does, and
        `UsageError` for a kernel without `targets`.
        """
        raise UsageError(f"{self.id} has no machine code: it names no targets")


def input_layout(kernel: Kernel, problem: Problem) -> Layout:
    """The layout of a kernel's inputs: pixels are NHWC, a relayout reads its source layout."""
    if problem.op.of_pixels:
        return Layout.NHWC
    if isinstance(problem.op, Relayout):
        return problem.op.source
    return kernel.reads or kernel.layout


def output_layout(kernel: Kernel, problem: Problem) -> Layout:
    """The layout of a kernel's output: its own, or a relayout's target."""
    return problem.op.target if isinstance(problem.op, Relayout) else kernel.layout


__all__ = [
    "DeviceFunction",
    "Enqueue",
    "HostCode",
    "Kernel",
    "Resources",
    "RoundingContract",
    "input_layout",
    "output_layout",
]
