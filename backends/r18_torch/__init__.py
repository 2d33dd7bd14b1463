"""The PyTorch backend: the external reference, on CPU and CUDA, in every floating-point precision
and in int8.

It runs r18's schedule step by step through `torch.nn.functional`, so taps and fusion levels work.
The tests compare it with torchvision's module.
"""

from __future__ import annotations

import platform
from functools import cache, cached_property
from typing import Any

from r18.backend import Backend as BackendBase
from r18.backend import DeviceInfo, Kernel, Stream
from r18.errors import BackendUnavailable, UsageError


class Backend(BackendBase):
    """PyTorch on `device`: "auto" is CUDA if there is a GPU, else the CPU.

    `r18_torch:cpu` and `r18_torch:cuda` choose one explicitly.
    """

    name = "torch"

    def __init__(self, device: str = "auto") -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device must be auto, cpu or cuda, got '{device}'")
        self._asked = device

    @cached_property
    def device(self) -> str:
        """ "cpu" or "cuda": the requested one, else CUDA if PyTorch sees a GPU."""
        if self._asked != "auto":
            return self._asked
        return "cuda" if self._torch().cuda.is_available() else "cpu"

    @cached_property
    def memory(self) -> Any:
        self._torch()
        from r18_torch.device import TorchMemory

        return TorchMemory(self.device)

    def probe(self) -> DeviceInfo:
        torch = self._torch()
        details = {"torch": torch.__version__}
        if self.device == "cpu":
            threads = torch.get_num_threads()
            name = f"CPU ({platform.machine()}), {threads} threads, PyTorch {torch.__version__}"
            return DeviceInfo("cpu", name, details)
        if not torch.cuda.is_available():
            raise BackendUnavailable(
                self.name,
                f"PyTorch {torch.__version__} sees no CUDA device",
                "Use r18_torch:cpu, or check the driver with nvidia-smi.",
            )
        name = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
        return DeviceInfo("cuda", name, details)

    def kernels(self) -> tuple[Kernel, ...]:
        self._torch()
        return _kernels(self.device)

    def _torch(self) -> Any:
        try:
            import torch
        except ImportError as error:
            raise BackendUnavailable(
                self.name, f"PyTorch does not import: {error}", "pip install 'r18[torch]'"
            ) from error
        return torch

    def stream(self) -> Stream:
        from r18_torch.device import TorchStream

        return TorchStream(self.device)


@cache
def _kernels(device: str) -> tuple[Kernel, ...]:
    from r18_torch.integers import quantized_kernels
    from r18_torch.kernels import all_kernels
    from r18_torch.scaled import scaled_kernels

    return (*all_kernels(device), *scaled_kernels(device), *quantized_kernels(device))


def cpu() -> Backend:
    """PyTorch on the CPU, even if there is a GPU: `R18_BACKEND=r18_torch:cpu`."""
    return Backend("cpu")


def cuda() -> Backend:
    """PyTorch on CUDA. `probe` raises without a GPU: `R18_BACKEND=r18_torch:cuda`."""
    return Backend("cuda")


__all__ = ["Backend", "cpu", "cuda"]
