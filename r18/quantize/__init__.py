"""Quantisation after training: scales from calibration images, integers of weights, what is lost.

`run.quantize` is what `r18 quantize` runs.
"""

from __future__ import annotations

from r18.quantize.run import Request, Result, quantize

__all__ = ["Request", "Result", "quantize"]
