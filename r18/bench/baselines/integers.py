"""The integers that a peer computes inside a quantised network, value by value."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import Array
from r18.bench.baselines import onnxruntime, openvino
from r18.bench.baselines.ways import EXPORTED
from r18.errors import R18Error, UsageError, unknown
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization
from r18.graph.quantize import LEVEL, quantized, value_scales
from r18.graph.schedule import Schedule
from r18.qdq import NUMBERS, qdq_model

ROUNDINGS = 8 * 128 * 2.0**-24
"""How far a number may be from an integer times its scale, in scales.

It does not depend on the number: for some scales OpenVINO computes q · ((high − low) / 255) + low
in float32, with 0 ≤ q ≤ 255, low = −128 s and high = 127 s. There high, range, quotient, product
and sum are rounded. That is 3.5 roundings of 128 scales for a zero, and less than 8 for 127.
Integers are a whole scale apart, so 2⁻¹⁴ of one confuses none.
"""


def peer_integers(
    mode: str,
    schedule: Schedule,
    quantization: Quantization,
    images: Array,
    *,
    optimised: bool = True,
) -> dict[str, Array]:
    """Every value of the quantised schedule as a peer computes it, and its float32 logits.

    mode: of `EXPORTED`. schedule: at level `none`. images: (N, C, H, W) in float32. optimised: the
    library fuses nodes into integer kernels, as it does when it is timed; else it runs each node in
    float32, or (OpenVINO) each layer.

    Values are outputs of the model, next to the logits; where that would change what a library
    computes (`_is_end`), a value is the output of a model that ends there. That looking inside
    changes nothing is checked: the logits are those of the model without such outputs, bit for bit.

    Raises `UnknownName` for another mode, `BackendUnavailable` where a library is missing, and
    `R18Error` where a value that the library returns is no integer, or its logits change.
    """
    if mode not in EXPORTED:
        raise unknown("peer with integers", mode, EXPORTED, error=UsageError)
    integers = quantized(fuse(schedule, LEVEL), quantization.bits)
    taps = tuple(step.output for step in integers.steps[:-1])
    scales = value_scales(integers, quantization.scales)
    ends = [v for v in taps if _is_end(mode, v == taps[0], integers.storage[v], optimised)]
    inside = tuple(name for name in taps if name not in ends)

    def run(output: str = "", taps: tuple[str, ...] = ()) -> dict[str, Array]:
        model = qdq_model(schedule, quantization, batch=len(images), output=output, taps=taps)
        names = [tensor.name for tensor in model.graph.output]
        return _run(mode, model.SerializeToString(), integers.input, names, images, optimised)

    found = run(taps=inside)
    if not np.array_equal(run()[integers.output], found[integers.output]):
        raise R18Error(
            f"{mode} gives other logits when the values inside are outputs too: what it computes "
            "there is not what it computes without them"
        )
    for name in ends:
        found[name] = _integers(mode, name, run(name)[name + NUMBERS], scales[name])
    return {name: found[name] for name in (*taps, integers.output)}


def _is_end(mode: str, first: bool, storage: str, optimised: bool) -> bool:
    """Whether a library computes otherwise where a value is an output of the model next to others.

    ONNX Runtime computes int8 values as uint8 with a zero point, unless they are outputs. OpenVINO
    computes the integers of the images together with the first convolution.
    """
    if mode == "onnxruntime":
        return optimised and storage == "int8"
    return first


def _run(
    mode: str, model: bytes, image: str, names: list[str], images: Array, optimised: bool
) -> dict[str, Array]:
    if mode == "onnxruntime":
        session = onnxruntime.made_session(model, optimised=optimised)
        return dict(zip(names, session.run(names, {image: images}), strict=True))
    request = openvino.made_request(model, optimised=optimised)
    request.infer({image: images})
    made: Any = (request.get_output_tensor(place) for place in range(len(names)))
    return {name: tensor.data.copy() for name, tensor in zip(names, made, strict=True)}


def _integers(mode: str, name: str, numbers: Array, scale: float) -> Array:
    """The integers whose products with the scale these numbers are, but for a few roundings."""
    wide = numbers.astype(np.float64)
    found = np.rint(wide / scale)
    if not (np.abs(wide - found * scale) <= ROUNDINGS * scale).all():
        raise R18Error(f"{mode} gave numbers of '{name}' that are no integers times its scale")
    integers: Array = found.astype(np.int8)
    if not np.array_equal(integers, found):
        raise R18Error(f"{mode} gave numbers of '{name}' beyond int8")
    return integers


__all__ = ["peer_integers"]
