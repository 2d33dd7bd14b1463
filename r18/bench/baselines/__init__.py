"""The peers that benchmarks compare with: the same network and weights, run by other libraries.

eager, graph, compile: torchvision's own module, run as its users run it
(`r18.bench.baselines.torchvision`). onnxruntime, openvino: exported to ONNX, on the CPU
(`r18.bench.baselines.exported`).

Each is at its best: capturing, compiling and searching are done before anything is
timed, and inputs are where the library wants them. A library is imported when it is needed: the
core works without any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from r18.backend import Array
from r18.bench.baselines import onnxruntime, openvino, torchvision
from r18.bench.baselines.fed import FedTorchvision
from r18.bench.baselines.torchvision import torch_flush
from r18.bench.baselines.ways import MODES, PEER, PEERS, TORCH, WAYS, Way, ways
from r18.errors import BackendUnavailable
from r18.graph.precision import FP8
from r18.graph.schedule import Schedule

if TYPE_CHECKING:
    from r18.bench.rows import Runner


def peers_precision(precision: str, kind: str = "cpu") -> str:
    """The precision of a peer that is compared with a program on a kind of device.

    float32 for split products; and float16 for int8 and fp8 on a GPU, where PyTorch has no such
    convolutions and that is the fastest it does. On a CPU float32 for fp8.
    """
    if precision in ("int8", "fp8") and kind == "cuda":
        return "fp16"
    return "fp32" if precision in ("fp16x3", "fp8") else precision


def has_peers(precision: str, kind: str) -> bool:
    """Whether rows of a precision have peers on a kind of device.

    Not those in fp8 on a CPU, where PyTorch would run in float32: neither its times nor its errors
    say anything of a program in fp8.
    """
    return precision != FP8.name or kind == "cuda"


def device_words(way: Way, kind: str) -> str:
    """The peer's device, in words. Imports its library, so that no measurement includes that."""
    match way.mode:
        case "onnxruntime":
            return onnxruntime.device_words(kind)
        case "openvino":
            return openvino.device_words(kind)
        case _:
            return torchvision.device_words(kind)


def made(
    way: Way,
    kind: str,
    schedule: Schedule,
    weights: Mapping[str, Array],
    batch: int,
    precision: str,
) -> Runner:
    """A peer ready to run a schedule (at level `none`) on a kind of device.

    Raises `BackendUnavailable` where its library is missing, or cannot run that, and where rows of
    the precision have no peers (`has_peers`).
    """
    if not has_peers(precision, kind):
        raise BackendUnavailable(way.name, f"it has no {precision} on {kind}")
    match way.mode:
        case "onnxruntime":
            return onnxruntime.OnnxRuntime(kind, schedule, weights, batch, precision)
        case "openvino":
            return openvino.OpenVino(kind, schedule, weights, batch, precision)
        case _:
            own = peers_precision(precision, kind)
            return torchvision.Torchvision(kind, schedule, weights, own, way)


__all__ = [
    "MODES",
    "PEER",
    "PEERS",
    "TORCH",
    "WAYS",
    "FedTorchvision",
    "Way",
    "device_words",
    "has_peers",
    "made",
    "peers_precision",
    "torch_flush",
    "ways",
]
