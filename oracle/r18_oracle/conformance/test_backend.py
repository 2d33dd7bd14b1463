"""The backend itself: its description, its memory and its streams."""

from __future__ import annotations

import numpy as np
import pytest

from r18.backend import Backend, DeviceInfo
from r18.backend.registry import load_backend
from r18.graph.resnet import network
from r18_oracle.generate.problems import schedule_problems
from r18_oracle.judge.declared import objection, repeated
from r18_oracle.search.coverage import coverage_findings


@pytest.fixture(scope="module")
def backend(r18_backend_name: str) -> Backend:
    return load_backend(r18_backend_name)


def test_probe_says_what_it_runs_on(backend: Backend) -> None:
    device = backend.probe()
    assert isinstance(device, DeviceInfo)
    assert device.kind in ("cpu", "cuda")
    assert device.name.strip()


def test_kernels_describe_themselves(backend: Backend) -> None:
    """Every field that the planner and the oracle decide by, on every kernel."""
    kernels = backend.kernels()
    assert kernels, "a backend without kernels computes nothing"
    for kernel in kernels:
        reason = objection(kernel)
        assert reason is None, f"{getattr(kernel, 'id', kernel)}: {reason}"


def test_kernel_ids_are_unique_and_stable(backend: Backend) -> None:
    ids = [kernel.id for kernel in backend.kernels()]
    assert repeated(backend.kernels()) == []
    assert [kernel.id for kernel in backend.kernels()] == ids


def test_variants_are_their_kernel_with_another_part_to_the_id(
    backend: Backend, pytestconfig: pytest.Config
) -> None:
    """A backend without variants passes trivially."""
    problems = schedule_problems(network(pytestconfig.getoption("--r18-network")), (1,))
    listed = {kernel.id for kernel in backend.kernels()}
    for kernel in backend.kernels():
        found = backend.variants(kernel)
        ids = [one.id for one in found]
        assert len(set(ids)) == len(ids), ids
        assert not listed.intersection(ids), "a variant is listed as a kernel too"
        assert all(a is b for a, b in zip(found, backend.variants(kernel), strict=True))
        for one in found:
            assert one.id.rpartition("/")[0] == kernel.id, one.id
            assert one.variant_of == kernel.id, one.id
            for name in ("op", "precision", "layout", "contract"):
                assert getattr(one, name) == getattr(kernel, name), f"{one.id}: {name}"
        for problem in problems if found else ():
            if kernel.refusal(problem) is None:
                chosen = backend.variant(kernel, problem)
                assert chosen is not None, f"{kernel.id} takes {problem} and chooses nothing"
                assert chosen.id in ids or chosen.id in listed, chosen.id
                assert chosen.layout is kernel.layout, chosen.id
                assert chosen.refusal(problem) is None, f"{chosen.id} refuses {problem}"


def test_every_problem_of_the_network_has_a_kernel(
    backend: Backend, r18_backend_name: str, pytestconfig: pytest.Config
) -> None:
    name = pytestconfig.getoption("--r18-network")
    missing = coverage_findings(r18_backend_name, backend, name, (1, 2), 0)
    assert missing == [], "\n".join(finding.describe() for finding in missing)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 255, 4096, 100_003])
def test_memory_brings_back_what_it_was_given(backend: Backend, nbytes: int) -> None:
    memory = backend.memory
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffer = memory.empty(nbytes)
    assert buffer.nbytes == nbytes
    memory.upload(data, buffer)
    assert np.array_equal(memory.download(buffer, (nbytes,), np.dtype(np.uint8)), data)


def test_a_view_shares_its_bytes_and_no_others(backend: Backend) -> None:
    memory = backend.memory
    step = memory.alignment
    buffer = memory.empty(3 * step)
    memory.fill(buffer, 0x11)
    memory.fill(buffer.view(step, step), 0x22)
    seen = memory.download(buffer, (3 * step,), np.dtype(np.uint8))
    assert np.array_equal(seen, np.repeat(np.array([0x11, 0x22, 0x11], np.uint8), step))


def test_a_download_is_a_copy(backend: Backend) -> None:
    memory = backend.memory
    buffer = memory.empty(64)
    memory.fill(buffer, 1)
    before = memory.download(buffer, (64,), np.dtype(np.uint8))
    memory.fill(buffer, 2)
    assert np.array_equal(before, np.ones(64, np.uint8))


def test_events_do_not_run_backwards(backend: Backend) -> None:
    stream = backend.stream()
    first = stream.record()
    second = stream.record()
    stream.synchronize()
    assert second.milliseconds_since(first) >= 0
