"""The protocols between the core and a backend, and what every op means.

Semantics of the ops (a kernel documents only how it differs, and it may not differ in these)

- Arithmetic is IEEE 754 with the rounding that the kernel's `RoundingContract` declares. A NaN or
  infinity that the mathematics carries to an output element is found there; it never changes an
  output element that does not depend on it (a Winograd kernel: an element of no tile it is in).
- Conv2d is cross-correlation: y[n,o,i,j] = Σ w[o,c,r,s]·x[n,c, i·stride−pad+r, j·stride−pad+s],
  where x outside the image is +0. A zero weight times an infinite or NaN pixel is NaN. What the
  op fuses comes after the sum, in this order: bias, residual, ReLU.
- BatchNorm: (x − mean) / √(var + eps) · weight + bias, with eps inside the root. A kernel may use
  the form x·scale + shift and declares which it uses.
- ReLU(x) is x for x > 0, NaN for NaN, and a zero otherwise.
- Add: a + b; with `relu`, ReLU(a + b).
- MaxPool2d: padding never wins, not even over −Inf; a window that holds a NaN gives NaN.
- ConvMaxPool is its convolution and then its max-pooling, each as above: every value that is
  compared is a whole output of the convolution, with bias and ReLU, and rounded as the contract
  declares (to store it before or after the maximum is the same, since rounding keeps order). What
  lies outside the convolution's output is padding of the pool: it never wins, whatever the
  convolution would give there. No kernel of it is ever needed; see `r18.runtime.fusing`.
- GlobalAvgPool: the sum over height and width divided by height·width.
- Linear: x·wᵀ + bias. Softmax: over the last axis, shifted by the maximum; a row that holds a NaN
  or +Inf is NaN throughout; −Inf gives 0, unless the whole row is −Inf, which is NaN.
- Normalize: (x / 255 − mean) / std, channel by channel, of pixels x: bytes, 0 to 255. It may be
  computed as x·scale + shift. No kernel of it is ever needed but by `CompileOptions.pixels`.
- The sign of a zero in an output is not specified.
- Inputs and weights are read only, and every element of the output is written, each time. An op
  never reads the output buffer, except for a kernel that declares `in_place` and is given the
  same buffer as its first input and its output.

Activations are passed densely packed in the kernel's `layout`, in its precision's storage format;
2-d activations are row-major, pixels uint8 in NHWC (`input_layout`, `input_dtype`). All shapes in
`Problem` are logical (NCHW).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from r18.errors import UsageError
from r18.graph.ops import Layout, Normalize, Op, Problem, Relayout, Shape
from r18.graph.precision import Precision, dtype_of

if TYPE_CHECKING:
    from r18.graph.schedule import Schedule
    from r18.runtime.executor import Plan

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DeviceInfo:
    """What a backend runs on: `kind` is "cpu" or "cuda", `name` the device in words.

    simulated: a device in software, which shows that kernels are right and is far too slow for
               more: `auto` never takes it, and verification asks small problems of it.
    """

    kind: str
    name: str
    details: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RoundingContract:
    """What a kernel promises about rounding: all that an error bound needs to know.

    algorithm:  the derivation that applies: "sum" (products summed in any order), "winograd_f2x2",
                "winograd_f4x4", "elementwise", "exact" (moves or compares values), "batchnorm",
                "scale_shift", "mean", "softmax", "normalize".
    accumulate: the format in which sums are kept.
    truncates:  sums are cut off instead of rounded to nearest, as tensor cores do.
    blocks:     T, the number of partial sums of at most ⌈K/T⌉ of an output's K products each that
                are then added pairwise; bias and residual are in no block. 1 claims nothing
                about the order.
    output:     the format in which the result is stored; one more rounding where it is narrower
                than `accumulate`.
    stored_sum: the sum is rounded to `output` before bias, residual and ReLU are applied, as an
                epilogue in a launch of its own must.
    """

    algorithm: str
    accumulate: str
    output: str
    truncates: bool = False
    blocks: int = 1
    stored_sum: bool = False

    def __post_init__(self) -> None:
        dtype_of(self.accumulate), dtype_of(self.output)
        if self.blocks < 1:
            raise UsageError(f"a contract needs at least one block, got {self.blocks}")


# -- device ------------------------------------------------------------------------------------


class Buffer(Protocol):
    """A span of device bytes. A view shares memory with what it was taken from."""

    @property
    def nbytes(self) -> int: ...

    def view(self, offset: int, nbytes: int) -> Buffer: ...


class Memory(Protocol):
    """An allocator: bytes only; knows no op. Buffers are freed when nothing refers to them.

    `upload`, `download` and `fill` are complete when they return. Buffers begin at addresses that
    are multiples of `alignment` bytes.
    """

    alignment: int

    def empty(self, nbytes: int) -> Buffer: ...

    def upload(self, array: Array, buffer: Buffer) -> None: ...

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array: ...

    def fill(self, buffer: Buffer, byte: int) -> None: ...


@runtime_checkable
class Adopts(Protocol):
    """What a `Memory` offers besides that works within another library's memory and streams.

    Optional: with it kernels read and write tensors of that library where they are; `r18.torch`
    needs it.
    """

    def adopt(self, address: int, nbytes: int, owner: object) -> Buffer:
        """The bytes at an address of this device, as a buffer without a copy.

        `owner` is what the bytes belong to, and lives as long as the buffer. The caller sees to
        it that they are there, and that the address is a multiple of `alignment`.
        """
        ...

    def adopt_stream(self, handle: int) -> Stream:
        """The device's stream of that handle, 0 for the default one, to enqueue in.

        Where kernels run at once there is one stream, whatever the handle.
        """
        ...

    def allocating(
        self, allocate: Callable[[int], tuple[int, object]]
    ) -> AbstractContextManager[None]:
        """Meanwhile, what this thread asks for comes from `allocate`: bytes → (address, owner).

        So that one device has one pool. A memory without a pool of its own has nothing to do.
        """
        ...


class Event(Protocol):
    """A point in a stream's work."""

    def milliseconds_since(self, earlier: Any) -> float:
        """Time between two recorded events; waits for both."""
        ...


