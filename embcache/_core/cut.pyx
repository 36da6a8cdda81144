"""The cut: a table's state as of the last finished training batch, for whoever saves it (ec_cut.h).

Plans of batches that have not trained are in it with nothing: what they counted, made, evicted and moved is as it was
before them. Looking changes nothing. `changed_rows` and `next_period` tell what has changed from one save to the next.

Thread safety: each call takes the planner's mutex; the planner must not change between the making of a cut and its last use.
"""

import numpy as np

from embcache.errors import PlanError

from cython cimport final
from libc.stdint cimport INT64_MIN, int64_t, uint8_t
from libc.string cimport memset

from embcache._core.filter cimport FeatureFilter
from embcache._core.plan cimport Plan, ec_part
from embcache._core.swap cimport SwapManager, ec_dead_rows, ec_side, host_memory, int64_array
from embcache._core.table cimport EC_OK, table_unlock


cdef extern from "ec_table.h":
    ctypedef struct ec_table_fields "ec_table":
        int64_t row_limit

cdef extern from "ec_sketch.h":
    ctypedef struct ec_sketch:
        pass
    size_t ec_sketch_block_bytes(const ec_sketch *k) noexcept nogil

cdef extern from "ec_filter.h":
    ctypedef struct ec_vec:
        int64_t size
    ctypedef struct ec_filter_fields "ec_filter":
        ec_vec entries
        ec_sketch sketch


IN = EC_CUT_IN
CHANGED = EC_CUT_CHANGED


def trained_step(SwapManager planner not None):
    """The step of the last finished batch.

    Raises
    ------
    PlanError
        A table has a filter, and a batch has finished before one that was planned earlier: what it has counted cannot be told from what
        that one did.
    """
    planner.enter()
    try:
        count = len(planner.unfinished)
        step = planner.last_step - count
        if count and any(one is not None for one in planner.filters) and planner.unfinished[0].step != step + 1:
            raise PlanError(f"step {planner.unfinished[0].step} has not finished, but a later one has, so what the later one has counted cannot be told "
                            "from it; finish or give up the earlier batch first (backward does, and optimizer.step())")
        return int(step)
    finally:
        planner.leave()


def touched_rows(SwapManager planner not None, Plan plan not None, table):
    """Host rows that an unfinished plan uses, and those whose keys it has evicted: int64[n]."""
    cdef int64_t t, count
    cdef int64_t[::1] view
    cdef ec_part *part
    planner.enter()
    try:
        t = planner.table_number(table)
        planner.unfinished.index(plan)  # else it has no records
        part = &plan.plan.parts[t]
        rows = np.empty(ec_cut_most_touched(part) + 1, np.int64)
        view = rows
        with nogil:
            count = ec_cut_touched(&planner.work.sides[t], part, &view[0])
        return rows[:count]
    finally:
        planner.leave()


def changed_rows(SwapManager planner not None, table):
    """Host rows, int64[n], of residents that have been used since `next_period`: the table does not know that they changed."""
    cdef int64_t t, count
    cdef int64_t[::1] view
    planner.enter()
    try:
        t = planner.table_number(table)
        rows = np.empty(planner.work.sides[t].cache.live + 1, np.int64)
        view = rows
        with nogil:
            count = ec_cut_used(&planner.work.sides[t], &view[0])
        return rows[:count]
    finally:
        planner.leave()


def next_period(SwapManager planner not None):
    """A cut was made: what residents are used for from now on is not in it, nor what unfinished plans use."""
    cdef int64_t t
    planner.enter()
    try:
        with nogil:
            for t in range(planner.work.tables):
                ec_cut_next_period(&planner.work.sides[t])
    finally:
        planner.leave()


