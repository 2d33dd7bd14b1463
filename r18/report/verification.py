"""The page of `r18 verify --html`, from plain data; the oracle imports this, not the reverse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r18.report import figures
from r18.report.bounds import BY_KERNEL, BY_STEP
from r18.report.heat import Cell, Column, Heat, heat_map, in_order, split_id
from r18.report.render import document, image
from r18.report.scale import duration, fault, shade

AXES = ("sample", "channel", "row", "column")
MAPS = (("plane", "cell", slice(-2, None)), ("outer", "outer_cell", slice(2)))
"""The maps of a finding's picture: their keys, and the axes that they show."""


def verification_page(data: Mapping[str, Any]) -> str:
    """The whole document.

    data: what `r18 verify --json` prints, with these additions.
        request: facts of the request and of the machine, by name.
        checks: the names of all checks in their order.
        findings: each also has `severity` (error/bound, infinite where there is none), `said`
            (its problem in words, or None), and `replay` (a command, or "").
        backends: each also has `executed` and `device_words`. Its kernels have `finding` (as
            above, or None). Its checkpoint reports have `own` (whether PyTorch's loss is in the
            same precision), their rows `allowed` (relative to the reference's rms), and their
            steps `label` (the operation and its output).
    """
    backends = data["backends"]
    runs = [run for backend in backends for run in backend["checkpoints"]]
    maps = [heat for heat in (by_step(backends), by_kernel(backends)) if heat]
    sections = {
        "glance": ("How close to the bound", lanes := summary(backends)),
        "findings": ("Findings", data["findings"]),
        "heat": ("Error over bound", maps),
        "network": ("Along the network", runs),
        "kernels": ("Time, checks, refusals", [b for b in backends if b["kernels"]]),
        "left-out": ("Left out", [b for b in backends if b["left_out"] or b["skipped"]]),
    }
    cells = [c for heat in maps for body in heat.bodies for line in body for c in line.cells if c]
    kind, words = verdict(data)
    return document(
        "verify",
        [(name, title) for name, (title, shown) in sections.items() if shown],
        data=data,
        kind=kind,
        verdict=words,
        kernels=[kernel for backend in backends for kernel in backend["kernels"]],
        passed=sum(sum(k["checks"].values()) for b in backends for k in b["kernels"]),
        runs=runs,
        lanes=lanes,
        cards=list(_cards(data["findings"])),
        maps=maps,
        refused=any(cell.ratio is None for cell in cells),
        warned=any(cell.warned for cell in cells),
        chart=_chart,
        checks_of=lambda kernels: _checks(kernels, data["checks"]),
        duration=duration,
        counted=_counted,
    )


def verdict(data: Mapping[str, Any]) -> tuple[str, str]:
    """(CSS class, words): `good`, `bad`, or `void` when some backend executed nothing."""
    if data["findings"]:
        return "bad", _counted(len(data["findings"]), "finding")
    if data["executed"]:
        return "good", "No finding"
    ran = any(backend["executed"] for backend in data["backends"])
    return "void", "Not everything was executed" if ran else "Nothing was executed"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# -- tables ------------------------------------------------------------------------------------


