"""A writer that a test lets go on chunk by chunk, so that each example says what happens between which chunks of a save."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import embcache as ec
from embcache import savejob
from embcache.checkpoint import Writer

LIMIT_S = 600  # far beyond what it takes: a machine may stand still for minutes


class Gate(Writer):
    """Writes chunks of few rows, each when it is let."""

    rows = 3
    permits: threading.Semaphore
    refused: OSError | None = None
    taken = 0

    @classmethod
    def let_one(cls) -> None:
        """Let the writer write one more chunk, once it has come to it."""
        taken = cls.taken
        cls.permits.release()
        deadline = time.monotonic() + LIMIT_S
        while cls.taken == taken and time.monotonic() < deadline:
            time.sleep(0.001)

    def wait(self) -> None:
        assert self.permits.acquire(timeout=LIMIT_S), "nobody lets the writer go on"
        Gate.taken += 1
        if self.refused is not None:
            raise ec.DiskFullError(self.refused.errno, "no room is left", self.path)

    def rows_per_chunk(self, description: Any) -> int:
        return self.rows

    def write_filled(self, *given: Any) -> None:
        self.wait()
        super().write_filled(*given)

    def write_rows(self, *given: Any, **more: Any) -> None:
        self.wait()
        super().write_rows(*given, **more)

    def write_filter(self, *given: Any, **more: Any) -> None:
        self.wait()
        super().write_filter(*given, **more)

    def commit(self) -> None:
        self.wait()
        super().commit()


def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    """Managers save through a gate, closed at first; for a fixture."""
    monkeypatch.setattr(savejob, "Writer", Gate)
    for piece in ("PIECE_ROWS", "PIECE_SLOTS", "PIECE_ENTRIES"):
        monkeypatch.setattr(savejob, piece, 2)
    monkeypatch.setattr(savejob, "PIECE_SKETCH", 100)
    monkeypatch.setattr(Gate, "refused", None)
    monkeypatch.setattr(Gate, "permits", threading.Semaphore(0), raising=False)
    yield Gate
    Gate.permits.release(10**6)


@contextlib.contextmanager
def held_up(gate: type[Gate]) -> Iterator[None]:
    """The writer waits for permits, until the end."""
    gate.permits = threading.Semaphore(0)
    try:
        yield
    finally:
        gate.permits.release(10**6)
