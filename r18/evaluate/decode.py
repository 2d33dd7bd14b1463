"""Photographs decoded in threads, batch by batch; one that cannot be read is data, not the end."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from r18.backend import Array
from r18.errors import ImageError
from r18.evaluate.rows import Seen
from r18.evaluate.sources import Item
from r18.files import IMAGE_LIMIT, open_file, read_all
from r18.images.preprocess import NOT_THERE, Preprocess, preprocess_image

Batch = Sequence[Item]


class Decoded(NamedTuple):
    """(3, H, W) float32, or why there is none; and the file as it was read."""

    pixels: Array | ImageError
    seen: Seen | None = None


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
    """One image, or why it cannot be read; without the path, which a row names already.

    The file is read once: its digest is that of the bytes that were decoded.
    """
    try:
        data, seen = look(path)
    except FileNotFoundError:
        return Decoded(ImageError(f"{NOT_THERE}; check the path"))
    except OSError as error:
        return Decoded(ImageError(f"the file cannot be opened: {error.strerror or error}"))
    if not data:
        return Decoded(ImageError("the file is empty; fetch the image again"), seen)
    try:
        return Decoded(preprocess_image(data, config), seen)
    except ImageError as error:
        return Decoded(ImageError(str(error).removeprefix(f"<{len(data)} bytes>: ")), seen)


def look(path: Path) -> tuple[bytes, Seen]:
    """The bytes of an image, and their `Seen`. Raises `OSError`."""
    with open_file(path, IMAGE_LIMIT) as stream:
        status = os.fstat(stream.fileno())
        data = read_all(stream)
    return data, Seen(hashlib.sha256(data).hexdigest(), stamp_of(status))


def stamp_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """A file's `Seen.stamp`."""
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def same(path: Path, seen: Seen) -> bool:
    """Whether a file still holds what was seen; it is read only if the system says that it changed.

    Raises `OSError`.
    """
    return stamp_of(path.stat()) == seen.stamp or look(path)[1].sha256 == seen.sha256


def readable(
    items: Iterable[Item], folder: Path, config: Preprocess, count: int
) -> list[tuple[Item, Array]]:
    """The first `count` images that can be read, with their pixels; or all, if there are fewer."""
    images = ((item, decode(folder / item.file, config).pixels) for item in items)
    return list(islice(((i, p) for i, p in images if not isinstance(p, ImageError)), count))


__all__ = ["Batch", "Decoded", "decode", "decoded", "look", "readable", "same"]
