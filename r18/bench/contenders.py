"""The contenders of a benchmark: backends, single algorithms of theirs, and the peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from r18.backend import (
    Array,
    Backend,
    CompileOptions,
    DeviceInfo,
    Kernel,
    Program,
    StepTime,
)
from r18.backend.launch import refusal_of
from r18.bench.baselines import (
    TORCH,
    FedTorchvision,
    Way,
    device_words,
    has_peers,
    made,
    peers_precision,
    torch_flush,
    ways,
)
from r18.bench.inputs.cold import flush_of
from r18.bench.inputs.from_host import Feeding
from r18.bench.rows import Contender
from r18.errors import NoKernel, UsageError, unknown
from r18.graph.passes import fuse, fuse_ops
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess
from r18.weights.precisions import in_precision

Algorithm = tuple[str, str]
"""(op, algorithm): an algorithm's name such as `direct`, or a glob over kernel ids."""


def contenders(
    backends: Mapping[str, Backend],
    schedule: Schedule,
    weights: Mapping[str, Array],
    *,
    precisions: Sequence[str] = ("fp32",),
    batches: Sequence[int] = (1,),
    fusion: str = "all",
    required: bool = True,
    algorithms: Sequence[Algorithm] = (),
    peers: str = "eager",
) -> list[Contender]:
    """Every backend (by the name to show) in every precision and batch, with the peers behind.

    `schedule` and `weights` are those of level `none`. Each of `algorithms` is a contender of its
    own, of the backends that have it; see `algorithm_kernels`. `peers` is as `ways` takes it.
    Raises what the backends' `probe` raises, `UnknownName` for an algorithm or a peer that does
    not exist.
    """
    if not backends or not precisions or not batches:
        raise UsageError("a benchmark needs at least one backend, one precision and one batch")
    if len(set(batches)) != len(batches) or len(set(precisions)) != len(precisions):
        raise UsageError(
            f"each batch and precision is measured once, got {list(batches)}, {list(precisions)}"
        )
    devices = {name: backend.probe() for name, backend in backends.items()}
    asked_peers = ways(peers, (device.kind for device in devices.values()))
    for algorithm in algorithms:
        _check_algorithm(backends.values(), algorithm)
    found: list[Contender] = []
    timed: dict[tuple[str, Way, int, str, bool], Contender] = {}  # peers, by all that makes them
    for batch in batches:
        for precision in precisions:
            for name, backend in backends.items():
                options = CompileOptions(batch=batch, precision=precision, fusion=fusion)
                own = program_contender(
                    name, devices[name], backend, schedule, weights, options, required=required
                )
                found.append(own)
                found += [
                    algorithm_contender(own, backend, schedule, weights, options, algorithm)
                    for algorithm in algorithms
                    if _of_algorithm(backend, algorithm)
                ]
            for kind, asked in asked_peers.items():
                for way in asked:
                    peer = peer_contender(kind, schedule, weights, batch, precision, way)
                    # Without peers it shares no time, and is left out with a reason of its own.
                    played = peers_precision(precision, kind), has_peers(precision, kind)
                    key = (kind, way, batch, *played)
                    first = timed.setdefault(key, peer)
                    found.append(peer if first is peer else replace(peer, twin=first))
    return found


# -- programs ----------------------------------------------------------------------------------


def program_contender(
    name: str,
    device: DeviceInfo,
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    options: CompileOptions,
    *,
    required: bool = True,
) -> Contender:
    """A backend's compiled program.

    In int8 the weights must hold a quantisation; raises what `in_precision` raises.
    """
    schedule, weights = in_precision(schedule, weights, options)
    return Contender(
        name,
        device,
        options.precision,
        options.fusion,
        (options.batch, *schedule.input_shape),
        lambda: Compiled(backend.compile(schedule, weights, options), device.kind),
        required,
        feed=lambda: _fed(backend, schedule, weights, options),
        flush=lambda nbytes: flush_of(backend.memory, nbytes),
    )


def _fed(
    backend: Backend, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
) -> Program:
    """The program that takes pixels, as ImageNet's are normalised. Raises `NoKernel`."""
    return backend.compile(schedule, weights, replace(options, pixels=Preprocess().normalize))


def algorithm_contender(
    own: Contender,
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    options: CompileOptions,
    algorithm: Algorithm,
) -> Contender:
    """A backend's program (`own`) with one algorithm wherever that can be.

    Left out, and reported, in a precision or on a network for which the algorithm has no kernel.
    """

    schedule, weights = in_precision(schedule, weights, options)

    def make() -> Compiled:
        chosen = algorithm_kernels(backend, schedule, algorithm, options)
        program = backend.compile(schedule, weights, replace(options, kernels=chosen))
        return Compiled(program, own.device.kind)

    op, name = algorithm
    return replace(
        own,
        name=f"{own.name} ({name})",
        make=make,
        required=False,
        algorithm=f"{op}={name}",
        feed=None,
    )


