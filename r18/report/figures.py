"""Figures by matplotlib: dark on white, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, Any

from r18.bench.baselines import peers_precision
from r18.bench.record import group_name
from r18.report.evidence import Evidence, Group, Records
from r18.report.render import check_libraries, clean
from r18.report.scale import decimal, fault, shade
from r18.report.speed import FAR, KINDS, kind_of
from r18.report.tables import device_words
from r18.report.tables.summary import Comparison, comparisons

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, RULE, BAD = "#191c20", "#5d646d", "#dfe0db", "#b8380a"
KIND = {"ours": "#2a71ae", "one": "#7db3dd", "peer": "#9aa0a6"}
SHADE = {
    "q0": "#ffffff",
    "q1": "#e9f1f9",
    "q2": "#cbdff1",
    "q3": "#9cc3e3",
    "q4": "#5f9ccd",
    "q5": "#2a71ae",
    "q6": "#0d427c",
    "f1": "#e8834f",
    "f2": "#c4440f",
    "f3": "#7c2306",
}
"""The colours of `r18.report.scale.shade`, as in page.css."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, and no font's metrics decide a coordinate
    "svg.hashsalt": "r18",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
WIDTH, COLUMNS, BAR = 880, 3, 33
"""The sizes of a picture: width and height of a bar with its name in pixels, panels side by
side."""

ROOM = 0.36
"""The share of a panel's width that a number needs behind its bar."""

SUMMARY_BATCH = 64
"""The batch of speed-and-error.svg."""
OURS: dict[str, Any] = {"marker": "o", "ms": 11, "color": KIND["ours"]}
THEIRS: dict[str, Any] = {"marker": "o", "ms": 16, "mfc": "white", "mec": KIND["peer"], "mew": 3}


def pictures(evidence: Evidence) -> dict[str, str]:
    """File name → SVG: the whole network, fused, without rows of single algorithms.

    Speed and error next to PyTorch on the fastest device that was both timed and verified; the
    throughput of the largest batch of each precision and device, and the latency of the smallest.
    Pictures for which nothing was recorded are left out.
    """
    check_libraries()
    usual = [group for group in evidence.groups if group.usual]
    if not usual:
        return {}
    return _speed_and_error(usual, evidence.verified) | {
        "throughput.svg": _speed("Images per second", _chosen(usual, max), throughput=True),
        "latency.svg": _speed("Milliseconds per batch", _chosen(usual, min), throughput=False),
    }


def _speed_and_error(usual: Sequence[Group], verified: Records) -> dict[str, str]:
    """The picture by its file name; empty without a device that has all its numbers."""
    for device, same in groupby(usual, key=lambda group: group.device):
        groups = {
            group_name("resnet18", group.precision, "all", group.batch): group.data
            for group in same
        }
        record = verified.get(device, {"networks": {}})
        found = [
            one
            for one in comparisons(groups, record["networks"], SUMMARY_BATCH)
            if one.torch_images and _drawable(one.error) and _drawable(one.torch_error)
        ]
        if found:
            return {"speed-and-error.svg": _compared(found)}
    return {}


def _drawable(error: float | None) -> bool:
    """Whether a logarithmic axis has a place for it."""
    return error is not None and 0 < error < math.inf


def _compared(found: Sequence[Comparison]) -> str:
    """Per precision both throughputs as bars, and both errors as dots on a logarithmic axis.

    The text is large because a phone shows the picture at less than half its width.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    row, above, below = 72, 92, 74  # pixels
    tall = above + row * len(found) + below
    box = {"bottom": below / tall, "top": 1 - above / tall}
    with _style():
        figure = Figure(figsize=(WIDTH / 72, tall / 72))
        halves = ((96, 520), (560, 856))
        bars, dots = (
            figure.add_subplot(figure.add_gridspec(1, 1, left=a / WIDTH, right=b / WIDTH, **box)[0])
            for a, b in halves
        )
        _throughputs(bars, found)
        _errors(dots, found)
        about = f"ResNet-18, batch {SUMMARY_BATCH}, {device_words(found[0].group)}"
        figure.text(20 / WIDTH, 1 - 30 / tall, clean(about), size=20, weight="bold")
        titles = ("images/s, PyTorch in its fastest mode", "logit error against float64")
        for (start, _), said in zip(halves, titles, strict=True):
            figure.text(start / WIDTH, 1 - 70 / tall, said, size=18, color=SOFT)
        other = [
            f"{peers_precision(one.precision)} next to {one.precision}"
            for one in found
            if peers_precision(one.precision) != one.precision
        ]
        theirs = f"PyTorch ({', '.join(other)})" if other else "PyTorch"
        marks = [
            Line2D([], [], ls="", label="r18", **OURS),
            Line2D([], [], ls="", label=theirs, **THEIRS),
        ]
        figure.legend(
            handles=marks,
            loc="lower left",
            bbox_to_anchor=(10 / WIDTH, 0),
            ncols=2,
            frameon=False,
            fontsize=18,
            handletextpad=0.3,
        )
        return _svg(figure, "Speed and error of ResNet-18")


def _throughputs(axes: Axes, found: Sequence[Comparison]) -> None:
    """A pair of bars per precision, r18's above, with the speedup at the right."""
    pairs = [(one.images, one.torch_images or 0.0) for one in found]
    longest = max(map(max, pairs))
    edge = 1.75 * longest
    axes.set(xlim=(0, edge), ylim=(len(found) - 0.5, -0.5))
    axes.axis("off")
    for at, (one, pair) in enumerate(zip(found, pairs, strict=True)):
        for name, number, color, y in zip(
            ("r18", "torch"),
            pair,
            (KIND["ours"], KIND["peer"]),
            (at - 0.18, at + 0.18),
            strict=True,
        ):
            (bar,) = axes.barh(y, number, 0.3, color=color)
            bar.set_gid(f"speed-{one.precision}-{name}")
            axes.text(number + longest / 40, y, f"{number:,.0f}", va="center", size=17)
        axes.text(-longest / 30, at, one.precision, ha="right", va="center", size=20)
        said = f"{one.speedup:.2f}×"
        axes.text(edge, at, said, ha="right", va="center", size=21, weight="bold")


