"""The planner: nothing alive is overwritten, and sharing never costs memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r18_numpy
from r18.backend import CompileOptions
from r18.errors import UsageError
from r18.graph.passes import FUSION_LEVELS
from r18.graph.resnet import resnet18
from r18.graph.schedule import CANONICAL
from r18.runtime.arena import Arena, Lifetime, aligned, plan_arena
from r18.runtime.plan import make_plan
from support import check_plan

SETTINGS = settings(derandomize=True, deadline=None, max_examples=300)
ALIGNMENTS = st.sampled_from([1, 2, 3, 16, 64, 256])


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    """Any lifetimes: empty buffers, equal sizes, long and one-step lives, in any order."""
    found = []
    for index in range(draw(st.integers(0, 14))):
        first = draw(st.integers(-1, 9))
        size = draw(st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 64, 65, 128])))
        found.append(Lifetime(f"b{index}", size, first, first + draw(st.integers(0, 6))))
    return found


def naive(lives: list[Lifetime], alignment: int) -> int:
    return sum(-(-life.nbytes // alignment) * alignment for life in lives)


def assert_valid(lives: list[Lifetime], arena: Arena, alignment: int) -> None:
    """No byte belongs to two buffers in any one step; everything is aligned and inside."""
    assert arena.offsets.keys() == {life.name for life in lives}
    for life in lives:
        assert arena.offsets[life.name] % alignment == 0
        assert arena.offsets[life.name] >= 0
        assert arena.offsets[life.name] + life.nbytes <= arena.nbytes
    for step in {life.first for life in lives}:  # a clash exists when the later of two begins
        alive = sorted(
            (arena.offsets[life.name], life.nbytes)
            for life in lives
            if life.nbytes and life.first <= step <= life.last
        )
        for (start, size), (following, _) in pairwise(alive):
            assert start + size <= following


@SETTINGS
@given(lives=lifetimes(), alignment=ALIGNMENTS)
def test_no_two_live_buffers_overlap(lives: list[Lifetime], alignment: int) -> None:
    assert_valid(lives, plan_arena(lives, alignment), alignment)


@SETTINGS
@given(lives=lifetimes(), alignment=ALIGNMENTS)
def test_sharing_is_never_larger_than_the_naive_sum(lives: list[Lifetime], alignment: int) -> None:
    arena = plan_arena(lives, alignment)
    assert arena.nbytes <= naive(lives, alignment)
    ends = (arena.offsets[x.name] + aligned(x.nbytes, alignment) for x in lives)
    assert arena.nbytes == max(ends, default=0)  # no byte more than the last buffer's end


@SETTINGS
@given(lives=lifetimes(), alignment=ALIGNMENTS)
def test_without_sharing_the_arena_is_the_exact_sum(lives: list[Lifetime], alignment: int) -> None:
    arena = plan_arena(lives, alignment, share=False)
    assert arena.nbytes == naive(lives, alignment)
    together = [Lifetime(life.name, life.nbytes, 0, 0) for life in lives]
    assert_valid(together, arena, alignment)  # as if everything lived at once


@SETTINGS
@given(lives=lifetimes(), alignment=ALIGNMENTS)
def test_by_size_buffers_share_all_their_bytes_or_none(
    lives: list[Lifetime], alignment: int
) -> None:
    """Only those of one size share bytes, if the arena is not too large then."""
    arena = plan_arena(lives, alignment, by_size_nbytes=naive(lives, alignment))
    assert_valid(lives, arena, alignment)
    assert arena.nbytes <= naive(lives, alignment)
    spans = sorted({(arena.offsets[life.name], life.nbytes) for life in lives if life.nbytes})
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    if arena.nbytes:
        assert plan_arena(lives, alignment, by_size_nbytes=arena.nbytes) == arena
        too_few = plan_arena(lives, alignment, by_size_nbytes=arena.nbytes - 1)
        assert too_few == plan_arena(lives, alignment)


@SETTINGS
@given(lives=lifetimes(), data=st.data())
def test_the_plan_does_not_depend_on_the_order_of_the_buffers(
    lives: list[Lifetime], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(lives))
    assert plan_arena(shuffled, 64) == plan_arena(lives, 64)


def test_a_chain_needs_its_two_largest_neighbours() -> None:
    sizes = [100, 300, 200, 50, 100]
    chain = [Lifetime(f"v{i}", size, i, i + 1) for i, size in enumerate(sizes)]
    assert plan_arena(chain, 1).nbytes == 300 + 200
    assert plan_arena(chain, 1, share=False).nbytes == sum(sizes)


def test_lives_that_meet_in_a_single_step_do_not_share() -> None:
    """A step's input and output do not share memory, as the step needs both."""
    read, written = Lifetime("read", 64, 0, 3), Lifetime("written", 64, 3, 5)
    assert read.meets(written)
    assert written.meets(read)
    assert plan_arena([read, written], 64).nbytes == 128
    later = Lifetime("later", 64, 4, 5)
    assert not read.meets(later)
    assert plan_arena([read, later], 64).nbytes == 64


