"""The tables that `r18 bench` prints, and its times as `pytest-benchmark` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from r18.bench.baselines import PEER, TORCH
from r18.bench.baselines.ways import EXPORTED
from r18.bench.error import error_cells
from r18.bench.rows import BEST_RATIO, ERROR_RATIO, RATIO, Row
from r18.errors import counted
from r18.graph.precision import INT8


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
    """The rows timed with overwritten caches: times are of a batch, ratios of such times."""
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
    """The rows fed from host memory: times are of a batch."""
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
    """What `--check` found of right rows: a line for each rule that judged some of them.

    A backend's int8 output equals the reference's. ONNX Runtime and OpenVINO have arithmetics of
    their own: of theirs the values inside are judged, and errors have no bound. All others,
    PyTorch's int8 rows on a GPU among them, lose at most their bound against float64.
    """

    def of_integers(row: Row) -> bool:
        return row.precision == INT8.name and row.backend not in TORCH

    floats = [row for row in rows if not of_integers(row)]
    integers = [row for row in rows if of_integers(row)]
    peers = [row for row in integers if row.backend in EXPORTED]
    ours = len(integers) - len(peers)
    lines = []
    if floats:
        worst = max(floats, key=lambda row: row.loss or 0.0)
        lines.append(
            f"outputs of {counted(len(floats), 'row')} judged against float64: at most "
            f"{worst.loss:.3g} of the bound ({worst.backend}, {worst.precision}, batch "
            f"{worst.batch})"
        )
    if ours:
        lines.append(
            f"outputs of {counted(ours, 'int8 row')} compared with the reference's integers: "
            "equal, bit for bit"
        )
    if peers:
        names = ", ".join(dict.fromkeys(row.backend for row in peers))
        lines.append(
            f"values inside {counted(len(peers), 'int8 row')} of baselines judged ({names}): each "
            "follows from a known arithmetic, no sum saturates; no bound on their errors"
        )
    return "\n".join(lines) or "no output was judged"


def pytest_benchmark(
    rows: Sequence[Row], network: str, machine: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The rows as a JSON file of pytest-benchmark: seconds of a batch, without its `commit_info`.

    machine: as `r18.machine.machine` has it. now: the time, in ISO 8601.
    """
    return {
        "machine_info": {"node": "", **machine},
        "commit_info": {"id": "unknown", "time": None, "dirty": False, "branch": "unknown"},
        "benchmarks": [_benchmark(row, network) for row in rows],
        "datetime": now,
        "version": PYTEST_BENCHMARK,
    }


PYTEST_BENCHMARK = "5.2.3"
"""The version whose fields are written."""


def _benchmark(row: Row, network: str) -> dict[str, Any]:
    params = {"precision": row.precision, "batch": row.batch, "device": row.device_kind}
    label = f"{row.backend}[{'-'.join(map(str, params.values()))}]"
    extra = {"device": row.device, "ratio": row.ratio, "images_per_second": row.images_per_second}
    return {
        "group": f"{network}, {row.precision}, batch {row.batch}",
        "name": label,
        "fullname": f"{network}::{label}",
        "params": params,
        "param": None,
        "extra_info": extra | {"error": row.error and row.error.to_json()},
        "options": {"warmup": row.warmup},
        "stats": _stats([sample / 1e3 for sample in row.samples_ms]),
    }


def _stats(seconds: list[float]) -> dict[str, Any]:
    """As pytest-benchmark's `Stats`: outliers lie beyond a deviation, and beyond 1.5 quartiles."""
    mean, rounds = statistics.fmean(seconds), len(seconds)
    one = rounds == 1
    deviation = 0.0 if one else statistics.stdev(seconds)
    q1, median, q3 = seconds * 3 if one else statistics.quantiles(seconds, method="inclusive")
    iqr = q3 - q1
    inside = [t for t in seconds if q1 - 1.5 * iqr <= t <= q3 + 1.5 * iqr]
    beyond = sum(abs(t - mean) > deviation for t in seconds)
    return {
        "min": min(seconds),
        "max": max(seconds),
        "mean": mean,
        "stddev": deviation,
        "rounds": rounds,
        "median": median,
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": rounds - len(inside),
        "stddev_outliers": beyond,
        "outliers": f"{beyond};{rounds - len(inside)}",
        "ld15iqr": min(inside),
        "hd15iqr": max(inside),
        "ops": 1 / mean,
        "total": sum(seconds),
        "data": seconds,
        "iterations": 1,
    }


def _digits(value: float) -> str:
    """Four significant digits, and no exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"
