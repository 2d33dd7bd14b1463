"""Mutants: small changes of the kernels' sources, and those that the oracle caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import value

HEADS = ("file", "mutants", "caught", "survived", "equivalent", "do not compile", "caught of tried")
SURVIVOR = ("where", "was", "became", "shown to")
NAMED = 2
"""Kernels that a survivor was shown to, of which more are counted only."""
STATUSES = ("killed", "survived", "equivalent", "invalid")


def section(mutated: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    """The contents of the section: devices one after another, and of each the backends."""
    yield tag(
        "p",
        "Small changes of the kernels' sources, one at a time, each judged by the oracle. The "
        "score is the share that was caught of those that could be: a change that makes no "
        "difference is equivalent, and one that does not compile does not count.",
    )
    for slug, record in mutated.items():
        for name, run in record["backends"].items():
            chip = tag("span", slug, class_="chip")
            yield joined([tag("h3", name, " ", chip), *_backend(run)])


def count(mutated: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """(caught, tried) of all backends."""
    runs = [run for record in mutated.values() for run in record["backends"].values()]
    caught = sum(run["killed"] for run in runs)
    return caught, caught + sum(run["survived"] for run in runs)


def fates(run: Mapping[str, Any]) -> dict[str, str]:
    """The status of every mutant that is recorded, by its id.

    What was judged equivalent by hand counts as that, whatever an earlier run of it said.
    """
    found = {name: str(entry["status"]) for name, entry in run["results"].items()}
    return found | dict.fromkeys(run.get("by_hand", {}), "equivalent")


def by_file(run: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """How many mutants of each file have each status."""
    found: dict[str, Counter[str]] = {}
    for name, status in sorted(fates(run).items()):
        found.setdefault(_file(name), Counter())[status] += 1
    return found


def _file(mutant: str) -> str:
    """Of a mutant's id, `FILE:LINE:COLUMN:OPERATOR:INDEX:DIGEST`."""
    return mutant.rsplit(":", 5)[0]


def _backend(run: Mapping[str, Any]) -> Iterator[Markup]:
    yield tag("ul", *_tiles(run), class_="tiles")
    files = by_file(run)
    if files:
        yield tag("figure", _table(files), tag("figcaption", _caption(run, files)))
    survivors = sorted(name for name, status in fates(run).items() if status == "survived")
    if survivors:
        title = tag("summary", f"Survivors ({len(survivors)})")
        yield tag("details", title, _survivors(run, survivors))
    checks = Counter(
        entry["finding"]["check"]
        for entry in run["results"].values()
        if entry["status"] == "killed"
    )
    if checks:
        yield tag("details", tag("summary", "The checks that caught them"), _checks(checks))
    if reasons := run.get("by_hand"):
        title = tag("summary", f"Judged equivalent by hand ({len(reasons)})")
        yield tag("details", title, _reasons(reasons))


def _tiles(run: Mapping[str, Any]) -> Iterator[Markup]:
    def tile(number: float, text: str, words: str) -> Markup:
        return tag("li", tag("b", value(number, text)), tag("span", words))

    tried = run["killed"] + run["survived"]
    if tried:
        yield tile(run["score"], f"{run['score']:.2f} %", f"caught: {run['killed']} of {tried}")
    yield tile(run["survived"], str(run["survived"]), "survived")
    yield tile(run["equivalent"], str(run["equivalent"]), "equivalent")
    if run["invalid"]:
        yield tile(run["invalid"], str(run["invalid"]), "do not compile")
    if run["left"]:
        yield tile(run["left"], str(run["left"]), "not judged yet")


def _caption(run: Mapping[str, Any], files: Mapping[str, Counter[str]]) -> str:
    sample = "All mutants" if run["limit"] is None else f"A fair sample of {run['limit']}"
    words = f"{sample}, profile {run['profile']}, {run['date'][:10]}."
    if run["left"]:
        words += f" Stopped early: the score is of the first {run['mutants']} of the sample."
    recorded = sum(counts.total() for counts in files.values())
    if recorded != run["mutants"]:
        words += f" The table has all {recorded} that are recorded."
    return words


def _table(files: Mapping[str, Counter[str]]) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    rows = [_row(name, counts) for name, counts in files.items()]
    foot = _row("all", sum(files.values(), Counter()))
    table = tag(
        "table", tag("thead", head), tag("tbody", *rows), tag("tfoot", foot), class_="plain"
    )
    return scrolled(table, "mutants by file")


def _row(name: str, counts: Counter[str]) -> Markup:
    tried = counts["killed"] + counts["survived"]
    numbers = [counts.total(), *(counts[status] for status in STATUSES)]
    cells = [tag("td", value(number, str(number))) for number in numbers]
    share = 100 * counts["killed"] / tried if tried else 0.0
    said = value(share, f"{share:.1f} %") if tried else "–"
    part = tag("td", tag("span", said), class_="bar", style=f"--part:{share:.1f}%")
    return tag("tr", tag("th", name, scope="row"), *cells, part)


def _survivors(run: Mapping[str, Any], names: Sequence[str]) -> Markup:
    heads = (tag("th", name, scope="col", class_="words") for name in SURVIVOR[1:])
    head = tag("tr", tag("th", SURVIVOR[0], scope="col"), *heads)
    rows = []
    for name in names:
        entry = run["results"][name]
        where = ":".join(name.rsplit(":", 5)[:2])
        words = (entry["before"], entry["after"])
        cells = (tag("td", tag("code", text), class_="words") for text in words)
        kernels = tag("td", _few(entry["kernels"]), class_="words")
        rows.append(tag("tr", tag("th", where, title=name, scope="row"), *cells, kernels))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain")
    return scrolled(table, "survivors")


def _few(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join([*names[:NAMED], *([f"and {more} more"] if more > 0 else [])])


def _checks(checks: Counter[str]) -> Markup:
    head = tag("tr", tag("th", "check", scope="col"), tag("th", "mutants", scope="col"))
    rows = (
        tag("tr", tag("th", name, scope="row"), tag("td", value(number, str(number))))
        for name, number in checks.most_common()
    )
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain")
    return scrolled(table, "mutants by check")


def _reasons(reasons: Mapping[str, str]) -> Markup:
    """A line a reason, with the mutants that share it."""
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(reason, []).append(":".join(name.rsplit(":", 5)[:2]))
    rows = (
        tag(
            "tr",
            tag("th", ", ".join(dict.fromkeys(places)), class_="words", scope="row"),
            tag("td", reason, class_="words"),
        )
        for reason, places in alike.items()
    )
    return scrolled(tag("table", tag("tbody", *rows), class_="plain"), "reasons")


__all__ = ["by_file", "count", "fates", "section"]
