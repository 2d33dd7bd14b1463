"""AdaRound: each weight is rounded up or down, whichever keeps its layer's output.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", arXiv:2004.10568. The
layers are taken in order. A layer's target is its output in float32 (with the ReLU that it fuses),
its input is what the layers before it give in integers, so that their errors are made up for. The
convolution is a matrix product over windows of the calibration images, drawn at random with a fixed
seed. Needs PyTorch.

The rounding of weight w is h(v) ∈ [0, 1] on top of ⌊w/s⌋, where h is a stretched sigmoid. Adam
minimises e/e₀ + λ·mean(1 − |2h − 1|^β), where e is the squared error of the output and e₀ that of
rounding to nearest. The second term pushes h to 0 or 1 as β falls. The paper has e and a sum in
place of the quotient and the mean, and its λ then depends on the size of layers and of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r18.backend import Array, Backend
from r18.backend.registry import load_backend
from r18.calibration.observe import REFERENCE, Images, compiled
from r18.errors import NoKernel, R18Error, UsageError
from r18.graph.ops import Conv2d, Linear, Problem
from r18.graph.passes import fold_weights
from r18.graph.precision import dtype_of
from r18.graph.quantization import QuantizedWeight
from r18.graph.quantize import quantized, quantized_weights, value_scales
from r18.graph.quantized import limit_of
from r18.graph.schedule import Schedule, Step
from r18.runtime.launch import run_kernel
from r18.runtime.plan import choose_kernel

STRETCH = (-0.1, 1.1)
"""The ends of the sigmoid before it is clipped to [0, 1]."""
REGULARISATION = 1000.0
BETA = (20.0, 2.0)
WARMUP = 0.2
"""The part of the iterations in which nothing pushes h to its ends."""
RATE = 1e-2
ROWS = 256
"""Windows of an iteration."""


@dataclass(frozen=True)
class Settings:
    """How long it optimises. windows: drawn for a layer, spread over the images."""

    iterations: int = 1000
    windows: int = 8192
    seed: int = 0


def adaround(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Images,
    scales: Mapping[str, float],
    start: Mapping[str, QuantizedWeight],
    bits: int,
    settings: Settings = Settings(),
    progress: Callable[[str, int, int], None] = lambda step, done, steps: None,
) -> dict[str, QuantizedWeight]:
    """The weights of every layer, rounded up or down.

    schedule: at level `all`. weights: of level `none`. scales: of activations. start: each layer's
    weight to nearest, whose scales stay. progress: called with a layer's name, the number of layers
    done and of all. backend: where it has no kernels of int8, numpy's are used.

    Raises `R18Error` where PyTorch is not installed, `UsageError` for a convolution of several
    groups, and what compiling raises.
    """
    check_torch()
    read = fold_weights(schedule, weights)
    layers = [step for step in schedule.steps if step.name in start]
    for step in layers:
        if "groups" in step.op.extras:
            raise UsageError(
                f"AdaRound rounds no convolution of several groups, and step '{step.name}' has "
                f"{step.op.extras['groups']}\n  quantise to 8 bits, which are rounded to "
                "nearest, or with --rounding nearest"
            )
    plans = {
        step.name: _Windows.of(schedule, step, len(images), settings, place)
        for place, step in enumerate(layers)
    }
    targets = _targets(backend, schedule, weights, read, images, plans)
    found = dict(start)
    run = _Integers(backend, schedule, weights, scales, bits, images)
    for place, step in enumerate(layers):
        progress(step.name, place, len(layers))
        integers, scale = run.before(step, found)
        windows = plans[step.name]
        layer = _Layer(
            step,
            windows.gathered(integers, windows.places) * np.float32(scale),
            targets.pop(step.name),
            *(np.array(read[name], np.float32) for name in step.weights),
        )
        nearest = found[step.name]
        found[step.name] = QuantizedWeight(layer.rounded(nearest, bits, settings), nearest.scale)
    progress("", len(layers), len(layers))
    return found


def check_torch() -> None:
    """Raise `R18Error` where PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise R18Error(
            "AdaRound needs PyTorch, which is not installed\n"
            "  pip install 'r18[torch]', or round to nearest: --rounding nearest"
        ) from None


