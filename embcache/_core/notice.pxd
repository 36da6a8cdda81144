"""C contract of a notice: the block that ec_coming.h's uses lie in, and where the notice stands."""

from libc.stdint cimport int64_t, uint32_t

cdef enum:
    GIVEN = 0
    PLANNED = 1
    SPENT = 2
    WITHDRAWN = 3


cdef class Notice:
    cdef void *block             # of ec_look; the planner points into it while the notice is GIVEN or PLANNED
    cdef size_t bytes
    cdef uint32_t id             # the planner's, free again afterwards
    cdef int at                  # GIVEN ...
    cdef int64_t owner           # number of the SwapManager that took it
    cdef readonly int64_t number
    cdef readonly int64_t num_keys
    cdef readonly int64_t num_uniques
    cdef void end(self, int at) noexcept
