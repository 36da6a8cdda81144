"""Pace: work in the background sleeps in proportion while batches come, and not otherwise."""

from __future__ import annotations

import pytest

from embcache import pace


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept, by clocks that stand still unless `now` is moved."""
    sleeps: list[float] = []
    monkeypatch.setattr(pace.time, "sleep", sleeps.append)
    return sleeps


def at(monkeypatch: pytest.MonkeyPatch, worked: float, passed: float) -> None:
    monkeypatch.setattr(pace.time, "thread_time", lambda: worked)
    monkeypatch.setattr(pace.time, "monotonic", lambda: passed)


def test_pauses_are_in_proportion_to_work_while_batches_come(
    monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    one = pace.Pace()
    at(monkeypatch, 5.0, 100.0)
    one.pause()  # no batch yet, and what the thread did before is not our work
    one.note_step()
    at(monkeypatch, 5.001, 100.2)
    one.pause()
    at(monkeypatch, 5.004, 100.4)
    one.pause(hurry=True)
    at(monkeypatch, 5.007, 100.6)
    one.pause()
    at(monkeypatch, 9.0, 100.9)
    one.pause()  # a long piece: others get in, and it goes on soon
    at(monkeypatch, 9.1, 101.1)
    one.pause()  # the last batch is long ago
    least, most = pace.LEAST_S, pace.MOST_S
    assert slept == pytest.approx([least, 0.005, least, 0.015, most, least])
