"""C contract of a batch's geometry (see ec_batch.h)."""

from libc.stdint cimport int64_t

cdef extern from "ec_batch.h":
    bint ec_lengths_fit(const int64_t *lengths, int64_t count, int64_t total) noexcept nogil
    bint ec_running_offsets(const int64_t *lengths, int64_t count, int64_t total, int64_t *offsets) noexcept nogil