# -- windows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    """Windows of a layer, drawn at random: the image, row and column of each output."""

    op: Conv2d | Linear
    places: Array

    @classmethod
    def of(
        cls, schedule: Schedule, step: Step, images: int, settings: Settings, layer: int
    ) -> _Windows:
        assert isinstance(step.op, Conv2d | Linear)
        problem = schedule.problems(1)[step.name]
        rng = np.random.default_rng((settings.seed, layer))
        extents = problem.output[2:] or (1, 1)
        whole = images * extents[0] * extents[1]
        count = min(whole, settings.windows)
        drawn = np.sort(rng.choice(whole, count, replace=False))
        return cls(step.op, np.stack(np.unravel_index(drawn, (images, *extents)), axis=1))

    def of_batch(self, first: int, count: int) -> tuple[slice, Array]:
        """The windows of some images, as a slice, and their places counted from the first image."""
        begin, end = np.searchsorted(self.places[:, 0], (first, first + count))
        part = self.places[begin:end].copy()
        part[:, 0] -= first
        return slice(int(begin), int(end)), part

    def gathered(self, values: Array, places: Array) -> Array:
        """Windows of an array (N, C, H, W) or (N, K) at these places, (windows, K) in float32."""
        if isinstance(self.op, Linear):
            return np.asarray(values[places[:, 0]], np.float32)
        (kh, kw), (sh, sw), (ph, pw) = self.op.kernel_size, self.op.stride, self.op.padding
        dh, dw = self.op.dilation
        rows = places[:, 1, None] * sh - ph + dh * np.arange(kh)
        columns = places[:, 2, None] * sw - pw + dw * np.arange(kw)
        height, width = values.shape[2:]
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
            :, None, :
        ]
        found = values[
            places[:, 0, None, None],
            :,
            rows.clip(0, height - 1)[:, :, None],
            columns.clip(0, width - 1)[:, None, :],
        ].astype(np.float32)  # (windows, kh, kw, C)
        found *= inside[..., None]
        return np.ascontiguousarray(found.transpose(0, 3, 1, 2)).reshape(len(places), -1)


def _targets(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    read: Mapping[str, Array],
    images: Images,
    plans: Mapping[str, _Windows],
) -> dict[str, Array]:
    """Each layer's output at its windows, (windows, O), of the network in float32."""
    layers = [step for step in schedule.steps if step.name in plans]
    found = {
        step.name: np.empty((len(plans[step.name].places), len(read[step.weights[0]])), np.float32)
        for step in layers
    }
    program = compiled(
        backend, schedule, weights, images, "fp32", dict.fromkeys(s.inputs[0] for s in layers)
    )
    try:
        for first, pixels in images.batches():
            program(pixels)
            for step in layers:
                where, places = plans[step.name].of_batch(first, len(pixels))
                rows = plans[step.name].gathered(program.fetch(step.inputs[0]), places)
                matrix = np.asarray(read[step.weights[0]], np.float32)
                made = rows @ matrix.reshape(len(matrix), -1).T
                found[step.name][where] = made + _bias(read, step)
    finally:
        program.close()
    return found


def _bias(read: Mapping[str, Array], step: Step) -> Array:
    return np.asarray(read[step.weights[1]], np.float32)


# -- the network in integers, layer by layer ---------------------------------------------------


