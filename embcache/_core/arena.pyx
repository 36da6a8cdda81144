"""The arena on its own: growable memory whose segments never move, and the question how much more may be had.

Owns one `ec_arena` (see ec_arena.h). The table embeds that structure directly; this class is for tests and tools.
"""

from embcache.errors import ConfigError, HostMemoryError, ShapeError

from cython cimport final
from libc.stdint cimport INT64_MAX, int64_t, uintptr_t
from libc.string cimport memcpy
from posix.unistd cimport getpid

cdef enum:
    MOST_STRIDE = 1 << 30


def memory_room():
    """Bytes that this process may still map, by RLIMIT_AS, its cgroup and the machine's available memory."""
    return ec_memory_room()


def cgroup_room(root, membership):
    """Bytes left under the cgroup limits below `root` for the process whose ``/proc/<pid>/cgroup`` is `membership`.

    Parameters
    ----------
    root, membership : str
        Normally ``/sys/fs/cgroup`` and ``/proc/self/cgroup``.

    Returns
    -------
    int
        2**64 - 1 where nothing limits.
    """
    return ec_cgroup_room(root.encode(), membership.encode())


@final
cdef class Arena:
    """Fixed-size zeroed elements, addressed 0 .. rows - 1.

    Parameters
    ----------
    stride : int
        Bytes of an element.

    Notes
    -----
    Thread safety: none; one thread at a time.
    """

    cdef ec_arena arena
    cdef int64_t pid

    def __cinit__(self, stride):
        if not 1 <= stride <= MOST_STRIDE:
            raise ConfigError(f"Arena: stride = {stride!r}; give 1 to {MOST_STRIDE} bytes")
        ec_arena_init(&self.arena, stride)
        self.pid = getpid()

    def __dealloc__(self):
        if self.pid == getpid():
            ec_arena_free(&self.arena)

    @property
    def rows(self):
        """Elements that are mapped."""
        return self.arena.rows

    @property
    def nbytes(self):
        """Bytes that are mapped."""
        return self.arena.bytes

    @property
    def segments(self):
        """(elements, bytes) of each mapped segment."""
        return [(ec_arena_segment_rows(&self.arena, i), ec_arena_segment_bytes(&self.arena, i)) for i in range(self.arena.segment_count)]

    def plan(self, int64_t segment):
        """(elements, bytes) that segment number `segment` has or would have."""
        return ec_arena_segment_rows(&self.arena, segment), ec_arena_segment_bytes(&self.arena, segment)

    def missing(self, int64_t rows):
        """Bytes that `reserve(rows)` would map."""
        return ec_arena_missing(&self.arena, rows)

    def reserve(self, int64_t rows):
        """Map at least `rows` elements; `HostMemoryError` leaves the arena as it was."""
        cdef int64_t missing
        if rows < 0 or rows > INT64_MAX // self.arena.stride // 2:
            raise ConfigError(f"Arena: rows = {rows}; give 0 to {INT64_MAX // self.arena.stride // 2}")
        missing = ec_arena_missing(&self.arena, rows)
        if not ec_memory_allows(missing) or ec_arena_reserve(&self.arena, rows) != 0:
            raise HostMemoryError(f"Arena: no host memory for {missing} bytes more ({self.arena.bytes} held, "
                                  f"about {ec_memory_room()} may be had); reserve fewer rows")

    def truncate(self, int64_t segment_count):
        """Give back all but the first `segment_count` segments."""
        ec_arena_truncate(&self.arena, max(segment_count, <int64_t>0))

    def address(self, int64_t row):
        """Address of an element, as a number."""
        if not 0 <= row < self.arena.rows:
            raise ShapeError(f"Arena: row {row} of {self.arena.rows}")
        return <uintptr_t>ec_arena_at(&self.arena, row)

    def read(self, int64_t row):
        """A copy of an element's bytes."""
        self.address(row)
        return ec_arena_at(&self.arena, row)[:self.arena.stride]

    def write(self, int64_t row, bytes value not None):
        """Overwrite an element."""
        self.address(row)
        if len(value) != self.arena.stride:
            raise ShapeError(f"Arena: {len(value)} bytes for an element of {self.arena.stride}")
        memcpy(ec_arena_at(&self.arena, row), <const char *>value, self.arena.stride)
