"""C contract of the arena: growable memory whose segments never move (see ec_arena.h)."""

from libc.stdint cimport int64_t, uint64_t

from embcache._core.directory cimport ec_backing

cdef extern from "ec_room.h":
    ctypedef struct ec_promises:
        int64_t bytes
        uint64_t pretended

    void ec_promises_share(ec_promises *of_the_process) noexcept nogil
    uint64_t ec_memory_room() noexcept nogil

# The count of what this process has mapped and not written yet. A module that maps memory calls, when it is imported,
# ec_promises_share(promises()).
cdef ec_promises *promises() noexcept nogil

cdef extern from "ec_arena.h":
    ctypedef struct ec_arena:
        int64_t segment_count
        int64_t rows    # elements below this are mapped
        int64_t stride  # bytes of an element
        size_t bytes    # mapped
        ec_backing *backing  # where segments lie; NULL: anonymous memory

    void ec_arena_init(ec_arena *arena, int64_t stride) noexcept nogil
    void ec_arena_free(ec_arena *arena) noexcept nogil
    char *ec_arena_at(const ec_arena *arena, int64_t row) noexcept nogil
    int64_t ec_arena_segment_rows(const ec_arena *arena, int64_t segment) noexcept nogil
    size_t ec_arena_segment_bytes(const ec_arena *arena, int64_t segment) noexcept nogil
    size_t ec_arena_missing(const ec_arena *arena, int64_t rows) noexcept nogil
    # Bytes that are not in memory while only elements below `rows` were written.
    size_t ec_arena_unwritten(const ec_arena *arena, int64_t rows) noexcept nogil
    int ec_arena_reserve(ec_arena *arena, int64_t rows) noexcept nogil
    void ec_arena_truncate(ec_arena *arena, int64_t segment_count) noexcept nogil
