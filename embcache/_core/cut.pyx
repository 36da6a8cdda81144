"""The cut: a table's state as of the last finished training batch, for whoever saves it (ec_cut.h).

Plans of batches that have not trained are in it with nothing: what they counted, made, evicted and moved is as it was
before them. Looking changes nothing. `changed_rows` and `next_period` tell what has changed from one save to the next.

Thread safety: each call takes the planner's mutex; the planner must not change between the making of a cut and its last use.
"""

import numpy as np

from embcache.errors import PlanError

from cython cimport final
from libc.stdint cimport INT64_MIN, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

from embcache._core.filter cimport FeatureFilter, ec_sketch, ec_sketch_clock
from embcache._core.plan cimport Plan, ec_part
from embcache._core.swap cimport SwapManager, ec_dead_rows, ec_side, host_memory, int64_array
from embcache._core.table cimport EC_OK, table_unlock


cdef extern from "ec_table.h":
    ctypedef struct ec_table_fields "ec_table":
        int64_t row_limit

cdef extern from "ec_filter.h":
    ctypedef struct ec_pass:
        int region
    const int EC_PASS_IDLE
    ctypedef struct ec_filter_fields "ec_filter":
        ec_pass sweep "pass"


IN = EC_CUT_IN
CHANGED = EC_CUT_CHANGED
LIVE = EC_CUT_LIVE
READ = EC_CUT_READ

ASKED_SLOTS = 1 << 14


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


cdef ec_part *part_of(SwapManager planner, Plan plan, int64_t t) except NULL:
    """What an unfinished plan did to a table. Inside the planner."""
    planner.unfinished.index(plan)  # else it has no records
    return &plan.plan.parts[t]


def unread_rows(SwapManager planner not None, Plan plan not None, table, uint8_t[::1] members not None, bint listing=False):
    """Host rows that a plan which has come in uses, or whose keys it has evicted, and that a save has to read before its batch trains.

    Whoever calls reads all of them, or gives the save up: they are not named again.

    Parameters
    ----------
    members : uint8[n]
        `Cut.members`, and `READ` where a row has been read.
    listing : bool
        Whether it is not known yet which rows have changed: what is live in the cut and not read counts as changed, and is `IN` from now on.

    Returns
    -------
    rows : int64[k]
    listed : int
        How many of them came in.
    """
    cdef int64_t t, count, listed = 0, length = members.shape[0]
    cdef int64_t[::1] view
    cdef uint8_t none = 0
    cdef uint8_t *first = &members[0] if length > 0 else &none
    cdef ec_part *part
    planner.enter()
    try:
        t = planner.table_number(table)
        part = part_of(planner, plan, t)
        if planner.work.sides[t].cache.settled == NULL:
            raise AssertionError(f"table {t}: no save reads beside training")
        rows = np.empty(ec_cut_most_touched(part) + 1, np.int64)
        view = rows
        with nogil:
            count = ec_cut_unread(&planner.work.sides[t], part, listing, first, length, &view[0], &listed)
        return rows[:count], int(listed)
    finally:
        planner.leave()


def settle(SwapManager planner not None):
    """A save is about to read beside training: of no slot's row it is known that it needs no copy. To be ended by `unsettle`.

    Raises
    ------
    HostMemoryError
        Call `unsettle` all the same.
    """
    cdef int64_t t
    planner.enter()
    try:
        for t in range(planner.work.tables):
            if ec_cache_settle(&planner.work.sides[t].cache) != EC_OK:
                raise host_memory(f"a bit for each of {planner.work.sides[t].cache.capacity} slots")
    finally:
        planner.leave()


def unsettle(SwapManager planner not None):
    """That save is over. Again does nothing."""
    cdef int64_t t
    planner.enter()
    try:
        for t in range(planner.work.tables):
            ec_cache_unsettle(&planner.work.sides[t].cache)
    finally:
        planner.leave()


def left_rows(SwapManager planner not None, Plan plan not None, table):
    """Host rows, int64[n], that left their slots for an unfinished plan's, or were evicted by it, and had been used since the last save."""
    cdef int64_t t, count
    cdef int64_t[::1] view
    cdef ec_part *part
    planner.enter()
    try:
        t = planner.table_number(table)
        part = part_of(planner, plan, t)
        rows = np.empty(ec_cut_most_touched(part) + 1, np.int64)
        view = rows
        with nogil:
            count = ec_cut_left(&planner.work.sides[t], part, &view[0])
        return rows[:count]
    finally:
        planner.leave()


