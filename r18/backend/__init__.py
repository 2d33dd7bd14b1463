"""The backend interface: the protocol, the meaning of every op, and how backends are found.

A plugin author imports from here. A backend on the host needs `Backend`, `HostKernel`,
`RoundingContract` and `DeviceInfo`, and may use `BackendUnavailable` and `Problem`; one on a device
also needs `Memory`, `Stream` and `Kernel`. The `registry` finds backends, `plugin` loads them, and
`digest` hashes the sources that decide a kernel's results.
"""

from __future__ import annotations

from r18.backend.ceilings import Ceiling, Pace
from r18.backend.device import Array, Buffer, DeviceInfo, Event, Memory, Stream
from r18.backend.host import HostKernel, HostMemory, HostStream
from r18.backend.kernel import (
    DeviceFunction,
    Enqueue,
    HostCode,
    Kernel,
    Resources,
    RoundingContract,
    input_layout,
    output_layout,
)
from r18.backend.launch import (
    Launch,
    bind,
    download,
    enqueue_all,
    logical,
    prepare_plan,
    prepare_weights,
    upload,
    widened,
)
from r18.backend.options import CompileOptions
from r18.backend.plan import Plan, PlannedStep, Tensor, tensor_nbytes
from r18.backend.program import Program, StepTime
from r18.backend.protocol import Backend
from r18.backend.tuned import Apart, Fastest, Preferred, Table, Timing, find_table
from r18.errors import BackendUnavailable
from r18.graph.ops import Problem

__all__ = [
    "Apart",
    "Array",
    "Backend",
    "BackendUnavailable",
    "Buffer",
    "Ceiling",
    "CompileOptions",
    "DeviceFunction",
    "DeviceInfo",
    "Enqueue",
    "Event",
    "Fastest",
    "HostCode",
    "HostKernel",
    "HostMemory",
    "HostStream",
    "Kernel",
    "Launch",
    "Memory",
    "Pace",
    "Plan",
    "PlannedStep",
    "Preferred",
    "Problem",
    "Program",
    "Resources",
    "RoundingContract",
    "StepTime",
    "Stream",
    "Table",
    "Tensor",
    "Timing",
    "bind",
    "download",
    "enqueue_all",
    "find_table",
    "input_layout",
    "logical",
    "output_layout",
    "prepare_plan",
    "prepare_weights",
    "tensor_nbytes",
    "upload",
    "widened",
]
