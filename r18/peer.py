"""The peer that benchmarks compare with: torchvision's own module, run as its users run it.

PyTorch is imported when it is needed: the core works without.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from r18.backend import Array, StepTime
from r18.errors import BackendUnavailable
from r18.schedule import Schedule

PEER = "torchvision eager"
TORCHVISION = ("resnet18", "resnet34")
"""The networks that it has, of ours."""


def torch_device(kind: str) -> str:
    """PyTorch's device in words; imports what the peer needs, so that it counts for nobody."""
    try:
        import torch
        import torchvision
    except ImportError:
        return kind
    versions = f"PyTorch {torch.__version__}, torchvision {torchvision.__version__}"
    if kind == "cuda" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {versions}"
    return f"{kind.upper()}, {torch.get_num_threads()} threads, {versions}"


class TorchvisionEager:
    """torchvision's module with the schedule's weights, NCHW. See `r18.bench.Runner`.

    Raises `BackendUnavailable` where PyTorch is missing, or torchvision lacks the network.
    """

    arena_nbytes = None

    def __init__(
        self, kind: str, schedule: Schedule, weights: Mapping[str, Array], precision: str
    ) -> None:
        try:
            import torch
            import torchvision
        except ImportError as error:
            raise BackendUnavailable(
                PEER, f"it does not import: {error}", "pip install 'r18[torch]'"
            ) from error
        dtypes = {
            "fp32": torch.float32,
            "tf32": torch.float32,
            "fp64": torch.float64,
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
        }
        self._torch = torch
        self._cuda = kind == "cuda"
        self._tf32 = precision == "tf32"
        if kind not in ("cpu", "cuda") or (self._cuda and not torch.cuda.is_available()):
            raise BackendUnavailable(PEER, f"PyTorch sees no device of kind '{kind}'")
        if precision not in dtypes or (self._tf32 and not self._cuda):
            raise BackendUnavailable(PEER, f"it has no {precision} on {kind}")
        if schedule.name not in TORCHVISION or schedule.level != "none":
            raise BackendUnavailable(PEER, f"torchvision has no '{schedule.name}'")
        classes = schedule.shapes(1)[schedule.output][1]
        module = getattr(torchvision.models, schedule.name)(num_classes=classes)
        state = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
        counters = [name for name in module.state_dict() if name.endswith("num_batches_tracked")]
        module.load_state_dict(state | {name: torch.tensor(0) for name in counters})
        self._device, self._dtype = torch.device(kind), dtypes[precision]
        self._module = module.eval().to(self._device, self._dtype)
        self.weight_nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        self._before = (cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32)

    def load(self, images: Array) -> None:
        self._images = self._torch.from_numpy(images).to(self._device, self._dtype)
        # Global switches, set outside of the time; the peer may search for its fastest algorithms.
        self._switch(self._tf32, True, self._tf32)
        self._wait()

    def _switch(self, cudnn_tf32: bool, benchmark: bool, matmul_tf32: bool) -> None:
        if self._cuda:
            backends = self._torch.backends
            backends.cudnn.allow_tf32, backends.cudnn.benchmark = cudnn_tf32, benchmark
            backends.cuda.matmul.allow_tf32 = matmul_tf32

    def run(self) -> None:
        with self._torch.inference_mode():
            self._module(self._images)
        self._wait()

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def steps(self) -> list[StepTime]:
        return []

    def close(self) -> None:
        self._switch(*self._before)


__all__ = ["PEER", "TorchvisionEager", "torch_device"]
