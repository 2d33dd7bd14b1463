"""The tables of a document, made from the records.

A table stands between two markers. The first says what it is:

    <!-- table: bench devices=nvidia-h200,cpu precisions=fp32 batches=1,64 -->
    <!-- /table -->

bench:    devices, precisions, batches; network (resnet18), fusion (all). Times, and how they
          compare with the baselines; a line per program, precision and batch.
algorithms: device, precisions, batches; backend (cupy), cpu (a device). How long the network takes
          with each algorithm, next to PyTorch; a line each, batches side by side.
from-host: devices, precisions, batches; network, fusion, as of bench. Batches of pixels from host
          memory next to the time on the device; a line per program that was fed so.
roofline: device; backend (cupy), network, fusion. The network's time next to its floor and to
          PyTorch's best; a line per precision and batch that was timed.
summary:  device, batch; backend (cupy). Throughput next to PyTorch's best, and both errors; a line
          per precision.
tuned:    device, precision, batch; backend (cupy), network, before. The time of each kernel that
          `r18 tune` chose, next to its floor; `before` is an older table, kept with the records as
          tuned-<device>-<before>.json.
verify:   device; backend (cupy). What was verified; a line per op and algorithm.
sanitize: device. What compute-sanitizer's tools found.
mutate:   devices; backends (all). The share of mutants that the oracle caught; a line per backend.
profile:  device, precisions, batches; backend (cupy), memory (contiguous, or channels-last). CPU
          and CUDA time of the drop-in at each fusion level; a line per level, precision and batch.
evaluate: devices, images (the folder's name); backends (all), network (resnet18). Agreement with
          the reference on photographs, and how fast; a line per backend, precision, batch and
          number of workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from r18.errors import UsageError, unknown
from r18.report.tables.algorithms import algorithms_table
from r18.report.tables.judged import mutate_table, sanitize_table, verify_table
from r18.report.tables.summary import summary_table
from r18.report.tables.table import Table
from r18.report.tables.timed import bench_table, from_host_table, roofline_table, tuned_table
from r18.report.tables.used import evaluate_table, profile_table

_BLOCK = re.compile(
    r"^(?P<head><!-- table: (?P<kind>\S+)(?P<options>[^\n]*?) -->\n)(?P<body>.*?)"
    r"^(?P<foot><!-- /table -->)$",
    re.MULTILINE | re.DOTALL,
)
_HEAD = re.compile(r"^<!-- table:", re.MULTILINE)


def rendered(text: str, folder: Path) -> str:
    """The document with every table regenerated from the records in `folder`.

    Raises `UsageError` for a marker that is wrong or has no end, and for a record or a measurement
    that is not there.
    """

    def fill(block: re.Match[str]) -> str:
        options = _options(block["options"])
        if block["kind"] not in TABLES:
            raise unknown("table", block["kind"], TABLES, error=UsageError)
        make, known = TABLES[block["kind"]]
        for name in options:
            if name not in known:
                raise unknown(f"option of table {block['kind']}", name, known, error=UsageError)
        return f"{block['head']}\n{make(options, folder).markdown()}\n{block['foot']}"

    if len(_HEAD.findall(text)) != len(_BLOCK.findall(text)):
        raise UsageError("a table's marker is not followed by its end, <!-- /table -->")
    return _BLOCK.sub(fill, text)


def _options(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (equals and value):
            raise UsageError(f"a table's options are NAME=VALUE, got '{word}'")
        found[name] = value
    return found


TABLES: dict[str, tuple[Callable[[Mapping[str, str], Path], Table], tuple[str, ...]]] = {
    "bench": (bench_table, ("devices", "precisions", "batches", "network", "fusion")),
    "algorithms": (algorithms_table, ("device", "precisions", "batches", "backend", "cpu")),
    "from-host": (from_host_table, ("devices", "precisions", "batches", "network", "fusion")),
    "roofline": (roofline_table, ("device", "backend", "network", "fusion")),
    "summary": (summary_table, ("device", "batch", "backend")),
    "tuned": (tuned_table, ("device", "precision", "batch", "backend", "network", "before")),
    "verify": (verify_table, ("device", "backend")),
    "sanitize": (sanitize_table, ("device",)),
    "mutate": (mutate_table, ("devices", "backends")),
    "evaluate": (evaluate_table, ("devices", "images", "backends", "network")),
    "profile": (profile_table, ("device", "precisions", "batches", "backend", "memory")),
}
"""How each is made, and the options that its marker may have."""


__all__ = ["TABLES", "rendered"]
