"""Parts of campaigns, for workers that would otherwise wait while one of them runs it all.

A kernel of many tiles may have more than a thousand problems. Its own problems, those of each of
its choices and those of the network do not depend on each other, so parts of a campaign may run in
several processes. `divided` says into how many parts, and `joined` makes one report of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from r18_oracle.search.campaign import KernelReport

MOST_PARTS = 16
"""Each part finds out again what all have in common, such as the kernel's choices."""


def divided(kernels: int, workers: int) -> int:
    """The number of parts of each campaign: one if there is a kernel for every worker."""
    return max(1, min(MOST_PARTS, -(-workers // max(1, kernels))))


def joined(reports: Sequence[KernelReport]) -> KernelReport:
    """One report of the parts of a campaign, in their order.

    The finding, with its history, is that of the first part that has one. The seconds are those of
    all parts together.
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
