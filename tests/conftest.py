"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared folder (photographs and trained weights): `R18_SHARED`, or beside the project."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("R18_SHARED") or beside)
    if not folder.is_dir():
        pytest.skip("no shared folder: set R18_SHARED")
    return folder
