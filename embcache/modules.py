"""EmbeddingBagCollection and EmbeddingCollection: embedding tables larger than device memory as ordinary `nn.Module`s.

A training forward (``training`` and gradients enabled) plans its batch, moves rows, looks up, and leaves a graph node
whose backward updates the rows (`embcache.fused`). Any other forward only reads (promise I6). Tables are not parameters:
``parameters()`` and ``state_dict()`` of a module hold nothing of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ._core.notice import Notice
from .checkpoint import vshards_of
from .config import OptimizerSpec, TableConfig
from .devices import Emulated, GroupLookup
from .errors import ConfigError, EmbCacheError, HbmCapacityError, PlanError
from .features import JaggedTensor, KeyedTensor, as_jagged_features, inverse_for, spread, stride_of
from .feed import Feed
from .fused import FusedUpdate
from .layout import FlatBatch
from .manager import DEFAULT_OPTIMIZER, EmbCacheManager
from .optim import EmbOptimizer
from .savable import Savable
from .swapinfo import SwapInfo
from .timeline import Timeline
from .view import TableView

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]


class NamedOutputs(dict[str, JaggedTensor]):
    """An ordinary dict whose `KeyError` says which names there are."""

    def __missing__(self, name: object) -> JaggedTensor:
        raise KeyError(f"EmbeddingCollection: no feature {name!r}; there are {list(self)!r}")


class PooledLookup(torch.autograd.Function):
    """Bags of a planned batch -> (B, W). Backward hands the gradient to the fused update; only weights get one."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, update: FusedUpdate, info: SwapInfo
    ) -> torch.Tensor:
        manager, backend = update.manager, update.manager.backend
        # A copy: the caller may change the weights in place before backward, which must use what forward used.
        plain = None if weights is None else weights.detach().clone(memory_format=torch.contiguous_format)
        forward, ctx.token = update.begin(info, plain)
        try:
            out = torch.empty(
                (info.flat.batch_size, manager.layout.output_width), dtype=torch.float32, device=backend.device
            )
            ctx.rows = []
            with manager.door.training:
                manager.buffer.await_moves()
                for g, lookup in enumerate(info.lookups(backend, pooled=True)):
                    backend.pooled_forward(manager.buffer.weights[g], lookup, out, plain)
                    if ctx.needs_input_grad[1]:
                        # Another forward's update may change the rows before this backward: keep what was read.
                        ctx.rows.append(_kept_rows(manager, info, g))
                manager.buffer.note_use()
        except BaseException:
            update.abandon(forward)
            raise
        ctx.set_materialize_grads(False)
        ctx.update, ctx.forward_record, ctx.backend = update, forward, backend
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        gradient = gradient.contiguous()
        ctx.update.receive(ctx.forward_record, (gradient,))
        weight_gradient = _weight_gradient(ctx.backend, gradient, ctx.rows) if ctx.rows else None
        return None, weight_gradient, None, None


class SequenceLookup(torch.autograd.Function):
    """Values of a planned batch -> one (n, dim) tensor a dim group."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, update: FusedUpdate, info: SwapInfo) -> tuple[torch.Tensor, ...]:
        manager, backend = update.manager, update.manager.backend
        forward, ctx.token = update.begin(info, None)
        try:
            with manager.door.training:
                manager.buffer.await_moves()
                outputs = tuple(
                    backend.sequence_forward(manager.buffer.weights[g], lookup)
                    for g, lookup in enumerate(info.lookups(backend, pooled=False))
                )
                manager.buffer.note_use()
        except BaseException:
            update.abandon(forward)
            raise
        ctx.set_materialize_grads(False)
        ctx.update, ctx.forward_record = update, forward
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if any(gradient is not None for gradient in gradients):
            ctx.update.receive(ctx.forward_record, gradients)
        return None, None, None


class ReadOnlyPooling(torch.autograd.Function):
    """Bags over rows that were read for one batch; only per-sample weights get a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor | None,
        backend: Any,
        width: int,
        size: int,
        rows: list[tuple[torch.Tensor, GroupLookup]],
    ) -> torch.Tensor:
        plain = None if weights is None else weights.detach().contiguous()
        out = torch.empty((size, width), dtype=torch.float32, device=backend.device)
        for table_rows, lookup in rows:
            backend.pooled_forward(table_rows, lookup, out, plain)
        ctx.backend, ctx.rows = backend, rows
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise PlanError(
                "backward(create_graph=True) reached an embedding collection, which has no second derivative"
            )
        return _weight_gradient(ctx.backend, gradients[0].contiguous(), ctx.rows), None, None, None, None


