"""The public API: what `import r18` offers."""

from __future__ import annotations

import numpy as np
import pytest

import r18
from r18.errors import UnknownName
from r18.graph.resnet import tiny
from support import output_of


def test_every_public_name_is_there() -> None:
    assert set(r18.__all__) <= set(dir(r18))
    for name in r18.__all__:
        assert callable(getattr(r18, name))
    with pytest.raises(AttributeError, match="has no attribute 'resnet19'"):
        r18.resnet19  # noqa: B018


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys, r18; print(sorted(n for n in sys.modules if n.startswith(('r18', 'numpy'))))"
    )
    assert output_of(code) == "['r18']"


def test_a_network_is_compiled_by_names() -> None:
    program = r18.compile("tiny", "synthetic:3", "numpy", batch=2)
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32), dtype=np.float32)
    schedule = tiny()
    backend = r18.get_backend("numpy")
    weights = r18.load_weights("synthetic:3", schedule)
    same = backend.compile(schedule, weights, r18.CompileOptions(batch=2))
    np.testing.assert_array_equal(program(images), same(images))


def test_names_that_are_not_known_are_errors() -> None:
    with pytest.raises(UnknownName, match="resnet18"):
        r18.compile("resnet19", "synthetic", "numpy")
    with pytest.raises(UnknownName, match="numpy"):
        r18.compile("tiny", "synthetic", "nunpy")
