"""The protocol between the core and a backend: seven names, and the semantics of every op.

`Backend`, `Kernel`, `Memory`, `Stream` and `Program` are base classes with working defaults;
`Buffer` and `Event` are structures to match. The others are defined in `device`, `kernel` and
`program`.

Semantics of the ops (a kernel documents only differences, and may not differ in these)

- Arithmetic is IEEE 754 with the rounding that the kernel's `RoundingContract` declares. A NaN or
  infinity that the mathematics carries to an output element appears there; it never changes an
  output element that does not depend on it (in a Winograd kernel: an element of another tile).
- Conv2d is cross-correlation: y[n,o,i,j] = Σ w[o,c,r,s]·x[n,c, i·stride−pad+r, j·stride−pad+s],
  where x outside the image is +0. With a dilation the taps are at r·dilation and s·dilation; with G
  groups an output o of group ⌊o·G/O⌋ sums over the C/G channels of that group only, and w has as
  many. A zero weight times an infinite or NaN pixel is NaN. The fused operations come after the
  sum, in this order: bias, residual, ReLU. Where an infinite or NaN weight meets padding, its
  product with +0 is NaN or is left out: libraries do either, so such an output is not specified.
  Every other output is.
- BatchNorm: (x − mean) / √(var + eps) · weight + bias, with eps inside the root. A kernel may use
  the form x·scale + shift and declares which it uses. A variance below −eps gives NaN throughout
  its channel; one of −eps itself is not specified.
- ReLU(x) is x for x > 0, NaN for NaN, and a zero otherwise.
- Add: a + b; with `relu`, ReLU(a + b).
- MaxPool2d: padding never wins, not even over −Inf; a window that holds a NaN gives NaN.
- ConvMaxPool is its convolution and then its max-pooling, each as above: every value that is
  compared is a whole output of the convolution, with bias and ReLU, and rounded as the contract
  declares (to store it before or after the maximum is the same, since rounding keeps order).
  Outside the convolution's output is padding of the pool: it never wins, whatever the
  convolution would give there. A kernel of it is optional; see `r18.runtime.fusing`.
- ConvProjection is its projection of the second input, and then its convolution, which adds it: one
  sum of both convolutions' products and biases, and ReLU. The projection is not rounded to storage
  in between. A kernel of it is optional; see `r18.runtime.fusing`.
- GlobalAvgPool: the sum over height and width divided by height·width.
- AvgPoolLinear is its pooling and then its linear layer. Its means may be kept in the accumulator
  or rounded to storage, as the contract declares. A kernel of it is optional; see
  `r18.runtime.fusing`.
- Linear: x·wᵀ + bias. Softmax: over the last axis, shifted by the maximum; a row that holds a NaN
  or +Inf is NaN throughout; −Inf gives 0, unless the whole row is −Inf, which is NaN.
- Normalize: (x / 255 − mean) / std, channel by channel, of pixels x: bytes, 0 to 255. It may be
  computed as x·scale + shift. A kernel of it is needed only for `CompileOptions.pixels`.
- Quantised ops: integers, exact sums, and a requantisation to the bit, in `r18.graph.quantized`.
  Kernels for them are optional. QuantizedConvMaxPool and QuantizedAvgPoolLinear are their ops one
  after the other.
- Scaled ops: e4m3 numbers with scales, in `r18.graph.scaled`. Kernels for them are optional.
  ScaledConvMaxPool and ScaledAvgPoolLinear are their ops one after the other.
- The sign of a zero in an output is not specified.
- Inputs and weights are read only, and every element of the output is written, each time. An op
  never reads the output buffer, except for a kernel that declares `in_place` and is given the
  same buffer as its first input and its output.

Activations are passed densely packed in the kernel's `layout`, in its precision's storage format
or the op's own (`Op.input_storage`, `Op.output_storage`); 2-d activations are row-major, pixels
uint8 in NHWC (`input_layout`). All shapes in `Problem` are logical (NCHW).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pkgutil import resolve_name
from typing import ClassVar

from r18.backend.ceilings import Ceiling
from r18.backend.device import Array, Buffer, DeviceInfo, Event, Memory, Stream
from r18.backend.host import HostMemory, HostStream
from r18.backend.kernel import HostCode, Kernel
from r18.backend.options import CompileOptions
from r18.backend.plan import Plan
from r18.backend.program import Program
from r18.backend.tuned import Fastest
from r18.errors import UsageError, show
from r18.graph.ops import Problem
from r18.graph.schedule import Schedule
from r18.stopwatch import part

PLANNER = "r18.runtime.plan:make_plan"
"""Named, not imported: the planner is built on this module, not this module on the planner."""


class Backend(ABC):
    """A set of kernels, and the memory and streams that they work with.

    A subclass gives its `name`, `probe` and `kernels`; one that does not compute on the host also
    `memory` and `stream`. Making one contacts no device; `probe` is the first contact.
    """

    name: ClassVar[str]

    @abstractmethod
    def probe(self) -> DeviceInfo:
        """Contact the device and describe it. Raises `BackendUnavailable`."""

    def simulates(self) -> bool:
        """Whether it is known before `probe` that it would run in a simulator; False by default.

        `auto` then passes it by without loading it. Raises `BackendUnavailable`.
        """
        return False

    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, the preferred one for an op and precision first; the same each time."""

    @cached_property
    def memory(self) -> Memory:
        """The allocator; host memory by default."""
        return HostMemory()

    def stream(self) -> Stream:
        """A new stream; by default the host's, where a kernel has finished when it returns."""
        return HostStream()

    def prepare(self, calls: Iterable[tuple[Kernel, Problem]]) -> None:  # noqa: B027
        """Compile the kernels for many problems before their first call, in parallel.

        Optional: a kernel that was not prepared is compiled when it is called.
        """

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        """The kernels that a kernel chooses among by a problem's size, without listed ones.

        Each is the kernel restricted to one choice, such as a tile; its id is the kernel's and one
        part more, its `variant_of` the kernel's id, and `edges` and `extra_problems` are its own.
        The same objects each time; none by default. The oracle verifies each by itself, on problems
        too small for the kernel to choose it.
        """
        return ()

    def variant(self, kernel: Kernel, problem: Problem) -> Kernel | None:
        """The one that a kernel chooses for a problem that it takes; pure.

        One of its variants, or a kernel that the backend lists. None, the default, for a kernel
        that does not choose.
        """
        return None

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        """The kernel that plans prefer for the problem, such as by measurement
        (`r18.backend.tuned.Table`).

        None, the default: the first kernel that takes it. Pure on one device.
        """
        return None

    def beside(self, first: Problem, second: Problem, precision: str) -> bool:
        """Whether two independent steps take less time when they run at the same time. Pure.

        Only for streams that have a `branch` of their own; False by default.
        """
        return False

    def perturb(self, seed: int | None, kinds: Collection[str] | None = None) -> tuple[str, ...]:
        """Delay threads and copies, chosen by a seed; a right kernel's results do not change.

        This applies to calls and programs that are made from now on, and to those made since delays
        began. Waits for the device. seed: None for the kernels as they are. kinds: the kinds of
        site to delay; None for all, () for builds with delays in which nothing is delayed.

        Returns all kinds of site. (), the default: the backend cannot delay anything.
        """
        return ()

    def host_code(self, kernel: Kernel, problem: Problem) -> HostCode | None:
        """The machine code that a kernel of this backend runs on the host for a problem it takes.

        For `r18 kernels --assembly`. Compiles, and computes nothing. None, the default: the kernel
        is not compiled, or multiplies nothing.
        """
        return None

    def ceilings(self, progress: Callable[[str], None]) -> tuple[Ceiling, ...]:
        """Measure the peak rates of the probed device, per instruction and memory.

        For `r18 roofline --measure`, on an idle device; takes about two seconds for each.
        progress: called with a few words as each measurement begins. (), the default: nothing is
        measured, and the rate of a library's matrix product is used instead.
        """
        return ()

    def program(self, plan: Plan, weights: Mapping[str, Array]) -> Program:
        """A plan made ready to run; `weights` are those of level `none`."""
        return Program(self, plan, weights)

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Program:
        """Plan, prepare the kernels, upload the weights, capture the launches.

        `weights` are those of level `none`, by torchvision's names: NumPy's arrays, or PyTorch's
        tensors as in `model.state_dict()`. Raises as `r18.runtime.plan.make_plan` does,
        `WeightsError` for a weight that is missing, misshapen or not floating-point, and
        `UsageError` for arguments of another kind.
        """
        for what, given, wanted in (
            ("schedule", schedule, Schedule),
            ("options", options, CompileOptions),
        ):
            if not isinstance(given, wanted):
                raise UsageError(f"{what} must be a {wanted.__name__}, got {show(given)}")
        with part("plan"):
            plan: Plan = resolve_name(PLANNER)(self, schedule, options)
        with part("kernels compiled ahead"):
            self.prepare((step.kernel, step.problem) for step in plan.steps)
        with part("weights folded and packed"):
            return self.program(plan, weights)


__all__ = ["Backend", "Buffer", "Event", "Kernel", "Memory", "Program", "Stream"]