def _kept_rows(manager: EmbCacheManager, info: SwapInfo, group: int) -> tuple[torch.Tensor, GroupLookup]:
    """A copy of the rows that a dim group's part of a batch reads, and the look-up into that copy."""
    plan, spec = info.plan, manager.layout.groups[group]
    start, stop = int(plan.unique_offsets[spec.first_table]), int(plan.unique_offsets[spec.last_table])
    rows = manager.backend.gather_rows(manager.buffer.weights[group], info.slots[start:stop])
    places = np.arange(len(plan.slots), dtype=np.int64) - start
    return rows, info.group_lookup(manager.backend, group, places, pooled=True)


def _weight_gradient(
    backend: Any, gradient: torch.Tensor, rows: list[tuple[torch.Tensor, GroupLookup]]
) -> torch.Tensor:
    """Gradient of the per-sample weights of a whole batch: the dim groups' parts side by side."""
    return torch.cat([backend.per_sample_weight_grad(gradient, table_rows, lookup) for table_rows, lookup in rows])


def outside_graphs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a collection as ``torch.compile`` is to take it: called as it is, between two graphs. It plans and moves rows."""
    # Not the public torch.compiler.disable, which imports the compiler here and now; this one does when it is called.
    alone = torch._compile._disable_dynamo(forward)

    @functools.wraps(forward)
    def call(self: Any, features: Any) -> Any:
        return alone(self, features) if torch.compiler.is_compiling() else forward(self, features)

    return call


class CachedCollection(Savable, nn.Module):
    """What both collections share: the manager, the optimizer face, moving, and what refuses to be copied."""

    pooled = True
    ranks: Any = None  # who shares the tables, where others do (`embcache.distributed`)

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: OptimizerSpec = DEFAULT_OPTIMIZER,
        device: str | torch.device | Emulated = "cpu",
        hbm_bytes: int | None = None,
        policy: str = "lru",
        accumulate: int = 1,
        num_threads: int | None = None,
    ) -> None:
        super().__init__()
        self._feed: Feed | None = None
        self._build(tables, optimizer, device, hbm_bytes, policy, accumulate, num_threads)

    def _build(
        self,
        tables: Sequence[TableConfig],
        optimizer: OptimizerSpec,
        device: str | torch.device | Emulated,
        hbm_bytes: int | None,
        policy: str,
        accumulate: int,
        num_threads: int | None,
    ) -> None:
        """Make the manager and the fused update; with optimizer and device known, and not before."""
        self._manager = EmbCacheManager(
            tables,
            optimizer=optimizer,
            device=device,
            hbm_bytes=hbm_bytes,
            policy=policy,
            num_threads=num_threads,
            vshards=vshards_of(*((0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world))),
        )
        self._update = self._make_update(accumulate)

    def _make_update(self, accumulate: int) -> FusedUpdate:
        return FusedUpdate(self._manager, accumulate, self.pooled)

    @property
    def manager(self) -> EmbCacheManager:
        """The manager of this collection's tables."""
        return self._manager

    @property
    def optimizer(self) -> EmbOptimizer:
        """Hyper-parameters and step count of the fused update; an ordinary `torch.optim.Optimizer` for schedulers."""
        return self._update.optimizer

    @property
    def device(self) -> torch.device:
        """Where the buffer is and outputs appear."""
        return self._manager.backend.device

    @property
    def grad_scale(self) -> Any:
        """Loss scale (a number, or a function such as ``scaler.get_scale``), or None.

        While set, gradients are divided by it, and an update whose gradient is not finite is skipped.
        """
        return self._update.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self._update.grad_scale = scale

    @property
    def skipped_updates(self) -> int:
        """Updates skipped because a gradient was not finite under `grad_scale`."""
        return self._update.skipped_updates

    def tables(self) -> dict[str, TableView]:
        """Name -> coherent view of each table."""
        return {name: self._manager.table(name) for name in self._manager.layout.names}

    def saved_managers(self) -> dict[str, EmbCacheManager]:
        return {"": self._manager}

    def finish_accumulation(self) -> None:
        """Apply an incomplete accumulation window now (at the end of an epoch, for example)."""
        self._update.finish_accumulation()

    def close(self) -> None:
        """Free the tables. Every later forward raises `ClosedError`."""
        self._manager.close()

    @property
    def feed(self) -> Feed | None:
        """Where the plans of training forwards come from: the pipeline that trains this collection; None: forwards plan."""
        return self._feed

    @feed.setter
    def feed(self, feed: Feed | None) -> None:
        self._feed = feed
        self._update.settles = feed is None

    def end_step(self, infos: Sequence[SwapInfo]) -> None:
        """A step is over or was given up, whose plans were `infos`: what waits for no open window ends here. Again is no harm."""
        if self._feed is not None:
            self._feed.clear()
        self._update.end_step()
        for info in infos:
            if not self._update.holds(info):
                self._manager.finish_late(info)

    def settle(self) -> None:
        """End the plans that have trained, unless somebody is inside, who will. For the thread that plans ahead; never waits."""
        self._manager.door.settle()

    def prepare(self, features: Any) -> Any:
        """A batch made ready for `plan_ahead`, by any thread; changes nothing."""
        return self._manager.layout.flatten(as_jagged_features(features)).owned()

    def plan_ahead(
        self,
        prepared: Any,
        timeline: Timeline,
        number: int,
        notice: Notice | None,
        again: Callable[[HbmCapacityError], bool],
    ) -> SwapInfo:
        """Plan what `prepare` returned and move its rows while earlier batches train; see `EmbCacheManager.plan_ahead`.

        ``again(error)`` waits, where the buffer is full, until that may be worth another try; False: it is not.
        """
        while True:
            try:
                return self._manager.plan_ahead(prepared, timeline, number, notice)
            except HbmCapacityError as error:
                if not again(error):
                    raise

    def _plan(self, features: Any) -> SwapInfo:
        """Plan a batch and move its rows; or take the plan that a pipeline has made."""
        self._update.drop_stale()
        if self._feed is not None:
            try:
                return self._feed.take(features)
            except PlanError as error:
                try:
                    self.prepare(features)
                except EmbCacheError as fault:  # a feature that it lacks, say: why it was not planned
                    raise fault from error
                raise
        return self._manager.plan_and_move(features)

    def _training_now(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> CachedCollection:
        """``.to()``, ``.cuda()`` and their like: the buffer moves, the tables stay in host memory."""
        device = self._device_after(fn)
        if device != self.device:
            self._manager.move(device)
            self._update.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device=device)
        return super()._apply(fn, recurse)

    def _device_after(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.device:
        """Where `fn`, of ``.to()`` and its like, puts tensors; `ConfigError` where it changes their type."""
        probe = fn(torch.empty(0, dtype=torch.float32, device=self.device))
        if probe.dtype is not torch.float32:
            raise ConfigError(
                f"a collection computes in float32 and cannot become {probe.dtype}; cast its outputs, or move it before casting the rest. "
                "How rows are kept is said by TableConfig(dtype=...)"
            )
        return probe.device

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a collection cannot be copied or pickled: its tables are host memory of this process. Make a new one, and let it "
            "restore() what this one can save()"
        )

    def extra_repr(self) -> str:
        lines = [f"{t.name}: dim={t.embedding_dim}, features={t.feature_names!r}" for t in self._manager.layout.tables]
        return "\n".join([*lines, f"optimizer={self._manager.spec!r}, device={str(self.device)!r}"])


