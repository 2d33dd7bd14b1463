"""The pytest plugin: options, and the kernels of the chosen backend as parameters.

Registered under the entry-point group `pytest11`, so it is loaded in every pytest run: it imports
nothing heavy before a test asks for it.

    pytest --pyargs r18_oracle.conformance --r18-backend NAME

runs the conformance suite on one backend. Expected failures are strict, and each needs a reason
and a link: `--r18-xfails FILE`, a TOML file of

    [[xfail]]
    test = "test_kernel[mine/conv2d/*]"
    reason = "subnormals are flushed"
    link = "https://example.org/issues/7"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from r18_oracle.worker import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("r18", "r18: differential tests of backends")
    group.addoption(
        "--r18-backend",
        action="append",
        metavar="NAME",
        help="backend under test: a name or module:attr; repeat it for several "
        "[R18_BACKEND, or every backend that can run here]",
    )
    group.addoption(
        "--r18-profile",
        default="quick",
        metavar="NAME",
        help="how long to look: quick, ci, thorough or nightly [quick]",
    )
    group.addoption(
        "--r18-kernels", default="*", metavar="GLOB", help="only kernels of these ids [*]"
    )
    group.addoption(
        "--r18-seed", type=int, default=0, metavar="N", help="seed of problems and inputs [0]"
    )
    group.addoption(
        "--r18-network",
        default="resnet18",
        metavar="NAME",
        help="the network whose problems are always included [resnet18]",
    )
    group.addoption(
        "--r18-xfails", type=Path, metavar="FILE", help="TOML file of strict expected failures"
    )


def chosen(config: pytest.Config) -> list[str]:
    """The names of the backends under test: options, then `R18_BACKEND`, then all that run here."""
    from r18.registry import VARIABLE, available, get_backend

    names: list[str] = config.getoption("--r18-backend") or []
    if not names and os.environ.get(VARIABLE):
        names = [os.environ[VARIABLE]]
    if not names or names == ["all"]:
        return [backend.name for backend in available()]
    for name in names:
        get_backend(name)  # an explicit choice never falls back: this raises with the cause
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise over backends, their kernels, or their precisions, for who asks for them."""
    wanted = {"r18_backend_name", "r18_kernel", "r18_precision"} & set(metafunc.fixturenames)
    if not wanted:
        return
    from r18.errors import R18Error
    from r18.registry import load_backend

    try:
        names = chosen(metafunc.config)
    except R18Error as error:
        raise pytest.UsageError(str(error)) from None
    if "r18_backend_name" in wanted:
        metafunc.parametrize("r18_backend_name", names, scope="session")
        return
    glob = metafunc.config.getoption("--r18-kernels")
    pairs: list[tuple[str, str]] = []
    for name in names:
        kernels = load_backend(name).kernels()
        if "r18_kernel" in wanted:
            pairs += [(name, k.id) for k in kernels if fnmatchcase(k.id, glob)]
        else:
            pairs += [(name, p) for p in dict.fromkeys(k.precision.name for k in kernels)]
    ids = [second if "r18_kernel" in wanted else f"{name}/{second}" for name, second in pairs]
    metafunc.parametrize(wanted.pop(), pairs, ids=ids)


@pytest.fixture(scope="session")
def r18_pool() -> Iterator[Pool]:
    """One worker process for the session, replaced when a kernel takes it down."""
    from r18_oracle.worker import Pool

    with Pool(workers=1) as pool:
        yield pool


# -- strict expected failures ------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path: Path | None = config.getoption("--r18-xfails")
    if path is None:
        return
    for entry in _expected_failures(path):
        mark = pytest.mark.xfail(reason=f"{entry['reason']} ({entry['link']})", strict=True)
        hits = [item for item in items if fnmatchcase(_literal(item.name), _literal(entry["test"]))]
        if not hits:
            raise pytest.UsageError(f"{path}: no test matches '{entry['test']}'")
        for item in hits:
            item.add_marker(mark)


def _literal(name: str) -> str:
    """pytest's brackets are no character class."""
    return name.replace("[", "<").replace("]", ">")


def _expected_failures(path: Path) -> list[dict[str, Any]]:
    try:
        entries = tomllib.loads(path.read_text("utf-8")).get("xfail", [])
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"cannot read --r18-xfails {path}: {error}") from None
    for entry in entries:
        missing = {"test", "reason", "link"} - set(entry)
        if missing:
            raise pytest.UsageError(f"{path}: an [[xfail]] lacks {', '.join(sorted(missing))}")
    return list(entries)
