"""Numbers that are a hash of (seed, stream, counter, position): nothing is stored, or drawn in an order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["STEP", "hashed_keys", "mix", "normal", "uniform"]

Array = npt.NDArray[Any]

STEP = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = np.float32(1 - 2**-24)


def mix(state: Array) -> Array:
    """SplitMix64's output function, in place; uint64 of any shape."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def hashed_keys(seed: int, stream: int, counter: Array) -> Array:
    """64 random bits for each of ``counter``, shape (B,): element ``counter`` of SplitMix64 from a seed of its own."""
    start = mix(np.array([seed % 2**64], dtype=np.uint64) + STEP)
    start = mix(start + np.array([stream + 1], dtype=np.uint64) * STEP)
    return mix(start + (counter.astype(np.uint64) + np.uint64(1)) * STEP)


def uniform(keys: Array) -> Array:
    """Uniform on [0, 1), float64, shape (B,)."""
    numbers: Array = (keys >> np.uint64(11)).astype(np.float64)
    numbers *= 2.0**-53
    return numbers


def normal(keys: Array, count: int) -> Array:
    """Standard normal, float32, shape (B, count): Box–Muller on the halves of SplitMix64 from each key, shape (B,)."""
    pairs = (count + 1) // 2
    bits = mix(keys[:, None] + np.arange(1, pairs + 1, dtype=np.uint64) * STEP)
    radius = (bits >> np.uint64(32)).astype(np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2**-32)
    np.minimum(radius, _BELOW_ONE, out=radius)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle = bits.astype(np.uint32).astype(np.float32)
    angle *= np.float32(2 * math.pi * 2**-32)
    numbers = np.empty((len(keys), count), dtype=np.float32)
    np.multiply(radius, np.cos(angle), out=numbers[:, :pairs])
    np.multiply(radius[:, : count - pairs], np.sin(angle)[:, : count - pairs], out=numbers[:, pairs:])
    return numbers
