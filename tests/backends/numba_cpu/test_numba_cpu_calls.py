"""Captured calls: a program runs them without finding their arguments again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quantised_weights import quantised_weights
from r18.backend import CompileOptions, Kernel
from r18.graph.ops import Layout, Problem, Relayout, Softmax
from r18.graph.quantized import QuantizedRelayout
from r18.graph.resnet import tiny
from r18.runtime.launch import launch_on
from r18.weights import load_weights
from r18.weights.precisions import in_precision
from r18_numba_cpu import Backend, compiled
from r18_numba_cpu.compiled import CallStream
from r18_oracle.generate.crossings import crossings
from r18_oracle.generate.inputs import kinds_for, make_case
from r18_oracle.ops.normalize import normalization
from support import images


def backend() -> Backend:
    found = Backend()
    found.probe()
    return found


KERNELS = {kernel.id: kernel for kernel in backend().kernels()}


IMAGES = ((2, 3, 5, 4),)
OTHERS = {
    "softmax": Problem(Softmax(), ((3, 17),)),
    "normalize": Problem(normalization(3), IMAGES),
    "relayout": Problem(Relayout(Layout.NHWC, Layout.NHWC), IMAGES),
    "qrelayout": Problem(QuantizedRelayout(Layout.NHWC, Layout.NHWC, stored="int8"), IMAGES),
}
"""Problems of ops whose kernels have no edges to cross."""


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_all_that_a_kernel_does_is_captured(kernel: Kernel) -> None:
    """A captured call repeats all of a kernel's work, also for inputs that changed since."""
    problem = OTHERS.get(kernel.op.name) or crossings(kernel, 1 << 14, 1 << 20)[0]
    kind = "normal" if "normal" in kinds_for(kernel, problem) else kinds_for(kernel, problem)[0]
    first, second = (make_case(kernel, problem, kind, seed, 0) for seed in (1, 2))
    here, stream = backend(), CallStream()
    launch = launch_on(here, kernel, problem, *first.inputs, *first.weights)
    other = launch_on(here, kernel, problem, *second.inputs, *first.weights)
    other.enqueue(stream)
    run = stream.capture(lambda: launch.enqueue(stream))
    for mine, theirs in zip(launch.inputs, other.inputs, strict=True):
        np.copyto(mine.array, theirs.array)  # type: ignore[attr-defined]
    launch.output.array[...] = 0xA5  # type: ignore[attr-defined]
    run()
    expected, got = other.output.array, launch.output.array  # type: ignore[attr-defined]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_program_gives_the_same_bits_with_and_without(precision: str) -> None:
    weights = quantised_weights() if precision == "int8" else load_weights("synthetic", tiny())
    programs = []
    for graph in (True, False):
        options = CompileOptions(batch=2, precision=precision, graph=graph)
        programs.append(backend().compile(*in_precision(tiny(), weights, options), options))
    for seed in (1, 2):
        x = images(tiny(), 2, seed=seed)
        captured, plain = (program(x) for program in programs)
        np.testing.assert_array_equal(captured, plain)


def test_a_capture_runs_nothing() -> None:
    called: list[int] = []
    run = CallStream().capture(lambda: compiled.run(called.append, 7))
    assert called == []
    run()
    run()
    assert called == [7, 7]


def test_another_number_of_threads_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    called: list[Any] = []

    def work() -> None:
        found.append("arguments")
        compiled.run(called.append, compiled.workers())

    threads = [4]
    monkeypatch.setattr(compiled, "workers", lambda: threads[0])
    run = CallStream().capture(work)
    run()
    run()
    threads[0] = 1
    run()
    run()
    threads[0] = 4
    run()
    assert called == [4, 4, 1, 1, 4]
    assert len(found) == 3


def test_a_call_that_fails_leaves_the_next_run_as_it_was() -> None:
    def fails() -> None:
        raise RuntimeError("in a kernel")

    run = CallStream().capture(lambda: compiled.run(fails))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in a kernel"):
            run()
    assert not compiled._RUNNING.locked()
