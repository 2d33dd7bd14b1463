"""Calling a kernel under guard: poisoned buffers, guard zones, and nothing taken on trust.

The launch itself is the core's `Launch.enqueue`, which a compiled program uses too. As in a
program, all buffers of a call lie in one allocation; here every byte around and in them is known
before, and looked at again afterwards.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
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
from r18.runtime.arena import aligned
from r18_oracle.cases import Case
from r18_oracle.check.watch import Process, intrusions
from r18_oracle.judge.reference import kernel_running

GUARD_NBYTES = 4096
GUARD_MOST = 1 << 20
"""A guard zone is as long as the longest buffer of the call, between these: an image written one
image too far still lands in it."""
THREAD_SECONDS = 0.5
"""How long to wait for threads that were started during the call and are still running."""

_lasting: WeakSet[threading.Thread] = WeakSet()
"""Threads that outlived that wait: a pool's, which need not be waited for again."""

Fill = Callable[[int], Array]
"""What memory holds before a call: so many bytes."""


def nans(nbytes: int) -> Array:
    """Bytes of 0xFF: NaN in every floating-point format."""
    return np.full(nbytes, 0xFF, np.uint8)


_ORDINARY: Array = np.array(
    [byte & 0x80 | 0x30 + (byte & 0x7F) * 0x18 // 0x80 for byte in range(0x100)], np.uint8
)
"""A byte's sign bit, and one of 0x30..0x47 for its other bits."""


def noise(seed: int) -> Fill:
    """Ordinary numbers of both signs in every floating-point format, no two bytes the same rule.

    The byte that holds most of the exponent lies in 0x30..0x47: float16 of 2⁻³ to 2³, float32 of
    2⁻³¹ to 2¹⁶.
    """

    def fill(nbytes: int) -> Array:
        drawn = np.random.default_rng([seed, nbytes]).bytes(nbytes)
        return np.asarray(_ORDINARY[np.frombuffer(drawn, np.uint8)])

    return fill


@dataclass(frozen=True, eq=False)
class Arena:
    """One allocation: the buffers of a call by name, a guard zone before, between and after.

    Each begins at a multiple of the memory's alignment, and of no more than that.
    """

    memory: Memory
    whole: Buffer
    nbytes: int
    spans: Mapping[str, tuple[int, int]]  # name → offset, bytes

    @classmethod
    def of(cls, memory: Memory, sizes: Mapping[str, int]) -> Arena:
        """Allocate, fill nothing."""
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
        """The bytes of one buffer, of what `read` returned."""
        offset, nbytes = self.spans[name]
        return seen[offset : offset + nbytes]

    def place(self, at: int) -> tuple[str, int]:
        """The buffer that holds or is nearest to a byte, and the byte's offset in it.

        Negative before its beginning, at least its size past its end.
        """
        middles = [
            (one[0] + one[1] + other[0]) // 2 for one, other in pairwise(self.spans.values())
        ]
        name = list(self.spans)[int(np.searchsorted(middles, at, side="right"))]
        return name, at - self.spans[name][0]


@dataclass(frozen=True, eq=False)
class Observation:
    """What one call left behind.

    output:    logical array in storage dtype. before: what it was.
    trespass:  a sentence about the first byte written outside a buffer, or None.
    changed:   a sentence about what was changed that a kernel may only read, or None.
    process:   a sentence about what the call changed in the process, or None.
    called:    what the kernel called that it may not, where that was watched.
    in_flight: whether memory, inputs included, comes to differ from what it was when `synchronize`
               had returned; waits so many seconds, and for threads started during the call.
    """

    output: Array
    before: Array
    trespass: str | None
    changed: str | None
    process: str | None
    called: list[str]
    in_flight: Callable[[float], bool]

    def untouched(self) -> Array:
        """For each output element: does it hold what it held before?"""
        return ~bits_differ(self.output, self.before)


def bits_differ(one: Array, other: Array) -> Array:
    """For each element: are its bits not the same in both?"""
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
) -> Observation:
    """Run the kernel on the case, in a stream of its own.

    fill:    what all memory but the inputs holds before.
    times:   how often to enqueue the same launch.
    alias:   give it its first input's buffer as output, as a program may for `in_place`.
    late:    all that memory holds, but for the prepared weights, comes by a copy enqueued just
             before, and late; until then it holds NaN. What was read too early is NaN then, and
             what was written too early is gone. For `overlapping` streams only.
    watched: note what it calls.
    process: what the process was like before; default now.
    """
    memory, dtype = backend.memory, case.precision.dtype
    stream = backend.stream()
    process = process or Process.now()
    threads = set(threading.enumerate())
    # A copy, so that what a kernel does to its problem cannot change the question it is judged on.
    problem = copy.deepcopy(case.problem)
    given, handed = case.wide()[1], case.wide()[1]
    names = [spec.role for spec in problem.op.weights()]
    with kernel_running():
        weights = prepare_weights(kernel, problem, names, handed)
        scratch_nbytes = kernel.workspace(problem)
    arena = Arena.of(memory, _sizes(case, scratch_nbytes))
    memory.upload(fill(arena.nbytes), arena.whole)
    inputs = tuple(arena.buffer(f"input {index}") for index in range(len(case.inputs)))
    for array, buffer in zip(case.inputs, inputs, strict=True):
        upload(memory, array, input_layout(kernel, case.problem), array.dtype, buffer)
    writes = "input 0" if alias else "output"
    output = arena.buffer(writes)
    launch = Launch(kernel, problem, inputs, weights, output, arena.buffer("workspace"))
    layout = output_layout(kernel, case.problem)
    before = arena.read()
    old = download(memory, arena.buffer(writes), case.problem.output, layout, dtype)
    if late:
        source = memory.empty(arena.nbytes)
        memory.upload(before, source)
        memory.upload(nans(arena.nbytes), arena.whole)
    weights_before = [_bytes(memory, buffer) for buffer in weights]
    watch: AbstractContextManager[list[str]] = intrusions(kernel) if watched else nullcontext([])
    with kernel_running(), watch as called:
        if late:
            stream.copy_late(source, arena.whole)
        for _ in range(times):
            launch.enqueue(stream)
        stream.synchronize()
    tampered = process.change()
    seen = arena.read()
    # Not from the buffer that the kernel was given: it might be another by now.
    result = download(memory, arena.buffer(writes), case.problem.output, layout, dtype)
    mine = (writes, "workspace")
    return Observation(
        output=result,
        before=old,
        trespass=_trespass(arena, before, seen),
        changed=_changed(arena, before, seen, mine)
        or _changed_weights(memory, names, weights, weights_before)
        or _changed_on_host(names, handed, given)
        or ("the problem that it was given was changed" if problem != case.problem else None),
        process=tampered,
        called=called,
        in_flight=lambda seconds: _in_flight(arena, seen, threads, seconds),
    )


