"""ONNX Runtime on the CPU, with all of its optimisations of the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from r18.bench.baselines.exported import Exported, not_importable
from r18.machine import thread_count

ERRORS_ONLY = 3
"""The least severity that it logs."""


def device_words(kind: str) -> str:
    """The CPU, its threads and the library's version, in words; imports what it needs."""
    try:
        import onnx  # noqa: F401  # the model is made with it
        import onnxruntime
    except ImportError:
        return kind
    return f"CPU, {thread_count()} threads, ONNX Runtime {onnxruntime.__version__}"


class OnnxRuntime(Exported):
    """A session of ONNX Runtime, its input and output bound."""

    mode = "onnxruntime"

    def _built(
        self, model: bytes, images: str, output: str, precision: str
    ) -> Callable[[], object]:
        session = made_session(model)
        binding = session.io_binding()
        shared = import_onnxruntime().OrtValue.ortvalue_from_numpy  # copies nothing on a CPU
        binding.bind_ortvalue_input(images, shared(self._images))
        binding.bind_ortvalue_output(output, shared(self._output))
        return lambda: session.run_with_iobinding(binding)


def import_onnxruntime() -> Any:
    """The library. Raises `BackendUnavailable` where it is missing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise not_importable(OnnxRuntime.mode, error) from error
    return onnxruntime


def made_session(model: bytes, *, optimised: bool = True) -> Any:
    """A session of a model on the CPU. optimised: the graph is; else every node runs as it is."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    )
    options.intra_op_num_threads = thread_count()
    options.inter_op_num_threads = 1  # a residual network is one chain
    options.log_severity_level = ERRORS_ONLY
    # A session that is given bytes keeps them: the weights would be there twice.
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(model)
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


__all__ = ["OnnxRuntime", "device_words", "import_onnxruntime", "made_session"]
