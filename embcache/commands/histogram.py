"""Histograms by powers of two: of any range, in 64 numbers, and exact however many values come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Integers", "Largest", "Sizes", "bars"]

_WIDTH = 40


class Integers:
    """int64 values by sign and length in bits: -2**63 to 2**63 - 1 in 128 bins."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(129, np.int64)

    def add(self, values: npt.NDArray[np.int64]) -> None:
        """Count these values."""
        negative = values < 0
        # Flipped, a negative number has the length of -(value + 1): no value leaves int64.
        sizes = np.where(negative, ~values, values).astype(np.uint64)
        edges = np.uint64(1) << np.arange(64, dtype=np.uint64)
        bits = np.searchsorted(edges, sizes, side="right")
        self.counts += np.bincount(np.where(negative, 63 - bits, 64 + bits), minlength=129)

    def bins(self) -> list[tuple[int, int, int]]:
        """Non-empty bins: (first value, last value, count)."""
        found = []
        for at in np.flatnonzero(self.counts).tolist():
            bits = at - 64 if at >= 64 else 63 - at
            low, high = (1 << bits - 1 if bits else 0), (1 << bits) - 1
            found.append((low, high, int(self.counts[at])) if at >= 64 else (~high, ~low, int(self.counts[at])))
        return found


class Sizes:
    """Numbers >= 0 by their exponent: zero, 2**-64 and below, ..., 2**63 and above; those that are no numbers apart."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(129, np.int64)
        self.not_finite = 0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count these values."""
        finite = np.isfinite(values)
        self.not_finite += int(np.count_nonzero(~finite))
        kept = values[finite]
        _, exponents = np.frexp(kept)
        at = np.where(kept == 0, 0, np.clip(exponents.astype(np.int64), -63, 64) + 64)
        self.counts += np.bincount(at, minlength=129)

    def bins(self) -> list[tuple[float, float, int]]:
        """Non-empty bins: (from, below, count); (0, 0, count) for zeros."""
        return [
            (0.0 if at == 0 else 2.0 ** (at - 65), 0.0 if at == 0 else 2.0 ** (at - 64), int(self.counts[at]))
            for at in np.flatnonzero(self.counts).tolist()
        ]


class Largest:
    """The keys with the largest values so far; of equal values the smallest key."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._keys: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._values: npt.NDArray[Any] = np.empty(0)

    def add(self, keys: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Look at these too."""
        if self.most and len(keys) > 4 * self.most and len(self._values) == self.most:
            better = values >= self._values[-1]
            keys, values = keys[better], values[better]
        keys = np.concatenate([self._keys, keys])
        values = values.copy() if len(self._values) == 0 else np.concatenate([self._values, values])
        order = np.lexsort((keys, -values))[: self.most]
        self._keys, self._values = keys[order], values[order]

    def pairs(self) -> list[tuple[int, Any]]:
        """(key, value), the largest first."""
        return list(zip(self._keys.tolist(), self._values.tolist(), strict=True))


def bars(title: str, bins: list[tuple[Any, Any, int]]) -> list[str]:
    """Lines of a histogram, with a bar a bin."""
    if not bins:
        return [f"{title}: none"]
    labels = [f"{low:,} to {high:,}" if isinstance(low, int) else f"{low:.3g} to {high:.3g}" for low, high, _ in bins]
    width, most, total = max(map(len, labels)), max(count for _, _, count in bins), sum(count for _, _, count in bins)
    return [f"{title}:"] + [
        f"  {label:>{width}}  {count:>13,}  {100 * count / total:5.1f} %  {'#' * -(-_WIDTH * count // most)}"
        for label, (_, _, count) in zip(labels, bins, strict=True)
    ]
