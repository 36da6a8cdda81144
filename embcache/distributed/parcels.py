"""Parcels: what a batch sends to the owners of its keys, and in which order things lie on either side.

A `Parcel` is a rank's own batch, made ready: its distinct keys, each table's once, by group, owner, table and first occurrence
(`embcache._core.route`). A `Received` is what an owner has got from all ranks. Three orders matter:

* *wire*: by rank, then by table (its keys as they travel);
* *position*: by table, then by rank (the planner wants tables to lie together);
* *group*: by dim group, then by rank, then by table (rows and gradients of one dim and type travel together).

Everything here is arithmetic on NumPy arrays: no collective, no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.route import Router
from ..devices import Backend, GroupLookup
from ..errors import ConfigError
from ..layout import FlatBatch, TableLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NO_TIME", "Needs", "Parcel", "Received", "spread"]

NO_TIME = -(2**63)


def spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers ``starts[i] .. starts[i] + lengths[i] - 1`` for all i, one after the other, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


class Needs:
    """Which of its keys' numbers each table's filter wants to know.

    Attributes
    ----------
    counted, timed, clicked : bool (T,)
        Occurrences; timestamps; clicks.
    stepped : bool (T,)
        The step is the timestamp, so that any key makes it the newest.
    by_time, by_labels : list of str
        Tables that cannot do without timestamps, or labels.
    """

    def __init__(self, layout: TableLayout) -> None:
        rules = [table.admit_and_evict for table in layout.tables]
        shown = [rule is not None and rule.show_click is not None for rule in rules]
        stepped = [rule is not None and rule.time_source == "step" for rule in rules]
        self.counted = np.array([rule is not None for rule in rules])
        self.clicked = np.array(shown)
        self.stepped = np.array(stepped) & ~self.clicked
        self.timed = self.counted & ~self.clicked & ~self.stepped
        names = [table.name for table in layout.tables]
        self.by_time = [
            name if rule is not None and rule.needs_timestamps else None
            for name, rule in zip(names, rules, strict=True)
        ]
        self.by_labels = [
            name if rule is not None and rule.needs_labels else None for name, rule in zip(names, rules, strict=True)
        ]


@dataclass(eq=False)
class Parcel:
    """A rank's batch with its distinct keys.

    Attributes
    ----------
    flat : FlatBatch
        The batch as it came.
    keys : int64 (U,)
        Distinct keys by group, owner, table, first occurrence.
    blocks : int64 (G, world, T)
        How many of them each (group, owner, table) has.
    inverse : int64 (n,)
        Distinct key at each position.
    occurrences : int64 (U,)
    order, segment_offsets : int64 (n,), (U + 1,)
        Positions by distinct key.
    last : int64 (U,), or None
        Newest timestamp of each.
    clicks : int64 (U,), or None
    newest : int64 (T,)
        Newest timestamp of each table, `NO_TIME` where it has no key, or none that has one; 0 with a key where the step counts.
    """

    flat: FlatBatch
    layout: TableLayout
    keys: np.ndarray
    blocks: np.ndarray
    inverse: np.ndarray
    occurrences: np.ndarray
    order: np.ndarray
    segment_offsets: np.ndarray
    last: np.ndarray | None
    clicks: np.ndarray | None
    newest: np.ndarray

    @classmethod
    def pack(cls, flat: FlatBatch, layout: TableLayout, needs: Needs, router: Router) -> Parcel:
        """Make a batch ready.

        Raises
        ------
        ConfigError
            Timestamps are missing for a table that evicts by them, or labels for one with the show/click policy.
        """
        sizes = np.diff(flat.table_offsets)
        for t in np.flatnonzero(sizes):
            if flat.timestamps is None and needs.by_time[t] is not None:
                raise ConfigError(
                    f"table {needs.by_time[t]!r} evicts by time but the batch has no timestamps; give them, or set "
                    'time_source="step"'
                )
            if flat.clicked is None and needs.by_labels[t] is not None:
                raise ConfigError(
                    f"table {needs.by_labels[t]!r} admits by shows and clicks but the batch has no labels; give one an example"
                )
        keys, blocks, inverse, occurrences, order, segments = router.route(flat.keys, flat.table_offsets)
        last = clicks = None
        newest = np.full(len(sizes), NO_TIME, np.int64)
        newest[needs.stepped & (sizes > 0)] = 0
        if flat.timestamps is not None and needs.timed.any():
            for t in np.flatnonzero(needs.timed & (sizes > 0)):
                newest[t] = flat.timestamps[flat.table_offsets[t] : flat.table_offsets[t + 1]].max()
            last = np.maximum.reduceat(flat.timestamps[order], segments[:-1]) if len(keys) else keys
        if flat.clicked is not None and needs.clicked.any():
            clicks = np.add.reduceat(flat.clicked[order].astype(np.int64), segments[:-1]) if len(keys) else keys
        return cls(flat, layout, keys, blocks, inverse, occurrences, order, segments, last, clicks, newest)

    @property
    def counts(self) -> np.ndarray:
        """Distinct keys of each owner and table, int64 (world, T)."""
        counts: np.ndarray = self.blocks.sum(axis=0)
        return counts

    @property
    def group_counts(self) -> np.ndarray:
        """Distinct keys of each group and owner, int64 (G, world)."""
        counts: np.ndarray = self.blocks.sum(axis=2)
        return counts

    def wire_order(self, tables: np.ndarray | None = None) -> np.ndarray:
        """The numbers of the distinct keys as they travel: by owner, then by table; of some tables only, bool (T,)."""
        starts = np.cumsum(self.blocks.reshape(-1)).reshape(self.blocks.shape) - self.blocks
        groups = self.blocks.shape[0]
        group_of = np.repeat(np.arange(groups), [g.last_table - g.first_table for g in self.layout.groups])
        t = np.arange(self.blocks.shape[2])
        if tables is not None:
            t, group_of = t[tables], group_of[tables]
        return spread(starts[group_of, :, t].T.reshape(-1), self.blocks[group_of, :, t].T.reshape(-1))

    def lookup(self, group: int, backend: Backend, *, pooled: bool) -> GroupLookup:
        """How the group's part of the batch reads the rows that have come for its distinct keys."""
        ends = np.cumsum(self.group_counts.sum(axis=1))
        start, stop = int(ends[group - 1]) if group else 0, int(ends[group])
        return backend.lookup(
            slots=np.arange(len(self.keys), dtype=np.int64) - start,
            inverse=self.inverse,
            occurrence_order=self.order,
            segment_offsets=self.segment_offsets,
            unique_start=start,
            unique_stop=stop,
            **(self.layout.bags if pooled else self.layout.positions)(group, self.flat),
        )

    def owners(self) -> np.ndarray:
        """Owner of each distinct key, int64 (U,)."""
        world = self.blocks.shape[1]
        return np.repeat(np.tile(np.arange(world), len(self.group_counts)), self.group_counts.reshape(-1))

    def column_offsets(self) -> np.ndarray:
        """First position of each column of the batch, and the end, int64 (columns + 1,)."""
        columns = len(self.layout.column_features)
        offsets: np.ndarray = self.flat.bag_offsets[np.arange(columns + 1) * self.flat.batch_size]
        return offsets

    @cached_property
    def lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For owners that get every occurrence: what goes to whom.

        Returns
        -------
        positions : int64 (n,)
            Positions of the batch by owner, rising within one.
        numbers : int32 (n,)
            Of each of them: place of its key among those that the owner gets of its table.
        counts : int64 (world, columns)
        """
        world, columns = self.blocks.shape[1], len(self.layout.column_features)
        owner = self.owners()[self.inverse]
        positions = np.argsort(owner, kind="stable")
        starts = np.cumsum(self.blocks.reshape(-1)) - self.blocks.reshape(-1)
        inside = np.arange(len(self.keys)) - np.repeat(starts, self.blocks.reshape(-1))
        column = np.repeat(np.arange(columns), np.diff(self.column_offsets()))
        counts = np.bincount(owner * columns + column, minlength=world * columns).reshape(world, columns)
        return positions, inside[self.inverse[positions]].astype(np.int32), counts


class Received:
    """What an owner has got of one batch from all ranks: how its orders belong together.

    Parameters
    ----------
    layout : TableLayout
    counts : int64 (world, T)
        Keys that each rank has sent of each table.
    """

    def __init__(self, layout: TableLayout, counts: np.ndarray) -> None:
        self.layout, self.counts = layout, counts
        world, tables = counts.shape
        self.table_offsets = np.concatenate(([0], np.cumsum(counts.sum(axis=0)))).astype(np.int64)
        lengths = counts.T.reshape(-1)  # of the blocks in position order
        wire = (np.cumsum(counts.reshape(-1)) - counts.reshape(-1)).reshape(world, tables)
        self.wire_of_position = spread(wire.T.reshape(-1), lengths)
        by_group = np.concatenate([counts[:, g.first_table : g.last_table].reshape(-1) for g in layout.groups])
        starts = np.cumsum(by_group) - by_group
        places = np.empty((world, tables), np.int64)
        at = 0
        for g in layout.groups:
            width = g.last_table - g.first_table
            places[:, g.first_table : g.last_table] = starts[at : at + world * width].reshape(world, width)
            at += world * width
        self.group_of_position = spread(places.T.reshape(-1), lengths)
        self.position_of_group = np.empty_like(self.group_of_position)
        self.position_of_group[self.group_of_position] = np.arange(len(self.group_of_position))
        self.group_counts = np.array([counts[:, g.first_table : g.last_table].sum(axis=1) for g in layout.groups])
        """int64 (G, world): keys of each dim group from each rank."""

    def __len__(self) -> int:
        return len(self.wire_of_position)

    def group_slice(self, group: int) -> slice:
        """Where a group lies in position order, and in group order."""
        spec = self.layout.groups[group]
        return slice(int(self.table_offsets[spec.first_table]), int(self.table_offsets[spec.last_table]))


class Occurrences:
    """All occurrences of a batch, as their keys' owner has got them: for sums in the order of the global batch.

    Parameters
    ----------
    received : Received
    counts : int64 (world, columns)
        Occurrences that each rank has sent of each column.
    numbers : int64 (n,)
        By rank, column and position: place of the occurrence's key among those that the rank has sent of the table.
    """

    def __init__(self, received: Received, counts: np.ndarray, numbers: np.ndarray) -> None:
        layout = received.layout
        world, columns = counts.shape
        table_of = np.asarray(layout.column_table)
        groups = layout.groups
        lengths = counts.T.reshape(-1)  # by column, then by rank: the order of the global batch
        wire = (np.cumsum(counts.reshape(-1)) - counts.reshape(-1)).reshape(world, columns)
        chosen = numbers[spread(wire.T.reshape(-1), lengths)]
        key_starts = np.cumsum(received.counts.T.reshape(-1)) - received.counts.T.reshape(-1)
        key_starts = key_starts.reshape(len(layout.tables), world)[table_of]  # (columns, world)
        self.positions = chosen + np.repeat(key_starts.reshape(-1), lengths)
        """int64 (n,): the received key of each occurrence, in the order of the global batch."""
        self.group_counts = np.array([counts[:, g.first_column : g.last_column].sum(axis=1) for g in groups])
        by_group = np.concatenate([counts[:, g.first_column : g.last_column].reshape(-1) for g in groups])
        starts = np.cumsum(by_group) - by_group
        places = np.empty((world, columns), np.int64)
        at = 0
        for g in groups:
            width = g.last_column - g.first_column
            places[:, g.first_column : g.last_column] = starts[at : at + world * width].reshape(world, width)
            at += world * width
        self.places = spread(places.T.reshape(-1), lengths)
        """int64 (n,): where the gradient of each lies, which come by group, rank, column and position."""

    def by_unique(self, inverse: np.ndarray, uniques: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of the gradients by unique of the plan, in the order of the global batch, and where each unique's begin."""
        unique = inverse[self.positions]
        order = self.places[np.argsort(unique, kind="stable")]
        segments = np.concatenate(([0], np.cumsum(np.bincount(unique, minlength=uniques)))).astype(np.int64)
        return order, segments


def cut(values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """`values` in pieces of these sizes."""
    pieces: list[Any] = np.split(values, np.cumsum(sizes)[:-1])
    return pieces
