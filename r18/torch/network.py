"""The whole network as one compiled plan, from the caller's images to new logits.

The first step reads the images in place and the last writes the logits into a new tensor, so these
two are launched in each run. The steps between them work in an arena; on a GPU they are a CUDA
graph. An arena belongs to one stream, whose order separates runs. During a user's graph capture
every step is launched on new memory, which then belongs to the captured graph.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from r18.backend import (
    Backend,
    Buffer,
    CompileOptions,
    Launch,
    Plan,
    PlannedStep,
    Stream,
    bind,
    prepare_plan,
)
from r18.graph.ops import BatchNorm, Layout, Relayout
from r18.graph.passes import fuse
from r18.graph.quantize import LEVEL, integer_weights, quantized
from r18.graph.resnet import FAMILY, ResNet
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan
from r18.torch.followed import Derived, Packed, Prepared, Tensors
from r18.torch.integers import Quantizer
from r18.torch.storage import (
    STORAGE,
    buffer_of,
    bytes_of,
    capturing,
    dense,
    empty,
    forbid_capture,
    host_array,
    kept_bytes,
    layout_of,
    on_device,
    stream_handle,
)

LANES = 4
"""Streams that have an arena of their own; further ones get new memory each time."""


@lru_cache(maxsize=64)
def network_schedule(
    classes: int,
    height: int,
    width: int,
    eps: tuple[float, ...],
    network: ResNet = FAMILY["resnet18"],
) -> Schedule:
    """A ResNet at level `none`; `eps` are its BatchNorms', in the order of the steps."""
    text = network.text
    schedule = network.schedule(text if text in FAMILY else "resnet", classes=classes)
    left = iter(eps)
    steps = tuple(
        replace(step, op=replace(step.op, eps=next(left)))
        if isinstance(step.op, BatchNorm)
        else step
        for step in schedule.steps
    )
    return replace(schedule, input_shape=(3, height, width), steps=steps)


class Network(Derived):
    """A ResNet for images of one shape.

    schedule: at level `none`. quantizer: in int8, of the network's weights.
    """

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        batch: int,
        precision: str,
        device: torch.device,
        weights: Tensors,
        quantizer: Quantizer | None = None,
    ) -> None:
        options = CompileOptions(batch=batch, precision=precision, fusion=LEVEL, graph=False)
        self._backend = backend
        self._schedule = schedule
        self._quantizer = quantizer
        planned = schedule
        if quantizer is not None:
            planned = quantized(fuse(schedule, LEVEL), quantizer.asked.bits)
        self._plan = make_plan(backend, planned, options)
        ends = (planned.input, planned.output)
        self._reads, self._writes = (STORAGE[self._plan.tensors[v].dtype.name] for v in ends)
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._ready = False
        self.prepared = Prepared(backend, device, self._pack, weights)

    def _pack(self, tensors: Tensors) -> Packed:
        if self._quantizer is not None:
            found = self._quantizer.quantization(self._backend, self._schedule, tensors)
            return prepare_plan(self._plan, integer_weights(fuse(self._schedule, LEVEL), found))
        arrays = map(host_array, tensors)
        names = self._schedule.weight_specs
        return prepare_plan(self._plan, dict(zip(names, arrays, strict=True)))

    def run(self, images: torch.Tensor) -> torch.Tensor:
        """New logits in the dtype of the images, (N, classes)."""
        plan, device, memory = self._plan, images.device, self._backend.memory
        with on_device(device):
            if not self._ready:
                forbid_capture(device, "the first run of a network")
            key = entry(plan, layout_of(images))
            stored = images.to(self._reads)
            source = dense(stored, plan.tensors[key].layout, self._backend.memory.alignment)
            target = plan.tensors[plan.schedule.output]
            logits = empty(target.shape, target.layout, self._writes, device)
            given = {
                key: buffer_of(memory, source),
                target.value: buffer_of(memory, logits),
            }
            handle = stream_handle(device)
            stream = memory.adopt_stream(handle)
            lane = self._lane(key, handle, device)
            if lane is None:
                arena = bytes_of(plan.arena_nbytes, device)
                bound = bind(plan, self.prepared.packed, buffer_of(memory, arena), given)
                for step, launch in zip(plan.steps, bound, strict=True):
                    if step.output != key:
                        launch.enqueue(stream)
                self.captured = self.captured or capturing(device)
            else:
                lane.run(given, stream)
            self._ready = True
            return logits.to(images.dtype)

    def _lane(self, key: str, handle: int, device: torch.device) -> Lane | None:
        """The stream's lane, new if need be; None where there should be none."""
        if capturing(device):
            return None
        lane = self._lanes.get((handle, key))
        if lane is None and len(self._lanes) < LANES:
            lane = Lane(self._plan, self.prepared.packed, self._backend, device, key)
            lane = self._lanes.setdefault((handle, key), lane)
        return lane


def entry(plan: Plan, layout: Layout) -> str:
    """The key of the tensor that images in a layout are.

    The plan's input, in NCHW; or, where the plan begins by bringing it to channels-last memory
    and the images lie there already, what that step makes, which is then left out.
    """
    source = plan.schedule.input
    readers = [step for step in plan.steps if source in step.inputs]
    (first, *others) = readers
    brings = isinstance(first.problem.op, Relayout) and first.problem.op.target is layout
    return first.output if brings and not others else source


class Lane:
    """The state of one stream: an arena, and the steps between images and logits as a graph."""

    def __init__(
        self, plan: Plan, packed: Packed, backend: Backend, device: torch.device, key: str
    ) -> None:
        self._device = device
        self._memory = backend.memory
        self._lock = threading.Lock()
        self._arena = kept_bytes(plan.arena_nbytes, device)
        launches = bind(plan, packed, buffer_of(self._memory, self._arena))
        pairs = list(zip(plan.steps, launches, strict=True))
        steps = [(step, launch) for step, launch in pairs if step.output != key]
        output = plan.schedule.output
        behind = 1 + max(i for i, (step, _) in enumerate(steps) if key in step.inputs)
        touches = (i for i, (s, _) in enumerate(steps) if output in (*s.inputs, s.output))
        before = max(behind, min(touches))
        self._head, self._foot = steps[:behind], steps[before:]
        self._middle = [launch for _, launch in steps[behind:before]]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ran = False

    def run(self, given: Mapping[str, Buffer], stream: Stream) -> None:
        """Enqueue everything, with the given buffers in the place of images and logits."""
        with self._lock:
            for step, launch in self._head:
                _redirected(step, launch, given).enqueue(stream)
            if self._device.type == "cuda" and self._ran and self._middle:
                if self._graph is None:
                    self._graph = self._captured()
                self._graph.replay()
            else:  # a first run also loads what it launches, which a capture does not allow
                for launch in self._middle:
                    launch.enqueue(stream)
            for step, launch in self._foot:
                _redirected(step, launch, given).enqueue(stream)
            self._ran = True

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                stream = self._memory.adopt_stream(side.cuda_stream)
                for launch in self._middle:
                    launch.enqueue(stream)
            finally:
                graph.capture_end()
        return graph


def _redirected(step: PlannedStep, launch: Launch, given: Mapping[str, Buffer]) -> Launch:
    """The launch with the given buffers in the place of the tensors of those keys."""
    return replace(
        launch,
        inputs=tuple(
            given.get(key, buffer) for key, buffer in zip(step.inputs, launch.inputs, strict=True)
        ),
        output=given.get(step.output, launch.output),
    )
