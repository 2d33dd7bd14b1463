"""Whether a quantisation fits given float weights: integers may be one unit off, not two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from quantised_weights import quantised_weights
from r18.calibration.fit import check_fit
from r18.errors import WeightsError
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization, QuantizedWeight
from r18.graph.resnet import tiny
from r18.weights.precisions import quantization_of

FOLDED = fuse(tiny(), "all")
STEP = "layer2.0.conv1"

Change = Callable[[Quantization], Quantization]


def moved(by: int, where: int = 0, step: str = STEP) -> Change:
    """A change of one weight that is not near its limit by `by` units."""

    def change(found: Quantization) -> Quantization:
        weight = found.weights[step]
        integers = weight.integers.copy()
        inner = np.flatnonzero(np.abs(integers) < 5)
        integers.reshape(-1)[inner[where]] += by
        made = QuantizedWeight(integers, weight.scale)
        return replace(found, weights=dict(found.weights) | {step: made})

    return change


def biased(by: int, step: str = STEP) -> Change:
    def change(found: Quantization) -> Quantization:
        bias = found.biases[step].copy()
        bias[-1] += by
        return replace(found, biases=dict(found.biases) | {step: bias})

    return change


def cut_bias(found: Quantization) -> Quantization:
    return replace(found, biases=dict(found.biases) | {STEP: found.biases[STEP][:-1]})


def without_weight(found: Quantization) -> Quantization:
    return replace(found, weights={n: w for n, w in found.weights.items() if n != STEP})


def without_scale(found: Quantization) -> Quantization:
    return replace(found, scales={n: s for n, s in found.scales.items() if n != "image"})


def narrower(found: Quantization) -> Quantization:
    """Every scale of one step halved, so that the largest weights exceed the limit."""
    weight = found.weights[STEP]
    made = QuantizedWeight(weight.integers, weight.scale / 2)
    return replace(found, weights=dict(found.weights) | {STEP: made})


@pytest.mark.parametrize("bits", [8, 4])
def test_up_or_down_fits(bits: int) -> None:
    weights = quantised_weights(bits)
    found = quantization_of(weights)
    check_fit(FOLDED, weights, found)
    for step in (STEP, "conv1", "fc"):
        read = moved(0, step=step)(found).weights[step].integers
        assert np.array_equal(read, found.weights[step].integers)
        check_fit(FOLDED, weights, biased(1, step)(found))
        check_fit(FOLDED, weights, biased(-1, step)(found))


def test_the_other_neighbour_fits_and_no_further_one() -> None:
    """A weight between two integers may be either of them, and no other."""
    weights = quantised_weights(4)
    found = quantization_of(weights)
    exact = _units(weights, found)
    inner = np.flatnonzero(np.abs(found.weights[STEP].integers) < 5)
    for where in range(0, len(inner), 97):
        place = inner[where]
        up = 1 if exact[place] > found.weights[STEP].integers.reshape(-1)[place] else -1
        check_fit(FOLDED, weights, moved(up, where)(found))
        with pytest.raises(WeightsError, match=f"step '{STEP}': the quantised weight is not the"):
            check_fit(FOLDED, weights, moved(-2 * up, where)(found))
        with pytest.raises(WeightsError, match="rounding moves it by less than 1"):
            check_fit(FOLDED, weights, moved(2 * up, where)(found))


def _units(weights: object, found: Quantization) -> np.ndarray:
    from r18.graph.passes import fold_weights

    (name, _) = FOLDED.step(STEP).weights
    read = fold_weights(FOLDED, weights)[name].astype(np.float64)  # type: ignore[arg-type]
    return (read / found.weights[STEP].scale.astype(np.float64)[:, None, None, None]).reshape(-1)


def test_a_weight_beyond_the_limit_is_the_limit() -> None:
    """A weight beyond the limit may be the limit: AdaRound and least-error scales saturate."""
    weights = quantised_weights(4)
    found = narrower(quantization_of(weights))
    exact = _units(weights, found)
    assert np.abs(exact).max() > 13
    integers = (
        np.clip(np.rint(exact), -7, 7).astype(np.int8).reshape(found.weights[STEP].integers.shape)
    )
    made = QuantizedWeight(integers, found.weights[STEP].scale)
    bias = found.biases[STEP] * 2
    fits = replace(
        found,
        weights=dict(found.weights) | {STEP: made},
        biases=dict(found.biases) | {STEP: bias},
    )
    check_fit(FOLDED, weights, fits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (biased(2), f"step '{STEP}': the quantised bias is not the model's.* up to 2 units"),
        (biased(-2), f"step '{STEP}': the quantised bias is not the model's"),
        (biased(2, "fc"), "step 'fc': the quantised bias is not the model's"),
        (cut_bias, f"step '{STEP}': its bias has shape .*, not "),
        (without_weight, f"the quantisation has no weight for step '{STEP}'"),
        (without_scale, "no scale for 'image'"),
        (narrower, f"step '{STEP}': the quantised weight is not the model's"),
        (moved(2, step="fc"), "step 'fc': the quantised weight is not the model's"),
    ],
    ids=["bias up", "bias down", "last bias", "cut", "no weight", "no scale", "scale", "last"],
)
def test_what_does_not_fit(change: Change, words: str) -> None:
    weights = quantised_weights(8)
    with pytest.raises(WeightsError, match=words):
        check_fit(FOLDED, weights, change(quantization_of(weights)))
