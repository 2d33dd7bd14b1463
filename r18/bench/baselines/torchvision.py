"""torchvision's own module, run as its users run it.

eager:   called as it is.
graph:   captured in a CUDA graph, replayed.
compile: `torch.compile(mode="reduce-overhead")`, which brings CUDA graphs of its own.

Its fp16x3 is its fp32, which that competes with: PyTorch splits no factors.

Each in NCHW and in channels-last memory. On a CPU only in NCHW, and bfloat16 only in channels-last
memory, where its convolutions are faster. Graphs are captured, code is compiled and cuDNN's
algorithms are searched before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from r18.backend import Array, StepTime
from r18.bench.baselines.ways import Way
from r18.bench.inputs.cold import BYTE, Flush
from r18.errors import BackendUnavailable
from r18.graph.resnet import FAMILY
from r18.graph.schedule import Schedule

TORCHVISION = tuple(FAMILY)
"""The networks that it has, of ours."""
BUILD_RUNS = 4
"""Runs before a peer is ready: torch.compile compiles in the first, records its graphs in the
next two, and replays from then on."""
COMPILED_MODULES = 64
"""How many modules torch.compile may build of the same code (8 by default): one a precision,
layout and batch."""


def device_words(kind: str) -> str:
    """PyTorch's device; imports what the peer needs."""
    try:
        import torch
        import torchvision
    except ImportError:
        return kind
    versions = f"PyTorch {torch.__version__}, torchvision {torchvision.__version__}"
    if kind == "cuda" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {versions}"
    return f"{kind.upper()}, {torch.get_num_threads()} threads, {versions}"


def place(kind: str) -> str:
    """Where PyTorch puts the tensors of a kind of device."""
    return kind


def torch_flush(nbytes: int) -> Flush:
    """Return a function that overwrites `nbytes` bytes of PyTorch's CUDA device."""
    import torch

    buffer = torch.empty(nbytes, dtype=torch.uint8, device=place("cuda"))

    def flush() -> None:
        buffer.fill_(BYTE)
        torch.cuda.synchronize()

    return flush


def on_host(output: Any) -> Array:
    """A copy of a tensor on the host; of a narrow one in float32, since NumPy has no bfloat16."""
    found: Array = (output.float() if output.dtype.itemsize < 4 else output).numpy()
    return found.copy()


def _missing(way: Way, error: ImportError) -> BackendUnavailable:
    return BackendUnavailable(way.name, f"it does not import: {error}", "pip install 'r18[torch]'")


class Torchvision:
    """torchvision's module with the schedule's weights. See `r18.bench.rows.Runner`.

    Raises `BackendUnavailable` where PyTorch is missing, torchvision lacks the network, or the
    device cannot run that way.
    """

    arena_nbytes = None
    kernels: Mapping[str, int] = {}

    def __init__(
        self,
        kind: str,
        schedule: Schedule,
        weights: Mapping[str, Array],
        precision: str,
        way: Way = Way(),
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise _missing(way, error) from error
        dtypes = {
            "fp32": torch.float32,
            "fp16x3": torch.float32,
            "tf32": torch.float32,
            "fp64": torch.float64,
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
        }
        self._torch: Any = torch
        self._way = way
        self._cuda = kind == "cuda"
        self._tf32 = precision == "tf32"
        if kind not in ("cpu", "cuda") or (self._cuda and not torch.cuda.is_available()):
            raise BackendUnavailable(way.name, f"PyTorch sees no device of kind '{kind}'")
        if precision not in dtypes or (self._tf32 and not self._cuda):
            raise BackendUnavailable(way.name, f"it has no {precision} on {kind}")
        if way.mode != "eager" and not self._cuda:
            raise BackendUnavailable(way.name, f"'{way.mode}' is for CUDA graphs, not for {kind}")
        module = self._made(schedule, weights)
        self._device, self._dtype = place(kind), dtypes[precision]
        channels_last = way.channels_last or (not self._cuda and precision == "bf16")
        self._format: Any = torch.channels_last if channels_last else torch.contiguous_format
        module = module.eval().to(self._device, self._dtype).to(memory_format=self._format)
        self.weight_nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
        self._module: Any = module
        self._images: Any = None
        self._output: Any = None
        self._once: Callable[[], None] = self._call
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        self._before = (cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32)

    def load(self, images: Array) -> None:
        # Global switches, set outside of the time; the peer may search for its fastest algorithms.
        self._switch(self._tf32, True, self._tf32)
        source = self._torch.from_numpy(images)
        if self._images is None:
            self._images = source.to(self._device, self._dtype, memory_format=self._format)
            self._build()
        else:
            self._images.copy_(source)  # a graph reads the memory that it was captured with
        self._wait()

    def run(self) -> None:
        self._once()
        self._wait()

    def time(self, clock: Callable[[], float]) -> float:
        if not self._cuda:
            begin = clock()
            self.run()
            return (clock() - begin) * 1e3
        events = self._torch.cuda.Event
        before, after = events(enable_timing=True), events(enable_timing=True)
        before.record()
        self._once()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after))

    def fetch(self) -> Array:
        return on_host(self._output.cpu())

    def steps(self) -> list[StepTime]:
        return []

    def close(self) -> None:
        self._switch(*self._before)

    def _made(self, schedule: Schedule, weights: Mapping[str, Array]) -> Any:
        """The module, with these weights."""
        try:
            import torchvision
        except ImportError as error:
            raise _missing(self._way, error) from error
        if schedule.name not in TORCHVISION or schedule.level != "none":
            raise BackendUnavailable(self._way.name, f"torchvision has no '{schedule.name}'")
        torch = self._torch
        classes = schedule.shapes(1)[schedule.output][1]
        module = getattr(torchvision.models, schedule.name)(num_classes=classes)
        state = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
        counters = [name for name in module.state_dict() if name.endswith("num_batches_tracked")]
        module.load_state_dict(state | {name: torch.tensor(0) for name in counters})
        return module

    # -- how it runs ---------------------------------------------------------------------------

    def _call(self) -> None:
        with self._torch.inference_mode():
            self._output = self._module(self._images)

    def _build(self) -> None:
        """Make ready to run that way, over `_images`."""
        if self._way.mode == "graph":
            self._capture()
        elif self._way.mode == "compile":
            self._compile()

    def _capture(self) -> None:
        cuda = self._torch.cuda
        side = cuda.Stream()  # as PyTorch asks: libraries settle on a stream of their own first
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(BUILD_RUNS):
                self._call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            self._call()
        self._once = graph.replay

    def _compile(self) -> None:
        torch = self._torch
        limits = torch._dynamo.config
        name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
        setattr(limits, name, max(COMPILED_MODULES, getattr(limits, name)))
        # Without fullgraph, what cannot be compiled would run in eager mode and not say so.
        module = torch.compile(self._module, mode="reduce-overhead", fullgraph=True, dynamic=False)

        def once() -> None:
            torch.compiler.cudagraph_mark_step_begin()  # the last output may be overwritten
            with torch.no_grad():
                self._output = module(self._images)

        self._once = once
        for _ in range(BUILD_RUNS):
            self.run()

    # -- the device ----------------------------------------------------------------------------

    def _switch(self, cudnn_tf32: bool, benchmark: bool, matmul_tf32: bool) -> None:
        if self._cuda:
            backends = self._torch.backends
            backends.cudnn.allow_tf32, backends.cudnn.benchmark = cudnn_tf32, benchmark
            backends.cuda.matmul.allow_tf32 = matmul_tf32

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


__all__ = ["BUILD_RUNS", "Torchvision", "device_words", "torch_flush"]
