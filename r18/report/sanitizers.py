"""What compute-sanitizer's tools found: errors of memory and of synchronisation, by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from r18.report.markup import Markup, joined, scrolled, tag
from r18.report.scale import value

HEADS = ("tool", "verdict", "kernels", "problems", "errors", "not run")
CLEAN = "clean"


def section(sanitized: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    """The contents of the section: devices one after another."""
    yield tag(
        "p",
        "Each kernel under the tools of NVIDIA's compute-sanitizer: accesses out of bounds "
        "(memcheck), hazards in shared memory (racecheck), reads of what nothing wrote "
        "(initcheck), barriers that not all threads reach (synccheck).",
    )
    for slug, record in sanitized.items():
        tools = record["tools"]
        chip = tag("span", slug, class_="chip")
        parts = [tag("h3", record["device"], " ", chip), _tools(tools)]
        if complaints := list(_complaints(tools)):
            parts.append(tag("div", *complaints, class_="charts"))
        parts.append(tag("details", tag("summary", "Errors, by kernel and tool"), _kernels(tools)))
        yield joined(parts)


def count(sanitized: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """(errors, runs of a kernel under a tool) of all devices."""
    tools = [tool for record in sanitized.values() for tool in record["tools"].values()]
    return sum(tool["errors"] for tool in tools), sum(len(tool["kernels"]) for tool in tools)


def _tools(tools: Mapping[str, Mapping[str, Any]]) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in HEADS))
    rows = []
    for name, tool in tools.items():
        kind = {CLEAN: "good", "FAIL": "bad"}.get(tool["verdict"], "void")
        sign = "✕ " if kind == "bad" else ""
        problems = sum(kernel["problems"] for kernel in tool["kernels"].values())
        numbers = (len(tool["kernels"]), problems, tool["errors"], tool["missing"])
        rows.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                tag("td", tag("span", f"{sign}{tool['verdict']}", class_=f"chip {kind}")),
                *(tag("td", value(number, f"{number:,}")) for number in numbers),
            )
        )
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain")
    return scrolled(table, "tools")


def _complaints(tools: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    """A note a kernel with errors, or that came to no end."""
    for name, tool in tools.items():
        for kernel, entry in tool["kernels"].items():
            lines = [_complaint(found) for found in entry.get("complaints", ())]
            if broken := entry.get("broken"):
                lines.append(f"came to no end: {broken}")
            if entry["errors"] and not lines:
                lines.append(f"{entry['errors']} errors")
            if lines:
                listed = tag("ul", *(tag("li", line) for line in lines))
                heading = tag("h3", tag("span", f"✕ {name}", class_="chip bad"), " ", kernel)
                yield tag("article", heading, listed, class_="chart")


def _complaint(found: Mapping[str, Any]) -> str:
    where = f" in {found['function']}" if found["function"] else ""
    return f"{found['what']}{where}" + (f" ({found['count']} times)" if found["count"] > 1 else "")


def _kernels(tools: Mapping[str, Mapping[str, Any]]) -> Markup:
    names = sorted({kernel for tool in tools.values() for kernel in tool["kernels"]})
    head = tag("tr", *(tag("th", name, scope="col") for name in ("kernel", *tools)))
    rows = (
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(tag("td", _cell(tool["kernels"].get(name))) for tool in tools.values()),
        )
        for name in names
    )
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain")
    return scrolled(table, "errors by kernel and tool")


def _cell(entry: Mapping[str, Any] | None) -> Markup | str:
    """The errors of a kernel under a tool; what was not run, or has no summary, has none."""
    if entry is None:
        return "not run"
    if entry.get("broken"):
        return tag("b", "✕ no end", class_="bad")
    if entry["errors"] is None:
        return tag("b", "✕ no summary", class_="bad")
    if not entry["problems"]:
        return "nothing ran"
    errors = value(entry["errors"], f"{entry['errors']:,}")
    return tag("b", "✕ ", errors, class_="bad") if entry["errors"] else errors


__all__ = ["count", "section"]
