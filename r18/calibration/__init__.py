"""Calibration: from float weights and images to a quantisation, whatever the images come from.

`calibrate` does all of it: scales of activations, weights rounded to nearest or by AdaRound.
"""

from __future__ import annotations

from r18.calibration.calibrate import ROUNDINGS, Method, calibrate
from r18.calibration.observe import Images

__all__ = ["ROUNDINGS", "Images", "Method", "calibrate"]
