"""C contract of a plan: its journal (ec_plan.h), its state (ec_peek.h) and the arrays that it owns (ec_work.h)."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef extern from "ec_vec.h":
    ctypedef struct ec_vec:
        void *data
        int64_t size

cdef extern from "ec_plan.h":
    ctypedef struct ec_part:
        ec_vec changes
        ec_vec births
        ec_vec deaths
        ec_vec touches
        int64_t *totals
        int64_t unique
        int64_t missing
        int quick
        int64_t need
        int64_t have
        int status

    void ec_part_free(ec_part *p) noexcept nogil

cdef extern from "ec_work.h":
    ctypedef struct ec_arrays:
        int64_t *inverse
        int64_t *order
        int64_t *table_offsets
        int64_t *unique_offsets
        int64_t *segment_offsets
        int64_t *unique_keys
        int64_t *slots
        int64_t *in_offsets
        int64_t *in_keys
        int64_t *in_slots
        int64_t *in_rows
        int64_t *out_offsets
        int64_t *out_keys
        int64_t *out_slots
        int64_t *out_rows
        int64_t *hits
        int64_t *misses
        uint8_t *admitted
        void *front
        size_t front_bytes
        void *back
        size_t back_bytes

cdef extern from "ec_group.h":
    ctypedef struct ec_grouping:
        const ec_arrays *out
        const ec_part *parts

    void ec_phase_group(void *grouping, int64_t t) noexcept nogil

cdef extern from "ec_peek.h":
    const int EC_PLANNED
    const int EC_SWAPPED_OUT
    const int EC_SWAPPED_IN
    const int EC_FINISHED
    const int EC_CANCELLED

    ctypedef struct ec_plan:
        ec_part *parts
        int64_t step
        int state


cdef class Shelf:
    cdef void *data              # from malloc, or NULL
    cdef size_t held             # its bytes
    cdef size_t take(self, size_t size, void **data) noexcept
    cdef void put(self, void *data, size_t size) noexcept


cdef class Block:
    cdef void *data              # from malloc, or NULL
    cdef Py_ssize_t size         # bytes in use
    cdef size_t held             # bytes
    cdef Shelf shelf             # where it goes at the end, or None


cdef class Plan:
    cdef ec_plan plan            # journal and state; belongs to `owner` until it is finished or cancelled
    cdef int64_t tables
    cdef int64_t owner           # number of the SwapManager that made it
    cdef uint64_t hands          # that one's when it was made
    cdef readonly int64_t step
    cdef readonly int64_t num_keys
    cdef readonly int64_t num_uniques
    cdef readonly int64_t hits
    cdef readonly int64_t misses
    cdef object notice           # of the batch, or None
    cdef ec_arrays out           # pointers into the two blocks
    cdef int threads             # that may group the occurrences
    cdef int grouped             # whether they are
    cdef object front, back      # owners of the blocks
    cdef dict arrays             # NumPy views made so far
    cdef void group(self) noexcept
    cdef object view(self, str name, object block, void *at, int64_t items, object dtype)