class _Integers:
    """The quantised network's values so far, of all images; those that are read no more go."""

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        weights: Mapping[str, Array],
        scales: Mapping[str, float],
        bits: int,
        images: Images,
    ) -> None:
        self._schedule, self._weights, self._scales = schedule, weights, scales
        self._bits, self._images = bits, images
        self._integers = quantized(schedule, bits)
        self._value_scales = value_scales(self._integers, scales)
        self._backend = _with_integers(backend, self._integers)
        self._steps = list(self._integers.steps)
        self._values: dict[str, Array] = {schedule.input: images.pixels}

    def before(self, layer: Step, found: Mapping[str, QuantizedWeight]) -> tuple[Array, float]:
        """The integers that a layer reads, with the weights so far, and their scale."""
        wanted = self._integers.step(layer.name).inputs[0]
        own = quantized_weights(self._schedule, self._weights, self._scales, self._bits, found)
        while wanted not in self._values:
            step = self._steps.pop(0)
            arrays = [own[name] for name in step.weights]
            self._values[step.output] = self._run(step, arrays)
            read = {value for later in self._steps for value in later.inputs}
            self._values = {n: v for n, v in self._values.items() if n in read or n == step.output}
        return self._values[wanted], self._value_scales[wanted]

    def _run(self, step: Step, weights: list[Array]) -> Array:
        inputs = [self._values[value] for value in step.inputs]
        shape = self._integers.shapes(len(self._images))[step.output]
        output = np.empty(shape, dtype_of(step.op.output_storage))
        for batch in _batches(len(output)):
            parts = [value[batch] for value in inputs]
            problem = Problem(step.op, tuple(part.shape for part in parts))
            kernel = choose_kernel(self._backend.kernels(), problem, "int8")
            output[batch] = run_kernel(self._backend, kernel, problem, *parts, *weights)
        return output


def _batches(count: int, size: int = 8) -> Iterator[slice]:
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _with_integers(backend: Backend, schedule: Schedule) -> Backend:
    """The backend if it has kernels for every step, else numpy."""
    kernels = backend.kernels()
    try:
        for problem in schedule.problems(1).values():
            choose_kernel(kernels, problem, "int8")
    except NoKernel:
        return load_backend(REFERENCE)
    return backend


# -- a layer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """A convolution or linear layer at its windows, in float32.

    rows: (windows, K), outputs of the layers before it. target: (windows, O), its right output.
    weight: (O, …). bias: (O,).
    """

    step: Step
    rows: Array
    target: Array
    weight: Array
    bias: Array

    def rounded(self, nearest: QuantizedWeight, bits: int, settings: Settings) -> Array:
        """The integers, in the weight's shape. nearest: where it begins, and the scales."""
        import torch

        limit, (low, high) = limit_of(bits), STRETCH
        conv = self.step.op
        relu = isinstance(conv, Conv2d) and conv.relu and not conv.residual
        with torch.enable_grad():
            scale = torch.from_numpy(nearest.scale.copy())[:, None]
            matrix = self.weight.reshape(len(self.weight), -1)
            exact = torch.from_numpy(matrix) / scale
            floor = torch.floor(exact)
            part = ((exact - floor) - low) / (high - low)
            v = torch.log(part / (1 - part)).requires_grad_()
            x, wanted, bias = map(torch.from_numpy, (self.rows, self.target, self.bias))
            wanted = torch.relu(wanted) if relu else wanted

            def error(rows: Any, right: Any, integers: Any) -> Any:
                made = rows @ (integers * scale).T + bias
                made = torch.relu(made) if relu else made
                return (made - right).square().sum(dim=1).mean()

            integers = torch.from_numpy(nearest.integers.reshape(exact.shape).astype(np.float32))
            unit = float(error(x, wanted, integers))
            if unit == 0:
                return nearest.integers
            optimiser = torch.optim.Adam([v], lr=RATE)
            generator = torch.Generator().manual_seed(settings.seed)
            for iteration in range(settings.iterations):
                pick = torch.randint(len(x), (min(ROWS, len(x)),), generator=generator)
                h = torch.clamp(torch.sigmoid(v) * (high - low) + low, 0, 1)
                loss = error(x[pick], wanted[pick], torch.clamp(floor + h, -limit, limit)) / unit
                beta = beta_at(iteration, settings.iterations)
                if beta is not None:
                    loss = loss + REGULARISATION * (1 - (2 * h - 1).abs().pow(beta)).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            up = torch.sigmoid(v.detach()) * (high - low) + low >= 0.5
            found = torch.clamp(floor + up, -limit, limit)
        return np.asarray(found.numpy(), np.int8).reshape(self.weight.shape)


def beta_at(iteration: int, iterations: int) -> float | None:
    """The exponent β of an iteration: None in the warm-up, then it falls in equal steps."""
    warm = int(iterations * WARMUP)
    if iteration < warm:
        return None
    left = (iterations - iteration) / (iterations - warm)
    return BETA[1] + (BETA[0] - BETA[1]) * left


__all__ = ["Settings", "adaround", "beta_at", "check_torch"]
