"""Parts of a campaign, for workers that would otherwise wait while one of them runs it all.

A kernel of many tiles may have more than a thousand problems. Its own problems, those of each of
its choices and those of the network do not depend on each other, so each may run in another
process: `parts` names them, `Campaign.run` runs one, and `joined` makes the report of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from r18.backend import Backend, Kernel
from r18_oracle.search.campaign import KernelReport, Part
from r18_oracle.search.choices import shares
from r18_oracle.search.profiles import Profile

NETWORK_PARTS = 4
"""The network's problems are the largest: three quarters of the time of a kernel without choices in
`thorough`."""


def parts(
    backend: Backend, kernel: Kernel, how: Profile, seed: int, network_name: str | None
) -> tuple[Part, ...]:
    """The parts of a campaign, in its order."""
    every = [Part(share=place) for place, _ in enumerate(shares(backend, kernel, how, seed))]
    if network_name is not None:
        every += [Part(network=(nth, NETWORK_PARTS)) for nth in range(NETWORK_PARTS)]
    return tuple(every)


def joined(reports: Sequence[KernelReport]) -> KernelReport:
    """The report of a campaign whose parts made these, in its order.

    The finding, with its history, is that of the first part that has one, where a campaign in one
    process would have stopped. The seconds are those of all parts together.
    """
    first, *_ = reports
    failed = next((report for report in reports if report.finding is not None), first)
    whole = KernelReport(
        first.backend,
        first.kernel,
        finding=failed.finding,
        network_problems=sum(report.network_problems for report in reports),
        seconds=sum(report.seconds for report in reports),
        history=failed.history,
    )
    for report in reports:
        whole.tally.include(report.tally)
        whole.tally.refused += report.tally.refused
        whole.choices |= report.choices
    return whole