def test_a_gap_between_placed_buffers_is_used_only_where_it_is_wide_enough() -> None:
    """Largest first puts `low`, then `gap` behind it, then `high`; `gap` is dead when others come.

    `fits` is as wide as what `gap` left and goes there; `wide`, a byte wider, must go on top.
    """
    low, gap, high = (
        Lifetime(n, s, 0, e) for n, s, e in (("a", 30, 9), ("b", 25, 1), ("c", 20, 9))
    )
    base = [low, gap, high]
    assert plan_arena(base, 1).offsets == {"a": 0, "b": 30, "c": 55}
    fits = plan_arena([*base, Lifetime("d", 15, 2, 9), Lifetime("e", 10, 2, 9)], 1)
    assert fits.offsets["d"] == 30
    assert fits.offsets["e"] == 45
    assert fits.nbytes == 75
    spills = plan_arena([*base, Lifetime("d", 15, 2, 9), Lifetime("e", 11, 2, 9)], 1)
    assert spills.offsets["e"] == 75
    assert spills.nbytes == 86


def test_many_overlapping_lives_fragment_the_arena_no_further_than_the_sum() -> None:
    """Overlapping lives that leave unusable gaps fragment the arena by no more than their sum."""
    lives = [Lifetime(f"s{i}", 10 + i, i, i + 2) for i in range(40)]
    lives += [Lifetime(f"n{i}", 500 - 7 * i, i, 80 - i) for i in range(20)]
    arena = plan_arena(lives, 64)
    assert_valid(lives, arena, 64)
    peak = max(
        sum(aligned(x.nbytes, 64) for x in lives if x.first <= step <= x.last) for step in range(81)
    )
    assert peak <= arena.nbytes <= naive(lives, 64)


def test_no_buffers_need_no_bytes() -> None:
    assert plan_arena([], 64) == Arena({}, 0)
    assert plan_arena([Lifetime("empty", 0, 0, 3)], 64).nbytes == 0


@pytest.mark.parametrize(("nbytes", "first", "last"), [(-1, 0, 0), (8, 3, 2)])
def test_what_is_no_lifetime(nbytes: int, first: int, last: int) -> None:
    with pytest.raises(UsageError, match="not a lifetime"):
        Lifetime("x", nbytes, first, last)


def test_errors() -> None:
    with pytest.raises(UsageError, match="alignment must be at least 1, got 0"):
        plan_arena([], 0)
    twice = [Lifetime("x", 8, 0, 1), Lifetime("x", 8, 4, 5)]
    with pytest.raises(UsageError, match="same name"):
        plan_arena(twice, 1)


def test_aligned() -> None:
    assert [aligned(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


# -- the real plan -----------------------------------------------------------------------------

MANY_TAPS = (*CANONICAL, "layer1.0", "layer2.0.downsample")


@pytest.mark.parametrize("taps", [(), MANY_TAPS], ids=["untapped", "tapped"])
@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_no_step_of_resnet18_overwrites_what_is_still_needed(
    level: str, taps: tuple[str, ...]
) -> None:
    """No step overwrites needed memory, byte by byte from steps and tensors: `check_plan`."""
    backend = r18_numpy.Backend()
    plan = make_plan(backend, resnet18(), CompileOptions(batch=8, fusion=level, taps=taps))
    in_place = check_plan(plan, backend.memory.alignment)
    batchnorms = [s for s in plan.steps if s.kernel.op.name == "batchnorm"]
    for step in batchnorms:  # what each reads dies there
        assert in_place[step.output] == step.inputs[0]
    naive = sum(t.nbytes for t in plan.tensors.values())
    naive += sum(step.workspace_nbytes for step in plan.steps)
    assert plan.arena_nbytes < naive / 2


@pytest.mark.parametrize("level", ["none", "all"])
def test_without_the_arena_no_memory_is_shared(level: str) -> None:
    backend = r18_numpy.Backend()
    plan = make_plan(backend, resnet18(), CompileOptions(batch=2, fusion=level, arena=False))
    assert check_plan(plan, backend.memory.alignment) == {}
    spans = sorted((t.offset, t.nbytes) for t in plan.tensors.values())
    spans += sorted((s.workspace_offset, s.workspace_nbytes) for s in plan.steps)
    spans = sorted(span for span in spans if span[1])
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following


def test_a_tap_extends_a_lifetime_and_nothing_else() -> None:
    backend = r18_numpy.Backend()
    plain = make_plan(backend, resnet18(), CompileOptions(batch=8))
    tapped = make_plan(backend, resnet18(), CompileOptions(batch=8, taps=("relu",)))
    assert tapped.kernel_ids() == plain.kernel_ids()
    assert [s.problem for s in tapped.steps] == [s.problem for s in plain.steps]
    assert tapped.arena_nbytes > plain.arena_nbytes
