"""C contract of a table's directory: the backing that its arenas and indexes take memory from, and its marks."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ec_backing.h":
    ctypedef struct ec_backing:
        int folder              # descriptor of the directory, which also holds its lock; -1: none
        int data                # descriptor of the data file
        int64_t length          # of the data file
        int clean               # what the header says
        int failed              # a sync failed, or the directory is gone: nothing may be changed any more
        int gone                # a file of the directory was not there any more
        int closing             # whoever frees a block: the file keeps it
        int error               # errno of the last refusal
        const char *file        # which file refused
        int64_t need            # bytes that were asked for; 0: not a matter of space
        uint64_t sequence
        uint64_t identity_bytes, identity_digest
        uint64_t metadata_bytes, metadata_digest
        uint64_t filter_bytes, filter_digest
        int64_t fault_countdown
        int fault_error

    void ec_backing_init(ec_backing *b) noexcept nogil
    void ec_backing_unmap(ec_backing *b) noexcept nogil
    void ec_backing_release(ec_backing *b) noexcept nogil


cdef class Directory:
    cdef ec_backing backing
    cdef readonly str path        # absolute
    cdef readonly str owner       # whose it is, for messages
    cdef readonly object identity  # what the header says it holds; None: it is new
    cdef int64_t process          # the process that opened it
    cdef int made                 # by this object: the folder itself
    cdef int locked
    cdef object __weakref__
    cdef int check_file_system(self) except -1
    cdef int lock(self) except -1
    cdef int read_header(self) except -1
    cdef object refusal(self)     # the exception for EC_DISK
    cdef void drop(self) noexcept
