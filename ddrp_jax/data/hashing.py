"""Random numbers as a pure function of their coordinates, for whole arrays at once."""

from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def random_bits(*coordinates: Any) -> np.ndarray:
    """Returns uniform uint64 numbers, one for each point of the broadcast integer coordinates.

    Each coordinate goes through the finaliser of splitmix64 (Steele et al. 2014), keyed by those
    before it. No state and no library's generator is involved, so numbers stay the same wherever
    and in whatever order they are asked for.
    """
    bits = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for coordinate in coordinates:
            word = np.asarray(coordinate).astype(np.uint64)
            bits = _mix(bits * _GOLDEN + word + _GOLDEN)
    return bits


def uniform(bits: np.ndarray) -> np.ndarray:
    """Returns float64 numbers in [0, 1) from the upper 53 bits of `bits`."""
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(word: np.ndarray) -> np.ndarray:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