class Stream(Protocol):
    """An order of device work. Kernels that run at once use `r18.backend.host.HostStream`."""

    def synchronize(self) -> None: ...

    def record(self) -> Event: ...

    def trace(self) -> AbstractContextManager[list[tuple[str, Event]]]:
        """Meanwhile, kernels that do their work in several phases leave an event after each.

        Yields the list that they are appended to, as (phase, event); a phase's name may be empty.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """Record what `work` enqueues as a graph, and return its launch; None: cannot."""
        ...


@runtime_checkable
class Branching(Protocol):
    """What a `Stream` offers besides whose device can do two things at once."""

    def branch(self) -> AbstractContextManager[Stream]:
        """A stream for work beside this one's.

        That begins when what is in this stream by now has ended; what comes into this stream after
        the block waits for it.
        """
        ...


@runtime_checkable
class Overlapping(Protocol):
    """What a `Stream` may offer whose device begins a launch before the one ahead has ended.

    Kernels then wait by themselves for what they read and for where they write, and a check asks
    whether they do.
    """

    def copy_late(self, source: Buffer, target: Buffer) -> None:
        """Enqueue a copy that takes its time, and lets what is enqueued next begin meanwhile."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """What a `Backend` offers besides whose kernels are compiled for a problem before its first
    call."""

    def prepare(self, calls: Iterable[tuple[Kernel, Problem]]) -> None:
        """Do so for many calls, several at once. What was not prepared is when it is called."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """What a `Backend` offers besides whose kernels choose among functions by a problem's size.

    Optional: the oracle looks at every function by it, on problems that are small, and `r18 plan`
    says which is chosen.
    """

    def choices(self, kernel: Kernel) -> tuple[Kernel, ...]:
        """The kernel as it would be if it had one function alone, for each that it chooses among.

        An id is the kernel's own and one part more. Empty for a kernel that does not choose;
        without functions that are kernels of the backend themselves. The same objects each time.
        `edges` and `roads` are those of the one function.
        """
        ...

    def choice(self, kernel: Kernel, problem: Problem) -> Kernel | None:
        """The function that the kernel chooses for a problem that it takes: one of its choices, or
        a kernel of the backend that has it alone. None for a kernel that does not choose. Pure.
        """
        ...


# -- kernels -----------------------------------------------------------------------------------


@runtime_checkable
class Kernel(Protocol):
    """One implementation of one op. Everything but the last three methods is device-free data.

    id:        `backend/op/algorithm/precision[/tile]`.
    edges:     sizes at which behaviour changes (tiles, vector widths); tests aim at them.
    roads:     optional; problems that go ways of their own through the kernel, where no size tells
               that they do (filters that outgrow a cache); tests take them too. Where those ways
               are functions of their own, see `Choosing`.
    deterministic:   the same inputs give the same bits, on every run and in every stream.
    batch_invariant: a sample's result is the same bits alone and anywhere in any batch.
    in_place:  the output buffer may be the first input's.
    reads:     optional; the layout of the inputs where it is not `layout`, that of the output.
    """

    @property
    def id(self) -> str: ...
    @property
    def op(self) -> type[Op]: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def contract(self) -> RoundingContract: ...
    @property
    def edges(self) -> tuple[int, ...]: ...

    def refusal(self, problem: Problem) -> str | None:
        """Why this kernel does not take the problem, or None. Pure."""
        ...

    def workspace(self, problem: Problem) -> int:
        """Scratch bytes that `enqueue` needs. Pure."""
        ...

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        """Bring float32 or float64 host weights (in `op.weights()` order) into device form, once.

        Rounding (see `Precision.weight_dtype`), relayout, transforms, quantisation.
        """
        ...

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
        ...


Enqueue = Callable[[Sequence[int], int, int, int], None]
"""Of inputs, output, workspace and stream: the addresses (0 for no workspace), and the handle."""


@runtime_checkable
class Binding(Protocol):
    """What a `Kernel` offers besides that wants nothing of its buffers but their addresses.

    Optional: `r18.torch` runs a kernel so. What is the same in every run of a problem is then
    worked out once, and a run costs the host little more than its launches.
    """

    def bind(self, problem: Problem, weights: tuple[Buffer, ...]) -> Enqueue:
        """`enqueue` of a problem on the device that is current now, and is so at each call.

        A stream's handle is what `Adopts.adopt_stream` takes. The caller keeps the weights. Safe
        from several threads; phases are not traced.
        """
        ...


@dataclass(frozen=True)
class Resources:
    """What a compiled function takes of a multiprocessor, as the assembler reports it.

    registers: a thread. shared_nbytes: static, a block. stack_nbytes and spill_nbytes: local
    memory a thread, and how much of it holds registers that did not fit (stores and loads).
    """

    registers: int
    shared_nbytes: int
    stack_nbytes: int
    spill_nbytes: int


@runtime_checkable
class SourcedKernel(Protocol):
    """What a `Kernel` whose device code is compiled from sources of its own offers besides.

    Optional: records tell by it whether a kernel has changed since it was verified.
    """

    @property
    def digest(self) -> str:
        """sha256 over all that decides the kernel's results: device sources, flags, host code."""
        ...

    @property
    def source_files(self) -> tuple[Path, ...]:
        """The files of device code that it is compiled from, headers of the backend included."""
        ...


