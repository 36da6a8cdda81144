"""Door: the one way into a manager, for every thread and every method.

Two locks, always taken in this order. `lock` guards planner, host tables and whatever moves rows; `rows` guards the rows of
unfinished batches in the device buffer, and the memory of the buffer itself. ``with door`` takes both: who is inside sees no row
that has trained under a plan that has not. ``with door.planning`` takes the first alone: planning and moving touch no slot that
an unfinished batch uses (promise I2), so they go on beside a batch that trains. Rows may be on their way from the device to their
host rows; whoever enters lets them land first, but for those who move rows themselves (``with door.moving``), who know of them. Training takes the second alone
(``with door.training``) and never asks for the first: plans that have trained are left in `late`, and end at the next entry.

Compiled, since an interrupt (Ctrl-C) is raised between two instructions of Python: an entry or exit written in Python could be
left with a lock that nobody gives back, and threads of a pipeline would wait for it for ever.
"""

from collections import deque
from threading import RLock

from embcache.errors import ClosedError, ForkError

from cython cimport final

from embcache._core.doors cimport Turn
from embcache._core.swap cimport SwapManager
from embcache._core.threads cimport process_mark, process_number


@final
cdef class Door:
    """What every entry into a manager passes: the check of the process, the locks, the closed check, and late ends of plans.

    Plans end late where their graph was garbage-collected (a collector may run anywhere, inside a locked region too), and where
    their batch has trained: both only append to a deque; the next entry does the work.

    Parameters
    ----------
    planner : SwapManager
        May be replaced, inside.

    Attributes
    ----------
    lock, rows : threading.RLock
    turn : Turn
        Of who trains a whole step, or must see none that is half done (`doors.Steps`); taken before the locks, by nobody who plans.
    late : deque of Plan
    saving : SaveJob or None
        The save under way; its ``wait()`` returns when it is over.
    transit : optional
        Whose ``land()`` lets rows land that are on their way to their host rows, and then sets this to None; set inside.
    closed : bool
    changes : int
        Goes up with whatever changes what a reader sees; iterators compare it. Here, since entering may end plans.
    planning, moving, training
        Entries for those who plan or look at host rows, for those who move rows and know of those on their way, and for those who
        train. Inside the last nobody may ask for another.

    Notes
    -----
    Thread safety: made for any number of threads. In a forked child every entry raises `ForkError`, before any lock, which a
    thread of the parent may have held at the fork; after close `ClosedError`.
    """

    def __cinit__(self, SwapManager planner not None):
        self.process = process_mark()
        self.lock, self.rows, self.turn = RLock(), RLock(), Turn()
        self.late = deque()
        self.planner = planner
        self.closed = False
        self.changes = 0

    # Made anew each time: kept here they would be a cycle, and the tables of a manager that nobody holds would stay open until
    # a collector runs.
    @property
    def planning(self):
        return PlanningDoor(self, True)

    @property
    def moving(self):
        return PlanningDoor(self, False)

    @property
    def training(self):
        return TrainingDoor(self)

    @property
    def held(self):
        """Whether this thread is inside: who waits here for another thread that wants in, waits for ever."""
        return self.lock._is_owned() or self.rows._is_owned()

    def check_process(self):
        """Raise `ForkError` in a child."""
        if self.process != process_mark():
            raise ForkError(
                f"this manager belongs to process {process_number(self.process)}, not to its child "
                f"{process_number(process_mark())}; make the model in the process that trains it"
            )

    cdef int check_open(self) except -1:
        if self.closed:
            raise ClosedError("this manager was closed; make a new one")

    cdef int end_late(self) except -1:
        """End the plans that were left in `late`. Inside `lock`."""
        while self.late:
            plan = self.late[0]
            if plan.state == "swapped_in":
                self.planner.finish(plan)
                self.changes += 1
            self.late.popleft()

    def settle(self):
        """End late plans now if nobody is inside: never waits."""
        if self.late and self.lock.acquire(False):
            try:
                if not self.closed:
                    self.end_late()
            finally:
                self.lock.release()

    def wait_for_save(self):
        """Wait until no save is under way. Not inside, where the save needs to get."""
        self.check_process()
        job = self.saving
        if job is not None:
            job.wait()

    cdef int land(self) except -1:
        """Let rows land that are on their way. Inside `lock`."""
        if self.transit is not None:
            self.transit.land()

    cdef int enter_planning(self, bint landing) except -1:
        self.check_process()
        self.lock.acquire()
        try:
            self.check_open()
            self.end_late()
            if landing:
                self.land()
        except BaseException:
            self.lock.release()  # without an entry there is no exit
            raise

    cdef int enter_training(self) except -1:
        self.check_process()
        self.rows.acquire()
        try:
            self.check_open()
        except BaseException:
            self.rows.release()
            raise

    def __enter__(self):
        self.check_process()
        self.lock.acquire()
        try:
            self.check_open()
            self.rows.acquire()
            try:
                self.end_late()
                self.land()
            except BaseException:
                self.rows.release()
                raise
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, kind, error, trace):
        self.rows.release()
        self.lock.release()


@final
cdef class PlanningDoor:
    """The entry of who plans batches and moves rows that no unfinished batch uses."""

    def __cinit__(self, Door door not None, bint landing):
        self.door = door
        self.landing = landing

    def __enter__(self):
        self.door.enter_planning(self.landing)

    def __exit__(self, kind, error, trace):
        self.door.lock.release()


@final
cdef class TrainingDoor:
    """The entry of who reads or trains rows of an unfinished batch in the buffer."""

    def __cinit__(self, Door door not None):
        self.door = door

    def __enter__(self):
        self.door.enter_training()

    def __exit__(self, kind, error, trace):
        self.door.rows.release()
