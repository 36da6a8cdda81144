"""A pipeline's stages without torch: one thread tells of batches to come, one plans and moves rows, one trains those of earlier batches.

Slots are plain arrays, so that a sanitizer sees every access of the core to them. What training has made of each row says whether the
stages kept out of each other's way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from test_table_threads import run_together

import embcache as ec
from embcache._core import kernels
from embcache._core.door import Door
from embcache._core.doors import Steps
from embcache._core.moves import Moves
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.table import initializer_spec

DIM, TABLES, SLOTS, KEYS, BATCH, DEPTH = 8, 3, 96, 400, 24, 4
LIMIT_S = 600


class Stages:
    """Tables whose rows begin as zeros; each batch adds 1 to the weights, and 2 to the state, of each of its rows."""

    def __init__(self, threads: int, policy: str) -> None:
        zeros = initializer_spec(ec.Zeros())
        self.tables = [
            Table(f"t{t}", DIM, state_dim=DIM, num_threads=threads, seed=t, initializer=zeros) for t in range(TABLES)
        ]
        self.planner = SwapManager(self.tables, [SLOTS] * TABLES, num_threads=threads, policy=policy)
        self.planner.set_bases(np.arange(TABLES) * (SLOTS + 1))
        self.moves = Moves(self.tables, [(0, TABLES, [DIM])], threads)
        self.rows = [np.zeros((TABLES * (SLOTS + 1), DIM), np.float32) for _ in range(2)]
        self.moves.use_arrays([self.rows])
        self.door = Door(self.planner)
        self.threads, self.ahead = threads, policy == "lookahead"
        self.told: queue.Queue[object] = queue.Queue()
        self.ready: queue.Queue[object] = queue.Queue()
        self.room = threading.Semaphore(DEPTH)
        self.stop = threading.Event()

    def load(self, batches: list[np.ndarray], offsets: np.ndarray) -> None:
        for keys in batches:
            if self.ahead:
                with self.door.moving:
                    self.told.put(self.planner.look_ahead(keys, offsets))
            else:
                self.told.put(None)

    def plan(self, batches: list[np.ndarray], offsets: np.ndarray) -> None:
        for keys in batches:
            notice = self.told.get(timeout=LIMIT_S)
            assert self.room.acquire(timeout=LIMIT_S)
            with self.door.moving:
                plan = self.planner.plan(keys, offsets, notice=notice, moves=self.moves)
            assert plan.state == "swapped_in"
            self.ready.put(plan)

    def train(self, count: int) -> None:
        try:
            for _ in range(count):
                plan = self.ready.get(timeout=LIMIT_S)
                with Steps([self.door]):
                    with self.door.training:
                        for array, more in zip(self.rows, (1, 2), strict=True):
                            out = np.empty((len(plan.slots), DIM), np.float32)
                            kernels.gather(array, plan.slots, out, self.threads)
                            kernels.scatter(array, plan.slots, out + np.float32(more), self.threads)
                    self.door.late.append(plan)
                    self.door.settle()
                self.room.release()
        finally:
            self.stop.set()

    def look(self) -> None:
        """Between steps, and beside them: whoever saves, and whoever reads figures."""
        while not self.stop.is_set():
            with Steps([self.door]), self.door:
                for t in range(TABLES):
                    self.residents(t)
            with self.door.planning:
                self.planner.stats()
                for t, table in enumerate(self.tables):
                    self.planner.peek(np.arange(KEYS), t)
                    table.stats()

    def residents(self, t: int) -> Iterator[tuple[int, float]]:
        """Key and first weight of rows in slots."""
        keys, slots, *_ = self.planner.residents(t)
        out = np.empty((len(keys), DIM), np.float32)
        kernels.gather(self.rows[0], slots, out, self.threads)
        assert (out == out[:, :1]).all()
        return zip(keys.tolist(), out[:, 0].tolist(), strict=True)

    def close(self) -> None:
        self.planner.close()
        for table in self.tables:
            table.close()


@pytest.mark.parametrize(("threads", "policy"), [(1, "lru"), (3, "lookahead"), (2, "s3fifo")])
def test_stages_of_different_batches_at_once(threads: int, policy: str) -> None:
    rng = np.random.default_rng(threads)
    batches = [np.concatenate([rng.choice(KEYS, BATCH, replace=False) for _ in range(TABLES)]) for _ in range(200)]
    offsets = np.arange(TABLES + 1) * BATCH
    stages = Stages(threads, policy)
    run_together(
        lambda: stages.load(batches, offsets),
        lambda: stages.plan(batches, offsets),
        lambda: stages.train(len(batches)),
        stages.look,
    )
    with stages.door:
        stages.planner.check()
        for t, table in enumerate(stages.tables):
            table.check()
            counts = np.zeros(KEYS, np.float32)
            for keys in batches:
                counts[keys[offsets[t] : offsets[t + 1]]] += 1
            keys = np.flatnonzero(counts)
            weights = np.empty((len(keys), DIM), np.float32)
            table.read_into(table.find(keys), weights, None, [np.empty((len(keys), DIM), np.float32)])
            found = dict(zip(keys.tolist(), weights[:, 0].tolist(), strict=True)) | dict(stages.residents(t))
            assert found == dict(zip(keys.tolist(), counts[keys].tolist(), strict=True))
        assert sum(one["swap_out_rows"] for one in stages.planner.stats()) > 0
    stages.close()
