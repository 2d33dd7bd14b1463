"""Calling a kernel under guard: poisoned buffers, guard zones, and a comparison of every byte.

The launch is the core's `Launch.enqueue`, as in a compiled program, and all buffers of a call are
parts of one allocation, as in a program. `observe` fills the allocation with known bytes, runs the
kernel, and compares every byte afterwards.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar
from weakref import WeakSet

import numpy as np

from r18.backend import (
    Array,
    Backend,
    Buffer,
    Kernel,
    Launch,
    Memory,
    download,
    input_layout,
    output_layout,
    prepare_weights,
    upload,
)
from r18.errors import described
from r18.graph.ops import Problem
from r18.runtime.arena import aligned
from r18_oracle.cases import Case
from r18_oracle.check.watch import Process, intrusions
from r18_oracle.functions.arrays import WrongResult
from r18_oracle.judge.reference import kernel_running

T = TypeVar("T")

GUARD_NBYTES = 4096
GUARD_MOST = 1 << 20
"""A guard zone is as long as the longest buffer of the call, within these limits, so that it
catches an image that is written one image too far."""
THREAD_SECONDS = 0.5
"""The wait for threads that were started during the call and are still running."""

_lasting: WeakSet[threading.Thread] = WeakSet()
"""Threads that outlived that wait, such as a pool's; they are not waited for again."""

Fill = Callable[[int], Array]
"""The bytes that memory holds before a call, from their number."""


def nans(nbytes: int) -> Array:
    """Bytes of 0xFF: NaN in every floating-point format."""
    return np.full(nbytes, 0xFF, np.uint8)


