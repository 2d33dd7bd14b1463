"""Weights: their sources, the formats that hold them, and the manifest that describes them."""

from __future__ import annotations

from r18.weights.sources import (
    FORMATS,
    SOURCES,
    Weights,
    export_weights,
    load_weights,
    weights_from,
)

__all__ = ["FORMATS", "SOURCES", "Weights", "export_weights", "load_weights", "weights_from"]
