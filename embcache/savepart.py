"""Part: one table of a save, from the cut to its last row: which rows are to be written, and how they are read.

It owns a byte a host row, which says what the cut has of it and whether it has been read. Whoever calls is inside the manager's door,
but for what says otherwise: the thread that writes, and the one whose batch is about to train.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ._core.cut import (
    CHANGED,
    IN,
    LIVE,
    READ,
    Cut,
    FilterCut,
    changed_rows,
    filter_bytes,
    left_rows,
    list_slots,
    sweeping,
    unread_rows,
    used_about,
)
from .checkpoint import TableDescription, batches_of_rows

if TYPE_CHECKING:
    from ._core.plan import Plan
    from .manager import EmbCacheManager

__all__ = ["Part", "room_for"]

EXTENT_ROWS = 1024


def room_for(description: TableDescription, count: int) -> dict[str, np.ndarray]:
    """Arrays for rows as a chunk has them, by the name of the column."""
    arrays = {
        "keys": np.empty(count, np.int64),
        "weights": np.empty((count, description.dim), description.storage),
    }
    if description.with_filter:
        arrays["frequencies"], arrays["timestamps"] = np.empty(count, np.int64), np.empty(count, np.int64)
    if description.state_dim:
        arrays["state"] = np.empty((count, description.state_dim), np.float32)
    return arrays


class Part:
    """One table of a save.

    Attributes
    ----------
    manager, module, t
        Whose table, under which path of the model, and its place in the layout.
    description : TableDescription
    tracked : bool
        Whether the table knew what had changed since the last save.
    full_bytes : int
        About what all its rows and its filter take.
    whole : bool
        Whether all rows are written, not only those that have changed.
    members : uint8 (host rows,)
        `LIVE`: the row is in the cut; `IN`: it is to be written, and has not been read yet; `READ`: it has been; `CHANGED`: it had
        changed at the cut.
    left : int
        How many are to be written and have not been read.
    listed, written : int
        How many are to be written, and how many of them have been.
    unlisted : bool
        Whether there may be residents that have changed and are not among `IN` yet: of a delta, at first.
    """

    def __init__(self, manager: EmbCacheManager, module: str, t: int, description: TableDescription) -> None:
        self.manager, self.module, self.t, self.description = manager, module, t, description
        self.core = manager.host_tables[t]
        self.tracked, self.whole = self.core.tracked, True
        self.full_bytes = 0
        self.members = np.empty(0, np.uint8)
        self.left = self.listed = self.written = 0
        self.unlisted = False
        self.order: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, bool))
        self.log: np.ndarray | None = None
        self.erased = np.empty(0, np.int64)
        self.filter: FilterCut | None = None
        self.kept: list[dict[str, np.ndarray]] = []

    # ---------------------------------------------------------------------------------------------------------- the cut

    def note_changes(self) -> int:
        """About how many bytes a delta takes; `full_bytes` is known then."""
        self.log = self.core.erased_keys(absent=False)
        self.tracked = self.log is not None
        changed = self.core.changed() + used_about(self.manager.planner, self.t)
        of_filter, of_changes = filter_bytes(self.manager.planner, self.t)
        self.full_bytes = len(self.core) * self.description.row_bytes + of_filter
        return changed * self.description.row_bytes + (0 if self.log is None else 8 * len(self.log)) + of_changes

    def cut(self, whole: bool) -> None:
        """List what is to be written. Nothing changes."""
        self.whole, planner = whole, self.manager.planner
        self.unlisted = not whole
        if self.unlisted and sweeping(planner, self.t):  # which of them are dead must be seen now
            self.core.mark_changed(changed_rows(planner, self.t))
            self.unlisted = False
        cut = Cut(planner, self.t)
        self.members, self.listed = cut.members(changed=not whole)
        self.left = self.listed
        self.order = self.core.save_order()
        if not whole:
            assert self.log is not None
            visible = planner.peek(self.log, self.t)[1] >= 0 if len(self.log) else np.empty(0, bool)
            self.erased = np.union1d(self.log[~visible], cut.dead())
        if self.manager.layout.tables[self.t].admit_and_evict is not None:
            self.filter = FilterCut(planner, self.t, cut, whole)

    def give_back(self) -> None:
        """The save has failed: what had changed before it counts as changed again."""
        self.core.mark_changed(np.flatnonzero(self.members & CHANGED))
        self.core.mark_erased(self.log)
        if self.filter is not None:
            self.filter.give_back()

    def list_slots(self, begin: int, most: int) -> int:
        """List which residents have changed, of `most` slots from `begin` on; returns where to go on, -1 at the end. Inside the door.

        A row that has left its slot for a plan's is seen when that plan comes in (`ahead`), or here in the end.
        """
        planner = self.manager.planner
        begin, count = list_slots(planner, self.t, begin, most, self.members)
        self._list(count)
        for (
            plan
        ) in planner.outstanding:  # each time: one that is cancelled gives rows back to slots that were looked at
            self.ahead(left_rows(planner, plan, self.t))
        self.unlisted = begin >= 0
        return begin

    def _list(self, count: int) -> None:
        self.listed += count
        self.left += count

    def _unlisted(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` that are in the cut, and neither read nor to be written."""
        rows = rows[rows < len(self.members)]
        return rows[(self.members[rows] & (IN | LIVE | READ)) == LIVE]

    # --------------------------------------------------------------------------------------------------------- reading

    def ahead(self, rows: np.ndarray) -> np.ndarray:
        """Have rows, each given once, among those to be written where it is not known yet whether they have changed. Inside the door."""
        if self.unlisted:
            more = self._unlisted(rows)
            self.members[more] |= IN
            self._list(len(more))
        return rows

    def concerned(self, plan: Plan) -> np.ndarray:
        """Rows that a plan which has come in is about to change, and that are to be read before. Inside the door; each is named once."""
        planner = self.manager.planner
        if self.unlisted:  # noted and not read: what has left its slot may be on its way home yet
            self.ahead(left_rows(planner, plan, self.t))
        rows, listed = unread_rows(planner, plan, self.t, self.members, self.unlisted)
        self._list(listed)
        return rows

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows`, each given once, that are to be written and have not been read yet. Inside the door."""
        rows = rows[rows < len(self.members)]
        rows = rows[(self.members[rows] & IN) != 0]
        return np.ascontiguousarray(rows)

    def read(self, rows: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Copy rows that `take` gave into `arrays`, by column; they count as read then. Inside the door."""
        manager, description = self.manager, self.description
        if not np.all(self.members[rows] & IN):
            raise AssertionError(
                f"table {self.core.name!r}: rows of the cut were to be read that are not in it, or twice"
            )
        keys, slots, counts, last = Cut(manager.planner, self.t).read(rows)
        arrays["keys"][:] = keys
        if description.with_filter:
            arrays["frequencies"][:] = counts
            arrays["timestamps"][:] = last
        resident = np.flatnonzero(slots >= 0)
        if len(resident) == len(rows):
            ends = np.cumsum([0, *manager.spec.state_widths(description.dim)]).tolist()
            parts = [arrays["state"][:, low:high] for low, high in pairwise(ends)]
            manager.buffer.read(self.t, slots, [arrays["weights"], *parts])
        else:
            home = rows.copy()
            home[resident] = -1
            self.core.read_into(home, arrays["weights"], None, [arrays["state"]] if description.state_dim else [])
            weights, *parts = manager.buffer.read(self.t, slots[resident])
            arrays["weights"][resident] = weights
            if parts:
                arrays["state"][resident] = np.concatenate(parts, axis=1)
        self.members[rows] = self.members[rows] & (0xFF ^ IN) | READ
        self.left -= len(rows)

    def batches(self, most: int) -> Iterator[np.ndarray]:
        """Rows that had not been read when they were listed, a chunk's at a time, in the order of vshards."""
        return batches_of_rows(*self.order, self._rows_of, most)

    def _rows_of(self, extents: np.ndarray) -> np.ndarray:
        extents = extents[extents < len(self.members) // EXTENT_ROWS]  # others were made later
        marks = self.members.reshape(-1, EXTENT_ROWS)[extents]
        places = np.flatnonzero(marks & IN)
        rows: np.ndarray = extents[places // EXTENT_ROWS] * EXTENT_ROWS + places % EXTENT_ROWS
        return rows
