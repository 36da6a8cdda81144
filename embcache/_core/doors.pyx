"""Doors: those of several managers as one; Latch: what opens once.

Compiled for the same reason as the door itself: Ctrl-C is raised between two instructions of Python, and never inside a compiled call.
"""

from threading import Lock

from cython cimport final


@final
cdef class Latch:
    """Closed when it is made, and open for good from the first `open` on.

    Attributes
    ----------
    is_open : bool

    Notes
    -----
    Any thread may call. What `threading.Event` does, but for the lock in that one, which Ctrl-C may leave taken.
    """

    def __cinit__(self):
        self.lock = Lock()
        self.lock.acquire()

    def open(self):
        """Let everybody pass; again does nothing."""
        if not self.is_open:
            self.is_open = True
            self.lock.release()

    def wait(self):
        """Wait until it is open. Ctrl-C ends the wait."""
        if not self.is_open:
            self.lock.acquire()
            self.lock.release()


@final
cdef class Doors:
    """The doors of several managers as one, entered when none of them is being saved: waits until that is so.

    Parameters
    ----------
    doors : iterable of Door
        Taken in one order, whatever the order given: two threads do not wait for each other.
    """

    def __cinit__(self, doors):
        self.doors = sorted(set(doors), key=id)

    def __enter__(self):
        cdef Py_ssize_t entered
        cdef bint busy = True
        while busy:
            for door in self.doors:
                door.wait_for_save()
            entered, busy = 0, False
            try:
                for door in self.doors:
                    door.__enter__()
                    entered += 1
                    busy = busy or door.saving is not None  # another thread was faster
            except BaseException:
                self.leave(entered)
                raise
            if busy:
                self.leave(entered)

    def __exit__(self, *exc):
        self.leave(len(self.doors))

    cdef int leave(self, Py_ssize_t entered) except -1:
        """Leave the first doors, so many of them."""
        for door in self.doors[:entered]:
            door.__exit__(None, None, None)
        return 0
