"""Doors: those of several managers as one; Turn and Steps: one training step at a time; Latch: what opens once.

Compiled for the same reason as the door itself: Ctrl-C is raised between two instructions of Python, and never inside a compiled call.
"""

from threading import Lock, RLock

from cython cimport final


@final
cdef class Turn:
    """A lock that nobody is kept from for longer than its holder keeps it once; its holder may enter again.

    Who waits is next: a thread that leaves and comes back at once, as one that trains does, stands behind it.

    Notes
    -----
    Any thread may call.
    """

    def __cinit__(self):
        self.queue, self.lock = Lock(), RLock()

    @property
    def held(self):
        """Whether this thread is inside."""
        return self.lock._is_owned()

    cdef int enter(self) except -1:
        if self.lock._is_owned():
            self.lock.acquire()
            return 0
        self.queue.acquire()
        try:
            self.lock.acquire()
        finally:
            self.queue.release()
        return 0

    cdef int leave(self) except -1:
        self.lock.release()
        return 0


@final
cdef class Steps:
    """The turns of several managers, whose tables a step trains together: to train one, or to see none that is half done.

    A save that holds them sees all collections of a model, and its dense part, as of one step. Taken before doors. Again is no harm.

    Parameters
    ----------
    doors : iterable of Door
        Of the managers. Taken in one order, whatever the order given.
    between_saves : bool
        Enter only when none of them is being saved; waits until that is so, and lets others train meanwhile.

    Attributes
    ----------
    held : bool
        Whether this thread is inside of one of them.
    """

    def __cinit__(self, doors, bint between_saves=False):
        self.doors = sorted(set(doors), key=id)
        self.between_saves = between_saves

    @property
    def held(self):
        for door in self.doors:
            if door.turn.held:
                return True
        return False

    def __enter__(self):
        cdef Py_ssize_t entered
        cdef bint busy = True
        while busy:
            for door in self.doors:
                if self.between_saves:
                    door.wait_for_save()
                else:
                    door.check_process()
            entered, busy = 0, False
            try:
                for door in self.doors:
                    (<Turn>door.turn).enter()
                    entered += 1
                    busy = busy or (self.between_saves and door.saving is not None)  # another thread was faster
            except BaseException:
                self.leave(entered)
                raise
            if busy:
                self.leave(entered)

    def __exit__(self, *exc):
        self.leave(len(self.doors))

    cdef int leave(self, Py_ssize_t entered) except -1:
        """Leave the first turns, so many of them."""
        for door in self.doors[:entered]:
            (<Turn>door.turn).leave()
        return 0


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

    def wait(self, timeout):
        """Wait until it is open, `timeout` seconds at most; returns whether it is. Ctrl-C ends the wait."""
        if not self.is_open and self.lock.acquire(True, timeout):
            self.lock.release()
        return self.is_open


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
