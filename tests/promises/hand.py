"""A trainer that drives a manager by hand, batch by batch and several ahead, and remembers what each row must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

import embcache as ec
from promises.reference import ReferenceTable


class HandTrainer:
    """A manager, and a dict of the values that its rows must have.

    "Training" a batch adds its step number to the rows of its admitted keys, times their occurrences, in the buffer:
    exact in float32, and different for each batch, so that a lost, doubled or misplaced update shows. A reference filter
    says which keys a plan admits, and which it evicts.
    """

    def __init__(self, tables: Sequence[ec.TableConfig], **options: Any) -> None:
        self.manager = ec.EmbCacheManager(tables, optimizer=options.pop("optimizer", ec.SGD(lr=1.0)), **options)
        self.rows: dict[str, dict[int, np.ndarray]] = {table.name: {} for table in tables}
        self.filters = {table.name: ReferenceTable(table, ec.SGD()) for table in tables}
        self.evicted: dict[int, dict[str, list[int]]] = {}
        self.ahead: deque[Any] = deque()

    def expected(self, name: str, keys: Sequence[int]) -> np.ndarray:
        """What the rows of `keys` must read."""
        fresh = self.manager.host_tables[self.manager.layout.index_of[name]]
        out = np.empty((len(keys), fresh.dim), np.float32)
        fresh.init_rows(np.array(keys, dtype=np.int64), out)
        for i, key in enumerate(keys):
            if key in self.rows[name]:
                out[i] = self.rows[name][key]
        return out

    def parts(self, info: Any) -> list[tuple[str, Any, np.ndarray, np.ndarray, np.ndarray]]:
        """For each table of a plan: name, weights of its dim group, admitted keys, their slots and occurrences."""
        buffer, found = self.manager.buffer, []
        counts = np.diff(info.segment_offsets)
        for t, name in enumerate(info.tables):
            part = slice(int(info.unique_offsets[t]), int(info.unique_offsets[t + 1]))
            kept = info.admitted[part].astype(bool)
            weights = buffer.weights[buffer.group_of[t]]
            found.append((name, weights, info.unique_keys[part][kept], info.slots[part][kept], counts[part][kept]))
        return found

    def verify(self, info: Any) -> None:
        """The rows of a swapped-in plan are in their slots; what it evicted starts anew."""
        for name, keys in self.evicted.pop(info.step).items():
            for key in keys:
                self.rows[name].pop(key, None)
        for name, weights, keys, slots, _ in self.parts(info):
            np.testing.assert_array_equal(weights.numpy()[slots], self.expected(name, keys.tolist()), err_msg=name)

    def change(self, info: Any) -> None:
        """Train on a swapped-in plan; under the manager's lock, as a reader of rows in another thread expects."""
        with self.manager.door:
            self._add(info)

    def _add(self, info: Any) -> None:
        for name, weights, keys, slots, counts in self.parts(info):
            amount = (np.float32(info.step) * counts.astype(np.float32))[:, None]
            rows = self.expected(name, keys.tolist()) + amount
            self.rows[name].update(zip(keys.tolist(), rows, strict=True))
            weights.numpy()[slots] += amount

    def plan(self, batch: ec.JaggedFeatures) -> Any:
        """Plan a batch ahead."""
        info = self.manager.plan(batch)
        self.evicted[info.step] = {}
        for t, name in enumerate(info.tables):
            admitted = self.filters[name].admit_batch(batch, info.step)
            self.evicted[info.step][name] = self.filters[name].swept
            part = slice(int(info.unique_offsets[t]), int(info.unique_offsets[t + 1]))
            found = zip(info.unique_keys[part].tolist(), info.admitted[part].astype(bool).tolist(), strict=True)
            assert dict(found) == admitted
        self.ahead.append(info)
        return info

    def move(self, info: Any) -> None:
        """Move the rows of the oldest plan that has not moved."""
        self.manager.swap_out(info)
        self.manager.swap_in(info)

    def train_next(self) -> Any:
        """Move the rows of the oldest plan, verify them, train, finish."""
        info = self.ahead.popleft()
        self.move(info)
        self.verify(info)
        self.change(info)
        self.manager.finish(info)
        return info

    def train(self, batch: ec.JaggedFeatures) -> Any:
        """Plan a batch and train on it."""
        self.plan(batch)
        return self.train_next()
