"""Draws the picture that `r18 demo` classifies: an orange on a table.

    python tools/draw_demo_picture.py            # r18/demo/orange.jpg
    python tools/draw_demo_picture.py --out FILE

Drawn, so that the package may ship it; the same pixels every time, before JPEG rounds them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

OUT = Path(__file__).resolve().parents[1] / "r18" / "demo" / "orange.jpg"
WIDTH, HEIGHT = 400, 320
QUALITY = 88
CENTRE, RADIUS = (205.0, 165.0), 105.0
LIGHT = (-0.45, -0.65, 0.61)
"""Towards the light: x to the right, y down, z to the viewer."""

Pixels = NDArray[np.float64]


def smooth_noise(seed: int, cells: tuple[int, int], size: tuple[int, int]) -> Pixels:
    """(H, W) in [-1, 1]: random values on a grid of cells (rows, columns), interpolated."""
    coarse = np.random.default_rng(seed).uniform(-1, 1, cells)
    image = Image.fromarray(coarse.astype(np.float32)).resize(size[::-1], Image.Resampling.BICUBIC)
    return np.asarray(image, np.float64)


def background(y: Pixels, x: Pixels) -> Pixels:
    """(H, W, 3): a wall out of focus above a table of wood with its grain."""
    size = y.shape
    wall = np.stack([0.50 + 0 * y, 0.56 + 0 * y, 0.58 + 0 * y], -1)
    wall *= (0.75 + 0.35 * smooth_noise(1, (4, 5), size) * 0.5 + 0.25 * (1 - x / WIDTH))[..., None]
    depth = np.clip((y - 0.56 * HEIGHT) / (0.44 * HEIGHT), 0, 1)
    grain = smooth_noise(2, (60, 4), size) * 0.09 + smooth_noise(3, (150, 12), size) * 0.05
    wood = np.array([0.55, 0.36, 0.21]) * (0.8 + 0.45 * depth + grain)[..., None]
    edge = 1 / (1 + np.exp(-(y - 0.58 * HEIGHT) / 3.0))[..., None]
    return wall * (1 - edge) + wood * edge


def shadowed(picture: Pixels, y: Pixels, x: Pixels) -> Pixels:
    """The picture with the shadow that the orange casts to the right, soft at its rim."""
    across = (x - CENTRE[0] - 45) / (RADIUS * 1.25)
    down = (y - CENTRE[1] - 0.88 * RADIUS) / (RADIUS * 0.30)
    dark = 1 / (1 + np.exp((np.hypot(across, down) - 0.92) * 9))
    return np.asarray(picture * (1 - 0.62 * dark)[..., None])


def orange(picture: Pixels, y: Pixels, x: Pixels) -> Pixels:
    """The picture with a sphere, its peel dimpled, lit from the upper left."""
    u, v = (x - CENTRE[0]) / RADIUS, (y - CENTRE[1]) / (RADIUS * 0.96)
    inside = 1 - u * u - v * v
    w = np.sqrt(np.clip(inside, 0, 1))
    peel = smooth_noise(4, (75, 95), y.shape) + 0.6 * smooth_noise(5, (120, 150), y.shape)
    slope_y, slope_x = np.gradient(peel)
    normal = np.stack([u - 0.22 * slope_x, v - 0.22 * slope_y, w + 1e-3], -1)
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
    light = np.array(LIGHT) / np.linalg.norm(LIGHT)
    lit = np.clip(normal @ light, 0, 1)
    half = light + np.array([0.0, 0.0, 1.0])
    shine = np.clip(normal @ (half / np.linalg.norm(half)), 0, 1) ** 45
    rosette = np.exp(-((u - 0.20) ** 2 + (v + 0.42) ** 2) / 0.0035)  # where the stalk was
    colour = np.array([0.98, 0.50, 0.06]) * (1 + 0.05 * smooth_noise(6, (8, 8), y.shape))[..., None]
    colour = colour * (1 - 0.75 * rosette[..., None]) + np.array([0.25, 0.30, 0.10]) * (
        0.75 * rosette[..., None]
    )
    bounce = np.clip(v, 0, 1)[..., None] * np.array([0.10, 0.05, 0.02])
    ball = colour * (0.20 + 0.86 * lit)[..., None] + 0.38 * shine[..., None] + bounce
    rim = np.clip(inside * RADIUS / 4, 0, 1)[..., None]  # over two pixels, so that it is no stair
    return np.asarray(picture * (1 - rim) + ball * rim)


def drawn() -> NDArray[np.uint8]:
    """The picture as (320, 400, 3) uint8."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float64)
    picture = orange(shadowed(background(y, x), y, x), y, x)
    picture += np.random.default_rng(7).normal(0, 0.012, picture.shape)  # as a sensor has
    return np.asarray(np.clip(picture * 255 + 0.5, 0, 255), np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    Image.fromarray(drawn()).save(out, "JPEG", quality=QUALITY, optimize=True)
    print(f"{out}: {WIDTH}×{HEIGHT}, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
