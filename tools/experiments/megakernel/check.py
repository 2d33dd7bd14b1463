"""Test the megakernel without a GPU: its table, and its source on a CPU (emulator.cpp).

python check.py [ctas] [wide,...] — prints the error of each layer and of the logits.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from table import PADDING, STEM, Plan, Work, check_work, fused_schedule, make_work

from r18.graph.passes import fold_weights
from r18.graph.resnet import network
from r18.weights import load_weights

HERE = Path(__file__).parent
NETWORK = np.dtype(
    [
        (name, np.uint64)
        for name in (
            "items",
            "counts",
            "weights",
            "biases",
            "stem",
            "arena",
            "logits",
            "epochs",
            "trouble",
            "stamps",
        )
    ]
    + [("half_bytes", np.int32), ("features", np.int32)]
)


def macros(work: Work, stages: int = 3, probe: int = 3, stamps: int = 0) -> dict[str, int]:
    chunks = work.chunks()
    few = max(c for c in chunks if c <= 6)
    return {
        "MAX_ITEMS": work.most_items,
        "STAGES": stages,
        "PROBE": probe,
        "STAMPS": stamps,
        "FEW": few,
        "MANY": max(*chunks, few + 1),
        "INPUT_BYTES": work.input_nbytes,
        "PADDING": PADDING,
    }


def reference(image, folded, schedule, dtype, rounded):
    """All values of the network, by name; `rounded`: activations to fp16 after each layer."""

    def keep(x):
        return x.half().to(dtype) if rounded else x

    def tensor(name):
        weight = torch.from_numpy(np.asarray(folded[name])).to(dtype)
        return weight.half().to(dtype) if rounded and weight.ndim > 1 else weight

    values = {"image": keep(torch.from_numpy(image).to(dtype))}
    for step in schedule.steps:
        x = values[step.inputs[0]]
        kind = type(step.op).__name__
        if kind == "Conv2d":
            w, b = map(tensor, step.weights)
            y = torch.nn.functional.conv2d(x, w, b, step.op.stride, step.op.padding)
            if step.op.residual:
                y = y + values[step.inputs[1]]
            if step.op.relu:
                y = torch.relu(y)
            y = keep(y)
        elif kind == "MaxPool2d":
            y = torch.nn.functional.max_pool2d(x, 3, 2, 1)
        elif kind == "GlobalAvgPool":
            y = x.mean((2, 3))
        else:
            w, b = map(tensor, step.weights)
            y = x.flatten(1) @ w.T + b
        values[step.output] = y
    return values


def relative(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def layer_errors(work: Work, half: np.ndarray, stem: np.ndarray, folded) -> dict[str, float]:
    """Each layer's output against a convolution of the inputs that it had."""

    def value(name, size, channels):
        if name == STEM:
            data = stem
        else:
            start = work.offsets[name]
            data = half[start : start + size * size * channels * 2].view(np.float16)
        return torch.from_numpy(data.reshape(1, size, size, channels).copy()).permute(0, 3, 1, 2)

    found = {}
    for layer in work.layers[:-1]:
        op = layer.op
        x = value(layer.source, layer.size, op.in_channels).float()
        w = torch.from_numpy(folded[layer.weight]).half().float()
        b = torch.from_numpy(folded[layer.bias]).float()
        y = torch.nn.functional.conv2d(x, w, b, op.stride, op.padding)
        if layer.residual:
            y = y + value(layer.residual, layer.out_size, op.out_channels).float()
        if op.relu:
            y = torch.relu(y)
        out = value(layer.output, layer.out_size, op.out_channels)
        found[layer.name] = relative(out.float(), y)
    return found


def emulated(work: Work, stem: np.ndarray, runs: int, options: dict[str, int], seeds):
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/emulator.so"
        flags = [f"-D{name}={value}" for name, value in options.items()]
        subprocess.run(
            [
                "g++",
                "-O2",
                "-std=c++17",
                "-march=native",
                "-shared",
                "-fPIC",
                *flags,
                str(HERE / "emulator.cpp"),
                "-o",
                library,
            ],
            check=True,
        )
        emulate = ctypes.CDLL(library).emulate
    emulate.restype = ctypes.c_longlong
    ctas = work.plan.ctas
    arrays = {
        "items": work.table,
        "counts": work.counts,
        "weights": np.concatenate(work.weights),
        "biases": np.concatenate(work.biases),
        "stem": stem,
        "arena": np.full(2 * work.half_nbytes, 255, np.uint8),
        "logits": np.zeros(work.features, np.float16),
        "epochs": np.zeros(ctas, np.uint32),
        "trouble": np.zeros(4, np.uint32),
        "stamps": np.zeros(ctas * (work.most_items + 1) * 6, np.uint64),
    }
    net = np.zeros(1, NETWORK)
    for name, array in arrays.items():
        assert array.flags.c_contiguous
        net[name] = array.ctypes.data
    net["half_bytes"], net["features"] = work.half_nbytes, work.features
    for run, seed in zip(range(runs), seeds, strict=True):
        start = time.time()
        polls = emulate(ctypes.c_void_p(net.ctypes.data), ctas, ctypes.c_uint(seed))
        print(f"run {run}: {polls} polls, trouble {arrays['trouble']}, {time.time() - start:.1f} s")
        assert polls >= 0
        assert not arrays["trouble"].any()
        half = arrays["arena"][run % 2 * work.half_nbytes :][: work.half_nbytes]
        other = arrays["arena"][(run + 1) % 2 * work.half_nbytes :][: work.half_nbytes]
        assert (other == 255).all()
        yield half, arrays["logits"].copy()


def main() -> None:
    ctas = int(sys.argv[1]) if len(sys.argv) > 1 else 132
    wide = tuple(map(int, sys.argv[2].split(","))) if len(sys.argv) > 2 else ()
    schedule = fused_schedule()
    weights = load_weights("synthetic", network("resnet18"))
    work = make_work(Plan(ctas, wide), schedule, weights)
    check_work(work)
    options = macros(work)
    print(
        options,
        "shared",
        work.shared_nbytes(3),
        "arena half",
        work.half_nbytes,
        "chunks",
        work.chunks(),
        "weights",
        work.weight_nbytes,
    )
    folded = fold_weights(schedule, weights)
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    exact = reference(image, folded, schedule, torch.float64, False)
    rounded = reference(image, folded, schedule, torch.float32, True)
    stem = np.ascontiguousarray(rounded[STEM].permute(0, 2, 3, 1).numpy(), np.float16)
    first = None
    for half, logits in emulated(work, stem, 3, options, (0, 7, 10)):
        errors = layer_errors(work, half, stem, folded)
        print({name: f"{error:.1e}" for name, error in errors.items()})
        print(
            "logits against fp16 by torch",
            relative(logits, rounded["fc"][0]),
            "against float64",
            relative(logits, exact["fc"][0]),
            "torch's against float64",
            relative(rounded["fc"][0], exact["fc"][0]),
        )
        assert max(errors.values()) < 2e-3
        first = logits if first is None else first
        assert (logits == first).all(), "not deterministic"


if __name__ == "__main__":
    main()
