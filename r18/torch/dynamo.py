"""PyTorch's door: `torch.compile(model, backend="r18")`.

How it works

1. `torch.compile` captures the model's forward pass as a graph of functions (`captured` reads it),
   with the parameters as inputs. So they are tensors of the call: what changes in them is noticed
   as in the drop-in.
2. Whole ResNets and single layers in it (`recognized`) are replaced by the operators `r18::resnet`
   and `r18::layer`, for the backend that the drop-in would choose.
3. The graph goes to inductor with these operators in it. It runs as it is where nothing else is
   left, or where inductor has no compiler.

Calls that are not for our kernels are left to inductor with a reason: gradients, training mode,
autocast, dtypes, dynamic shapes, settings without a kernel. `explain` returns the reasons, and the
logger `r18.torch.dynamo` has them at level INFO.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from r18.backend import CompileOptions
from r18.errors import BackendUnavailable, R18Error, UsageError, unknown
from r18.graph.ops import Conv2d, GlobalAvgPool, Layout, Linear, MaxPool2d
from r18.runtime.plan import make_plan
from r18.torch.captured import Read, Unread, read, shape, value
from r18.torch.choice import choose_layers
from r18.torch.followed import Followed
from r18.torch.layer import text_of
from r18.torch.network import network_schedule
from r18.torch.operators import backend_named, ops
from r18.torch.recognized import Part, Whole, find_layers, find_whole
from r18.torch.storage import below_autograd, precision_of, storage_dtype

log = logging.getLogger(__name__)

OPTIONS = ("backend", "precision", "rest")
"""The names that `options=` of `torch.compile` may have."""

RESTS = ("inductor", "eager")

Compiled = Callable[..., Any]


@dataclass
class Report:
    """The parts of one captured graph, and what computes each.

    backend:  the backend of our parts; empty where there are none.
    ours:     the parts on our kernels, a line each.
    rest:     the other calls, by their callee.
    compiler: of the rest: `inductor`, or `eager`; with the reason, if it was not asked for.
    reasons:  why calls that are like our ops were left, a line each.
    """

    backend: str = ""
    ours: list[str] = field(default_factory=list)
    rest: Counter[str] = field(default_factory=Counter)
    compiler: str = ""
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = self.backend or ("a drop-in's backend" if self.ours else "no backend")
        lines = [f"on r18's kernels ({where}): {len(self.ours) or 'none'}"]
        lines += [f"  {line}" for line in self.ours]
        lines.append(f"left to PyTorch ({self.compiler}): {sum(self.rest.values()) or 'none'}")
        if self.rest:
            calls = ", ".join(f"{n} {name}" for name, n in sorted(self.rest.items()))
            lines.append(f"  {calls}")
        lines += [f"  {line}" for line in self.reasons]
        return "\n".join(lines)


@dataclass
class Explanation:
    """A report for each graph that `torch.compile` captured of a model."""

    reports: list[Report]

    def __str__(self) -> str:
        count = len(self.reports)
        return "\n".join(
            f"graph {number} of {count}: {report}"
            for number, report in enumerate(self.reports, start=1)
        )


def compile_graph(
    graph: GraphModule,
    examples: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """A captured graph with our kernels in it: what `torch.compile(model, backend="r18")` calls.

    options: `backend`: as `optimize_resnet` takes it; `precision`: one whose storage is the
    model's dtype, such as tf32; `rest`: `inductor`, or `eager` for what is left of the graph.

    Raises `UsageError` for other options or a mode, `BackendUnavailable` for a backend that was
    asked for and cannot compute where the model is. All other calls that are not for our kernels
    are left to the rest.
    """
    compiled, report = _compiled(graph, examples, mode, options)
    log.info("%s", report)
    if not report.ours:
        why = "; ".join(dict.fromkeys(report.reasons)) or (
            "there is no convolution, max-pooling, global average pooling or linear layer of images"
        )
        _warn_once(
            "torch.compile(backend='r18') found nothing for r18's kernels, and leaves the graph "
            f"to {report.compiler}: {why}"
        )
    return compiled


def explain(
    model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None
) -> Explanation:
    """Report which parts `torch.compile(model, backend="r18")` would run where, for such inputs.

    Runs the model once, without gradients; what is left of it is not compiled. Its `str` is for
    people. Raises what `compile_graph` raises.
    """
    reports: list[Report] = []

    def recording(graph: GraphModule, examples: Sequence[Any]) -> Compiled:
        _, report = _compiled(graph, examples, None, options, only_look=True)
        reports.append(report)
        return graph.forward

    with torch.no_grad():
        torch.compile(model, backend=recording)(*inputs)
    return Explanation(reports)


_SAID: set[str] = set()


def _warn_once(sentence: str) -> None:
    if sentence not in _SAID:
        _SAID.add(sentence)
        warnings.warn(sentence, UserWarning, stacklevel=3)


# -- the graph ---------------------------------------------------------------------------------


def _compiled(
    graph: GraphModule,
    examples: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    only_look: bool = False,
) -> tuple[Compiled, Report]:
    asked = dict(options or {})
    for name in asked:
        if name not in OPTIONS:
            raise unknown("option of the backend r18", name, OPTIONS, error=UsageError)
    if mode not in (None, "default"):
        raise UsageError(
            f"mode='{mode}' is inductor's, and r18's kernels do not have it\n"
            "  leave it out, or compile with backend='inductor'"
        )
    rest = asked.get("rest", RESTS[0])
    if rest not in RESTS:
        raise unknown("compiler of the rest", rest, RESTS, error=UsageError)
    report = Report()
    kept: list[Followed] = []
    try:
        _check_graph(graph, examples)
        _replace_parts(graph, examples, asked, report, kept)
    except Unread as error:
        report.reasons.append(str(error))
    _note_drop_ins(graph, report)
    left = [node for node in graph.graph.nodes if _computes(node)]
    report.rest = Counter(_called(node) for node in left)
    report.compiler = _compiler(rest, examples, bool(left), report)
    if only_look:
        return graph.forward, report
    run: Compiled = graph.forward
    if report.compiler == RESTS[0]:
        from torch._dynamo.backends.registry import lookup_backend

        run = lookup_backend(RESTS[0])(graph, list(examples))
    elif not left:
        run = partial(_below, run)
    return _Owner(run, kept), report


class _Owner:
    """The compiled graph, and the data derived from its weights."""

    def __init__(self, run: Compiled, kept: list[Followed]) -> None:
        self._run = run
        self._kept = kept

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def _below(run: Compiled, *args: Any) -> Any:
    with torch.no_grad(), below_autograd():
        return run(*args)


def _note_drop_ins(graph: GraphModule, report: Report) -> None:
    """Count the calls of a drop-in, which the model has from `optimize_resnet`, as ours."""
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "r18" and not node.meta.get("r18"):
            node.meta["r18"] = True
            report.ours.append(f"{_called(node)}: of a drop-in, with a backend of its own")


def _computes(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return not (node.meta.get("r18") or node.target is torch.ops.aten.unsqueeze.default)


def _called(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _check_graph(graph: GraphModule, examples: Sequence[Any]) -> None:
    """Raise `Unread` for a graph that is not for inference as our kernels compute."""
    tensors = [example for example in examples if isinstance(example, torch.Tensor)]
    wanting = sum(tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and wanting:
        raise Unread(
            f"gradients are on and {wanting} of its tensors want one, and kernels have none: call "
            "it under torch.no_grad() or torch.inference_mode()"
        )
    for kind in {tensor.device.type for tensor in tensors}:
        if torch.is_autocast_enabled(kind):
            raise Unread("autocast is on, and chooses dtypes itself: cast the model")
    for node in graph.graph.nodes:
        name = _called(node)
        if name in ("_enter_autocast", "_set_grad_enabled"):
            raise Unread(f"the model calls {name} in its forward pass")
        if node.op == "call_module":
            raise Unread(
                "PyTorch captured modules, not functions: it takes PyTorch 2.5, and "
                "torch._dynamo.config.inline_inbuilt_nn_modules"
            )


def _replace_parts(
    graph: GraphModule,
    examples: Sequence[Any],
    asked: Mapping[str, Any],
    report: Report,
    kept: list[Followed],
) -> None:
    """Replace nodes by our operators."""
    order = list(graph.graph.nodes)
    position = {node: place for place, node in enumerate(order)}
    reads: dict[Node, Read] = {}
    for node in order:
        try:
            if (found := read(node)) is not None:
                reads[node] = found
        except Unread as error:
            report.reasons.append(f"{node.name}: {error}")
    ours = [node for node, found in reads.items() if isinstance(found.op, LAYERS)]
    if not ours:
        return
    looked = _Look(order, examples, asked, value(ours[0]))
    put = _Put(graph, looked, report, kept)
    for whole in find_whole(order, position, reads):
        try:
            looked.check_whole(whole)
        except (Unread, R18Error) as error:
            first = str(error).splitlines()[0]
            report.reasons.append(f"{whole.network.text}, layer by layer: {first}")
            continue
        put.whole(whole)
        for node in whole.nodes:
            reads.pop(node, None)
    order = list(graph.graph.nodes)
    position = {node: place for place, node in enumerate(order)}
    parts, reasons = find_layers(order, position, reads, looked.check)
    for part in parts:
        put.layer(part)
    report.reasons += [f"{node.name}: {why}" for node, why in reasons.items()]
    report.backend = looked.backend if report.ours else ""
    graph.recompile()


LAYERS = (Conv2d, MaxPool2d, GlobalAvgPool, Linear)
"""The ops that a layer of ours begins with."""


class _Look:
    """The backend's answers for tensors like the first that one of our ops reads."""

    def __init__(
        self,
        order: Sequence[Node],
        examples: Sequence[Any],
        asked: Mapping[str, Any],
        like: torch.Tensor,
    ) -> None:
        inputs = [node for node in order if node.op == "placeholder"]
        self._examples = dict(zip(inputs, examples, strict=False))
        self._kind = (like.dtype, like.device)
        try:
            self.precision = asked.get("precision") or precision_of(like.dtype)
        except UsageError as error:
            raise Unread(str(error).splitlines()[0]) from None
        if storage_dtype(self.precision) != like.dtype:
            raise UsageError(
                f"the model is in {like.dtype}, and {self.precision} stores "
                f"{storage_dtype(self.precision)}\n  cast the model, or leave the precision out"
            )
        try:
            self.backend = choose_layers(asked.get("backend"), like.device.type, self.precision)
        except BackendUnavailable as error:
            if error.name != "auto":  # what was asked for is taken or is an error
                raise
            raise Unread(str(error)) from None

    def check_whole(self, whole: Whole) -> None:
        """Raise `Unread` or an error of ours for a ResNet that cannot be computed."""
        self._check_tensors((whole.images, whole.nodes[-1]), whole.weights)
        _, _, height, width = shape(whole.images)
        batch, classes = shape(whole.nodes[-1])
        schedule = network_schedule(classes, height, width, whole.eps, whole.network)
        options = CompileOptions(batch=batch, precision=self.precision, fusion="all", graph=False)
        make_plan(backend_named(self.backend), schedule, options)

    def check(self, part: Part) -> None:
        """Raise `Unread` or an error of ours for a layer that cannot be computed."""
        self._check_tensors((*part.inputs, part.nodes[-1]), part.weights)
        asked = part.asked
        asked.kernel(backend_named(self.backend), self.precision)
        if isinstance(part.op, GlobalAvgPool):
            return
        if asked.problem.output != (found := shape(part.nodes[-1])):
            raise Unread(f"PyTorch's result has shape {found}, ours {asked.problem.output}")

    def _check_tensors(self, nodes: Sequence[Node], weights: Sequence[Node]) -> None:
        for node in (*nodes, *weights):
            tensor = value(node)
            if (tensor.dtype, tensor.device) != self._kind:
                dtype, device = self._kind
                raise Unread(
                    f"{node.name} is {tensor.dtype} on {tensor.device}, not {dtype} on {device}"
                )
        for node in weights:
            given = self._examples.get(node)
            kept = isinstance(given, nn.Parameter) or "_buffers" in str(node.target)
            if not (isinstance(given, torch.Tensor) and kept):
                raise Unread(
                    f"its weight {node.name} is no parameter: it would be packed each time"
                )
            if given.is_inference():
                raise Unread(
                    f"{node.name} was made in inference mode, where PyTorch does not count changes"
                )
            if given.layout != torch.strided or type(given.data) is not torch.Tensor:
                raise Unread(f"{node.name} is a {type(given).__name__}, no plain dense tensor")


