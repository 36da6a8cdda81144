"""C contract of the door."""

from libc.stdint cimport int64_t

from embcache._core.doors cimport Turn


cdef class Door:
    cdef int64_t process          # mark of the process that made it
    cdef readonly object lock     # threading.RLock: planner, host tables, moving rows
    cdef readonly object rows     # threading.RLock: rows of unfinished batches, the buffer's memory; taken after `lock`
    cdef readonly Turn turn       # of who trains a whole step, or must see none half done; taken before `lock`
    cdef readonly object late     # deque of plans that end at the next entry
    cdef public object planner    # SwapManager
    cdef public object saving     # SaveJob under way, which has a latch `done`, or None; set inside
    cdef public object transit    # whose land() lets rows land that are on their way, or None; set inside
    cdef public object closed     # bool
    cdef public object changes    # int
    cdef int check_open(self) except -1
    cdef int end_late(self) except -1
    cdef int land(self) except -1
    cdef int enter_planning(self, bint landing) except -1
    cdef int enter_training(self) except -1


cdef class PlanningDoor:
    cdef Door door
    cdef bint landing             # whether rows that are on their way land first


cdef class TrainingDoor:
    cdef Door door
