"""The tables that `r18 bench` prints."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from r18.bench.baselines import PEER
from r18.bench.error import error_cells
from r18.bench.rows import BEST_RATIO, ERROR_RATIO, RATIO, Row


def table(rows: Sequence[Row]) -> str:
    """The cross-backend table; the ratio to the best peer where there are several.

    Errors are left out where none was asked for.
    """
    judged = any(row.error or row.no_error for row in rows)
    several = any(row.best_peer not in ("", PEER) for row in rows)
    in_series = any(row.series > 1 for row in rows)
    headers = (
        "backend",
        "device",
        "precision",
        "batch",
        "ms/image",
        "p10..p90",
        *(["of series"] if in_series else []),
        "images/s",
        RATIO,
        *([BEST_RATIO] if several else []),
        *(["error", ERROR_RATIO] if judged else []),
        "arena MB",
        "weights MB",
        "peak MB",
    )
    lines = [
        (
            row.backend,
            row.device_kind,
            row.precision,
            str(row.batch),
            _digits(row.ms_per_image),
            f"{_digits(row.p10_ms / row.batch)}..{_digits(row.p90_ms / row.batch)}",
            *([_span(row.series_ms, row.batch)] if in_series else []),
            _digits(row.images_per_second),
            *(
                "" if ratio is None else f"{ratio:.2f}"
                for ratio in ((row.ratio, row.best_ratio) if several else (row.ratio,))
            ),
            *(error_cells(row.to_json()) if judged else ()),
            *(
                "" if size is None else f"{size / 1e6:.1f}"
                for size in (row.arena_nbytes, row.weight_nbytes, row.peak_rss_nbytes)
            ),
        )
        for row in rows
    ]
    align = ("left", "left", "left", *("right",) * (len(headers) - 3))
    return tabulate(lines, headers, disable_numparse=True, colalign=align if lines else None)


def cold_table(rows: Sequence[Row]) -> str:
    """Those that were timed with overwritten caches: times are of a batch, ratios of such times."""
    headers = (
        *("backend", "device", "precision", "batch", "ms/batch", "p10..p90", "images/s"),
        *("of warm", RATIO, "overwritten MB"),
    )
    peers = {
        (row.device_kind, row.precision, row.batch): row.cold.median_ms
        for row in rows
        if row.cold is not None and row.backend == PEER
    }
    lines = []
    for row in rows:
        if row.cold is None:
            continue
        found, peer = row.cold.to_json(), peers.get((row.device_kind, row.precision, row.batch))
        median = found["median_ms"]
        lines.append(
            (
                *(row.backend, row.device_kind, row.precision, str(row.batch)),
                _digits(median),
                f"{_digits(found['p10_ms'])}..{_digits(found['p90_ms'])}",
                _digits(1e3 * row.batch / median),
                f"{median / row.median_ms:.2f}",
                "" if peer is None else f"{median / peer:.2f}",
                f"{found['nbytes'] / 1e6:.0f}",
            )
        )
    align = ("left", "left", "left", *("right",) * (len(headers) - 3))
    return tabulate(lines, headers, disable_numparse=True, colalign=align)


def from_host_table(rows: Sequence[Row]) -> str:
    """Those that were fed from host memory: times are of a batch."""
    headers = (
        *("backend", "device", "precision", "batch", "ms/batch", "least..most"),
        *("images/s", "of device-only", "copy ms", "copy GB/s"),
    )
    lines = []
    for row in rows:
        if row.from_host is None:
            continue
        fed = row.from_host.to_json(row.batch, row.median_ms)
        lines.append(
            (
                *(row.backend, row.device_kind, row.precision, str(row.batch)),
                _digits(fed["median_ms"]),
                f"{_digits(min(fed['runs_ms']))}..{_digits(max(fed['runs_ms']))}",
                _digits(fed["images_per_second"]),
                f"{fed['share']:.1%}",
                _digits(fed["copy_ms"]),
                f"{fed['copy_bytes_per_second'] / 1e9:.1f}",
            )
        )
    align = ("left", "left", "left", *("right",) * (len(headers) - 3))
    return tabulate(lines, headers, disable_numparse=True, colalign=align)


def _span(medians: Sequence[float], batch: int) -> str:
    """The least and the largest, a sample of the batch."""
    return f"{_digits(min(medians) / batch)}..{_digits(max(medians) / batch)}"


def step_table(row: Row) -> str:
    """One contender's steps: their times add up to a run outside of any graph."""
    total = sum(step.milliseconds for step in row.steps)
    lines = [
        (
            f"{step.step} {step.phase}".rstrip(),
            step.kernel,
            f"{step.milliseconds:.3f}",
            f"{step.milliseconds / total:.1%}",
        )
        for step in row.steps
    ]
    lines.append(("total", "", f"{total:.3f}", ""))
    headers = ("step", "kernel", "ms/batch", "share")
    align = ("left", "left", "right", "right")
    return tabulate(lines, headers, disable_numparse=True, colalign=align)


def judged(rows: Sequence[Row]) -> str:
    """The largest loss of the rows, in a sentence."""
    worst = max(rows, key=lambda row: row.loss or 0.0, default=None)
    if worst is None:
        return "no output was judged"
    return (
        f"outputs of {len(rows)} rows judged against float64: at most {worst.loss:.3g} of what is "
        f"allowed ({worst.backend}, {worst.precision}, batch {worst.batch})"
    )


def _digits(value: float) -> str:
    """Four significant digits, and no exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"
