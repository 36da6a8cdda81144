"""The arena on its own: growable memory whose segments never move; and the question how much more memory may be had.

Owns the process's count of memory that is mapped and not written yet (see ec_room.h), and in `Arena` one `ec_arena` (see
ec_arena.h). The table embeds that structure directly; the class is for tests and tools.
"""

from embcache.errors import ConfigError, HostMemoryError, ShapeError

from cython cimport final
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from embcache._core.threads cimport process_mark

cdef extern from "ec_room.h":
    ec_promises *ec_promised
    int64_t ec_promised_bytes() noexcept nogil
    void ec_promise(int64_t count) noexcept nogil
    int ec_promises_install() noexcept nogil
    uint64_t ec_cgroup_room(const char *root, const char *membership, uint64_t swap_free) noexcept nogil

cdef extern from "ec_memory.h":
    int ec_memory_claim(size_t count) noexcept nogil
    void ec_memory_written(size_t count) noexcept nogil

cdef enum:
    MOST_STRIDE = 1 << 30


cdef ec_promises *promises() noexcept nogil:
    return ec_promised


def memory_room():
    """Bytes that this process may still map and write to beside what it has promised: by RLIMIT_AS, its cgroup and the machine's available memory."""
    return ec_memory_room()


def memory_promised():
    """Bytes of the core's anonymous memory that are mapped, or about to be, and not written yet: no limit counts them so far."""
    return ec_promised_bytes()


def pretend_room(room=None):
    """For tests: let the core believe that it may write to `room` more bytes at most, whatever it writes; None: what the system says."""
    ec_promised.pretended = UINT64_MAX if room is None else room


def cgroup_room(root, membership, swap_free=0):
    """Bytes left under the cgroup limits below `root` for the process whose ``/proc/<pid>/cgroup`` is `membership`.

    Parameters
    ----------
    root, membership : str
        Normally ``/sys/fs/cgroup`` and ``/proc/self/cgroup``.
    swap_free : int
        Bytes of swap that the machine has left; a cgroup's share of it counts as room.

    Returns
    -------
    int
        2**64 - 1 where nothing limits.

    Notes
    -----
    Sources: the kernel's ``cgroup-v2.rst`` and ``cgroup-v1/memory.rst``; what a cgroup gives up before anybody is killed is
    counted as the machine's own ``MemAvailable`` counts it (``proc.rst``), less the pages that must be written to disk first.
    """
    return ec_cgroup_room(root.encode(), membership.encode(), swap_free)


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
    cdef int64_t written   # elements below the highest that was written
    cdef int64_t promised  # bytes, as the count has them
    cdef int64_t process

    def __cinit__(self, stride):
        if not 1 <= stride <= MOST_STRIDE:
            raise ConfigError(f"Arena: stride = {stride!r}; give 1 to {MOST_STRIDE} bytes")
        ec_arena_init(&self.arena, stride)
        self.process = process_mark()

    def __dealloc__(self):
        if self.process == process_mark():
            ec_arena_free(&self.arena)
            self.promise()

    cdef void promise(self) noexcept:
        """Bring what the count knows of this arena up to date."""
        cdef int64_t promised
        self.written = min(self.written, self.arena.rows)
        promised = <int64_t>ec_arena_unwritten(&self.arena, self.written)
        ec_promise(promised - self.promised)
        self.promised = promised

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
        cdef bint claimed = ec_memory_claim(missing), reserved = False
        if claimed:
            reserved = ec_arena_reserve(&self.arena, rows) == 0
            self.promise()
            ec_memory_written(missing)
        if not reserved:
            raise HostMemoryError(f"Arena: no host memory for {missing} bytes more ({self.arena.bytes} held, "
                                  f"about {ec_memory_room()} may be had); reserve fewer rows")

    def truncate(self, int64_t segment_count):
        """Give back all but the first `segment_count` segments."""
        ec_arena_truncate(&self.arena, max(segment_count, <int64_t>0))
        self.promise()

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
        """Overwrite an element; those before it count as written too."""
        self.address(row)
        if len(value) != self.arena.stride:
            raise ShapeError(f"Arena: {len(value)} bytes for an element of {self.arena.stride}")
        memcpy(ec_arena_at(&self.arena, row), <const char *>value, self.arena.stride)
        if row >= self.written:
            self.written = row + 1
            self.promise()


if ec_promises_install() != 0:
    raise HostMemoryError("no host memory for a handler of fork")
