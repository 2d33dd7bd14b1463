"""ResNet-18 inference written by hand, many times over, and verified."""

from __future__ import annotations

import r18.runtime.plan  # noqa: F401 - sets the planner of every backend

__version__ = "0.1.0"
