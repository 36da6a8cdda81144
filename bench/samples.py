"""Keys and draws for the benches: random 64-bit keys, uniform and Zipf(1.05) draws, the same from run to run.

An *ordinal* 0 .. n-1 names the n-th key put into a table; `keys_of` maps ordinals to keys by a bijection of all 64-bit
integers, so different ordinals never share a key and ordinals beyond n are keys that the table does not hold.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Sampler", "dense_table", "keys_of"]

ZIPF_EXPONENT = 1.05


def keys_of(ordinals: np.ndarray) -> np.ndarray:
    """Random-looking int64 keys of ordinals: the finaliser of splitmix64, a bijection."""
    x = ordinals.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype(np.int64)


class Sampler:
    """Draws of ordinals below `population`.

    Zipf draws invert the continuous distribution function bounded to ranks 1 .. population. Ranks become ordinals by
    a random permutation: hot keys lie anywhere in a table that was filled in ordinal order.
    """

    def __init__(self, population: int, seed: int = 1) -> None:
        self.population = population
        self.rng = np.random.default_rng(seed)
        self._ordinal_of_rank = self.rng.permutation(population)

    def uniform(self, count: int) -> np.ndarray:
        """`count` uniform draws."""
        return self.rng.integers(0, self.population, count)

    def zipf(self, count: int) -> np.ndarray:
        """`count` Zipf draws."""
        one_less = 1.0 - ZIPF_EXPONENT
        ranks = (1.0 + self.rng.random(count) * (self.population**one_less - 1.0)) ** (1.0 / one_less)
        return self._ordinal_of_rank[np.minimum(ranks.astype(np.int64), self.population) - 1]

    def missing(self, count: int) -> np.ndarray:
        """`count` ordinals that lie beyond the population."""
        return self.population + self.uniform(count)

    def draw(self, kind: str, count: int) -> np.ndarray:
        """Draws of the kind ``"uniform"``, ``"zipf"`` or ``"missing"``."""
        return {"uniform": self.uniform, "zipf": self.zipf, "missing": self.missing}[kind](count)


def dense_table(rows: int, dim: int, seed: int = 1) -> np.ndarray:
    """A written float32 table without zeros: an untouched one would be backed by a single shared page."""
    table = np.random.default_rng(seed).random((rows, dim), dtype=np.float32)
    table -= np.float32(0.500001)
    return table
