"""Max-pooling of integers: values are moved."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from r18.graph.ops import MaxPool2d, Problem
from r18.graph.quantized import QuantizedMaxPool2d
from r18_oracle.ops import maxpool2d
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.requantize import RANGES
from r18_oracle.ops.integers.spec import QuantizedSpec, stored
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors, pick


class QuantizedMaxPool2dSpec(QuantizedSpec[QuantizedMaxPool2d]):
    op = QuantizedMaxPool2d
    inner = maxpool2d.SPEC
    chosen = ("signed",)

    def part(self, op: QuantizedMaxPool2d) -> MaxPool2d:
        return op.pool

    def settings(self, op: QuantizedMaxPool2d) -> Numbers:
        return {"signed": int(op.stored == "int8")}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        assert isinstance(problem.op, MaxPool2d)
        return Problem(QuantizedMaxPool2d(problem.op, stored(settings)), problem.inputs)

    def reference(self, op: QuantizedMaxPool2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        pool = op.pool
        return F.max_pool2d(inputs[0], pool.kernel_size, pool.stride, pool.padding)

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        op, shape = problem.op, problem.inputs[0]
        assert isinstance(op, QuantizedMaxPool2d)
        low, high = RANGES[op.stored]
        if kind == "impulse":
            x = integers.counted(shape) if variant % 3 == 1 else np.zeros(shape)
            if variant % 3 != 1:
                x[pick(rng, shape)] = 3
        elif kind == "positive":
            x = integers.upper(rng, shape, op.stored)
        elif kind == "cancelling":  # all below 0, so that a padding of 0 would win
            x = rng.integers(low, min(-1, high) + 1 if low else 2, shape).astype(np.float64)
        elif kind == "edges":  # little else than the least: so does the padding
            x = np.where(rng.random(shape) < 0.9, low, integers.ends(rng, shape, op.stored))
        else:
            x = integers.whole(rng, shape, op.stored)
        return (x,), ()


SPEC = QuantizedMaxPool2dSpec()
