"""The rules of `wgmma`: products run on while their thread goes on; see `r18_oracle.ptx.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from r18_oracle.ptx.disorder import Disorder
from r18_oracle.ptx.flow import results, solve
from r18_oracle.ptx.parse import Function, Instruction

_MOST_GROUPS = 8
"""Newer groups are counted up to this number, which also stands for more."""

_Running = frozenset[tuple[str, int]]
"""(what, newer groups) of unfinished products; −1 before their group is committed."""


def _is_product(instruction: Instruction) -> bool:
    return instruction.starts("wgmma.mma_async")


def products_rules(function: Function) -> Iterator[Disorder]:
    """The violations of `products-wait`, `products-fence` and `release-wait`."""
    if any(map(_is_product, function.instructions)):
        yield from _products_wait(function)
        yield from _products_fence(function)
        yield from _release_wait(function)


def _products_wait(function: Function) -> Iterator[Disorder]:
    """Facts: `_Running`, where what is an accumulator's register.

    A copy of an accumulator is as unfinished as the accumulator. PTX copies them freely, because
    it has one register for each value of a variable; the assembler joins them again.
    """

    def step(at: Instruction, facts: _Running) -> _Running:
        if _is_product(at):
            return facts | {(name, -1) for name in results(at)}
        if facts and at.starts("mov") and not at.guard:
            into, *source = at.names
            kept = {(name, newer) for name, newer in facts if name != into}
            return frozenset(kept | {(into, newer) for name, newer in facts if name in source})
        return _left(at, facts)

    first: dict[str, int] = {}  # the first product that writes a register
    for at in filter(_is_product, function.instructions):
        for name in results(at):
            first.setdefault(name, at.line)
    for at, facts in solve(function, step, within=function.every):
        if facts and not at.starts("mov", "wgmma"):
            running = {name for name, _ in facts}
            used = [name for name in at.names if name in running]
            if used:
                product = min((first[name] for name in used if name in first), default=at.line)
                yield Disorder(
                    "products-wait",
                    function.name,
                    (product, at.line),
                    f"'{at.opcode}' uses an accumulator whose products may still be running: no "
                    "wgmma.wait_group comes between",
                )
                return


def _left(at: Instruction, facts: _Running) -> _Running:
    """The products that may still run after an instruction that begins none."""
    if at.starts("wgmma.commit_group"):
        return frozenset((what, min(newer + 1, _MOST_GROUPS)) for what, newer in facts)
    if at.starts("wgmma.wait_group"):
        most = int(at.operands, 0)
        return frozenset((what, newer) for what, newer in facts if newer < most)
    return facts


_EVERY = ""
"""The fact that no fence was reached, so that every register is unfenced."""


def _products_fence(function: Function) -> Iterator[Disorder]:
    """Facts: accumulators that something other than products has used since the last fence.

    A copy of a register is as fenced as the register.
    """
    accumulators = _accumulators(function)

    def step(at: Instruction, facts: frozenset[str]) -> frozenset[str]:
        if at.starts("wgmma.fence"):
            return frozenset()
        if _is_product(at):
            return facts - set(results(at))
        if at.starts("wgmma"):
            return facts
        used = accumulators.intersection(at.names)
        if not used:
            return facts
        if at.starts("mov"):
            into, *source = at.names
            fenced = source and source[0].startswith("%") and source[0] not in facts
            unfenced = not fenced or at.guard
            return facts | {into} if unfenced else facts - {into}
        return facts | used

    for at, facts in solve(function, step, frozenset({_EVERY}), within=function.every):
        if _is_product(at) and (_EVERY in facts or not facts.isdisjoint(results(at))):
            yield Disorder(
                "products-fence",
                function.name,
                (at.line,),
                "products use registers that were used before, without wgmma.fence between",
            )
            return


def _accumulators(function: Function) -> frozenset[str]:
    """The registers of products' sums, and those that are copied to or from them."""
    found = {name for at in filter(_is_product, function.instructions) for name in results(at)}
    copies = [at.names for at in function.instructions if at.starts("mov") and len(at.names) == 2]
    while True:
        more = {name for pair in copies if not found.isdisjoint(pair) for name in pair} - found
        if not more:
            return frozenset(found)
        found |= more


def _release_wait(function: Function) -> Iterator[Disorder]:
    """Facts: `_Running`, where what is nothing.

    An arrival may release what older products have read while those of the newest group run, if
    more products follow. Any other arrival while products run must be about other memory, and then
    one more arrival, which releases theirs, follows a wait.
    """

    def step(at: Instruction, facts: _Running) -> _Running:
        return facts | {("", -1)} if _is_product(at) else _left(at, facts)

    for at, facts in solve(function, step):
        if not facts or not _is_arrival(at):
            continue
        more, released = _follow(function, at)
        if not released and (max(facts) > ("", 0) or not more):
            yield Disorder(
                "release-wait",
                function.name,
                (at.line,),
                "an arrival may release shared memory that products still read: no "
                "wgmma.wait_group comes between",
            )
            return


def _is_arrival(instruction: Instruction) -> bool:
    """Whether an arrival says that memory may be used again, not that a copy has begun."""
    return instruction.starts("mbarrier.arrive") and not instruction.starts(
        "mbarrier.arrive.expect_tx"
    )


def _follow(function: Function, arrival: Instruction) -> tuple[bool, bool]:
    """Whether an arrival may be followed by more products before a wait for all of them; and
    whether, after a wait and before more products, by another arrival."""
    more = released = False
    (start,) = (i for i, block in enumerate(function.ordering) if arrival in block)
    block = function.ordering[start]
    rest = block[block.index(arrival) + 1 :]
    todo = [(start, rest, False, False)]  # a block, instructions, whether waited, and for all
    seen: set[tuple[int, bool, bool]] = set()
    while todo:
        index, instructions, waited, for_all = todo.pop()
        for at in instructions:
            if _is_product(at):
                more = more or not for_all
                break
            if at.starts("wgmma.wait_group"):
                waited, for_all = True, for_all or int(at.operands, 0) == 0
            released = released or (waited and _is_arrival(at))
        else:
            for successor in function.blocks[index].successors:
                if (state := (successor, waited, for_all)) not in seen:
                    seen.add(state)
                    todo.append((successor, function.ordering[successor], waited, for_all))
    return more, released


__all__ = ["products_rules"]
