"""torchvision's module fed with pixels from host memory, as its users feed it in eager mode.

On a GPU: two pinned arrays in turn; one is copied on its own stream while the module
computes; pixels are normalised on the device; outputs are copied back behind their runs. On a CPU
the pixels are read where they are. `r18.bench.inputs.from_host` measures it next to the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from r18.backend import Array
from r18.bench.baselines.torchvision import Torchvision, on_host
from r18.bench.baselines.ways import Way
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess


class FedTorchvision(Torchvision):
    """See `r18.bench.inputs.from_host.Feeding`. Takes its own arrays only.

    Raises as `Torchvision`.
    """

    def __init__(
        self,
        kind: str,
        schedule: Schedule,
        weights: Mapping[str, Array],
        batch: int,
        precision: str,
        way: Way = Way(),
    ) -> None:
        super().__init__(kind, schedule, weights, precision, way)
        torch = self._torch
        channels, height, width = schedule.input_shape
        shape = (batch, height, width, channels)
        self._sources = tuple(
            torch.zeros(shape, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)
        )
        first, second = (source.numpy().transpose(0, 3, 1, 2) for source in self._sources)
        self._arrays: tuple[Array, Array] = first, second
        self._pixels = self._sources
        self._turn = 0
        self._scale, self._shift = (
            torch.tensor(values, device=self._device)[:, None, None]
            for values in Preprocess().normalize.scale_shift
        )
        if self._cuda:
            self._pixels = tuple(source.to(self._device) for source in self._sources)
            self._copies = torch.cuda.Stream()
            self._ready, self._free = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def input_arrays(self) -> tuple[Array, Array]:
        return self._arrays

    def load(self, images: Array) -> None:
        self._switch(self._tf32, True, self._tf32)  # others take turns with it
        self._turn = turn = [array is images for array in self._arrays].index(True)
        if not self._cuda:
            return
        with self._torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free[turn])
            self._pixels[turn].copy_(self._sources[turn], non_blocking=True)
            self._ready[turn].record(self._copies)
        self._ready[1 - turn].synchronize()

    def launch(self) -> None:
        stream = self._torch.cuda.current_stream() if self._cuda else None
        if stream is not None:
            stream.wait_event(self._ready[self._turn])
        with self._torch.inference_mode():
            pixels = self._pixels[self._turn].permute(0, 3, 1, 2)
            images = (pixels * self._scale + self._shift).to(self._dtype)
            self._output = self._module(images.contiguous(memory_format=self._format))
        if stream is not None:
            self._free[self._turn].record(stream)

    def fetch_later(self) -> Callable[[], Array]:
        output: Any = self._output
        if not self._cuda:
            return lambda: on_host(output)
        host = self._torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        host.copy_(output, non_blocking=True)
        arrived = self._torch.cuda.Event()
        arrived.record()

        def fetch() -> Array:
            arrived.synchronize()
            return on_host(host)

        return fetch


__all__ = ["FedTorchvision"]
