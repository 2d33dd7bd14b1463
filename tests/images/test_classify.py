"""Classification: probabilities, names, batches, bad images, and photographs."""

from __future__ import annotations

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from r18.backend import Array, CompileOptions, Program
from r18.backend.registry import load_backend
from r18.errors import ImageError, R18Error, UsageError
from r18.graph.resnet import tiny
from r18.images.classify import classify, even_batch, softmax
from r18.images.labels import class_name, class_names
from r18.images.preprocess import Preprocess
from r18.weights import load_weights
from r18_oracle.search.worker import THREAD_VARIABLES
from support import output_of, random_weights

SMALL = Preprocess.for_image_size(32)


def photo(seed: int, size: tuple[int, int] = (48, 40)) -> bytes:
    """A PNG of coarse coloured noise: images that a network tells apart."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8), "RGB")
    stream = BytesIO()
    coarse.resize(size, Image.Resampling.BICUBIC).save(stream, "PNG")
    return stream.getvalue()


PHOTOS = [photo(seed) for seed in range(7)]


def compiled(backend: str, batch: int = 2, **options: object) -> Program:
    network = tiny()
    weights = load_weights("synthetic", network)
    return load_backend(backend).compile(
        network,
        weights,
        CompileOptions(batch=batch, **options),  # type: ignore[arg-type]
    )


# -- names -------------------------------------------------------------------------------------


def test_class_names_are_those_of_torchvision() -> None:
    from torchvision.models import ResNet18_Weights

    assert list(class_names()) == ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    assert len(set(class_names())) == 1000


def test_only_networks_of_1000_classes_have_names() -> None:
    assert class_name(207, 1000) == "golden retriever"
    assert class_name(7, 10) is None


# -- arithmetic --------------------------------------------------------------------------------


def test_softmax_is_in_float64_and_does_not_overflow() -> None:
    logits = np.array([[0, 1, 2], [1e4, 1e4, -1e4], [-3e38, 0, 3e38]], np.float32)
    found = softmax(logits)
    powers = np.exp([0.0, 1.0, 2.0])
    assert found.dtype == np.float64
    np.testing.assert_allclose(found[0], powers / powers.sum(), rtol=1e-15)
    np.testing.assert_array_equal(found[1:], [[0.5, 0.5, 0], [0, 0, 1]])


@given(st.integers(1, 500), st.integers(1, 64))
def test_even_batches_are_as_few_as_can_be_with_the_least_padding(images: int, limit: int) -> None:
    batch = even_batch(images, limit)
    assert 1 <= batch <= min(limit, images)
    batches = -(-images // batch)
    assert batches == -(-images // limit)
    assert batch * batches - images < batches


def test_even_batches_of_nothing_are_refused() -> None:
    for counts in ((0, 8), (8, 0)):
        with pytest.raises(UsageError, match="at least 1"):
            even_batch(*counts)


# -- classify ----------------------------------------------------------------------------------


def test_classifications_are_in_order_and_their_classes_by_probability() -> None:
    found = classify(compiled("numpy"), PHOTOS, SMALL, top=10)
    assert [result.source for result in found] == PHOTOS
    for result in found:
        probabilities = [guess.probability for guess in result.top]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, abs=1e-12)
        assert {guess.index for guess in result.top} == set(range(10))
        assert {guess.name for guess in result.top} == {None}
    assert len({result.top for result in found}) == len(PHOTOS)


@pytest.mark.parametrize("backend", ["numba-cpu", "r18_torch:cpu"])
def test_backends_agree(backend: str) -> None:
    ours = classify(compiled("numpy"), PHOTOS, SMALL, top=10)
    theirs = classify(compiled(backend), PHOTOS, SMALL, top=10)
    for a, b in zip(ours, theirs, strict=True):
        p, q = ({guess.index: guess.probability for guess in r.top} for r in (a, b))
        np.testing.assert_allclose([p[i] for i in range(10)], [q[i] for i in range(10)], atol=1e-5)
        assert a.top[0].index == b.top[0].index


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 8])
def test_the_batch_size_and_padding_change_nothing(batch: int) -> None:
    seen: list[int] = []
    alone = classify(compiled("numpy", 1, precision="fp64"), PHOTOS, SMALL)
    found = classify(
        compiled("numpy", batch, precision="fp64"), PHOTOS, SMALL, on_batch=seen.append
    )
    assert seen == [min(len(PHOTOS), done) for done in range(batch, len(PHOTOS) + batch, batch)]
    for a, b in zip(alone, found, strict=True):
        assert [guess.index for guess in a.top] == [guess.index for guess in b.top]
        for one, other in zip(a.top, b.top, strict=True):
            assert one.probability == pytest.approx(other.probability, rel=1e-10)


def test_padding_is_dropped_and_does_not_leak() -> None:
    program = compiled("numpy", 4)
    full = classify(program, PHOTOS[:4], SMALL)
    assert classify(program, PHOTOS[:3], SMALL) == full[:3]


def test_equal_probabilities_go_to_the_lower_index() -> None:
    network = tiny()
    weights = dict(load_weights("synthetic", network))
    weights["fc.weight"] = np.zeros_like(weights["fc.weight"])
    weights["fc.bias"] = np.array([0, 2, 1, 2, 0, 1, 2, 0, 0, 0], np.float32)
    program = load_backend("numpy").compile(network, weights, CompileOptions())
    (found,) = classify(program, PHOTOS[:1], SMALL, top=6)
    assert [guess.index for guess in found.top] == [1, 3, 6, 2, 5, 0]


def test_a_network_that_ends_in_softmax_is_not_softmaxed_twice() -> None:
    network = tiny(softmax=True)
    program = load_backend("numpy").compile(
        network, load_weights("synthetic", tiny()), CompileOptions()
    )
    plain = classify(compiled("numpy", 1), PHOTOS[:1], SMALL)[0]
    found = classify(program, PHOTOS[:1], SMALL)[0]
    for one, other in zip(plain.top, found.top, strict=True):
        assert one.index == other.index
        assert one.probability == pytest.approx(other.probability, rel=1e-5)


def test_a_bad_image_is_an_error_that_names_it(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image at all")
    with pytest.raises(ImageError, match=r"sources\[4\].*bad\.jpg"):
        classify(compiled("numpy"), [*PHOTOS[:4], bad], SMALL)


def test_no_images_no_results() -> None:
    assert classify(compiled("numpy"), [], SMALL) == []


@pytest.mark.parametrize("top", [0, 11])
def test_top_is_checked(top: int) -> None:
    with pytest.raises(UsageError, match=f"from 1 to the network's 10 classes, got {top}"):
        classify(compiled("numpy"), PHOTOS, SMALL, top=top)


def test_preprocessing_must_be_of_the_size_of_the_network() -> None:
    with pytest.raises(UsageError, match=r"\(3, 224, 224\).*'tiny' takes \(3, 32, 32\)"):
        classify(compiled("numpy"), PHOTOS, Preprocess())


def test_logits_that_are_not_finite_are_an_error_that_names_the_image() -> None:
    network = tiny()
    weights = random_weights(network)
    program = load_backend("numpy").compile(network, weights, CompileOptions(batch=2))

    class Overflowing:
        plan = program.plan

        def __call__(self, images: Array) -> Array:
            output = program(images)
            output[1, 3] = np.inf
            return output

    with pytest.raises(R18Error, match=r"images\[1\]: 1 of 10 logits are not finite in fp32"):
        classify(Overflowing(), PHOTOS, SMALL)  # type: ignore[arg-type]


# -- photographs -------------------------------------------------------------------------------


def test_photographs_have_their_labels_on_every_cpu_backend(shared: Path) -> None:
    """The command labels photographs right, in one process a backend, so threads do not wait. One
    photograph in twenty; the record of `r18 evaluate` has all of them."""
    with (shared / "photos" / "labels.csv").open(newline="") as stream:
        labels = {row["file"]: int(row["class_index"]) for row in csv.DictReader(stream)}
    assert len(labels) == 500
    labels = dict(list(labels.items())[::20])
    files = [str(shared / "photos" / file) for file in labels]
    weights = str(shared / "weights" / "resnet18-photos1000.pth")
    argv = ["r18", "classify", *files, "--weights", weights, "--batch", "25", "--top", "1"]
    code = f"import sys; sys.argv = {[*argv, '--json']!r}; from r18.cli import main; main()"
    alone = dict.fromkeys(THREAD_VARIABLES, "1")
    with ThreadPoolExecutor() as pool:
        runs = pool.map(
            lambda backend: output_of(code, env=alone | {"R18_BACKEND": backend}),
            ("numpy", "numba-cpu", "r18_torch:cpu"),
        )
    found = [[image["top"][0] for image in json.loads(run)["images"]] for run in runs]
    for guesses in found:
        assert [guess["index"] for guess in guesses] == list(labels.values())
    ours, *others = ([guess["probability"] for guess in guesses] for guesses in found)
    for theirs in others:
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
