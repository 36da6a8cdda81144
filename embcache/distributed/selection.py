"""What a sweep takes away where that depends on a whole table, of which each rank holds a part: a selection by all of them.

Ranks are pairs (value, key) of unsigned numbers, all different; wanted is the n-th smallest of all ranks together. Each rank sorts
its own; then 16 bits of the answer are found at a time, by sums of histograms (radix selection, as MSD radix sort is cut
short). So the answer is exact, and that of one process that holds all, and what travels does not grow with the table:
eight sums of 512 KiB for a table at most, in the step of a sweep alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .ranks import Channel

__all__ = ["Selection", "nth_rank"]

DIGIT_BITS = 16
DIGITS = 1 << DIGIT_BITS


def nth_rank(channel: Channel, ranks: np.ndarray, n: int) -> tuple[int, int]:
    """The n-th smallest, n >= 1, of all ranks' `ranks` together, uint64 (k, 2); there are that many."""
    mine = ranks[np.lexsort((ranks[:, 1], ranks[:, 0]))]
    found: list[int] = []
    for half in range(2):
        column, prefix = mine[:, half], 0
        for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
            digits = ((column >> np.uint64(shift)) & np.uint64(DIGITS - 1)).astype(np.int64)
            histogram = channel.sum(
                "a selection of rows to evict", torch.from_numpy(np.bincount(digits, minlength=DIGITS).astype(np.int64))
            )
            ends = np.cumsum(histogram.numpy())
            digit = int(np.searchsorted(ends, n))
            n -= int(ends[digit - 1]) if digit else 0
            prefix = prefix << DIGIT_BITS | digit
            low, high = np.searchsorted(digits, [digit, digit + 1])  # they are sorted within one prefix
            mine, column = mine[low:high], column[low:high]
        found.append(prefix)
    return found[0], found[1]


class Selection:
    """``agree`` of `SwapManager.plan` for one batch: asks all ranks once, however often the batch is planned.

    Parameters
    ----------
    channel : Channel
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: list[Any] | None = None

    def __call__(self, asked: list[Any]) -> list[Any]:
        """See `SwapManager.plan`; every rank is asked the same of its own part."""
        if self._answers is None:
            self._answers = [self._floor(*one[2:]) if one[0] == "floor" else self._lowest(*one[2:]) for one in asked]
        return self._answers

    def _sums(self, *numbers: int) -> list[int]:
        sums: list[int] = self._channel.sum("what a sweep evicts", torch.tensor(numbers, dtype=torch.int64)).tolist()
        return sums

    def _floor(self, cutoff: int, keep_min: int, ranks: np.ndarray, living: int) -> int:
        """`cutoff`, or a lower one that `keep_min` rows survive, those of equal age together: the planner's own rule."""
        doomed, rows = self._sums(len(ranks), living)
        missing = keep_min - (rows - doomed)
        if missing <= 0:
            return cutoff
        if doomed <= missing:
            return -(2**63)
        value, _ = nth_rank(self._channel, ranks, doomed - missing + 1)
        return value - 2**63

    def _lowest(
        self, share: float, keep_min: int, ranks: np.ndarray, living: int, waiting: np.ndarray
    ) -> tuple[Any, Any]:
        """The largest ranks of rows and of waiting keys that go."""
        rows, live, entries = self._sums(len(ranks), living, len(waiting))
        doomed = min(int(share * float(rows)), live - keep_min)
        forgotten = int(share * float(entries))
        return (
            nth_rank(self._channel, ranks, doomed) if doomed > 0 else None,
            nth_rank(self._channel, waiting, forgotten) if forgotten > 0 else None,
        )
