"""Preprocessing: the bits of torchvision's transform, and errors for hostile files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from torchvision.models import ResNet18_Weights
from torchvision.transforms import InterpolationMode

from r18.errors import ImageError, UsageError
from r18.images.preprocess import (
    MAX_PIXELS,
    Preprocess,
    iter_batches,
    preprocess_batch,
    preprocess_image,
)

Array = np.ndarray[Any, np.dtype[Any]]


def torchvision_says(source: Any, **preset: Any) -> Array:
    """torchvision's transform of a file or an image; `preset` replaces the ImageNet values."""
    image = source if isinstance(source, Image.Image) else Image.open(source)
    transform = ResNet18_Weights.IMAGENET1K_V1.transforms(**preset)
    return transform(image.convert("RGB")).numpy()  # type: ignore[no-any-return]


def same_bits(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype == np.float32
    assert got.shape == expected.shape
    assert got.flags.c_contiguous
    wrong = np.argwhere(got != expected)
    assert not len(wrong), f"{len(wrong)} of {got.size} differ, the first at {tuple(wrong[0])}"


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A random image that uses the whole range of its mode."""
    rng = np.random.default_rng([seed, width, height])
    size = (width, height)
    if mode.startswith("I;16"):  # half of the values saturate when Pillow converts them
        values = rng.integers(0, 512, (height, width), dtype=np.uint16)
        return Image.frombytes(mode, size, values.astype(">u2" if mode == "I;16B" else "<u2"))
    if mode in ("I", "F"):
        values = rng.integers(-64, 320, (height, width)).astype(np.int32 if mode == "I" else "f4")
        return Image.fromarray(values)
    if mode in ("P", "PA"):
        image = Image.frombytes("P", size, rng.bytes(width * height))
        image.putpalette(rng.bytes(768))
        return image.convert(mode)
    if mode == "1":
        return Image.frombytes("1", size, rng.bytes((width + 7) // 8 * height))
    return Image.frombytes(
        mode, size, rng.bytes(width * height * len(Image.new(mode, size).getbands()))
    )


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG with a size and no pixel, which fails in decoding with another message."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


# -- The bits of torchvision -----------------------------------------------------------------


def test_the_defaults_are_the_preset_of_the_weights() -> None:
    preset, config = ResNet18_Weights.IMAGENET1K_V1.transforms(), Preprocess()
    assert (preset.resize_size, preset.crop_size) == ([config.resize], [config.center_crop])
    assert (tuple(preset.mean), tuple(preset.std)) == (config.mean, config.std)


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (1, 1),
        (1, 300),
        (300, 1),
        (2000, 3),
        (3, 2000),
        (224, 224),
        (255, 257),
        (256, 256),
        (256, 257),  # crops at 16.5, which rounds to 16
        (259, 256),  # crops at 17.5, which rounds to 18
        (480, 641),
        (641, 480),
        (1000, 768),
    ],
)
def test_sizes(width: int, height: int) -> None:
    image = noise(width, height)
    same_bits(preprocess_image(image), torchvision_says(image))


@settings(derandomize=True, max_examples=25, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 99))
def test_drawn_sizes(width: int, height: int, seed: int) -> None:
    image = noise(width, height, seed=seed)
    same_bits(preprocess_image(image), torchvision_says(image))


def test_every_byte_of_every_channel() -> None:
    values = np.arange(256, dtype=np.uint8)
    pixels = np.stack(np.broadcast_arrays(values[:, None], values, values[::-1]), axis=2)
    image = Image.fromarray(pixels)
    got = preprocess_image(image, Preprocess(resize=256, center_crop=256))
    same_bits(got, torchvision_says(image, resize_size=256, crop_size=256))
    assert [len(np.unique(channel)) for channel in got] == [256, 256, 256]


@pytest.mark.parametrize(("width", "height"), [(224, 300), (97, 400), (1000, 768), (3, 5)])
def test_bicubic_is_torchvisions_too(width: int, height: int) -> None:
    image = noise(width, height)
    got = preprocess_image(image, Preprocess(interpolation="bicubic"))
    same_bits(got, torchvision_says(image, interpolation=InterpolationMode.BICUBIC))
    assert (got != preprocess_image(image)).any()


def test_only_another_filter_is_in_the_json() -> None:
    config = Preprocess(resize=235, interpolation="bicubic")
    assert config.to_json()["interpolation"] == "bicubic"
    assert Preprocess.from_json(json.loads(json.dumps(config.to_json()))) == config
    for wrong in ("lanczos", 3, ["bicubic"]):
        with pytest.raises(UsageError, match="interpolation must be bilinear or bicubic"):
            Preprocess(interpolation=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", [1, 32, 33, 224, 299])
def test_other_image_sizes(side: int) -> None:
    image = noise(120, 97)
    config = Preprocess.for_image_size(side)
    got = preprocess_image(image, config)
    assert got.shape == config.shape == (3, side, side)
    same_bits(got, torchvision_says(image, resize_size=config.resize, crop_size=side))


def test_other_mean_and_std() -> None:
    image, mean, std = noise(300, 260), (0.5, 0.0, -1.25), (0.1, 3.0, 1 / 3)
    got = preprocess_image(image, Preprocess(mean=mean, std=std))
    same_bits(got, torchvision_says(image, mean=mean, std=std))


MODES = ("RGB", "L", "LA", "P", "RGBA", "CMYK", "I;16", "1")
RARE_MODES = ("I", "F", "I;16B", "PA", "RGBX", "YCbCr", "HSV", "LAB")


@pytest.mark.parametrize("mode", MODES + RARE_MODES)
def test_modes(mode: str) -> None:
    image = noise(300, 260, mode)
    before = image.tobytes()
    assert image.mode == mode
    same_bits(preprocess_image(image), torchvision_says(image))
    assert (image.mode, image.tobytes()) == (mode, before)


def test_16_bit_greyscale_saturates_as_in_pillow() -> None:
    image = Image.fromarray(np.full((256, 256), 256, np.uint16))
    white = preprocess_image(Image.new("RGB", (256, 256), "white"))
    same_bits(preprocess_image(image), torchvision_says(image))
    same_bits(preprocess_image(image), white)


FILES: list[tuple[str, str, dict[str, Any]]] = [
    *(("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    ("PNG", "P", {"transparency": bytes(range(256))}),
    ("PNG", "P", {"transparency": 7}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    *(("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")),
    ("JPEG", "RGB", {"progressive": True, "subsampling": 2, "quality": 40}),
    *(("TIFF", mode, {}) for mode in ("1", "L", "RGB", "RGBA", "CMYK", "I;16", "F", "LAB")),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB")),
    ("GIF", "P", {}),
    ("PPM", "L", {}),
    ("PPM", "RGB", {}),
    ("PPM", "I", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("JPEG2000", "RGB", {}),
    ("AVIF", "RGB", {}),
]


@pytest.mark.parametrize(
    ("format", "mode", "options"), FILES, ids=[f"{f}-{m}-{'-'.join(o)}" for f, m, o in FILES]
)
def test_files(format: str, mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    Image.init()
    if format not in Image.SAVE:
        pytest.skip(f"this Pillow cannot write {format}")
    path = tmp_path / "image"
    path.write_bytes(encoded(noise(333, 270, mode), format, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision lets Pillow's warnings through
        expected = torchvision_says(path)
    same_bits(preprocess_image(path), expected)


def test_every_kind_of_source_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    data = encoded(noise(300, 260), "PNG")
    path.write_bytes(data)
    expected = torchvision_says(path)
    for source in (path, str(path), data, Image.open(path)):
        same_bits(preprocess_image(source), expected)
    with path.open("rb") as file:
        same_bits(preprocess_image(file), expected)
        same_bits(preprocess_image(file), expected)  # neither closed nor left behind its end


def test_exif_orientation_is_ignored_as_by_torchvision() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(noise(300, 400), "JPEG", exif=exif)
    same_bits(preprocess_image(turned), torchvision_says(io.BytesIO(turned)))
    same_bits(preprocess_image(turned), preprocess_image(encoded(noise(300, 400), "JPEG")))


def test_an_animation_gives_its_first_frame() -> None:
    frames = [noise(300, 260, "P", seed=seed) for seed in range(3)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    same_bits(preprocess_image(data), torchvision_says(frames[0]))


def test_every_photograph(shared: Path) -> None:
    photos = sorted((shared / "photos").glob("*.JPEG"))
    seen = 0
    with ThreadPoolExecutor() as pool:
        for sources, got in iter_batches(photos, 50):
            assert sources == photos[seen : seen + len(got)]
            for image, expected in zip(got, pool.map(torchvision_says, sources), strict=True):
                same_bits(image, expected)
            seen += len(got)
    assert seen == len(photos) == 500


# -- Batches and streams ---------------------------------------------------------------------


def photographs(count: int) -> list[bytes]:
    """Files of falling size, so that a pool finishes the last before the first."""
    return [encoded(noise(40 * (count - i), 300, seed=i), "PNG") for i in range(count)]


@pytest.mark.parametrize("threads", [None, 1, 3, 16])
def test_a_batch_is_its_images_in_order(threads: int | None) -> None:
    sources = photographs(7)
    got = preprocess_batch(sources, threads=threads)
    same_bits(got, np.stack([preprocess_image(source) for source in sources]))


def test_a_batch_takes_its_preprocessing_and_may_be_empty() -> None:
    config = Preprocess.for_image_size(32)
    assert preprocess_batch(photographs(2), config).shape == (2, 3, 32, 32)
    assert preprocess_batch([], config).shape == (0, 3, 32, 32)


def test_one_object_many_times_in_a_batch() -> None:
    data = encoded(noise(900, 900), "PNG")
    expected = np.stack([preprocess_image(data)] * 8)
    same_bits(preprocess_batch([Image.open(io.BytesIO(data))] * 8, threads=8), expected)
    same_bits(preprocess_batch([io.BytesIO(data)] * 8, threads=8), expected)


def test_a_batch_names_its_first_bad_image(tmp_path: Path) -> None:
    sources: list[Any] = [*photographs(2), tmp_path / "lost.png", b"", *photographs(2)]
    with pytest.raises(ImageError) as caught:
        preprocess_batch(sources)
    assert str(caught.value) == f"sources[2]: {tmp_path}/lost.png: no such file; check the path"


@pytest.mark.parametrize("alone", ["a.png", b"bytes", Path("a.png"), noise(2, 2), io.BytesIO()])
def test_a_batch_refuses_one_image_alone(alone: Any) -> None:
    with pytest.raises(UsageError, match=r"takes a list of images, got .* alone; preprocess_image"):
        preprocess_batch(alone)


def test_a_stream_yields_batches_in_order() -> None:
    sources = photographs(7)
    got = list(iter_batches(iter(sources), 3, threads=2))
    assert [len(array) for _, array in got] == [3, 3, 1]
    assert [source for chunk, _ in got for source in chunk] == sources
    same_bits(np.concatenate([array for _, array in got]), preprocess_batch(sources))
    assert list(iter_batches([], 3)) == []


def test_a_stream_reads_one_batch_ahead_and_stops_its_threads() -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield source

    source = encoded(noise(8, 8), "PNG")
    stream = iter_batches(endless(), 5, Preprocess.for_image_size(8))
    assert taken == 0
    next(stream)
    assert taken == 10
    next(stream)
    assert taken == 15
    assert our_threads()
    stream.close()  # type: ignore[attr-defined]
    assert not our_threads()


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("r18-preprocess")]


def test_a_stream_raises_when_the_batch_of_a_bad_image_is_due() -> None:
    stream = iter_batches([*photographs(4), b"", *photographs(4)], 2)
    assert [len(next(stream)[0]) for _ in range(2)] == [2, 2]
    with pytest.raises(ImageError, match=r"^sources\[4\]: <0 bytes>: there is nothing in it"):
        next(stream)
    assert not our_threads()


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "2"])
def test_wrong_numbers_of_images_and_threads(wrong: Any) -> None:
    with pytest.raises(UsageError, match="batch must be an integer of at least 1, got"):
        iter_batches([], wrong)
    with pytest.raises(UsageError, match="threads must be an integer of at least 1, or None, got"):
        iter_batches([], 1, threads=wrong)
    with pytest.raises(UsageError, match="threads must be an integer of at least 1, or None, got"):
        preprocess_batch([], threads=wrong)


# -- Hostile input ---------------------------------------------------------------------------


def refusal(source: Any, config: Preprocess = Preprocess()) -> str:
    with pytest.raises(ImageError) as caught:
        preprocess_image(source, config)
    return str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.jpg").touch()
    assert refusal(tmp_path / "a.jpg") == f"{tmp_path}/a.jpg: no such file; check the path"
    assert refusal(tmp_path) == f"{tmp_path}: a folder, not an image; name the files in it"
    assert refusal(tmp_path / "pipe").startswith(
        f"{tmp_path}/pipe: not a regular file, but a FIFO;"
    )
    assert refusal(str(tmp_path / "empty.jpg")) == (
        f"{tmp_path}/empty.jpg: the file is empty; fetch the image again"
    )
    assert "the file cannot be opened: File name too long" in refusal("a" * 5000)
    assert "the file cannot be opened: embedded null byte" in refusal("a\0b")
    assert refusal(b"") == "<0 bytes>: there is nothing in it; fetch the image again"


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("data", [b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", POSTSCRIPT])
def test_what_is_no_image_of_a_known_format(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(data)
    with path.open("rb") as file:
        for source in (path, file):
            message = refusal(source)
            assert message.startswith(f"{path}: not an image of a known format (JPEG, PNG, ")
    assert refusal(data).startswith(f"<{len(data)} bytes>: not an image of a known format")
    assert refusal(io.BytesIO(data)).startswith("<BytesIO>: not an image of a known format")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "BMP", "GIF", "PPM"])
def test_truncated_files(format: str) -> None:
    data = encoded(noise(100, 80), format)
    assert preprocess_image(data).shape == (3, 224, 224)
    half = data[: len(data) // 2]
    message = refusal(half)
    assert message.startswith(f"<{len(half)} bytes>: the {format} image of 100×80 is truncated or")
    assert message.endswith("; fetch it again")


def test_the_message_of_a_truncated_file() -> None:
    header = b"P6\n100 80\n255\n"
    assert refusal(header) == (
        "<14 bytes>: the PPM image of 100×80 is truncated or damaged: "
        "image file is truncated (0 bytes not processed); fetch it again"
    )


def test_decompression_bombs_are_refused_by_their_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(10_000, 10_000))
    assert refusal(path) == (
        f"{path}: the image claims 10000×10000 = 100,000,000 pixels, more than the limit of "
        "89,478,485; scale it down first"
    )
    path.write_bytes(png_header(100_000, 100_000))
    message = refusal(path)
    assert message.startswith(f"{path}: Image size (10000000000 pixels) exceeds limit of")
    assert message.endswith("Scale it down first")
    with pytest.warns(Image.DecompressionBombWarning):
        image = Image.open(io.BytesIO(png_header(9_460, 9_459)))
    assert refusal(image).endswith("more than the limit of 89,478,485; scale it down first")


@pytest.mark.parametrize(("width", "height"), [(1, 100_000), (100_000, 1)])
def test_strips_that_would_grow_are_refused_by_their_header(width: int, height: int) -> None:
    data = png_header(width, height)
    assert refusal(data) == (
        f"<{len(data)} bytes>: the image is {width}×{height}; with its shorter side at 256 it "
        "would have 6,553,600,000 pixels, more than the limit of 89,478,485; crop it first"
    )
    assert "truncated or damaged" in refusal(data, Preprocess.for_image_size(1))


def test_the_limit_itself() -> None:
    side = int(MAX_PIXELS**0.5)
    assert "truncated or damaged" in refusal(png_header(side, side))
    assert "more than the limit" in refusal(png_header(side + 1, side + 1))
    longest = MAX_PIXELS // 256**2  # one pixel wide
    assert "truncated or damaged" in refusal(png_header(1, longest))
    assert "more than the limit" in refusal(png_header(1, longest + 1))


def test_an_image_without_pixels_and_a_closed_one() -> None:
    assert refusal(Image.new("L", (0, 5))) == (
        "<L image of 0×5>: the image is 0×5 and has no pixels; leave it out"
    )
    image = Image.open(io.BytesIO(encoded(noise(9, 9), "PNG")))
    image.close()
    assert "is truncated or damaged" in refusal(image)


def test_a_mode_that_pillow_cannot_convert() -> None:
    message = refusal(Image.new("La", (9, 9)))
    assert message.startswith("<La image of 9×9>: Pillow cannot convert mode La to RGB (")


@pytest.mark.parametrize("source", [None, 7, np.zeros((9, 9, 3), np.uint8), ["a.png"]])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(UsageError, match=f"cannot preprocess a {type(source).__name__}; pass a pa"):
        preprocess_image(source)
    with pytest.raises(UsageError, match=r"^sources\[1\]: cannot preprocess a "):
        preprocess_batch([noise(9, 9), source])


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "BMP", "GIF", "PPM", "WEBP"])
def test_damaged_bytes_give_an_image_or_an_image_error(format: str) -> None:
    rng = np.random.default_rng(18)
    sound = encoded(noise(24, 20), format)
    config = Preprocess.for_image_size(16)
    outcomes = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(150):
            data = bytearray(sound[: rng.integers(1, len(sound) + 1)])
            for position in rng.integers(0, min(len(data), 200), 3):
                data[position] = rng.integers(256)
            try:
                got = preprocess_image(bytes(data), config)
                assert np.isfinite(got).all()
                outcomes.add("image")
            except ImageError:
                outcomes.add("error")
    assert "error" in outcomes


# -- Nothing of Pillow's leaks ---------------------------------------------------------------


def palette_with_alpha() -> bytes:
    return encoded(noise(32, 32, "P"), "PNG", transparency=bytes(range(256)))


def tiff_with_a_bad_tag() -> bytes:
    data = bytearray(encoded(noise(32, 32), "TIFF"))
    tags = int.from_bytes(data[4:8], "little")
    data[tags + 6 : tags + 10] = b"\xff\xff\0\0"  # the first tag claims values beyond the file
    return bytes(data)


def state_of_others() -> tuple[object, ...]:
    return (
        Image.MAX_IMAGE_PIXELS,
        ImageFile.LOAD_TRUNCATED_IMAGES,
        list(warnings.filters),
    )


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (palette_with_alpha(), False),
        (png_header(9_500, 9_500), True),
        (tiff_with_a_bad_tag(), True),
    ],
    ids=["palette with alpha", "many pixels", "bad tag"],
)
def test_no_warning_leaks_and_no_global_changes(data: bytes, refused: bool) -> None:
    expectation: Any = pytest.raises(ImageError) if refused else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(OSError):
            Image.open(io.BytesIO(data)).convert("RGB")
        assert caught, "Pillow does not warn of this file: it proves nothing"
        caught.clear()
        before = state_of_others()
        with expectation:
            preprocess_image(data)
        with expectation:
            preprocess_batch([data] * 8, threads=4)
        assert not caught
        assert state_of_others() == before


class WarningStream(io.BytesIO):
    """A stream that warns as it is read, and starts a `catch_warnings` that the test ends."""

    began: warnings.catch_warnings[None] | None = None

    def read(self, *size: Any) -> bytes:
        warnings.warn("of another module", stacklevel=1)
        if self.began is None:
            self.began = warnings.catch_warnings()
            self.began.__enter__()
        return super().read(*size)


def test_warnings_of_others_pass_and_their_filters_stay() -> None:
    stream = WarningStream(encoded(noise(32, 32), "PNG"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = state_of_others()
        preprocess_image(stream)
        assert state_of_others() == before
        assert stream.began is not None
        stream.began.__exit__(None, None, None)
        assert state_of_others() == before
    assert {str(w.message) for w in caught} == {"of another module"}


# -- The configuration -----------------------------------------------------------------------


def test_json_round_trip_holds_four_keys() -> None:
    config = Preprocess(resize=40, center_crop=32, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    data = json.loads(json.dumps(config.to_json()))
    assert data == {
        "resize": 40,
        "center_crop": 32,
        "mean": [0.1, 0.2, 0.3],
        "std": [1.0, 2.0, 3.0],
    }
    assert Preprocess.from_json(data) == config
    assert hash(Preprocess.from_json(data)) == hash(config)


def test_json_with_wrong_keys() -> None:
    data = Preprocess().to_json()
    with pytest.raises(UsageError, match="unknown key of preprocess 'crop'") as caught:
        Preprocess.from_json({**data, "crop": 224})
    assert "known: center_crop, interpolation, mean, resize, std" in str(caught.value)
    del data["mean"], data["std"]
    with pytest.raises(UsageError, match=r"^preprocess: no value for mean, std; all four are nee"):
        Preprocess.from_json(data)
    with pytest.raises(UsageError, match=r"^preprocess: expected a JSON object, got \[\]$"):
        Preprocess.from_json([])


@pytest.mark.parametrize(
    ("side", "resize"), [(1, 1), (7, 8), (32, 37), (96, 110), (224, 256), (299, 342), (1792, 2048)]
)
def test_resize_for_an_image_size(side: int, resize: int) -> None:
    assert Preprocess.for_image_size(side) == Preprocess(resize=resize, center_crop=side)


def test_image_sizes_that_make_no_preprocessing() -> None:
    for wrong in (0, -32, 32.0, True, "32", 10**400):
        with pytest.raises(UsageError, match="preprocess: image size must be an integer of at le"):
            Preprocess.for_image_size(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resize": 0}, "resize must be an integer"),
        ({"resize": 256.0}, "resize must be an integer"),
        ({"resize": 9460}, "resize must be an integer"),
        ({"center_crop": -1}, "center_crop must be an integer"),
        ({"center_crop": True}, "center_crop must be an integer"),
        ({"center_crop": 257}, "a center_crop of 257 does not fit a resize of 256"),
        ({"mean": (0.5, 0.5)}, "mean must be three numbers"),
        ({"mean": 0.5}, "mean must be three numbers"),
        ({"mean": "abc"}, "mean must be three numbers"),
        ({"mean": (0.5, True, 0.5)}, "mean must be three numbers"),
        ({"mean": (10**400, 0, 0)}, "mean holds a number that no float can hold"),
        ({"mean": (0.5, float("nan"), 0.5)}, "must be finite in float32"),
        ({"mean": (1e39, 0.5, 0.5)}, "must be finite in float32"),
        ({"std": (0.2, 0.2, 0.0)}, "must be finite in float32 and std > 0"),
        ({"std": (0.2, 0.2, 1e-50)}, "must be finite in float32 and std > 0"),
        ({"std": (0.2, 0.2, 1e-44)}, "must be finite in float32 and std > 0"),
        ({"std": (-0.2, 0.2, 0.2)}, "must be finite in float32 and std > 0"),
        ({"std": (float("inf"), 0.2, 0.2)}, "must be finite in float32 and std > 0"),
    ],
)
def test_values_that_make_no_preprocessing(values: dict[str, Any], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError, match=f"^preprocess: .*{message}"):
            Preprocess(**values)
