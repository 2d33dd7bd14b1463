"""Captions and columns about the conditions of timings: errors, and where inputs were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from r18.bench.baselines import PEER, PEERS
from r18.bench.error import FLOAT64, INTEGERS, NONE, error_cells
from r18.report.tables.table import Data, Row, cell

OLD = "recorded before `r18 bench` measured errors"
ERROR_HEADS = "error | error / PyTorch"
STATES = {"cold": "cold", "from_host": "from host"}
"""The parts of a row with other times of the same contender, and the name of each one's line."""
WARM = (
    "Times are warm unless marked otherwise: each run reads the batch, weights and "
    "buffers of the run before, and the last-level cache (a GPU's L2) holds what fits of them."
)
FROM_HOST = (
    "From host: the program reads uint8 pixels from host memory, batch after batch. It is another "
    f"program, whose error is not measured ({NONE}); PyTorch is fed so in eager mode only."
)
NOT_COLD = f"Cold, {NONE}: not measured yet; `r18 bench --cold --record` does."

NOT_FED = (
    f"Cold or from host, {NONE}: not measured yet; `r18 bench --cold --from-host --record` does."
)


def error_captions(rows: Iterable[Data]) -> list[str]:
    """Captions that define the errors of a benchmark's rows, and say why some are missing."""
    found = list(rows)
    measured = [row["error"] for row in found if row.get("error") is not None]
    captions = []
    if measured:
        images = " or ".join(map(str, sorted({error["images"] for error in measured})))
        captions.append(
            "Error: rms of the logits' difference from float64 over their rms, of "
            f"{images} seeded images; next to it, divided by that of {PEER} in the same run."
        )
    if any(error["reference"] == INTEGERS for error in measured):
        captions.append(
            "In int8 the reference is the specification's integers: `exact` is equal to the bit."
        )
    reasons = dict.fromkeys(filter(None, map(_missing, found)))
    return captions + [f"{NONE}: {reason}." for reason in reasons]


def _missing(row: Data) -> str:
    """Why a row's line has no error, or no ratio; empty where it has both."""
    if "error" not in row:
        return OLD
    error = row["error"]
    if error is None:
        return str(row.get("no_error") or "not asked for")
    if error["reference"] == FLOAT64 and row.get("error_ratio") is None:
        return f"no error of {PEER} in that precision, or none above 0"
    if error["reference"] == INTEGERS and float(error["relative"]) != 0:
        return "its integers are not the specification's"
    return ""


def lines_of(row: Data, place: Row, rows: Iterable[Data]) -> Iterator[Row]:
    """A contender's lines: warm; of a backend's own program also cold, and from host memory.

    Ratios are to PyTorch's times in the same state. place: device, precision and batch. rows: of
    the group. The program that reads pixels is another one, and its error is not measured.
    """
    errors, batch = error_cells(row), int(place[-1])
    yield (
        row["backend"],
        *place,
        cell(row["ms_per_image"], ".4g"),
        cell(row["images_per_second"], ",.0f"),
        cell(row["ratio"], ".2f"),
        cell(row["best_ratio"], ".2f"),
        *errors,
        cell(row["peak_rss_nbytes"] and row["peak_rss_nbytes"] / 1e6, ",.0f"),
    )
    if row["backend"] in PEERS or row["algorithm"]:
        return
    for state, words in STATES.items():
        if row.get(state) is None:
            continue
        median = row[state]["median_ms"]
        peers = {
            one["backend"]: float(one[state]["median_ms"])
            for one in rows
            if one["backend"] in PEERS and one.get(state) is not None
        }
        eager = peers.get(PEER)
        best = min(peers.values(), default=None) if state == "cold" else None
        yield (
            f"{row['backend']}, {words}",
            *place,
            cell(median / batch, ".4g"),
            cell(1e3 * batch / median, ",.0f"),
            cell(eager and median / eager, ".2f"),
            cell(best and median / best, ".2f"),
            *(errors if state == "cold" else (NONE, NONE)),
            "",
        )


def state_captions(groups: Iterable[Data]) -> list[str]:
    """Where the inputs of a benchmark's times were."""
    rows = [row for group in groups for row in group["rows"]]
    cold = [row["cold"] for row in rows if row.get("cold") is not None]
    captions = [WARM]
    if cold:
        sizes = " or ".join(
            f"{nbytes / 1e6:,.0f}" for nbytes in sorted({c["nbytes"] for c in cold})
        )
        runs = " or ".join(map(str, sorted({one["runs"] for one in cold})))
        captions.append(
            f"Cold: {sizes} MB are overwritten before each run, which is not timed, so that "
            f"nothing of the run before is in that cache; medians of {runs} runs."
        )
    return captions


__all__ = [
    "ERROR_HEADS",
    "FROM_HOST",
    "NOT_COLD",
    "NOT_FED",
    "OLD",
    "STATES",
    "WARM",
    "error_captions",
    "lines_of",
    "state_captions",
]
