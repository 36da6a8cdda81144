"""HbmBuffer: the device memory of a collection's resident rows.

One contiguous allocation holds the weights of all tables of one dtype, and one each state array of the optimizer. Tables
of one dim and dtype are adjacent in it, so a dim group is one (rows, dim) view that one kernel call can serve. Each table's slots start at
its base (counted in rows of its group) and end with a constant slot, which holds what a key reads while it is not
admitted.

The buffer knows slots, never keys. Resizing moves the tables' bases: who holds slots, as outstanding plans do, must shift
them. It must not be moved while a plan is outstanding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from ._core.table import Table
from .budget import layout_bytes
from .config import OptimizerSpec
from .devices import Backend
from .hostmemory import DONE, Event
from .layout import TableLayout
from .rowtypes import ROW_TYPES

__all__ = ["HbmBuffer"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class HbmBuffer:
    """Weights and optimizer state of resident rows, for all tables of a collection.

    Parameters
    ----------
    layout : TableLayout
    spec : OptimizerSpec
        Says which state arrays a row has.
    backend : Backend
    capacities : sequence of int
        Usable slots of each table, in the layout's order.

    Attributes
    ----------
    weights : list of tensor (rows of the group, dim)
        One a dim group, of its dtype.
    states : list of list of float32 tensor (rows of the group, width)
        For each dim group one tensor a state array.
    constants : list of float
        What each table's constant slot holds, rounded as its dtype does.
    bases : int64 (tables,)
        First slot of each table within its group.

    Notes
    -----
    Not thread-safe; the manager's lock guards it.
    """

    def __init__(self, layout: TableLayout, spec: OptimizerSpec, backend: Backend, capacities: Sequence[int]) -> None:
        self.layout, self.spec = layout, spec
        self.group_of = np.repeat(
            np.arange(len(layout.groups)), [g.last_table - g.first_table for g in layout.groups]
        ).tolist()
        defaults = [table.admit_and_evict for table in layout.tables]
        self.constants = [
            0.0 if admit is None else ROW_TYPES[table.dtype].rounded(admit.not_admitted_default_value)
            for admit, table in zip(defaults, layout.tables, strict=True)
        ]
        self._moved: Event = DONE  # the last copy on the side stream
        self._used: Event = DONE  # the last look at rows on the computing stream
        self._allocate(backend, capacities)

    def _allocate(self, backend: Backend, capacities: Sequence[int]) -> None:
        """Set the fields to fresh memory. Nothing changes if it cannot be had."""
        bases, group_rows = [], []
        for group in self.layout.groups:
            rows = 0
            for t in range(group.first_table, group.last_table):
                bases.append(rows)
                rows += capacities[t] + 1
            group_rows.append(rows)
        dims = [group.dim for group in self.layout.groups]
        dtypes = [DTYPES[group.dtype] for group in self.layout.groups]
        of_dtype = {
            dtype: self._carve(
                backend, group_rows, [dim * (dtype is own) for dim, own in zip(dims, dtypes, strict=True)], dtype
            )
            for dtype in dict.fromkeys(dtypes)
        }
        weights = [of_dtype[dtype][g] for g, dtype in enumerate(dtypes)]
        widths = [self.spec.state_widths(dim) for dim in dims]
        by_array = [self._carve(backend, group_rows, [width[s] for width in widths]) for s in range(len(widths[0]))]
        self.backend = backend
        self.capacities = list(capacities)
        self.bases = np.array(bases, dtype=np.int64)
        self.weights = weights
        self.states = [[arrays[g] for arrays in by_array] for g in range(len(dims))]
        self.bytes = layout_bytes(self.layout.tables, self.spec, self.capacities)
        for t, constant in enumerate(self.constants):
            if constant:  # fresh memory is zero
                self.weights[self.group_of[t]][self.constant_slot(t)] = constant

    @staticmethod
    def _carve(
        backend: Backend, rows: list[int], widths: list[int], dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """One allocation, cut into a (rows, width) view for each group."""
        sizes = [count * width for count, width in zip(rows, widths, strict=True)]
        flat = backend.allocate(sum(sizes), 1, dtype).view(-1)
        return [
            piece.view(count, width) for piece, count, width in zip(torch.split(flat, sizes), rows, widths, strict=True)
        ]

    def constant_slot(self, table: int) -> int:
        """The slot that every key of `table` reads while it is not admitted."""
        return int(self.bases[table]) + self.capacities[table]

    def _arrays(self, table: int) -> list[torch.Tensor]:
        """Weights and states of the table's group."""
        group = self.group_of[table]
        return [self.weights[group], *self.states[group]]

    # ------------------------------------------------------------------------------------------------- rows in and out

    def swap_out(self, host: Table, table: int, rows: np.ndarray, slots: np.ndarray) -> None:
        """Copy slots of one table into host rows: `rows` int64 (n,) of `host`, each once, `slots` int64 (n,)."""
        arrays = self._arrays(table)
        if self.backend.direct:
            views = [self.backend.as_numpy(array) for array in arrays]
            host.write_from(rows, views[0], slots, views[1:], home=True)
            return
        self.await_moves()
        with ExitStack() as stack:
            weights, *states = [
                stack.enter_context(self.backend.fetched(self.backend.gather_rows(array, slots))) for array in arrays
            ]
            host.write_from(rows, weights, None, states, home=True)

    def read(self, table: int, slots: np.ndarray, out: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        """Copies of the weights and each state array of `slots`, (n, width) NumPy arrays; in the given ones, if any are.

        Weights lie as they are stored (`RowType.storage`), state is float32.
        """
        self.await_moves()
        arrays = self._arrays(table)
        if not out:
            return [self.backend.to_host(self.backend.gather_rows(array, slots)) for array in arrays]
        for array, place in zip(arrays, out, strict=True):
            if self.backend.direct and place.flags.c_contiguous:
                self.backend.gather_rows(array, slots, torch.from_numpy(place))
            else:
                place[:] = self.backend.to_host(self.backend.gather_rows(array, slots))
        return list(out)

    # ------------------------------------------------------------------------------------------- one stream and another

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Rows that move inside do so on the side stream, where there is one, beside what computes.

        What is moved is ordered after every earlier look at rows, since slots that are taken had rows in use before.
        """
        side = self.backend.side_stream()
        if side is None:
            yield
            return
        with self.backend.stream(side):
            self.backend.wait(self._used)
            try:
                yield
            finally:
                self._moved = self.backend.event()

    def await_moves(self) -> None:
        """Let later work of the current stream see all rows that were moved on the side stream."""
        self.backend.wait(self._moved)

    def note_use(self) -> None:
        """Rows have been read or trained by work of the current stream, which may still be under way."""
        self._used = self.backend.event()

    # ------------------------------------------------------------------------------------------------- size and place

    def resize(self, capacities: Sequence[int]) -> None:
        """Give each table other slots; the content of slots that remain is kept. Sets new `bases`.

        Raises
        ------
        HostMemoryError
            The memory cannot be had; the buffer is as it was.
        """
        old = [self.weights, *zip(*self.states, strict=True)]
        old_bases, old_capacities = self.bases, self.capacities
        self._allocate(self.backend, capacities)
        for before, after in zip(old, [self.weights, *zip(*self.states, strict=True)], strict=True):
            for t, g in enumerate(self.group_of):
                count, start, target = min(old_capacities[t], capacities[t]), int(old_bases[t]), int(self.bases[t])
                after[g][target : target + count] = before[g][start : start + count]

    def narrow(self, capacities: Sequence[int]) -> None:
        """Use only so many slots of each table, at most the present number. Bases stay; no memory is asked for or freed."""
        for t, capacity in enumerate(capacities):
            if capacity < self.capacities[t]:
                self.capacities[t] = capacity
                self.weights[self.group_of[t]][self.constant_slot(t)] = self.constants[t]

    def move(self, backend: Backend) -> None:
        """Move the buffer to another device; slots stay as they are."""
        old = [self.weights, *zip(*self.states, strict=True)]
        self.await_moves()
        self._allocate(backend, self.capacities)
        self._moved = self._used = DONE
        for before, after in zip(old, [self.weights, *zip(*self.states, strict=True)], strict=True):
            for source, target in zip(before, after, strict=True):
                target.copy_(source)

    def release(self) -> None:
        """Let go of the memory; the buffer is of no further use."""
        self.weights, self.states = [], []