@runtime_checkable
class CompiledKernel(SourcedKernel, Protocol):
    """What one offers besides whose compiler needs no device.

    Optional: `r18 kernels` lists resources by it, and mutation finds the sources by it and tells
    from their machine code whether a change is one. An architecture is named as the compiler names
    it, such as `sm_90`.
    """

    @property
    def targets(self) -> tuple[str, ...]:
        """The architectures that it is meant for."""
        ...

    def resources(self, target: str) -> Mapping[str, Resources]:
        """What each of its functions takes on `target`, by a label that names it and its macros.

        Empty for an architecture that it does not run on. Raises `R18Error` for a source that does
        not compile, with file, line and flags.
        """
        ...

    def machine_code(self, target: str) -> str:
        """sha256 over the machine code that devices of `target` run: its functions, in their order.

        Sources that give the same cannot be told apart there. Raises as `resources` does.
        """
        ...


def input_layout(kernel: Kernel, problem: Problem) -> Layout:
    """The layout a kernel reads: its own but for pixels, relayouts and what `reads` another."""
    if isinstance(problem.op, Normalize):
        return Layout.NHWC
    if isinstance(problem.op, Relayout):
        return problem.op.source
    reads: Layout | None = getattr(kernel, "reads", None)
    return reads or kernel.layout


def input_dtype(problem: Problem, precision: Precision) -> np.dtype[Any]:
    """What the elements of the inputs are kept as: pixels as bytes, all else as the precision."""
    return np.dtype(np.uint8) if isinstance(problem.op, Normalize) else precision.dtype


def roads(kernel: Kernel) -> tuple[Problem, ...]:
    """The problems that a kernel names since they go ways of their own; most name none."""
    found: tuple[Problem, ...] = getattr(kernel, "roads", ())
    return found


def choices(backend: Backend, kernel: Kernel) -> tuple[Kernel, ...]:
    """See `Choosing`; none of a backend that offers none."""
    return backend.choices(kernel) if isinstance(backend, Choosing) else ()


def choice(backend: Backend, kernel: Kernel, problem: Problem) -> Kernel | None:
    """See `Choosing`; None of a backend that offers none."""
    return backend.choice(kernel, problem) if isinstance(backend, Choosing) else None


def output_layout(kernel: Kernel, problem: Problem) -> Layout:
    """The layout a kernel writes: its own, or a relayout's target."""
    return problem.op.target if isinstance(problem.op, Relayout) else kernel.layout


