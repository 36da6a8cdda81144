"""C contract of the hash (see ec_hash.h)."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "ec_hash.h":
    const int EC_VSHARD_BITS
    const int EC_VSHARDS
    uint64_t ec_hash(int64_t key) noexcept nogil
    uint32_t ec_vshard(uint64_t hash) noexcept nogil
    uint64_t ec_mix(uint64_t hash, uint64_t seed) noexcept nogil
    uint64_t ec_splitmix(uint64_t x) noexcept nogil
    uint64_t ec_xxh3(const void *data, size_t length, uint64_t seed) noexcept nogil