class EmbeddingBagCollection(CachedCollection):
    """Pooled embeddings of any number of tables, of which only the rows in use are on the device.

    Parameters
    ----------
    tables : list of TableConfig
        Any mix of dims and poolings; several features may share a table, and several tables a feature.
    optimizer : OptimizerSpec
        Updates the touched rows at the end of each backward pass. Default: ``Adagrad(lr=0.01)``.
    device : str or torch.device
    hbm_bytes : int, optional
        Device bytes for rows with their state; see `EmbCacheManager`.
    policy : str
        Whose slot is taken where room is needed: ``"lru"``, ``"lfu"`` or ``"s3fifo"``; see `EmbCacheManager`.
    accumulate : int
        Backward passes that make one update, on their summed gradient.
    num_threads : int, optional

    Notes
    -----
    *Training* (``train()`` with gradients enabled): keys are counted, admitted and inserted; new rows start from the table's
    initializer. ``loss.backward()`` updates the rows; call ``ebc.optimizer.step()`` after it as for any optimizer.
    Several forwards before one backward are one update. Backward twice through one forward raises `PlanError`.
    *Evaluation* (``eval()`` or gradients disabled) reads and changes nothing: an unknown key reads its initial value.

    ``weights`` of the batch are per-sample weights; a mean divides by the bag's length all the same, as FBGEMM does. They
    receive a gradient if they require one. An empty bag is 0. Do not put a collection inside activation
    checkpointing: the recomputed forward would count its keys again.

    There are no parameters whose ``requires_grad`` could be cleared: to freeze a collection, keep it in ``eval()``.

    *Saving.* Tables are not parameters: ``state_dict()`` has nothing of them and stays small. ``ebc.save(path)`` and
    ``ebc.restore(path)`` write and read them with the optimizer's state; `embcache.save` does so for a whole model.

    ``.to()`` and ``.cuda()`` move the buffer, never the tables, and only between steps. Not thread-safe in training;
    evaluation may run in another thread.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> ebc = ec.EmbeddingBagCollection(
    ...     [ec.TableConfig("item", 4, ["clicked", "shown"]), ec.TableConfig("user", 8)], optimizer=ec.Adagrad(lr=0.1)
    ... )
    >>> batch = ec.JaggedFeatures(["user", "clicked", "shown"], torch.tensor([7, 9, 1, 2, 2]), torch.tensor([1, 1, 0, 2, 1, 0]))
    >>> out = ebc(batch)
    >>> out["user"].shape, out.values().shape, out["clicked"][0].tolist()
    (torch.Size([2, 8]), torch.Size([2, 16]), [0.0, 0.0, 0.0, 0.0])
    >>> out.values().sum().backward()
    >>> ebc.optimizer.step()
    """

    pooled = True

    @outside_graphs
    def forward(self, features: Any) -> KeyedTensor:
        """Return one (B, dim) block a feature: `features` is a `JaggedFeatures` or a torchrec KeyedJaggedTensor."""
        layout = self._manager.layout
        return KeyedTensor(layout.output_names, layout.output_dims, self.pool(features))

    def pool(self, features: Any) -> torch.Tensor:
        """The values of `forward`, (B, sum of dims)."""
        layout = self._manager.layout
        inverse = self._inverse_for(features)
        values = self._train(features) if self._training_now() else self._read(features)
        return values if inverse is None else spread(values, inverse, layout.output_features, layout.output_dims)

    def _inverse_for(self, features: Any) -> Mapping[str, torch.Tensor] | None:
        return inverse_for(features, self._manager.layout.output_features)

    def _train(self, features: Any) -> torch.Tensor:
        info = self._plan(features)
        try:
            weights = info.flat.weights
            if weights is not None:
                weights = weights.to(self.device)
            values: torch.Tensor = PooledLookup.apply(self._update.anchor, weights, self._update, info)
        except BaseException:  # before the graph took charge of the pins, or after: abandon() minds what was done
            self._manager.abandon(info)
            raise
        return values

    def _read(self, features: Any) -> torch.Tensor:
        manager, layout = self._manager, self._manager.layout
        flat = layout.flatten(as_jagged_features(features))
        rows = manager.read_rows(flat)
        positions = np.arange(len(flat.keys), dtype=np.int64)
        pairs = []
        for g, group_rows in enumerate(rows):
            start, stop = (
                int(flat.table_offsets[t]) for t in (layout.groups[g].first_table, layout.groups[g].last_table)
            )
            lookup = manager.backend.lookup(
                slots=positions - start, inverse=positions, unique_start=start, unique_stop=stop, **layout.bags(g, flat)
            )
            pairs.append((group_rows, lookup))
        weights = None if flat.weights is None else flat.weights.to(self.device)
        values: torch.Tensor = ReadOnlyPooling.apply(
            weights, manager.backend, layout.output_width, flat.batch_size, pairs
        )
        return values


