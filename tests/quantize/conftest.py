"""A folder of small photographs, and quantisations made with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve pictures of coloured patches."""
    made = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for index in range(12):
        patches = rng.integers(0, 256, (5, 5, 3)).astype(np.uint8)
        Image.fromarray(patches, "RGB").resize((48, 40), Image.Resampling.BILINEAR).save(
            made / f"{index:02}.png"
        )
    return made
