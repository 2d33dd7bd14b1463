"""Photographs in, network input out: bit for bit what torchvision's ImageNet transform gives.

The steps are those of torchvision's `ImageClassification` preset on PIL images, after its loader's
`Image.open(path).convert("RGB")`: resize the shorter side (antialiased), crop the centre,
divide by 255, subtract the mean, divide by the standard deviation, the last three in float32. Like
torchvision's loader it ignores EXIF orientation, takes the first frame of an animation, and leaves
mode conversions to Pillow: 16-bit greyscale (`I;16`) saturates at 255 instead of being scaled.

Files are not trusted: sizes are checked by the header, before anything is decoded.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from io import BytesIO
from itertools import islice
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from r18.errors import ImageError, UsageError, show, unknown
from r18.files import IMAGE_LIMIT, Refused, open_file
from r18.graph.ops import Normalize

Source = str | os.PathLike[str] | bytes | BinaryIO | Image.Image
"""A path, the bytes of a file, a seekable binary stream (read from its beginning), or an image."""

MAX_PIXELS = 89_478_485
"""The most pixels of an image, before and after resizing: where Pillow begins to warn."""

NOT_THERE = "no such file"
"""How an `ImageError` begins, after the name, where there is no file of this name."""

_SHARED_SOURCES = threading.Lock()

# Formats that Pillow decodes within the process; others are refused (EPS starts Ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")


BILINEAR = "bilinear"
FILTERS = {BILINEAR: Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
"""Pillow's filters by the names that torchvision and timm give them."""


