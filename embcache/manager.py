"""EmbCacheManager: the tables of one collection, their planner and filters, and the device buffer, kept consistent.

The manager owns the order of things: rows leave the buffer before others take their slots, host look-ups see every
earlier write-back, and whoever reads or changes a table sees the one authoritative copy of a row. Everything that
touches tables, planner or buffer goes through its door (one lock, one check of process and state).
It knows nothing of autograd; `embcache.modules` stands on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ._core.cut import period_saved
from ._core.door import Door
from ._core.doors import Doors
from ._core.notice import Notice
from ._core.plan import Plan
from ._core.swap import PEEK_ABSENT, PEEK_DEFAULT, PEEK_ROW, PEEK_SLOT, SwapManager
from ._core.table import Table
from .budget import row_bytes, split_budget
from .buffer import HbmBuffer
from .checkpoint.names import VSHARDS
from .config import Adagrad, OptimizerSpec, TableConfig
from .devices import Emulated, backend_for
from .errors import ConfigError, EmbCacheError, HbmCapacityError, HostMemoryError, PlanError, StorageError, whole_number
from .features import as_jagged_features
from .filterfile import pack, unpack
from .layout import FlatBatch, TableLayout
from .mover import Mover
from .optim import EmbOptimizer
from .savable import Savable
from .savejob import SaveJob
from .swapinfo import SwapInfo
from .table import initializer_spec
from .timeline import Timeline
from .view import TableView

__all__ = ["EmbCacheManager", "Held"]

LOG = logging.getLogger("embcache")

# Tables, planner, counters before this planner's, and what a delta would change: path, generation, when it was made, module path.
Saved = tuple[str, int, float | None, str]
Held = tuple[list[Table], SwapManager, list[dict[str, int]], Saved | None]

DEFAULT_OPTIMIZER = Adagrad(lr=0.01)
FREE_MEMORY_SHARE = 0.6
FIRST_SLOTS = 256
MAX_SLOTS = 2**31 - 2
COUNTERS = ("hits", "misses", "swap_in_rows", "swap_out_rows", "admitted", "rejected", "evicted", "forgotten", "born")
GAUGES = ("capacity", "resident", "free", "pinned", "coming_keys", "coming_uses", "coming_bytes")


class EmbCacheManager(Savable):
    """Tables in host memory, their hot rows in a device buffer, and the planner that moves rows between the two.

    Parameters
    ----------
    tables : list of TableConfig
    optimizer : OptimizerSpec
        Decides which state a row carries. Default: ``Adagrad(lr=0.01)``.
    device : str or torch.device
    hbm_bytes : int, optional
        Device bytes for rows, state included. Default: 60 % of the free device memory; on CPU the buffer starts small
        and grows while no plan is outstanding, up to 60 % of the free memory. (The collections' own forwards between
        plan and update do not count: their slots may move.)
    policy : str
        Whose slot is taken where room is needed: ``"lru"`` (the least recently used), ``"lfu"`` (the least often used,
        aged), ``"s3fifo"`` (new keys prove themselves first) or ``"lookahead"`` (the one whose next use is farthest, as far
        as `look_ahead` was told; ``"lru"`` beyond). It decides how many rows move, never what is trained;
        `embcache.simulate` counts hits over a trace.
    num_threads : int, optional
        Threads of planning and row kernels. Results never depend on it.
    vshards : (int, int)
        First and last + 1 of those of the 4,096 whose keys this manager gets, where others have the rest: it has of a filter's sketch what is
        of these.

    Raises
    ------
    ConfigError
        A table twice, a feature twice in a table, a budget too small (the message says how many bytes are needed), an
        unknown device or policy.

    Notes
    -----
    Calls are serialized by one lock; plans are made in the order of the calls. Context manager; `close` frees the tables.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> m = ec.EmbCacheManager([ec.TableConfig("item", 8, hbm_rows=100)], optimizer=ec.SGD(lr=0.1))
    >>> info = m.plan(ec.JaggedFeatures(["item"], torch.tensor([5, 7, 5]), torch.tensor([2, 1])))
    >>> info.unique_keys.tolist(), info.hits, info.misses
    ([5, 7], 0, 2)
    >>> m.swap_out(info); m.swap_in(info); m.finish(info)
    >>> m.stats()["swap_in_rows"], 5 in m.table("item")
    (2, True)
    >>> m.close()
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: OptimizerSpec = DEFAULT_OPTIMIZER,
        device: str | torch.device | Emulated = "cpu",
        hbm_bytes: int | None = None,
        policy: str = "lru",
        num_threads: int | None = None,
        vshards: tuple[int, int] = (0, VSHARDS),
    ) -> None:
        self.layout = TableLayout(tables)
        if not isinstance(optimizer, OptimizerSpec):
            raise ConfigError(f"optimizer = {optimizer!r}; give an embcache optimizer such as Adagrad(lr=0.01)")
        budget = None if hbm_bytes is None else whole_number(hbm_bytes)
        if hbm_bytes is not None and (budget is None or budget < 1):
            raise ConfigError(
                f"hbm_bytes = {hbm_bytes!r}; give a number of bytes, or None for a share of the free memory"
            )
        self.spec = optimizer
        self.backend = backend_for(device, num_threads=num_threads)
        self._policy, self._num_threads, self._vshards = policy, num_threads, vshards
        self._hbm_bytes, self._headroom = budget, 4
        configs = self.layout.tables
        capacities = self._first_capacities()
        growing = budget is None and self.backend.direct
        limits = [(table.num_embeddings or MAX_SLOTS) if growing and table.hbm_rows is None else 0 for table in configs]
        self._slots, self._slot_limits = np.array(capacities), np.maximum(limits, capacities)
        self._growing = bool(self._growable().any())
        # A disk may refuse rows, and the batch is to hear of it; an evicted row's place may be a new one's by the next plan.
        self._home_at_once = any(table.directory is not None or table.admit_and_evict is not None for table in configs)
        self.host_tables: list[Table] = []
        self._unclosed: list[tuple[Table, bytes | None]] = []
        try:
            for table in configs:
                self.host_tables.append(self._make_table(table))
            self.planner = self._make_planner(capacities)
            self._recall_filters()
            self.buffer = HbmBuffer(self.layout, optimizer, self.backend, capacities)
        except BaseException:
            for opened in self.host_tables:
                with contextlib.suppress(EmbCacheError):
                    opened.close()
            raise
        self.planner.set_bases(self.buffer.bases)
        self.door = Door(self.planner)
        self._mover = Mover(self.door, self.buffer, self.host_tables, num_threads)
        self._past: list[dict[str, int]] = [dict.fromkeys(COUNTERS, 0) for _ in configs]
        self._abandoned: list[SwapInfo] = []
        self._movable: weakref.WeakValueDictionary[int, SwapInfo] = weakref.WeakValueDictionary()  # by step
        self._on_shift: weakref.WeakMethod[Any] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._worker_thread: int | None = None
        self._queued = 0
        self._optimizer: EmbOptimizer | None = None
        self.saved: Saved | None = None
        self.ranks: Any = None  # who shares the tables, where others do (`embcache.distributed`)

    @property
    def saving(self) -> SaveJob | None:
        """The save under way."""
        job: SaveJob | None = self.door.saving
        return job

    @property
    def policy(self) -> str:
        """Whose slot is taken where room is needed."""
        return self._policy

    def initial_state(self, dim: int) -> np.ndarray:
        """State of a new row of `dim` weights, float32 (state_dim,)."""
        return np.repeat(np.array(self.spec.initial_state(), dtype=np.float32), self.spec.state_widths(dim))

    def _make_table(self, config: TableConfig) -> Table:
        widths = self.spec.state_widths(config.embedding_dim)
        return Table(
            config.name,
            config.embedding_dim,
            state_dim=sum(widths),
            dtype=config.dtype,
            initializer=initializer_spec(config.initializer),
            seed=config.seed,
            initial_state=self.initial_state(config.embedding_dim),
            with_filter=config.admit_and_evict is not None,
            num_threads=self._num_threads,
            directory=config.directory,
        )

    def _make_planner(self, capacities: Sequence[int], tables: Sequence[Table] | None = None) -> SwapManager:
        filters = [table.admit_and_evict for table in self.layout.tables]
        return SwapManager(
            self.host_tables if tables is None else tables,
            list(capacities),
            filters,
            policy=self._policy,
            num_threads=self._num_threads,
            vshards=self._vshards,
        )

    # ---------------------------------------------------------------------------------------------- slots of each table

    def _shares(self) -> list[int]:
        """Claims of the tables on the budget before anything was measured: dim x features."""
        return [
            table.embedding_dim * max(1, self.layout.column_table.count(t))
            for t, table in enumerate(self.layout.tables)
        ]

    def _first_capacities(self) -> list[int]:
        configs = self.layout.tables
        if self._hbm_bytes is not None:
            return split_budget(configs, self.spec, self._hbm_bytes, self._shares())
        if self.backend.direct or all(table.hbm_rows is not None for table in configs):
            return [table.hbm_rows or min(table.num_embeddings or FIRST_SLOTS, FIRST_SLOTS) for table in configs]
        self._hbm_bytes = int(self.backend.free_memory() * FREE_MEMORY_SHARE)
        return split_budget(configs, self.spec, self._hbm_bytes, self._shares())

    def _growable(self) -> np.ndarray:
        """Whether each table may have more slots, bool (tables,)."""
        growable: np.ndarray = self._slots < self._slot_limits
        return growable

    def _grow(self, wanted: np.ndarray) -> bool:
        """Raise capacities towards `wanted` as far as limits and free memory allow; returns whether any grew."""
        with self.door.rows:  # who trains a batch looks for its rows where they were
            return self._grow_alone(wanted)

    def _grow_alone(self, wanted: np.ndarray) -> bool:
        old, old_bases = self._slots, self.buffer.bases
        target = np.where(wanted > old, np.minimum(np.maximum(wanted, 2 * old), self._slot_limits), old)
        sizes = np.array([row_bytes(table, self.spec) for table in self.layout.tables])
        extra = int((target - old) @ sizes)
        free = self.backend.free_memory()
        # While it grows the buffer exists twice, and what it holds the host tables hold too.
        allowed = max(0, min(int((free + self.buffer.bytes) * FREE_MEMORY_SHARE), free) - self.buffer.bytes)
        if extra > allowed:
            target = old + [int(more) * allowed // extra for more in target - old]
            self._settle_at(target)
        if np.array_equal(target, old):
            return False
        try:
            self.buffer.resize(target.tolist())
        except HostMemoryError:
            self._settle_at(old)
            return False
        try:
            for t, capacity in enumerate(target.tolist()):
                self.planner.grow(t, capacity)
        except HostMemoryError:
            self._settle_at(np.array([self.planner.capacity(t) for t in range(len(old))]))
        finally:
            # Whatever stopped it: buffer and planner agree, with the slots that the planner has got.
            reached = [self.planner.capacity(t) for t in range(len(old))]
            self.buffer.narrow(reached)
            self.planner.set_bases(self.buffer.bases)
            self._slots = np.array(reached)
            self._growing = bool(self._growable().any())
            self._shift_slots(self.buffer.bases - old_bases)
            self.door.changes += 1
        return not np.array_equal(self._slots, old)

    def _shift_slots(self, shifts: np.ndarray) -> None:
        """The tables' bases have moved by `shifts`: tell those who hold slots of outstanding plans."""
        constants = np.array([self.buffer.constant_slot(t) for t in range(len(shifts))])
        for info in self._movable.values():
            info.shift_slots(shifts, constants)
        on_shift = None if self._on_shift is None else self._on_shift()
        if on_shift is not None:
            on_shift(shifts)

    def let_slots_move(self, info: SwapInfo) -> None:
        """Say that whoever uses `info`, whose rows are in, asks it for its slots anew each time under the lock.

        A growing buffer can then grow though the plan is outstanding: tables' bases move, and `info` with them.
        """
        if self._growing:
            self._movable[self._own(info).step] = info

    def _can_grow(self) -> bool:
        """Whether no outstanding plan holds the buffer where it is."""
        return all(plan.state == "swapped_in" and plan.step in self._movable for plan in self.planner.outstanding)

    def _settle_at(self, capacities: np.ndarray) -> None:
        """Grow no further than this."""
        self._slot_limits, self._growing = capacities, False

    def reserve_forwards(self, count: int, on_shift: weakref.WeakMethod[Any]) -> None:
        """Let a growing buffer keep room for `count` batches at once (a collection's forwards before its update).

        `on_shift` is called with the tables' shifts, int64 (tables,), when their slots move in the buffer.
        """
        self._headroom, self._on_shift = max(self._headroom, count), on_shift

    # --------------------------------------------------------------------------------------------------------- planning

    def plan(self, batch: Any, notice: Notice | None = None) -> SwapInfo:
        """Plan a training batch: count, admit, place its keys, choose victims. Moves no rows.

        Parameters
        ----------
        batch : JaggedFeatures or torchrec KeyedJaggedTensor
            Features that no table uses are left out.
        notice : Notice, optional
            What `look_ahead` returned for this batch.

        Raises
        ------
        ShapeError
            The batch does not fit (a feature is missing, lengths do not sum up).
        ConfigError
            Timestamps are missing for a table that evicts by them, or labels for one with the show/click policy.
        HbmCapacityError
            The batch needs more slots than there are. Nothing has changed then, filters included (promise I3).
        """
        self.door.check_process()
        if self._queued:
            if threading.get_ident() == self._worker_thread:
                raise PlanError(
                    "plan() in a callback of plan_async() while other batches are queued would wait for itself; call plan_async() there"
                )
            return self.plan_async(batch, notice).result()
        return self._plan(batch, notice)

    def plan_and_move(self, batch: Any, notice: Notice | None = None) -> SwapInfo:
        """`plan`, `swap_out` and `swap_in` as one step: no other thread sees the batch half way.

        Growth may move the slots of the returned plan later (see `let_slots_move`).

        Raises
        ------
        Those of `plan`; and whatever keeps rows from moving, in which case the plan is abandoned.
        """
        saving = self.door.saving
        if saving is not None:
            saving.wait_for_room()
        # A queue is drained by a worker that needs the lock, so waiting for it must happen outside.
        info = self.plan(batch, notice) if self._queued else None
        flat = self._flat(batch) if info is None else info.flat
        with self.door.planning:
            last = self.planner.step
            try:
                if info is None:
                    info = self._plan_and_move(flat, notice)
                else:
                    self.complete_abandoned()
                    self._swap_out(info.plan)
                    self._swap_in(info.plan)
                self._mover.land()
                self.let_slots_move(info)
                return info
            except BaseException:
                if info is not None:
                    self.abandon(info)
                else:
                    self._give_up_after(last)
                raise

    def plan_ahead(self, flat: FlatBatch, timeline: Timeline, number: int, notice: Notice | None = None) -> SwapInfo:
        """`plan_and_move` of a flattened batch while earlier ones train: rows move beside, and may be on their way yet.

        `notice` is what `look_ahead` returned for it. `timeline` is told when the stages of batch `number` begin and end. Raises as `plan_and_move`.
        """
        saving = self.saving
        if saving is not None:
            saving.wait_for_room()
        with self.door.moving, self.buffer.moving():
            info = self._plan_and_move(flat, notice, timeline, number)
            try:
                if self._home_at_once:
                    self._mover.land()
                self.let_slots_move(info)
                return info
            except BaseException:
                self.abandon(info)
                raise

    def _flat(self, batch: Any) -> FlatBatch:
        return batch if isinstance(batch, FlatBatch) else self.layout.flatten(as_jagged_features(batch))

    def _plan_and_move(
        self, flat: FlatBatch, notice: Notice | None, timeline: Timeline | None = None, number: int = 0
    ) -> SwapInfo:
        """Plan a flattened batch and move its rows, in one call of the core where nothing has to be decided in between; inside the door."""
        if self._abandoned:
            self.complete_abandoned()
        start = 0.0 if timeline is None else timeline.start("plan", number)
        out_s = in_s = 0.0
        if self._growing:
            plan = self._plan_with_room(flat, notice)
        else:
            plan = self._planned_in_one(flat, notice)
            if timeline is not None:
                out_s, in_s = self._mover.seconds
        self.door.changes += 1
        info = SwapInfo(self, plan, flat)
        try:
            if timeline is None:
                if plan.state == "planned":
                    self._swap_out(plan)
                    self._swap_in(plan)
                return info
            plan.group_now()  # by this thread rather than by the one that computes
            timeline.stop("plan", number, start, (("swap_out", out_s), ("swap_in", in_s)))
            if plan.state == "planned":
                start = timeline.start("swap_out", number)
                self._swap_out(plan)
                timeline.stop("swap_out", number, start)
                start = timeline.start("swap_in", number)
                self._swap_in(plan)
                timeline.stop("swap_in", number, start)
            return info
        except BaseException:
            self.abandon(info)
            raise

    def _planned_in_one(self, flat: FlatBatch, notice: Notice | None) -> Plan:
        """Plan and, as far as that needs no device, move."""
        saving, last = self.door.saving, self.planner.step
        if saving is None:
            return self._mover.plan(self.planner, flat, notice)
        try:
            plan = self._mover.plan(self.planner, flat, notice)
            if plan.state == "swapped_in":
                saving.comes_in(self, plan)
            return plan
        except BaseException as error:
            if self.planner.step > last:  # a signal: what was to be copied out may not be
                saving.spoil(error)
            raise

    def _give_up_after(self, step: int) -> None:
        """End what was planned after `step` and reached nobody, since a signal came in between."""
        abandoned = [info.plan for info in self._abandoned]
        for plan in self.planner.outstanding[::-1]:
            if plan.step > step and plan not in abandoned:
                if plan.state == "swapped_in":
                    self.planner.finish(plan)
                else:
                    self.planner.cancel(plan)

    def _plan(self, batch: Any, notice: Notice | None = None) -> SwapInfo:
        flat = self._flat(batch)
        saving = self.door.saving
        if saving is not None:
            saving.wait_for_room()
        with self.door.planning:
            return self._plan_flat(flat, notice)

    def _plan_flat(self, flat: FlatBatch, notice: Notice | None = None) -> SwapInfo:
        """Plan a flattened batch, inside the door."""
        self.complete_abandoned()
        plan = self._plan_with_room(flat, notice)
        self.door.changes += 1
        return SwapInfo(self, plan, flat)

    def _plan_with_room(self, flat: FlatBatch, notice: Notice | None) -> Plan:
        """Plan; where the buffer may grow, see first that the batch and a few like it fit beside the residents."""
        if not self._growing:
            return self.planner.plan(
                flat.keys, flat.table_offsets, flat.timestamps, flat.clicked, notice, **flat.more()
            )
        movable = self._can_grow()
        try:
            plan = self.planner.plan(
                flat.keys, flat.table_offsets, flat.timestamps, flat.clicked, notice, **flat.more()
            )
            if plan.misses == 0 and plan.num_uniques * self._headroom <= self._slots.min():
                return plan  # nothing left, and there is room: by far the most frequent case once a buffer has grown
        except HbmCapacityError as error:
            if not self._can_grow():
                if not self._growable()[self.layout.index_of[error.table]]:
                    raise
                message = (
                    f"{error} (the buffer can grow, but only while no plan is outstanding: finish the earlier plans first, which backward "
                    "does, and finish_accumulation() in the middle of a window; or fix the table's slots with hbm_rows)"
                )
                raise HbmCapacityError(
                    message, table=error.table, need=error.need, have=error.have, never_fits=False
                ) from None
            edges = flat.table_offsets.tolist()
            uniques = np.array([len(np.unique(flat.keys[start:stop])) for start, stop in pairwise(edges)])
            if not self._grow(self._wanted(uniques, uniques)):
                raise
            return self._plan_with_room(flat, notice)
        uniques = np.diff(plan.unique_offsets)
        short = (np.diff(plan.swap_out_offsets) > 0) | (uniques * self._headroom > self._slots)
        if not movable or not (short & self._growable()).any():
            return plan
        wanted = self._wanted(uniques, plan.table_misses)
        self.planner.cancel(plan)
        self._grow(wanted)
        return self.planner.plan(flat.keys, flat.table_offsets, flat.timestamps, flat.clicked, notice, **flat.more())

    def _wanted(self, uniques: np.ndarray, misses: np.ndarray) -> np.ndarray:
        """Slots each table needs to keep its residents, take `misses` in, and have room for a few batches like this."""
        held = np.array([self.planner.capacity(t) - self.planner.free_slots(t) for t in range(len(uniques))])
        return np.maximum(held + misses, self._headroom * uniques)

    def plan_async(self, batch: Any, notice: Notice | None = None) -> Future[SwapInfo]:
        """Plan in a worker thread; returns a Future of the `SwapInfo`. Plans are made in the order of the calls.

        Do not change the tensors of `batch` before the Future is done.
        """
        with self.door:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "embcache-plan", initializer=self._note_worker)
            future = self._worker.submit(self._plan, batch, notice)
            self._queued += 1
        # A callback, since a Future that is cancelled before its turn never runs.
        future.add_done_callback(self._unqueue)
        return future

    def look_ahead(self, batch: Any) -> Notice:
        """Tell the policy ``"lookahead"`` of a batch to come: its ids only, far earlier than its rows can be in flight.

        Give the notice to `plan` with the batch, or to `withdraw` if the batch will not come. Batches are expected in the
        order of these calls; they may come in another. Rows stay in HBM for a batch that is expected, so long as
        its notice is given; what a notice costs is in `stats`: ``coming_keys``, ``coming_uses``, ``coming_bytes``.

        Parameters
        ----------
        batch : JaggedFeatures, torchrec KeyedJaggedTensor or FlatBatch
            A batch, or what this manager's layout made of it.

        Raises
        ------
        ConfigError
            The policy is another one.
        ShapeError
            The batch does not fit.
        HostMemoryError
            In each case nothing has changed.

        Examples
        --------
        >>> import torch, embcache as ec
        >>> m = ec.EmbCacheManager([ec.TableConfig("item", 8, hbm_rows=2)], policy="lookahead")
        >>> batches = [ec.JaggedFeatures(["item"], torch.tensor(ids), torch.tensor([1])) for ids in ([1], [2], [3], [1])]
        >>> notices = [m.look_ahead(batch) for batch in batches]
        >>> for batch, notice in zip(batches, notices):
        ...     info = m.plan(batch, notice)
        ...     m.swap_out(info); m.swap_in(info); m.finish(info)
        >>> m.stats()["hits"]  # 3 took the slot of 2, which is not used any more
        1
        >>> m.close()
        """
        flat = self._flat(batch)
        with self.door.moving:
            return self.planner.look_ahead(flat.keys, flat.table_offsets)

    def withdraw(self, notice: Notice) -> None:
        """Take a notice back, whose batch will not be planned. Twice is allowed.

        Raises
        ------
        PlanError
            Its batch has been planned.
        """
        with self.door.moving:
            self.planner.withdraw(notice)

    def _note_worker(self) -> None:
        self._worker_thread = threading.get_ident()

    def _unqueue(self, future: Future[SwapInfo]) -> None:
        with self.door.lock:
            self._queued -= 1

    def _own(self, info: SwapInfo) -> Plan:
        """The core's plan of `info`, or `PlanError` if another manager made it."""
        if not isinstance(info, SwapInfo) or info._owner() is not self:
            raise PlanError(f"{info!r} is not a plan of this manager")
        return info.plan

    def cancel(self, info: SwapInfo) -> None:
        """Undo an unused plan, the newest first; counters, filters and places are as before it.

        Raises
        ------
        PlanError
            It is not the newest outstanding plan, or its rows have been swapped out.
        """
        plan = self._own(info)
        with self.door.planning:
            self.planner.cancel(plan)
            self.door.changes += 1

    def take_back(self, info: SwapInfo) -> None:
        """`cancel` of a plan whose rows are in and that has not trained: its victims return to their slots first.

        Raises
        ------
        PlanError
            It is not the newest outstanding plan, or rows were changed by hand since: finish it then.
        """
        plan = self._own(info)
        with self.door.planning, self.buffer.moving():
            self._take_back(plan, info)

    def _take_back(self, plan: Plan, info: SwapInfo | None) -> None:
        """`take_back`, inside the door; `info` where slots may have moved since."""
        out, into = plan.swap_out_slots, plan.swap_in_slots
        if info is not None:
            out, into = info.moved(out, plan.swap_out_offsets), info.moved(into, plan.swap_in_offsets)
        self.planner.take_back(plan)
        try:
            self._mover.back(plan, out)
        except BaseException:  # for want of memory for the copies: the plan stays as it was
            self.planner.mark_swapped_out(plan)
            self._mover.into(plan, into)
            self.planner.mark_swapped_in(plan)
            raise
        self.planner.cancel(plan)
        self.door.changes += 1

    def swap_out(self, info: SwapInfo) -> None:
        """Write the plan's victims back to their host rows.

        Raises
        ------
        PlanError
            Not this plan's turn: an earlier plan has not been swapped in yet.
        """
        plan = self._own(info)
        with self.door.planning:
            self.complete_abandoned()
            self._swap_out(plan)
            self._mover.land()

    def swap_in(self, info: SwapInfo) -> None:
        """Copy the plan's missing rows into their slots.

        Raises
        ------
        PlanError
            `swap_out` of this plan has not happened.
        """
        plan = self._own(info)
        with self.door.planning:
            self._swap_in(plan)

    def _swap_out(self, plan: Plan) -> None:
        self._check_turn(plan, "planned")
        self._mover.out(plan)
        self.planner.mark_swapped_out(plan)
        self.door.changes += 1

    def _swap_in(self, plan: Plan) -> None:
        self._check_turn(plan, "swapped_out")
        self._mover.into(plan)
        saving = self.saving
        if saving is None:
            self.planner.mark_swapped_in(plan)
        else:
            try:
                self._mover.land()
                self.planner.mark_swapped_in(plan)
                saving.comes_in(self, plan)
            except BaseException as error:  # a signal: what was to be copied out may not be
                saving.spoil(error)
                raise
        self.door.changes += 1

    def _check_turn(self, plan: Plan, state: str) -> None:
        """Raise `PlanError`, before any row moves, unless `plan` is in `state` and every earlier plan is swapped in.

        The planner checks this again when it is told that rows have moved; by then it would be too late.
        """
        if plan.state != state:
            step = "swap_out" if state == "planned" else "swap_in"
            raise PlanError(
                f"{step} of step {plan.step}: the plan is {plan.state!r}, not {state!r}; the order is plan, swap_out, swap_in, finish"
            )
        for earlier in self.planner.outstanding:
            if earlier.step >= plan.step:
                break
            if earlier.state != "swapped_in":
                raise PlanError(
                    f"step {plan.step} waits for step {earlier.step}, which is {earlier.state!r}; batches move their rows in plan order"
                )

    def finish(self, info: SwapInfo) -> None:
        """The batch has trained (or never will): end its pins. Plans may finish in any order."""
        plan = self._own(info)
        with self.door.planning:
            self.planner.finish(plan)
            self.door.changes += 1

    def abandon(self, info: SwapInfo) -> None:
        """Give up a batch wherever its plan stands, so that it pins nothing and holds up nobody.

        A plan that can be neither cancelled nor finished (a row could not be moved, for want of memory) is completed
        before the next plan, flush or move of rows: only then the slots hold what the planner says.
        """
        plan = self._own(info)
        with self.door.planning:
            if plan.state == "swapped_in":
                self.finish(info)
            elif plan.state == "planned" and self.planner.outstanding[-1] is plan:
                self.cancel(info)
            elif plan.state in ("planned", "swapped_out") and info not in self._abandoned:
                self._abandoned.append(info)
                self._abandoned.sort(key=lambda other: other.plan.step)

    def complete_abandoned(self) -> None:
        """Move the rows of abandoned plans, as far as their turn has come, and finish them."""
        while self._abandoned:
            plan = self._abandoned[0].plan
            if any(other.step < plan.step and other.state != "swapped_in" for other in self.planner.outstanding):
                return
            if plan.state == "planned":
                self._swap_out(plan)
            self._mover.land()  # whoever called has passed the door: a plan that evicts, a flush, a cut, another buffer come next
            if plan.state == "swapped_out":
                self._swap_in(plan)
            if plan.state == "swapped_in":  # not so where a signal came before the next statement but one
                self.planner.finish(plan)
                self.door.changes += 1
            del self._abandoned[0]

    def finish_late(self, info: SwapInfo) -> None:
        """`finish` that waits for nobody, safe from a garbage collector too: takes no lock and happens at the next entry."""
        self.door.late.append(info.plan)

    @property
    def outstanding(self) -> int:
        """Number of plans that are neither finished nor cancelled."""
        with self.door:
            return len(self.planner.outstanding)

    # ---------------------------------------------------------------------------------------------- tables and upkeep

    def table(self, name: str) -> TableView:
        """The coherent view of a table: `EmbTable`'s methods, as of the last finished training batch (promise I1)."""
        if name not in self.layout.index_of:
            raise ConfigError(f"no table {name!r}; there are {sorted(self.layout.index_of)!r}")
        return TableView(self, self.layout.index_of[name])

    def read_rows(self, flat: FlatBatch) -> list[torch.Tensor]:
        """The row of each value of a batch, as of the last finished training batch, changing nothing (promise I6).

        Returns
        -------
        list of float32 tensor (values of the group, dim)
            One a dim group, on the device.
        """
        outputs = []
        edges = flat.table_offsets.tolist()
        with self.door:
            self.buffer.await_moves()
            for group in self.layout.groups:
                first = edges[group.first_table]
                out = torch.empty(
                    (edges[group.last_table] - first, group.dim), dtype=torch.float32, device=self.backend.device
                )
                for t in range(group.first_table, group.last_table):
                    if edges[t + 1] > edges[t]:
                        self._read_table(
                            t, flat.keys[edges[t] : edges[t + 1]], out[edges[t] - first : edges[t + 1] - first]
                        )
                outputs.append(out)
            self.buffer.note_use()
        return outputs

    def _read_table(self, table: int, keys: np.ndarray, out: torch.Tensor) -> None:
        """Fill `out` (n, dim) on the device with the rows of `keys` (n,), which may repeat."""
        backend = self.backend
        weights = self.buffer.weights[self.buffer.group_of[table]]
        slots, rows, where = self.planner.peek(keys, table)
        resident = np.flatnonzero(where == PEEK_SLOT)
        if len(resident) == len(keys):
            backend.gather_rows(weights, slots, out)
            return
        if len(resident):
            rows_here = torch.empty((len(resident), out.shape[1]), dtype=torch.float32, device=backend.device)
            backend.scatter_rows(out, resident, backend.gather_rows(weights, slots[resident], rows_here))
        elsewhere = np.flatnonzero(where != PEEK_SLOT)
        keys, rows, where = keys[elsewhere], rows[elsewhere], where[elsewhere]
        with backend.staging((len(elsewhere), out.shape[1])) as block:
            host = self.host_tables[table]
            if (where == PEEK_ABSENT).any():
                host.init_rows(keys, block.array)
            if (where == PEEK_ROW).any():
                host.read_into(rows, block.array)  # absent ones have row -1 and are passed over
            block.array[where == PEEK_DEFAULT] = self.buffer.constants[table]
            backend.scatter_rows(out, elsewhere, backend.upload(block))

    def flush(self) -> None:
        """Write all residents back to their host rows, and make file-backed tables durable. Residents stay resident.

        Afterwards the directory of each file-backed table is clean: it holds rows, counters and the state of the filter as of
        now, until a later batch or call changes the table.

        Raises
        ------
        PlanError
            A plan is between its steps, so that some slots do not hold their rows yet; or a file-backed table has a filter and
            a plan is outstanding at all.
        DiskFullError, StorageError
            A directory could not be written and is unclean; the manager goes on.
        """
        with self.door:
            for t in range(len(self.host_tables)):
                self.flush_table(t)

    def flush_table(self, table: int) -> None:
        """`flush` of one table, by its place in the layout."""
        with self.door:
            host = self.host_tables[table]
            if host.directory is not None and self.layout.tables[table].admit_and_evict is not None:
                self.complete_abandoned()
                if self.planner.outstanding:
                    raise self._between_steps("flush the directory of a table with a filter")
            self._write_back(table)
            if host.directory is not None:
                self.planner.write_counters(table)
                host.flush(self._filter_bytes(table))

    def _filter_bytes(self, table: int) -> bytes | None:
        """What a directory keeps of the planner: None without a filter."""
        rule = self.layout.tables[table].admit_and_evict
        return None if rule is None else pack(self.planner.export_filter(table), self.planner.step, rule)

    def _recall_filters(self) -> None:
        """Go on with the filters that the directories hold, and with their step."""
        for t, table in enumerate(self.host_tables):
            kept, rule = table.filter_state, self.layout.tables[t].admit_and_evict
            if kept and rule is not None:
                state, step = unpack(kept, f"table {table.name!r}", rule)
                self.planner.import_filter(t, state)
                self.planner.start_at(max(step, self.planner.step))

    def _write_back(self, table: int) -> None:
        """Write the residents of one table back to their host rows."""
        self.complete_abandoned()
        if any(plan.state != "swapped_in" for plan in self.planner.outstanding):
            raise PlanError("a planned batch has not been swapped in; swap it in or cancel it before flush")
        _, slots, rows, _, _ = self.planner.residents(table)
        if len(rows):
            self.buffer.swap_out(self.host_tables[table], table, rows, slots)

    def rebalance(self) -> None:
        """Split the byte budget anew, by dim x measured unique keys a batch. Fixed tables (``hbm_rows``) stay.

        To be called between steps. Without a byte budget (a growing buffer on CPU) there is nothing to split. Training
        goes on with the same results; the first batches miss more.

        Raises
        ------
        PlanError
            A plan is outstanding.
        """
        with Doors([self.door]):
            self.check_between_steps("rebalance")
            if self._hbm_bytes is None:
                return
            uniques = [
                sum(now[name] + past[name] for name in ("hits", "misses", "rejected"))
                for now, past in zip(self.planner.stats(), self._past, strict=True)
            ]
            shares = [
                table.embedding_dim * (1 + count) for table, count in zip(self.layout.tables, uniques, strict=True)
            ]
            capacities = split_budget(self.layout.tables, self.spec, self._hbm_bytes, shares)
            if capacities != self.buffer.capacities:
                self._rebuild(capacities)

    def _between_steps(self, doing: str) -> PlanError:
        return PlanError(
            f"{len(self.planner.outstanding)} plan(s) are outstanding; {doing} between steps, after backward, and in the middle of an "
            "accumulation window call finish_accumulation() first"
        )

    def check_between_steps(self, doing: str) -> None:
        """`PlanError` while a plan is outstanding. Inside the door."""
        self.complete_abandoned()
        if self.planner.outstanding:
            raise self._between_steps(doing)

    def _totals(self) -> list[dict[str, int]]:
        """Each table's counters since the start: what the next planner adds to."""
        return [
            {name: earlier[name] + now[name] for name in COUNTERS}
            for earlier, now in zip(self._past, self.planner.stats(), strict=True)
        ]

    def _rebuild(self, capacities: list[int]) -> None:
        """Write everything back and start buffer and planner anew; counters and filters carry over."""
        old = self.planner
        for t in range(len(self.host_tables)):
            self._write_back(t)
            old.drop(t, old.residents(t)[0])
        past = self._totals()
        planner = self._make_planner(capacities)
        for t, table in enumerate(self.layout.tables):
            if table.admit_and_evict is not None:
                planner.import_filter(t, old.export_filter(t))
        planner.start_at(old.step)
        self.buffer.resize(capacities)
        planner.set_bases(self.buffer.bases)
        planner.adopt_notices(old)
        self.planner = self.door.planner = planner
        self._slots = np.array(capacities)
        self._settle_at(self._slots)
        self._past = past
        self.door.changes += 1
        old.close()

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def saved_managers(self) -> dict[str, EmbCacheManager]:
        return {"": self}

    def note_optimizer(self, optimizer: EmbOptimizer) -> None:
        """Say whose step count and hyper-parameters belong to the rows: they are saved and restored with them."""
        self._optimizer = optimizer

    def optimizer_state(self) -> dict[str, Any] | None:
        """``state_dict()`` of the optimizer; None where nobody has noted one."""
        return None if self._optimizer is None else self._optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load it; without an optimizer there is nobody to take it. `ConfigError` changes nothing."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state)

    def note_saved(self, path: str, generation: int, created: float | None, module: str) -> None:
        """Note which checkpoint holds what a save has had in its cut: the next delta changes it. Inside the door."""
        self.saved = path, generation, created, module
        period_saved(self.planner)

    def note_in_directories(self, path: str, generation: int) -> None:
        """Note in the directories of file-backed tables which checkpoint holds the rows. Waits for the medium: not inside the door."""
        for table in self.host_tables:
            if table.directory is not None:
                try:
                    table.directory.note_checkpoint(f"generation {generation} of {path}")
                except OSError as error:
                    LOG.warning(
                        "table %r: its directory does not name generation %d: %s", table.name, generation, error
                    )

    def before_change(self, table: int, keys: np.ndarray) -> None:
        """Keys of a table are about to be changed by hand. Inside the door."""
        if self.door.saving is not None:
            self.door.saving.changes(self, table, keys)

    def fresh_table(self, t: int) -> Table:
        """An empty table like table `t`, or that one where it lies in files and is empty.

        Raises
        ------
        ConfigError
            It lies in files and holds rows.
        """
        config, present = self.layout.tables[t], self.host_tables[t]
        if present.directory is None:
            return self._make_table(config)
        if len(present):
            raise ConfigError(
                f"table {config.name!r}: its directory {present.directory.path!r} holds {len(present)} rows; restore into a manager whose "
                "table has a new directory"
            )
        return present

    def fresh_planner(self, tables: Sequence[Table]) -> SwapManager:
        """A planner for `tables` in place of the present ones, none of whose slots is taken."""
        planner = self._make_planner(self.buffer.capacities, tables)
        planner.set_bases(self.buffer.bases)
        return planner

    @property
    def held(self) -> Held:
        """What it holds now, for `hold`."""
        return self.host_tables, self.planner, self._past, self.saved

    def take_over(self, tables: list[Table], planner: SwapManager) -> None:
        """Put `tables` and `planner`, as `fresh_table` and `fresh_planner` gave them, in the places of the present ones."""
        self.hold((tables, planner, self._totals(), None))

    def hold(self, held: Held) -> None:
        """Hold other tables and another planner, or those of before again. Nothing is closed."""
        if held[1] is not self.planner:
            held[1].adopt_notices(self.planner)
        self.host_tables, self.planner, self._past, self.saved = held
        self._mover.bind(self.host_tables)
        self.door.planner = self.planner
        self.door.changes += 1

    def move(self, device: str | torch.device) -> None:
        """Move the buffer (never the tables) to another device.

        Raises
        ------
        PlanError
            A plan is outstanding.
        """
        backend = backend_for(device, num_threads=self._num_threads)
        with self.door:
            self.check_between_steps("move the module")
            self.buffer.move(backend)
            self.backend = backend
            self.door.changes += 1

    def stats(self) -> dict[str, Any]:
        """Counters since the start and sizes now: totals at the top level, ``"tables"`` with one dict each below.

        ``hits`` and ``misses`` count unique keys of planned batches; ``swap_in_rows``/``swap_out_rows`` and ``_bytes`` what
        moved; ``admitted``/``rejected`` unique keys with and without a slot; ``evicted`` rows lost in a sweep; ``born`` new
        rows; ``rows`` keys in the host tables; ``host_bytes`` and ``hbm_bytes`` memory held; ``file_bytes``
        of directories; ``capacity``, ``resident``,
        ``free`` and ``pinned`` slots; ``coming_keys`` and ``coming_uses`` distinct keys of the batches that `look_ahead` was told
        of, all together and summed up batch by batch, and ``coming_bytes`` held for them; ``step`` the last planned
        training step.
        """
        with self.door:
            tables: dict[str, dict[str, int]] = {}
            for t, (config, now) in enumerate(zip(self.layout.tables, self.planner.stats(), strict=True)):
                size = row_bytes(config, self.spec)
                entry = {name: now[name] + self._past[t][name] for name in COUNTERS}
                entry.update({name: now[name] for name in GAUGES})
                entry["swap_in_bytes"], entry["swap_out_bytes"] = (
                    entry["swap_in_rows"] * size,
                    entry["swap_out_rows"] * size,
                )
                entry["hbm_bytes"] = (entry["capacity"] + 1) * size
                host = self.host_tables[t].stats()
                entry["rows"], entry["host_bytes"] = host["rows"] - now["dead"], host["bytes"]
                entry["file_bytes"] = host["file_bytes"]
                tables[config.name] = entry
            totals: dict[str, Any] = {
                name: sum(entry[name] for entry in tables.values()) for name in next(iter(tables.values()))
            }
            totals["step"] = self.planner.step
            totals["tables"] = {name: tables[name] for name in self.layout.names}
            return totals

    def close(self) -> None:
        """Free tables and buffer; waits for a plan being made and for a save under way. Idempotent. Every later use raises `ClosedError`.

        File-backed tables get the residents' rows first, and are left clean, without what was planned and has not trained; a manager
        that dies without close leaves what the last flush did, or directories that refuse to open.

        Raises
        ------
        DiskFullError, StorageError
            A directory could not be written; the first error of several. Everything else is closed. A table whose disk is full stays
            open: close again when there is room. One whose directory failed for good is closed and unclean.
        """
        self.door.wait_for_save()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=threading.get_ident() != self._worker_thread)
        with self.door.lock, self.door.rows:
            if not self.door.closed:
                self._mover.land()
                unclosed = self._written_back()
                self.door.closed, self._unclosed = True, unclosed
                self.planner.close()
                self._mover.release()
                self.buffer.release()
            self._close_tables()

    def _close_tables(self) -> None:
        """Close each table that is left; one whose directory is full stays for a later call. Raises the first error."""
        first: EmbCacheError | None = None
        for entry in list(self._unclosed):
            table, filter_bytes = entry
            try:
                if table.directory is not None:
                    table.flush(filter_bytes)
                table.close()
            except EmbCacheError as error:
                first = first or error
                if table.directory is not None and table.directory.failed:
                    with contextlib.suppress(StorageError):
                        table.close()
            if table.closed:
                self._unclosed.remove(entry)
        if first is not None:
            raise first

    def _written_back(self) -> list[tuple[Table, bytes | None]]:
        """The tables, and what their directories shall keep of the planner; the rows of file-backed ones are home.

        Tables whose directory has failed are passed over.
        """
        places = [table.directory for table in self.host_tables]
        if all(place is None for place in places):
            return [(table, None) for table in self.host_tables]
        try:
            self.complete_abandoned()
        except StorageError:
            if not any(place is not None and place.failed for place in places):
                raise
        self._undo_untrained()
        for plan in self.planner.outstanding:
            if plan.state == "swapped_out":
                self._swap_in(plan)
        self.planner.settle()
        self._abandoned.clear()
        unclosed: list[tuple[Table, bytes | None]] = []
        for t, (table, place) in enumerate(zip(self.host_tables, places, strict=True)):
            filter_bytes = None
            if place is not None and not place.failed:
                try:
                    self._write_back(t)
                    filter_bytes = self._filter_bytes(t)
                except StorageError:
                    if not place.failed:
                        raise
            unclosed.append((table, filter_bytes))
        return unclosed

    def _undo_untrained(self) -> None:
        """Undo what was planned and has not trained (an open pipeline's batches, say), as far as it can be; inside the door."""
        self.door.settle()
        with self.buffer.moving():
            for plan in self.planner.outstanding[::-1]:
                with contextlib.suppress(EmbCacheError, MemoryError):  # what must stay counts as seen
                    if plan.state == "planned":
                        self.planner.cancel(plan)
                    elif plan.state == "swapped_in":
                        self._take_back(plan, self._movable.get(plan.step))

    def __enter__(self) -> EmbCacheManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "an EmbCacheManager cannot be copied or pickled: its tables are host memory of this process; make a new one"
        )

    def __repr__(self) -> str:
        names = [table.name for table in self.layout.tables]
        return f"EmbCacheManager(tables={names!r}, device={str(self.backend.device)!r}, optimizer={self.spec!r})"