def sweeping(SwapManager planner not None, table):
    """Whether a table's filter has a pass under way: rows that it is about to take away are still there."""
    cdef int64_t t
    cdef ec_filter_fields *fields
    planner.enter()
    try:
        t = planner.table_number(table)
        if planner.filters[t] is None:
            return False
        fields = <ec_filter_fields *>&(<FeatureFilter>planner.filters[t]).f
        return fields.sweep.region != EC_PASS_IDLE
    finally:
        planner.leave()


def used_about(SwapManager planner not None, table):
    """About how many residents have been used since the last save whose rows `Table.changed` does not count.

    Of up to 16,384 slots it is exact; of more it is reckoned from as many, so the time does not depend on their number.
    """
    cdef int64_t t, count, most = ASKED_SLOTS
    planner.enter()
    try:
        t = planner.table_number(table)
        planner.lock_table(t, 0)
        with nogil:
            count = ec_cut_used_about(&planner.work.sides[t], most)
            table_unlock(planner.work.sides[t].table)
        return int(count)
    finally:
        planner.leave()


def list_slots(SwapManager planner not None, table, int64_t begin, int64_t most, uint8_t[::1] members not None):
    """Have rows of residents that have been used since the last save in the cut: of `most` slots from `begin` on.

    Parameters
    ----------
    members : uint8[n]
        `Cut.members`, and `READ` where a row has been read.

    Returns
    -------
    next, count : int
        The first slot that was not looked at, -1 where there is none; and how many rows came in.
    """
    cdef int64_t t, end, count
    cdef ec_side *side
    planner.enter()
    try:
        t = planner.table_number(table)
        side = &planner.work.sides[t]
        end = min(begin + most, <int64_t>side.cache.capacity)
        if members.shape[0] == 0 or end <= begin:
            return -1, 0
        with nogil:
            count = ec_cut_list(side, begin, end, &members[0], members.shape[0])
        return (int(end) if end < side.cache.capacity else -1), int(count)
    finally:
        planner.leave()


def changed_rows(SwapManager planner not None, table):
    """Host rows, int64[n], of residents that have been used since the last save: the table does not know that they changed."""
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
    cdef int64_t t, count
    planner.enter()
    try:
        count = len(planner.unfinished)
        with nogil:
            for t in range(planner.work.tables):
                ec_cut_next_period(&planner.work.sides[t], t, planner.plans, count)
    finally:
        planner.leave()


def filter_bytes(SwapManager planner not None, table):
    """About how many bytes a save of a table's filter takes, whole, and by what has changed since the last save; 0, 0 without a filter.

    The second is the first where it is not known, or no less.
    """
    cdef int64_t t, all_bytes = 0, changed = 0
    planner.enter()
    try:
        t = planner.table_number(table)
        if planner.filters[t] is not None:
            all_bytes = ec_filter_bytes(&(<FeatureFilter>planner.filters[t]).f, &changed)
        return int(all_bytes), int(changed)
    finally:
        planner.leave()


def filter_saved(SwapManager planner not None, table):
    """The filter of a table is as a generation has it that a delta may follow on: count what changes of it from now on."""
    cdef int64_t t
    cdef ec_filtercut none
    planner.enter()
    try:
        t = planner.table_number(table)
        if planner.filters[t] is not None:
            memset(&none, 0, sizeof(none))
            ec_filtercut_take(&none, &(<FeatureFilter>planner.filters[t]).f)
            ec_filtercut_free(&none)
    finally:
        planner.leave()


def period_saved(SwapManager planner not None):
    """The save whose cut was the last has succeeded: what residents were used for before it is not asked for again."""
    cdef int64_t t
    planner.enter()
    try:
        for t in range(planner.work.tables):
            planner.work.sides[t].cache.since = planner.work.sides[t].cache.period
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
            Only those that have changed since the last save (`Table.changed`), and those that are about to leave. Residents that
            have been used since are the business of `list_slots`.

        Returns
        -------
        members : uint8[host rows, rounded up to whole extents of 1024]
            `LIVE` where a row is in the cut, `IN` where it is to be written; `CHANGED` where one has changed, in or not.
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


