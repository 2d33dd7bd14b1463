"""A backend with a kernel that is compiled from a `.cu` file, for mutation runs without a GPU."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from r18.backend import Array, DeviceFunction, DeviceInfo, Resources, RoundingContract
from r18.backend import Backend as BackendBase
from r18.backend.host import HostKernel, HostMemory, HostStream
from r18.errors import R18Error
from r18.graph.ops import Problem, ReLU
from r18.graph.precision import FP32

SOURCE = Path(__file__).parent / "relu.cu"
WAIT = "wait_for_previous_launch();"


def compiled(text: str) -> str:
    """The Python of the line that sets out[i]; `+ 0.0f` costs no instruction.

    Raises `R18Error` for `threadIdx.y`, which does not exist here.
    """
    if "threadIdx.y" in text:
        raise R18Error("relu.cu(3): error: blocks have one dimension")
    found = re.search(r"out(\[.*?\]) = (.*);", text)
    if found is None:
        return "pass"
    return f"out{found[1]} = {found[2].replace('0.0f', '0.0').removesuffix(' + 0.0')}"


def ptx(text: str) -> str:
    """PTX that has only the order of memory accesses from the source."""
    wait = "griddepcontrol.wait;" if WAIT in text else ""
    return f""".entry relu(.param .u64 relu_param_0) {{
        ld.param.u64 %rd1, [relu_param_0];
        {wait}
        ld.global.f32 %f1, [%rd1];
        ret;
    }}"""


def fmaxf(a: Any, b: Any) -> Any:
    return np.where(np.isnan(a) | (a > b), a, b)


def run(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    values = {"x": inputs[0].reshape(-1), "out": out.reshape(-1), "fmaxf": fmaxf}
    values |= {"fminf": np.fmin, "i": np.arange(out.size)}
    exec(compiled(SOURCE.read_text()), values)


class Compiled(HostKernel):
    """A kernel with machine code by which sources can be distinguished."""

    digest = "toy"
    source_files = (SOURCE,)
    targets = ("sm_90",)

    def functions(self, problem: Problem, target: str) -> tuple[DeviceFunction, ...]:
        return (DeviceFunction("relu", "relu", ptx(SOURCE.read_text()), frozenset(), True),)

    def resources(self, target: str) -> dict[str, Resources]:
        self.machine_code(target)
        return {"relu": Resources(8, 0, 0, 0)}

    def machine_code(self, target: str) -> str:
        text = SOURCE.read_text()
        return hashlib.sha256((compiled(text) + ptx(text)).encode()).hexdigest()


class Backend(BackendBase):
    """A backend whose ReLU is right."""

    name = "cuda-toy"
    kernel: type[Compiled] = Compiled

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "a toy", {"compute capability": "9.0"})

    def kernels(self) -> tuple[HostKernel, ...]:
        contract = RoundingContract("exact", "float32", "float32")
        problems = (Problem(ReLU(), ((2, 3),)),)
        return (
            self.kernel("toy", ReLU, "maximum", FP32, contract, run=run, extra_problems=problems),
        )

    def stream(self) -> HostStream:
        return HostStream()


class NeverWaits(Compiled):
    """A kernel whose PTX reads what the previous launch may still write."""

    def functions(self, problem: Problem, target: str) -> tuple[DeviceFunction, ...]:
        return (DeviceFunction("relu", "relu", ptx(""), frozenset(), True),)


class Unordered(Backend):
    """A backend whose ReLU has right values, and PTX with a missing wait."""

    kernel = NeverWaits
