"""Forward and backward over ranks: rows come from their owners, gradients go to them.

The forward of each rank reads the rows that its owners have sent for the batch's distinct keys; backward sums the gradients of each
distinct key over this rank's own occurrences (or, with ``reduction="exact"``, leaves them unsummed), sends them to the owners, and hands
what all ranks have sent here to the fused update, as a sequence's gradient is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..devices import GroupLookup
from ..fused import Forward, FusedUpdate
from ..manager import EmbCacheManager
from ..swapinfo import SwapInfo
from .exchange import OwnedBatch
from .parcels import Parcel

if TYPE_CHECKING:
    from .collections import ShardedCollection

__all__ = ["OwnerUpdate", "ShardedPooling", "ShardedSequence"]


class OwnerUpdate(FusedUpdate):
    """The fused update of an owner: gradients come from all ranks, by dim group, rank and table."""

    def __init__(self, manager: EmbCacheManager, accumulate: int, collection: ShardedCollection) -> None:
        super().__init__(manager, accumulate, pooled=False)
        self._channel = collection.ranks.train
        self._made: tuple[Forward, np.ndarray, list[GroupLookup]] | None = None

    def _lookups(self, forward: Forward) -> list[GroupLookup]:
        made = self._made
        if made is None or made[0] is not forward or made[1] is not forward.info.slots:
            made = self._made = forward, forward.info.slots, self._make_lookups(forward)
        return made[2]

    def _train_on(self, arrived: list[Forward]) -> None:
        try:
            super()._train_on(arrived)
        finally:
            self._made = None

    def _make_lookups(self, forward: Forward) -> list[GroupLookup]:
        info, plan = forward.info, forward.info.plan
        batch: Any = info.flat
        layout = self.manager.layout
        exact = batch.all_occurrences
        if exact is None:
            order, segments = batch.received.group_of_position[plan.occurrence_order], plan.segment_offsets
            counts = batch.received.group_counts
        else:
            order, segments = exact.by_unique(plan.inverse, len(plan.unique_keys))
            counts = exact.group_counts
        ends = np.cumsum(counts.sum(axis=1)).tolist()
        starts = [0, *ends[:-1]]
        return [
            self.manager.backend.lookup(
                slots=info.slots,
                inverse=plan.inverse,
                occurrence_order=order,
                segment_offsets=segments,
                admitted=plan.admitted if layout.filtered[g] else None,
                unique_start=int(plan.unique_offsets[spec.first_table]),
                unique_stop=int(plan.unique_offsets[spec.last_table]),
                first_position=starts[g],
                last_position=ends[g],
            )
            for g, spec in enumerate(layout.groups)
        ]

    @property
    def _asks(self) -> bool:
        return self.grad_scale is not None

    def _spoiled(self) -> bool:
        if not self._asks:
            return super()._spoiled()
        # An update is skipped by all ranks or by none.
        (count,) = self._channel.sum("a non-finite gradient", torch.tensor([int(super()._spoiled())])).tolist()
        return bool(count)


def owned_rows(manager: EmbCacheManager, info: SwapInfo) -> list[torch.Tensor]:
    """The rows that ranks have asked for, of each dim group in group order, as they are kept."""
    batch: Any = info.flat
    rows = []
    for g in range(len(manager.layout.groups)):
        part = batch.received.position_of_group[batch.received.group_slice(g)]
        rows.append(manager.backend.gather_rows(manager.buffer.weights[g], info.slots[info.plan.inverse[part]]))
    return rows


def rows_of(collection: ShardedCollection, info: SwapInfo) -> list[torch.Tensor]:
    """What this rank reads: the rows of its distinct keys by dim group, float32."""
    manager = collection.manager
    with manager.door.training:
        manager.buffer.await_moves()
        mine = owned_rows(manager, info)
        manager.buffer.note_use()
    return collection.exchange.send_rows(_owned(info), mine, collection.exchange.ranks.train)


def _owned(info: SwapInfo) -> OwnedBatch:
    flat = info.flat
    assert isinstance(flat, OwnedBatch)
    return flat


class ShardedPooling(torch.autograd.Function):
    """Bags of a batch over rows of all owners -> (B, W)."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, collection: ShardedCollection, info: SwapInfo
    ) -> torch.Tensor:
        update, backend = collection.update, collection.manager.backend
        # A copy: the caller may change the weights in place before backward, which must use what forward used.
        plain = None if weights is None else weights.detach().clone(memory_format=torch.contiguous_format)
        forward, ctx.token = update.begin(info, None)
        try:
            parcel = _owned(info).parcel
            rows = rows_of(collection, info)
            lookups = [parcel.lookup(g, backend, pooled=True) for g in range(len(rows))]
            width = collection.manager.layout.output_width
            out = torch.empty((parcel.flat.batch_size, width), dtype=torch.float32, device=backend.device)
            for group_rows, lookup in zip(rows, lookups, strict=True):
                backend.pooled_forward(group_rows, lookup, out, plain)
        except BaseException:
            update.abandon(forward)
            raise
        ctx.set_materialize_grads(False)
        ctx.rows = rows if ctx.needs_input_grad[1] else None
        ctx.collection, ctx.forward_record, ctx.plain, ctx.lookups, ctx.parcel = (
            collection,
            forward,
            plain,
            lookups,
            parcel,
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        collection: ShardedCollection = ctx.collection
        gradient, backend = gradient.contiguous(), collection.manager.backend
        collection.update.check_arrival(ctx.forward_record)
        shared = collection.shared(gradient)
        if collection.exchange.exact:
            mine = _pooled_occurrences(shared, ctx.parcel, ctx.plain)
        else:
            mine = [
                backend.segment_grad_pooled(shared, lookup, spec.dim, ctx.plain)
                for lookup, spec in zip(ctx.lookups, collection.manager.layout.groups, strict=True)
            ]
        _hand_over(collection, ctx.forward_record, mine)
        weight_gradient = None
        if ctx.rows is not None:
            parts = [
                backend.per_sample_weight_grad(gradient, rows, lookup)
                for rows, lookup in zip(ctx.rows, ctx.lookups, strict=True)
            ]
            weight_gradient = torch.cat(parts)
        return None, weight_gradient, None, None


class ShardedSequence(torch.autograd.Function):
    """Values of a batch over rows of all owners -> one (n, dim) tensor a dim group."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, collection: ShardedCollection, info: SwapInfo
    ) -> tuple[torch.Tensor, ...]:
        update, backend = collection.update, collection.manager.backend
        forward, ctx.token = update.begin(info, None)
        try:
            parcel = _owned(info).parcel
            rows = rows_of(collection, info)
            lookups = [parcel.lookup(g, backend, pooled=False) for g in range(len(rows))]
            outputs = tuple(backend.sequence_forward(one, lookup) for one, lookup in zip(rows, lookups, strict=True))
        except BaseException:
            update.abandon(forward)
            raise
        ctx.set_materialize_grads(False)
        ctx.collection, ctx.forward_record, ctx.lookups, ctx.parcel = collection, forward, lookups, parcel
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if all(gradient is None for gradient in gradients):
            return None, None, None
        collection: ShardedCollection = ctx.collection
        backend, groups = collection.manager.backend, collection.manager.layout.groups
        collection.update.check_arrival(ctx.forward_record)
        full = [
            torch.zeros((lookup.position_count, spec.dim), device=backend.device)
            if gradient is None
            else gradient.contiguous()
            for gradient, lookup, spec in zip(gradients, ctx.lookups, groups, strict=True)
        ]
        shared = [collection.shared(gradient) for gradient in full]
        if collection.exchange.exact:
            mine = _by_owner(shared, ctx.parcel)
        else:
            mine = [
                backend.segment_grad_sequence(gradient, lookup)
                for gradient, lookup in zip(shared, ctx.lookups, strict=True)
            ]
        _hand_over(collection, ctx.forward_record, mine)
        return None, None, None


def _hand_over(collection: ShardedCollection, forward: Forward, gradients: list[torch.Tensor]) -> None:
    """Send gradients to their owners; what has come here is part of this backward pass's update."""
    exchange = collection.exchange
    received = exchange.send_gradients(_owned(forward.info), gradients, exchange.ranks.train)
    collection.update.receive(forward, tuple(received))


def _pooled_occurrences(gradient: torch.Tensor, parcel: Parcel, weights: torch.Tensor | None) -> list[torch.Tensor]:
    """The gradient of each occurrence of a pooled batch, by dim group and owner: what the kernels multiply and sum, in one."""
    layout, flat = parcel.layout, parcel.flat
    size, device = flat.batch_size, gradient.device
    lengths = np.diff(flat.bag_offsets)
    means = np.repeat(layout.column_is_mean != 0, size)
    divisors = np.where(means, np.maximum(lengths, 1), 1).astype(np.float32)
    bag = np.repeat(np.arange(len(lengths)), lengths)
    factors: torch.Tensor | None = None
    if weights is not None or means.any():
        divisor = torch.from_numpy(divisors[bag]).to(device)
        factors = (torch.ones_like(divisor) if weights is None else weights) / divisor
    columns = parcel.column_offsets().tolist()
    whole = []
    for spec in layout.groups:
        pieces = []
        for c in range(spec.first_column, spec.last_column):
            samples = torch.from_numpy(bag[columns[c] : columns[c + 1]] - c * size).to(device)
            first = int(layout.column_offsets[c])
            piece = gradient[:, first : first + spec.dim].index_select(0, samples)
            pieces.append(piece if factors is None else piece * factors[columns[c] : columns[c + 1], None])
        whole.append(torch.cat(pieces))
    return _by_owner(whole, parcel)


def _by_owner(gradients: list[torch.Tensor], parcel: Parcel) -> list[torch.Tensor]:
    """Gradients of each occurrence (n, dim) by dim group, in the order in which they travel: by owner, then by position."""
    layout, owner = parcel.layout, parcel.owners()[parcel.inverse]
    sorted_gradients = []
    for g, spec in enumerate(layout.groups):
        first, last = int(parcel.flat.table_offsets[spec.first_table]), int(parcel.flat.table_offsets[spec.last_table])
        order = torch.from_numpy(np.argsort(owner[first:last], kind="stable")).to(gradients[g].device)
        sorted_gradients.append(gradients[g].index_select(0, order))
    return sorted_gradients