def _errors(axes: Axes, found: Sequence[Comparison]) -> None:
    """PyTorch's error as a ring and r18's as a dot, which shows where they coincide."""
    pairs = [(one.torch_error or 0.0, one.error or 0.0) for one in found]
    errors = [number for pair in pairs for number in pair]
    low, high = (math.log10(number) for number in (min(errors), max(errors)))
    axes.set(xscale="log", xlim=(10 ** (low - 0.3), 10 ** (high + 0.3)))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.minorticks_off()
    axes.grid(axis="x", color=RULE, lw=0.8)
    axes.xaxis.set_major_formatter(
        lambda number, _: f"1e{math.log10(number):.0f}".replace("-", "−")
    )
    axes.tick_params(axis="x", labelsize=17, length=0)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.spines[:].set_visible(False)
    for at, (one, pair) in enumerate(zip(found, pairs, strict=True)):
        axes.plot(pair, [at, at], color=KIND["peer"], lw=2, zorder=2)
        for name, number, mark in zip(("torch", "r18"), pair, (THEIRS, OURS), strict=True):
            (dot,) = axes.plot([number], [at], ls="", zorder=3, **mark)
            dot.set_gid(f"error-{one.precision}-{name}")


def _chosen(groups: Sequence[Group], which: Callable[[Iterable[int]], int]) -> list[Group]:
    """For each device and precision, the group with the largest or the smallest batch."""
    found = []
    for _, same in groupby(groups, key=lambda group: (group.device, group.precision)):
        mine = {group.batch: group for group in same}
        found.append(mine[which(mine)])
    return found


def _speed(title: str, groups: Sequence[Group], *, throughput: bool) -> str:
    """A grid of panels: for each device a line with its name, then its precisions."""
    lines: list[tuple[float, str | list[Group]]] = []  # height in bars, what is drawn
    for _, same in groupby(groups, key=lambda group: group.device):
        mine = list(same)
        lines.append((1, f"{title}, {mine[0].device_name}"))
        for first in range(0, len(mine), COLUMNS):
            panels = mine[first : first + COLUMNS]
            lines.append((2.2 + max(len(_shown(group)) for group in panels), panels))
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tall = BAR * (1.2 + sum(height for height, _ in lines))
    with _style():
        figure = Figure(figsize=(WIDTH / 72, tall / 72))
        grid = figure.add_gridspec(
            len(lines),
            COLUMNS,
            height_ratios=[height for height, _ in lines],
            left=20 / WIDTH,
            right=1 - 20 / WIDTH,
            top=1 - 8 / tall,
            bottom=BAR * 1.2 / tall,
            hspace=0,
            wspace=0.12,
        )
        for at, (height, shown) in enumerate(lines):
            if isinstance(shown, str):
                heading = figure.add_subplot(grid[at, :])
                heading.axis("off")
                heading.text(0, 0.2, clean(shown), size=16, weight="bold")
                continue
            for column, group in enumerate(shown):
                _bars(figure.add_subplot(grid[at, column]), group, height, throughput)
        seen = {kind_of(row) for group in groups for row in _shown(group)}
        marks = [Patch(color=KIND[kind], label=words) for kind, words in KINDS.items()]
        marks = [mark for mark, kind in zip(marks, KINDS, strict=True) if kind in seen]
        roofline = "roofline; percentages are of it" if throughput else "roofline"
        figure.legend(
            handles=[*marks, Patch(color=BAD, label=roofline)],
            loc="lower left",
            bbox_to_anchor=(14 / WIDTH, 0),
            ncols=len(seen) + 1,
            frameon=False,
        )
        return _svg(figure, f"{title} of ResNet-18")


