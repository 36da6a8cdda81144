"""C contract of several doors as one, of training steps one at a time, and of the latch."""


cdef class Turn:
    cdef object queue            # held by the one who is next
    cdef object lock             # threading.RLock of the one who is in
    cdef int enter(self) except -1
    cdef int leave(self) except -1


cdef class Steps:
    cdef list doors              # of Door, in the order in which their turns are taken
    cdef bint between_saves      # whether a save is waited for
    cdef int leave(self, Py_ssize_t entered) except -1


cdef class Latch:
    cdef object lock             # held until the latch is open
    cdef readonly bint is_open


cdef class Doors:
    cdef list doors              # of Door, in the order in which they are taken
    cdef int leave(self, Py_ssize_t entered) except -1
