"""C contract of several doors as one, and of the latch."""


cdef class Latch:
    cdef object lock             # held until the latch is open
    cdef readonly bint is_open


cdef class Doors:
    cdef list doors              # of Door, in the order in which they are taken
    cdef int leave(self, Py_ssize_t entered) except -1
