"""PyTorch's tensors as a backend's buffers: formats, layouts, memory, streams.

Nothing here copies but `dense` and `host_array`, which say when.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from r18.backend import Array, Backend, Buffer, Enqueue, Kernel, Memory
from r18.backend.launch import workspace_of
from r18.errors import BackendUnavailable, UsageError
from r18.graph.ops import Layout, Problem, Shape
from r18.graph.precision import precision as precision_named

STORAGE = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""PyTorch's name of a storage format."""

PRECISIONS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
"""The precision that a model in a dtype computes in."""

FORMATS = {Layout.NCHW: torch.contiguous_format, Layout.NHWC: torch.channels_last}


def storage_dtype(precision: str) -> torch.dtype:
    """The dtype that all tensors are stored in; raises `UnknownName`, and `UsageError` for int8."""
    storage = precision_named(precision).storage
    if storage not in STORAGE:
        known = ", ".join([*PRECISIONS.values(), "fp16x3", "tf32"])
        raise UsageError(f"{precision} is for whole networks; a layer computes in {known}")
    return STORAGE[storage]


def precision_of(dtype: torch.dtype) -> str:
    """The precision of a model in that dtype; raises `UsageError`."""
    if dtype not in PRECISIONS:
        known = ", ".join(str(known) for known in PRECISIONS)
        raise UsageError(f"weights and images must be in one of {known}, got {dtype}")
    return PRECISIONS[dtype]


# -- layouts -----------------------------------------------------------------------------------


def layout_of(tensor: torch.Tensor) -> Layout:
    """A tensor's layout: NHWC in channels-last memory, otherwise NCHW.

    A tensor that is dense in both, such as one pixel per image, counts as NCHW.
    """
    if tensor.dim() != 4 or tensor.is_contiguous():
        return Layout.NCHW
    channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return Layout.NHWC if channels_last else Layout.NCHW


def empty(
    shape: Sequence[int], layout: Layout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new dense tensor of a logical shape in a layout."""
    format = FORMATS[layout] if len(shape) == 4 else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=format)


def dense(tensor: torch.Tensor, layout: Layout, alignment: int) -> torch.Tensor:
    """The tensor, dense in a layout and at an aligned address; a copy where it is not."""
    format = FORMATS[layout] if tensor.dim() == 4 else torch.contiguous_format
    if not tensor.is_contiguous(memory_format=format):
        tensor = tensor.detach().contiguous(memory_format=format)
    if tensor.data_ptr() % alignment:
        tensor = tensor.clone(memory_format=format)  # kernels read in vectors
    return tensor


# -- memory and streams ------------------------------------------------------------------------


def check_adopts(backend: Backend) -> None:
    """Raise `BackendUnavailable` unless the backend's memory lays buffers over tensors."""
    if not backend.memory.adopts:
        raise BackendUnavailable(
            backend.name,
            "its memory cannot adopt PyTorch's tensors",
            "Choose a backend whose memory does: cupy on CUDA, numba-cpu or numpy on a CPU.",
        )


def buffer_of(memory: Memory, tensor: torch.Tensor) -> Buffer:
    """A dense tensor's bytes; the tensor lives as long as the buffer."""
    return memory.adopt(tensor.data_ptr(), tensor.nbytes, tensor)


def bytes_of(nbytes: int, device: torch.device) -> torch.Tensor:
    """New bytes of PyTorch's allocator; never none, which would have no address."""
    return torch.empty(max(1, nbytes), dtype=torch.uint8, device=device)


def kept_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """New bytes that outlive the call; on a GPU, all work on it has ended when they are there.

    NOTE: while torch.compile makes a CUDA graph, what the calling thread allocates belongs to that
    graph, which uses it again as it sees fit. So another thread asks for what is to be kept.
    """
    if device.type != "cuda":
        return bytes_of(nbytes, device)
    found = _keeper().submit(bytes_of, nbytes, device).result()
    wait(device)  # work in some stream may still use them for what they were before
    return found


@cache
def _keeper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "r18-memory")


def kept_span(nbytes: int, device: torch.device) -> tuple[int, object]:
    """As `Memory.allocating` asks for them: the address of kept bytes, and their owner."""
    tensor = kept_bytes(nbytes, device)
    return tensor.data_ptr(), tensor


