"""The roofline: how fast each step of a plan could be, and how much slower it is. Pure.

Two numbers bound a step from below: its operations over the rate at which the device multiplies in
that precision, and the bytes that must move over the bandwidth of a copy. The larger is the floor,
and says what binds. Both ceilings are measured on the device (`r18.bench.ceilings`): each is the
highest that was measured, an instruction's, sustained or in bursts, or a library's.

- Operations are two for each multiply-accumulate of a convolution or a linear layer. Other ops have
  a few operations per element, and bytes bind them.
- An algorithm that multiplies less has a floor of its own: for Winograd, the products of
  transformed tiles, and the same bytes. By the definition, its steps would beat their floors.
- In fp16x3 each product is three of float16: its rate is a third of the one measured in fp16.
- Bytes: every input element that some window covers once, every weight once, every output element
  once, in the precision's storage. A convolution fused with max-pooling writes only the pooled
  output.

A step may beat its floor where its tensors are still in a cache (the small ones of a single image):
they move faster than memory does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from r18.backend import Plan, StepTime
from r18.backend.ceilings import COPY
from r18.errors import R18Error, UsageError
from r18.graph.forms import ConvForm
from r18.graph.ops import Conv2d, ConvMaxPool, Problem, parts_of
from r18.graph.passes import fuse, fuse_ops
from r18.graph.precision import INT8, PRECISIONS, Precision, precision
from r18.graph.schedule import Schedule
from r18.records.kinds import CeilingsRecord, MeasuredCeiling

WHAT = "ceilings"
OPERATIONS, BYTES = "operations", "bytes"
"""The two lower bounds of a step's time."""
PRODUCTS = {"fp16x3": ("fp16", 3), "fp8": ("e4m3", 1)}
"""Precisions whose product is made of others: in which precision or format, and how many."""
RATED = {*PRECISIONS, *(source for source, _ in PRODUCTS.values())}
"""Precisions and formats whose rates give floors."""
WINOGRAD_TILES = {"winograd_f2x2": 2, "winograd_f4x4": 4}
"""Outputs along a side of a tile, by how the algorithm of a kernel begins; filters are 3×3."""
LIBRARY = "by a library"
"""The source of a ceiling that no instruction gave."""


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that a device reaches.

    rates:     operations a second, by precision.
    bandwidth: bytes a second of a large copy, read and written together.
    threads:   of the CPU, with which both were measured; None on another device.
    date:      when, as ISO 8601 has it.
    sources:   the source of a rate, by precision, such as `by wgmma in bursts`; of the bandwidth by
               `copy`. A library gave those that are not named.
    """

    device: str
    rates: Mapping[str, float]
    bandwidth: float
    threads: int | None = None
    date: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {**self.rates, COPY: self.bandwidth}
        bad = [name for name, rate in numbers.items() if not (0 < rate < math.inf)]
        if bad or not self.rates:
            raise UsageError(
                f"ceilings of {self.device}: {', '.join(bad) or 'a rate'} must be positive and "
                "finite; measure them again with r18 roofline --measure"
            )

    @classmethod
    def from_record(cls, record: CeilingsRecord) -> Ceilings:
        """The highest in a record; raises `UsageError` for rates that no device has."""
        highest = {name: (rate.operations_per_second, "") for name, rate in record.rates.items()}
        highest[COPY] = record.copy.bytes_per_second, ""
        for name, measured in _measured(record):
            highest[name] = max([highest.get(name, (0.0, "")), *measured])
        rates = {name: rate for name, (rate, _) in highest.items()}
        sources = {name: source for name, (_, source) in highest.items() if source}
        bandwidth = rates.pop(COPY)
        return cls(record.device, rates, bandwidth, record.threads, record.date, sources)

    def source(self, name: str) -> str:
        """The source of a precision's rate, or of the bandwidth (`copy`)."""
        return self.sources.get(PRODUCTS.get(name, (name, 1))[0], LIBRARY)

    def words(self, unit: Literal["G", "T"]) -> str:
        """Every ceiling with its source, instructions first: `fp16 915 TFLOP/s by wgmma in
        bursts; fp64 61.8 TFLOP/s by a library; copy 4.2 TB/s by a library`."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.rates, key=lambda name: name not in self.sources):
            found.setdefault(self.source(name), []).append(
                f"{name} {_number(self.rates[name], unit)}"
            )
        said = [f"{', '.join(rates)} {unit}FLOP/s {source}" for source, rates in found.items()]
        return "; ".join([*said, self._copied(unit)])

    def words_of(self, name: str) -> str:
        """The two ceilings of a precision, with their sources, as in `words`."""
        source = PRODUCTS.get(name, (name, 1))[0]
        rate = f"{source} {_number(self.rates[source], 'T')} TFLOP/s {self.source(source)}"
        return f"{rate}, {self._copied('T')}"

    def _copied(self, unit: Literal["G", "T"]) -> str:
        return f"copy {_number(self.bandwidth, unit)} {unit}B/s {self.source(COPY)}"

    def has(self, name: str) -> bool:
        """Whether there is a rate of a precision."""
        return PRODUCTS.get(name, (name, 1))[0] in self.rates

    def bounds(self, name: str) -> bool:
        """Whether a rate of the precision is on record that no kernel exceeds.

        A library's int8 rate is not one: on an H200 it is less than half of that of `wgmma`.
        """
        return self.has(name) and not (name == INT8.name and self.source(name) == LIBRARY)

    def rate(self, name: str) -> float:
        """Operations a second in a precision; raises `UsageError` where none was measured."""
        source, count = PRODUCTS.get(name, (name, 1))
        if source not in self.rates:
            whose = "" if source == name else f" (of whose products {name} takes {count} for one)"
            raise UsageError(
                f"no rate of {source}{whose} was measured on {self.device}; measured: "
                f"{', '.join(self.rates)}\n  a floor needs the rate of its precision; r18 roofline "
                "--measure measures those that the device's library can multiply"
            )
        return self.rates[source] / count


def _number(rate: float, unit: Literal["G", "T"]) -> str:
    """Three digits, or as many as there are before the point."""
    number = rate / {"G": 1e9, "T": 1e12}[unit]
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _measured(record: CeilingsRecord) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """(precision or `copy`, rates with their sources) of instructions and of the copy."""
    for name, instructions in (record.instructions or {}).items():
        if name in RATED:
            yield (
                name,
                [p for what, one in instructions.items() for p in _paces(f"by {what} ", one)],
            )
    if record.memory and COPY in record.memory:
        yield COPY, _paces("", record.memory[COPY])


def _paces(what: str, measured: MeasuredCeiling) -> list[tuple[float, str]]:
    """(rate, source) of a ceiling in bursts, and sustained."""
    return [
        (measured.burst.per_second, f"{what}in bursts"),
        (measured.sustained.per_second, f"{what}sustained"),
    ]


@dataclass(frozen=True)
class Limit:
    """The least cost of a problem: its work, and the milliseconds of either part of it."""

    operations: int
    nbytes: int
    operations_ms: float
    bytes_ms: float

    @property
    def floor_ms(self) -> float:
        return max(self.operations_ms, self.bytes_ms)

    @property
    def binds(self) -> str:
        return OPERATIONS if self.operations_ms > self.bytes_ms else BYTES

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"floor_ms": self.floor_ms, "binds": self.binds}


def limit(problem: Problem, precision: Precision, ceilings: Ceilings, algorithm: str = "") -> Limit:
    """The floor of a problem in a precision: by its definition, or by what an algorithm does.

    Raises `UsageError` without a rate for the precision.
    """
    operations, nbytes = own_operations(problem, algorithm), moved_nbytes(problem, precision)
    return Limit(
        operations,
        nbytes,
        1e3 * operations / ceilings.rate(precision.name),
        1e3 * nbytes / ceilings.bandwidth,
    )


def limits(
    schedule: Schedule,
    precision_name: str,
    fusion: str,
    batch: int,
    ceilings: Ceilings,
    *,
    fused: Collection[str] = (),
    algorithms: Collection[str] = (),
) -> dict[str, Limit]:
    """The floor of each step of a schedule (at level `none`), fused, on any backend.

    fused:      the names of ops that compute two steps in one, as a backend may
                (`r18.runtime.fusing`): `conv2d_maxpool2d`, `gap_linear`.
    algorithms: that multiply less than the definition: a step may use any that computes it, so its
                floor is the lowest of theirs.
    The sum is the network's: step after step, each through memory.
    """
    found = precision(precision_name)
    problems = fuse_ops(fuse(schedule, fusion), fused).problems(batch)
    return {
        name: min(
            (limit(problem, found, ceilings, algorithm) for algorithm in ("", *algorithms)),
            key=lambda one: (one.floor_ms, one.operations),
        )
        for name, problem in problems.items()
    }


def moved_nbytes(problem: Problem, precision: Precision) -> int:
    """Bytes that any kernel must read and write: inputs, weights, output, once each."""
    op = problem.op
    sizes = zip(op.covered(*problem.inputs), precision.input_dtypes(op), strict=True)
    read = sum(size * dtype.itemsize for size, dtype in sizes)
    weights = sum(
        math.prod(spec.shape) * precision.weight_dtype(spec).itemsize for spec in op.weights()
    )
    written = math.prod(problem.output) * precision.output_dtype(op).itemsize
    return read + written + weights


def own_operations(problem: Problem, algorithm: str) -> int:
    """The operations of an algorithm (of a kernel's id) for a problem, counting products only.

    F(m×m, 3×3) has (m + 2)² products a tile of m×m outputs, input channel and output channel
    (Lavin and Gray, CVPR 2016). A convolution that it does not compute costs what the definition
    says.
    """
    tile = _winograd_tile(algorithm)
    conv = parts_of(problem)[0] if isinstance(problem.op, ConvMaxPool) else problem
    op = conv.op.conv if isinstance(conv.op, ConvForm) else conv.op
    if (
        tile is None
        or not isinstance(op, Conv2d)
        or (op.kernel_size, op.stride) != ((3, 3), (1, 1))
    ):
        return 2 * problem.macs
    n, out_channels, height, width = conv.output
    tiles = n * -(-height // tile) * -(-width // tile)
    return 2 * tiles * (tile + 2) ** 2 * op.in_channels * out_channels


def _winograd_tile(algorithm: str) -> int | None:
    """Outputs along a side of a tile; a name may go on: `winograd_f2x2_avx2`."""
    named = (tile for name, tile in WINOGRAD_TILES.items() if algorithm.startswith(name))
    return next(named, None)


def algorithm_of(kernel: str) -> str:
    """The algorithm that a kernel's id `backend/op/algorithm/precision` names; "" for none."""
    parts = kernel.split("/")
    return parts[2] if len(parts) > 2 else ""


def multiplying_less(kernels: Iterable[str]) -> tuple[str, ...]:
    """The algorithms of kernels, by id, that have floors of their own; each once, sorted."""
    return tuple(sorted({found for one in kernels if _winograd_tile(found := algorithm_of(one))}))


# -- measured ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A step of a plan: its floor, and how long it took.

    limit: by the operations of the kernel's algorithm. direct: by those of the definition, the
    same bytes.
    """

    step: str
    kernel: str
    limit: Limit
    direct: Limit
    measured_ms: float

    @property
    def ratio(self) -> float:
        """floor / measured: 1 is the floor, above 1 is better than it; see the module."""
        return self.limit.floor_ms / self.measured_ms if self.measured_ms > 0 else math.inf

    @property
    def lost_ms(self) -> float:
        """Above the floor; negative below it."""
        return self.measured_ms - self.limit.floor_ms

    def to_json(self) -> dict[str, Any]:
        found = {"step": self.step, "kernel": self.kernel, "measured_ms": self.measured_ms}
        ratio = self.ratio if math.isfinite(self.ratio) else None
        found |= {"ratio": ratio, "direct_floor_ms": self.direct.floor_ms, "lost_ms": self.lost_ms}
        return found | self.limit.to_json()


def lines(plan: Plan, times: Sequence[StepTime], ceilings: Ceilings) -> tuple[Line, ...]:
    """A line a step, in the plan's order; a step's phases are added up.

    times: medians of `program.profile()`. Raises `R18Error` where they are not of this plan, and
    what `limit` raises.
    """
    measured: dict[str, float] = {}
    for time in times:
        measured[time.step] = measured.get(time.step, 0.0) + time.milliseconds
    names = {step.name for step in plan.steps}
    if names != measured.keys():
        odd = ", ".join(sorted(names ^ measured.keys()))
        raise R18Error(
            f"the profile of {plan.backend} is not of the steps of its plan: {odd}\n"
            "  a program's profile has an entry for each step of its plan, and no other"
        )
    found = precision(plan.options.precision)
    return tuple(
        Line(
            step.name,
            step.kernel.id,
            limit(step.problem, found, ceilings, step.kernel.contract.algorithm),
            limit(step.problem, found, ceilings),
            measured[step.name],
        )
        for step in plan.steps
    )


def largest_losses(found: Sequence[Line], count: int) -> list[Line]:
    """The steps that lose the most time, the first the most: the work list."""
    losing = [line for line in found if line.lost_ms > 0]
    return sorted(losing, key=lambda line: -line.lost_ms)[:count]


__all__ = [
    "BYTES",
    "LIBRARY",
    "OPERATIONS",
    "WHAT",
    "Ceilings",
    "Limit",
    "Line",
    "algorithm_of",
    "largest_losses",
    "limit",
    "limits",
    "lines",
    "moved_nbytes",
    "multiplying_less",
    "own_operations",
]
