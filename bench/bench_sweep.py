"""sweeps: what taking the dead out of a table costs in all, and the longest of the steps that it is spread over.

A table of one float32 a row has timestamps all over; a share of its rows is made old, a small batch is planned at the step
of a sweep, and further ones until the pass has been everywhere. Before each round the rows that went are put back. The
total is what these steps take beyond as many steps without a sweep; the longest step is given as it is, its batch included.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig, ShowClick
from machine import available_bytes
from plans import finish
from race import MILLISECONDS, Contender, Race
from samples import keys_of

BATCH = 4096
SLOTS = 1 << 20
CALL = 1 << 16
INTERVAL = 1 << 20  # steps between sweeps: more than a pass takes
OLD, NOW, THRESHOLD = -(10**6), 0, 1000
BYTES_A_ROW = 80  # columns, index at its largest, the limit's column, and what the evicted are put back from
CLOCK = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter

BY_TIME = AdmitAndEvictConfig(evict_threshold=THRESHOLD, evict_step_interval=INTERVAL)


@dataclass(frozen=True)
class Swept:
    """What one sweep took: seconds beyond the batches themselves, seconds of the longest step, and keys that went."""

    total_s: float
    longest_s: float
    steps: int
    evicted: int


class Field:
    """A table whose rows all have counters, and a planner that sweeps it."""

    def __init__(self, rows: int, config: AdmitAndEvictConfig) -> None:
        self.rows, self.scored, self.rng = rows, config.needs_labels, np.random.default_rng(0)
        self.table = Table("sweep", 1, with_filter=True)
        self.manager = SwapManager([self.table], [SLOTS], [config], num_threads=1)
        for first in range(0, rows, CALL):
            self.put(np.arange(first, min(first + CALL, rows)), NOW)
        self.batch, self.sweeps = keys_of(np.arange(BATCH)), 0

    def put(self, ordinals: np.ndarray, last: int) -> None:
        """Make sure that these keys have rows, with new counters."""
        at = self.table.insert(keys_of(ordinals))
        counts = np.ones(len(at), np.int64)
        if self.scored:  # what an exported filter calls counts: scores by their bits; as if shown 1 to 1000 times
            counts += np.ceil(1000.0 ** self.rng.random(len(at))).view(np.int64)
            last = self.manager.export_filter(0)["epoch"]
        self.table.write_columns(at, counts, np.full(len(at), last))

    def step(self) -> float:
        """Seconds of a small batch: planned, moved, finished."""
        began = CLOCK()
        clicked = np.zeros(BATCH, np.uint8) if self.scored else None
        finish(self.manager)(self.manager.plan(self.batch, np.array([0, BATCH]), np.full(BATCH, NOW), clicked))
        return CLOCK() - began

    def sweep(self, old: float) -> Swept:
        """One sweep, with the share `old` of the rows made old, and all that follows from it; then the rows that went come back."""
        drawn = BATCH + self.rng.choice(self.rows - BATCH, int(old * self.rows), replace=False)
        if old > 0:
            self.put(drawn, OLD)
        self.sweeps += 1
        self.manager.start_at(self.sweeps * INTERVAL - 6)
        before = statistics.median([self.step() for _ in range(5)])
        had, took = self.manager.stats()[0]["evicted"], [self.step()]
        while self.manager.export_filter(0)["sweeping"]:
            took.append(self.step())
        evicted = self.manager.stats()[0]["evicted"] - had
        back = drawn if old > 0 else np.arange(self.rows)
        for first in range(0, len(back), CALL):
            some = back[first : first + CALL]
            self.put(some if old > 0 else some[self.table.find(keys_of(some)) < 0], NOW)
        return Swept(sum(took) - len(took) * before, max(took), len(took), evicted)


@pytest.fixture(scope="module", params=[1, 10], ids=["", "ten times"])
def field(request: pytest.FixtureRequest, rows: int) -> Iterator[Field]:
    """A table that is swept by time, and one of ten times its rows where memory suffices."""
    size = rows * request.param
    if request.param > 1 and size * BYTES_A_ROW > available_bytes():
        pytest.skip(f"{size / 1e6:g} M rows need {size * BYTES_A_ROW / 2**30:.0f} GiB of free memory")
    field = Field(size, BY_TIME)
    yield field
    field.manager.close()
    field.table.close()


@pytest.mark.parametrize("old", [0.01, 0.1])
def test_sweep_by_time(race: Race, field: Field, old: float) -> None:
    stamps = np.random.default_rng(1).integers(0, 2**40, field.rows)

    def swept(_i: int) -> Swept:
        found = field.sweep(old)
        assert found.evicted == int(old * field.rows)
        return found

    limit = Contender("limit: one look at as many int64", lambda _i: stamps.min())
    case = f"sweep of {field.rows / 1e6:g} M timestamps, {old:.0%} dead"
    total = Contender("embcache", swept, seconds_of=lambda found: found.total_s)
    race("sweep", f"{case}: in all", total, [limit], work=1, unit=MILLISECONDS, rounds=5)


@pytest.mark.parametrize("old", [0.01, 0.1])
def test_longest_step_by_time(race: Race, field: Field, old: float) -> None:
    longest = Contender("embcache", lambda _i: field.sweep(old), seconds_of=lambda found: found.longest_s)
    case = f"sweep of {field.rows / 1e6:g} M timestamps, {old:.0%} dead: longest step"
    race("sweep, longest step", case, longest, [], work=1, unit=MILLISECONDS, rounds=5)


@pytest.mark.parametrize("kind", ["a floor that binds", "show/click, 1%", "show/click, 10%"])
def test_sweep_that_looks_at_every_row(race: Race, rows: int, kind: str) -> None:
    old = 0.01 if kind.startswith("a floor") else 0.0
    if old > 0:
        config = AdmitAndEvictConfig(
            evict_threshold=THRESHOLD, evict_step_interval=INTERVAL, evict_keep_min=rows - int(old / 2 * rows)
        )
    else:
        part = 0.1 if kind.endswith("10%") else 0.01
        scores = ShowClick(score_decay=0.99, evict_percentage=part)
        config = AdmitAndEvictConfig(evict_step_interval=INTERVAL, policy="show_click", show_click=scores)
    field = Field(rows, config)
    longest = Contender("embcache", lambda _i: field.sweep(old), seconds_of=lambda found: found.longest_s)
    case = f"sweep of {rows / 1e6:g} M rows, {kind}: its step"
    race("sweep, longest step", case, longest, [], work=1, unit=MILLISECONDS, rounds=3)
    field.manager.close()
    field.table.close()
