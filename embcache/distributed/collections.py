"""Collections whose tables are shared by all ranks: each key's row is on one of them, its owner.

A rank calls them with its own part of a batch, as it would call an `EmbeddingBagCollection` with all of it. Keys are counted,
admitted, inserted and evicted, and rows trained, by their owner alone, once for the batch of all ranks; so what the tables hold is what
one process would hold that is given the whole batch (docs/decisions/010).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import OptimizerSpec, TableConfig
from ..devices import Emulated
from ..errors import ConfigError, EmbCacheError, HbmCapacityError, RankError, shown
from ..features import as_jagged_features, inverse_for
from ..layout import FlatBatch
from ..manager import DEFAULT_OPTIMIZER
from ..modules import CachedCollection, EmbeddingBagCollection, EmbeddingCollection, ReadOnlyPooling
from ..swapinfo import SwapInfo
from ..timeline import Timeline
from .exchange import EVALUATION, TRAINING, Exchange, OwnedBatch
from .fingerprint import check_alike
from .lookup import OwnerUpdate, ShardedPooling, ShardedSequence
from .parcels import Parcel
from .ranks import Ranks
from .wire import Wire

if TYPE_CHECKING:
    from .._core.notice import Notice

__all__ = ["ShardedCollection", "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]

REDUCTIONS = ("rank", "exact")


class ShardedCollection(CachedCollection):
    """What both sharded collections share. A `CachedCollection` of this rank's rows, with an exchange around it.

    Attributes
    ----------
    ranks : Ranks
        Who shares the tables.
    """

    ranks: Any
    reduction: str
    average: bool
    _wire: Wire

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: OptimizerSpec = DEFAULT_OPTIMIZER,
        device: str | torch.device | Emulated = "cpu",
        hbm_bytes: int | None = None,
        policy: str = "lru",
        accumulate: int = 1,
        num_threads: int | None = None,
        *,
        process_group: Any = None,
        reduction: str = "rank",
        average: bool = True,
        wire_rows: str = "float32",
        wire_gradients: str = "float32",
        timeout_s: float = 600.0,
    ) -> None:
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise ConfigError(f"reduction = {shown(reduction)}; give one of {', '.join(map(repr, REDUCTIONS))}")
        if not isinstance(average, bool):
            raise ConfigError(f"average = {shown(average)}; give True or False")
        wire = Wire(wire_rows, wire_gradients)
        if reduction == "exact" and (wire.rows, wire.gradients) != ("float32", "float32"):
            raise ConfigError(
                'reduction="exact" with rows or gradients in 16 bits on the wire is not exact; leave float32'
            )
        # Before there is a module, whose making needs them.
        for name, value in (
            ("ranks", Ranks.of(process_group, timeout_s)),
            ("reduction", reduction),
            ("average", average),
            ("_wire", wire),
        ):
            object.__setattr__(self, name, value)
        super().__init__(tables, optimizer, device, hbm_bytes, policy, accumulate, num_threads)

    def _build(self, tables: Sequence[TableConfig], *arguments: Any) -> None:
        own = [_of_rank(table, self.ranks) for table in tables] if isinstance(tables, (list, tuple)) else tables
        super()._build(own, *arguments)
        self._manager.ranks = self.ranks
        try:
            self.exchange = Exchange(self.ranks, self._manager.layout, self._wire, self.reduction == "exact")
            check_alike(self, self._update.accumulate)
        except BaseException:
            self._manager.close()
            raise

    def _make_update(self, accumulate: int) -> OwnerUpdate:
        return OwnerUpdate(self._manager, accumulate, self)

    @property
    def update(self) -> OwnerUpdate:
        """The fused update of this rank's rows."""
        update = self._update
        assert isinstance(update, OwnerUpdate)
        return update

    def shared(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` as this rank's part of the whole: divided by the number of ranks where gradients are averaged."""
        return gradient / self.ranks.world if self.average and self.ranks.world > 1 else gradient

    # --------------------------------------------------------------------------------------------------------- planning

    def prepare(self, features: Any) -> Any:
        """A batch made ready for `plan_ahead`, by any thread: nothing is sent."""
        if self.pooled:
            inverse_for(features, self._manager.layout.output_features)
        return self.exchange.pack(self._manager.layout.flatten(as_jagged_features(features)))

    def plan_ahead(
        self,
        prepared: Any,
        timeline: Timeline,
        number: int,
        notice: Notice | None,
        again: Callable[[HbmCapacityError], bool],
    ) -> SwapInfo:
        """Exchange the keys of a prepared batch, plan what this rank owns, and move rows; in the order of the batches on all ranks.

        Raises
        ------
        RankRefusedError, RankError
        What `EmbCacheManager.plan_ahead` raises; the others raise `RankRefusedError` then, and no rank has planned the batch.
        """
        batch = self._sent(prepared, TRAINING)
        alone = super().plan_ahead
        return self._planned(lambda: alone(batch, timeline, number, notice, again))

    def _sent(self, prepared: Any, kind: int) -> OwnedBatch:
        return self.exchange.send_keys(prepared, kind, self.ranks.plan if kind == TRAINING else self.ranks.train)

    def _planned(self, plan: Any) -> SwapInfo:
        """Plan here, and see that all have: else nobody has."""
        info: SwapInfo | None = None
        error: BaseException | None = None
        try:
            info = plan()
        except BaseException as failure:
            error = failure
        try:
            self.ranks.settle("plan", "planning a batch", error)
        except BaseException:
            if info is not None:
                self._undo(info)
            raise
        assert info is not None
        return info

    def _undo(self, info: SwapInfo) -> None:
        """Take a plan back that another rank could not make. `RankError` on all where that fails: this rank would be a batch ahead."""
        try:
            self._manager.take_back(info)
        except BaseException as error:
            failure = RankError(
                f"rank {self.ranks.rank}: a batch that another rank has refused could not be undone here ({error}); the ranks' tables have "
                "seen different batches: start all ranks again from the last generation"
            )
            self.ranks.fail(failure)
            with contextlib.suppress(EmbCacheError):
                self._manager.abandon(info)
            raise failure from error

    def _plan(self, features: Any) -> SwapInfo:
        self._update.drop_stale()
        if self._feed is not None:
            return self._feed.take(features)
        batch = self._sent(self._prepared(features), TRAINING)
        return self._planned(lambda: self._manager.plan_and_move(batch))

    def _prepared(self, features: Any) -> Parcel | BaseException:
        """`prepare`, or what is wrong with the batch: the others must hear of it."""
        try:
            prepared: Parcel = self.prepare(features)
        except Exception as error:
            return error
        return prepared

    # ---------------------------------------------------------------------------------------------------------- reading

    def _read_rows(self, features: Any) -> tuple[Parcel, list[torch.Tensor]]:
        """The rows of a batch's distinct keys by dim group, as of the last finished batch, changing nothing (promise I6)."""
        batch = self._sent(self._prepared(features), EVALUATION)
        manager = self._manager
        owned = manager.read_rows(batch)
        rows = []
        for g, group_rows in enumerate(owned):
            part = batch.received.group_slice(g)
            places = batch.received.position_of_group[part] - part.start
            rows.append(manager.backend.gather_rows(group_rows, np.ascontiguousarray(places)))
        return batch.parcel, self.exchange.send_rows(batch, rows, self.ranks.train)

    def close(self) -> None:
        """Free this rank's rows. Every later forward raises `ClosedError`."""
        self._manager.close()

    def extra_repr(self) -> str:
        ranks = self.ranks
        return f"{super().extra_repr()}\nrank {ranks.rank} of {ranks.world}, reduction={self.reduction!r}, average={self.average!r}"


class ShardedEmbeddingBagCollection(ShardedCollection, EmbeddingBagCollection):
    """Pooled embeddings of tables that all ranks share, row by row.

    Parameters
    ----------
    tables, optimizer, device, hbm_bytes, policy, accumulate, num_threads
        As for `EmbeddingBagCollection`, the same on all ranks (which is checked); `hbm_bytes`, ``hbm_rows`` and ``num_embeddings`` are of
        one rank, a filter's ``sketch_bytes`` of all together; a table's ``directory`` gets a folder for each rank. ``"lookahead"`` is ``"lru"``.
    process_group : ProcessGroup, optional
        Default: all ranks. Without ``torch.distributed`` there is one.
    reduction : str
        ``"rank"``: each rank sums its gradients of a key before it sends them. ``"exact"``: they travel unsummed and are summed in the
        order of the global batch, rank after rank, so that weights are those of one process, bit for bit.
    average : bool
        Whether gradients are averaged over the ranks, as ``DistributedDataParallel`` does with those of the dense part, or summed.
    wire_rows, wire_gradients : str
        ``"float32"``, or ``"float16"`` or ``"bfloat16"`` for half of the bytes; `embcache.distributed.wire` says what that costs.
    timeout_s : float
        How long a rank may keep the others waiting before they give up with `RankError`.

    Raises
    ------
    ConfigError
        As `EmbeddingBagCollection`; or ranks differ in their arguments: the message says in what.

    Notes
    -----
    Constructing, forward (evaluation too), backward, `save`, `restore` and `finish_accumulation` are collective: every rank calls
    them, in the same order; a batch may have any size on each, also 0. Each forward that is trained is followed by
    a backward on every rank, or on none. Where ranks have different numbers of batches, take those of `together`.

    What is wrong with a batch on one rank raises `RankRefusedError` on the others, and all go on with the next. When a rank is gone the
    others raise `RankError` at once; when it has failed and lives, within a second; when it hangs, after `timeout_s`.
    Then all are to be started again, from the last generation, which is complete on every rank or is not there.

    With filters: occurrences and timestamps of the batch of all ranks count before keys are admitted. The counts of a filter
    with ``sketch_bytes`` are estimates, and those of one process, at any number of ranks where the sketch has 4,096 blocks, and at powers of two up to
    the number of its blocks where it has fewer (``AdmitAndEvictConfig.sketch_bytes``). At other numbers a block at the border of two ranks
    is on both, each of which counts its own keys in it: such a key may be admitted later than in one process, and no other.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> ebc = ec.distributed.ShardedEmbeddingBagCollection([ec.TableConfig("item", 4)])  # here of one rank
    >>> out = ebc(ec.JaggedFeatures(["item"], torch.tensor([3, 5, 3]), torch.tensor([2, 1])))
    >>> out["item"].shape, ebc.ranks.world
    (torch.Size([2, 4]), 1)
    """

    pooled = True

    def _inverse_for(self, features: Any) -> Mapping[str, torch.Tensor] | None:
        try:
            return super()._inverse_for(features)
        except Exception:
            if self._feed is not None and self._training_now():
                raise  # the step fails, and all ranks hear of it
            return None  # `_prepared` finds the same, and the others hear of it

    def _train(self, features: Any) -> torch.Tensor:
        info = self._plan(features)
        try:
            weights = _flat_of(info).weights
            if weights is not None:
                weights = weights.to(self.device)
            values: torch.Tensor = ShardedPooling.apply(self._update.anchor, weights, self, info)
        except BaseException:
            self._manager.abandon(info)
            raise
        return values

    def _read(self, features: Any) -> torch.Tensor:
        parcel, rows = self._read_rows(features)
        backend, flat = self._manager.backend, parcel.flat
        pairs = [(one, parcel.lookup(g, backend, pooled=True)) for g, one in enumerate(rows)]
        weights = None if flat.weights is None else flat.weights.to(self.device)
        values: torch.Tensor = ReadOnlyPooling.apply(
            weights, backend, self._manager.layout.output_width, flat.batch_size, pairs
        )
        return values


class ShardedEmbeddingCollection(ShardedCollection, EmbeddingCollection):
    """One row for each value, of tables that all ranks share, row by row.

    Parameters and notes are those of `ShardedEmbeddingBagCollection`; pooling and weights do not count here.
    """

    pooled = False

    def look_up(self, features: Any) -> tuple[list[torch.Tensor], FlatBatch]:
        """Rows of each column, (n, dim), of this rank's part of the batch; and that part as it was laid out."""
        if self._training_now():
            info = self._plan(features)
            try:
                outputs = ShardedSequence.apply(self._update.anchor, self, info)
            except BaseException:
                self._manager.abandon(info)
                raise
            return self._columns(outputs, _flat_of(info)), _flat_of(info)
        parcel, rows = self._read_rows(features)
        backend = self._manager.backend
        outputs = tuple(
            backend.sequence_forward(one, parcel.lookup(g, backend, pooled=False)) for g, one in enumerate(rows)
        )
        return self._columns(outputs, parcel.flat), parcel.flat


def _flat_of(info: SwapInfo) -> FlatBatch:
    """This rank's own batch."""
    flat = info.flat
    assert isinstance(flat, OwnedBatch)
    return flat.parcel.flat


def _of_rank(table: Any, ranks: Ranks) -> Any:
    """A table's configuration for one rank: files in a folder of its own."""
    if not isinstance(table, TableConfig) or table.directory is None or ranks.world == 1:
        return table
    folder = os.path.join(os.fspath(table.directory), f"rank-{ranks.rank:04d}-of-{ranks.world:04d}")
    return dataclasses.replace(table, directory=folder)
