"""ONNX Runtime on the CPU, with all of its optimisations of the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from r18.bench.baselines.exported import Exported, not_importable
from r18.machine import thread_count

ERRORS_ONLY = 3
"""The least severity that it logs."""


def device_words(kind: str) -> str:
    """What it runs on; imports what it needs."""
    try:
        import onnx  # noqa: F401  # the model is made with it
        import onnxruntime
    except ImportError:
        return kind
    return f"CPU, {thread_count()} threads, ONNX Runtime {onnxruntime.__version__}"


class OnnxRuntime(Exported):
    """A session of ONNX Runtime, its input and output bound."""

    mode = "onnxruntime"

    def _built(self, model: bytes, images: str, output: str) -> Callable[[], object]:
        try:
            import onnxruntime
        except ImportError as error:
            raise not_importable(self.mode, error) from error
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = thread_count()
        options.inter_op_num_threads = 1  # a residual network is one chain
        options.log_severity_level = ERRORS_ONLY
        # A session that is given bytes keeps them: the weights would be there twice.
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            path.write_bytes(model)
            session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        binding = session.io_binding()
        shared = onnxruntime.OrtValue.ortvalue_from_numpy  # copies nothing on a CPU
        binding.bind_ortvalue_input(images, shared(self._images))
        binding.bind_ortvalue_output(output, shared(self._output))
        return lambda: session.run_with_iobinding(binding)


__all__ = ["OnnxRuntime", "device_words"]
