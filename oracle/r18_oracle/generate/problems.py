"""Strategies: problems near a kernel's edges, and those of the real network.

Draws shrink to the smallest failing problem: every size is drawn such that smaller comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from hypothesis import strategies as st

from r18.backend import Kernel
from r18.graph.ops import Layout, Problem, Relayout, Softmax
from r18.graph.passes import FUSION_LEVELS, from_pixels, fuse, fuse_image, fuse_pairs
from r18.graph.quantize import has_integer_form, quantized
from r18.graph.quantized import LIMITS, QuantizedRelayout
from r18.graph.scaling import scaled
from r18.graph.schedule import IMAGE, Schedule
from r18_oracle.generate.sizes import takes
from r18_oracle.ops.normalize import normalization
from r18_oracle.ops.table import spec_of


def schedule_problems(schedule: Schedule, batches: Sequence[int]) -> tuple[Problem, ...]:
    """Every distinct problem of a network at every fusion level, softmax and relayouts included,
    and of the network in integers with weights of each number of bits, and in scaled e4m3.

    The last ones are in a plan only if the backend has a kernel for them (`Op.optional`).
    """
    found: dict[Problem, None] = {}
    for batch in batches:
        for level in FUSION_LEVELS:
            for problem in fuse(schedule, level).problems(batch).values():
                found.setdefault(problem)
        shapes = schedule.shapes(batch)
        found.setdefault(Problem(Softmax(), (shapes[schedule.output],)))
        for shape in {shape for shape in shapes.values() if len(shape) == 4}:
            found.setdefault(Problem(Relayout(Layout.NCHW, Layout.NHWC), (shape,)))
            found.setdefault(Problem(Relayout(Layout.NHWC, Layout.NCHW), (shape,)))
    for batch in batches if len(schedule.input_shape) == 3 else ():
        normalize = normalization(schedule.input_shape[0])
        found.setdefault(Problem(normalize, ((batch, *schedule.input_shape),)))
    fused = fuse(schedule, FUSION_LEVELS[-1])
    if schedule.input == IMAGE and has_integer_form(fused):  # slices are of float values
        for bits, batch in product(LIMITS, batches):
            integers = quantized(fused, bits)
            pixels = from_pixels(integers, normalization(schedule.input_shape[0]))
            for problem in (*integers.problems(batch).values(), *pixels.problems(batch).values()):
                found.setdefault(problem)
        for problem in _relayouts(quantized(fused), batches):
            found.setdefault(problem)
        for bits, batch in product(LIMITS, batches):
            pooled = fuse_pairs(quantized(fused, bits))
            pixels = from_pixels(pooled, normalization(schedule.input_shape[0]))
            for stem in (pooled, fuse_image(pixels), fuse_image(pooled)):
                for problem in stem.problems(batch).values():
                    found.setdefault(problem)
        for batch in batches:
            pooled = fuse_pairs(scaled(fused))
            for stem in (scaled(fused), pooled, fuse_image(pooled)):
                for problem in stem.problems(batch).values():
                    found.setdefault(problem)
    for batch in batches:
        for problem in fuse_pairs(fused).problems(batch).values():
            found.setdefault(problem)
    return tuple(found)


def _relayouts(integers: Schedule, batches: Sequence[int]) -> Iterator[Problem]:
    """Both relayouts of every value of a quantised network."""
    for batch in batches:
        for value, shape in integers.shapes(batch).items():
            if len(shape) == 4:
                stored = integers.storage[value]
                yield Problem(QuantizedRelayout(Layout.NCHW, Layout.NHWC, stored), (shape,))
                yield Problem(QuantizedRelayout(Layout.NHWC, Layout.NCHW, stored), (shape,))


def problems(kernel: Kernel, max_elements: int, max_macs: int) -> st.SearchStrategy[Problem]:
    """Problems of the kernel's op, within these limits or little larger.

    Three draws in four are adapted to what the kernel takes; a kernel that takes few problems would
    otherwise hardly ever run. The kernel may refuse the others.
    """

    @cache  # to draw the same again, Hypothesis needs the same answer again
    def fit(problem: Problem) -> Problem:
        return fitted(kernel, problem, 4 * max_macs)

    @cache
    def taken(problem: Problem) -> bool:
        return takes(kernel, problem)

    spec = spec_of(kernel.op)
    drawn = spec.draw(kernel, *spec.room(kernel, max_elements, max_macs))
    accepted = drawn.map(fit).filter(taken)
    return st.one_of(accepted, accepted, accepted, drawn)


def fitted(kernel: Kernel, problem: Problem, max_macs: int) -> Problem:
    """The first problem near this one that the kernel takes, or this one if none is found."""
    others = spec_of(problem.op).nearby(problem)
    return next((p for p in others if p.macs <= max_macs and takes(kernel, p)), problem)