class _Put:
    """Replaces nodes by our operators."""

    def __init__(
        self, graph: GraphModule, looked: _Look, report: Report, kept: list[Followed]
    ) -> None:
        self._graph = graph.graph
        self._looked = looked
        self._report = report
        self._kept = kept
        self._new: dict[Node, Node] = {}  # by what was there

    def whole(self, whole: Whole) -> None:
        images = self._now(whole.images)
        text = whole.network.text
        args = (images, list(whole.weights), list(whole.eps), text, *self._how())
        self._put(whole.nodes, ops.resnet.default, args)
        extents = "×".join(map(str, shape(whole.images)))
        self._report.ours.append(
            f"{whole.nodes[-1].name}: {text} of {extents}, {len(whole.nodes)} calls"
        )

    def layer(self, part: Part) -> None:
        asked = part.asked
        inputs = list(map(self._now, part.inputs))
        nhwc = asked.wanted is Layout.NHWC
        args = (inputs, list(part.weights), text_of(part.op), part.eps, *self._how(), nhwc)
        last = part.nodes[-1]
        axes = len(shape(last)) - len(asked.problem.output)  # global pooling may keep them
        self._put(part.nodes, ops.layer.default, args, axes)
        self._report.ours.append(f"{last.name}: {asked.problem}")

    def _now(self, node: Node) -> Node:
        return self._new.get(node, node)

    def _how(self) -> tuple[int, str, str]:
        self._kept.append(Followed())
        return self._kept[-1].handle, self._looked.backend, self._looked.precision

    def _put(
        self, nodes: Sequence[Node], target: Any, args: tuple[Any, ...], axes: int = 0
    ) -> None:
        last = nodes[-1]
        with self._graph.inserting_before(last):
            made = new = self._graph.call_function(target, args)
            made.meta["r18"] = True
            for _ in range(axes):
                new = self._graph.call_function(torch.ops.aten.unsqueeze.default, (new, -1))
        new.meta["example_value"] = last.meta["example_value"]
        self._new[last] = new
        last.replace_all_uses_with(new)
        for node in reversed(nodes):
            self._graph.erase_node(node)


# -- the rest ----------------------------------------------------------------------------------


def _compiler(asked: str, examples: Sequence[Any], needed: bool, report: Report) -> str:
    """The compiler of the rest; a reason goes into the report where it is not the one asked for."""
    if not needed:
        return RESTS[1]
    if asked == RESTS[0] and (why := _no_inductor(examples)) is not None:
        report.reasons.append(f"inductor has no compiler here, so the rest runs eagerly: {why}")
        return RESTS[1]
    return asked


def _no_inductor(examples: Sequence[Any]) -> str | None:
    """Why inductor cannot compile for these tensors' devices, None where it can."""
    kinds = {example.device.type for example in examples if isinstance(example, torch.Tensor)}
    try:
        if kinds - {"cpu", "meta"}:
            from torch.utils._triton import has_triton

            if not has_triton():
                return "Triton is missing, or does not know this GPU"
        if "cpu" in kinds:
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
    except Exception as error:  # each version of PyTorch has its own for a missing compiler
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


__all__ = ["Explanation", "Report", "compile_graph", "explain"]
