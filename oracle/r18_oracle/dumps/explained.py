"""The differences of two dumps in integers, each element with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from r18.backend import Array
from r18.errors import DumpError
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantize import LEVEL, quantized
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.weights.precisions import quantization_of
from r18_oracle.dumps.agreement import weights_of
from r18_oracle.dumps.dumps import Dump, check_comparable, read_dump
from r18_oracle.dumps.files import read_tensor
from r18_oracle.network.reasons import Reasons, explain_values


def explain_dumps(
    a: str | Path,
    b: str | Path,
    *,
    weights: str | None = None,
) -> Reasons:
    """Why two dumps in int8 differ, element by element.

    weights: their source, if not the one that the dumps name. Both must hold every value of the
    quantised network: `r18 dump --precision int8 --checkpoints all`. Raises `DumpError` where they
    do not, or cannot be compared; and what loading weights raises.
    """
    dumps = read_dump(a), read_dump(b)
    check_comparable(*dumps)
    made = dumps[0].made
    assert made is not None  # read_dump reads it
    for dump in dumps:
        if dump.made is None or dump.made.precision != INT8.name:
            raise DumpError(f"'{dump.folder}' is not in int8: only integers are explained")
    schedule = network(made.network)
    quantization = quantization_of(weights_of(dumps[0], schedule, weights))
    integers = quantized(fuse(schedule, LEVEL), quantization.bits)
    mine, theirs = (_Values(dump, integers) for dump in dumps)
    names = str(dumps[0]), str(dumps[1])
    return explain_values(schedule, quantization, mine, theirs, names)


class _Values(Mapping[str, Array]):
    """A dump's values by their names in the schedule; read from the file at each lookup."""

    def __init__(self, dump: Dump, schedule: Schedule) -> None:
        self._dump, self._image = dump, schedule.input
        self._names = {
            schedule.taps[file.name]: file.name
            for file in dump.checkpoints
            if file.name in schedule.taps
        }
        missing = [step.output for step in schedule.steps if step.output not in self._names]
        if missing:
            raise DumpError(
                f"'{dump.folder}' does not hold '{missing[0]}', and each step is judged from its "
                "inputs\n  write both dumps with --checkpoints all"
            )

    def __getitem__(self, value: str) -> Array:
        if value == self._image:
            assert self._dump.input is not None  # of a dump with a manifest
            return read_tensor(self._dump.folder, self._dump.input)
        return self._dump.read(self._names[value])

    def __iter__(self) -> Iterator[str]:
        return iter((self._image, *self._names))

    def __len__(self) -> int:
        return 1 + len(self._names)


__all__ = ["explain_dumps"]
