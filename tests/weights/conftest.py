"""Weights of the tiny network, and an export of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from r18.graph.resnet import tiny
from r18.weights import Weights, load_weights
from r18.weights.manifest import write_manifest


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_weights("synthetic", tiny())


@pytest.fixture(scope="module")
def pristine(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export; tests leave it as it was."""
    folder = tmp_path_factory.mktemp("pristine") / "fp32"
    write_manifest(folder, weights, tiny())
    return folder