def host_array(tensor: torch.Tensor) -> Array:
    """A tensor's values in NumPy, narrow formats widened exactly; from a GPU, waits and copies."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    array: Array = tensor.numpy()
    return array


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make that GPU the current one in this context, if it is not already; no-op for a CPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def below_autograd() -> AbstractContextManager[object]:
    """Skip autograd's dispatch layers in this context, as in inference mode, but return ordinary
    tensors. Only for tensors that need no gradient and that no caller holds.

    Under `torch.no_grad()` each operator still passes through these layers, which for a custom
    operator are Python functions: the gradient's, and the one that counts changes in place. All
    other layers stay: modes, tracing, autocast.
    """
    if torch.compiler.is_compiling():  # which knows no such guard, and leaves autograd out itself
        return _HERE
    # What PyTorch's own wrapper of a custom operator enters.
    guard: AbstractContextManager[object] = torch._C._AutoDispatchBelowADInplaceOrView()
    return guard


def stream_handle(device: torch.device) -> int:
    """PyTorch's current stream on a device; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    # What PyTorch's own generated code asks: without an object for the stream.
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forbid_capture(device: torch.device, what: str) -> None:
    """Raise `UsageError` in a capture, which `what` cannot be part of."""
    if capturing(device):
        raise UsageError(
            f"{what} cannot be captured in a CUDA graph\n"
            "  call the model once with input of this shape before the capture"
        )


class Run:
    """One kernel on one problem on one device, over dense tensors, in PyTorch's current stream.

    Everything that is the same for all calls is computed here: a call takes time on the host, and
    has to take less than the operators that it replaces.

    reads, writes: layouts of the inputs, and of the output, which has `shape` and `dtype`.
    weights: prepared, and kept by the caller.
    ready: it has run, so a capture may.
    """

    _bound: Enqueue  # once `_begin` has run

    def __init__(
        self,
        backend: Backend,
        kernel: Kernel,
        problem: Problem,
        reads: Layout,
        writes: Layout,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        weights: tuple[Buffer, ...] = (),
    ) -> None:
        self.kernel = kernel
        self.ready = False
        self._problem = problem
        self._weights = weights
        self._memory = backend.memory
        self._alignment = backend.memory.alignment
        self._reads = reads
        of_images = len(problem.inputs[0]) == 4  # the output of pooling need not be
        self._format = FORMATS[reads] if of_images else torch.contiguous_format
        self._shape = shape
        meta = empty(shape, writes, dtype, torch.device("meta"))
        self._stride, self._nbytes = meta.stride(), meta.nbytes
        self._dtype = dtype
        self._device = device
        self._cuda = device.index if device.type == "cuda" else None
        self._scratch = workspace_of(kernel, problem)

    def __call__(self, *inputs: torch.Tensor, over: bool = False) -> torch.Tensor:
        """The output; the inputs are copied where they do not lie as the kernel reads them.

        over: it may be written over the first input, and is where that can be.
        """
        index = self._cuda
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(*inputs, over=over)
        if not self.ready:
            self._begin()
        sources, addresses = inputs, []
        for place, tensor in enumerate(inputs):
            address = tensor.data_ptr()
            if address % self._alignment or not tensor.is_contiguous(memory_format=self._format):
                tensor = dense(tensor, self._reads, self._alignment)
                sources = (*sources[:place], tensor, *sources[place + 1 :])
                address = tensor.data_ptr()
            addresses.append(address)
        if over and sources[0] is inputs[0] and self._takes_the_first(addresses):
            output, written = sources[0], addresses[0]
        else:
            output = torch.empty_strided(
                self._shape, self._stride, dtype=self._dtype, device=self._device
            )
            written = output.data_ptr()
        # It lives until the launch is in the stream, and its bytes until that has run there.
        scratch = bytes_of(self._scratch, self._device) if self._scratch else None
        # What PyTorch's own generated code asks: without an object for the stream.
        stream = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
        self._bound(addresses, written, 0 if scratch is None else scratch.data_ptr(), stream)
        self.ready = True
        return output

    def _begin(self) -> None:
        """Bind the kernel, before the first run and on its device: this loads the kernel there."""
        forbid_capture(self._device, "the first run of a kernel")
        self._bound = self.kernel.bind(self._problem, self._weights, self._memory)

    def _takes_the_first(self, addresses: Sequence[int]) -> bool:
        """Whether the kernel may write over its first input: no other shares a byte with that."""
        first, nbytes = addresses[0], self._nbytes
        for other in addresses[1:]:
            if -nbytes < other - first < nbytes:
                return False
        return self.kernel.in_place


def check_alike(what: str, *kinds: tuple[torch.dtype, torch.device]) -> None:
    """Raise `UsageError` unless tensors of these dtypes and devices are of one kind."""
    if len(set(kinds)) > 1:
        said = dict.fromkeys(f"{dtype} on {device}" for dtype, device in kinds)
        raise UsageError(f"{what} takes tensors of one dtype on one device, got {', '.join(said)}")


def shape_of(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape)
