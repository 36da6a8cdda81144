"""TableView: one table of a manager seen whole, wherever its rows are (promise I1).

Reads take a resident row from its slot, any other from host memory, and see the state after the last finished training
batch: keys born in an unfinished batch are invisible, keys that an unfinished batch evicts are still there. Changes
drop the resident copy first; a key that an unfinished batch uses refuses with `PinnedKeyError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core.swap import PEEK_ABSENT, PEEK_DEFAULT, PEEK_ROW, PEEK_SLOT
from .errors import ChangedError, ConfigError, whole_number
from .rowtypes import ROW_TYPES
from .table import apart, as_keys, as_rows, check_out, check_rows_out

if TYPE_CHECKING:
    from ._core.table import Table
    from .manager import EmbCacheManager

__all__ = ["TableView"]


class TableView:
    """A table of a collection with the methods of `EmbTable`, as of the last finished training batch.

    Get it as ``manager.table(name)`` or ``ebc.tables()[name]``. It holds no data and stays valid until the manager closes.

    Attributes
    ----------
    name : str
    dim : int
    state_dim : int
        Optimizer state elements of a row.
    dtype : str
        How weights are kept; what is read and taken is as for `EmbTable`.

    Notes
    -----
    Every method takes the manager's lock; any thread may call. None touches frequencies or timestamps of living keys.

    Examples
    --------
    >>> import numpy as np, embcache as ec
    >>> m = ec.EmbCacheManager([ec.TableConfig("item", 2)], optimizer=ec.SGD())
    >>> item = m.table("item")
    >>> item.assign([7], np.array([[1, 2]], dtype=np.float32))
    >>> item.lookup([7, 8], insert=False).shape, len(item), 8 in item
    ((2, 2), 1, False)
    """

    def __init__(self, manager: EmbCacheManager, table: int) -> None:
        self._manager, self._table = manager, table
        self.name, self.dim, self.state_dim = self._host.name, self._host.dim, self._host.state_dim
        self.dtype, self._kind = self._host.dtype, ROW_TYPES[self._host.dtype]
        self._owner = f"table {self.name!r}"

    @property
    def _host(self) -> Table:
        """The host table, which a restore replaces."""
        return self._manager.host_tables[self._table]

    # ------------------------------------------------------------------------------------------------------------ reads

    def lookup(self, keys: Any, out: np.ndarray | None = None, *, insert: bool = True) -> np.ndarray:
        """Return the weights of `keys`, (n, dim), in `out` if given; unknown keys are inserted, or with ``insert=False`` only read.

        An unknown key reads its initial value, or with ``insert=False`` the not-admitted default where a filter has not
        admitted it.

        Raises
        ------
        PinnedKeyError
            ``insert=True`` and a key that an unfinished batch has just made.
        ShapeError
        """
        array = as_keys(keys, self._owner)
        shape = (len(array), self.dim)
        if out is None:
            out = np.empty(shape, dtype=self._kind.door)
        else:
            check_out("out", out, shape, self._owner, *dict.fromkeys((self._kind.door, np.dtype(np.float32))))
            array = apart(array, out)
        with self._manager.door:
            if insert:
                self._insert(array)
            self._host.init_rows(array, out)
            self._overlay(*self._manager.planner.peek(array, self._table), out, None)
        return out

    def find(self, keys: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Row indexes of `keys`, int64 (n,), in `out` if given; -1 where absent."""
        array = as_keys(keys, self._owner)
        if out is not None:
            check_out("out", out, array.shape, self._owner, np.dtype(np.int64))
        with self._manager.door:
            rows: np.ndarray = self._manager.planner.peek(array, self._table)[1]
            return _handed(rows, out)

    def lookup_rows(self, keys: Any, out: tuple[np.ndarray, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Weights (n, dim) and state float32 (n, state_dim) of `keys`, in the pair `out` if given, without inserting.

        An absent key reads its initial weights (or the not-admitted default) and its initial state.
        """
        array = as_keys(keys, self._owner)
        weights, state = check_rows_out(out, len(array), self.dim, self.state_dim, self._owner, self._kind)
        array = apart(array, weights, state)
        with self._manager.door:
            found = self._manager.planner.peek(array, self._table)
            # A key that an unfinished batch made is found here, where for us it is absent; what it reads is the same. But
            # the row of a key that a sweep has killed is not a new one, though it may still be there.
            self._host.lookup_rows(array, weights, state)
            absent = found[1] < 0
            if absent.any():
                self._host.init_rows(array, weights)
                state[absent] = self._manager.initial_state(self.dim)
            self._overlay(*found, weights, state)
        return weights, state

    def _overlay(
        self, slots: np.ndarray, rows: np.ndarray, where: np.ndarray, weights: np.ndarray, state: np.ndarray | None
    ) -> None:
        """Put what `peek` found over `weights` and `state` (n rows each); what is absent stays as it is."""
        states = [] if state is None or not self.state_dim else [state]
        self._host.read_into(np.where(where == PEEK_ROW, rows, -1), weights, None, states)
        weights[where == PEEK_DEFAULT] = self._manager.buffer.constants[self._table]
        resident = np.flatnonzero(where == PEEK_SLOT)
        if len(resident):
            found, *parts = self._manager.buffer.read(self._table, slots[resident])
            weights[resident] = self._kind.from_storage(found)
            if states:
                state_rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
                states[0][resident] = state_rows

    def items(
        self, batch_rows: int = 65536
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]]:
        """Iterate over (keys, weights, state, frequency, timestamp) in batches of at most `batch_rows`, in row order.

        All are copies. Frequencies and timestamps of residents are the planner's; a table without a filter keeps none, and
        gives None for both. With the show/click policy the frequency is the score as of the last sweep (float64) and the
        timestamp the number of sweeps up to the key's last occurrence.

        Raises
        ------
        ChangedError
            Something was planned, trained or changed meanwhile.
        """
        most = whole_number(batch_rows)
        if most is None or most < 1:
            raise ConfigError(f"{self._owner}: batch_rows = {batch_rows!r}; give an integer >= 1")
        return self._batches(most)

    def _batches(self, batch_rows: int) -> Iterator[Any]:
        manager = self._manager
        with manager.door:
            start = manager.door.changes
            _, evicted, _ = manager.planner.unsettled(self._table)
            _, _, resident_rows, *counters = manager.planner.residents(self._table)
        order = np.argsort(resident_rows)
        residents = (resident_rows[order], counters[0][order], counters[1][order])
        cursor, left = 0, len(evicted)
        while True:
            with manager.door:
                if manager.door.changes != start:
                    raise ChangedError(
                        f"{self._owner}: changed during items(); iterate again when nothing trains or changes it"
                    )
                rows, cursor = self._host.scan(cursor, batch_rows)
                if len(rows) == 0:
                    # Behind the live rows come those in limbo: their keys are evicted by batches that have not finished.
                    rows, left = evicted[len(evicted) - left :][:batch_rows], max(0, left - batch_rows)
                if len(rows) == 0:
                    return
                batch = self._visible(rows, residents)
            if len(batch[0]):
                yield batch

    def _visible(self, rows: np.ndarray, residents: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[Any, ...]:
        """Keys, weights, state and counters of those host rows that are their key's row as of the last finished batch.

        `residents` are rows, frequencies and timestamps of residents, by row: their host columns are older.
        """
        keys, counts, stamps = self._host.columns(rows)
        slots, found, where = self._manager.planner.peek(keys, self._table)
        seen = found == rows
        if not seen.all():
            rows, keys, counts, stamps = rows[seen], keys[seen], counts[seen], stamps[seen]
            slots, where = slots[seen], where[seen]
        weights = np.empty((len(rows), self.dim), dtype=self._kind.door)
        state = np.empty((len(rows), self.state_dim), dtype=np.float32)
        self._overlay(slots, rows, where, weights, state)
        if self._host.with_filter and len(residents[0]):
            place = np.minimum(np.searchsorted(residents[0], rows), len(residents[0]) - 1)
            fresh = residents[0][place] == rows
            counts[fresh], stamps[fresh] = residents[1][place[fresh]], residents[2][place[fresh]]
        if not self._host.with_filter:
            return keys, weights, state, None, None
        rule = self._manager.layout.tables[self._table].admit_and_evict
        if rule is not None and rule.needs_labels:
            return keys, weights, state, self._manager.planner.scores(self._table, counts, stamps), stamps
        return keys, weights, state, counts, stamps

    def __len__(self) -> int:
        with self._manager.door:
            born, gone, dead = self._manager.planner.unsettled(self._table)
            return len(self._host) - len(born) + len(gone) - dead

    def __contains__(self, key: object) -> bool:
        value = whole_number(key)
        if value is None or not -(2**63) <= value < 2**63:
            return False
        return bool(self.find(np.array([value], dtype=np.int64))[0] >= 0)

    def stats(self) -> dict[str, Any]:
        """The entry of this table in ``manager.stats()["tables"]``."""
        stats: dict[str, Any] = self._manager.stats()["tables"][self.name]
        return stats

    def check(self) -> None:
        """Verify the invariants of table and planner; raises `AssertionError` naming what is broken."""
        with self._manager.door:
            self._host.check()
            self._manager.planner.check()

    def flush(self) -> None:
        """Write the residents of this table back to their host rows; see `EmbCacheManager.flush`."""
        self._manager.flush_table(self._table)

    # ---------------------------------------------------------------------------------------------------------- changes

    def insert(self, keys: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Insert the keys that are absent, with their initial values; return row indexes, int64 (n,), in `out` if given.

        Raises
        ------
        PinnedKeyError
            An absent key that an unfinished batch uses.
        """
        array = as_keys(keys, self._owner)
        if out is not None:
            check_out("out", out, array.shape, self._owner, np.dtype(np.int64))
        with self._manager.door:
            return _handed(self._insert(array), out)

    def _insert(self, keys: np.ndarray) -> np.ndarray:
        rows: np.ndarray
        _, rows, where = self._manager.planner.peek(keys, self._table)
        absent = np.flatnonzero((where == PEEK_ABSENT) | (where == PEEK_DEFAULT))
        if len(absent):
            self._manager.before_change(self._table, keys[absent])
            self._manager.planner.drop(self._table, keys[absent])
            rows[absent] = self._host.insert(keys[absent])
            self._manager.door.changes += 1
        return rows

    def assign(self, keys: Any, weights: Any, state: Any = None) -> None:
        """Insert or overwrite rows; the last of equal keys wins; ``state=None`` zeroes the state.

        Raises
        ------
        PinnedKeyError
            A key that an unfinished batch uses; nothing changes then.
        """
        array = as_keys(keys, self._owner)
        new_weights = as_rows("weights", weights, len(array), self.dim, self._owner, self._kind)
        new_state = None if state is None else as_rows("state", state, len(array), self.state_dim, self._owner)
        with self._manager.door:
            # The resident copy becomes the host row before it is dropped: should the host refuse, nothing is lost.
            unique = np.unique(array)
            slots, rows, where = self._manager.planner.peek(unique, self._table)
            resident = where == PEEK_SLOT
            self._manager.before_change(self._table, unique)
            if resident.any():
                self._manager.buffer.swap_out(self._host, self._table, rows[resident], slots[resident])
            self._manager.planner.drop(self._table, array)
            self._manager.door.changes += 1
            self._host.assign(array, new_weights, new_state)

    def erase(self, keys: Any) -> int:
        """Remove keys with their rows, state and counters; return how many rows there were.

        A key that waits for admission loses its counters too.

        Raises
        ------
        PinnedKeyError
            A key that an unfinished batch uses or has counted; nothing changes then.
        """
        array = as_keys(keys, self._owner)
        with self._manager.door:
            self._manager.before_change(self._table, array)
            # Before the drop: it changes nothing where drop would refuse.
            self._manager.planner.forget_waiting(self._table, array)
            self._manager.planner.drop(self._table, array)
            self._manager.door.changes += 1
            return int(self._host.erase(array))


def _handed(rows: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """`rows`, in the caller's array if there is one."""
    if out is None:
        return rows
    out[...] = rows
    return out
