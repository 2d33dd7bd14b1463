"""Photographs decoded in threads, batch by batch; one that cannot be read is data, not the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from r18.backend import Array
from r18.errors import ImageError
from r18.evaluate.sources import Item
from r18.images.preprocess import Preprocess, preprocess_image

Decoded = Array | ImageError
"""(3, H, W) float32, or why there is none."""
Batch = Sequence[Item]


def decoded(
    batches: Iterable[Batch], folder: Path, config: Preprocess, threads: int, ahead: int = 0
) -> Iterator[tuple[Batch, list[Decoded]]]:
    """Each batch with its images, in order; up to `ahead` more are decoded in the background.

    With none ahead nothing is decoded while the caller works: its times are then of its own work.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="r18-decode")
    waiting: deque[tuple[Batch, list[Future[Decoded]]]] = deque()

    def start(some: Iterable[Batch]) -> None:
        for batch in some:
            jobs = [pool.submit(decode, folder / item.file, config) for item in batch]
            waiting.append((batch, jobs))

    source = iter(batches)
    try:
        start(islice(source, 1 + ahead))
        while waiting:
            batch, jobs = waiting.popleft()
            yield batch, [job.result() for job in jobs]
            start(islice(source, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def decode(path: Path, config: Preprocess) -> Decoded:
    """One image, or why it cannot be read; without the path, which a row names already."""
    try:
        return preprocess_image(path, config)
    except ImageError as error:
        return ImageError(str(error).removeprefix(f"{path}: "))


def readable(
    items: Iterable[Item], folder: Path, config: Preprocess, count: int
) -> list[tuple[Item, Array]]:
    """The first `count` images that can be read, with their pixels; or all, if there are fewer."""
    images = ((item, decode(folder / item.file, config)) for item in items)
    return list(islice(((i, p) for i, p in images if not isinstance(p, ImageError)), count))


__all__ = ["Batch", "Decoded", "decode", "decoded", "readable"]