@final
cdef class FilterCut:
    """The filter of one table as of the last finished training batch, read a piece at a time while training goes on.

    What is about to change is kept before (ec_filtercut.h): `look` when a plan has come in, `keep` before keys are removed by hand. Whoever
    calls holds the manager's door, for each call.

    Parameters
    ----------
    planner : SwapManager
    table : int
    cut : Cut
        Of this table, as new.
    whole : bool
        Read all of it, not only what has changed since the last save.

    Attributes
    ----------
    whole : bool
        Whether all of it is read. So it is without asking, too, where it is not known what has changed, or that takes as many bytes.
    numbers : dict
        Those of `FeatureFilter.state`. In a cut no sweep is under way: its pass has ended.
    sketches : dict
        ``sketch_young`` and ``sketch_old``, uint8 arrays, or ``sketch_changes`` (places in the one and then the other as uint32, then values), and
        ``sketch_clocks``, once `read_sketch` has said that there are no more; without a sketch there is none.

    Raises
    ------
    ConfigError
        The table has no filter.
    HostMemoryError
        From any method; after `look` and `keep` the cut is lost.
    """

    def __cinit__(self, SwapManager planner not None, table, Cut cut not None, bint whole=True):
        memset(&self.cut, 0, sizeof(ec_filtercut))
        cdef ec_cut_numbers numbers
        cdef int64_t count, most, found
        cdef int64_t[::1] view
        cdef int status, passing
        cdef ec_sketch *sketch
        planner.enter()
        try:
            self.t = planner.table_number(table)
            self.waiters = planner.filter_of(self.t)
            self.planner = planner
            count = len(planner.unfinished)
            with nogil:
                ec_cut_filter(&self.waiters.f, self.t, planner.plans, count, &numbers)
                passing = ec_cut_passing(&self.waiters.f, self.t, planner.plans, count, &most)
                status = ec_filtercut_make(&self.cut, &self.waiters.f, self.t, planner.plans, count, whole, passing)
            if status != EC_OK:
                raise host_memory("starting to save a filter")
            sketch = &self.waiters.f.sketch
            self.clocks = np.empty(3 * sketch.count, np.int64)
            if sketch.count > 0:
                view = self.clocks
                memcpy(&view[0], numbers.clocks, sketch.count * sizeof(ec_sketch_clock))
            if passing:
                late = np.empty(most + 1, np.int64)
                view = late
                found = ec_cut_late(&cut.cut, &self.waiters.f, self.t, planner.plans, count, &view[0])
                self.late = late[:found]
        finally:
            planner.leave()
        self.numbers = {
            "newest": int(numbers.newest), "epoch": int(numbers.epoch), "cutoff": int(numbers.cutoff),
            "waiting_cutoff": int(numbers.waiting_cutoff), "sweeping": 0, "sketch_blocks": int(sketch.blocks), "sketch_first": int(sketch.first),
        }
        self.sketches, self.dead = {}, []
        self.whole = self.cut.news == NULL

    def __dealloc__(self):
        ec_filtercut_free(&self.cut)

    cdef int look_through(self) except -1:
        cdef int64_t count = len(self.planner.unfinished)
        cdef int status
        with nogil:
            status = ec_filtercut_look(&self.cut, &self.waiters.f, self.t, self.planner.plans, count)
        if status != EC_OK:
            raise host_memory("keeping what a filter was")
        return 0

    def look(self):
        """Plans are unfinished that may have come in since the last call: keep what they have changed."""
        self.planner.enter()
        try:
            self.look_through()
        finally:
            self.planner.leave()

    def keep(self, keys):
        """Keys, int64[n], are about to be changed by hand, which no unfinished plan uses."""
        cdef const int64_t[::1] given = int64_array("keys", keys, -1)
        cdef int64_t n = given.shape[0]
        cdef int status
        if n == 0:
            return
        self.planner.enter()
        try:
            self.look_through()
            with nogil:
                status = ec_filtercut_keep(&self.cut, &self.waiters.f, &given[0], n)
            if status != EC_OK:
                raise host_memory("keeping what a filter was")
        finally:
            self.planner.leave()

    def take(self):
        """The cut is made: what changes from now on is the next save's."""
        self.planner.enter()
        try:
            ec_filtercut_take(&self.cut, &self.waiters.f)
        finally:
            self.planner.leave()

    def give_back(self):
        """The save has failed: what had changed before it counts as changed again. Nothing may be read after that. Again does nothing."""
        self.planner.enter()
        try:
            with nogil:
                ec_filtercut_give_back(&self.cut, &self.waiters.f)
        finally:
            self.planner.leave()

    @property
    def waiting_read(self):
        """Whether `read` has given all keys."""
        return self.cut.read >= self.cut.size and self.cut.kept.size == 0

    def read(self, int64_t most):
        """Some keys that wait, `most` at most and those that were kept: key, count, last, each int64[n], to be written."""
        cdef int64_t found = 0, kept = self.cut.kept.size
        cdef int64_t[:, ::1] view
        cdef uint8_t[::1] marks
        self.planner.enter()
        try:
            self.look_through()
            kept = self.cut.kept.size
            most = min(most, self.cut.size - self.cut.read)
            entries = np.empty((most + kept + 1, 3), np.int64)  # as ec_filter_entry lies in memory
            changed = np.ones(most + kept + 1, np.uint8)
            view, marks = entries, changed
            with nogil:
                if kept > 0:
                    memcpy(&view[0, 0], self.cut.kept.data, kept * sizeof(ec_filter_entry))
                found = kept + ec_filtercut_read(&self.cut, &self.waiters.f, most, <ec_filter_entry *>&view[kept, 0], &marks[kept])
                self.cut.kept.size = 0
        except MemoryError:
            raise host_memory("reading a filter") from None
        finally:
            self.planner.leave()
        return self.living(entries[:found], changed[:found])

    cdef object living(self, entries, changed):
        keys, counts, last = (np.ascontiguousarray(entries[:, i]) for i in range(3))
        if self.late is None:
            return keys, counts, last
        alive = (last >= self.numbers["waiting_cutoff"]) | np.isin(keys, self.late)
        if not self.whole:
            self.dead.append(keys[~alive])
            alive &= changed.astype(bool)
        return keys[alive], counts[alive], last[alive]

    def gone(self):
        """Keys, int64[n], that waited when the last save began and do not any more, some of which may again; once `read` has given all."""
        cdef int64_t count = self.cut.news.gone.size
        cdef int64_t[::1] view
        keys = np.empty(count + 1, np.int64)
        view = keys
        if count > 0:
            memcpy(&view[0], self.cut.news.gone.data, count * sizeof(int64_t))
        return np.unique(np.concatenate([keys[:count], *self.dead]))

    cdef object room_for_sketch(self):
        cdef int64_t half = self.cut.half, count
        try:
            if self.whole:
                self.sketch = np.empty(2 * half, np.uint8)
                self.sketches = {"sketch_young": self.sketch[:half], "sketch_old": self.sketch[half:]}
            else:
                count = self.cut.news.raised
                self.places, self.values = np.empty(count + 1, np.uint32), np.empty((count + 1) * self.cut.cell_bytes, np.uint8)
                self.sketches = {"sketch_changes": np.empty(0, np.uint8)}
        except MemoryError:
            raise host_memory(f"a copy of a sketch of {2 * half} bytes") from None
        self.sketches["sketch_clocks"] = self.clocks.view(np.uint8)

    def read_sketch(self, int64_t most):
        """Read about `most` more bytes of the sketch into `sketches`, or look at as many; returns whether there are more."""
        cdef int64_t size = 2 * self.cut.half
        cdef uint8_t[::1] whole
        if size == 0:
            return False
        if not self.sketches:
            self.room_for_sketch()
        self.planner.enter()
        try:
            self.look_through()
            if not self.whole:
                self.read_raised(8 * most)
                return self.cut.sketch_read < size
            whole = self.sketch
            with nogil:
                ec_filtercut_read_sketch(&self.cut, &self.waiters.f, most, <char *>&whole[0])
                if self.cut.sketch_read == size:
                    ec_filtercut_mend(&self.cut, <char *>&whole[0])
        finally:
            self.planner.leave()
        return self.cut.sketch_read < size

    cdef int read_raised(self, int64_t most) except -1:
        cdef uint32_t[::1] places = self.places
        cdef uint8_t[::1] values = self.values
        cdef int64_t size = self.cut.cell_bytes, found = self.found
        with nogil:
            found += ec_filtercut_read_raised(&self.cut, &self.waiters.f, most, &places[found], <char *>&values[found * size])
            if self.cut.sketch_read >= 2 * self.cut.half:
                ec_filtercut_mend_raised(&self.cut, &places[0], found, <char *>&values[0])
        self.found = found
        if self.cut.sketch_read >= 2 * self.cut.half:
            self.sketches["sketch_changes"] = np.concatenate([self.places[:found].view(np.uint8), self.values[:found * size]])
        return 0
