"""C contract of routes: dedup (ec_dedup.h) and the hash that owners derive from (ec_hash.h)."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "ec_dedup.h":
    ctypedef struct ec_dedup_table:
        pass
    int64_t EC_DEDUP_MAX_KEYS
    int ec_dedup_begin(ec_dedup_table *d, int64_t n, int64_t expected) noexcept nogil
    int64_t ec_dedup_run(ec_dedup_table *d, const uint64_t *seed, int spent, const int64_t *keys, void *items, int64_t n, int64_t *ids, int64_t *unique_keys, uint32_t *first, uint32_t *counts) noexcept nogil
    void ec_dedup_table_free(ec_dedup_table *d) noexcept nogil

cdef extern from "ec_hash.h":
    const int EC_VSHARDS
    uint64_t ec_hash(int64_t key) noexcept nogil
    uint32_t ec_vshard(uint64_t hash) noexcept nogil


cdef class Router:
    cdef ec_dedup_table *dedup   # reused from batch to batch
    cdef uint64_t seed[2]
    cdef readonly int64_t world
    cdef int64_t[::1] group_of   # [tables] whose keys travel together
    cdef int64_t tables, groups
    cdef object lock             # one batch at a time
