"""The work of the megakernel as data: items, packed weights, and where activations are.

Pure NumPy, so that a machine without a GPU can check it (`check.py`). See megakernel.cu.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d
from r18.graph.passes import fold_weights, fuse
from r18.graph.resnet import network
from r18.graph.schedule import Schedule

# As in megakernel.cu.
PIXELS, THREADS, WARPS, TAPS = 56, 256, 8, 9
SUMS_NBYTES, MEANS_NBYTES, SLOT_NBYTES = PIXELS * 80, PIXELS * 16, WARPS * TAPS * 512
UNITS = PIXELS * 4
FEATURES = 8  # of a classifier's item
CHUNK = 16  # bytes
SHARED_NBYTES = 227 * 1024


def _fields() -> list[str]:
    """The names of the integers of `Item` in megakernel.cu, in order."""
    text = Path(__file__).with_name("megakernel.cu").read_text("utf-8")
    body = text.partition("struct alignas(16) Item {")[2].partition("int unused")[0]
    lists = re.findall(r"int ([^;]*);", re.sub(r"//.*", "", body))
    return [name.strip() for names in lists for name in names.split(",")]


FIELDS = _fields()
PADDING = -len(FIELDS) % 4 or 4  # integers, so that items are copied 16 bytes at a time
ITEM = np.dtype([*((name, np.int32) for name in FIELDS), ("unused", np.int32, PADDING)])
TILES = {56: (7, 8), 28: (4, 14), 14: (7, 7), 7: (7, 7)}  # rows and columns of pixels, by width
STEM = "maxpool"


@dataclass(frozen=True)
class Layer:
    """A convolution behind the stem. source, output, residual: values of the schedule."""

    name: str
    op: Conv2d
    source: str
    output: str
    residual: str | None
    size: int  # of the input
    out_size: int
    weight: str
    bias: str

    @property
    def taps(self) -> int:
        return self.op.kernel_size[0] * self.op.kernel_size[1]


@dataclass(frozen=True)
class Plan:
    """How layers are divided.

    wide: layers (by out_size) whose items have 32 channels and slices of 64 input channels; others
    have 16 and 128. Layers with 64 input channels are always wide.
    """

    ctas: int = 132
    wide: tuple[int, ...] = ()


@dataclass
class Work:
    """What the kernel reads.

    items, names: by CTA, in order. offsets: of each value in a half of the arena.
    half_nbytes: of each half.
    """

    plan: Plan
    layers: list[Layer]
    items: list[list[Array]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    weights: list[Array] = field(default_factory=list)
    biases: list[Array] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    half_nbytes: int = 0
    weight_nbytes: int = 0
    bias_count: int = 0
    features: int = 0

    def take(self, nbytes: int) -> int:
        """Bytes of the arena."""
        found = self.half_nbytes
        self.half_nbytes += -(-nbytes // 128) * 128
        return found

    def add_weights(self, packed: Array) -> int:
        found = self.weight_nbytes
        self.weights.append(np.ascontiguousarray(packed, np.float16).reshape(-1))
        self.weight_nbytes += self.weights[-1].nbytes
        return found

    def add_biases(self, biases: Array, count: int) -> int:
        found = self.bias_count
        padded = np.zeros(count, np.float32)
        padded[: len(biases)] = biases
        self.biases.append(padded)
        self.bias_count += count
        return found

    @property
    def most_items(self) -> int:
        return max(map(len, self.items))

    @property
    def counts(self) -> Array:
        return np.array([len(one) for one in self.items], np.int32)

    @property
    def table(self) -> Array:
        """[CTAs][most_items] of ITEM."""
        found = np.zeros((len(self.items), self.most_items), ITEM)
        for row, items in zip(found, self.items, strict=True):
            for n, item in enumerate(items):
                row[n] = item
        return found

    @property
    def input_nbytes(self) -> int:
        """Shared memory for the largest region."""
        regions = (
            -(-int(i["region"]) // int(i["columns"])) * int(i["row_pitch"])
            for items in self.items
            for i in items
            if i["kind"] == 0
        )
        return -(-max(regions) // 128) * 128

    def chunks(self) -> list[int]:
        """Chunks per thread that items load, in ascending order."""
        return sorted(
            {
                -(-(int(i["region"]) << int(i["shift"])) // THREADS)
                for items in self.items
                for i in items
                if i["kind"] == 0
            }
        )

    def shared_nbytes(self, stages: int) -> int:
        table = -(-self.most_items * ITEM.itemsize // 128) * 128
        fixed = table + WARPS * SUMS_NBYTES + MEANS_NBYTES + self.input_nbytes
        return fixed + stages * SLOT_NBYTES


def fused_schedule() -> Schedule:
    return fuse(network("resnet18"), "all")


def layers_of(schedule: Schedule) -> list[Layer]:
    problems = schedule.problems(1)
    found = []
    for step in schedule.steps:
        if isinstance(step.op, Conv2d) and step.name != "conv1":
            problem = problems[step.name]
            residual = step.inputs[1] if step.op.residual else None
            sizes = problem.inputs[0][3], problem.output[3]
            found.append(
                Layer(
                    step.name, step.op, step.inputs[0], step.output, residual, *sizes, *step.weights
                )
            )
    return found


def pack(weight: Array, halves: int, parts: int) -> Array:
    """OIHW to [tile][part][half][warp][tap][lane][8], as mma.m16n8k16 takes A."""
    o, c, kh, kw = weight.shape
    warps = WARPS // halves
    tiles = o // (16 * halves)
    assert c == parts * warps * 16
    split = weight.reshape(tiles, halves, 2, 8, parts, warps, 2, 4, 2, kh * kw)
    # tile half g8 g part warp k8 q e tap -> tile part half warp tap g q k8 g8 e
    return split.transpose(0, 4, 1, 5, 9, 3, 7, 6, 2, 8)


def magic_of(divisor: int, limit: int) -> int:
    """m with i·m >> 16 = i // divisor for 0 <= i < limit."""
    magic = -(-65536 // divisor)
    assert all(i * magic >> 16 == i // divisor for i in range(limit))
    return magic


def conflicts(units: list[int]) -> int:
    """Extra cycles of ldmatrix for rows that begin at these multiples of 16 bytes."""
    extra = 0
    for first in range(0, len(units) - 7, 8):
        banks = [unit % 8 for unit in units[first : first + 8]]
        extra += max(banks.count(bank) for bank in banks) - 1
    return extra


def region_of(layer: Layer, slice_channels: int) -> dict[str, int]:
    """The fields of an item that describe its region and its tile of pixels."""
    rows, columns = TILES[layer.out_size]
    (window, _), (stride, _) = layer.op.kernel_size, layer.op.stride
    step = stride if window == 1 else 1  # pixels between windows of 1×1 are not loaded
    apart = stride // step  # pixels of the region between adjacent windows
    height, width = (rows - 1) * apart + window, (columns - 1) * apart + window
    half = -(-width // 2) if apart == 2 else 0
    chunks = slice_channels * 2 // CHUNK
    pitch = chunks + 1  # odd: adjacent pixels are in different banks
    across = 2 * half if half else width

    def units(pad: int) -> list[int]:
        row = across * pitch + pad
        return [p // columns * apart * row + p % columns * pitch for p in range(rows * columns)]

    pad = min(range(8), key=lambda pad: (conflicts(units(pad)), pad))
    row_pitch = (across * pitch + pad) * CHUNK
    tap1 = half if half else 1
    tap2 = 1 if half else 2
    return {
        "step": step,
        "region": height * width,
        "columns": width,
        "magic": magic_of(width, 16 * THREADS // chunks),
        "shift": chunks.bit_length() - 1,
        "pitch": pitch * CHUNK,
        "row_pitch": row_pitch,
        "half": half,
        "tile_columns": columns,
        "tile_magic": magic_of(columns, 2 * THREADS),
        "pixels": rows * columns,
        "tile_row": apart * row_pitch,
        "tap1": tap1 * pitch * CHUNK,
        "tap2": tap2 * pitch * CHUNK,
    }


def make_work(plan: Plan, schedule: Schedule, weights: Mapping[str, Array]) -> Work:
    """The whole table. weights: of level `none`."""
    folded = fold_weights(schedule, weights)
    work = Work(plan, layers_of(schedule))
    work.items = [[] for _ in range(plan.ctas)]
    work.names = [[] for _ in range(plan.ctas)]
    for layer in work.layers:
        nbytes = layer.out_size**2 * layer.op.out_channels * 2
        work.offsets[layer.output] = work.take(nbytes)
    last = work.layers[-1]
    work.offsets["mean"] = work.take(last.op.out_channels * 4)
    stage: list[tuple[str, Array]] = []
    for layer, following in [*pairwise(work.layers), (last, None)]:
        stage += [(layer.name, item) for item in items_of(work, layer, folded, layer is last)]
        if following is not None and following.source == layer.source:
            continue  # the downsampling convolution is in the same stage
        _assign(work, stage)
        stage = []
    _assign(work, [("fc", item) for item in classifier(work, folded)])
    return work


def _assign(work: Work, stage: list[tuple[str, Array]]) -> None:
    for index, (name, item) in enumerate(stage):
        work.items[index % work.plan.ctas].append(item)
        work.names[index % work.plan.ctas].append(name)


def items_of(work: Work, layer: Layer, folded: Mapping[str, Array], pooled: bool) -> list[Array]:
    op, size, out_size = layer.op, layer.size, layer.out_size
    cin, cout = op.in_channels, op.out_channels
    wide = cin == 64 or out_size in work.plan.wide
    halves, slice_channels = (2, 64) if wide else (1, 128)
    parts, tile_channels = cin // slice_channels, 16 * halves
    assert not pooled or parts == 4 * halves, "a part adds four channels of all pixels"
    weight = work.add_weights(pack(folded[layer.weight], halves, parts))
    bias = work.add_biases(folded[layer.bias], cout)
    rows, columns = TILES[out_size]
    taps, units = layer.taps, halves * UNITS
    stride, padding = op.stride[0], op.padding[0]
    common = {
        **region_of(layer, slice_channels),
        "taps": taps,
        "halves": halves,
        "chunks": taps,
        "from_stem": int(layer.source == STEM),
        "height": size,
        "width": size,
        "pixel": cin * 2,
        "out_row": out_size * cout * 2,
        "out_pixel": cout * 2,
        "relu": int(op.relu),
        "parts": parts,
        "share": units // parts,
        "planar": int(pooled),
        "mean": -1,
    }
    found = []
    tile_nbytes = WARPS * taps * 512
    for tile in range((out_size // rows) * (out_size // columns)):
        y, x = tile // (out_size // columns) * rows, tile % (out_size // columns) * columns
        for n in range(cout // tile_channels):
            scratch = work.take(parts * units * 16) if parts > 1 else 0
            for part in range(parts):
                item = np.zeros((), ITEM)
                for name, value in common.items():
                    item[name] = value
                place = ((y * out_size + x) * cout + n * tile_channels) * 2
                item["source"] = (
                    0 if layer.source == STEM else work.offsets[layer.source]
                ) + part * slice_channels * 2
                item["y"], item["x"] = y * stride - padding, x * stride - padding
                item["weight"] = weight + (n * parts + part) * tile_nbytes
                item["bias"] = bias + n * tile_channels
                item["out"] = work.offsets[layer.output] + place
                if layer.residual is not None:
                    of_stem = layer.residual == STEM
                    item["residual_from"] = 1 if of_stem else 2
                    item["residual"] = place + (0 if of_stem else work.offsets[layer.residual])
                item["part"], item["scratch"] = part, scratch
                if pooled:
                    item["mean"] = work.offsets["mean"] + n * tile_channels * 4
                found.append(item)
    return found


def classifier(work: Work, folded: Mapping[str, Array]) -> list[Array]:
    weight = cast(Array, folded["fc.weight"])
    work.features, channels = weight.shape
    count = -(-work.features // FEATURES)
    padded = np.zeros((count * FEATURES, channels), np.float32)
    padded[: work.features] = weight
    first = work.add_weights(padded)
    bias = work.add_biases(folded["fc.bias"], len(padded))
    found = []
    for index in range(count):
        item = np.zeros((), ITEM)
        item["kind"], item["chunks"] = 1, channels * 2 // 512
        item["source"] = work.offsets["mean"]
        item["weight"] = first + index * FEATURES * channels * 2
        item["out"], item["bias"] = index * FEATURES, bias + index * FEATURES
        found.append(item)
    return found


def check_work(work: Work) -> None:
    """Raises AssertionError unless the schedule ends and every output is computed once.

    Simulates CTAs that take their items in order; an item needs the items that write its region
    and its residual, and those that share its tile.
    """
    tables = {layer.name: layer for layer in work.layers}
    written = {
        one.output: np.zeros((one.out_size, one.out_size, one.op.out_channels), int)
        for one in work.layers
    }
    sums = {
        name: np.zeros((*written[name].shape, layer.op.in_channels), bool)
        for name, layer in ((one.output, one) for one in work.layers)
    }
    place = [0] * work.plan.ctas
    begun: dict[int, set[int]] = {}  # parts that have sent their sums, by scratch
    total = sum(map(len, work.items))
    done = 0
    while done < total:
        before = done, sum(map(len, begun.values()))
        for cta, items in enumerate(work.items):
            while place[cta] < len(items):
                item, name = items[place[cta]], work.names[cta][place[cta]]
                if name == "fc":
                    if written[work.layers[-1].output].min() < 1:
                        break
                    place[cta] += 1
                    done += 1
                    continue
                layer = tables[name]
                y, x = int(item["y"]), int(item["x"])
                region_rows = int(item["region"]) // int(item["columns"])
                ys = [y + r * int(item["step"]) for r in range(region_rows)]
                xs = [x + c * int(item["step"]) for c in range(int(item["columns"]))]
                ys = [v for v in ys if 0 <= v < layer.size]
                xs = [v for v in xs if 0 <= v < layer.size]
                channels = 64 if item["halves"] == 2 else 128
                c0 = int(item["part"]) * channels
                if layer.source != STEM:
                    needed = written[layer.source][np.ix_(ys, xs, range(c0, c0 + channels))]
                    if needed.min() < 1:
                        break
                rows, columns = TILES[layer.out_size]
                at = (int(item["out"]) - work.offsets[layer.output]) // 2
                pixel, n0 = divmod(at, layer.op.out_channels)
                ty, tx = divmod(pixel, layer.out_size)
                n1 = n0 + 16 * int(item["halves"])
                tile = np.s_[ty : ty + rows, tx : tx + columns, n0:n1]
                if item["parts"] > 1:
                    sent = begun.setdefault(int(item["scratch"]), set())
                    sent.add(int(item["part"]))
                    if len(sent) < int(item["parts"]):
                        break
                if layer.residual in written and written[layer.residual][tile].min() < 1:
                    break
                assert not sums[layer.output][tile][..., c0 : c0 + channels].any()
                sums[layer.output][tile][..., c0 : c0 + channels] = True
                # Its share: pixels or, if planar, groups of channels.
                unit = np.arange(int(item["halves"]) * UNITS)
                groups = 4 * int(item["halves"])
                if item["planar"]:
                    group, p = unit // PIXELS, unit % PIXELS
                else:
                    group, p = unit % groups, unit // groups
                own = (unit // int(item["share"]) == item["part"]) & (p < item["pixels"])
                for g, q in zip(group[own], p[own], strict=True):
                    spot = (ty + q // columns, tx + q % columns, slice(n0 + 4 * g, n0 + 4 * g + 4))
                    written[layer.output][spot] += 1
                place[cta] += 1
                done += 1
        assert (done, sum(map(len, begun.values()))) != before, "deadlock"
    for name, count in written.items():
        assert (count == 1).all(), name
        assert sums[name].all(), name
