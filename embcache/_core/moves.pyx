"""Moves: rows of plans between the host tables of a collection and its device buffer, all tables in one call (ec_moves.h).

Owns no row: it knows where tables and, on a device whose memory is the host's, the arrays of slots are, and which rows are
under way from the device. Given to `SwapManager.plan`, planning and moving are one call without the GIL: plan, rows out, rows in;
or, where rows go through staging memory, plan, and rows from the host tables into a block.

Invariants. A row that is under way is read from where it is, or noted as awaited, never from its old host row (promise I5). Rows
leave their slots before others take them.

Thread safety: none of its own; the manager's door guards it. Host tables are locked as long as their rows are copied.
"""

from cython cimport final
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from embcache._core.plan cimport Plan, ec_arrays
from embcache._core.table cimport EC_OK, Table, ec_type_bytes, table_lock, table_unlock
from embcache._core.threads cimport parallel_for, resolve_threads

from embcache.errors import HostMemoryError, PlanError, ShapeError

cdef extern from "ec_vec.h":
    int64_t ec_take_countdown

cdef extern from *:
    """
    #include <time.h>
    static double ec_moves_seconds(void)
    {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    """
    double ec_moves_seconds() noexcept nogil

cdef enum:
    PARALLEL_FROM = 4096  # rows below which waking the pool costs more than it gives


