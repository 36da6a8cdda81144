"""What the benches of the planner share: batches of many tables, and the rest of a plan's life, which is not timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from embcache._core.plan import Plan
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from race import QUERY_SETS
from samples import Sampler, keys_of

__all__ = ["Batches", "draw_batches", "finish", "planner", "uniques_of"]


@dataclass(frozen=True)
class Batches:
    """Query sets of one shape: keys table by table, and each table's offsets."""

    keys: list[np.ndarray]
    offsets: list[np.ndarray]

    @property
    def size(self) -> float:
        """Keys of a batch, on average."""
        return sum(map(len, self.keys)) / len(self.keys)

    def pieces(self) -> list[list[np.ndarray]]:
        """Each batch cut into its tables' keys."""
        return [[self.of_table(i, table) for table in range(len(self.offsets[i]) - 1)] for i in range(len(self.keys))]

    def of_table(self, query_set: int, table: int) -> np.ndarray:
        """One table's keys of a batch."""
        start, stop = self.offsets[query_set][table : table + 2]
        return self.keys[query_set][start:stop]

    def as_one_table(self) -> Batches:
        """The same keys, all in one table."""
        return Batches(self.keys, [offsets[[0, -1]] for offsets in self.offsets])


def draw_batches(
    tables: int, population: int, sizes: Callable[[np.random.Generator], np.ndarray], kind: str
) -> Batches:
    """Batches over tables of `population` keys each; `sizes` draws the number of keys of each table."""
    sampler = Sampler(population)
    keys, offsets = [], []
    for _ in range(QUERY_SETS):
        counts = sizes(sampler.rng)
        drawn = [sampler.draw(kind, int(count)) + table * population for table, count in enumerate(counts)]
        keys.append(keys_of(np.concatenate(drawn)))
        offsets.append(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    return Batches(keys, offsets)


def finish(manager: SwapManager) -> Callable[[Plan], None]:
    """The rest of a plan's life: its rows have moved and its batch has trained."""

    def after(plan: Plan) -> None:
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)

    return after


def planner(batches: Batches, *, share: float = 1.0, threads: int = 1) -> SwapManager:
    """A planner that has seen every batch once, with slots for `share` of each table's distinct keys.

    Never fewer slots than the largest batch needs.
    """
    tables = len(batches.offsets[0]) - 1
    capacities = []
    for table in range(tables):
        pieces = [batches.of_table(i, table) for i in range(QUERY_SETS)]
        need = max(len(np.unique(piece)) for piece in pieces)
        capacities.append(max(need, int(share * len(np.unique(np.concatenate(pieces)))), 1))
    manager = SwapManager([Table(f"plan {t}", 1) for t in range(tables)], capacities, num_threads=threads)
    after = finish(manager)
    for keys, offsets in zip(batches.keys, batches.offsets, strict=True):
        after(manager.plan(keys, offsets))
    return manager


def uniques_of(plan: Plan) -> list[tuple[np.ndarray, np.ndarray]]:
    """(unique keys, inverse) of each table of a plan, the inverse counted from the table's first unique."""
    pairs = []
    for table, (first, last) in enumerate(zip(plan.unique_offsets[:-1], plan.unique_offsets[1:], strict=True)):
        start, stop = plan.table_offsets[table : table + 2]
        pairs.append((plan.unique_keys[first:last], plan.inverse[start:stop] - first))
    return pairs
