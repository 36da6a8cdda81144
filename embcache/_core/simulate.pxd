"""C contract of the simulator (ec_simulate.h)."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ec_simulate.h":
    int64_t ec_simulate(const int64_t *keys, int64_t n, int64_t capacity, uint64_t seed) noexcept nogil