@final
cdef class Moves:
    """Moves rows of plans, for all tables of a collection.

    Parameters
    ----------
    tables : sequence of Table
        As the planner has them.
    groups : sequence of (int, int, sequence of int)
        First table, last table (exclusive) and floats of a row of each state array, of the tables that share arrays. Adjacent.
    num_threads : int, optional

    Attributes
    ----------
    direct : bool
        Whether rows are copied between tables and arrays (`use_arrays`), rather than blocks.
    gathered : bool
        Whether the plan that was last made with it has its rows in their slots, or in the block: false where that was too small.

    Raises
    ------
    HostMemoryError
    """

    def __cinit__(self, tables, groups, num_threads=None):
        cdef int64_t g, p, t
        memset(&self.m, 0, sizeof(self.m))
        memset(&self.transit, 0, sizeof(self.transit))
        self.tables = list(tables)
        self.arrays = []
        groups = list(groups)
        self.num_threads = resolve_threads(num_threads)
        self.m.tables, self.m.groups = len(self.tables), len(groups)
        self.m.table = <ec_table **>calloc(self.m.tables, sizeof(ec_table *))
        self.m.group_of = <int64_t *>calloc(self.m.tables, sizeof(int64_t))
        self.m.first_task = <int64_t *>calloc(self.m.tables + 1, sizeof(int64_t))
        self.m.group = <ec_move_group *>calloc(self.m.groups, sizeof(ec_move_group))
        if self.m.table == NULL or self.m.group_of == NULL or self.m.first_task == NULL or self.m.group == NULL:
            raise HostMemoryError("out of host memory while making the moves of a collection; free some")
        t = 0
        for g, (first, last, widths) in enumerate(groups):
            if first != t or not first < last <= self.m.tables or len(widths) > EC_MOVE_PARTS:
                raise ShapeError(f"group {g} is {(first, last, widths)!r}; give adjacent ranges of {self.m.tables} tables, at most {EC_MOVE_PARTS} state arrays")
            for t in range(first, last):
                self.m.table[t] = (<Table>self.tables[t]).t
                self.m.group_of[t] = g
                if self.m.table[t].dim != self.m.table[<int64_t>first].dim or self.m.table[t].type != self.m.table[<int64_t>first].type or sum(widths) != self.m.table[t].state_dim:
                    raise ShapeError(f"group {g}: table {self.tables[t].name!r} has other rows; tables of a group share dim, dtype and state")
            t = last
            self.m.group[g].first, self.m.group[g].last, self.m.group[g].parts = first, last, len(widths)
            self.m.group[g].stride = self.m.table[<int64_t>first].dim * ec_type_bytes(self.m.table[<int64_t>first].type)
            for p in range(self.m.group[g].parts):
                self.m.group[g].widths[p] = widths[p]
        if t != self.m.tables:
            raise ShapeError(f"groups reach to table {t}; give groups of all {self.m.tables}")

    def __dealloc__(self):
        free(self.m.table)
        free(self.m.group_of)
        free(self.m.first_task)
        free(self.m.group)
        free(self.transit.index)
        free(self.transit.awaited)

    # ----------------------------------------------------------------------------------------------- where rows are outside

    def use_arrays(self, arrays):
        """Copy between tables and these from now on: for each group ``[weights, *states]``, C-contiguous, by slot; None: blocks.

        They are held until others are given.
        """
        cdef int64_t g, p
        cdef Py_buffer at
        kept = [] if arrays is None else [list(group) for group in arrays]
        if arrays is not None and [len(group) for group in kept] != [self.m.group[g].parts + 1 for g in range(self.m.groups)]:
            raise ShapeError("arrays: give weights and state arrays of each group")
        for g in range(self.m.groups):
            for p in range(self.m.group[g].parts + 1):
                if arrays is None:
                    self.m.group[g].weights = NULL
                    continue
                width = self.m.group[g].stride if p == 0 else self.m.group[g].widths[p - 1] * 4
                PyObject_GetBuffer(kept[g][p], &at, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
                try:
                    if at.len != len(kept[g][p]) * width:
                        raise ShapeError(f"arrays: number {p} of group {g} has {at.len} bytes in {len(kept[g][p])} rows; give {width} a row")
                    if p == 0:
                        self.m.group[g].weights = at.buf
                    else:
                        self.m.group[g].states[p - 1] = <float *>at.buf
                finally:
                    PyBuffer_Release(&at)
        self.arrays = kept
        self.direct = arrays is not None

    def use_block(self, block):
        """Bytes for the rows of the next plan, writable; None: there are none, and nobody waits for rows under way. Held until the next call."""
        self.block = NULL
        self.transit.awaited_count = 0
        self.block_bytes = 0
        if block is not None:
            self.block = self.address_of(block, 0)
            self.block_bytes = len(block)
        self.block_owner = block

    def block_needed(self, Plan plan not None, bint out=False):
        """Bytes of a block for the rows that come in, or that go out."""
        return ec_move_bytes(&self.m, plan.out.out_offsets if out else plan.out.in_offsets, -1, 0)

    def pieces(self, Plan plan not None, bint out=False):
        """What lies where in a block: ``(group, array, byte, first row, rows)`` of each array that has rows.

        Array 0 of a group is its weights. The slots, int64, are at byte 0, of all rows in their order.
        """
        cdef const int64_t *offsets = plan.out.out_offsets if out else plan.out.in_offsets
        cdef int64_t g, p
        found = []
        for g in range(self.m.groups):
            first, last = offsets[self.m.group[g].first], offsets[self.m.group[g].last]
            if last > first:
                found += [(g, p, ec_move_bytes(&self.m, offsets, g, p), first, last - first) for p in range(self.m.group[g].parts + 1)]
        return found

    cdef int check(self, Plan plan) except -1:
        if plan.tables != self.m.tables:
            raise PlanError(f"the plan of step {plan.step} is one of {plan.tables} tables; these are the moves of {self.m.tables}")
        return 0

    cdef char *address_of(self, object block, int64_t bytes) except NULL:
        cdef Py_buffer at
        cdef char *address
        PyObject_GetBuffer(block, &at, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
        address = <char *>at.buf
        short = at.len < bytes
        PyBuffer_Release(&at)
        if short or address == NULL:
            raise ShapeError(f"block of {len(block)} bytes; give {bytes}")
        return address

    # ------------------------------------------------------------------------------------------------------------- moving

    cdef int lock(self, const int64_t *offsets, bint write) except -1:
        """Lock the tables that have rows in a list; raises with none locked."""
        cdef int64_t t
        cdef int status = EC_OK
        with nogil:
            for t in range(self.m.tables):
                if offsets[t + 1] > offsets[t]:
                    status = table_lock(self.m.table[t], write)
                    if status != EC_OK:
                        self.unlock(offsets, t)
                        break
        if status != EC_OK:
            raise (<Table>self.tables[t]).failure(status, 0)
        return 0

    cdef void unlock(self, const int64_t *offsets, int64_t count) noexcept nogil:
        cdef int64_t t
        for t in range(count):
            if offsets[t + 1] > offsets[t]:
                table_unlock(self.m.table[t])

    cdef void home(self, const ec_move_list *list) noexcept nogil:
        """A list's rows into their tables, which are locked."""
        cdef int64_t t, tasks = ec_moves_begin(&self.m, list, NULL)
        parallel_for(ec_moves_home_task, &self.m, tasks, self.num_threads if list.offsets[self.m.tables] >= PARALLEL_FROM else 1)
        for t in range(self.m.tables):
            if list.offsets[t + 1] > list.offsets[t]:
                self.m.table[t].version += 1

    cdef void fetch(self, const ec_move_list *list) noexcept nogil:
        """A list's rows out of their tables, which are locked; but for those that are awaited."""
        cdef int64_t tasks = ec_moves_begin(&self.m, list, &self.transit if self.transit.under_way else NULL)
        self.transit.awaited_count = 0
        parallel_for(ec_moves_fetch_task, &self.m, tasks, self.num_threads if list.offsets[self.m.tables] >= PARALLEL_FROM else 1)

    cdef int chain(self, Plan plan) except -1:
        """Before a plan is made that `run` is going to be called for, of the same tables."""
        if self.direct and self.transit.under_way:
            raise PlanError("rows are under way from a device; land them first")
        self.gathered = False
        self.kept = None if self.direct else (plan, self.block_owner)
        return 0

    cdef void run(self, const ec_arrays *out) noexcept nogil:
        """The plan is made and its tables are locked for writing: move its rows, as far as that needs no device."""
        cdef ec_move_list leave, come
        cdef double begin = ec_moves_seconds()
        memset(self.times, 0, sizeof(self.times))
        come.rows, come.offsets, come.block = out.in_rows, out.in_offsets, self.block
        come.places = out.in_slots if self.direct else NULL
        if self.direct:
            leave.rows, leave.offsets, leave.places, leave.block = out.out_rows, out.out_offsets, out.out_slots, NULL
            self.home(&leave)
            self.times[1] = ec_moves_seconds() - begin
        elif self.block == NULL or ec_move_bytes(&self.m, out.in_offsets, -1, 0) > self.block_bytes:
            return
        self.fetch(&come)
        if not self.direct:
            memcpy(self.block, out.in_slots, <size_t>out.in_offsets[self.m.tables] * 8)
            self.wanted = come
        self.gathered = True
        self.times[2] = ec_moves_seconds() - begin - self.times[1]
        if self.transit.under_way and self.transit.arrived:
            self.home(&self.transit.list)
            self.transit.under_way = 0
            self.times[1] = ec_moves_seconds() - begin - self.times[2]

    @property
    def seconds(self):
        """What rows out, and rows in, took of the last plan that was made with this."""
        return self.times[1], self.times[2]

    def send(self, Plan plan not None):
        """Rows of ``swap_out_*`` from their slots into their tables."""
        cdef ec_move_list leave
        self.check(plan)
        if not self.direct:
            raise PlanError("rows of this device go through blocks")
        leave.rows, leave.places, leave.offsets, leave.block = plan.out.out_rows, plan.out.out_slots, plan.out.out_offsets, NULL
        self.lock(leave.offsets, True)
        with nogil:
            self.home(&leave)
            self.unlock(leave.offsets, self.m.tables)

    def bring(self, Plan plan not None, block=None, *, const int64_t[::1] slots=None, bint back=False):
        """Rows of ``swap_in_*`` from their tables into their slots, or into `block`, with the slots; those that are awaited are left out.

        Parameters
        ----------
        plan : Plan
        block : writable bytes, optional
            As large as `block_needed` says; where there are no arrays.
        slots : int64, optional
            Where the slots are now, if not where the plan says.
        back : bool
            The rows of ``swap_out_*`` instead, which return.
        """
        cdef ec_move_list come
        cdef const int64_t *places = plan.out.out_slots if back else plan.out.in_slots
        self.check(plan)
        memset(&come, 0, sizeof(come))
        come.rows = plan.out.out_rows if back else plan.out.in_rows
        come.offsets = plan.out.out_offsets if back else plan.out.in_offsets
        cdef int64_t n = come.offsets[self.m.tables]
        if slots is not None:
            if slots.shape[0] != n:
                raise ShapeError(f"slots: {slots.shape[0]} for {n} rows")
            places = &slots[0] if n else NULL
        if n == 0:
            return
        if self.direct:
            come.places = places
        else:
            come.block = self.address_of(block, ec_move_bytes(&self.m, come.offsets, -1, 0))
            self.kept = plan, block
            self.wanted = come
        self.lock(come.offsets, False)
        with nogil:
            if come.block != NULL:
                memcpy(come.block, places, <size_t>n * 8)
            self.fetch(&come)
            self.unlock(come.offsets, self.m.tables)
        self.gathered = True

    # ---------------------------------------------------------------------------------------------------------- under way

    @property
    def under_way(self):
        """Whether rows have left the device and not landed."""
        return bool(self.transit.under_way)

    @property
    def awaited(self):
        """Rows of the last `bring`, or of the last plan, that are under way and not in the block yet: `arrive` and `serve` are due."""
        return self.transit.awaited_count

    def prepare(self, Plan plan not None):
        """See that `depart` of a plan cannot fail: to be called before anything is asked of the device.

        Raises
        ------
        HostMemoryError
            Nothing has changed.
        PlanError
            Others are under way.
        """
        self.check(plan)
        if self.transit.under_way:
            raise PlanError("rows are under way from a device; land them first")
        if ec_transit_reserve(&self.transit, plan.out.out_offsets[self.m.tables]) != EC_OK:
            raise HostMemoryError(f"out of host memory while {plan.out.out_offsets[self.m.tables]} rows leave the device; nothing has changed: free some")

    def depart(self, Plan plan not None, block not None):
        """Rows of ``swap_out_*`` are under way into `block`, as `pieces` has it there; it is held until they have landed."""
        cdef ec_move_list leave
        memset(&leave, 0, sizeof(leave))
        leave.rows, leave.offsets = plan.out.out_rows, plan.out.out_offsets
        leave.block = self.address_of(block, ec_move_bytes(&self.m, leave.offsets, -1, 0))
        self.leaving = plan, block
        with nogil:
            ec_transit_begin(&self.transit, &self.m, &leave)

    def arrive(self):
        """The rows under way are in their block."""
        self.transit.arrived = 1

    def serve(self):
        """Put awaited rows, which have arrived, where they are wanted."""
        cdef int64_t i
        if self.transit.awaited_count and not self.transit.arrived:
            raise PlanError(f"{self.transit.awaited_count} awaited rows have not arrived")
        with nogil:
            for i in range(self.transit.awaited_count):
                ec_transit_serve(&self.transit, &self.m, &self.wanted, &self.transit.awaited[i])
        self.transit.awaited_count = 0

    def land(self):
        """Write the rows that have arrived to their tables. Nothing happens where none are under way.

        Raises
        ------
        ClosedError, StorageError
            A table is closed, or its directory cannot be written. All of them stay under way.
        """
        if not self.transit.under_way:
            return
        if not self.transit.arrived:
            raise PlanError("rows under way have not arrived")
        self.lock(self.transit.list.offsets, True)
        with nogil:
            self.home(&self.transit.list)
            self.transit.under_way = 0
            self.unlock(self.transit.list.offsets, self.m.tables)
        self.leaving = None


def _fail_allocation(int64_t countdown):
    """For tests: the memory request number `countdown` from now (0: the next) for rows under way fails, once; -1 turns it off."""
    global ec_take_countdown
    ec_take_countdown = countdown


def _forget_what_is_under_way(Moves moves not None):
    """For tests: a planted bug. Rows under way are not looked for, though their host rows are old."""
    if moves.transit.under_way:
        memset(moves.transit.index, 0xFF, <size_t>(moves.transit.mask + 1) * 8)
