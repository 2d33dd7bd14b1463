"""Quantised weights of the tiny network, without images: scales that are right in size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from r18.errors import ManifestError
from r18.graph.passes import fuse
from r18.graph.quantization import Calibration
from r18.graph.quantize import quantization, quantized, scaled_values
from r18.graph.resnet import tiny
from r18.graph.schedule import Schedule
from r18.weights import Weights, load_weights, quant
from r18.weights.quant import QuantBlock

CALIBRATION = Calibration("minmax", "nearest", 3, "ab" * 32)


def quantised_weights(
    bits: int = 8, source: str = "synthetic", schedule: Schedule = tiny()
) -> Weights:
    """The weights of a network, with a quantisation whose scales differ from value to value."""
    weights = load_weights(source, schedule)
    folded = fuse(schedule, "all")
    names = scaled_values(quantized(folded, bits))
    scales = {name: 0.02 + 0.001 * place for place, name in enumerate(names)}
    made = quantization(folded, weights, scales, bits, calibration=CALIBRATION)
    return replace(weights, quantization=made)


def sealed(block: dict[str, Any]) -> str:
    """The right digest of a block, as someone who alters it on purpose would compute it."""
    seen: list[str] = []
    digest = quant.digest

    def kept(*parts: Any) -> str:
        seen.append(digest(*parts))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quant, "digest", kept)
        try:
            QuantBlock.from_json(block)
        except ManifestError:
            if not seen:
                raise
    return seen[-1]
