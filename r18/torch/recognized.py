"""The parts of a captured graph that are ours: whole ResNets, and single layers.

torchvision's and timm's models differ in their modules, and compute the same. So what a graph
computes is compared with a ResNet's schedule, step by step: only its ops count. A convolution takes
the BatchNorm, the sum and the ReLU behind it with it, as far as there is a kernel for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from r18.errors import R18Error
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    Problem,
    ReLU,
)
from r18.graph.resnet import GROUP_WIDTH, ResNet
from r18.torch.captured import Read, Unread, flattened, shape, undisturbed, value
from r18.torch.layer import Asked
from r18.torch.network import network_schedule
from r18.torch.storage import layout_of

STAGES = 4


@dataclass(frozen=True)
class Whole:
    """A ResNet in a graph.

    nodes: all of it, in order; the last makes the logits. weights, eps: as `r18::resnet` takes
    them.
    """

    network: ResNet
    images: Node
    nodes: tuple[Node, ...]
    weights: tuple[Node, ...]
    eps: tuple[float, ...]


def find_whole(
    order: Sequence[Node], position: dict[Node, int], reads: Mapping[Node, Read]
) -> list[Whole]:
    """Every ResNet in a graph whose inner values no other node reads.

    reads: the nodes that are ops of ours. Which of a graph's values are images is not known: what
    a ResNet's first convolution reads is taken for them.
    """
    found = []
    for node in order:
        if node in reads and isinstance(reads[node].op, Linear):
            whole = _whole(node, order, position, reads)
            if whole is not None:
                found.append(whole)
    return found


def _whole(
    logits: Node, order: Sequence[Node], position: dict[Node, int], reads: Mapping[Node, Read]
) -> Whole | None:
    nodes, sources = _behind(logits, reads)
    if len(sources) != 1 or len(reads[logits].weights) != 2:
        return None
    (images,) = sources
    steps = sorted((n for n in nodes if n in reads), key=position.__getitem__)
    network = _network_of([reads[node] for node in steps])
    if network is None or len(shape(images)) != 4:
        return None
    _, channels, height, width = shape(images)
    eps = tuple(op.eps for n in steps if isinstance(op := reads[n].op, BatchNorm))
    classes = reads[logits].op.weights()[0].shape[0]
    try:
        schedule = network_schedule(classes, height, width, eps, network)
    except (R18Error, StopIteration, RuntimeError):  # fewer BatchNorms than it has
        return None
    if channels != 3 or len(schedule.steps) != len(steps):
        return None
    # By op and inputs, so that the order in which a block's two ways are computed is free. eps
    # are in the graph's order, and the comparison fails where that is another one.
    waiting = Counter((reads[node].op, _inputs(reads[node])) for node in steps)
    if max(waiting.values()) > 1:
        return None
    by_call = {(reads[node].op, _inputs(reads[node])): node for node in steps}
    values, weights = {schedule.input: images}, list[Node]()
    for step in schedule.steps:
        inputs = frozenset(values[name] for name in step.inputs)
        node = by_call.pop((step.op, inputs), None)
        if node is None:
            return None
        values[step.output] = node
        weights += reads[node].weights
    ordered = tuple(sorted(nodes, key=position.__getitem__))
    inner = set(nodes) - {logits}
    private = all(set(node.users) <= nodes for node in inner)
    if by_call or not private or not undisturbed(ordered, position, order):
        return None
    return Whole(network, images, ordered, tuple(weights), eps)


def _behind(logits: Node, reads: Mapping[Node, Read]) -> tuple[set[Node], set[Node]]:
    """The nodes of our ops that the logits are made of, and the other nodes that those read."""
    nodes: set[Node] = set()
    sources: set[Node] = set()
    waiting = [logits]
    while waiting:
        node = waiting.pop()
        if node in nodes:
            continue
        source = flattened(node)
        if node in reads:
            nodes.add(node)
            waiting += reads[node].inputs
        elif source is not None:
            nodes.add(node)
            waiting.append(source)
        else:
            sources.add(node)
    return nodes, sources


def _inputs(read: Read) -> frozenset[Node]:
    """The inputs of an op, behind flattening; the order of a sum's terms does not matter."""
    return frozenset(flattened(node) or node for node in read.inputs)