class EmbeddingCollection(CachedCollection):
    """One row for each value (sequence embeddings), for any number of tables.

    Parameters and notes are those of `EmbeddingBagCollection`; ``pooling`` of the tables and weights of the batch do not
    count here.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> emc = ec.EmbeddingCollection([ec.TableConfig("item", 4)], optimizer=ec.SGD(lr=0.1))
    >>> out = emc(ec.JaggedFeatures(["item"], torch.tensor([3, 5, 3]), torch.tensor([2, 1])))
    >>> out["item"].values().shape, out["item"].lengths().tolist()
    (torch.Size([3, 4]), [2, 1])
    """

    pooled = False

    @outside_graphs
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Return name -> `JaggedTensor`: `features` is a `JaggedFeatures` or a torchrec KeyedJaggedTensor."""
        layout = self._manager.layout
        columns, flat = self.look_up(features)
        lengths = flat.column_lengths()
        strides = stride_of(features)
        if strides is not None:
            lengths = [own[: strides[name]] for name, own in zip(layout.column_features, lengths, strict=True)]
        return NamedOutputs(
            (name, JaggedTensor(columns[column], lengths[column]))
            for name, column in zip(layout.output_names, layout.output_columns, strict=True)
        )

    def look_up(self, features: Any) -> tuple[list[torch.Tensor], FlatBatch]:
        """Rows of each column, (n, dim), in the layout's order of columns; and the batch as it was laid out."""
        if self._training_now():
            info = self._plan(features)
            try:
                outputs = SequenceLookup.apply(self._update.anchor, self._update, info)
            except BaseException:
                self._manager.abandon(info)
                raise
            return self._columns(outputs, info.flat), info.flat
        flat = self._manager.layout.flatten(as_jagged_features(features))
        return self._columns(tuple(self._manager.read_rows(flat)), flat), flat

    def _columns(self, outputs: tuple[torch.Tensor, ...], flat: FlatBatch) -> list[torch.Tensor]:
        """Cut the dim groups' outputs into columns."""
        layout = self._manager.layout
        counts = np.diff(flat.bag_offsets[np.arange(len(layout.column_features) + 1) * flat.batch_size]).tolist()
        columns: list[torch.Tensor] = []
        for group, output in zip(layout.groups, outputs, strict=True):
            columns += torch.split(output, counts[group.first_column : group.last_column])
        return columns
