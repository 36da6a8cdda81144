"""C contract of the feature filter: counters of keys that have no row yet, and the rule of admission and eviction."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ec_filter.h":
    ctypedef struct ec_filter_rule:
        int64_t admit_threshold  # <= 1: every key is admitted
        int64_t evict_threshold  # 0: no sweeps
        int64_t evict_interval   # steps between sweeps
        int64_t keep_min         # rows that a sweep leaves at least
        int time_is_step         # the step number is the timestamp
        int needs_timestamps     # a batch with keys must bring timestamps
        int admit_always         # an occurrence that may admit does
        uint64_t admit_below     # else in so many of 2**64 cases
        uint64_t seed            # of admission by chance and of the sketch
        int64_t sketch_bytes     # 0: exact counts of waiting keys
        int64_t low, high        # vshards of keys that come here, from low to high - 1
        int scores               # the show/click policy
        double alpha, beta, decay, evict_share, admit_score

    ctypedef struct ec_block:
        void *data
        size_t held              # bytes

    ctypedef struct ec_sketch_clock:
        int64_t added            # occurrences in a block's young generation, and in the old one
        int64_t old_added
        int64_t since            # newest timestamp when the young one began

    ctypedef struct ec_sketch:
        int64_t width            # counters of a row of a block; 0: there is no sketch
        int64_t blocks           # of the whole table, wherever they are: a power of two
        int64_t first            # block that is here, and how many are
        int64_t count
        ec_block young           # block by block, each row by row
        ec_block old
        ec_block clocks          # of ec_sketch_clock, one a block that is here

    ctypedef struct ec_filter:
        ec_filter_rule rule
        int64_t newest           # largest timestamp seen; INT64_MIN: none yet
        int64_t epoch            # show/click: sweeps so far
        ec_sketch sketch

    int ec_filter_cutoff(const ec_filter *f, int64_t *cutoff) noexcept nogil
    double ec_filter_score(const ec_filter *f, int64_t count, int64_t last) noexcept nogil


cdef class FeatureFilter:
    cdef ec_filter f             # changed by the planner only, under its lock
    cdef readonly object config  # AdmitAndEvictConfig
    cdef int64_t process         # the process that made it
    cdef object cells(self, void *block)
    cdef object clocks(self)
    cdef int take_sketch(self, ec_sketch *sketch, dict arrays, dict numbers) except -1
    cdef int64_t size(self) noexcept nogil   # keys waiting, and dead ones that are not taken away yet
    cdef int64_t export(self, int64_t *keys, int64_t *counts, int64_t *last) noexcept nogil  # the living, in entry order
