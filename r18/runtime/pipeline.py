"""Batch after batch from host memory: while one is computed the next is copied.

    arrays = program.input_arrays()
    for logits in pipeline(program, filled(cycle(arrays))):
        ...

with a generator `filled` that fills each array with a batch and yields it. It is asked for the next
batch when the array that it filled the time before last may be filled anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from r18.backend import Array, Pipelined


class Fed(Protocol):
    """What batches are brought to: the parts of a `Program` that it takes."""

    def load(self, images: Array) -> None: ...
    def launch(self) -> None: ...
    def fetch(self) -> Array: ...


def pipeline(program: Fed, batches: Iterable[Array]) -> Iterator[Array]:
    """The output of every batch, in order; see `Program.fetch` for its format.

    One batch is computed while the next is under way, so that an output comes when the batch after
    it has been launched. Arrays that are not of `Pipelined.input_arrays` are copied once more on
    the host. A program that does not overlap does one after the other.
    """
    under_way: deque[Callable[[], Array]] = deque()
    for images in batches:
        program.load(images)
        program.launch()
        under_way.append(_fetching(program))
        if len(under_way) > 1:
            yield under_way.popleft()()
    for fetch in under_way:
        yield fetch()


def _fetching(program: Fed) -> Callable[[], Array]:
    if isinstance(program, Pipelined):
        return program.fetch_later()
    output = program.fetch()
    return lambda: output


__all__ = ["Fed", "pipeline"]
