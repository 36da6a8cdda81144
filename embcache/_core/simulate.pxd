"""C contract of the simulator (ec_simulate.h, ec_lookahead.h)."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ec_simulate.h":
    int64_t ec_simulate(const int64_t *keys, int64_t n, int64_t capacity, int policy, uint64_t seed) noexcept nogil

cdef extern from "ec_lookahead.h":
    const int64_t EC_LOOKAHEAD_MOST
    int64_t ec_simulate_lookahead(const int64_t *keys, int64_t n, int64_t capacity, int64_t window, uint64_t seed) noexcept nogil