class Backend(Protocol):
    """A set of kernels and the way to compile a schedule with them.

    Making one contacts no device; `probe` is the first contact and raises `BackendUnavailable`.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> Memory: ...

    def probe(self) -> DeviceInfo: ...

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, the preferred one for an op and precision first."""
        ...

    def stream(self) -> Stream: ...

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Program: ...


APART = "apart"
"""In place of a kernel's id; see `Tuned.fastest`."""


@runtime_checkable
class Tuned(Protocol):
    """What a `Backend` offers besides that knows from measurement which kernel is fastest."""

    def fastest(self, problem: Problem, precision: str) -> str | None:
        """The id of the kernel that a plan prefers for the problem; None: the first that takes it.

        `APART`, of a problem that fuses two ops: kernels of the two are faster than any for both.
        Pure on one device.
        """
        ...


@runtime_checkable
class Concurrent(Protocol):
    """What a `Backend` offers besides whose streams are `Branching`."""

    def beside(self, first: Problem, second: Problem, precision: str) -> bool:
        """Whether two steps of which neither needs the other take less time side by side. Pure."""
        ...


class BackendBase:
    """What a backend with kernels and an allocator inherits: `compile`, by the core's executor."""

    name: ClassVar[str]

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Program:
        """Compile with the executor; see `r18.runtime.executor.compile_schedule`."""
        from r18.runtime.executor import compile_schedule  # the executor imports this module

        return compile_schedule(self, schedule, weights, options)  # type: ignore[arg-type]


# -- programs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileOptions:
    """How to compile.

    batch:     images a run; fixed for a program.
    precision: a name of `r18.graph.precision.PRECISIONS`.
    fusion:    a level of `FUSION_LEVELS`; what each fuses is told in `r18.graph.passes`.
    taps:      checkpoints or values to keep for `fetch`; the output is always kept. Taps extend
               lifetimes and change nothing else.
    graph:     capture the launches in a graph where the backend's streams can.
    arena:     let buffers whose lifetimes do not meet share memory.
    kernels:   overrides, by step name or op name: a kernel id or a glob over ids. An override
               that does not apply is an error, never ignored.
    pixels:    what the program does first: it then takes uint8 pixels and normalises them so
               (`Preprocess.normalize` is ImageNet's). None: it takes what is preprocessed.
    """

    batch: int = 1
    precision: str = "fp32"
    fusion: str = "all"
    taps: tuple[str, ...] = ()
    graph: bool = True
    arena: bool = True
    kernels: Mapping[str, str] = field(default_factory=dict)
    pixels: Normalize | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UsageError(f"batch must be at least 1, got {self.batch}")


@dataclass(frozen=True)
class StepTime:
    """One step's share of a run, in milliseconds; of a kernel in phases, one phase's."""

    step: str
    kernel: str
    milliseconds: float
    phase: str = ""


class Program(Protocol):
    """A compiled schedule: weights uploaded, buffers planned, launches captured; run many times.

    `load`, `launch`, `synchronize`, `fetch` are the parts of a call; a program holds one batch in
    flight, and calling it is safe from several threads. `fetch` returns float32 (float64 from an
    fp64 program): narrower formats are widened exactly.
    """

    @property
    def plan(self) -> Plan: ...

    def __call__(self, images: Array) -> Array: ...
    def load(self, images: Array) -> None: ...
    def launch(self) -> None: ...
    def synchronize(self) -> None: ...
    def fetch(self, name: str | None = None) -> Array: ...
    def profile(self) -> list[StepTime]: ...
    def close(self) -> None: ...


@runtime_checkable
class Pipelined(Protocol):
    """What a `Program` offers besides that copies while it computes; see `r18.runtime.pipeline`."""

    def input_arrays(self) -> tuple[Array, Array]:
        """Two host arrays of the input's shape and format, to be filled and loaded in turn.

        The same two each time. `load` knows them, and copies from where they are. One may be
        filled anew when the other has been loaded since, or when its run has ended. Pixels are
        (N, C, H, W) to look at, and in memory NHWC.
        """
        ...

    def fetch_later(self) -> Callable[[], Array]:
        """`fetch` of the run enqueued last, in two parts: what is returned waits and gives it.

        Other batches may be loaded and launched meanwhile, and change nothing in it.
        """
        ...


@runtime_checkable
class OnStream(Protocol):
    """What a `Program` whose launches all go into one stream offers besides.

    Events recorded there, before and after a launch, give its time on the device.
    """

    @property
    def stream(self) -> Stream: ...