def _shown(group: Group) -> list[Mapping[str, Any]]:
    return [row for row in group.fastest_first if kind_of(row) != "one"]


def _bars(axes: Axes, group: Group, height: float, throughput: bool) -> None:
    """The contenders of a group, fastest first: name above, number behind, roofline as a line."""
    rows, floor = _shown(group), group.floor_ms
    numbers = [row["images_per_second" if throughput else "median_ms"] for row in rows]
    spread = [
        [row["median_ms"] - row["p10_ms"] for row in rows],
        [row["p90_ms"] - row["median_ms"] for row in rows],
    ]
    drawn = axes.barh(
        range(len(rows)),
        numbers,
        0.34,
        xerr=None if throughput else spread,
        color=[KIND[kind_of(row)] for row in rows],
        error_kw={"ecolor": INK, "elinewidth": 1.2, "alpha": 0.6},
    )
    longest = max(numbers, default=1.0)
    widest = longest if throughput else max((row["p90_ms"] for row in rows), default=1.0)
    line = None if floor is None else 1e3 * group.batch / floor if throughput else floor
    near = line is not None and line <= FAR * longest
    edge = max((1 + 1.4 * ROOM) * widest, 1.02 * line if line is not None and near else 0.0)
    if line is not None and near and any(0 < line - number < ROOM * edge for number in numbers):
        edge = max(edge, line / (1 - ROOM))
    for at, (bar, row, number) in enumerate(zip(drawn, rows, numbers, strict=True)):
        bar.set_gid(f"bar-{group.device}-{group.precision}-{at}")
        end = number if throughput else max(number, row["p90_ms"])
        said = f"{number:,.0f}" if throughput else decimal(number)
        if throughput and floor is not None:
            said += f"  {floor / row['median_ms']:.0%}"
        if near and line is not None and end < line < end + ROOM * edge:
            end = line  # the number stands clear of the roofline
        axes.text(0, at - 0.28, clean(row["backend"]), va="bottom")
        axes.text(end + edge / 60, at, said, va="center", weight="bold")
    if line is not None:
        said = f"roofline {line:,.0f}" if throughput else f"roofline {decimal(line)}"
        right = line > 0.5 * edge
        if near:
            for at in range(len(rows)):
                axes.vlines(line, at - 0.27, at + 0.27, colors=BAD, lw=2)
        axes.text(
            min(line, edge),
            -0.85,
            said if near else f"{said} →",
            ha="right" if right else "left",
            color=BAD,
        )
    axes.set(xlim=(0, edge), ylim=(height - 2.2 - 0.5, -1.7))
    axes.axis("off")
    axes.text(0, -1.35, clean(group.title), size=13, color=SOFT, weight="bold")


# -- along a network ---------------------------------------------------------------------------


def checkpoints(run: Mapping[str, Any]) -> str:
    """SVG: the error propagated along a network, above the error of each step by itself.

    run: `backend`, `precision`, `multiple`; `rows` with name, ok, steps, and the losses `relative`,
    `own` (None: not drawn) and `allowed`; `steps` with step and ratio.
    """
    from matplotlib.figure import Figure

    rows, steps = run["rows"], {step["step"]: float(step["ratio"]) for step in run["steps"]}
    own = run["own"]
    xs = range(len(rows))
    series = {
        key: [float(row[key]) for row in rows]
        for key in ("relative", "allowed", *(("own",) if own else ()))
    }
    with _style():
        figure = Figure(figsize=(max(520, 60 * len(rows) + 80) / 72, 400 / 72))
        upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        figure.subplots_adjust(left=0.1, right=0.98, top=0.87, bottom=0.2, hspace=0.3)
        clip = _logarithmic(upper, [number for found in series.values() for number in found])
        allowed = [n if math.isnan(n) else clip(n) for n in series["allowed"]]  # NaN: unknown
        most = f"{run['multiple']:g} × PyTorch's" if run["multiple"] else "nothing"
        upper.plot(xs, allowed, "--", color=BAD, label=f"allowed, {most}")
        upper.fill_between(xs, allowed, upper.get_ylim()[1], color=BAD, alpha=0.1, lw=0)
        if own:
            upper.plot(xs, list(map(clip, series["own"])), ":", color=SOFT, label="PyTorch's own")
        ours = list(map(clip, series["relative"]))
        upper.plot(xs, ours, "-o", color=KIND["ours"], ms=5, label=clean(run["backend"]))
        wrong = [x for x in xs if not rows[x]["ok"]]
        upper.plot(wrong, [ours[x] for x in wrong], "X", color=SHADE["f2"], ms=9)
        upper.set_title("propagated error / rms of the reference", loc="left", size=11, pad=22)
        upper.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.97), ncols=3, frameon=False)
        clip = _logarithmic(lower, [1.0, *steps.values()])
        lower.axhspan(1, lower.get_ylim()[1], color=BAD, alpha=0.1, lw=0)
        lower.axhline(1, ls="--", color=BAD)
        places = _places(rows, steps)
        heights = list(map(clip, places.values()))
        lower.vlines(list(places), lower.get_ylim()[0], heights, colors=RULE)
        colors = [SHADE[shade(ratio)] for ratio in places.values()]
        edges = [BAD if fault(ratio) else SOFT for ratio in places.values()]
        lower.scatter(list(places), heights, 28, colors, edgecolors=edges, zorder=3, clip_on=False)
        lower.set_title("each step by itself: error / bound", loc="left", size=11)
        names = [clean(row["name"]) for row in rows]
        lower.set_xticks(xs, names, rotation=35, ha="right", rotation_mode="anchor", color=INK)
        return _svg(figure, f"Error along the network: {clean(run['backend'])}")