_ORDINARY: Array = np.array(
    [byte & 0x80 | 0x30 + (byte & 0x7F) * 0x18 // 0x80 for byte in range(0x100)], np.uint8
)
"""A byte's sign bit, and one of 0x30..0x47 for its other bits."""


_PERIOD = 65_521
"""Bytes of noise before it repeats: a prime, so that it repeats in no shape of an array."""


def noise(seed: int) -> Fill:
    """Random ordinary numbers of both signs in every floating-point format.

    The byte that holds most of the exponent is in 0x30..0x47: float16 from 2⁻³ to 2³, float32
    from 2⁻³¹ to 2¹⁶.
    """

    def fill(nbytes: int) -> Array:
        drawn = np.random.default_rng([seed, nbytes]).bytes(min(nbytes, _PERIOD))
        return np.resize(_ORDINARY[np.frombuffer(drawn, np.uint8)], nbytes)

    return fill


@dataclass(frozen=True, eq=False)
class Arena:
    """One allocation with the buffers of a call by name, and guard zones around and between them.

    Each buffer begins at an odd multiple of the memory's alignment.
    """

    memory: Memory
    whole: Buffer
    nbytes: int
    spans: Mapping[str, tuple[int, int]]  # name → offset, bytes

    @classmethod
    def of(cls, memory: Memory, sizes: Mapping[str, int]) -> Arena:
        """Allocate, without filling."""
        step = memory.alignment
        guard = min(max(GUARD_NBYTES, *sizes.values()), GUARD_MOST)
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, nbytes in sizes.items():
            offset = aligned(end + guard, 2 * step) + step
            spans[name] = (offset, nbytes)
            end = offset + nbytes
        nbytes = end + guard
        return cls(memory, memory.empty(nbytes), nbytes, spans)

    def buffer(self, name: str) -> Buffer:
        return self.whole.view(*self.spans[name])

    def read(self) -> Array:
        """Every byte of the allocation."""
        return self.memory.download(self.whole, (self.nbytes,), np.dtype(np.uint8))

    def part(self, seen: Array, name: str) -> Array:
        """The bytes of one buffer in the result of `read`."""
        offset, nbytes = self.spans[name]
        return seen[offset : offset + nbytes]

    def place(self, at: int) -> tuple[str, int]:
        """The buffer that holds or is nearest to a byte, and the byte's offset in it.

        The offset is negative before the buffer, and at least its size after it.
        """
        middles = [
            (one[0] + one[1] + other[0]) // 2 for one, other in pairwise(self.spans.values())
        ]
        name = list(self.spans)[int(np.searchsorted(middles, at, side="right"))]
        return name, at - self.spans[name][0]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case's weights as the kernel has prepared them, for one launch or several, as in a program.

    problem: a copy, so that a kernel that changes its problem does not change what it is judged by.
    handed:  the arrays that `prepare` was given. weights: what it returned. bytes: what these held.
    """

    memory: Memory
    problem: Problem
    handed: tuple[Array, ...]
    weights: tuple[Buffer, ...]
    bytes: tuple[Array, ...]

    @classmethod
    def of(cls, memory: Memory, kernel: Kernel, case: Case) -> Prepared:
        problem, handed = copied(case.problem), case.handed()
        with kernel_running():
            weights = prepare_weights(kernel, problem, _names(problem), handed)
        held = tuple(_bytes(memory, weight) for weight in weights)
        return cls(memory, problem, handed, weights, held)

    def changed(self, case: Case) -> str | None:
        """A sentence about the first change since `of(…, case)`; or None."""
        names = _names(case.problem)
        held = tuple(_bytes(self.memory, weight) for weight in self.weights)
        return (
            _changed_weights(names, self.bytes, held)
            or _changed_on_host(names, self.handed, case.wide()[1])
            or ("the problem was changed" if self.problem != case.problem else None)
        )


@dataclass(frozen=True, eq=False)
class Observation:
    """The observable results of one call.

    output:    logical array in storage dtype. before: the same memory before the call.
    trespass:  a sentence about the first byte written outside a buffer, or None.
    changed:   a sentence about a change of something that a kernel may only read, or None.
    process:   a sentence about what the call changed in the process, or None.
    called:    forbidden functions that the kernel called, if it was watched.
    in_flight: waits for this many seconds and for threads started during the call; whether memory,
               inputs included, then differs from what it held when `synchronize` returned.
    prepared:  the weights that the call read, for further calls with the same ones.
    """

    output: Array
    before: Array
    trespass: str | None
    changed: str | None
    process: str | None
    called: list[str]
    in_flight: Callable[[float], bool]
    prepared: Prepared

    def untouched(self) -> Array:
        """For each output element, whether it kept its bits."""
        return ~bits_differ(self.output, self.before)


def bits_differ(one: Array, other: Array) -> Array:
    """For each element, whether its bits differ."""
    return np.asarray(_bits(one) != _bits(other))


def observe(
    backend: Backend,
    kernel: Kernel,
    case: Case,
    *,
    fill: Fill = nans,
    times: int = 1,
    alias: bool = False,
    late: bool = False,
    watched: bool = False,
    process: Process | None = None,
    prepared: Prepared | None = None,
) -> Observation:
    """Run the kernel on the case, in a stream of its own.

    fill:    the bytes of memory other than the inputs before the call.
    times:   how often to enqueue the same launch.
    alias:   give it its first input's buffer as output, as a plan may for `in_place`.
    late:    fill memory, except for prepared weights, by a copy that is enqueued just before the
             kernel and ends late; until then it holds NaN. An early read gives NaN, and an
             early write is lost. For an `overlapping` stream.
    watched: record its forbidden calls.
    process: the state of the process before; by default its present state.
    prepared: the weights of an earlier call on a case with the same problem and weights. Without
             them the kernel prepares its weights again.
    """
    stream = backend.stream()
    process = process or Process.now()
    threads = set(threading.enumerate())
    call = _Call(
        backend,
        kernel,
        case,
        fill,
        prepared or Prepared.of(backend.memory, kernel, case),
        alias=alias,
    )
    before = call.read()
    if late:
        source = call.poison(before.bytes)
    watch: AbstractContextManager[list[str]] = intrusions(kernel) if watched else nullcontext([])
    with kernel_running(), watch as called:
        if late:
            stream.copy_late(source, call.arena.whole)
        for _ in range(times):
            call.launch.enqueue(stream)
        stream.synchronize()
    tampered = process.change()
    after = call.read()
    return Observation(
        output=after.output,
        before=before.output,
        trespass=stray_write(call.arena, before.bytes, after.bytes),
        changed=call.changed(before, after),
        process=tampered,
        called=called,
        in_flight=lambda seconds: _in_flight(call.arena, after.bytes, threads, seconds),
        prepared=call.prepared,
    )


@dataclass(frozen=True)
class Raised:
    """A kernel's call that raised."""

    error: BaseException

    def words(self, where: str = "") -> str:
        """`raised ValueError: its text`; a `WrongResult` says itself what the function did.

        where: stands behind the error's name, such as ` in f (mine.py:3)`.
        """
        if isinstance(self.error, WrongResult):
            return str(self.error)
        return f"raised {described(self.error, where)}"


def attempted(call: Callable[[], T]) -> T | Raised:
    """The result of a kernel's call, or the error that it raised; Ctrl-C is raised on.

    A child that the kernel has forked ends here. Otherwise it would continue the search, and answer
    in the name of its parent.
    """
    caller = os.getpid()
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Raised(error)
    finally:
        if os.getpid() != caller:
            os._exit(0)


@dataclass(frozen=True, eq=False)
class _Contents:
    """A call's allocation at one moment; output: that part as a logical array."""

    bytes: Array
    output: Array


class _Call:
    """The memory and the launch of one call, ready to be enqueued."""

    def __init__(
        self,
        backend: Backend,
        kernel: Kernel,
        case: Case,
        fill: Fill,
        prepared: Prepared,
        *,
        alias: bool,
    ) -> None:
        self.memory = memory = backend.memory
        self.kernel = kernel
        self.case = case
        self.prepared = prepared
        with kernel_running():
            scratch_nbytes = kernel.workspace(prepared.problem)
        self.arena = arena = Arena.of(memory, buffer_sizes(case, scratch_nbytes))
        memory.upload(fill(arena.nbytes), arena.whole)
        inputs = tuple(arena.buffer(f"input {index}") for index in range(len(case.inputs)))
        for array, buffer in zip(case.inputs, inputs, strict=True):
            upload(memory, array, input_layout(kernel, case.problem), array.dtype, buffer)
        self.written = "input 0" if alias else "output"
        self.launch = Launch(
            kernel,
            prepared.problem,
            inputs,
            prepared.weights,
            arena.buffer(self.written),
            arena.buffer("workspace"),
        )

    def read(self) -> _Contents:
        layout = output_layout(self.kernel, self.case.problem)
        # Not the buffer in the launch, which the kernel may have replaced.
        output = self.arena.buffer(self.written)
        return _Contents(
            self.arena.read(),
            download(self.memory, output, self.case.problem.output, layout, self.case.output_dtype),
        )

    def poison(self, contents: Array) -> Buffer:
        """Fill the arena with NaN; returns a buffer with its former contents."""
        source = self.memory.empty(self.arena.nbytes)
        self.memory.upload(contents, source)
        self.memory.upload(nans(self.arena.nbytes), self.arena.whole)
        return source

    def changed(self, before: _Contents, after: _Contents) -> str | None:
        """A sentence about the first change of the inputs, the weights or the problem; or None."""
        mine = (self.written, "workspace")
        changed = _changed(self.arena, before.bytes, after.bytes, mine)
        return changed or self.prepared.changed(self.case)


def _names(problem: Problem) -> list[str]:
    """The names of a problem's weights in messages."""
    return [spec.role for spec in problem.op.weights()]


def copied(problem: Problem) -> Problem:
    """An equal problem of objects of its own. Much faster than `copy.deepcopy`."""
    made: Problem = pickle.loads(pickle.dumps(problem, pickle.HIGHEST_PROTOCOL))
    return made


def buffer_sizes(case: Case, scratch_nbytes: int) -> dict[str, int]:
    """Bytes of each buffer, by name. The output is between others, to catch both overruns."""
    output = math.prod(case.problem.output) * case.output_dtype.itemsize
    first, *others = (array.nbytes for array in case.inputs)
    rest = {f"input {index}": nbytes for index, nbytes in enumerate(others, 1)}
    return {"input 0": first, "output": output, **rest, "workspace": scratch_nbytes}


def _bits(array: Array) -> Array:
    """Each element as an unsigned integer of its bits."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def _bytes(memory: Memory, buffer: Buffer) -> Array:
    return memory.download(buffer, (buffer.nbytes,), np.dtype(np.uint8))


def stray_write(arena: Arena, before: Array, seen: Array) -> str | None:
    """The first byte written outside a buffer, in a sentence."""
    begin, wrong = 0, -1
    for offset, nbytes in (*arena.spans.values(), (arena.nbytes, 0)):
        differs = before[begin:offset] != seen[begin:offset]
        if differs.any():
            wrong = begin + int(differs.argmax())
            break
        begin = offset + nbytes
    if wrong < 0:
        return None
    empty = [name for name, (_, nbytes) in arena.spans.items() if nbytes == 0]
    if wrong == 0 and empty:  # NumPy's view of no bytes points to where the whole begins
        return f"wrote to the {' or the '.join(empty)} buffer, which has 0 bytes"
    name, at = arena.place(wrong)
    if at < 0:
        return f"wrote {-at} byte(s) before the beginning of the {name} buffer"
    first = at - arena.spans[name][1]
    wider = "; was a wider format written?" if name == "output" and not first else ""
    return f"wrote past the end of the {name} buffer, first at byte {first} after it{wider}"


def _changed(arena: Arena, before: Array, seen: Array, mine: tuple[str, ...]) -> str | None:
    for name in (name for name in arena.spans if name not in mine):
        wrong = np.flatnonzero(arena.part(before, name) != arena.part(seen, name))
        if wrong.size:
            return f"the {name} buffer was written to, first at byte {int(wrong[0])}"
    return None


def _changed_weights(
    names: list[str], before: tuple[Array, ...], after: tuple[Array, ...]
) -> str | None:
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if not np.array_equal(old, new):
            name = names[index] if index < len(names) else f"prepared buffer {index}"
            return f"weight '{name}' was written to"
    return None


def _changed_on_host(
    names: list[str], handed: tuple[Array, ...], given: tuple[Array, ...]
) -> str | None:
    for name, after, before in zip(names, handed, given, strict=True):
        # As bits, in which the two zeros differ and NaN does not.
        now, then = (array.reshape(-1).view(np.uint64) for array in (after, before))
        if not np.array_equal(now, then):
            return f"`prepare` wrote to the array of weight '{name}'"
    return None


def _in_flight(arena: Arena, seen: Array, threads: set[threading.Thread], seconds: float) -> bool:
    time.sleep(seconds)
    deadline = time.monotonic() + THREAD_SECONDS
    for thread in set(threading.enumerate()) - threads - set(_lasting):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _lasting.add(thread)
    return not np.array_equal(seen, arena.read())
