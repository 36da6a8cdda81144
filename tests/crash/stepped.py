"""A table whose content is a function of the number of steps it went through, so that any restored state can be judged."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.ma  # NumPy imports these two when they are first used, which would be in each child
import numpy.random

from embcache.checkpoint import generations, verify
from embcache.table import EmbTable

__all__ = ["change", "check", "content", "expected", "go_on"]


def change(table: EmbTable, step: int) -> None:
    """What a step does: a function of the step alone."""
    rng = np.random.default_rng(step)
    keys = rng.integers(0, 2000, 300)
    table.assign(keys, rng.standard_normal((300, 4)).astype(np.float32))
    table.erase(rng.integers(0, 2000, 50))


def content(table: EmbTable) -> dict[int, bytes]:
    """Key -> bytes of its row."""
    return {int(k): w.tobytes() for keys, weights, *_ in table.items() for k, w in zip(keys, weights, strict=True)}


_reached: list[tuple[int, EmbTable]] = []  # how far the last table was taken: tests mostly ask for ever later steps


@functools.lru_cache(64)
def expected(step: int) -> dict[int, bytes]:
    """The content after so many steps."""
    done, table = _reached.pop() if _reached else (0, EmbTable("t", 4))
    if done > step:
        done, table = 0, EmbTable("t", 4)
    for one in range(done + 1, step + 1):
        change(table, one)
    _reached.append((step, table))
    return content(table)


def check(path: Path, acknowledged: dict[int, int]) -> int:
    """The newest acknowledged generation, or a newer one, is restored with its step's rows; returns the step."""
    if not acknowledged and not generations(path):
        return 0
    assert [one for one in verify(path) if one.severity == "damage"] == []
    table = EmbTable("t", 4)
    report = table.restore(path)
    step = int(report.state["step"])
    assert report.generation >= max(acknowledged, default=1) and report.skipped == []
    assert acknowledged.get(report.generation, step) == step
    assert content(table) == expected(step)
    return step


def go_on(path: Path, first: int, last: int) -> None:
    """Restore what is there, go through the steps from `first` to `last`, and save: the dead have left nothing behind."""
    table = EmbTable("t", 4)
    if first > 1:
        table.restore(path)
    for one in range(first, last + 1):
        change(table, one)
    table.save(path, delta=True, keep=1, state={"step": b"%d" % last})
    assert check(path, {}) == last and verify(path) == []
