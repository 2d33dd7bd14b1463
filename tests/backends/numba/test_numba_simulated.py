"""The oracle on Numba's CUDA backend in its simulator: every kernel and the tiny network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import r18_numba
from commands import r18
from r18.backend.registry import Listing
from r18_numba.catalogue import simulated_kernels
from r18_oracle.search.profiles import PROFILES
from r18_oracle.search.verify import Request, Verification


@pytest.fixture(scope="module")
def backend() -> r18_numba.Backend:
    found = r18_numba.Backend()
    found.probe()
    return found


def test_the_oracle_finds_nothing_on_any_simulated_kernel() -> None:
    """`r18 verify` finds nothing on any simulated kernel, with an eighth of the corners of `brief`,
    since each takes seconds. The nightly run has all of them."""
    brief = replace(PROFILES["brief"], every=8 * PROFILES["brief"].every)
    with patch.dict(PROFILES, brief=brief):
        done = r18("verify", "--backend", "numba", "--profile", "brief", "--json")
    assert done.code == 0, done.out + done.err
    data = json.loads(done.out)
    (found,) = data["backends"]
    assert (found["device"]["name"], found["left_out"]) == ("CUDA simulator (no GPU)", "")
    assert [kernel["kernel"] for kernel in found["kernels"]] == [k.id for k in simulated_kernels()]
    for kernel in found["kernels"]:
        assert (kernel["verdict"], kernel["network_problems"] > 0) == ("ok", True), kernel
        assert kernel["problems"] > kernel["network_problems"]
        assert kernel["checks"]["repeatability"] >= kernel["problems"] - kernel["network_problems"]
    runs = [(run["network"], run["precision"], run["ok"]) for run in found["checkpoints"]]
    assert runs == [("tiny", name, True) for name in ("fp32", "fp16", "int8")]


def test_among_all_backends_a_simulated_one_compares_the_network_alone(
    backend: r18_numba.Backend, tmp_path: Path
) -> None:
    """With all backends, a simulated one only compares the network, and is not recorded."""
    line = Listing("numba", "r18", backend.probe())
    page, junit, records = (tmp_path / name for name in ("page.html", "junit.xml", "records"))
    with patch("r18.runtime.listing.lines", lambda: [line]):
        done = r18(
            *("verify", "--precision", "fp16", "--html", page, "--junit", junit),
            *("--record", "--records", records),
        )
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert lines[0] == (
        "numba: CUDA simulator (no GPU): only the network 'tiny:image_size=24'; "
        "its kernels with --backend numba"
    )
    assert any(line.startswith("tiny on numba in fp16, fusion 'all', ") for line in lines)
    assert any(
        line.startswith("numba: 0 kernels on 0 problems and 1 network in ") for line in lines
    )
    assert lines[-1] == "numba: not recorded: CUDA simulator (no GPU) is simulated"
    assert not records.exists()
    assert "numba/program/all/fp16" in junit.read_text()
    assert "numba" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "searched"),
    [((), False), (("--kernels", "numba/relu/*"), True), (("--backend", "numba"), True)],
)
def test_simulated_kernels_are_searched_when_they_are_asked_for(
    arguments: tuple[str, ...], searched: bool, backend: r18_numba.Backend
) -> None:
    asked: list[Request] = []

    def verify(backends: object, request: Request, **options: object) -> Verification:
        asked.append(request)
        return Verification(request, [])

    line = Listing("numba", "r18", backend.probe())
    with (
        patch("r18.runtime.listing.lines", lambda: [line]),
        patch("r18_oracle.search.verify.verify", verify),
    ):
        r18("verify", *arguments)
    assert [request.simulated_kernels for request in asked] == [searched]
