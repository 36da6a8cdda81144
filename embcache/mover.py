"""Mover: rows of plans between host tables and device buffer, for a manager, in as few calls as may be.

On a direct backend (slots are memory of the host) planning and moving are one call of the core, `Moves`. On others the rows that
come in are gathered into staging memory by that same call, and one copy takes them to the device; rows that go out are gathered on
the device into staging memory, and are under way until that copy has ended. The next batch is planned meanwhile: whatever it wants
of these rows the core takes from the staging memory, once they are there (promise I5), and only then are they written home.

Thread safety: inside the manager's door. Whoever enters it otherwise finds all rows at home (`Door.transit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from ._core.door import Door
from ._core.moves import Moves
from ._core.notice import Notice
from ._core.plan import Plan
from ._core.swap import SwapManager
from ._core.table import Table
from .buffer import HbmBuffer
from .hostmemory import DONE, Event, StagingBlock
from .layout import FlatBatch

__all__ = ["Mover"]

FIRST_ROOM_BYTES = 64 << 10


@dataclass
class Leaving:
    """Rows on their way from the device: the block that they go into, held by `stack`, and the event of their arrival."""

    stack: ExitStack
    event: Event


class Mover:
    """Moves rows between the tables and the buffer of one manager.

    Parameters
    ----------
    door : Door
        Is told when rows are on their way.
    buffer : HbmBuffer
    tables : sequence of Table
    num_threads : int, optional
    """

    def __init__(self, door: Door, buffer: HbmBuffer, tables: Sequence[Table], num_threads: int | None) -> None:
        self._door, self._buffer, self._num_threads = door, buffer, num_threads
        self._room_bytes = FIRST_ROOM_BYTES
        self._leaving: Leaving | None = None
        self._staging = ExitStack()  # holds `_staged`, the block of what is coming in, of `_planned`
        self._staged: StagingBlock | None = None
        self._planned: Plan | None = None
        self.bind(tables)

    def bind(self, tables: Sequence[Table]) -> None:
        """These are the tables from now on. Nothing is on its way."""
        buffer = self._buffer
        self._tables, self._memory = tables, buffer.weights
        groups = [
            (group.first_table, group.last_table, buffer.spec.state_widths(group.dim)) for group in buffer.layout.groups
        ]
        self._arrays = [[weights, *states] for weights, states in zip(buffer.weights, buffer.states, strict=True)]
        self._moves = Moves(tables, groups, self._num_threads)
        if buffer.backend.direct:
            self._moves.use_arrays([[buffer.backend.as_numpy(array) for array in arrays] for arrays in self._arrays])

    def _bound(self) -> Moves:
        """The moves between tables and the memory that the buffer has now: other memory, where it has grown or been moved."""
        if self._memory is not self._buffer.weights:
            self.bind(self._tables)
        return self._moves

    def release(self) -> None:
        """Let go of the buffer's memory."""
        self._moves.use_arrays(None)
        self._arrays, self._memory = [], []

    # ------------------------------------------------------------------------------------------------------- one batch

    def plan(self, planner: SwapManager, flat: FlatBatch, notice: Notice | None) -> Plan:
        """Plan a batch. On a direct backend its rows are in their slots then; elsewhere in staging memory, for `out` and `into`.

        Raises as `SwapManager.plan`.
        """
        moves = self._bound()
        if not moves.direct:
            if moves.under_way and self._leaving is not None and self._leaving.event.query():
                moves.arrive()
            self._stage(self._room_bytes)
            assert self._staged is not None
            moves.use_block(self._staged.array)
        try:
            self._planned = planner.plan(
                flat.keys, flat.table_offsets, flat.timestamps, flat.clicked, notice, moves=moves, **flat.more()
            )
        except BaseException:
            self._unstage()
            raise
        return self._planned

    @property
    def seconds(self) -> tuple[float, float]:
        """What it took, within the last `plan`, to move rows out, and in."""
        return self._moves.seconds

    def out(self, plan: Plan) -> None:
        """The rows of ``swap_out_*`` leave their slots: they are home, or on their way.

        Raises
        ------
        HostMemoryError, StorageError
            They are where they were.
        """
        moves = self._bound()
        if moves.direct:
            moves.send(plan)
            return
        self.land()
        if len(plan.swap_out_rows) == 0:
            return
        moves.prepare(plan)
        backend, leaving = self._buffer.backend, Leaving(ExitStack(), DONE)
        # Before the device is asked, so that what an interrupt leaves is seen to at the next entry.
        self._leaving = leaving
        self._door.transit = self
        try:
            block = leaving.stack.enter_context(backend.staging((moves.block_needed(plan, out=True),), np.uint8))
            slots = backend.to_device(plan.swap_out_slots)
            self._buffer.await_moves()
            leaving.event = backend.download(
                [
                    (array, slots[first : first + rows], _view(block.tensor, at, rows, array))
                    for array, at, first, rows in self._pieces(plan, True)
                ]
            )
            moves.depart(plan, block.array)
        except BaseException:
            backend.synchronize()  # the block may be somebody else's next
            raise

    def into(self, plan: Plan, slots: np.ndarray | None = None) -> None:
        """The rows of ``swap_in_*`` come into their slots, which are `slots` now if not where the plan says.

        Raises
        ------
        HostMemoryError, StorageError
            Slots may hold anything: to be called again.
        """
        if self._bound().direct:
            self._moves.bring(plan, slots=slots)
            return
        try:
            if plan.misses:
                if self._planned is not plan or not self._moves.gathered or slots is not None:
                    self._gather(plan, slots)
                self._scatter(plan, False)
        finally:
            self._unstage()

    def back(self, plan: Plan, slots: np.ndarray) -> None:
        """The rows of ``swap_out_*``, which are home, return to their slots, which are `slots` now."""
        if self._bound().direct:
            self._moves.bring(plan, slots=slots, back=True)
        elif len(slots):
            self._stage(self._moves.block_needed(plan, out=True))
            assert self._staged is not None
            try:
                self._moves.bring(plan, self._staged.array, slots=slots, back=True)
                self._scatter(plan, True)
            finally:
                self._unstage()

    # ------------------------------------------------------------------------------------------------- rows on their way

    def land(self) -> None:
        """Wait for rows on their way, give them to the batch that waits for them, and write them home. Again is no harm.

        Raises
        ------
        ClosedError, StorageError
            They cannot be written, and stay on their way.
        """
        leaving, moves = self._leaving, self._moves
        if leaving is None:
            return
        leaving.event.synchronize()
        if moves.under_way:
            moves.arrive()
            moves.serve()
            moves.land()
        self._door.transit = self._leaving = None
        leaving.stack.close()

    # ----------------------------------------------------------------------------------------------------------- staging

    def _stage(self, room_bytes: int) -> None:
        self._unstage()
        self._staging = ExitStack()
        self._staged = self._staging.enter_context(self._buffer.backend.staging((room_bytes,), np.uint8))

    def _unstage(self) -> None:
        self._staged = self._planned = None
        self._moves.use_block(None)
        self._staging.close()

    def _gather(self, plan: Plan, slots: np.ndarray | None) -> None:
        """The plan's rows into a block that is large enough, as the next ones will be."""
        needed = self._moves.block_needed(plan)
        self._room_bytes = max(self._room_bytes, needed + needed // 4)
        self._stage(self._room_bytes)
        assert self._staged is not None
        self._moves.bring(plan, self._staged.array, slots=slots)

    def _scatter(self, plan: Plan, back: bool) -> None:
        """What is in the block goes to the device, and into its slots."""
        block, backend = self._staged, self._buffer.backend
        assert block is not None
        used = self._moves.block_needed(plan, out=back)
        part = StagingBlock(block.array[:used], block.tensor[:used])
        memory = backend.upload(part)
        block.pending = part.pending
        self._buffer.await_moves()  # the caller's stream may not be that of earlier moves
        slots = memory[: 8 * (len(plan.swap_out_rows) if back else len(plan.swap_in_rows))].view(torch.int64)
        for array, at, first, rows in self._pieces(plan, back):
            backend.scatter_rows(array, slots[first : first + rows], _view(memory, at, rows, array))

    def _pieces(self, plan: Plan, out: bool) -> list[tuple[torch.Tensor, int, int, int]]:
        """Array, byte in the block, first row and rows of what a block holds."""
        return [(self._arrays[g][a], at, first, rows) for g, a, at, first, rows in self._moves.pieces(plan, out)]


def _view(memory: torch.Tensor, at: int, rows: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes of a block from `at` on as (rows, width) of an array's type."""
    width = like.shape[1]
    return memory[at : at + rows * width * like.element_size()].view(like.dtype).view(rows, width)
