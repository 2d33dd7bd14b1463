"""Quantisation of weights in files, calibrated on a folder of photographs, and what that loses.

`run.quantize` is what `r18 quantize` runs.
"""

from __future__ import annotations

from r18.quantize.run import Request, Result, quantize

__all__ = ["Request", "Result", "quantize"]
