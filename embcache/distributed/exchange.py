"""The exchange of one collection: keys to their owners, rows back, gradients to the owners.

Owns what travels and in which form; `embcache.distributed.parcels` has the arithmetic, `embcache.distributed.ranks` the groups. A batch
takes two collectives for its keys (sizes, then everything else as bytes), one small one to agree that it was planned, one for
rows and one for gradients. What is wrong with a batch on one rank is said in the first or the third, so that all pass it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .._core.route import Router
from ..errors import RankError
from ..layout import FlatBatch, TableLayout
from .parcels import NO_TIME, Needs, Occurrences, Parcel, Received, cut
from .ranks import Channel, Ranks
from .selection import Selection
from .wire import Wire

__all__ = ["EVALUATION", "TRAINING", "Exchange", "OwnedBatch"]

TRAINING, EVALUATION = 1, 2
FIXED = 6  # numbers of a header before those of the tables
FINE, FAILED = 0, 1
HAS_TIMES, HAS_CLICKS = 1, 2


@dataclass(frozen=True)
class OwnedBatch(FlatBatch):
    """What an owner plans: the keys that it has got of one batch from all ranks.

    Attributes
    ----------
    parcel : Parcel
        This rank's own batch, whose rows come back.
    received : Received
    all_occurrences : Occurrences, optional
        Where gradients travel unreduced.
    shares : dict
        Further arguments of `SwapManager.plan`.
    """

    parcel: Parcel = field(kw_only=True)
    received: Received = field(kw_only=True)
    all_occurrences: Occurrences | None = field(kw_only=True, default=None)
    shares: dict[str, Any] = field(kw_only=True, default_factory=dict)

    def more(self) -> dict[str, Any]:
        return self.shares


class Exchange:
    """Sends and receives for one collection.

    Parameters
    ----------
    ranks : Ranks
    layout : TableLayout
    wire : Wire
        In which form rows and gradients travel.
    exact : bool
        Whether gradients travel unreduced.

    Notes
    -----
    Every rank calls the same methods in the same order, each kind of thread on its own channel.
    """

    def __init__(self, ranks: Ranks, layout: TableLayout, wire: Wire, exact: bool) -> None:
        self.ranks, self.layout, self.wire, self.exact = ranks, layout, wire, exact
        self.number = ranks.next_number()
        self.needs = Needs(layout)
        group_of = np.repeat(np.arange(len(layout.groups)), [g.last_table - g.first_table for g in layout.groups])
        self.router = Router(group_of, ranks.world)
        self._sequence = {TRAINING: 0, EVALUATION: 0}

    def pack(self, flat: FlatBatch) -> Parcel:
        """A batch of this rank, made ready: nothing is sent."""
        return Parcel.pack(flat, self.layout, self.needs, self.router)

    # ------------------------------------------------------------------------------------------------------------- keys

    def send_keys(self, parcel: Parcel | BaseException, kind: int, channel: Channel) -> OwnedBatch:
        """Send a batch's keys to their owners, and get what all ranks have sent here.

        Parameters
        ----------
        parcel : Parcel or exception
            The batch, or what is wrong with it.
        kind : int
            `TRAINING` or `EVALUATION`.
        channel : Channel

        Raises
        ------
        RankRefusedError
            Another rank's batch has failed. Where it is this one's, its exception is raised. Nothing has changed.
        RankError
            Ranks are gone, or out of step.
        """
        training = kind == TRAINING
        heads = self._head(parcel, kind, channel)
        failed = [s for s, head in enumerate(heads) if head[4] == FAILED]
        if failed:
            self.ranks.refuse(channel.name, "a batch", parcel if isinstance(parcel, BaseException) else None, failed[0])
        assert isinstance(parcel, Parcel)
        tables, world = len(self.layout.tables), self.ranks.world
        counts = heads[:, FIXED : FIXED + tables]
        received = Received(self.layout, counts)
        sent_counts = parcel.counts
        order = parcel.wire_order()
        by_owner = sent_counts.sum(axis=1)
        pieces = [cut(parcel.keys[order], by_owner)]
        timed, counted, clicked = self.needs.timed, self.needs.counted, self.needs.clicked
        if training and parcel.last is not None:
            pieces.append(cut(parcel.last[parcel.wire_order(timed)], sent_counts[:, timed].sum(axis=1)))
        if training and counted.any():
            times = parcel.occurrences[parcel.wire_order(counted)].astype(np.uint32)
            pieces.append(cut(times, sent_counts[:, counted].sum(axis=1)))
        if training and parcel.clicks is not None:
            clicks = parcel.clicks[parcel.wire_order(clicked)].astype(np.uint32)
            pieces.append(cut(clicks, sent_counts[:, clicked].sum(axis=1)))
        if training and self.exact:
            _, numbers, occurrence_counts = parcel.lists
            pieces.append(cut(numbers, occurrence_counts.sum(axis=1)))
        parts = [b"".join(np.ascontiguousarray(piece[d]).tobytes() for piece in pieces) for d in range(world)]
        sizes = [self._payload(head, training) for head in heads]
        data = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, parts))]
        answer = channel.all_to_all("the keys of a batch", data, [len(part) for part in parts], [sum(s) for s in sizes])
        return self._unpack(parcel, received, heads, answer.numpy(), sizes, channel, training)

    def _head(self, parcel: Parcel | BaseException, kind: int, channel: Channel) -> np.ndarray:
        """Tell all ranks the sizes of what they get; returns the headers of all, int64 (world, numbers)."""
        tables, columns, world = len(self.layout.tables), len(self.layout.column_features), self.ranks.world
        mine = np.zeros((world, FIXED + 2 * tables + (columns if self.exact else 0)), np.int64)
        self._sequence[kind] += 1
        mine[:, :4] = self.number, kind, self._sequence[kind], mine.shape[1]
        if isinstance(parcel, BaseException):
            mine[:, 4] = FAILED
        else:
            mine[:, 5] = HAS_TIMES * (parcel.last is not None) + HAS_CLICKS * (parcel.clicks is not None)
            mine[:, FIXED : FIXED + tables] = parcel.counts
            mine[:, FIXED + tables : FIXED + 2 * tables] = parcel.newest
            if self.exact:
                mine[:, FIXED + 2 * tables :] = parcel.lists[2]
        theirs = channel.all_to_all("a batch", torch.from_numpy(mine), [1] * world, [1] * world).numpy()
        for s, head in enumerate(theirs):
            if (head[:4] != mine[0, :4]).any():
                error = RankError(
                    f"ranks are out of step: rank {self.ranks.rank} sends batch {mine[0, 2]} of collection {mine[0, 0]} "
                    f"({'training' if kind == TRAINING else 'evaluation'}), rank {s} batch {head[2]} of collection {head[0]} "
                    f"({'training' if head[1] == TRAINING else 'evaluation'}); every rank calls the collections in the same order"
                )
                self.ranks.fail(error)
                raise error
        return theirs

    def _payload(self, head: np.ndarray, training: bool) -> list[int]:
        """Bytes of each piece that a rank sends, by its header."""
        counts = head[FIXED : FIXED + len(self.layout.tables)]
        sizes = [8 * int(counts.sum())]
        if not training:
            return sizes
        sizes.append(8 * int(counts[self.needs.timed].sum()) if head[5] & HAS_TIMES else 0)
        sizes.append(4 * int(counts[self.needs.counted].sum()))
        sizes.append(4 * int(counts[self.needs.clicked].sum()) if head[5] & HAS_CLICKS else 0)
        sizes.append(4 * int(head[FIXED + 2 * len(self.layout.tables) :].sum()))
        return sizes

    def _unpack(
        self,
        parcel: Parcel,
        received: Received,
        heads: np.ndarray,
        answer: np.ndarray,
        sizes: list[list[int]],
        channel: Channel,
        training: bool,
    ) -> OwnedBatch:
        """The batch that the owner plans, of what all ranks have sent."""
        tables, world = len(self.layout.tables), self.ranks.world
        ends = np.cumsum([0] + [size for one in sizes for size in one]).tolist()
        width = len(sizes[0])

        def column(piece: int, dtype: Any) -> list[np.ndarray]:
            return [
                answer[ends[s * width + piece] : ends[s * width + piece + 1]].copy().view(dtype) for s in range(world)
            ]

        positions = received.wire_of_position
        keys = np.concatenate(column(0, np.int64))[positions]
        shares: dict[str, Any] = {}
        times, clicks_at, stamps, exact = None, None, None, None
        if training:
            newest = heads[:, FIXED + tables : FIXED + 2 * tables].max(axis=0)
            shares = {"newest": np.ascontiguousarray(newest), "agree": Selection(channel)}
            if self.needs.timed.any():
                stamps = self._of_tables(received, column(1, np.int64), self.needs.timed, NO_TIME)
            if self.needs.counted.any():
                times = self._of_tables(received, column(2, np.uint32), self.needs.counted, 1)
                shares["occurrences"] = times
            if self.needs.clicked.any():
                clicks_at = self._of_tables(received, column(3, np.uint32), self.needs.clicked, 0)
                shares["clicks"] = clicks_at
            if self.exact:
                numbers = np.concatenate(column(4, np.int32)).astype(np.int64)
                exact = Occurrences(received, heads[:, FIXED + 2 * tables :], numbers)
        return OwnedBatch(
            batch_size=parcel.flat.batch_size,
            keys=keys,
            table_offsets=received.table_offsets,
            bag_offsets=received.table_offsets,
            timestamps=stamps,
            clicked=None,
            weights=None,
            lengths=parcel.flat.lengths,
            sources=parcel.flat.sources,
            parcel=parcel,
            received=received,
            all_occurrences=exact,
            shares=shares,
        )

    def _of_tables(self, received: Received, pieces: list[np.ndarray], which: np.ndarray, otherwise: int) -> np.ndarray:
        """Numbers of the keys of some tables, from each rank or (it has none) not, as one for each position."""
        table = np.repeat(
            np.tile(np.arange(received.counts.shape[1]), received.counts.shape[0]), received.counts.reshape(-1)
        )
        rank = np.repeat(np.arange(received.counts.shape[0]), received.counts.sum(axis=1))
        wanted = which[table]
        values = np.full(len(table), otherwise, np.int64)
        for s, piece in enumerate(pieces):
            if len(piece):
                values[wanted & (rank == s)] = piece
        return np.ascontiguousarray(values[received.wire_of_position])

    # -------------------------------------------------------------------------------------------------- rows, gradients

    def send_rows(self, batch: OwnedBatch, rows: Sequence[torch.Tensor], channel: Channel) -> list[torch.Tensor]:
        """Answer with `rows` of each dim group, in group order; returns the rows of this rank's distinct keys, by group, float32."""
        return self.wire.exchange(
            channel, "rows", rows, batch.received.group_counts, batch.parcel.group_counts, self.layout.groups
        )

    def send_gradients(
        self, batch: OwnedBatch, gradients: Sequence[torch.Tensor], channel: Channel
    ) -> list[torch.Tensor]:
        """Send gradients by group and owner; returns what all ranks have sent here, by group and rank, float32."""
        if batch.all_occurrences is None:
            sent, received = batch.parcel.group_counts, batch.received.group_counts
        else:
            counts = batch.parcel.lists[2]
            sent = np.array([counts[:, g.first_column : g.last_column].sum(axis=1) for g in self.layout.groups])
            received = batch.all_occurrences.group_counts
        return self.wire.exchange(channel, "gradients", gradients, sent, received, self.layout.groups)