@dataclass(frozen=True)
class Preprocess:
    """The steps from an RGB image of any size to the input; the manifest stores these values.

    resize:      the shorter side after resizing, in pixels.
    center_crop: height and width of the network's input, in pixels; at most `resize`.
    mean, std:   per channel (R, G, B), on values in [0, 1]; used as float32.
    interpolation: `bilinear`, as for torchvision's weights, or `bicubic`, as for most of timm's.

    Raises `UsageError` for values that make no preprocessing.
    """

    resize: int = 256
    center_crop: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    interpolation: str = BILINEAR

    def __post_init__(self) -> None:
        _check_side("resize", self.resize)
        _check_side("center_crop", self.center_crop)
        if self.center_crop > self.resize:
            raise UsageError(
                f"preprocess: a center_crop of {self.center_crop} does not fit a resize of "
                f"{self.resize}; resize to at least {self.center_crop}"
            )
        if not isinstance(self.interpolation, str) or self.interpolation not in FILTERS:
            raise UsageError(
                f"preprocess: interpolation must be {' or '.join(FILTERS)}, got "
                f"{show(self.interpolation)}"
            )
        object.__setattr__(self, "mean", _three("mean", self.mean))
        object.__setattr__(self, "std", _three("std", self.std))
        mean, std = _column(self.mean), _column(self.std)
        with np.errstate(all="ignore"):
            ends = (np.array([0, 1], np.float32) - mean) / std
        if not (np.isfinite(ends).all() and np.isfinite(std).all() and (std > 0).all()):
            raise UsageError(
                "preprocess: mean, std and (x − mean) / std must be finite in float32 and std > 0, "
                f"got mean {show(self.mean)} and std {show(self.std)}"
            )

    @classmethod
    def for_image_size(cls, size: int) -> Preprocess:
        """ImageNet's preprocessing for a network whose input is `size`×`size` pixels.

        It keeps the ratio 256/224 of resize to crop, rounded; 224 gives exactly 256. Raises
        `UsageError` for a size that is no positive integer, or too large.
        """
        _check_side("image size", size)
        return cls(resize=round(size * 256 / 224), center_crop=size)

    def at(self, size: int) -> Preprocess:
        """The same for images of another size: as `for_image_size`, or with another filter, in the
        same ratio of resize to crop. Raises `UsageError` as `for_image_size` does."""
        usual = Preprocess.for_image_size(size)
        if self.interpolation == BILINEAR:
            return replace(self, resize=usual.resize, center_crop=size)
        return replace(self, resize=size * self.resize // self.center_crop, center_crop=size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, H, W) of one preprocessed image."""
        return (3, self.center_crop, self.center_crop)

    @property
    def normalize(self) -> Normalize:
        """The remaining step for pixels resized and cropped: `CompileOptions.pixels`."""
        return Normalize(self.mean, self.std)

    def to_json(self) -> dict[str, Any]:
        """The values by name, as JSON has them: integers, and lists of numbers. `interpolation` is
        there unless it is `bilinear`, which every older manifest means."""
        other = {} if self.interpolation == BILINEAR else {"interpolation": self.interpolation}
        return {
            "resize": self.resize,
            "center_crop": self.center_crop,
            "mean": list(self.mean),
            "std": list(self.std),
            **other,
        }

    @classmethod
    def from_json(cls, data: object) -> Preprocess:
        """The inverse of `to_json`; but for `interpolation`, every key must be there, and no other.
        Raises `UsageError`."""
        if not isinstance(data, Mapping):
            raise UsageError(f"preprocess: expected a JSON object, got {show(data)}")
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise unknown("key of preprocess", str(key), known, error=UsageError)
        missing = [name for name in known if name not in data and name != "interpolation"]
        if missing:
            raise UsageError(f"preprocess: no value for {', '.join(missing)}; all four are needed")
        return cls(**data)


def _check_side(what: str, side: object) -> None:
    if type(side) is not int or side < 1 or side * side > MAX_PIXELS:
        raise UsageError(
            f"preprocess: {what} must be an integer of at least 1 whose square is at most "
            f"{MAX_PIXELS:,} pixels, got {show(side)}"
        )


def _three(what: str, values: object) -> tuple[float, ...]:
    if (
        not isinstance(values, list | tuple)
        or len(values) != 3
        or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    ):
        raise UsageError(
            f"preprocess: {what} must be three numbers, one for each of R, G, B, got {show(values)}"
        )
    try:
        return tuple(float(v) for v in values)
    except OverflowError:
        raise UsageError(f"preprocess: {what} holds a number that no float can hold") from None


def _column(values: tuple[float, ...]) -> NDArray[np.float32]:
    """Three numbers → (3, 1, 1) float32; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return np.array(values, np.float64).astype(np.float32)[:, None, None]


# -- One image, batches, streams -------------------------------------------------------------


def preprocess_image(source: Source, config: Preprocess = Preprocess()) -> NDArray[np.float32]:
    """One image as (3, H, W) float32, C-contiguous; H = W = `config.center_crop`.

    Raises `ImageError` for what cannot be read, or is not safe to read, and `UsageError` for a
    source that is none of `Source`.
    """
    out = np.empty(config.shape, np.float32)
    _preprocess_into(out, source, config)
    return out


def preprocess_batch(
    sources: Sequence[Source], config: Preprocess = Preprocess(), *, threads: int | None = None
) -> NDArray[np.float32]:
    """Images as (N, 3, H, W) float32, C-contiguous, in the order of `sources`.

    They are decoded in `threads` threads, as many as there are processors when None; streams and
    PIL images, which the caller shares with us, one at a time. Each thread holds one decoded image
    of at most `MAX_PIXELS` and its copies. Nothing partial is returned: the first bad source
    raises what `preprocess_image` raises, with its index before the message.
    """
    if isinstance(sources, str | os.PathLike | bytes | Image.Image) or hasattr(sources, "read"):
        raise UsageError(
            f"preprocess_batch takes a list of images, got {_name(sources)} alone; "
            "preprocess_image takes one"
        )
    with _pool(threads) as pool:
        return _Batch(pool, list(sources), config, first=0).result()


def iter_batches(
    sources: Iterable[Source],
    batch: int,
    config: Preprocess = Preprocess(),
    *,
    threads: int | None = None,
) -> Iterator[tuple[list[Source], NDArray[np.float32]]]:
    """Stream over sources: yields (≤ `batch` sources, their (n, 3, H, W) float32 array), in order.

    While the caller works on one batch, the next is being decoded; no more than these two are in
    memory, however many sources there are. The last batch may be smaller. A bad source raises as
    in `preprocess_batch`, when its batch is due. Raises `UsageError` at the call itself for a
    `batch` or `threads` below 1.
    """
    if type(batch) is not int or batch < 1:
        raise UsageError(f"batch must be an integer of at least 1, got {batch!r}")
    _threads(threads)
    return _stream(iter(sources), batch, config, threads)


def _stream(
    sources: Iterator[Source], batch: int, config: Preprocess, threads: int | None
) -> Iterator[tuple[list[Source], NDArray[np.float32]]]:
    with _pool(threads) as pool:
        first = 0
        ahead: _Batch | None = None
        while chunk := list(islice(sources, batch)):
            due, ahead = ahead, _Batch(pool, chunk, config, first)
            first += len(chunk)
            if due is not None:
                yield due.sources, due.result()
                due = None  # or the next round would keep a third batch in memory
        if ahead is not None:
            yield ahead.sources, ahead.result()


class _Batch:
    """Sources that a pool is decoding into one array; `first` is the index of the first of them."""

    def __init__(
        self, pool: ThreadPoolExecutor, sources: list[Source], config: Preprocess, first: int
    ) -> None:
        self.sources = sources
        self._first = first
        self._out = np.empty((len(sources), *config.shape), np.float32)
        self._futures: list[Future[None]] = [
            pool.submit(_preprocess_into, out, source, config)
            for out, source in zip(self._out, sources, strict=True)
        ]

    def result(self) -> NDArray[np.float32]:
        for index, future in enumerate(self._futures, start=self._first):
            try:
                future.result()
            except (ImageError, UsageError) as error:
                raise type(error)(f"sources[{index}]: {error}") from error
        return self._out


def _threads(asked: int | None) -> int:
    if asked is None:
        return os.cpu_count() or 1
    if type(asked) is not int or asked < 1:
        raise UsageError(f"threads must be an integer of at least 1, or None, got {asked!r}")
    return asked


@contextmanager
def _pool(threads: int | None) -> Iterator[ThreadPoolExecutor]:
    """A pool that drops what it has not begun when its user leaves, by an error too."""
    pool = ThreadPoolExecutor(_threads(threads), thread_name_prefix="r18-preprocess")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


# -- The transform ---------------------------------------------------------------------------


def _preprocess_into(out: NDArray[np.float32], source: Source, config: Preprocess) -> None:
    """Fill `out`, (3, H, W) float32."""
    name = _name(source)
    with _QUIET, ExitStack() as stack:
        if not isinstance(source, str | os.PathLike | bytes):
            # The same object may be in a batch twice, and two threads would take turns reading it.
            stack.enter_context(_SHARED_SOURCES)
        image = source if isinstance(source, Image.Image) else _open(name, source, stack)
        size = _resized_size(name, image.size, config.resize)
        rgb = _to_rgb(name, image)
    if rgb.size != size:
        rgb = rgb.resize(size, FILTERS[config.interpolation])
    # Half a pixel rounds to even, as in torchvision's center_crop.
    left, top = (round((extent - config.center_crop) / 2) for extent in size)
    box = (left, top, left + config.center_crop, top + config.center_crop)
    out[...] = np.asarray(rgb.crop(box)).transpose(2, 0, 1)
    # NOTE: three roundings in this order; one fused scale and shift would not give the same bits.
    out /= np.float32(255)
    out -= _column(config.mean)
    out /= _column(config.std)


def _resized_size(name: str, size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """(width, height) after resizing; the longer side is truncated, as torchvision's Resize does.

    Raises `ImageError` when the image is empty, or too large before or after.
    """
    width, height = size
    if min(size) < 1:
        raise ImageError(f"{name}: the image is {width}×{height} and has no pixels; leave it out")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{name}: the image claims {width}×{height} = {width * height:,} pixels, more than "
            f"the limit of {MAX_PIXELS:,}; scale it down first"
        )
    longer = int(shorter * max(size) / min(size))
    if shorter * longer > MAX_PIXELS:
        raise ImageError(
            f"{name}: the image is {width}×{height}; with its shorter side at {shorter} it would "
            f"have {shorter * longer:,} pixels, more than the limit of {MAX_PIXELS:,}; "
            "crop it first"
        )
    return (shorter, longer) if width <= height else (longer, shorter)


# -- Reading, with Pillow's errors and warnings turned into ours -----------------------------


def _name(source: object) -> str:
    """How messages name a source."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes):
        return f"<{len(source)} bytes>"
    if isinstance(source, Image.Image):
        file = getattr(source, "filename", "")
        return str(file) if file else f"<{source.mode} image of {source.width}×{source.height}>"
    return str(getattr(source, "name", f"<{type(source).__name__}>"))


def _open(name: str, source: object, stack: ExitStack) -> Image.Image:
    """The image with its header read; `stack` closes it, but never the caller's stream."""
    if isinstance(source, str | os.PathLike):
        stream: BinaryIO = stack.enter_context(_open_file(name, source))
    elif isinstance(source, bytes):
        if not source:
            raise ImageError(f"{name}: there is nothing in it; fetch the image again")
        stream = BytesIO(source)
    elif hasattr(source, "read"):
        stream = cast("BinaryIO", source)
    else:
        raise UsageError(
            f"cannot preprocess a {type(source).__name__}; pass a path, bytes, a binary stream or "
            "a PIL image (Image.fromarray makes one of an array)"
        )
    try:
        return stack.enter_context(Image.open(stream, formats=_formats()))
    except UnidentifiedImageError:
        raise ImageError(
            f"{name}: not an image of a known format ({', '.join(_formats())}), or its header is "
            "damaged; convert it to one of these or fetch it again"
        ) from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: {error} Scale it down first") from None
    except Exception as error:  # on hostile bytes Pillow's parsers raise nearly anything
        raise ImageError(
            f"{name}: the image cannot be opened: {_reason(error)}; fetch it again"
        ) from error


def _open_file(name: str, path: str | os.PathLike[str]) -> BinaryIO:
    try:
        if os.path.isdir(path):
            raise ImageError(f"{name}: a folder, not an image; name the files in it")
        stream = open_file(path, IMAGE_LIMIT)
        if not os.fstat(stream.fileno()).st_size:
            stream.close()
            raise ImageError(f"{name}: the file is empty; fetch the image again")
        return stream
    except FileNotFoundError:
        raise ImageError(f"{name}: {NOT_THERE}; check the path") from None
    except Refused as error:
        raise ImageError(f"{name}: {error}; read it yourself and pass its bytes") from None
    except (OSError, ValueError) as error:
        raise ImageError(f"{name}: the file cannot be opened: {_reason(error)}") from error


def _to_rgb(name: str, image: Image.Image) -> Image.Image:
    """Decode, and convert as torchvision's loader does; the image itself keeps its mode."""
    try:
        image.load()
    except Exception as error:  # as in _open
        raise ImageError(
            f"{name}: the {image.format or image.mode} image of {image.width}×{image.height} is "
            f"truncated or damaged: {_reason(error)}; fetch it again"
        ) from error
    try:
        return image.convert("RGB")
    except Exception as error:  # ValueError, KeyError, or an error of Pillow's colour management
        raise ImageError(
            f"{name}: Pillow cannot convert mode {image.mode} to RGB ({_reason(error)}); "
            "convert it first"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@cache
def _formats() -> tuple[str, ...]:
    """The `FORMATS` that the installed Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


class _QuietPillow:
    """While any thread is inside, warnings that Pillow's modules emit are ignored.

    The one that matters (too many pixels) is an `ImageError` here. `warnings.catch_warnings` is no
    substitute: it saves and restores the whole process's filters, so overlapping threads leave
    each other's filters behind. This puts one entry in and takes that same entry out.
    """

    # The comment in the pattern makes the entry unlike any that somebody else puts in.
    _ENTRY = ("ignore", None, Warning, re.compile(r"PIL\.(?#while r18 reads images)"), 0)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._entered: list[object] = []

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._entered = cast("list[object]", warnings.filters)
                self._entered.insert(0, self._ENTRY)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                # A catch_warnings of the caller's may have begun or ended since, on another list.
                for filters in (self._entered, cast("list[object]", warnings.filters)):
                    if self._ENTRY in filters:
                        filters.remove(self._ENTRY)


_QUIET = _QuietPillow()
