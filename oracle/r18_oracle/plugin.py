"""The pytest plugin: options, and the kernels of the chosen backend as parameters.

Every pytest run loads it, by the entry-point group `pytest11`, so it imports nothing heavy before a
test needs it.

    pytest --pyargs r18_oracle.conformance --r18-backend NAME

runs the conformance suite on one backend. Expected failures are strict, and each needs a reason
and a link. They are in a TOML file, `--r18-xfails FILE`; see `r18_oracle.xfails`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from r18_oracle.search.worker import Pool

pytest.register_assert_rewrite("r18_oracle.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("r18", "r18: differential tests of backends")
    group.addoption(
        "--r18-backend",
        action="append",
        metavar="NAME",
        help="backend under test: a name or module:attr; repeat it for several "
        "[R18_BACKEND, or every backend that can run here, except simulators]",
    )
    group.addoption(
        "--r18-profile",
        default="quick",
        metavar="NAME",
        help="effort: brief, quick, ci, thorough or nightly [quick]",
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


WRONG = pytest.StashKey[str]()
"""The error in the request; collection ends with it as a usage error."""
CHOSEN = pytest.StashKey[list[str]]()


def chosen(config: pytest.Config) -> list[str]:
    """The names of the backends under test: options, then `R18_BACKEND`, then all that run here.

    The last excludes simulators, for which the suite is too slow.

    An explicit choice never falls back: raises `UnknownName` or `BackendUnavailable`.
    """
    from r18.backend.registry import VARIABLE, available, get_backend

    if CHOSEN not in config.stash:
        asked = config.getoption("--r18-backend") or os.environ.get(VARIABLE, "").split(",")
        names = list(dict.fromkeys(name.strip() for name in asked if name.strip()))
        if not names or names == ["all"]:
            found = [b for b in available() if not b.probe().simulated]
            names = [backend.name for backend in found]
        else:
            probed = {name: get_backend(name) for name in names}
            names = [b.name if name == "auto" else name for name, b in probed.items()]
        config.stash[CHOSEN] = names
    return config.stash[CHOSEN]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests over the backends, kernels or precisions whose fixtures they request."""
    wanted = {"r18_backend_name", "r18_kernel", "r18_precision"} & set(metafunc.fixturenames)
    if not wanted:
        return
    from r18.errors import R18Error

    for fixture in sorted(wanted):
        values: dict[str, Any] = {}
        try:
            values = _parameters(fixture, metafunc.config)
        except R18Error as error:
            metafunc.config.stash[WRONG] = str(error)
        metafunc.parametrize(
            fixture,
            list(values.values()),
            ids=list(values),
            scope="session" if fixture == "r18_backend_name" else None,
        )


def _parameters(fixture: str, config: pytest.Config) -> dict[str, Any]:
    """The values of a fixture by their ids; raises `R18Error` for a wrong request.

    An empty selection is one, since the suite would pass without a test.
    """
    from r18.backend.registry import get_backend
    from r18.errors import UsageError, unknown_kernel
    from r18.graph.resnet import network
    from r18_oracle.search.profiles import profile

    profile(config.getoption("--r18-profile"))
    network(config.getoption("--r18-network"))
    names = chosen(config)
    if not names:
        raise UsageError("no backend can run here; `r18 backends` says why")
    if fixture == "r18_backend_name":
        return dict(zip(names, names, strict=True))
    # A probed backend lists what its device runs, and no more.
    offered = [(name, kernel) for name in names for kernel in get_backend(name).kernels()]
    if fixture == "r18_precision":
        return {f"{name}/{k.precision.name}": (name, k.precision.name) for name, k in offered}
    glob = config.getoption("--r18-kernels")
    shared = len({kernel.id for _, kernel in offered}) < len(offered)  # one class, two devices
    selected = {
        f"{name}:{kernel.id}" if shared else kernel.id: (name, kernel.id)
        for name, kernel in offered
        if fnmatchcase(kernel.id, glob)
    }
    if not selected:
        raise unknown_kernel(glob, [k.id for _, k in offered])
    return selected


@pytest.fixture(scope="session")
def r18_pool() -> Iterator[Pool]:
    """One worker process for the session, replaced when a kernel takes it down."""
    from r18_oracle.search.worker import Pool

    with Pool(workers=1) as pool:
        yield pool


# -- strict expected failures ------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WRONG in config.stash:
        raise pytest.UsageError(config.stash[WRONG])
    path: Path | None = config.getoption("--r18-xfails")
    if path is None:
        return
    from r18.errors import UsageError
    from r18_oracle.xfails import load_expected

    try:
        entries = load_expected(path)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    for entry in entries:
        mark = pytest.mark.xfail(reason=str(entry), strict=True)
        hits = [item for item in items if entry.matches(item.name)]
        if not hits and config.getoption("--r18-kernels") == "*":
            raise pytest.UsageError(f"{path}: no test matches '{entry.test}'")
        for item in hits:
            item.add_marker(mark)
