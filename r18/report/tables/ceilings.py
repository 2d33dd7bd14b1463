"""Peak rates of a device: of instructions, of memories, and of a library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from r18.backend.ceilings import COPY
from r18.graph.precision import INT8
from r18.records.kinds import CeilingsRecord, MeasuredCeiling
from r18.report.tables.table import (
    Options,
    Row,
    Table,
    cell,
    heading,
    loaded,
    needed,
    record_of,
)


def ceilings_table(options: Options, folder: Path) -> Table:
    """A row for each instruction and each memory; a library's rate is next to the first of its
    precision."""
    device = needed(options, "device")
    record = loaded(folder, CeilingsRecord, device)
    about = record_of(folder, "ceilings", device)
    versions = about["environment"]["packages"]
    software = [f"PyTorch {versions['torch']}"] if "torch" in versions else []
    captions = [f"{heading(about, software)}: medians, and the best."]
    if record.instructions or record.memory:
        captions.append(
            "In bursts: launches of a few milliseconds, each after a pause. Sustained: launches "
            "back to back for a second."
        )
    heads = "what | by | unit | in bursts | best | sustained | best | library | best"
    table = Table(heads, "lllrrrrrr", list(_rows(record)), captions)
    return table.without_empty_columns()


def _rows(record: CeilingsRecord) -> Iterator[Row]:
    instructions = record.instructions or {}
    for name in dict.fromkeys((*record.rates, *instructions)):
        rate = record.rates.get(name)
        library = (None, None) if rate is None else (rate.operations_per_second, rate.best)
        unit = "TOP/s" if name == INT8.name else "TFLOP/s"
        yield from _of(name, unit, instructions.get(name, {}), library)
    memory = record.memory or {}
    copied = record.copy.bytes_per_second, record.copy.best
    yield from _of(COPY, "TB/s", {COPY: memory[COPY]} if COPY in memory else {}, copied)
    for name, measured in memory.items():
        if name != COPY:
            yield from _of(name, "TB/s", {name: measured}, (None, None))


def _of(
    name: str,
    unit: str,
    measured: Mapping[str, MeasuredCeiling],
    library: tuple[float | None, float | None],
) -> Iterator[Row]:
    """A row for each way, or one for the library only."""
    for at, way in enumerate(measured or {"": None}):
        one = measured.get(way)
        numbers: list[float | None] = [None] * 4
        if one is not None:
            numbers = [
                x for pace in (one.burst, one.sustained) for x in (pace.per_second, pace.best)
            ]
        numbers += library if at == 0 else (None, None)
        by = "" if way == name else way
        yield (name, by, unit, *(cell(rate and rate / 1e12, ".4g") for rate in numbers))


__all__ = ["ceilings_table"]
