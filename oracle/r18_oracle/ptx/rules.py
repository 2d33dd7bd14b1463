"""The rules of memory ordering, and where a kernel's PTX violates them.

A thread's accesses to shared memory go through two proxies: ordinary loads and stores through the
generic one, TMA and `wgmma` through the async one. Program order and barriers order accesses of one
proxy only (PTX ISA, "Async proxy"), and no run of a kernel shows a violation reliably. The rules:

- `proxy-fence`:   between a generic write to shared memory and an arrival or a barrier after which
                   the async proxy is used, there must be a `fence.proxy.async`. A `cp.async` must
                   be waited for before the fence.
- `store-wait`:    a bulk store must be committed and waited for before its thread exits, and in
                   each loop that issues stores, since it reads shared memory until then.
- `cluster-order`: a write to shared memory before a cluster barrier needs an arrival that releases
                   it, and a CTA must not exit while others may read its shared memory. Before an
                   `st.async`, a cluster barrier must show that the other CTAs have started and
                   have initialised their mbarriers.
- `init-fence`:    an initialised mbarrier must be fenced before a barrier publishes it.
- `retry`:         `mbarrier.try_wait` needs a loop, since it may return before the phase completes.
- `products-wait`: the accumulators of `wgmma.mma_async` must not be used before the group of these
                   products has been waited for (PTX ISA, "wgmma.wait_group").
- `products-fence`: a `wgmma.fence` must come before the first products, and between other uses of
                   accumulators and products that use them (PTX ISA, "wgmma.fence").
- `release-wait`:  an mbarrier's arrival must not release operands that products may still read.
- `aligned`:       a warp's threads must be together again, at the latest by `bar.warp.sync`, before
                   an `.aligned` barrier of a cluster (PTX ISA, "barrier.cluster").
- `launch-wait`:   a launch that may begin before the previous one has ended must wait for it
                   (`griddepcontrol.wait`) before it accesses anything but weights.

The analysis follows paths, not values: it does not know which addresses are equal, nor that two
branches are taken together. So it may report a violation where the program keeps the order in
another way, but it always reports an order that no path keeps. Such a violation is accepted by an
entry of `r18_oracle.ptx.accepted`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from r18_oracle.ptx.disorder import Disorder
from r18_oracle.ptx.flow import after, parameters_of, solve
from r18_oracle.ptx.parse import Function, Instruction
from r18_oracle.ptx.products import products_rules

_SHARED_WRITES = ("st.shared", "st.shared::cta", "red.shared", "atom.shared", "stmatrix")
_BARRIERS = ("bar.sync", "barrier.sync", "bar.arrive", "barrier.cta", "bar.red")
_PUBLISHES = (*_BARRIERS, "barrier.cluster.arrive")
_EXITS = ("ret", "exit")
_SEND = "st.async"  # to another CTA, whose mbarrier counts the bytes


def disorders(
    function: Function, *, constants: frozenset[int] = frozenset(), overlaps: bool = False
) -> tuple[Disorder, ...]:
    """The violations, at most one per instruction, rule and message, in the order of the PTX.

    constants: see `r18.backend.DeviceFunction`.
    overlaps:  whether the launch may begin before the previous one has ended.
    """
    found = [
        *_proxy_fence(function),
        *_store_wait(function),
        *_cluster_order(function),
        *_cluster_start(function),
        *_init_fence(function),
        *_retry(function),
        *_aligned(function),
        *products_rules(function),
        *(_launch_wait(function, constants) if overlaps else ()),
    ]
    return tuple(sorted(found, key=lambda one: (one.lines, one.rule)))


# -- proxies -----------------------------------------------------------------------------------


def _is_async(instruction: Instruction) -> bool:
    """Whether an instruction reads or writes shared memory through the async proxy."""
    return instruction.starts("wgmma.mma_async", "cp.async.bulk") and not instruction.starts(
        "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cp.async.bulk.prefetch"
    )


def _is_copy(instruction: Instruction) -> bool:
    """Whether an instruction is a `cp.async` of the generic proxy."""
    return instruction.starts("cp.async.ca", "cp.async.cg")


_UNFENCED = {"copy": "a cp.async that may still be in flight", "write": "a generic write"}


def _proxy_fence(function: Function) -> Iterator[Disorder]:
    """Facts: ("write", line) until fenced, and ("copy", line) of a `cp.async` until waited for."""
    if not _any(_is_async, function):
        return
    then_async = after(function, _is_async)

    def step(at: Instruction, facts: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        if at.starts(*_SHARED_WRITES):
            return facts | {("write", at.line)}
        if _is_copy(at):
            return facts | {("copy", at.line)}
        if at.starts("cp.async.wait_all") or (
            at.starts("cp.async.wait_group") and at.operands.strip() == "0"
        ):
            return frozenset(("write", line) for _, line in facts)
        if at.starts("fence.proxy.async"):
            return frozenset(fact for fact in facts if fact[0] == "copy")
        return facts

    # Facts still hold after a barrier, so each write is reported only where it is first published.
    reported: set[tuple[str, int]] = set()
    for at, facts in solve(function, step):
        # The code that waits for an mbarrier may be anywhere; that behind a barrier comes after it.
        publishes = at.starts("mbarrier.arrive") or (at.starts(*_PUBLISHES) and at in then_async)
        if not (publishes or _is_async(at)):
            continue
        new = facts - reported
        reported |= new
        # Both kinds are reported, because a reason to accept one says nothing about the other.
        for kind, what in _UNFENCED.items():
            if lines := [line for one, line in new if one == kind]:
                yield Disorder(
                    "proxy-fence",
                    function.name,
                    (min(lines), at.line),
                    f"{what} to shared memory reaches '{at.opcode}' without fence.proxy.async, and "
                    "the async proxy is used after it",
                )


# -- bulk stores -------------------------------------------------------------------------------


def _is_store(instruction: Instruction) -> bool:
    return instruction.starts("cp.async.bulk", "cp.reduce.async.bulk") and ".bulk_group" in (
        instruction.opcode
    )


def _store_wait(function: Function) -> Iterator[Disorder]:
    """Facts: ("store", line) until committed, then ("group", line) until waited for."""

    def waits(at: Instruction) -> bool:
        return at.starts("cp.async.bulk.wait_group") and at.operands.strip() == "0"

    def step(at: Instruction, facts: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        if _is_store(at):
            return facts | {("store", at.line)}
        if at.starts("cp.async.bulk.commit_group"):
            return frozenset(("group", line) for _, line in facts)
        if waits(at):
            return frozenset(fact for fact in facts if fact[0] == "store")
        return facts

    pending: dict[int, tuple[str, int]] = {}
    for at, facts in solve(function, step):
        if at.starts(*_EXITS):
            for kind, line in facts:
                pending.setdefault(line, (kind, at.line))
    for index, instructions in enumerate(function.ordering):
        stores = [at for at in instructions if _is_store(at)]
        if not stores:
            continue
        reachable = function.reachable[index]
        loop = function.loop(index)
        writes = [at for other in loop for at in function.ordering[other] if _writes_shared(at)]
        if writes and not _any(waits, function, loop):
            yield Disorder(
                "store-wait",
                function.name,
                (stores[0].line, writes[0].line),
                "a loop stores shared memory in bulk, writes it again, and never waits",
            )
        # Whether a loop leaves stores to wait for depends on a value (a flag), not on a path.
        if writes and _any(waits, function, reachable - loop):
            continue
        for store in stores:
            if store.line in pending:
                kind, end = pending[store.line]
                missing = "committed" if kind == "store" else "waited for"
                yield Disorder(
                    "store-wait",
                    function.name,
                    (store.line, end),
                    f"a bulk store might not be {missing} when its thread exits",
                )


def _any(
    wanted: Callable[[Instruction], bool],
    function: Function,
    blocks: Iterable[int] | None = None,
) -> bool:
    """Whether one of the blocks (default: all) has such an instruction."""
    chosen = function.ordering if blocks is None else (function.ordering[i] for i in blocks)
    return any(wanted(at) for instructions in chosen for at in instructions)


def _writes_shared(instruction: Instruction) -> bool:
    return instruction.starts(*_SHARED_WRITES) or _is_copy(instruction)


# -- clusters ----------------------------------------------------------------------------------


def _cluster_order(function: Function) -> Iterator[Disorder]:
    """Facts: ("write", line) until released; ("read", line) of other CTAs until a barrier ends."""
    remote = ("ld.shared::cluster", "st.shared::cluster", "red.shared::cluster")
    if not _any(lambda at: at.starts(*remote), function):
        return

    def step(at: Instruction, facts: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        if at.starts(*_SHARED_WRITES):
            return facts | {("write", at.line)}
        if at.starts(*remote):
            return facts | {("read", at.line)}
        if at.starts("barrier.cluster.arrive"):
            becomes = (
                {"read": "arrived"} if _relaxed(at) else {"read": "arrived", "write": "released"}
            )
            return frozenset((becomes.get(kind, kind), line) for kind, line in facts)
        if at.starts("barrier.cluster.wait"):
            return frozenset(fact for fact in facts if fact[0] in ("read", "write"))
        return facts

    reported: set[int] = set()
    kinds: tuple[str, ...]
    for at, facts in solve(function, step):
        if at.starts("barrier.cluster.arrive") and _relaxed(at):
            kinds, what = ("write",), "a write to shared memory is not ordered by a relaxed arrival"
        elif at.starts(*remote):
            kinds = ("write", "released")
            what = "other CTAs' shared memory is read before a cluster barrier orders this write"
        elif at.starts(*_EXITS):
            kinds = ("read", "arrived")
            what = "a CTA may have exited when this reads its shared memory: no barrier follows"
        else:
            continue
        lines = {line for kind, line in facts if kind in kinds} - reported
        if lines:
            reported |= lines
            yield Disorder("cluster-order", function.name, (min(lines), at.line), what)


def _cluster_start(function: Function) -> Iterator[Disorder]:
    """Facts, until an arrival and a wait of the cluster have followed: "apart", that other CTAs may
    not have started, and "initialised", that an mbarrier of theirs may not be. After the arrival
    both are "arrived"."""

    def step(at: Instruction, facts: frozenset[str]) -> frozenset[str]:
        if at.starts("mbarrier.init"):
            return facts | {"initialised"}
        if at.starts("barrier.cluster.arrive"):
            return frozenset({"arrived"} if facts else ())
        if at.starts("barrier.cluster.wait"):
            return facts - {"arrived"}
        return facts

    for at, facts in solve(function, step, frozenset({"apart"})):
        if at.starts(_SEND) and facts:
            yield Disorder(
                "cluster-order",
                function.name,
                (at.line,),
                "another CTA may not have started, or not have initialised its mbarrier, when this "
                "sends to it: no cluster barrier comes in between",
            )
            return


def _relaxed(arrival: Instruction) -> bool:
    return ".relaxed" in arrival.opcode


def _aligned(function: Function) -> Iterator[Disorder]:
    """Facts: lines of branches that some threads of a warp may not take."""

    def step(at: Instruction, facts: frozenset[int]) -> frozenset[int]:
        if at.starts("bra") and at.guard and not at.starts("bra.uni"):
            return facts | {at.line}
        return frozenset() if at.starts("bar.warp.sync", *_BARRIERS) else facts

    reported: set[int] = set()
    for at, facts in solve(function, step, within=function.every):
        if at.starts("barrier.cluster") and ".aligned" in at.opcode and facts - reported:
            reported |= facts
            yield Disorder(
                "aligned",
                function.name,
                (max(facts), at.line),
                f"threads of a warp may come to '{at.opcode}' apart: no bar.warp.sync joins them "
                "after a branch",
            )


# -- mbarriers ---------------------------------------------------------------------------------


def _init_fence(function: Function) -> Iterator[Disorder]:
    """Facts: lines of initialisations that are not fenced."""

    def step(at: Instruction, facts: frozenset[int]) -> frozenset[int]:
        if at.starts("mbarrier.init"):
            return facts | {at.line}
        if at.starts("fence.mbarrier_init", "fence.proxy.async"):
            return frozenset()
        return facts

    if not _any(lambda at: _is_async(at) or at.starts(_SEND), function):
        return
    for at, facts in solve(function, step):
        if facts and at.starts(*_PUBLISHES):
            yield Disorder(
                "init-fence",
                function.name,
                (min(facts), at.line),
                "an mbarrier is initialised and published without fence.mbarrier_init or "
                "fence.proxy.async",
            )
            return


def _retry(function: Function) -> Iterator[Disorder]:
    for index, instructions in enumerate(function.ordering):
        for at in instructions:
            if at.starts("mbarrier.try_wait") and index not in function.reachable[index]:
                yield Disorder(
                    "retry",
                    function.name,
                    (at.line,),
                    "mbarrier.try_wait may return before its phase completes; no loop repeats it",
                )


# -- dependent launch --------------------------------------------------------------------------


def _launch_wait(function: Function, constants: frozenset[int]) -> Iterator[Disorder]:
    """One fact: the thread may not have waited yet."""
    sources = parameters_of(function)

    def step(at: Instruction, facts: frozenset[str]) -> frozenset[str]:
        return frozenset() if _waits_for_launch(at) else facts

    before = dict(solve(function, step, frozenset({"not waited"})))
    for index, instructions in enumerate(function.ordering):
        early = [at for at in instructions if _touches_global(at) and before.get(at)]
        # Whether only the first iteration waits depends on a value (a flag), not on a path.
        if not early or _any(_waits_for_launch, function, function.earlier(index)):
            continue
        for at in early:
            touched = sources.get(_global_base(at), frozenset())
            if touched and touched <= constants:
                continue
            which = ", ".join(map(str, sorted(touched - constants))) or "unknown"
            yield Disorder(
                "launch-wait",
                function.name,
                (at.line,),
                f"'{at.opcode}' at parameter {which} may run before griddepcontrol.wait, while "
                "the previous launch writes or reads that memory",
            )


def _waits_for_launch(at: Instruction) -> bool:
    return at.starts("griddepcontrol.wait") and not at.guard


def _touches_global(at: Instruction) -> bool:
    if at.starts("ld", "st", "red", "atom"):
        return ".global" in at.opcode
    return (_is_copy(at) or at.starts("cp.async.bulk")) and ".global" in at.opcode


def _global_base(at: Instruction) -> str:
    """The register or symbol of the global address, or of the tensor map."""
    loads = (_is_copy(at) or at.starts("cp.async.bulk")) and not _is_store(at)
    return at.addresses[1 if loads else 0]