@final
cdef class Cut:
    """One table of a planner as of the last finished training batch.

    Parameters
    ----------
    planner : SwapManager
        Whose unfinished plans are its newest ones (`trained_step` says so).
    table : int

    Attributes
    ----------
    table : Table

    Raises
    ------
    HostMemoryError
    """

    def __cinit__(self, SwapManager planner not None, table):
        memset(&self.cut, 0, sizeof(ec_cut))
        cdef int status
        cdef int64_t count
        planner.enter()
        try:
            self.t = planner.table_number(table)
            planner.overlay(self.t)
            count = len(planner.unfinished)
            with nogil:
                status = ec_cut_make(&self.cut, &planner.work.sides[self.t], self.t, planner.plans, count)
            if status != EC_OK:
                raise host_memory("looking at unfinished plans")
            self.planner = planner
            self.table = planner.tables[self.t]
            self.epoch = planner.epoch
        finally:
            planner.leave()

    def __dealloc__(self):
        ec_cut_free(&self.cut)

    cdef int enter(self) except -1:
        self.planner.enter()
        if self.epoch != <int64_t>self.planner.epoch:
            self.planner.leave()
            raise AssertionError(f"table {self.table.name!r}: the planner has changed since this cut was made")
        return 0

    def members(self, bint changed=False):
        """Which host rows are in the cut.

        Parameters
        ----------
        changed : bool
            Only those that have changed since the last save (`Table.changed`), and those that are about to leave.

        Returns
        -------
        members : uint8[host rows, rounded up to whole extents of 1024]
            `IN` where a row is in; `CHANGED` where one has changed, in or not.
        count : int
            How many are in.
        """
        cdef int64_t count = len(self.planner.unfinished), found, rows
        cdef uint8_t[::1] view
        cdef ec_side *side
        self.enter()
        try:
            side = &self.planner.work.sides[self.t]
            rows = self.row_limit()
            try:
                members = np.zeros(rows + 1024 - rows % 1024, np.uint8)
            except MemoryError:
                raise host_memory(f"listing the {rows} rows of table {self.table.name!r}") from None
            view = members
            self.planner.lock_table(self.t, 0)
            with nogil:
                found = ec_cut_members(&self.planner.overlays[self.t], side, self.t, self.planner.plans, count, changed, &view[0])
                table_unlock(side.table)
        finally:
            self.planner.leave()
        return members, int(found)

    cdef int64_t row_limit(self):
        return (<ec_table_fields *>self.planner.work.sides[self.t].table).row_limit

    def read(self, rows):
        """What rows of the cut are, and where, unless a finished plan has used them since.

        Parameters
        ----------
        rows : int64[n]
            Rows that are live, or in limbo.

        Returns
        -------
        keys, slots, counts, last : int64[n]
            `slots`: where the row's weights and state are now, in the whole buffer; -1: in the host row. `counts` and `last` are
            0 and the smallest int64 for a table that keeps none.
        """
        cdef const int64_t[::1] given = int64_array("rows", rows, -1)
        cdef int64_t n = given.shape[0]
        keys, slots = np.empty(n, np.int64), np.empty(n, np.int64)
        counts, last = np.zeros(n, np.int64), np.full(n, INT64_MIN, np.int64)
        cdef int64_t[::1] key_view = keys
        cdef int64_t[::1] slot_view = slots
        cdef int64_t[::1] count_view = counts
        cdef int64_t[::1] last_view = last
        cdef ec_side *side
        if n == 0:
            return keys, slots, counts, last
        self.enter()
        try:
            side = &self.planner.work.sides[self.t]
            if int(np.min(rows)) < 0 or int(np.max(rows)) >= self.row_limit():
                raise AssertionError(f"table {self.table.name!r}: rows {np.min(rows)} to {np.max(rows)} of {self.row_limit()}")
            self.planner.lock_table(self.t, 0)
            with nogil:
                ec_cut_read(&self.cut, side, &given[0], n, &key_view[0], &slot_view[0], &count_view[0], &last_view[0])
                table_unlock(side.table)
        finally:
            self.planner.leave()
        return keys, slots, counts, last

    def dead(self):
        """Keys, int64[k], whose rows are in the host table but not in the cut, as a finished sweep has killed them.

        It looks at all rows, but only while there can be such.
        """
        cdef int64_t count
        cdef int64_t[::1] view
        cdef ec_side *side
        self.enter()
        try:
            side = &self.planner.work.sides[self.t]
            self.planner.lock_table(self.t, 0)
            try:
                with nogil:
                    count = ec_dead_rows(&self.planner.overlays[self.t], side)
                keys = np.empty(count + 1, np.int64)
                view = keys
                with nogil:
                    count = ec_cut_dead(&self.planner.overlays[self.t], side, &view[0]) if count else 0
            finally:
                table_unlock(side.table)
        finally:
            self.planner.leave()
        return keys[:count]

    def filter(self):
        """`FeatureFilter.state` of the cut: what the filter would hold had the unfinished plans been cancelled, its pass ended.

        Raises
        ------
        ConfigError
            The table has no filter.
        """
        cdef FeatureFilter waiters
        cdef ec_filter_fields *fields
        cdef ec_cut_numbers numbers
        cdef int64_t size, found, count
        cdef uint8_t[::1] young_view, old_view
        cdef int64_t[:, ::1] entry_view
        self.enter()
        try:
            waiters = self.planner.filter_of(self.t)
            count = len(self.planner.unfinished)
            fields = <ec_filter_fields *>&waiters.f
            size = ec_sketch_block_bytes(&fields.sketch)
            young, old = np.zeros(size + 1, np.uint8), np.zeros(size + 1, np.uint8)
            entries = np.zeros((fields.entries.size + 1, 3), np.int64)  # as ec_filter_entry lies in memory
            young_view, old_view, entry_view = young, old, entries
            with nogil:
                ec_cut_filter(&waiters.f, self.t, self.planner.plans, count, &numbers, &young_view[0], &old_view[0])
                found = ec_cut_waiting(&self.cut, &waiters.f, self.t, self.planner.plans, count, <ec_filter_entry *>&entry_view[0, 0])
        finally:
            self.planner.leave()
        entries = entries[:found]
        entries = entries[np.argsort(entries[:, 0])]
        return {
            "keys": entries[:, 0].copy(), "counts": entries[:, 1].copy(), "last": entries[:, 2].copy(), "late": np.empty(0, np.int64),
            "sketch_young": young[:size], "sketch_old": old[:size],
            "newest": int(numbers.newest), "epoch": int(numbers.epoch), "cutoff": int(numbers.cutoff),
            "waiting_cutoff": int(numbers.waiting_cutoff), "sweeping": 0, "sketch_added": int(numbers.added),
            "sketch_old_added": int(numbers.old_added), "sketch_since": int(numbers.since),
        }