def _sizes(case: Case, scratch_nbytes: int) -> dict[str, int]:
    """Bytes of each buffer, by name. The output lies between others, to be overrun both ways."""
    output = int(np.prod(case.problem.output, dtype=object)) * case.precision.dtype.itemsize
    first, *others = (array.nbytes for array in case.inputs)
    rest = {f"input {index}": nbytes for index, nbytes in enumerate(others, 1)}
    return {"input 0": first, "output": output, **rest, "workspace": scratch_nbytes}


def _bits(array: Array) -> Array:
    """Each element as an unsigned integer of its bits."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def _bytes(memory: Memory, buffer: Buffer) -> Array:
    return memory.download(buffer, (buffer.nbytes,), np.dtype(np.uint8))


def _trespass(arena: Arena, before: Array, seen: Array) -> str | None:
    """The first byte that was written in no buffer."""
    outside = before != seen
    for offset, nbytes in arena.spans.values():
        outside[offset : offset + nbytes] = False
    wrong = np.flatnonzero(outside)
    if not wrong.size:
        return None
    name, at = arena.place(int(wrong[0]))
    if at < 0:
        return f"wrote {-at} byte(s) before the beginning of the {name} buffer"
    return f"wrote {at - arena.spans[name][1] + 1} byte(s) past the end of the {name} buffer"


def _changed(arena: Arena, before: Array, seen: Array, mine: tuple[str, ...]) -> str | None:
    for name in (name for name in arena.spans if name not in mine):
        wrong = np.flatnonzero(arena.part(before, name) != arena.part(seen, name))
        if wrong.size:
            return f"the {name} buffer was written to, first at byte {int(wrong[0])}"
    return None


def _changed_weights(
    memory: Memory, names: list[str], weights: tuple[Buffer, ...], before: list[Array]
) -> str | None:
    for index, (buffer, old) in enumerate(zip(weights, before, strict=True)):
        if not np.array_equal(_bytes(memory, buffer), old):
            name = names[index] if index < len(names) else f"prepared buffer {index}"
            return f"weight '{name}' was written to"
    return None


def _changed_on_host(
    names: list[str], handed: tuple[Array, ...], given: tuple[Array, ...]
) -> str | None:
    for name, after, before in zip(names, handed, given, strict=True):
        if after.tobytes() != before.tobytes():
            return f"`prepare` wrote to the array of weight '{name}' that it was given"
    return None


def _in_flight(arena: Arena, seen: Array, threads: set[threading.Thread], seconds: float) -> bool:
    time.sleep(seconds)
    deadline = time.monotonic() + THREAD_SECONDS
    for thread in set(threading.enumerate()) - threads - set(_lasting):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _lasting.add(thread)
    return not np.array_equal(seen, arena.read())
