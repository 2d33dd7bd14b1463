"""ResNet-18 inference written by hand, many times over, and proved right."""

from __future__ import annotations

__version__ = "0.1.0"
