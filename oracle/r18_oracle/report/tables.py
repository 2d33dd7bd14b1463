"""What was run on each kernel: problems, refusals with their reasons, checks, and seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import ratio_text, shade, short, value
from r18_oracle.check.checks import CHECKS
from r18_oracle.report.faults import severity
from r18_oracle.report.glance import duration
from r18_oracle.search.campaign import KernelReport

HEADS = ("kernel", "verdict", "problems", "refused", "error/bound", "sees", "seconds")


def kernel_table(reports: Sequence[KernelReport]) -> Markup:
    """A row a kernel of a backend, with a bar for the time that its search took."""
    longest = max((report.seconds for report in reports), default=0.0)
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    rows = [_row(report, longest) for report in reports]
    total = duration(sum(report.seconds for report in reports))
    foot = tag("tr", tag("th", "all", scope="row"), tag("td", colspan=5), tag("td", total))
    table = tag(
        "table", tag("thead", head), tag("tbody", *rows), tag("tfoot", foot), class_="plain"
    )
    return scrolled(table, "table")


def _row(report: KernelReport, longest: float) -> Markup:
    tally = report.tally
    failed = report.finding is not None
    ratio = severity(report.finding) if report.finding else tally.ratio
    chip = {"ok": "good", "FAIL": "bad"}.get(report.verdict, "void")
    word = f"✕ {report.finding.check}" if report.finding else report.verdict
    judged = failed or tally.problems
    mark = tag("i", class_=f"swatch {shade(ratio)}")
    sees = (
        "–" if tally.resolution is None else short(tally.resolution) if tally.resolution else "all"
    )
    share = 100 * report.seconds / longest if longest else 0
    said = f"{tally.problems} problems"
    if report.network_problems:
        said += f", {report.network_problems} of the network"
    if took := [chosen.problems for chosen in report.choices.values()]:
        said += f", {sum(took)} of its {len(took)} choices, at least {min(took)} each"
    return tag(
        "tr",
        tag("th", report.kernel, scope="row"),
        tag("td", tag("span", word, class_=f"chip {chip}")),
        tag("td", str(tally.problems), title=said),
        tag("td", str(sum(tally.refused.values()))),
        tag("td", joined([mark, value(ratio, ratio_text(ratio, 3))]) if judged else "–"),
        tag("td", sees),
        tag(
            "td",
            tag("span", value(report.seconds, f"{report.seconds:.1f}")),
            class_="bar",
            style=f"--part:{share:.1f}%",
        ),
    )


def check_table(reports: Sequence[KernelReport]) -> Markup:
    """How often each check passed on each kernel, and which one failed."""
    seen = Counter[str]()
    for report in reports:
        seen.update(report.tally.passed)
        if report.finding is not None:
            seen[report.finding.check] += 1
    names = [name for name in CHECKS if seen[name]]
    names += sorted(seen.keys() - set(CHECKS))
    head = [tag("th", "kernel", scope="col")]
    head += [tag("th", tag("span", name.replace("_", " ")), scope="col") for name in names]
    rows = []
    for report in reports:
        cells = [tag("th", report.kernel, scope="row")]
        for name in names:
            count = report.tally.passed[name]
            if report.finding is not None and report.finding.check == name:
                cells.append(tag("td", tag("b", f"✕ {count}" if count else "✕"), class_="f2"))
            else:
                cells.append(tag("td", str(count)) if count else tag("td", "·", class_="none"))
        rows.append(tag("tr", *cells))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="checks")
    return scrolled(table, "table")


def refusals(reports: Sequence[KernelReport]) -> Markup | None:
    """What was refused and why, a line a kernel and reason; None when nothing was."""
    lines = [
        tag("tr", tag("th", report.kernel, scope="row"), tag("td", f"{count} ×"), tag("td", why))
        for report in reports
        for why, count in report.tally.refused.most_common()
    ]
    if not lines:
        return None
    return scrolled(tag("table", tag("tbody", *lines), class_="plain reasons"), "table")


__all__ = ["check_table", "kernel_table", "refusals"]
