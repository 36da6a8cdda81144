"""C contract of the cut (ec_cut.h): a table's state as of the last finished training batch."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from embcache._core.filter cimport FeatureFilter, ec_filter, ec_sketch, ec_sketch_clock
from embcache._core.plan cimport ec_part, ec_plan
from embcache._core.swap cimport SwapManager, ec_cache, ec_overlay, ec_side

cdef extern from "ec_filter.h":
    ctypedef struct ec_filter_entry:
        int64_t key
        int64_t count
        int64_t last

cdef extern from "ec_cache.h":
    int ec_cache_settle(ec_cache *c) noexcept nogil
    void ec_cache_unsettle(ec_cache *c) noexcept nogil

cdef extern from "ec_cut.h":
    const int EC_CUT_IN
    const int EC_CUT_CHANGED
    const int EC_CUT_LIVE
    const int EC_CUT_READ

    ctypedef struct ec_cut:
        pass

    ctypedef struct ec_cut_numbers:
        int64_t newest
        int64_t epoch
        int64_t cutoff
        int64_t waiting_cutoff
        const ec_sketch_clock *clocks  # of the sketch's blocks

    int ec_cut_make(ec_cut *cut, const ec_side *s, int64_t t, ec_plan **plans, int64_t plan_count) noexcept nogil
    void ec_cut_free(ec_cut *cut) noexcept nogil
    int64_t ec_cut_members(const ec_overlay *o, const ec_side *s, int64_t number, ec_plan **plans, int64_t plan_count, int changed, uint8_t *members) noexcept nogil
    void ec_cut_read(const ec_cut *cut, const ec_side *s, const int64_t *rows, int64_t n, int64_t *keys, int64_t *slots, int64_t *freq, int64_t *last) noexcept nogil
    int64_t ec_cut_dead(const ec_overlay *o, const ec_side *s, int64_t *keys) noexcept nogil
    int64_t ec_cut_most_touched(const ec_part *p) noexcept nogil
    int64_t ec_cut_unread(ec_side *s, const ec_part *p, int listing, uint8_t *members, int64_t length, int64_t *rows, int64_t *listed) noexcept nogil
    int64_t ec_cut_used(const ec_side *s, int64_t *rows) noexcept nogil
    int64_t ec_cut_used_about(const ec_side *s, int64_t most) noexcept nogil
    int64_t ec_cut_list(const ec_side *s, int64_t begin, int64_t end, uint8_t *members, int64_t rows) noexcept nogil
    int64_t ec_cut_left(const ec_side *s, const ec_part *p, int64_t *rows) noexcept nogil
    void ec_cut_next_period(ec_side *s, int64_t t, ec_plan **plans, int64_t plan_count) noexcept nogil
    void ec_cut_filter(const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count, ec_cut_numbers *numbers) noexcept nogil
    int ec_cut_passing(const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count, int64_t *most_late) noexcept nogil
    int64_t ec_cut_late(const ec_cut *cut, const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count, int64_t *keys) noexcept nogil

cdef extern from "ec_filtercut.h":
    ctypedef struct ec_vec:
        void *data
        int64_t size

    ctypedef struct ec_filter_news:
        int64_t raised
        ec_vec gone

    ctypedef struct ec_filtercut:
        int64_t size
        int64_t read
        int64_t half
        int64_t sketch_read
        ec_vec kept
        int32_t cell_bytes
        const ec_filter_news *news

    int ec_filtercut_make(ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count, int whole, int passing) noexcept nogil
    void ec_filtercut_take(ec_filtercut *c, ec_filter *f) noexcept nogil
    void ec_filtercut_give_back(ec_filtercut *c, ec_filter *f) noexcept nogil
    int64_t ec_filter_bytes(const ec_filter *f, int64_t *changed) noexcept nogil
    void ec_filtercut_free(ec_filtercut *c) noexcept nogil
    int ec_filtercut_look(ec_filtercut *c, const ec_filter *f, int64_t t, ec_plan **plans, int64_t plan_count) noexcept nogil
    int ec_filtercut_keep(ec_filtercut *c, const ec_filter *f, const int64_t *keys, int64_t n) noexcept nogil
    int64_t ec_filtercut_read(ec_filtercut *c, const ec_filter *f, int64_t most, ec_filter_entry *entries, uint8_t *changed) noexcept nogil
    int64_t ec_filtercut_read_raised(ec_filtercut *c, const ec_filter *f, int64_t most, uint32_t *places, char *values) noexcept nogil
    void ec_filtercut_mend_raised(const ec_filtercut *c, const uint32_t *places, int64_t n, char *values) noexcept nogil
    void ec_filtercut_read_sketch(ec_filtercut *c, const ec_filter *f, int64_t most, char *whole) noexcept nogil
    void ec_filtercut_mend(const ec_filtercut *c, char *whole) noexcept nogil


cdef class Cut:
    cdef SwapManager planner
    cdef ec_cut cut              # of `table`
    cdef int64_t t
    cdef int64_t epoch           # the planner's when this was made
    cdef readonly object table   # the host table
    cdef int64_t row_limit(self)
    cdef int enter(self) except -1  # the planner's mutex; AssertionError where it has changed


cdef class FilterCut:
    cdef SwapManager planner
    cdef FeatureFilter waiters
    cdef ec_filtercut cut
    cdef int64_t t
    cdef readonly dict numbers
    cdef readonly dict sketches
    cdef object clocks           # int64[3 * blocks here]: those of the sketch
    cdef object sketch           # uint8: both generations, where all is read
    cdef object late             # int64 array of keys that are not dead, or None: nobody is
    cdef list dead               # int64 arrays of waiting keys that were found dead
    cdef readonly bint whole     # whether all of it is read, not only what has changed
    cdef object places           # uint32[raised]: of the counters that are read
    cdef object values           # uint8[raised * bytes of a counter]
    cdef int64_t found           # how many of these have been
    cdef int look_through(self) except -1
    cdef object living(self, entries, changed)
    cdef object room_for_sketch(self)
    cdef int read_raised(self, int64_t most) except -1