def summary(backends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each backend and precision: how many kernels and steps have an error/bound of each shade,
    the largest one, and why its network was not run, if it was not."""
    judged: dict[Column, list[tuple[float, str]]] = {}
    reasons: dict[Column, str] = {}
    for backend in backends:
        for kernel in backend["kernels"]:
            ratio = _severity(kernel)
            if ratio is not None:
                key = Column(backend["name"], split_id(kernel["kernel"])[1])
                judged.setdefault(key, []).append((ratio, kernel["kernel"]))
        for run in backend["checkpoints"]:
            found = judged.setdefault(Column(backend["name"], run["precision"]), [])
            found += [(float(step["ratio"]), f"step {step['step']}") for step in run["steps"]]
        for precision, reason in backend["skipped"].items():
            reasons[Column(backend["name"], precision)] = reason
    lanes = []
    for column in in_order(dict.fromkeys([*judged, *reasons])):
        found = judged.get(column, [])
        worst = max(found, key=lambda one: (one[0] != one[0], one[0]), default=None)
        shades = Counter(shade(ratio) for ratio, _ in found)
        lanes.append(
            {
                "column": column,
                "worst": worst,
                "shades": shades,
                "beyond": sum(fault(ratio) for ratio, _ in found),
                "reason": reasons.get(column),
            }
        )
    return lanes


def _severity(kernel: Mapping[str, Any]) -> float | None:
    """The error/bound of a kernel, of its finding where it has one; None if nothing was judged."""
    if kernel["finding"]:
        return float(kernel["finding"]["severity"])
    return float(kernel["error_over_bound"]) if kernel["problems"] else None


def by_step(backends: Sequence[Mapping[str, Any]]) -> Heat | None:
    """Each step of the network on the reference's values; None when no network was run."""
    orders: list[list[str]] = []
    notes: dict[str, str] = {}
    cells: dict[tuple[str, Column], Cell] = {}
    columns: list[Column] = []
    for backend in backends:
        for run in backend["checkpoints"]:
            columns.append(Column(backend["name"], run["precision"]))
            orders.append([step["step"] for step in run["steps"]])
            for step in run["steps"]:
                notes.setdefault(step["step"], step["label"])
                cells[step["step"], columns[-1]] = _step_cell(step)
        for precision, reason in backend["skipped"].items():
            columns.append(Column(backend["name"], precision))
            cells["", columns[-1]] = Cell(None, f"not run in {precision}: {reason}", "–")
    return heat_map("Step", BY_STEP, orders, columns, cells, notes) if orders else None


def by_kernel(backends: Sequence[Mapping[str, Any]]) -> Heat | None:
    """The search of each kernel; None when there was none."""
    orders: list[list[str]] = []
    cells: dict[tuple[str, Column], Cell] = {}
    for backend in backends:
        rows = [(*split_id(kernel["kernel"]), kernel) for kernel in backend["kernels"]]
        orders.append([name for name, _, _ in rows])
        for name, precision, kernel in rows:
            cells[name, Column(backend["name"], precision)] = _kernel_cell(kernel)
    return heat_map("Kernel", BY_KERNEL, orders, [column for _, column in cells], cells)


def _step_cell(step: Mapping[str, Any]) -> Cell:
    ratio, sharp = float(step["ratio"]), step["sharp"]
    lines = [step["kernel"], step["problem"]]
    if not step["ok"]:
        lines.append(f"{step['check']}: {step['message']}")
    lines.append(f"error/bound {ratio:.6g}")
    if sharp is not None:
        lines.append(f"error/statistical line {float(sharp):.6g}")
    if step["coordinate"] is not None:
        lines.append(f"worst at {tuple(step['coordinate'])}: got {step['got']},")
        lines.append(f"expected {step['expected']}, bound {float(step['bound']):.3g}")
    text = "" if step["ok"] or step["coordinate"] is not None else step["check"]
    warned = step["ok"] and sharp is not None and float(sharp) > 1
    return Cell(ratio, "\n".join(lines), text, warned)


def _kernel_cell(kernel: Mapping[str, Any]) -> Cell:
    finding, sharp = kernel["finding"], kernel["error_over_statistical_line"]
    lines, refused = [kernel["kernel"]], kernel["refused"]
    if finding:
        lines.append(f"{finding['check']}: {finding['message']}")
        return Cell(_severity(kernel), "\n".join(lines), finding["check"])
    if not kernel["problems"]:
        lines += [f"refused {count}: {reason}" for reason, count in refused.items()]
        return Cell(None, "\n".join(lines), "refused")
    ratio = float(kernel["error_over_bound"])
    lines.append(f"error/bound {ratio:.6g}, the largest of {kernel['problems']} problems")
    if sharp is not None:
        lines.append(f"error/statistical line {float(sharp):.6g}")
    if refused:
        lines.append(f"{sum(refused.values())} problems refused")
    return Cell(ratio, "\n".join(lines), warned=sharp is not None and float(sharp) > 1)


def _checks(
    kernels: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> tuple[list[str], list[tuple[str, list[tuple[int, bool]]]]]:
    """The checks that ran; and by kernel how often each passed, and whether it failed."""
    failed = [kernel["finding"]["check"] if kernel["finding"] else None for kernel in kernels]
    seen = {name for kernel in kernels for name, count in kernel["checks"].items() if count}
    seen |= {check for check in failed if check is not None}
    names = [name for name in order if name in seen] + sorted(seen - set(order))
    return names, [
        (kernel["kernel"], [(kernel["checks"].get(name, 0), name == check) for name in names])
        for kernel, check in zip(kernels, failed, strict=True)
    ]


# -- figures -----------------------------------------------------------------------------------


def _chart(run: Mapping[str, Any]) -> str:
    """The figure of one network run, as an address."""
    rows = [
        {
            **{key: row[key] for key in ("name", "ok", "steps", "relative", "allowed")},
            "own": row["own_relative"],
        }
        for row in run["checkpoints"]
    ]
    return image(figures.checkpoints({**run, "rows": rows}).encode(), "svg+xml")


def _cards(findings: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A card for each finding; findings that differ only in their problems share one."""
    alike: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for finding in findings:
        key = (finding["check"], finding["kernel"], finding["message"])
        alike.setdefault(key, []).append(finding)
    for same in alike.values():
        problems = [one["said"] for one in same if one["said"] is not None]
        yield {"finding": same[0], "problems": problems, "maps": _maps(same[0])}


def _maps(finding: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where in the output the error is: a picture as an address, the numbers as text; None for a
    finding that compares no values, or whose file was edited."""
    picture = finding["details"].get("picture")
    try:
        shape = [int(extent) for extent in picture["shape"]]
        worst = list(finding["coordinate"] or ())
        worst = [0] * (len(shape) - len(worst)) + worst
        named = AXES[: len(shape)] if len(shape) in (2, 4) else _numbered(len(shape))
        shown = []
        for key, size, at in MAPS:
            down, across = shape[at]
            if key not in picture or down * across == 1:
                continue
            shown.append(
                {
                    "words": picture[key],
                    "table": [[float(word) for word in row.split()] for row in picture[key]],
                    "cell": [int(extent) for extent in picture[size]],
                    "axes": named[at],
                    "worst": worst[at],
                    "title": f"{_counted(down, named[at][0])} × {_counted(across, named[at][1])}",
                }
            )
        where = ", ".join(f"{name} {i}" for name, i in list(zip(named, worst, strict=True))[:-2])
        address = image(figures.error_maps(shown), "png") if shown else ""
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    return {"address": address, "maps": shown, "where": where} if shown else None


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"axis{index}" for index in range(count))


__all__ = ["by_kernel", "by_step", "summary", "verdict", "verification_page"]
