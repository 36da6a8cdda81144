"""Timeline: when each stage of each batch began and ended, and what that comes to.

The newest intervals lie in a ring, for traces and for how far stages overlap; sums are kept of all. Each stage belongs to one
thread, which alone writes its sum, so nothing here needs a lock. The clock is passed in (tests).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["STAGES", "WAITS", "Interval", "Timeline"]

# In the order in which a batch meets them.
STAGES = ("load", "prepare", "plan", "swap_out", "swap_in", "compute", "evaluate")
# Of a stage's thread: the loader for room ahead, the coordinator for a loaded batch and for the window, the caller for a batch.
WAITS = ("wait_room", "wait_loaded", "wait_window", "wait_ready")
MOVES = ("swap_out", "swap_in")  # which a batch may meet several times, and counts once
HOST_STAGES = ("prepare", "plan", "swap_out", "swap_in")
KEPT = 4096

# Stage or wait, number of the batch, begin and end in seconds of the clock.
Interval = tuple[str, int, float, float]


class Timeline:
    """Begins and ends of stages.

    Parameters
    ----------
    kept : int
        Intervals in the ring.
    clock : callable
        Seconds.
    ranges : callable, optional
        ``ranges(stage)`` opens a range in a profiler, a context manager that is left when the stage ends; or gives None.

    Attributes
    ----------
    counts, seconds : dict
        By stage and wait: how often (of `MOVES`: of how many batches), and how long in all.
    """

    def __init__(
        self,
        kept: int = KEPT,
        clock: Callable[[], float] = time.perf_counter,
        ranges: Callable[[str], AbstractContextManager[Any] | None] | None = None,
    ) -> None:
        self.clock, self._ranges = clock, ranges
        self._opened: dict[str, AbstractContextManager[Any]] = {}
        self._ring: deque[Interval] = deque(maxlen=kept)
        self.counts = dict.fromkeys(STAGES + WAITS, 0)
        self._moved = dict.fromkeys(MOVES, -1)  # the last batch of each
        self.seconds = dict.fromkeys(STAGES + WAITS, 0.0)
        self.began: float | None = None  # of the first computed batch
        self.ended = 0.0

    def start(self, stage: str, number: int) -> float:
        """Now: to be given to `stop`, by the same thread."""
        opened = None if self._ranges is None else self._ranges(stage)
        if opened is not None:
            self._opened[stage] = opened
        return self.clock()

    def stop(self, stage: str, number: int, start: float, within: Iterable[tuple[str, float]] = ()) -> None:
        """The stage of batch `number` that began at `start` ends now; its last seconds were those of the stages `within`, in order."""
        end = self.clock()
        parts = list(within)
        begin = max(start, end - sum(seconds for _, seconds in parts))
        self._add(stage, number, start, begin)
        for part, seconds in parts:
            if seconds > 0:
                self._add(part, number, begin, min(begin + seconds, end))
                begin = min(begin + seconds, end)
        if self._opened and stage in self._opened:
            self._opened.pop(stage).__exit__(None, None, None)
        if stage == "compute":
            if self.began is None:
                self.began = start
            self.ended = end

    def _add(self, stage: str, number: int, begin: float, end: float) -> None:
        self._ring.append((stage, number, begin, end))
        if self._moved.get(stage) != number:
            self.counts[stage] += 1
        if stage in self._moved:
            self._moved[stage] = number
        self.seconds[stage] += end - begin

    def intervals(self) -> list[Interval]:
        """The newest intervals, in the order of their ends."""
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # another thread has just added one
                continue

    @property
    def wall(self) -> float:
        """Seconds from the begin of the first computed batch to the end of the last one."""
        return 0.0 if self.began is None else self.ended - self.began

    def overlap(self) -> float:
        """Share of the host's work on later batches that was done while a batch was computed, among the newest intervals."""
        intervals = self.intervals()
        computed = [(begin, end) for stage, _, begin, end in intervals if stage == "compute"]
        worked = [(begin, end) for stage, _, begin, end in intervals if stage in HOST_STAGES]
        total = sum(end - begin for begin, end in worked)
        return _common(computed, worked) / total if total > 0 else 0.0


def _common(ordered: list[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """Seconds that `others` have in common with `ordered`, which are disjoint and rise."""
    common, first = 0.0, 0
    for begin, end in sorted(others):
        while first < len(ordered) and ordered[first][1] <= begin:
            first += 1
        place = first
        while place < len(ordered) and ordered[place][0] < end:
            common += min(end, ordered[place][1]) - max(begin, ordered[place][0])
            place += 1
    return common
