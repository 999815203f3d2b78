"""Synthetic image-text pairs: a coloured shape somewhere on a coloured background, and a sentence that says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scent_lightning.data.hashing import STEP, hashed_keys, mix, uniform

__all__ = ["NUM_CAPTIONS", "Shapes"]

Array = npt.NDArray[Any]

SIZES = ("small", "large")
SHAPES = ("circle", "square", "triangle", "cross")
POSITIONS = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 150, 60),
    "blue": (45, 70, 210),
    "yellow": (240, 215, 50),
    "pink": (240, 130, 190),
    "cyan": (60, 210, 220),
    "white": (240, 240, 240),
    "black": (20, 20, 20),
}
# Size, shape, position, colour, and which of the other colours the background has.
RADICES = (len(SIZES), len(SHAPES), len(POSITIONS), len(COLOURS), len(COLOURS) - 1)
CLASSES = {"size": SIZES, "shape": SHAPES, "position": POSITIONS, "colour": tuple(COLOURS)}  # as in RADICES
NUM_CAPTIONS = int(np.prod(RADICES))

RADII = (0.13, 0.22)  # of the two sizes, as a fraction of the image
RADIUS_JITTER = 0.12  # as a fraction of the radius
SHIFT = 0.05  # of the centre in each direction, at most, as a fraction of the image
SHADE = 20  # of each channel of either colour, at most
JITTERS = 9
STREAMS = {"train": 5, "val": 6}  # others than those of the synthetic features


def _distance(shape: int, x: Array, y: Array, radius: Array) -> Array:
    """Signed distance from the shape's edge, negative inside, exact near the sides; all of about equal area.

    Args:
        shape: position in SHAPES.
        x: to the right of the centre, in pixels, shape (B, 1, S).
        y: below the centre, in pixels, shape (B, S, 1).
        radius: of the circle, in pixels, shape (B, 1, 1).

    Returns:
        Distance in pixels, shape (B, S, S).
    """
    distance: Array
    if shape == 0:
        distance = np.sqrt(x * x + y * y) - radius
    elif shape == 1:
        distance = np.maximum(np.abs(x), np.abs(y)) - np.float32(0.886) * radius
    elif shape == 2:
        y = y - np.float32(0.375) * radius  # centre of the height, not of gravity: fewer tips outside the image
        slope = np.float32(0.866) * np.abs(x) - np.float32(0.5) * y
        distance = np.maximum(slope, y) - np.float32(0.75) * radius
    else:
        across, down = np.abs(x), np.abs(y)
        long, short = np.float32(1.15) * radius, np.float32(0.42) * radius
        bar = np.maximum(across - long, down - short)
        distance = np.minimum(bar, np.maximum(across - short, down - long))
    return distance


class Shapes:
    """Pairs of one split, each computed from ``(seed, split, row)`` alone.

    A caption names size (2), colour (8), shape (4), position (9) and background (7 other colours): ``NUM_CAPTIONS`` =
    4,032 different ones, such as "a large red circle at the top left on a blue background". Rows 0 to 4,031 of a split
    have each caption once, in random order; so have the next 4,032, in another order. Centre, radius and shades of a
    picture vary from row to row within what its caption says.

    Args:
        split: "train" or "val".
        seed: of everything, at least 0.
        image_size: height and width S, in pixels.

    Example:
        >>> shapes = Shapes("train", seed=0, image_size=32)
        >>> rows = np.array([0, 1])
        >>> images = shapes.draw(rows, shapes.numbers(rows))
        >>> images.shape, images.dtype
        ((2, 3, 32, 32), dtype('uint8'))
        >>> shapes.caption(0)
        'a small red circle at the top left on a green background'
    """

    def __init__(self, split: str, seed: int, image_size: int) -> None:
        self.stream = STREAMS[split]
        self.seed = seed
        self.image_size = image_size
        self._orders: dict[int, Array] = {}

    def numbers(self, rows: Array) -> Array:
        """Number of the caption of each row.

        Args:
            rows: shape (B,), int64.

        Returns:
            From 0 to NUM_CAPTIONS − 1, shape (B,), int64.
        """
        blocks, positions = np.divmod(rows, NUM_CAPTIONS)
        numbers = np.empty(len(rows), dtype=np.int64)
        for block in np.unique(blocks).tolist():
            if block not in self._orders:
                order = np.random.default_rng([self.seed, self.stream, block]).permutation(NUM_CAPTIONS)
                self._orders[block] = order.astype(np.int16)
            chosen = blocks == block
            numbers[chosen] = self._orders[block][positions[chosen]]
        return numbers

    @staticmethod
    def caption(number: int) -> str:
        """The caption of that number, from 0 to NUM_CAPTIONS − 1."""
        size, shape, position, colour, other = (int(part) for part in np.unravel_index(number, RADICES))
        names = list(COLOURS)
        return (
            f"a {SIZES[size]} {names[colour]} {SHAPES[shape]} at the {POSITIONS[position]} on a "
            f"{names[(colour + 1 + other) % len(names)]} background"
        )

    @staticmethod
    def classes(numbers: Array, kind: str) -> Array:
        """Position in ``CLASSES[kind]`` of what the captions of these numbers say, shape (B,), int64."""
        return np.unravel_index(numbers, RADICES)[list(CLASSES).index(kind)]

    def draw(self, rows: Array, numbers: Array) -> Array:
        """Images of the rows, with antialiased edges.

        Args:
            rows: shape (B,), int64.
            numbers: of their captions, shape (B,), int64.

        Returns:
            Shape (B, 3, S, S), uint8.
        """
        size, shape, position, colour, other = np.unravel_index(numbers, RADICES)
        keys = hashed_keys(self.seed, self.stream, rows)
        jitters = uniform(mix(keys[:, None] + np.arange(1, JITTERS + 1, dtype=np.uint64) * STEP)).astype(np.float32)
        jitters = 2 * jitters - 1
        radius = np.array(RADII, dtype=np.float32)[size] * (1 + RADIUS_JITTER * jitters[:, 0]) * self.image_size
        centres = np.array([0.26, 0.5, 0.74], dtype=np.float32)
        columns = (centres[position % 3] + SHIFT * jitters[:, 1]) * self.image_size
        lines = (centres[position // 3] + SHIFT * jitters[:, 2]) * self.image_size
        palette = np.array(list(COLOURS.values()), dtype=np.float32)
        above = np.clip(palette[colour] + SHADE * jitters[:, 3:6], 0, 255)
        below = np.clip(palette[(colour + 1 + other) % len(palette)] + SHADE * jitters[:, 6:9], 0, 255)

        pixels = np.arange(self.image_size, dtype=np.float32) + np.float32(0.5)
        x = (pixels[None] - columns[:, None])[:, None, :]
        y = (pixels[None] - lines[:, None])[:, :, None]
        cover = np.empty((len(rows), self.image_size, self.image_size), dtype=np.float32)
        for number in range(len(SHAPES)):
            chosen = np.flatnonzero(shape == number)
            cover[chosen] = _distance(number, x[chosen], y[chosen], radius[chosen, None, None])
        np.subtract(np.float32(0.5), cover, out=cover)
        np.clip(cover, 0, 1, out=cover)
        images = np.empty((len(rows), 3, self.image_size, self.image_size), dtype=np.uint8)
        for channel in range(3):
            painted = cover * (above[:, channel] - below[:, channel])[:, None, None]
            painted += below[:, channel, None, None] + np.float32(0.5)
            images[:, channel] = painted
        return images
