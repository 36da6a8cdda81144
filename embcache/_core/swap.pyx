"""The planner: which rows a batch needs in HBM, where they go, and which rows make room for them.

Owns the slots of all tables of a collection (ec_cache.h), the feature filters, the policy of victims (ec_policy.h) and the
journal of every plan that has not finished (ec_plan.h). It moves no row itself: a plan says what to move, and the
``mark_*`` calls tell the planner that it has been done. One core call plans all tables of a batch (ec_phases.h).

Invariants: a slot that an unfinished plan uses is never a victim (I2); a plan either succeeds or leaves everything as it
was (I3); everything in a plan is a function of state and batch, at any number of threads (I4). Slots are chosen so: a
resident key keeps its slot; a new one gets the smallest free slot, else the smallest slot whose key was evicted, else
that of the next victim of the policy that is not pinned (`"lru"`: the least recently used one, by step and position in the
batch). Victims are chosen once the batch's own residents are pinned, all before the first new key comes in.

Thread safety: every door takes one mutex with the GIL released, and the locks of the host tables it changes.
"""

import itertools

import numpy as np

from embcache._core.digest import random_seed
from embcache._core.plan import STATES
from embcache.config import AdmitAndEvictConfig
from embcache.errors import (
    ClosedError,
    ConfigError,
    ForkError,
    HbmCapacityError,
    HostMemoryError,
    PinnedKeyError,
    PlanError,
    ShapeError,
    whole_number,
)

from cython cimport final
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from embcache._core.arena cimport ec_promises_share, promises
from embcache._core.digest cimport EC_VSHARDS
from embcache._core.filter cimport FeatureFilter
from embcache._core.moves cimport Moves
from embcache._core.notice cimport GIVEN, PLANNED, SPENT, WITHDRAWN, Notice
from embcache._core.plan cimport Block, Plan, Shelf
from embcache._core.table cimport (
    EC_CAPACITY,
    EC_CLOSED,
    EC_DISK,
    EC_LIMIT,
    EC_NOMEM,
    EC_OK,
    Table,
    table_find,
    table_insert,
    table_lock,
    table_unlock,
)
from embcache._core.threads cimport parallel_for, process_mark, process_number, resolve_threads

ec_promises_share(promises())

POLICIES = ("lru", "lfu", "s3fifo", "lookahead")  # by EC_LRU ...
PEEK_ABSENT = EC_PEEK_ABSENT
PEEK_SLOT = EC_PEEK_SLOT
PEEK_ROW = EC_PEEK_ROW
PEEK_DEFAULT = EC_PEEK_DEFAULT

cdef enum:
    SMALL_CALL = 8192      # keys below which the pool is not woken
    SCAN_ROWS = 65536      # host rows read at a time
    SWEEP_ROWS = 1 << 21   # places a plan looks at for a sweep: 3 to 7 ms of one core (bench_sweep)
    MAX_CAPACITY = 0x7FFFFFFF

_manager_numbers = itertools.count(1)


cdef const int64_t[::1] int64_array(str what, object values, int64_t length):
    """`values` as a memoryview, or ShapeError; `length` -1 leaves the length open."""
    if not isinstance(values, np.ndarray) or values.dtype != np.int64 or values.ndim != 1 or not values.flags.c_contiguous:
        found = f"{values.dtype} array of shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ShapeError(f"{what}: got {found}; give a one-dimensional contiguous int64 array")
    if length >= 0 and values.shape[0] != length:
        raise ShapeError(f"{what}: {values.shape[0]} elements; give {length}")
    return values


