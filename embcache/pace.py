"""Pace: how much of a processor something in the background may take from training."""

from __future__ import annotations

import time

__all__ = ["Pace"]

IDLE_PER_WORK = 5  # while batches are trained, so many seconds of sleep follow on each of work
TRAINING_S = 1.0  # so long after a batch the next one is expected
LEAST_S = 50e-6  # what a thread that waits at a door takes to wake up
MOST_S = 0.1


class Pace:
    """Sleeps between pieces of work in proportion to what they took, as long as batches go on coming.

    Work is counted in processor time, so a busy machine does not make the pauses longer. Thread safety: `note_step` in any thread,
    `pause` in the one that works.
    """

    def __init__(self) -> None:
        self._step_s = -TRAINING_S
        self._worked_s: float | None = None

    def note_step(self) -> None:
        """A batch is about to train."""
        self._step_s = time.monotonic()

    def pause(self, hurry: bool = False) -> None:
        """Let others go on; with `hurry`, since somebody waits for the work, only for a moment."""
        now = time.thread_time()
        worked = 0.0 if self._worked_s is None else now - self._worked_s
        training = not hurry and time.monotonic() - self._step_s < TRAINING_S
        time.sleep(min(max(IDLE_PER_WORK * worked if training else 0.0, LEAST_S), MOST_S))
        self._worked_s = time.thread_time()