def _logarithmic(axes: Axes, numbers: Iterable[float]) -> Callable[[float], float]:
    """Scale the y axis by decades; the result puts zero on its floor, infinity and NaN on top."""
    powers = [math.log10(number) for number in numbers if 0 < number < math.inf] or [0.0]
    low, high = math.floor(min(powers)) - 0.5, math.ceil(max(powers)) + 0.5
    axes.set(yscale="log", ylim=(10**low, 10**high))
    axes.grid(axis="y", color=RULE, lw=0.6)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(
        lambda number, _: f"1e{math.log10(number):.0f}".replace("-", "−")
    )
    floor, top = 10.0**low, 10.0 ** (high - 0.1)
    return lambda number: top if math.isnan(number) else min(max(number, floor), top)


def _places(rows: Sequence[Mapping[str, Any]], steps: Mapping[str, float]) -> dict[float, float]:
    """Where each step stands, between the previous checkpoint and its own, and its ratio."""
    found: dict[float, float] = {}
    drawn: set[str] = set()
    for x, row in enumerate(rows):
        mine = [name for name in row["steps"] if name in steps and name not in drawn]
        drawn.update(mine)
        found |= {x - 0.8 + 0.8 * (i + 1) / len(mine): steps[n] for i, n in enumerate(mine)}
    return found


# -- where an error is -------------------------------------------------------------------------


def error_maps(maps: Sequence[Mapping[str, Any]]) -> bytes:
    """PNG: maps of error/bound side by side, the worst cell ringed.

    maps: each with `table` (rows of ratios), `shape` and `worst` in elements, `cell` in elements
    per square, and `axes`, the names of the two dimensions.
    """
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    with _style():
        figure = Figure(figsize=(3.4 * len(maps), 3.2), layout="constrained")
        for axes, shown in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
            (down, across), order = shown["cell"], list(SHADE)
            table = [[order.index(shade(ratio)) for ratio in row] for row in shown["table"]]
            height, width = down * len(table), across * len(table[0])
            colors = ListedColormap(list(SHADE.values()))
            norm = BoundaryNorm([at - 0.5 for at in range(len(order) + 1)], len(order))
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axes.imshow(table, colors, norm, extent=extent, interpolation="nearest", aspect="auto")
            top, left = shown["worst"][0] // down * down, shown["worst"][1] // across * across
            for color, line in (("#ffffff", 4.0), (INK, 2.0)):
                at = (left - 0.5, top - 0.5)
                ring = Rectangle(at, across, down, fill=False, ec=color, lw=line, clip_on=False)
                axes.add_patch(ring)
            axes.set(xlabel=shown["axes"][1], ylabel=shown["axes"][0])
            axes.locator_params(integer=True, nbins=7)
        stream = BytesIO()
        figure.savefig(stream, format="png", dpi=144, metadata={"Software": None})
        return stream.getvalue()


def _style() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _svg(figure: Figure, title: str) -> str:
    """The figure in pixels, on white, without a date, a DTD or a reference to another file."""
    stream = BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", dpi=72, metadata={"Title": title, **nothing})
    text = stream.getvalue().decode()
    head, _, rest = text[text.index("<svg") :].partition(">")
    head = head.replace('pt"', '"') + ' role="img"'
    lines = f"{head}>{rest}".splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


__all__ = ["checkpoints", "error_maps", "pictures"]