cdef int policy_number(object policy) except -1:
    """Number of a policy; ConfigError where this version does not have it."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(f"policy = {policy!r}; give one of {', '.join(map(repr, POLICIES))}")
    return POLICIES.index(policy)


cdef object host_memory(str doing):
    return HostMemoryError(f"out of host memory while {doing}; nothing has changed: free memory or use smaller batches")


@final
cdef class SwapManager:
    """Plans which rows are in HBM, for all tables of a collection.

    Parameters
    ----------
    tables : sequence of Table
        Host tables, distinct.
    capacities : sequence of int
        Slots of each table, 1 to 2**31 - 1.
    filters : sequence of AdmitAndEvictConfig or None, optional
        One entry a table; a table with a filter must have been made ``with_filter``.
    policy : str
        Whose slot is taken where room is needed: ``"lru"``, ``"lfu"``, ``"s3fifo"`` or ``"lookahead"`` (ec_policy.h says how
        they choose). ``"lookahead"`` goes by the batches that `look_ahead` was told of; without any it is ``"lru"``.
    num_threads : int, optional
        At most this many threads plan a batch; nothing observable depends on it.
    sweep_rows : int, optional
        Slots, host rows and waiting keys that one plan looks at, all tables together, to take away what a sweep has killed
        (a key that is taken away counts as 64). Nothing observable depends on it but the time that a plan takes, which slots
        and row indexes are reused when, and so hits and misses.
    vshards : (int, int), optional
        First and last + 1 of those whose keys come here, where others have the rest: sketches of filters are of these.

    Raises
    ------
    ConfigError
        If an argument does not fit.
    HostMemoryError

    Notes
    -----
    Life of a plan: `plan`; rows of ``swap_out_*`` copied to the host, `mark_swapped_out`; rows of ``swap_in_*`` copied to
    HBM, `mark_swapped_in`; the batch trains; `finish`. Swaps happen in the order of the plans: out 1, in 1, out 2, in 2,
    so a row read for a batch has the write-backs of every earlier one (I5). Finishing may happen in any order.

    Life of a notice (`look_ahead`): it is given, once per batch to come, in the order in which the batches are expected;
    its batch is planned with it; when that plan finishes it is spent. A cancelled plan leaves it as it was. A batch may come out
    of turn, or not at all: then `withdraw` its notice, or its keys are kept in HBM and its memory is kept for ever.

    Thread safety: calls may come from any thread; one at a time runs.
    """

    def __cinit__(self, tables, capacities, filters=None, *, policy="lru", num_threads=None, sweep_rows=SWEEP_ROWS, vshards=(0, EC_VSHARDS)):
        memset(&self.work, 0, sizeof(ec_work))
        self.agrees = 0
        self.overlays = NULL
        self.plans = NULL
        self.plan_room = 0
        self.mutex_ready = 0
        self.closed = 1
        self.process = process_mark()
        self.number = next(_manager_numbers)
        self.unfinished = []
        self.notices = {}
        self.notice_ids = []
        self.notice_number = 0
        memset(&self.look, 0, sizeof(ec_look))
        self.shelf = Shelf()

        self.tables = list(tables)
        cdef int64_t count = len(self.tables)
        capacities = list(capacities)
        configs = [None] * count if filters is None else list(filters)
        cdef int policy_kind = policy_number(policy)
        self.num_threads = resolve_threads(num_threads)
        slice_rows = whole_number(sweep_rows)
        if slice_rows is None or not 1 <= slice_rows < 2**62:
            raise ConfigError(f"sweep_rows = {sweep_rows!r}; give an integer of 1 or more")
        self.work.sweep_rows = slice_rows
        self.work.avx2 = ec_cpu_has_avx2()
        self.work.bracket = EC_SELECT_BRACKET
        self.work.long_ago = EC_LONG_AGO
        if count == 0:
            raise ConfigError("tables: none given; a SwapManager needs at least one")
        if len(capacities) != count or len(configs) != count:
            raise ConfigError(f"{count} tables, {len(capacities)} capacities, {len(configs)} filters; give one of each a table")
        if len(set(map(id, self.tables))) != count:
            raise ConfigError("tables: a table is given twice; give each once")
        for table, capacity, config in zip(self.tables, capacities, configs):
            if not isinstance(table, Table):
                raise ConfigError(f"tables: {table!r} is not a Table")
            (<Table>table).check_process()
            self.check_capacity(table, capacity)
            if config is not None and not isinstance(config, AdmitAndEvictConfig):
                raise ConfigError(f"table {table.name!r}: filter = {config!r}; give an AdmitAndEvictConfig or None")
            if config is not None and not table.with_filter:
                raise ConfigError(f"table {table.name!r} has a filter but no counters; make it with with_filter=True")

        self.filters = [None if config is None else FeatureFilter(config, random_seed(), vshards) for config in configs]
        self.work.tables = count
        self.work.find = table_find
        self.work.bear = table_insert
        self.work.dedup_count = min(self.num_threads, EC_THREADS_MAX)
        self.work.seed[0] = random_seed()
        self.work.seed[1] = random_seed() | 1
        self.work.sides = <ec_side *>calloc(count, sizeof(ec_side))
        self.work.calls = <ec_dedup_call *>calloc(count, sizeof(ec_dedup_call))
        self.overlays = <ec_overlay *>calloc(count, sizeof(ec_overlay))
        if self.work.sides == NULL or self.work.calls == NULL or self.overlays == NULL:
            raise host_memory("making a planner")
        cdef int64_t t
        cdef ec_side *side
        for t in range(count):
            side = &self.work.sides[t]
            side.table = (<Table>self.tables[t]).t
            if self.filters[t] is not None:
                side.filter = &(<FeatureFilter>self.filters[t]).f
            if ec_cache_init(&side.cache, capacities[t], policy_kind, random_seed()) != EC_OK:
                raise host_memory(f"making {capacities[t]} slots for table {self.tables[t].name!r}")
            side.cache.row_free = ec_side_row_free
            side.cache.table = side.table
        self.looks = policy_kind == EC_LOOKAHEAD
        self.look.tables = count
        self.look.sides = self.work.sides
        self.look.parts = <ec_look_part *>calloc(count, sizeof(ec_look_part))
        if self.look.parts == NULL:
            raise host_memory("making a planner")
        self.default_bases()
        if pthread_mutex_init(&self.mutex, NULL) != 0:
            raise host_memory("making a planner")
        self.mutex_ready = 1
        self.closed = 0

    def __dealloc__(self):
        if self.process != process_mark():  # a forked child must not unmap: the parent's memory is not in it
            return
        self.free_all()
        if self.mutex_ready:
            pthread_mutex_destroy(&self.mutex)

    cdef void default_bases(self) noexcept:
        cdef int64_t t, base = 0
        for t in range(self.work.tables):
            self.work.sides[t].base = base
            base += self.work.sides[t].cache.capacity + 1

    cdef int check_capacity(self, object table, object capacity) except -1:
        """Raise ConfigError unless `capacity` is a legal number of slots for `table`."""
        slots = whole_number(capacity)
        if slots is None or not 1 <= slots <= MAX_CAPACITY:
            raise ConfigError(f"table {table.name!r}: capacity = {capacity!r}; give an integer from 1 to {MAX_CAPACITY}")

    # ------------------------------------------------------------------------------------------------- doors and locks

    cdef int enter(self) except -1:
        """Take the mutex; ForkError in a child, ClosedError after close. Paired with leave()."""
        if self.process != process_mark():
            raise ForkError(f"this SwapManager was made in process {process_number(self.process)}; a forked child may not use it, make one there")
        if self.mutex_ready:
            with nogil:
                pthread_mutex_lock(&self.mutex)
            if not self.closed:
                return 0
            pthread_mutex_unlock(&self.mutex)
        raise ClosedError("this SwapManager is closed")

    cdef void leave(self) noexcept:
        pthread_mutex_unlock(&self.mutex)

    cdef int64_t lock_tables(self, int write) noexcept nogil:
        """Lock every host table in order. The number locked: fewer than there are, and none, where `lock_status` stopped it."""
        cdef int64_t t
        self.lock_status = EC_OK
        for t in range(self.work.tables):
            self.lock_status = table_lock(self.work.sides[t].table, write)
            if self.lock_status != EC_OK:
                self.unlock_tables(t)
                return t
        return self.work.tables

    cdef int lock_table(self, int64_t t, int write) except -1:
        """Lock one host table, or raise what keeps it from being locked."""
        cdef int status
        with nogil:
            status = table_lock(self.work.sides[t].table, write)
        if status != EC_OK:
            raise self.lock_failure(t, status)

    cdef object lock_failure(self, int64_t t, int status):
        if status == EC_CLOSED:
            return ClosedError(f"table {self.tables[t].name!r} is closed")
        return (<Table>self.tables[t]).failure(status, 0)

    cdef void unlock_tables(self, int64_t count) noexcept nogil:
        cdef int64_t t
        for t in range(count):
            table_unlock(self.work.sides[t].table)

    cdef int lock_all(self) except -1:
        """Lock every host table for writing, or raise ClosedError naming the one that is closed, or what its disk says."""
        cdef int64_t locked
        with nogil:
            locked = self.lock_tables(1)
        if locked < self.work.tables:
            raise self.lock_failure(locked, self.lock_status)

    cdef int table_number(self, object table) except -1:
        number = whole_number(table)
        if number is None or not 0 <= number < self.work.tables:
            raise ConfigError(f"table = {table!r}; give a table's number, 0 to {self.work.tables - 1}")
        return number

    cdef int check_settled(self, str doing) except -1:
        """Raise PlanError while a plan is unfinished."""
        if self.unfinished:
            raise PlanError(f"{doing} while {len(self.unfinished)} plans are unfinished, the oldest of step {self.unfinished[0].step}; finish or cancel them first")

    cdef int check_still(self, str doing) except -1:
        """Raise PlanError while a plan has rows to move: it says where to, and slots would mean others then."""
        for plan in self.unfinished:
            if (<Plan>plan).plan.state != EC_SWAPPED_IN:
                raise PlanError(f"{doing} while the plan of step {plan.step}, unfinished, is {plan.state}; swap it in or cancel it first")

    # ------------------------------------------------------------------------------------------------------------ plan

    cdef int check_batch(self, const int64_t[::1] offsets, int64_t n) except -1:
        """Raise ShapeError unless `offsets` cut n keys into the keys of the tables."""
        cdef int64_t t
        if offsets[0] != 0 or offsets[self.work.tables] != n:
            raise ShapeError(f"table_offsets: run from {offsets[0]} to {offsets[self.work.tables]}; for {n} keys give 0 to {n}")
        for t in range(self.work.tables):
            if offsets[t + 1] < offsets[t]:
                raise ShapeError(f"table_offsets: {offsets[t + 1]} follows {offsets[t]} at table {self.tables[t].name!r}; offsets must not fall")
            if offsets[t + 1] - offsets[t] > EC_DEDUP_MAX_KEYS:
                raise ShapeError(f"table {self.tables[t].name!r}: {offsets[t + 1] - offsets[t]} keys in one batch; the limit is {EC_DEDUP_MAX_KEYS}")

    def plan(self, keys, table_offsets, timestamps=None, clicked=None, notice=None, *, Moves moves=None, occurrences=None, clicks=None, newest=None, agree=None):
        """Plan one training batch.

        Parameters
        ----------
        keys : int64[n], C-contiguous
            Keys of all tables, table by table. Any value, any number of times.
        table_offsets : int64[T + 1]
            Table t's keys are ``keys[table_offsets[t]:table_offsets[t + 1]]``.
        timestamps : int64[n], optional
            Event times of the keys; needed where a table evicts by time.
        clicked : uint8[n], optional
            Whether each occurrence was clicked; needed where a table has the show/click policy.
        notice : Notice, optional
            The one that `look_ahead` gave for this batch. Its keys count as used now, also those that the batch lacks. One
            that was withdrawn makes no difference.
        moves : Moves, optional
            Of the same tables: move the rows in the same call, as far as that needs no device. Where slots are arrays of the host
            the plan is ``"swapped_in"`` then; elsewhere ``moves.gathered`` says whether its rows are in the block.
        occurrences : int64[n], optional
            Occurrences that each position stands for, 1 or more; one each without it. The four from here on are for a batch that
            is this planner's share of a larger one, whose other keys other planners have.
        clicks : int64[n], optional
            Clicks of each position's occurrences, in place of `clicked`.
        newest : int64[T], optional
            Newest timestamp of each table in the whole of the larger batch; -2**63 where that has no key of the table.
        agree : callable, optional
            ``agree(asked)`` decides with the other planners what a sweep of this step takes away where that depends on the whole
            table. `asked` is a list, a table each, of ``("floor", t, cutoff, keep_min, ranks, living)`` or ``("lowest", t, share,
            keep_min, ranks, living, waiting)``; ranks are uint64[k, 2] (value, key), in no order. It answers with a
            list of a cut-off, or of a pair of (value, key) or None: the largest ranks of rows and of waiting keys that go. It is called
            in the middle of the plan, inside the planner's locks; what it raises is raised, and nothing has changed then.

        Returns
        -------
        Plan

        Raises
        ------
        ShapeError
            An array is not int64, not contiguous or of the wrong length, or offsets do not rise from 0 to n.
        ConfigError
            A table needs timestamps, or clicks, and has keys, but none are given.
        HbmCapacityError
            A table has too few slots that no unfinished batch pins.
        PlanError
            The notice is another SwapManager's, or its batch was planned before. Or `moves` is given, and rows of an earlier plan have
            not been moved.
        HostMemoryError
            In each case everything is as it was.
        """
        cdef const int64_t[::1] key_view = int64_array("keys", keys, -1)
        cdef int64_t n = key_view.shape[0]
        cdef const int64_t[::1] offset_view = int64_array("table_offsets", table_offsets, self.work.tables + 1)
        cdef const int64_t[::1] time_view = None if timestamps is None else int64_array("timestamps", timestamps, n)
        cdef const int64_t *times = &time_view[0] if timestamps is not None and n > 0 else NULL
        cdef const uint8_t[::1] click_view = None
        if clicked is not None:
            if not isinstance(clicked, np.ndarray) or clicked.dtype != np.uint8 or clicked.shape != (n,) or not clicked.flags.c_contiguous:
                raise ShapeError(f"clicked: {clicked!r}; give a contiguous uint8 array of {n}")
            click_view = clicked
        cdef const uint8_t *click_data = &click_view[0] if clicked is not None and n > 0 else NULL
        cdef const int64_t[::1] times_view = None if occurrences is None else int64_array("occurrences", occurrences, n)
        cdef const int64_t[::1] clicks_view = None if clicks is None else int64_array("clicks", clicks, n)
        cdef const int64_t[::1] newest_view = None if newest is None else int64_array("newest", newest, self.work.tables)
        if occurrences is not None and n > 0 and occurrences.min() < 1:
            raise ShapeError(f"occurrences: {occurrences.min()}; give 1 or more for each key")
        cdef int64_t t, locked = 0
        cdef int status
        self.check_batch(offset_view, n)
        for t in range(self.work.tables):
            if timestamps is None and offset_view[t + 1] > offset_view[t] and self.filters[t] is not None and self.filters[t].config.needs_timestamps:
                raise ConfigError(f'table {self.tables[t].name!r} evicts by time but the batch has no timestamps; give them, or set time_source="step"')
            if clicked is None and clicks is None and offset_view[t + 1] > offset_view[t] and self.filters[t] is not None and self.filters[t].config.needs_labels:
                raise ConfigError(f"table {self.tables[t].name!r} admits by shows and clicks but the batch has no labels; give one an example")

        self.enter()
        cdef Plan plan
        cdef Block front
        cdef size_t front_bytes, spare_bytes
        try:
            notice = None if notice is None else self.counting(notice, "plan")
            self.work.notice = EC_NO_NOTICE if notice is None else (<Notice>notice).id
            plan = Plan.__new__(Plan)
            plan.notice = notice
            plan.plan.parts = <ec_part *>calloc(self.work.tables, sizeof(ec_part))
            if plan.plan.parts == NULL or self.reserve_plan() != EC_OK:
                raise host_memory("planning a batch")
            plan.tables = self.work.tables
            plan.owner = self.number
            plan.hands = self.hands
            plan.front = front = Block()
            plan.back = Block()
            if moves is not None:
                if moves.tables != self.tables:
                    raise PlanError("plan: moves of other tables; give those of these tables")
                self.check_still("plan and move")
                moves.chain(plan)
            front_bytes = ec_arrays_front_bytes(self.work.tables, n)
            spare_bytes = self.shelf.take(front_bytes, &self.work.spare)
            self.work.parts = plan.plan.parts
            memset(&self.work.out, 0, sizeof(ec_arrays))
            self.unfinished.append(plan)  # now, since nothing may fail once the plan is made
            self.work.clicked = click_data
            self.work.times = &times_view[0] if occurrences is not None and n > 0 else NULL
            self.work.clicks_at = &clicks_view[0] if clicks is not None and n > 0 else NULL
            self.work.newest = &newest_view[0] if newest is not None else NULL
            self.work.counted = 0
            self.agree = agree
            self.agrees = agree is not None
            self.disagreement = None
            with nogil:
                status = self.prepare(&key_view[0] if n > 0 else NULL, &offset_view[0], times)
                if status == EC_OK:
                    locked = self.lock_tables(1)
                if status == EC_OK and locked == self.work.tables:
                    status = self.run()
                    if status == EC_OK and moves is not None:
                        moves.run(&self.work.out)
                    self.unlock_tables(locked)
            if self.work.spare != NULL:  # the plan did not get that far
                self.shelf.put(self.work.spare, spare_bytes)
                self.work.spare = NULL
                spare_bytes = 0
            front.data = self.work.out.front
            front.size = front_bytes
            front.held = max(spare_bytes, front_bytes)
            front.shelf = self.shelf
            (<Block>plan.back).data = self.work.out.back
            (<Block>plan.back).size = self.work.out.back_bytes
            self.work.parts = NULL
            free(self.work.limits)
            self.work.limits = NULL
            self.agree = None
            if status != EC_OK or locked < self.work.tables:
                self.unfinished.pop()
                if self.disagreement is not None:
                    raise self.disagreement
                if locked < self.work.tables and status == EC_OK:
                    raise self.lock_failure(locked, self.lock_status)
                raise self.failure(plan, status)
            if notice is not None:
                (<Notice>notice).at = PLANNED
            self.last_step += 1
            plan.step = plan.plan.step = self.last_step
            plan.plan.state = EC_SWAPPED_IN if moves is not None and moves.direct else EC_PLANNED
            plan.out = self.work.out
            plan.threads = self.threads_for(n)
            plan.num_keys = n
            plan.num_uniques = plan.out.unique_offsets[plan.tables]
            plan.misses = plan.out.in_offsets[plan.tables]
            for t in range(plan.tables):
                plan.hits += plan.out.hits[t]
            self.plans[len(self.unfinished) - 1] = &plan.plan
            self.epoch += 1
            return plan
        finally:
            self.leave()

    cdef int reserve_plan(self) noexcept:
        """Room for one more unfinished plan in the list that C reads."""
        cdef int64_t room
        cdef ec_plan **wider
        if len(self.unfinished) < self.plan_room:
            return EC_OK
        room = 2 * self.plan_room + 8
        wider = <ec_plan **>realloc(self.plans, room * sizeof(ec_plan *))
        if wider == NULL:
            return EC_NOMEM
        self.plans = wider
        self.plan_room = room
        return EC_OK

    cdef int prepare(self, const int64_t *keys, const int64_t *offsets, const int64_t *timestamps) noexcept nogil:
        """What needs no table: memory, and the uniques of every table. Changes no state."""
        cdef ec_work *w = &self.work
        cdef int threads = self.threads_for(offsets[w.tables])
        cdef int status = ec_work_begin(w, keys, offsets, timestamps, self.last_step + 1, threads)
        if status == EC_OK:
            status = self.dedup(threads)
        if status == EC_OK:
            status = ec_work_chunk(w)
        return status

    cdef int threads_for(self, int64_t n) noexcept nogil:
        return self.num_threads if n >= SMALL_CALL else 1

    cdef int run(self) noexcept nogil:
        """The phases that need the tables. On failure the state is as it was; parts[t].status says which table it was."""
        cdef ec_work *w = &self.work
        cdef int64_t t
        cdef int threads = self.threads_for(w.n)
        cdef int status = EC_OK
        parallel_for(ec_phase_resident, w, w.quick.size, threads)
        for t in range(w.tables):
            if w.parts[t].status != EC_OK:
                status = w.parts[t].status
        if status != EC_OK:
            for t in range(w.tables):
                if w.parts[t].quick:  # no filter has been asked yet, so none has anything to take back
                    ec_plan_undo(&w.sides[t], &w.parts[t])
            return status
        for t in range(w.tables):
            if w.parts[t].quick and w.parts[t].missing >= EC_ALONE:
                ec_resident_rows(w, t, threads)
        parallel_for(ec_phase_lookup, w, w.chunks.size, threads)
        ec_pass_share(w)
        status = self.count_and_agree(threads)
        if status != EC_OK:
            self.undo(w.parts)
            return status
        parallel_for(ec_phase_decide, w, w.tables, threads)
        for t in range(w.tables):
            if w.parts[t].status != EC_OK:
                status = w.parts[t].status
                break
        if status == EC_OK:
            status = ec_arrays_reserve(w)
        if status == EC_OK:
            parallel_for(ec_phase_bear, w, w.tables, threads)
            for t in range(w.tables):
                if w.parts[t].totals[EC_BORN] >= EC_ALONE:
                    ec_bear(w, t, threads)
            for t in range(w.tables):
                if w.parts[t].status != EC_OK:
                    status = w.parts[t].status
                    break
        if status != EC_OK:
            self.undo(w.parts)
            return status

        parallel_for(ec_phase_place, w, w.tables, threads)
        for t in range(w.tables):
            if w.parts[t].status != EC_OK:
                self.undo(w.parts)
                return w.parts[t].status
        ec_arrays_out_offsets(w)
        parallel_for(ec_phase_emit, w, w.tables, threads)
        return EC_OK

    cdef int count_and_agree(self, int threads) noexcept nogil:
        """Where a sweep depends on what other planners have: count, and decide with them what it takes away."""
        cdef ec_work *w = &self.work
        cdef int64_t t
        cdef int depends = 0
        if not self.agrees:
            return EC_OK
        for t in range(w.tables):
            depends += ec_filter_depends(w, t)
        if depends == 0:
            return EC_OK
        parallel_for(ec_phase_count, w, w.tables, threads)
        w.counted = 1
        for t in range(w.tables):
            if w.parts[t].status != EC_OK:
                return w.parts[t].status
        with gil:
            try:
                self.ask_others()
            except BaseException as error:
                self.disagreement = error
                return EC_NOMEM
        return EC_OK

    cdef int ask_others(self) except -1:
        """Ask `agree`, and note its answers for the sweeps."""
        cdef ec_work *w = &self.work
        cdef int64_t t, cutoff
        cdef ec_limit *limit
        asked = []
        for t in range(w.tables):
            if not ec_filter_depends(w, t):
                continue
            config = (<FeatureFilter>self.filters[t]).config
            if config.show_click is None:
                if not ec_filter_cutoff(w.sides[t].filter, &cutoff):  # so it is with the others, whose newest is the same
                    continue
                ranks, living = self.ranks_of(t, EC_BY_TIME, cutoff)
                asked.append(("floor", t, cutoff, config.evict_keep_min, ranks, living))
                continue
            w.sides[t].filter.epoch += 1  # as the sweep will, whose ranks these are
            try:
                ranks, _ = self.ranks_of(t, EC_BY_SCORE, 0)
                waiting, _ = self.ranks_of(t, EC_WAITING_BY_SCORE, 0)
            finally:
                w.sides[t].filter.epoch -= 1
            share = config.show_click.evict_percentage
            asked.append(("lowest", t, share, config.evict_keep_min, ranks, int(w.sides[t].table.live), waiting))
        w.limits = <ec_limit *>calloc(w.tables, sizeof(ec_limit))
        if w.limits == NULL:
            raise host_memory("planning a batch")
        for (kind, number, *_), answer in zip(asked, self.agree(asked), strict=True):
            limit = &w.limits[<int64_t>number]
            if kind == "floor":
                limit.cutoff = answer
                continue
            rows, waiting = answer
            if rows is not None:
                limit.rows, limit.rows_most[0], limit.rows_most[1] = 1, rows[0], rows[1]
            if waiting is not None:
                limit.waiting, limit.waiting_most[0], limit.waiting_most[1] = 1, waiting[0], waiting[1]

    cdef object ranks_of(self, int64_t t, int kind, int64_t cutoff):
        """All ranks of one kind, uint64[k, 2] of value and key, and the number of living rows."""
        cdef ec_field field
        cdef ec_vec found
        cdef int64_t living = 0
        cdef int status
        memset(&found, 0, sizeof(ec_vec))
        with nogil:
            ec_field_make(&field, &self.work, t, kind, cutoff)
            status = ec_field_ranks(&field, &found, &living)
        try:
            if status != EC_OK:
                raise host_memory("planning a batch")
            ranks = np.empty((found.size, 2), np.uint64)
            if found.size > 0:
                memcpy(<void *><size_t>ranks.ctypes.data, found.data, found.size * sizeof(ec_rank))
            return np.ascontiguousarray(ranks[:, ::-1]), living  # a 128-bit number has its lower half first
        finally:
            free(found.data)

    cdef int dedup(self, int threads) noexcept nogil:
        """Uniques, inverse and CSR of every table."""
        cdef ec_work *w = &self.work
        cdef ec_dedup_call *call
        cdef int64_t t, plain = 0
        parallel_for(ec_phase_dedup, w, w.plain.size, threads)
        w.dedup_status = EC_OK
        for t in range(w.tables):
            if plain < w.plain.size and (<int64_t *>w.plain.data)[plain] == t:
                plain += 1
                if w.parts[t].status != EC_OK:
                    return w.parts[t].status
                continue
            if w.parts[t].quick:
                continue
            call = w.cut = &w.calls[t]
            if threads == EC_HALVES:
                parallel_for(ec_phase_half_run, w, EC_HALVES, threads)
                if w.dedup_status != EC_OK:
                    return w.dedup_status
                parallel_for(ec_phase_half_match, w, EC_HALVES, threads)
                ec_dedup_half_number(call)
                parallel_for(ec_phase_half_inverse_and_ends, w, EC_HALVES + 1, threads)
                parallel_for(ec_phase_half_order, w, EC_HALVES, threads)
                continue
            parallel_for(ec_phase_block_count_parts, w, call.blocks, threads)
            ec_dedup_layout(call)
            parallel_for(ec_phase_block_scatter, w, call.blocks, threads)
            parallel_for(ec_phase_part_run, w, EC_PARTS, threads)
            if w.dedup_status != EC_OK:
                return w.dedup_status
            ec_dedup_number(call)
            parallel_for(ec_phase_block_number, w, call.blocks, threads)
            ec_dedup_sum(call)
            parallel_for(ec_phase_block_inverse, w, call.blocks, threads)
            parallel_for(ec_phase_part_order, w, EC_PARTS, threads)
        return EC_OK

    cdef void undo(self, ec_part *parts) noexcept nogil:
        cdef int64_t t
        for t in range(self.work.tables):
            ec_plan_undo(&self.work.sides[t], &parts[t])

    cdef object failure(self, Plan plan, int status):
        """The exception for a plan that failed and has been undone."""
        cdef int64_t t
        cdef ec_part *part
        for t in range(plan.tables):
            part = &plan.plan.parts[t]
            if status == EC_CAPACITY and part.status == EC_CAPACITY:
                capacity = self.work.sides[t].cache.capacity
                name = self.tables[t].name
                if part.need > capacity:
                    remedy = f"the batch alone does not fit: give the table at least {part.need} slots (hbm_rows, hbm_bytes) or use smaller batches"
                else:
                    remedy = "the others are pinned by unfinished batches: finish one first, plan fewer batches ahead, or give the table more slots (hbm_rows, hbm_bytes)"
                return HbmCapacityError(
                    f"table {name!r}: the batch needs {part.need} slots, {part.have} of {capacity} can be had; {remedy}",
                    table=name, need=part.need, have=part.have, never_fits=part.need > capacity,
                )
            if status == EC_DISK and part.status == EC_DISK:
                return self.lock_failure(t, EC_DISK)
        if status == EC_LIMIT:
            return HostMemoryError("planning a batch: a table or filter is at its limit of keys; nothing has changed")
        return host_memory("planning a batch")

    # --------------------------------------------------------------------------------------------------- life of a plan

    cdef int64_t order_of(self, Plan plan, int state, str doing) except -1:
        """Index of an unfinished plan of ours that is in `state`; PlanError otherwise."""
        if plan.owner != self.number:
            raise PlanError(f"{doing}: the plan of step {plan.step} belongs to another SwapManager")
        if plan.plan.state != state:
            raise PlanError(f"{doing}: the plan of step {plan.step} is {plan.state}; it must be {STATES[state]}")
        return self.unfinished.index(plan)

    cdef int forget(self, int64_t at) except -1:
        """Take plan number `at` off the list of unfinished ones."""
        cdef int64_t i
        del self.unfinished[at]
        for i in range(at, len(self.unfinished)):
            self.plans[i] = &(<Plan>self.unfinished[i]).plan

    def cancel(self, Plan plan not None):
        """Undo the newest unfinished plan, whose rows have not been moved: everything is as if it had not been made.

        Raises
        ------
        PlanError
            If it is not the newest, or its swap-out has been done. Nothing changes.
        """
        cdef int64_t t
        self.enter()
        try:
            at = self.order_of(plan, EC_PLANNED, "cancel")
            if at != len(self.unfinished) - 1:
                raise PlanError(f"cancel: step {self.unfinished[len(self.unfinished) - 1].step} was planned after step {plan.step}; cancel the newest plan first")
            self.lock_all()
            with nogil:
                self.undo(plan.plan.parts)
                for t in range(plan.tables):
                    for i in range(EC_TOTALS):
                        self.work.sides[t].totals[i] -= plan.plan.parts[t].totals[i]
                    ec_part_free(&plan.plan.parts[t])
                self.unlock_tables(self.work.tables)
            plan.plan.state = EC_CANCELLED
            if plan.notice is not None:
                (<Notice>plan.notice).at = GIVEN
            self.forget(at)
            self.last_step -= 1
            self.epoch += 1
        finally:
            self.leave()

    def take_back(self, Plan plan not None):
        """The rows of the newest plan, which has not trained, are about to go back: it counts as not moved, for `cancel`.

        The caller copies the rows of ``swap_out_*`` from the host into their slots. What was swapped in needs no way back.

        Raises
        ------
        PlanError
            If a later plan was made that was not cancelled, its rows are not in, or rows were changed from outside since it was made, and what it
            undoes might be one of them. Nothing changes.
        """
        self.enter()
        try:
            self.order_of(plan, EC_SWAPPED_IN, "take back")
            if plan.step != self.last_step:  # later ones that have finished are built upon it as well
                raise PlanError(f"take back: step {self.last_step} was planned after step {plan.step}; take back the newest plan first")
            if plan.hands != self.hands:
                raise PlanError(f"take back: rows were changed from outside since step {plan.step} was planned; finish it")
            plan.plan.state = EC_PLANNED
            self.epoch += 1
        finally:
            self.leave()

    def mark_swapped_out(self, Plan plan not None):
        """The rows of ``swap_out_*`` are in the host table now.

        Raises
        ------
        PlanError
            If an earlier plan has not been swapped in, or this one was swapped out before.
        """
        self.enter()
        try:
            at = self.order_of(plan, EC_PLANNED, "swap-out")
            self.check_turn(at, "swapped out")
            plan.plan.state = EC_SWAPPED_OUT
            self.epoch += 1
        finally:
            self.leave()

    def mark_swapped_in(self, Plan plan not None):
        """The rows of ``swap_in_*`` are in their slots now.

        Raises
        ------
        PlanError
            If the plan has not been swapped out, or was swapped in before.
        """
        self.enter()
        try:
            self.check_turn(self.order_of(plan, EC_SWAPPED_OUT, "swap-in"), "swapped in")
            plan.plan.state = EC_SWAPPED_IN
            self.epoch += 1
        finally:
            self.leave()

    cdef int check_turn(self, int64_t at, str doing) except -1:
        """PlanError unless every plan before number `at` has been swapped in."""
        for earlier in self.unfinished[:at]:
            if (<Plan>earlier).plan.state < EC_SWAPPED_IN:
                raise PlanError(f"step {self.unfinished[at].step} cannot be {doing} before step {earlier.step} is swapped in; swap in the order of the plans")

    def finish(self, Plan plan not None):
        """The batch has trained, or its result was given up: its pins end, what it evicted is gone for good.

        Raises
        ------
        PlanError
            If the plan has not been swapped in, or was finished before.
        """
        cdef int64_t t
        self.enter()
        try:
            at = self.order_of(plan, EC_SWAPPED_IN, "finish")
            self.lock_all()
            with nogil:
                for t in range(plan.tables):
                    ec_plan_finish(&self.work.sides[t], &plan.plan.parts[t])
                self.unlock_tables(self.work.tables)
            plan.plan.state = EC_FINISHED
            if plan.notice is not None:
                self.end_notice(plan.notice, SPENT)
            self.forget(at)
            self.epoch += 1
        finally:
            self.leave()

    # -------------------------------------------------------------------------------------------------- batches to come

    def look_ahead(self, keys, table_offsets):
        """Take notice of the keys of a batch to come, for the policy ``"lookahead"``.

        Give notice of each batch once, in the order in which they are expected, as far ahead as pays (some multiples of the
        slots). It changes nothing but who will be a victim. A window of n keys takes O(n) time and about 12 bytes
        a distinct key of a batch plus some 80 a distinct key of the window.

        Parameters
        ----------
        keys, table_offsets : int64[n], int64[T + 1]
            As for `plan`: all keys of the batch, any number of times.

        Returns
        -------
        Notice

        Raises
        ------
        ConfigError
            The policy is another one.
        ShapeError
        HostMemoryError
            In each case nothing has changed.
        """
        cdef Notice notice = Notice.__new__(Notice)
        self.notice_into(notice, keys, table_offsets)
        return notice

    cdef int notice_into(self, Notice notice, keys, table_offsets) except -1:
        """`look_ahead`, told by `notice`, which is nobody's."""
        cdef const int64_t[::1] key_view = int64_array("keys", keys, -1)
        cdef int64_t n = key_view.shape[0]
        cdef const int64_t[::1] offset_view = int64_array("table_offsets", table_offsets, self.work.tables + 1)
        cdef int64_t t
        cdef int status
        self.check_batch(offset_view, n)
        self.enter()
        try:
            if not self.looks:
                raise ConfigError('look_ahead: this SwapManager does not look ahead; make it with policy="lookahead"')
            if not self.notice_ids and <uint32_t>len(self.notices) >= EC_NOTICES_MAX:
                raise HostMemoryError(f"look_ahead: {len(self.notices)} notices are not spent; plan their batches, or withdraw them")
            notice.id = self.notice_ids[len(self.notice_ids) - 1] if self.notice_ids else len(self.notices)
            self.notices[notice.id] = notice  # now, since nothing may fail once it counts
            self.look.id = notice.id
            self.look.number = self.notice_number + 1
            self.look.keys = &key_view[0] if n > 0 else NULL
            self.look.offsets = &offset_view[0]
            with nogil:
                status = self.take_notice(self.threads_for(n))
            if status != EC_OK:
                del self.notices[notice.id]
                if status == EC_LIMIT:
                    raise HostMemoryError("look_ahead: a table is at its limit of keys to come; nothing has changed")
                raise host_memory("taking notice of a batch")
            if self.notice_ids:
                self.notice_ids.pop()
            self.notice_number += 1
            notice.block = self.look.block
            notice.bytes = self.look.bytes
            notice.number = self.notice_number
            notice.owner = self.number
            notice.num_keys = n
            notice.num_uniques = 0
            for t in range(self.work.tables):
                notice.num_uniques += self.look.parts[t].count
            notice.at = GIVEN
        finally:
            self.leave()

    cdef int take_notice(self, int threads) noexcept nogil:
        """The phases of ec_notice.h. On failure the state is as it was."""
        cdef ec_look *look = &self.look
        cdef int64_t t
        cdef int status = ec_look_scratch(look)
        if status != EC_OK:
            return status
        parallel_for(ec_phase_look_collect, look, look.tables, threads)
        for t in range(look.tables):
            if look.parts[t].status != EC_OK:
                status = look.parts[t].status
                break
        if status == EC_OK:
            status = ec_look_reserve(look)
        if status != EC_OK:
            ec_look_undo(look)
            return status
        parallel_for(ec_phase_look_link, look, look.tables, threads)
        return EC_OK

    cdef Notice counting(self, object notice, str doing):
        """`notice` if it is ours and waits for its batch, None if it was withdrawn; PlanError otherwise."""
        if not isinstance(notice, Notice):
            raise PlanError(f"{doing}: notice = {notice!r}; give what look_ahead returned")
        if (<Notice>notice).at == WITHDRAWN:
            return None
        if (<Notice>notice).owner != self.number:
            raise PlanError(f"{doing}: notice {notice.number} is of another SwapManager")
        if (<Notice>notice).at != GIVEN:
            raise PlanError(f"{doing}: notice {notice.number} is {notice.state}; its batch has been planned")
        return notice

    cdef int end_notice(self, Notice notice, int at) except -1:
        """The core has forgotten a notice."""
        notice.end(at)
        del self.notices[notice.id]
        self.notice_ids.append(notice.id)

    def withdraw(self, notice):
        """Take a notice back: its batch will not be planned, or not yet. Twice is allowed.

        Raises
        ------
        PlanError
            The notice is another SwapManager's, or its batch has been planned.
        """
        cdef int64_t t
        cdef Notice counts
        self.enter()
        try:
            counts = self.counting(notice, "withdraw")
            if counts is None:
                return
            with nogil:
                for t in range(self.work.tables):
                    ec_side_withdraw(&self.work.sides[t], counts.id)
            self.end_notice(counts, WITHDRAWN)
        finally:
            self.leave()

    def adopt_notices(self, SwapManager other not None):
        """Go on with the notices that wait for their batches in `other`, a planner that this one takes the place of.

        They stay the same objects. Where memory does not suffice the rest is withdrawn, which makes no difference to results.
        """
        for notice in other.notices_given:
            keys, offsets = other.noticed(notice)
            other.withdraw(notice)
            (<Notice>notice).owner = self.number
            try:
                self.notice_into(notice, keys, offsets)
            except HostMemoryError:
                pass

    def noticed(self, notice):
        """The distinct keys of a notice, table by table in order of first occurrence, and the tables' offsets.

        None are left once it was withdrawn.

        Returns
        -------
        keys : int64[U]
        table_offsets : int64[T + 1]
        """
        cdef int64_t t
        cdef Notice counts
        cdef int64_t[::1] key_view, offset_view
        self.enter()
        try:
            counts = self.counting(notice, "noticed")
            keys, offsets = np.empty(notice.num_uniques + 1, np.int64), np.zeros(self.work.tables + 1, np.int64)
            key_view, offset_view = keys, offsets
            for t in range(self.work.tables if counts is not None else 0):
                offset_view[t + 1] = offset_view[t] + ec_side_noticed_count(&self.work.sides[t], counts.id)
                ec_side_noticed(&self.work.sides[t], counts.id, &key_view[offset_view[t]])
            return keys[: offsets[self.work.tables]], offsets
        finally:
            self.leave()

    @property
    def notices_given(self):
        """Notices that wait for their batches, in the order they were given."""
        self.enter()
        try:
            return tuple([notice for notice in self.notices.values() if notice.state == "given"])
        finally:
            self.leave()

    # ---------------------------------------------------------------------------------------------------- slots and rows

    def grow(self, table, new_capacity):
        """Give a table more slots; residents keep theirs (counted from the table's base).

        Unfinished plans go on, but the slots in their arrays are those of before: whoever uses them counts them from
        the new bases, and keys that are not admitted have the new constant slot.

        Raises
        ------
        PlanError
            While an unfinished plan is not swapped in.
        ConfigError
            If `new_capacity` is not an integer from the present capacity to 2**31 - 1.
        HostMemoryError
        """
        cdef ec_side *side
        cdef int64_t capacity
        cdef int status
        self.enter()
        try:
            self.check_still("grow")
            side = &self.work.sides[self.table_number(table)]
            self.check_capacity(self.tables[table], new_capacity)
            capacity = new_capacity
            if capacity < side.cache.capacity:
                raise ConfigError(f"table {self.tables[table].name!r}: new_capacity = {capacity} is below the present {side.cache.capacity}; slots cannot be taken away")
            if capacity == side.cache.capacity:
                return
            with nogil:
                status = ec_cache_grow(&side.cache, capacity)
            if status != EC_OK:
                raise host_memory(f"growing table {self.tables[table].name!r} to {capacity} slots")
            if not self.bases_given:
                self.default_bases()
            self.epoch += 1
        finally:
            self.leave()

    def set_bases(self, bases):
        """Say where each table's slots begin in the whole buffer (int64[T]); the constant slot follows the last one.

        Raises
        ------
        PlanError
            While an unfinished plan is not swapped in (see `grow` about those that are).
        """
        cdef const int64_t[::1] view = int64_array("bases", bases, self.work.tables)
        cdef int64_t t
        for t in range(self.work.tables):
            if view[t] < 0:
                raise ConfigError(f"bases: {view[t]} for table {self.tables[t].name!r}; give a number >= 0")
        self.enter()
        try:
            self.check_still("set_bases")
            for t in range(self.work.tables):
                self.work.sides[t].base = view[t]
            self.bases_given = 1
            self.epoch += 1
        finally:
            self.leave()

    cdef int overlay(self, int64_t t) except -1:
        """Make table t's overlay of unfinished plans current."""
        cdef ec_overlay *overlay = &self.overlays[t]
        cdef int64_t count = len(self.unfinished)
        cdef int status
        if overlay.epoch == self.epoch and self.epoch > 0:
            return 0
        with nogil:
            status = ec_overlay_make(overlay, &self.work.sides[t], t, self.plans, count)
        if status != EC_OK:
            overlay.epoch = 0
            raise host_memory("looking at unfinished plans")
        overlay.epoch = self.epoch
        return 0

    def peek(self, keys, table):
        """Where the rows of keys are now, as of the last finished training batch (I6). Changes nothing.

        Parameters
        ----------
        keys : int64[n]
        table : int

        Returns
        -------
        slots : int64[n]
            Slot in the whole buffer, or -1.
        rows : int64[n]
            Row index in the host table, or -1.
        state : uint8[n]
            `PEEK_SLOT`: read the slot. `PEEK_ROW`: read the host row. `PEEK_ABSENT`: the key has no row and reads its
            initial value. `PEEK_DEFAULT`: the key has no row and reads the filter's default value.

        Notes
        -----
        The answer holds until the next call that changes the manager.
        """
        cdef const int64_t[::1] view = int64_array("keys", keys, -1)
        cdef int64_t n = view.shape[0]
        slots = np.empty(n, np.int64)
        rows = np.empty(n, np.int64)
        state = np.empty(n, np.uint8)
        cdef int64_t[::1] slot_view = slots
        cdef int64_t[::1] row_view = rows
        cdef uint8_t[::1] state_view = state
        cdef int64_t t
        self.enter()
        try:
            t = self.table_number(table)
            self.overlay(t)
            if n > 0:
                self.lock_table(t, 0)
                with nogil:
                    ec_peek(&self.overlays[t], &self.work.sides[t], &view[0], n, &slot_view[0], &row_view[0], &state_view[0])
                    table_unlock(self.work.sides[t].table)
            return slots, rows, state
        finally:
            self.leave()

    def unsettled(self, table):
        """Host rows that `peek` shows otherwise than the host table, because the plans behind that have not finished.

        Returns
        -------
        born : int64[k]
            Live rows of keys that `peek` does not show in them yet.
        evicted : int64[m]
            Rows in limbo of keys that `peek` still shows.
        dead : int
            Live rows that `peek` does not show because a sweep has killed their keys; counted in O(rows) while its pass
            is under way.
        """
        cdef int64_t t, k, room = 1, born_count, evicted_count, dead
        cdef int64_t[::1] born_view, evicted_view
        self.enter()
        try:
            t = self.table_number(table)
            self.overlay(t)
            for k in range(len(self.unfinished)):
                room += self.plans[k].parts[t].births.size
            born, evicted = np.empty(room, np.int64), np.empty(self.overlays[t].records.size + 1, np.int64)
            born_view, evicted_view = born, evicted
            self.lock_table(t, 0)
            born_count = ec_born_rows(&self.work.sides[t], t, self.plans, len(self.unfinished), &born_view[0])
            evicted_count = ec_evicted_rows(&self.overlays[t], &self.work.sides[t], &evicted_view[0])
            with nogil:
                dead = ec_dead_rows(&self.overlays[t], &self.work.sides[t])
                table_unlock(self.work.sides[t].table)
            return np.unique(born[:born_count]), evicted[:evicted_count], dead
        finally:
            self.leave()

    def drop(self, table, keys):
        """Forget the resident copies of keys: what they hold is discarded, their counters go to the host columns.

        For changes of host rows from outside: drop first, then change.

        Returns
        -------
        int
            Copies dropped.

        Raises
        ------
        PinnedKeyError
            If an unfinished plan uses, moves, made or evicted one of the keys. Nothing is dropped then.
        """
        cdef const int64_t[::1] view = int64_array("keys", keys, -1)
        cdef int64_t n = view.shape[0]
        cdef int64_t t, first, dropped = 0
        self.enter()
        try:
            t = self.table_number(table)
            if n == 0:
                return 0
            self.overlay(t)
            self.lock_table(t, 1)
            with nogil:
                first = ec_first_in_use(&self.overlays[t], &self.work.sides[t], &view[0], n)
                if first == n:
                    dropped = ec_side_drop(&self.work.sides[t], &view[0], n)
                table_unlock(self.work.sides[t].table)
            if first < n:
                raise PinnedKeyError(f"table {self.tables[t].name!r}: key {view[first]} is in use by an unfinished batch; finish or cancel it first")
            self.epoch += 1
            self.hands += 1
            return dropped
        finally:
            self.leave()

    def forget_waiting(self, table, keys):
        """Remove the counters of keys that wait in the filter (they have no row yet): they qualify from the start again.

        Returns
        -------
        int
            How many of the keys were waiting; 0 for a table without a filter.

        Raises
        ------
        PinnedKeyError
            If an unfinished plan has counted one of the keys, or uses, moves, made or evicted it. Nothing changes then.
        """
        cdef const int64_t[::1] view = int64_array("keys", keys, -1)
        cdef int64_t n = view.shape[0]
        cdef int64_t[::1] counting_view
        cdef int64_t t, k, first, room = 0, forgotten = 0
        self.enter()
        try:
            t = self.table_number(table)
            if n == 0 or self.filters[t] is None:
                return 0
            self.overlay(t)
            self.lock_table(t, 0)
            with nogil:
                first = ec_first_in_use(&self.overlays[t], &self.work.sides[t], &view[0], n)
                if first == n:
                    first = ec_first_dying(&self.work.sides[t], &view[0], n)
                table_unlock(self.work.sides[t].table)
            for k in range(len(self.unfinished)):
                room += self.plans[k].parts[t].changes.size
            if first == n and room > 0:
                counting = np.empty(room, np.int64)
                counting_view = counting
                ec_counting_keys(&self.work.sides[t], t, self.plans, len(self.unfinished), &counting_view[0])
                counted = np.flatnonzero(np.isin(keys, counting))
                first = counted[0] if len(counted) else n
            if first < n:
                raise PinnedKeyError(f"table {self.tables[t].name!r}: key {view[first]} is in use by an unfinished batch; finish or cancel it first")
            with nogil:
                forgotten = ec_side_forget_waiting(&self.work.sides[t], &view[0], n)
            self.epoch += 1
            return forgotten
        finally:
            self.leave()

    def residents(self, table):
        """Keys with a slot, in slot order, those of unfinished plans included.

        Returns
        -------
        keys, slots, rows, freq, ts : int64 arrays
            Slots of the whole buffer, host rows, and the counters beside the slot (0 without a filter).
        """
        cdef int64_t t, slot, i = 0
        cdef ec_side *side
        cdef int64_t[:, ::1] view
        self.enter()
        try:
            t = self.table_number(table)
            side = &self.work.sides[t]
            found = np.empty((5, side.cache.live), np.int64)
            view = found
            with nogil:
                for slot in range(side.cache.capacity):
                    if side.cache.state[slot] == EC_SLOT_LIVE:
                        view[0, i] = side.cache.slots[slot].key
                        view[1, i] = side.base + slot
                        view[2, i] = side.cache.slots[slot].row
                        view[3, i] = side.cache.slots[slot].freq
                        view[4, i] = side.cache.slots[slot].last
                        i += 1
            return tuple(found)
        finally:
            self.leave()

    def recency(self, table):
        """Keys with a slot (int64), the next victim first if none of them is used any more (see `standings`)."""
        return self.standings(table)["keys"]

    def standings(self, table):
        """How the keys of a table stand with the policy: all that its choices depend on besides pins.

        Returns
        -------
        dict
            ``keys`` (int64[live]): keys with a slot, by rank, then by when they got their place; under ``"lru"`` and
            ``"lfu"`` that is the order of eviction. ``ranks``: 0 under ``"lru"``; the priority under ``"lfu"``; 0 in
            the small list and 1 in the main list under ``"s3fifo"``. ``uses``: as counted by ``"lfu"`` and ``"s3fifo"``.
            ``ghosts``: keys that ``"s3fifo"`` remembers, in order of their loss.
        """
        cdef int64_t t, got
        cdef ec_side *side
        cdef int64_t[:, ::1] view
        cdef int64_t[::1] ghost_view
        self.enter()
        try:
            t = self.table_number(table)
            side = &self.work.sides[t]
            found, ghosts = np.empty((4, side.cache.live + 1), np.int64), np.empty(side.cache.policy.ghost.span + 1, np.int64)
            view, ghost_view = found, ghosts
            with nogil:
                ec_side_standings(side, &view[0, 0], &view[1, 0], &view[2, 0], &view[3, 0])
                got = ec_side_ghosts(side, &ghost_view[0])
            keys, ranks, versions, uses = found[:, : side.cache.live]
            order = np.lexsort((versions, ranks))
            return {"keys": keys[order], "ranks": ranks[order], "uses": uses[order], "ghosts": ghosts[:got]}
        finally:
            self.leave()

    # -------------------------------------------------------------------------------------------------------- filter state

    cdef FeatureFilter filter_of(self, int64_t t):
        """The filter of table t, or ConfigError."""
        if self.filters[t] is None:
            raise ConfigError(f"table {self.tables[t].name!r} has no filter")
        return self.filters[t]

    def filter_state(self, table):
        """Counters of every key that the filter knows, unfinished plans included, wherever they are kept.

        Returns
        -------
        dict
            ``keys``, ``counts``, ``last`` (int64, sorted by key; last is -2**63 where there was no timestamp),
            ``has_row`` (uint8), ``newest`` (int), ``epoch`` (int; show/click: sweeps so far), ``step`` (int).

        Raises
        ------
        ConfigError
            If the table has no filter.
        """
        cdef int64_t t, i, got, cursor = 0, waiting
        cdef ec_side *side
        cdef FeatureFilter waiters
        cdef int64_t[:, ::1] view
        self.enter()
        try:
            t = self.table_number(table)
            waiters = self.filter_of(t)
            side = &self.work.sides[t]
            waiting = waiters.size()
            parts = []
            if waiting > 0:
                chunk = np.zeros((4, waiting), np.int64)
                view = chunk
                got = waiters.export(&view[0, 0], &view[1, 0], &view[2, 0])
                parts.append(chunk[:, :got])
            if side.cache.live > 0:
                chunk = np.ones((4, side.cache.live), np.int64)
                view = chunk
                got = 0
                for i in range(side.cache.capacity):
                    if side.cache.state[i] == EC_SLOT_LIVE and not ec_side_slot_dead(side, &side.cache.slots[i]):
                        view[0, got] = side.cache.slots[i].key
                        view[1, got] = side.cache.slots[i].freq
                        view[2, got] = side.cache.slots[i].last
                        got += 1
                parts.append(chunk[:, :got])
            self.lock_table(t, 0)
            try:
                while True:
                    chunk = np.empty((4, SCAN_ROWS), np.int64)
                    view = chunk
                    with nogil:
                        got = ec_side_scan(side, &cursor, &view[0, 0], &view[1, 0], &view[2, 0], SCAN_ROWS)
                    if got < 0:
                        break
                    chunk[3] = 1
                    parts.append(chunk[:, :got])
            finally:
                table_unlock(side.table)
            every = np.concatenate(parts, axis=1) if parts else np.empty((4, 0), np.int64)
            every = every[:, np.argsort(every[0], kind="stable")]
            return {
                "keys": every[0].copy(), "counts": every[1].copy(), "last": every[2].copy(), "has_row": every[3].astype(np.uint8),
                "newest": int(side.filter.newest), "epoch": int(side.filter.epoch), "step": int(self.last_step),
            }
        finally:
            self.leave()

    def write_counters(self, table):
        """Write the counters of residents to the host columns, for whoever reads those; they stay beside the slots, too."""
        cdef int64_t t
        self.enter()
        try:
            t = self.table_number(table)
            self.lock_table(t, 1)
            with nogil:
                ec_side_write_counters(&self.work.sides[t])
                table_unlock(self.work.sides[t].table)
        finally:
            self.leave()

    def export_filter(self, table):
        """`FeatureFilter.state` of a table, between steps.

        Raises
        ------
        PlanError
            While a plan is unfinished.
        ConfigError
            If the table has no filter.
        """
        self.enter()
        try:
            self.check_settled("export_filter")
            return self.filter_of(self.table_number(table)).state()
        finally:
            self.leave()

    def import_filter(self, table, state):
        """`FeatureFilter.load` of a table, between steps, before anything was planned for it.

        Counters of keys with rows must be in the host columns, and no row resident. Steps go on with `start_at`.

        Raises
        ------
        PlanError
            While a plan is unfinished.
        ConfigError
            The table has no filter, or has residents; or `state` does not fit.
        HostMemoryError
            In each case nothing has changed.
        """
        cdef int64_t t
        self.enter()
        try:
            self.check_settled("import_filter")
            t = self.table_number(table)
            if self.work.sides[t].cache.live > 0:
                raise ConfigError(f"table {self.tables[t].name!r} has {self.work.sides[t].cache.live} residents; load its filter into a new manager")
            self.filter_of(t).load(state)
            self.epoch += 1
        finally:
            self.leave()

    def scores(self, table, counts, last):
        """Show/click: scores of counters (int64[n] each) as `residents` and the host columns have them, float64[n]."""
        self.enter()
        try:
            return self.filter_of(self.table_number(table)).scores(counts, last)
        finally:
            self.leave()

    def start_at(self, step):
        """Number the next plan step + 1: this manager goes on where another one stopped.

        Raises
        ------
        PlanError
            While a plan is unfinished.
        ConfigError
            `step` is before this manager's last step.
        """
        cdef int64_t value = step
        self.enter()
        try:
            self.check_settled("start_at")
            if value < self.last_step:
                raise ConfigError(f"step = {value} is before this manager's step {self.last_step}")
            self.last_step = value
        finally:
            self.leave()

    # -------------------------------------------------------------------------------------------------------- looking at it

    @property
    def num_tables(self):
        return len(self.tables)

    @property
    def step(self):
        """Number of the last planned training step; 0 before the first."""
        return self.last_step

    @property
    def outstanding(self):
        """Unfinished plans, oldest first."""
        self.enter()
        try:
            return tuple(self.unfinished)
        finally:
            self.leave()

    def capacity(self, table):
        """Slots of a table, its constant slot not counted."""
        return self.figure(table, "capacity")

    def base(self, table):
        """Where a table's slots begin in the whole buffer."""
        return self.figure(table, "base")

    def free_slots(self, table):
        """Slots that hold no key."""
        return self.figure(table, "free")

    def pinned(self, table):
        """Slots that unfinished plans use."""
        return self.figure(table, "pinned")

    cdef object figure(self, object table, str name):
        """One number of a table, by its name in stats(), or its base."""
        self.enter()
        try:
            side = self.table_number(table)
            if name == "base":
                return self.work.sides[side].base
            return self.numbers(side)[name]
        finally:
            self.leave()

    cdef dict numbers(self, int64_t t):
        """Totals and present figures of table t."""
        cdef ec_side *side = &self.work.sides[t]
        return {
            "hits": side.totals[EC_HITS],
            "misses": side.totals[EC_MISSES],
            "swap_in_rows": side.totals[EC_MISSES],
            "swap_out_rows": side.totals[EC_SWAP_OUT_ROWS],
            "admitted": side.totals[EC_ADMITTED],
            "rejected": side.totals[EC_REJECTED],
            "evicted": side.totals[EC_EVICTED],
            "forgotten": side.totals[EC_FORGOTTEN],
            "born": side.totals[EC_BORN],
            "capacity": side.cache.capacity,
            "resident": side.cache.live,
            "free": side.cache.free.count,
            "pinned": side.cache.pinned,
            "coming_keys": side.cache.policy.coming.index.size,
            "coming_uses": side.cache.policy.coming.uses,
            "coming_bytes": ec_side_coming_bytes(side),
        }

    def stats(self):
        """Totals since the start (cancelled plans do not count) and present figures, one dict a table.

        ``hits``, ``misses``: unique keys of batches that were, or were not, resident; ``admitted``, ``rejected``: unique keys
        that got a slot, or did not; ``evicted``: keys that a sweep took the row of; ``forgotten``: keys swept before they
        had one; ``born``: rows made; ``swap_in_rows``, ``swap_out_rows``; ``capacity``, ``resident``, ``free``, ``pinned``: slots now;
        ``coming_keys``, ``coming_uses``: distinct keys that notices name, and how often, a notice counted once;
        ``coming_bytes``: memory held for that;
        ``dead``: rows of the host table that a sweep has killed and its pass has not taken away yet. `evicted` and `forgotten`
        count from the sweep on; while a pass is under way that takes a look at every row.
        """
        cdef int64_t t, rows, waiting
        self.enter()
        try:
            every = []
            for t in range(self.work.tables):
                numbers = self.numbers(t)
                self.lock_table(t, 0)
                with nogil:
                    ec_side_count_dead(&self.work.sides[t], &rows, &waiting)
                    table_unlock(self.work.sides[t].table)
                numbers["evicted"] += rows
                numbers["forgotten"] += waiting
                numbers["dead"] = rows
                every.append(numbers)
            return every
        finally:
            self.leave()

    def check(self):
        """Check the invariants of slots, order, filters and host tables.

        Raises
        ------
        AssertionError
            If one does not hold: our own mistake.
        """
        cdef int64_t t
        cdef int status
        self.enter()
        try:
            for t in range(self.work.tables):
                self.lock_table(t, 0)
                with nogil:
                    status = ec_side_check(&self.work.sides[t])
                    table_unlock(self.work.sides[t].table)
                if status != EC_OK:
                    raise AssertionError(f"planner, table {self.tables[t].name!r}: an invariant does not hold")
        finally:
            self.leave()

    # ----------------------------------------------------------------------------------------------------------------- end

    cdef list lock_living(self, bint closing):
        """Lock for writing, in order, all host tables that can still be changed, and return their numbers.

        A table whose directory has failed is passed over. What else keeps one from being locked is raised, and none is
        locked then; while `closing`, that table is passed over too.
        """
        cdef int64_t t
        cdef int status
        living = []
        for t in range(self.work.tables):
            with nogil:
                status = table_lock(self.work.sides[t].table, 1)
            if status == EC_OK:
                living.append(t)
            elif not closing and not (status == EC_DISK and self.tables[t].directory.failed):
                failure = self.lock_failure(t, status)
                self.unlock_living(living)
                raise failure
        return living

    cdef int unlock_living(self, list living) except -1:
        cdef int64_t t
        for t in living:
            table_unlock(self.work.sides[t].table)

    cdef int end_plans(self, list living) except -1:
        """Undo the plans that were only made and finish the others, in the tables `living`, which are locked."""
        cdef int64_t k, t
        for k in reversed(range(len(self.unfinished))):
            if self.plans[k].state == EC_PLANNED:
                for t in range(self.work.tables):
                    if t in living:
                        ec_plan_undo(&self.work.sides[t], &self.plans[k].parts[t])
                    else:
                        ec_plan_unsee(&self.work.sides[t], &self.plans[k].parts[t])
                self.plans[k].state = EC_CANCELLED
                if (<Plan>self.unfinished[k]).notice is not None:
                    (<Notice>(<Plan>self.unfinished[k]).notice).at = GIVEN
                self.last_step -= 1
        for k in range(len(self.unfinished)):
            if self.plans[k].state != EC_CANCELLED:
                for t in range(self.work.tables):
                    if t in living:
                        ec_plan_finish(&self.work.sides[t], &self.plans[k].parts[t])
                    else:
                        ec_plan_seen(&self.work.sides[t], &self.plans[k].parts[t])
                self.plans[k].state = EC_FINISHED
                if (<Plan>self.unfinished[k]).notice is not None:
                    self.end_notice((<Plan>self.unfinished[k]).notice, SPENT)
        self.unfinished = []
        self.epoch += 1

    def settle(self):
        """End all plans before `close`: those that were only made are undone, others count as finished.

        In tables whose directory has failed they stay as they are: nothing of these can be changed.

        Raises
        ------
        ClosedError, DiskFullError, StorageError
            A table is closed, or its directory cannot be marked. Nothing has changed.
        """
        self.enter()
        try:
            living = self.lock_living(False)
            self.end_plans(living)
            self.unlock_living(living)
        finally:
            self.leave()

    def close(self):
        """Give the memory back. Counters of residents go to the host columns; their rows do not: write them back before.

        Plans that were only made are undone, others count as finished. Tables that cannot be changed any more are passed over.
        Closing twice is allowed.
        """
        cdef int64_t t
        if self.closed and self.process == process_mark():
            return
        self.enter()
        try:
            living = self.lock_living(True)
            self.end_plans(living)
            for t in living:
                ec_side_retire(&self.work.sides[t])
            self.unlock_living(living)
            self.closed = 1
            for notice in self.notices.values():
                (<Notice>notice).end(WITHDRAWN)
            self.notices = {}
            self.free_all()
        finally:
            self.leave()

    cdef void free_all(self) noexcept:
        """Free every structure; what is not there yet, or no longer, is passed over."""
        cdef int64_t t
        for t in range(self.work.tables):
            if self.work.sides != NULL:
                ec_cache_free(&self.work.sides[t].cache)
            if self.overlays != NULL:
                ec_overlay_free(&self.overlays[t])
        ec_look_free(&self.look)
        ec_work_free(&self.work)
        free(self.work.sides)
        free(self.overlays)
        free(self.plans)
        self.work.sides = NULL
        self.overlays = NULL
        self.plans = NULL

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _fail_allocation(int64_t countdown):
    """For tests: the planner's memory request number `countdown` from now (0: the next) fails, once; -1 turns it off."""
    global ec_take_countdown
    ec_take_countdown = countdown


def _age_dedup(SwapManager manager, uint32_t base):
    """For tests: as if so many stamps had been given out by the manager's probe tables."""
    cdef int i
    for i in range(manager.work.dedup_count):
        manager.work.dedup[i].base = max(manager.work.dedup[i].base, base)


def _set_isa(SwapManager manager, str isa):
    """For tests: the clone of a sweep's pass over timestamps, "baseline" or "auto". Returns the one in use from now on."""
    manager.work.avx2 = isa != "baseline" and ec_cpu_has_avx2()
    return "avx2" if manager.work.avx2 else "baseline"


def _set_long_ago(SwapManager manager, uint32_t uses):
    """For tests: a number of uses of slots that need not go by to be many."""
    manager.work.long_ago = uses


def _looked_at(SwapManager manager, int64_t table):
    """For tests: slots, entries and lists that a table's policy has looked at to find victims, so far."""
    cdef const ec_policy *policy = &manager.work.sides[table].cache.policy
    return policy.looked + policy.recency.looked


def _set_bracket(SwapManager manager, double bracket):
    """For tests: brackets of selections that miss more often (0), or are too wide (10)."""
    manager.work.bracket = bracket
