"""Cheats that change how they are judged: memory, the judge's tools, or their declarations."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from faults.cheat import RELU, Arrays, Cheat, after, always, cheat, of_class
from faults.conv import CONV, linear
from faults.fault import kernel
from r18.backend import Array, Buffer, Kernel, RoundingContract, Stream
from r18.backend.host import HostFunction, HostKernel, host
from r18.graph.ops import Conv2d, Linear, Problem, ReLU
from r18.graph.precision import Precision
from r18.machine import set_blas_threads
from r18_oracle.check import checks
from r18_oracle.check.watch import round_to
from r18_oracle.ops import table

# -- memory that is not its own ----------------------------------------------------------------


def _writes_far(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    RELU(op, inputs, weights, out, workspace)
    ctypes.memset(out.ctypes.data + out.nbytes + 5000, 0, 1)


def _changes_its_problem(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """Leaves out the ReLU, and removes it from the problem too."""
    object.__setattr__(op, "relu", False)
    CONV(op, inputs, weights, out, workspace)


class _SwapsItsBuffer(HostKernel):
    """Computes into its own array and puts that in place of the output's buffer."""

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        host(output).array = host(output).array.copy()
        super().enqueue(problem, inputs, weights, output, workspace, stream)


class _ChangesGivenWeights(HostKernel):
    """Zeros the weights that it prepares."""

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        prepared = super().prepare(problem, weights)
        for array in weights:
            array.fill(0)
        return prepared


_FOREIGN = (
    cheat(ReLU, "writes_far", "writes 5000 bytes too far", "guard_zones", always(_writes_far)),
    cheat(
        Conv2d,
        "changes_its_problem",
        "changes the problem that it is judged by",
        "inputs_unchanged",
        always(_changes_its_problem),
    ),
    cheat(
        ReLU,
        "swaps_its_buffer",
        "puts another array in place of its output",
        "full_write",
        always(RELU),
        of_class(_SwapsItsBuffer),
    ),
    cheat(
        Linear,
        "changes_given_weights",
        "zeros the caller's weights once it has prepared them",
        "inputs_unchanged",
        always(linear),
        of_class(_ChangesGivenWeights),
    ),
)  # fmt: skip


# -- the judge's tools -------------------------------------------------------------------------


def _replaces(owner: Any, name: Any) -> Callable[[], HostFunction]:
    """Replaces a function by one that does nothing."""

    def deed() -> None:
        if isinstance(owner, dict):
            owner[name] = lambda *_, **__: None
        else:
            setattr(owner, name, lambda *_, **__: None)

    return after(deed)


class _Raises(HostKernel):
    """Has NumPy raise errors, outside the `errstate` in which a host kernel runs."""

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        super().enqueue(problem, inputs, weights, output, workspace, stream)
        np.seterr(all="raise")


def _one_blas_thread_more() -> None:
    for library in ThreadpoolController().select(user_api="blas").lib_controllers:
        set_blas_threads(library, library.get_num_threads() + 1)


_UPWARD = 0x400000 if platform.machine() in ("aarch64", "arm64") else 0x800  # FE_UPWARD

_TOOLS = (
    cheat(
        ReLU,
        "replaces_the_judge",
        "puts another judge in place of the oracle's",
        "global_state",
        _replaces(checks, "judge"),
    ),
    cheat(
        ReLU,
        "replaces_a_reference",
        "puts another spec in the oracle's table",
        "global_state",
        _replaces(table.SPECS, ReLU),
    ),
    cheat(
        ReLU,
        "replaces_a_method",
        "puts another reference in an op's spec",
        "global_state",
        _replaces(table.SPECS[ReLU], "reference"),
    ),
    cheat(
        ReLU,
        "replaces_a_check",
        "puts another method in place of a check",
        "global_state",
        _replaces(checks.Examination, "_judge"),
    ),
    cheat(
        ReLU, "replaces_numpys", "puts another isfinite into NumPy", "global_state",
        _replaces(np, "isfinite"),
    ),
    cheat(
        ReLU, "replaces_pytorchs", "puts another relu into PyTorch", "global_state",
        _replaces(torch.nn.functional, "relu"),
    ),
    cheat(
        ReLU,
        "raises_on_overflow",
        "leaves NumPy raising on overflow",
        "global_state",
        always(RELU),
        of_class(_Raises),
    ),
    cheat(
        ReLU,
        "rounds_upward",
        "leaves the processor rounding upward",
        "global_state",
        after(lambda: round_to(_UPWARD)),
    ),
    cheat(
        ReLU,
        "switches_subnormals_off",
        "leaves the processor without subnormal numbers, as some libraries do",
        "global_state",
        after(lambda: torch.set_flush_denormal(True)),
    ),
    cheat(
        ReLU,
        "rethreads_blas",
        "leaves BLAS with one thread more than it had",
        "global_state",
        after(_one_blas_thread_more),
    ),
)  # fmt: skip


# -- words -------------------------------------------------------------------------------------


def _says(name: str, trick: str, **options: Any) -> Cheat:
    """A right convolution, in which only a declaration is wrong."""
    return cheat(Conv2d, name, trick, "declaration", always(CONV), **options)


class _ChangesItsName(HostKernel):
    """A kernel that has another name after it has run."""

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        super().enqueue(problem, inputs, weights, output, workspace, stream)
        object.__setattr__(self, "algorithm", "another")


def _now_and_then() -> Callable[[Problem], str | None]:
    return lambda problem: "not now" if time.monotonic_ns() // 100 % 2 else None


def _refuses_once_run() -> Kernel:
    ran: list[None] = []
    return kernel(
        "cheat",
        ReLU,
        "refuses_once_run",
        after(lambda: ran.append(None))(),
        refuses=lambda problem: "enough" if ran else None,
    )


def _raiser(error: Callable[[], BaseException]) -> Callable[[], HostFunction]:
    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        raise error()

    return lambda: run


_LOOSE = RoundingContract("sum", "float16", "float32")
_WORDS = (
    _says("loose_contract", "declares float16 sums for a loose bound", contract=_LOOSE),
    _says(
        "precision_of_its_own",
        "brings a float32 precision that accumulates in float16",
        precision=Precision("fp32", "float32", "float32", "float16"),
        contract=_LOOSE,
    ),
    _says(
        "cuts_off",
        "declares that float32 sums are cut off, for a looser bound",
        contract=RoundingContract("sum", "float32", "float32", truncates=True),
    ),
    _says(
        "unknown_algorithm",
        "declares an algorithm that has no bound",
        contract=RoundingContract("magic", "float32", "float32"),
    ),
    _says(
        "algorithm_of_another_op",
        "declares the contract of a softmax",
        contract=RoundingContract("softmax", "float32", "float32"),
    ),
    cheat(
        ReLU,
        "changes_its_name",
        "is another kernel once it has run",
        "declaration",
        always(RELU),
        of_class(_ChangesItsName),
    ),
    cheat(
        ReLU,
        "refuses_by_the_clock",
        "refuses a problem or takes it, as the clock has it",
        "refusal",
        always(RELU),
        refuses=_now_and_then(),
    ),
    Cheat("refuses_once_run", "takes one problem and none after", ("refusal",), _refuses_once_run),
    cheat(ReLU, "exits", "ends the run, without an error", "runs", _raiser(SystemExit)),
    cheat(
        ReLU,
        "rejects_its_example",
        "tells Hypothesis that the example does not count",
        "runs",
        _raiser(hypothesis.errors.UnsatisfiedAssumption),
    ),
)  # fmt: skip

TAMPERING: tuple[Cheat, ...] = (*_FOREIGN, *_TOOLS, *_WORDS)
