"""The table of `OpSpec`s: the oracle's own, and those that installed packages bring.

A package adds an op by an entry point in the group `r18.ops`. Its name is the op's, and it loads
the op's `OpSpec` instance. Entry points are only read when an op is not in `SPECS`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from r18.errors import UsageError
from r18.graph.ops import Op
from r18_oracle.ops import (
    add,
    batchnorm,
    conv2d,
    gap,
    linear,
    maxpool2d,
    normalize,
    relayout,
    relu,
    softmax,
)
from r18_oracle.ops.integers import (
    qconv2d,
    qconv2d_maxpool2d,
    qgap,
    qgap_linear,
    qlinear,
    qmaxpool2d,
    qrelayout,
    quantize,
)
from r18_oracle.ops.pairs import conv2d_maxpool2d, conv2d_projection, gap_linear
from r18_oracle.ops.scaled import (
    scale,
    sconv2d,
    sconv2d_maxpool2d,
    sgap,
    sgap_linear,
    slinear,
)
from r18_oracle.ops.spec import OpSpec

GROUP = "r18.ops"
"""The entry-point group of ops from other packages."""

SPECS: dict[type[Op], OpSpec[Any]] = {
    spec.op: spec
    for spec in (
        conv2d.SPEC,
        batchnorm.SPEC,
        relu.SPEC,
        add.SPEC,
        maxpool2d.SPEC,
        gap.SPEC,
        linear.SPEC,
        linear.MATMUL_SPEC,
        softmax.SPEC,
        relayout.SPEC,
        conv2d_maxpool2d.SPEC,
        conv2d_projection.SPEC,
        gap_linear.SPEC,
        normalize.SPEC,
        qconv2d.SPEC,
        qmaxpool2d.SPEC,
        qgap.SPEC,
        qlinear.SPEC,
        quantize.SPEC,
        quantize.PIXELS_SPEC,
        qrelayout.SPEC,
        qconv2d_maxpool2d.SPEC,
        qgap_linear.SPEC,
        scale.SPEC,
        sconv2d.SPEC,
        sgap.SPEC,
        slinear.SPEC,
        sconv2d_maxpool2d.SPEC,
        sgap_linear.SPEC,
    )
}


def register(spec: OpSpec[Any]) -> None:
    """Add an op's spec to the table. Raises `UsageError` if the op already has one."""
    if spec.op in SPECS:
        raise UsageError(f"the oracle already has a spec of {spec.op.name}")
    SPECS[spec.op] = spec


def spec_of(op: Op | type[Op]) -> OpSpec[Any]:
    """The spec of an op; raises `UsageError` if there is none."""
    kind = op if isinstance(op, type) else type(op)
    if kind not in SPECS:
        for point in entry_points(group=GROUP, name=kind.name):
            register(point.load())
    if kind not in SPECS:
        raise UsageError(
            f"the oracle has no float64 reference for {kind.name}\n"
            f"  give it an OpSpec, and an entry point in the group {GROUP}"
        )
    return SPECS[kind]


__all__ = ["GROUP", "SPECS", "OpSpec", "register", "spec_of"]
