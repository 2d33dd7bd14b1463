"""Batch after batch from host memory: while one is computed the next is copied.

    arrays = program.input_arrays()
    for logits in pipeline(program, filled(cycle(arrays))):
        ...

with a generator `filled` that fills each array with a batch and yields it. It is advanced when the
array that it filled two batches ago may be refilled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from r18.backend import Array


class Fed(Protocol):
    """The parts of a `Program` that `pipeline` uses."""

    def load(self, images: Array) -> None: ...
    def launch(self) -> None: ...
    def fetch_later(self) -> Callable[[], Array]: ...


def pipeline(program: Fed, batches: Iterable[Array]) -> Iterator[Array]:
    """The output of every batch, in order; see `Program.fetch` for its format.

    One batch is computed while the next is copied, so an output is returned after the next batch
    has been launched. Arrays that are not from `Program.input_arrays` are copied once more on the
    host. A program that cannot overlap copies and computes in turn.
    """
    under_way: deque[Callable[[], Array]] = deque()
    for images in batches:
        program.load(images)
        program.launch()
        under_way.append(program.fetch_later())
        if len(under_way) > 1:
            yield under_way.popleft()()
    for fetch in under_way:
        yield fetch()


__all__ = ["Fed", "pipeline"]