def algorithm_kernels(
    backend: Backend, schedule: Schedule, algorithm: Algorithm, options: CompileOptions
) -> dict[str, str]:
    """A kernel id for each step of the op that the algorithm takes: `CompileOptions.kernels`.

    The first kernel of the algorithm that does not refuse the step's problem. A step that all of
    them refuse (Winograd: all but 3x3 of stride 1) is not named, and keeps the preferred kernel.
    Pure. Raises `NoKernel` when no step is left.
    """
    fused = schedule if schedule.level == options.fusion else fuse(schedule, options.fusion)
    fused = fuse_ops(fused, {algorithm[0]})
    problems = fused.problems(options.batch)
    offered = [
        kernel
        for kernel in _of_algorithm(backend, algorithm)
        if kernel.precision.name == options.precision
    ]
    chosen: dict[str, str] = {}
    for step in fused.steps:
        if step.op.name != algorithm[0]:
            continue
        takers = [kernel for kernel in offered if refusal_of(kernel, problems[step.name]) is None]
        if takers:
            chosen[step.name] = takers[0].id
    if not chosen:
        raise NoKernel(
            f"no step of '{schedule.name}' in {options.precision} has a kernel of "
            f"{'='.join(algorithm)} on backend '{backend.name}'"
        )
    return chosen


def _of_algorithm(backend: Backend, algorithm: Algorithm) -> list[Kernel]:
    op, name = algorithm
    return [
        kernel
        for kernel in backend.kernels()
        if kernel.op.name == op and (kernel.algorithm == name or fnmatchcase(kernel.id, name))
    ]


def _check_algorithm(backends: Collection[Backend], algorithm: Algorithm) -> None:
    everything = [kernel for backend in backends for kernel in backend.kernels()]
    op, name = algorithm
    if op not in {kernel.op.name for kernel in everything}:
        raise unknown("op of an algorithm", op, {kernel.op.name for kernel in everything})
    if not any(_of_algorithm(backend, algorithm) for backend in backends):
        known = {kernel.algorithm for kernel in everything if kernel.op.name == op}
        raise unknown(f"algorithm of {op}", name, known, hint="A glob over kernel ids works too.")


class Compiled:
    """A program as a `r18.bench.rows.Runner`."""

    def __init__(self, program: Program, kind: str) -> None:
        self.program = program
        self.steps: Callable[[], list[StepTime]] = program.profile
        self.close: Callable[[], None] = program.close
        self._stream = program.stream if kind == "cuda" else None

    @property
    def arena_nbytes(self) -> int | None:
        return self.program.plan.arena_nbytes

    @property
    def weight_nbytes(self) -> int | None:
        return self.program.weight_nbytes

    @property
    def kernels(self) -> dict[str, int]:
        return dict(Counter(self.program.plan.kernel_ids().values()))

    def load(self, images: Array) -> None:
        self.program.load(images)
        self.program.synchronize()

    def run(self) -> None:
        self.program.launch()
        self.program.synchronize()

    def fetch(self) -> Array:
        return self.program.fetch()

    def time(self, clock: Callable[[], float]) -> float:
        if self._stream is None:
            begin = clock()
            self.run()
            return (clock() - begin) * 1e3
        before = self._stream.record()
        self.program.launch()
        after = self._stream.record()
        self.program.synchronize()
        return after.milliseconds_since(before)


# -- peers -------------------------------------------------------------------------------------


def peer_contender(
    kind: str,
    schedule: Schedule,
    weights: Mapping[str, Array],
    batch: int,
    precision: str,
    way: Way = Way(),
) -> Contender:
    """A peer on a kind of device.

    Where its library is missing, or cannot run the network so, it cannot be made and says why. In
    eager mode it can be fed from host memory.
    """

    def feed() -> Feeding:
        own = peers_precision(precision, kind)
        return FedTorchvision(kind, schedule, weights, batch, own, way)

    return Contender(
        way.name,
        DeviceInfo(kind, device_words(way, kind)),
        precision,
        way.mode,
        (batch, *schedule.input_shape),
        lambda: made(way, kind, schedule, weights, batch, precision),
        required=False,
        feed=feed if way.mode == Way().mode else None,
        flush=torch_flush if way.name in TORCH else None,
    )


__all__ = [
    "Algorithm",
    "Compiled",
    "algorithm_contender",
    "algorithm_kernels",
    "contenders",
    "peer_contender",
    "program_contender",
]
