"""Click data: dense numbers, sparse keys and labels in time order, and how keys are made.

A data set is a `Clicks`; `nycflights.py`, `criteo.py` and `synthetic.py` each make one. Keys are feature-major, so that
a batch of them is already laid out as `embcache.JaggedFeatures` wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

import embcache as ec

__all__ = ["Clicks", "cross_keys", "standardize", "string_keys"]


@dataclass(frozen=True)
class Clicks:
    """Examples in time order.

    Attributes
    ----------
    features : list of str
        Names of the F sparse features.
    dense : float32 array, shape (n, D)
    keys : int64 array, shape (F, n)
        One key of each feature for each example; any int64 is legal.
    labels : float32 array, shape (n,)
        0 or 1.
    """

    features: list[str]
    dense: npt.NDArray[np.float32]
    keys: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def with_keys(self, keys: npt.NDArray[np.int64]) -> Clicks:
        """The same examples under other keys."""
        return replace(self, keys=keys)

    def between(self, start: int, stop: int) -> Clicks:
        """The examples `start` to `stop`, as views."""
        return Clicks(self.features, self.dense[start:stop], self.keys[:, start:stop], self.labels[start:stop])

    def split(self, train_share: float) -> tuple[Clicks, Clicks]:
        """The first `train_share` of the examples, and the rest."""
        cut = int(len(self) * train_share)
        return self.between(0, cut), self.between(cut, len(self))

    def batches(self, size: int) -> Iterator[Clicks]:
        """Consecutive batches in time order; the last may be smaller."""
        for start in range(0, len(self), size):
            yield self.between(start, min(start + size, len(self)))

    def distinct(self) -> list[int]:
        """Number of distinct keys of each feature."""
        return [len(np.unique(column)) for column in self.keys]

    def most_in_a_batch(self, size: int) -> list[int]:
        """Largest number of distinct keys that one batch of `size` has, for each feature."""
        most = [0] * len(self.features)
        for batch in self.batches(size):
            most = [max(old, new) for old, new in zip(most, batch.distinct(), strict=True)]
        return most


def string_keys(values: Sequence[str]) -> npt.NDArray[np.int64]:
    """The keys of strings; each distinct string is hashed once."""
    index_of: dict[str, int] = {}
    codes = np.fromiter((index_of.setdefault(value, len(index_of)) for value in values), np.int64, len(values))
    return np.asarray(ec.hash_strings(list(index_of)), np.int64)[codes]


def cross_keys(*columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One key for each combination of the columns' keys: a fold with the finalizer of splitmix64 (order matters)."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ column.view(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed.view(np.int64)


def standardize(dense: npt.NDArray[np.float64], train_share: float) -> npt.NDArray[np.float32]:
    """Columns with mean 0 and deviation 1 over the training part; a column that is constant there becomes 0."""
    train = dense[: max(int(len(dense) * train_share), 1)]
    deviation = train.std(axis=0)
    scaled = (dense - train.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return np.where(deviation > 0, scaled, 0.0).astype(np.float32)
