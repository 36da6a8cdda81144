"""C contract of the moves: the structures of ec_moves.h, and what the planner calls in the middle of a plan."""

from libc.stdint cimport int64_t

from embcache._core.plan cimport Plan, ec_arrays
from embcache._core.table cimport ec_table

cdef extern from "ec_moves.h":
    const int EC_MOVE_PARTS

    ctypedef struct ec_move_group:
        int64_t first
        int64_t last
        int64_t stride
        int64_t parts
        int64_t *widths
        void *weights
        float **states

    ctypedef struct ec_move_list:
        const int64_t *rows
        const int64_t *places
        const int64_t *offsets
        char *block

    ctypedef struct ec_awaited:
        int64_t table
        int64_t to
        int64_t from_ "from"

    ctypedef struct ec_transit:
        ec_move_list list
        int64_t *index
        int64_t mask
        ec_awaited *awaited
        int64_t awaited_count
        int under_way
        int arrived

    ctypedef struct ec_moves:
        int64_t tables
        int64_t groups
        ec_table **table
        int64_t *group_of
        ec_move_group *group
        int64_t *first_task

    int64_t ec_move_bytes(const ec_moves *m, const int64_t *offsets, int64_t group, int64_t part) noexcept nogil
    int ec_transit_reserve(ec_transit *w, int64_t count) noexcept nogil
    void ec_transit_begin(ec_transit *w, const ec_moves *m, const ec_move_list *list) noexcept nogil
    void ec_transit_serve(const ec_transit *w, const ec_moves *m, const ec_move_list *list, const ec_awaited *one) noexcept nogil
    int64_t ec_moves_begin(ec_moves *m, const ec_move_list *list, ec_transit *transit) noexcept nogil
    void ec_moves_home_task(void *moves, int64_t task) noexcept nogil
    void ec_moves_fetch_task(void *moves, int64_t task) noexcept nogil


cdef class Moves:
    cdef ec_moves m
    cdef ec_transit transit        # rows that have left the device and not landed
    cdef ec_move_list wanted       # of the last fetch into a block, for `serve`
    cdef readonly list tables      # of Table, kept alive
    cdef list arrays               # whose memory the groups point to, kept alive
    cdef object kept, leaving      # plan and block of the last fetch; of the rows under way
    cdef readonly bint direct      # whether there are arrays by slot
    cdef int num_threads
    cdef char *block               # for the next plan, or NULL
    cdef object block_owner
    cdef int64_t block_bytes
    cdef readonly bint gathered    # whether the last plan's rows are where they belong: in their slots, or in the block
    cdef double times[3]           # seconds of the last plan: planning, rows out, rows in
    cdef object __weakref__
    cdef int check(self, Plan plan) except -1
    cdef char *address_of(self, object block, int64_t bytes) except NULL
    cdef int lock(self, const int64_t *offsets, bint write) except -1
    cdef void unlock(self, const int64_t *offsets, int64_t count) noexcept nogil
    cdef void home(self, const ec_move_list *list) noexcept nogil
    cdef void fetch(self, const ec_move_list *list) noexcept nogil
    cdef int chain(self, Plan plan) except -1
    cdef void run(self, const ec_arrays *out) noexcept nogil