def _network_of(steps: Sequence[Read]) -> ResNet | None:
    """The ResNet that these steps may be, by a few of them; the caller compares them all."""
    blocks: list[list[Conv2d]] = [[]]
    for read in steps:
        if isinstance(read.op, Conv2d):
            blocks[-1].append(read.op)
        elif isinstance(read.op, Add):
            blocks.append([])
    if not blocks[0]:
        return None
    stem, *first = blocks[0]
    blocks = [first, *blocks[1:-1]]
    if not all(blocks):
        return None
    # The first block of basic ones has no shortcut, and a bottleneck's two ways both begin so.
    kind = "bottleneck" if blocks[0][0].kernel_size == (1, 1) else "basic"
    counts: list[int] = []
    before = None
    for block in blocks:
        if (width := max(op.out_channels for op in block)) == before:
            counts[-1] += 1
        else:
            counts.append(1)
        before = width
    if len(counts) != STAGES:
        return None
    groups, group_width, dilate = 1, GROUP_WIDTH, [False] * (STAGES - 1)
    if kind == "bottleneck":
        middle = next((op for op in blocks[0] if op.kernel_size == (3, 3)), None)
        if middle is None:
            return None
        groups = middle.groups
        group_width = middle.out_channels * GROUP_WIDTH // max(1, groups * stem.out_channels)
        starts = [sum(counts[:stage]) for stage in range(1, STAGES)]
        dilate = [all(op.stride == (1, 1) for op in blocks[start]) for start in starts]
    try:
        return ResNet(kind, tuple(counts), stem.out_channels, groups, group_width, tuple(dilate))
    except R18Error:
        return None


# -- layers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A layer in a graph, and what is fused into it.

    nodes: all of it, in order; the last makes its value. op, eps, inputs, weights: as `r18::layer`
    takes them.
    """

    nodes: tuple[Node, ...]
    op: Op
    eps: float
    inputs: tuple[Node, ...]
    weights: tuple[Node, ...]

    @property
    def asked(self) -> Asked:
        """The layer without its tensors; the output is in the layout that PyTorch's would have."""
        shapes = tuple(map(shape, self.inputs))
        reads, wanted = layout_of(value(self.inputs[0])), layout_of(value(self.nodes[-1]))
        return Asked(Problem(self.op, shapes), self.eps, reads, wanted)


def find_layers(
    order: Sequence[Node],
    position: dict[Node, int],
    reads: Mapping[Node, Read],
    check: Callable[[Part], None],
) -> tuple[list[Part], dict[Node, str]]:
    """The layers of a graph, and why others are none.

    reads: the nodes that are ops of ours, and in no larger part. check: raises `Unread` or an error
    of ours for a layer that cannot be computed.
    """
    found: list[Part] = []
    reasons: dict[Node, str] = {}
    taken: set[Node] = set()
    for node in order:
        if node not in reads or node in taken:
            continue
        for part in reversed(list(_chain(node, reads))):
            if taken & set(part.nodes) or not undisturbed(part.nodes, position, order):
                continue
            try:
                check(part)
            except (Unread, R18Error) as error:
                reasons[node] = str(error).splitlines()[0]
                continue
            found.append(part)
            taken |= set(part.nodes)
            reasons.pop(node, None)
            break
    return found, reasons


def _chain(node: Node, reads: Mapping[Node, Read]) -> Iterator[Part]:
    """Layers that begin at a node, each with more of the nodes that follow it."""
    first = reads[node]
    op = first.op
    if isinstance(op, (MaxPool2d, GlobalAvgPool, Linear)):
        yield Part((node,), op, 0.0, first.inputs, first.weights)
    if not isinstance(op, Conv2d):
        return
    part = Part((node,), op, 0.0, first.inputs, first.weights)
    yield part
    following = _only_reader(part, reads)
    if following is not None and isinstance(norm := reads[following].op, BatchNorm):
        part = replace(
            part,
            nodes=(*part.nodes, following),
            op=replace(op, bias=True),
            eps=norm.eps,
            weights=(*part.weights, *reads[following].weights),
        )
        yield part
        following = _only_reader(part, reads)
    if following is not None and isinstance(reads[following].op, Add):
        a, b = reads[following].inputs
        if a is b:
            return
        part = replace(
            part,
            nodes=(*part.nodes, following),
            op=replace(part.op, residual=True),  # type: ignore[call-arg]  # a convolution
            inputs=(*part.inputs, b if a is part.nodes[-1] else a),
        )
        yield part
        following = _only_reader(part, reads)
    if following is not None and isinstance(reads[following].op, ReLU):
        yield replace(
            part,
            nodes=(*part.nodes, following),
            op=replace(part.op, relu=True),  # type: ignore[call-arg]  # a convolution
        )


def _only_reader(part: Part, reads: Mapping[Node, Read]) -> Node | None:
    """The only reader of a part's value, if that is an op that reads an activation; else None."""
    last = part.nodes[-1]
    if len(last.users) != 1:
        return None
    (user,) = last.users
    return user if user in reads and last in reads[user].inputs else None
