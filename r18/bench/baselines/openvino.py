"""OpenVINO on the CPU, told to keep latency low, and the precision that it computes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r18.bench.baselines.exported import Exported, not_importable
from r18.errors import BackendUnavailable
from r18.graph.precision import BF16, FP32, INT8
from r18.machine import thread_count

HINTS = {FP32.name: "f32", BF16.name: "bf16", INT8.name: "f32"}
"""OpenVINO's inference precision by ours. A CPU with bfloat16 would take that for float32 too; in
int8 it is the format that the integers are scaled to."""


def device_words(kind: str) -> str:
    """The CPU, its threads and the library's version, in words; imports what it needs."""
    try:
        import onnx  # noqa: F401  # the model is made with it
        import openvino
    except ImportError:
        return kind
    version = openvino.__version__.partition("-")[0]  # what follows is the build
    # Its latency hint does not use a core's second thread, where there is one.
    return f"CPU, at most {thread_count()} threads, OpenVINO {version}"


class OpenVino(Exported):
    """A request of a compiled model, its input and output set."""

    mode = "openvino"
    precisions = tuple(HINTS)

    def _built(
        self, model: bytes, images: str, output: str, precision: str
    ) -> Callable[[], object]:
        openvino = import_openvino()
        request = made_request(model, precision)
        request.set_tensor(images, openvino.Tensor(self._images, shared_memory=True))
        request.set_tensor(output, openvino.Tensor(self._output, shared_memory=True))
        return lambda: request.infer(share_inputs=True, share_outputs=True)


def import_openvino() -> Any:
    """The library. Raises `BackendUnavailable` where it is missing."""
    try:
        import openvino
    except ImportError as error:
        raise not_importable(OpenVino.mode, error) from error
    return openvino


def made_request(model: bytes, precision: str = FP32.name, *, optimised: bool = True) -> Any:
    """A request of a compiled model. optimised: integers are computed with; else their numbers.

    Raises `BackendUnavailable` where OpenVINO does not compute in the precision on this CPU.
    """
    core, hint = import_openvino().Core(), HINTS[precision]
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": thread_count(),
        # Else a fully connected layer may make integers of float activations, 32 with one scale.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    if not optimised:
        settings["LP_TRANSFORMS_MODE"] = "NO"
    compiled = core.compile_model(core.read_model(model), "CPU", settings)
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if taken != hint:
        raise BackendUnavailable(OpenVino.mode, f"asked for {hint}, it computes in {taken} here")
    return compiled.create_infer_request()


__all__ = ["HINTS", "OpenVino", "device_words", "import_openvino", "made_request"]
