"""C contract of the cut (ec_cut.h): a table's state as of the last finished training batch."""

from libc.stdint cimport int64_t, uint8_t

from embcache._core.filter cimport ec_filter
from embcache._core.plan cimport ec_part, ec_plan
from embcache._core.swap cimport SwapManager, ec_overlay, ec_side

cdef extern from "ec_filter.h":
    ctypedef struct ec_filter_entry:
        int64_t key
        int64_t count
        int64_t last

cdef extern from "ec_cut.h":
    const int EC_CUT_IN
    const int EC_CUT_CHANGED

    ctypedef struct ec_cut:
        pass

    ctypedef struct ec_cut_numbers:
        int64_t newest
        int64_t epoch
        int64_t cutoff
        int64_t waiting_cutoff
        int64_t added
        int64_t old_added
        int64_t since

    int ec_cut_make(ec_cut *cut, const ec_side *s, int64_t t, ec_plan **plans, int64_t plan_count) noexcept nogil
    void ec_cut_free(ec_cut *cut) noexcept nogil
    int64_t ec_cut_members(const ec_overlay *o, const ec_side *s, int64_t number, ec_plan **plans, int64_t plan_count, int changed, uint8_t *members) noexcept nogil
    void ec_cut_read(const ec_cut *cut, const ec_side *s, const int64_t *rows, int64_t n, int64_t *keys, int64_t *slots, int64_t *freq, int64_t *last) noexcept nogil
    int64_t ec_cut_dead(const ec_overlay *o, const ec_side *s, int64_t *keys) noexcept nogil
    int64_t ec_cut_most_touched(const ec_part *p) noexcept nogil
    int64_t ec_cut_touched(const ec_side *s, const ec_part *p, int64_t *rows) noexcept nogil
    int64_t ec_cut_used(const ec_side *s, int64_t *rows) noexcept nogil
    void ec_cut_next_period(ec_side *s) noexcept nogil
    void ec_cut_filter(const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count, ec_cut_numbers *numbers, void *young, void *old) noexcept nogil
    int64_t ec_cut_waiting(const ec_cut *cut, const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count, ec_filter_entry *entries) noexcept nogil


cdef class Cut:
    cdef SwapManager planner
    cdef ec_cut cut              # of `table`
    cdef int64_t t
    cdef int64_t epoch           # the planner's when this was made
    cdef readonly object table   # the host table
    cdef int64_t row_limit(self)
    cdef int enter(self) except -1  # the planner's mutex; AssertionError where it has changed
