"""C contract of the index: int64 keys -> uint32 values in cache-line buckets (see ec_index.h)."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "ec_index.h":
    ctypedef struct ec_index:
        uint64_t bucket_count  # buckets of 64 bytes, 5 places each
        int64_t size           # keys stored
        int64_t grow_at        # keys that fit before the next growth
        uint64_t seed          # stirred into the bucket choice
        size_t bytes           # memory held

    void ec_index_init(ec_index *index, uint64_t seed) noexcept nogil
    void ec_index_free(ec_index *index) noexcept nogil
    int ec_index_reserve(ec_index *index, int64_t extra) noexcept nogil
    void ec_index_prefetch(const ec_index *index, uint64_t hash) noexcept nogil
    int64_t ec_index_find(const ec_index *index, int64_t key, uint64_t hash) noexcept nogil
    void ec_index_insert(ec_index *index, int64_t key, uint64_t hash, uint32_t value) noexcept nogil
    int ec_index_set(ec_index *index, int64_t key, uint64_t hash, uint32_t value) noexcept nogil
    int64_t ec_index_erase(ec_index *index, int64_t key, uint64_t hash) noexcept nogil
    int ec_index_check(const ec_index *index, int64_t *longest) noexcept nogil
