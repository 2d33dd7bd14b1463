"""The tables of a document, made from the records.

A table stands between two markers. The first one names it:

    <!-- table: bench devices=nvidia-h200,amd-epyc-avx2 precisions=fp32 batches=1,64 -->
    <!-- /table -->

bench:    devices, precisions, batches; network (resnet18), fusion (all). Times and errors next to
          other libraries; a row for each contender, precision and batch, and for each state of the
          caches and inputs in which a backend was timed.
algorithms: device, precisions, batches; backend (cupy), cpu (a device). The network's time by each
          algorithm, next to PyTorch; a row each, batches side by side.
cpus:     precisions, batches; backend (numba-cpu). Times next to those of each library on every CPU
          on record, side by side, and errors; a row for each CPU, precision and batch.
from-host: devices, precisions, batches; network, fusion as in bench. Batches of pixels from host
          memory next to the times on the device; a row for each contender fed this way.
ceilings: device. Rates of instructions and bandwidths of memories, in bursts and sustained, and
          a library's rates; a row each.
roofline: device; backend (cupy), network, fusion. The network's time next to its floor and
          PyTorch's best; a row for each precision and batch.
summary:  device, batch; backend (cupy). Throughput next to PyTorch's best, and both errors; a row
          for each precision.
tuned:    device, precision, batch; backend (cupy), network, before. The time of each kernel that
          `r18 tune` chose next to its floor; `before` is an older table, stored with the records as
          tuned-<device>-<before>.json.
verify:   device; backend (cupy). The verified kernels; a row for each op and algorithm.
check:    devices. Functions of other libraries, as `r18 check` judged them; a row each.
sanitize: device. The findings of compute-sanitizer's tools.
perturb:  device. The runs with delays, and the findings; a row each for kernels and programs.
mutate:   devices; backends (all). The share of mutants caught; a row for each backend and choice
          of files.
profile:  device, precisions, batches; backend (cupy), memory (contiguous or channels-last). CPU
          and CUDA time of the drop-in; a row for each fusion level, precision and batch.
explain:  device, peers (as dumps name them, `_` for `, `); expected (numpy), network (resnet18).
          Elements that a library computes differently in int8, by class; a column for each.
evaluate: devices, images (the folder's name); backends (all), network (resnet18), precisions (all).
          Agreement with the reference on photographs, and speed; a row for each backend, precision
          (int8 with the way to quantise), batch and number of workers.
quantised: device, images; backend (numba-cpu), network (resnet18). The same in int8, without times;
          a row for each way to quantise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from r18.errors import UsageError, unknown
from r18.report.tables.algorithms import algorithms_table
from r18.report.tables.ceilings import ceilings_table
from r18.report.tables.cpus import cpus_table
from r18.report.tables.explained import explain_table
from r18.report.tables.foreign import check_table
from r18.report.tables.judged import mutate_table, perturb_table, sanitize_table, verify_table
from r18.report.tables.summary import summary_table
from r18.report.tables.table import Options, Table
from r18.report.tables.timed import bench_table, from_host_table, roofline_table, tuned_table
from r18.report.tables.used import evaluate_table, profile_table, quantised_table

_BLOCK = re.compile(
    r"^(?P<head><!-- table: (?P<kind>\S+)(?P<options>[^\n]*?) -->\n)(?P<body>.*?)"
    r"^(?P<foot><!-- /table -->)$",
    re.MULTILINE | re.DOTALL,
)
_HEAD = re.compile(r"^<!-- table:", re.MULTILINE)


def rendered(text: str, folder: Path) -> str:
    """The document with every table made from the records in `folder`.

    Raises `UsageError` for a wrong or unclosed marker and for a missing record or measurement.
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


TABLES: dict[str, tuple[Callable[[Options, Path], Table], tuple[str, ...]]] = {
    "bench": (bench_table, ("devices", "precisions", "batches", "network", "fusion")),
    "algorithms": (algorithms_table, ("device", "precisions", "batches", "backend", "cpu")),
    "cpus": (cpus_table, ("precisions", "batches", "backend")),
    "from-host": (from_host_table, ("devices", "precisions", "batches", "network", "fusion")),
    "ceilings": (ceilings_table, ("device",)),
    "roofline": (roofline_table, ("device", "backend", "network", "fusion")),
    "summary": (summary_table, ("device", "batch", "backend")),
    "tuned": (tuned_table, ("device", "precision", "batch", "backend", "network", "before")),
    "verify": (verify_table, ("device", "backend")),
    "check": (check_table, ("devices",)),
    "sanitize": (sanitize_table, ("device",)),
    "perturb": (perturb_table, ("device",)),
    "mutate": (mutate_table, ("devices", "backends")),
    "explain": (explain_table, ("device", "peers", "expected", "network")),
    "evaluate": (evaluate_table, ("devices", "images", "backends", "network", "precisions")),
    "quantised": (quantised_table, ("device", "images", "backend", "network")),
    "profile": (profile_table, ("device", "precisions", "batches", "backend", "memory")),
}
"""The function that makes each table, and the options of its marker."""


__all__ = ["TABLES", "rendered"]
