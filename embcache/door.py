"""Door: the one way into a manager, for every thread and every method.

Two locks, always taken in this order. `lock` guards planner, host tables and whatever moves rows; `rows` guards the rows of
unfinished batches in the device buffer, and the memory of the buffer itself. ``with door`` takes both: who is inside sees no row
that has trained under a plan that has not. ``with door.planning`` takes the first alone: planning and moving touch no slot that
an unfinished batch uses (promise I2), so they go on beside a batch that trains. Training takes the second alone
(``with door.training``) and never asks for the first: plans that have trained are left in `late`, and end at the next entry.
"""

from __future__ import annotations

import threading
from collections import deque

from ._core.plan import Plan
from ._core.swap import SwapManager
from ._core.threads import process_number_of, this_process
from .errors import ClosedError, ForkError

__all__ = ["Door"]


class Door:
    """What every entry into a manager passes: the check of the process, the locks, the closed check, and late ends of plans.

    Plans end late where their graph was garbage-collected (a collector may run anywhere, inside a locked region too), and where
    their batch has trained: both only append to a deque; the next entry does the work.

    Attributes
    ----------
    changes : int
        Goes up with whatever changes what a reader sees; iterators compare it. Here, since entering may end plans.
    planning, training
        Entries for those who plan and move rows, and for those who train.
    """

    __slots__ = ("changes", "closed", "late", "lock", "planner", "planning", "process", "rows", "training")

    def __init__(self, planner: SwapManager) -> None:
        self.process = this_process()
        self.lock = threading.RLock()
        self.rows = threading.RLock()
        self.planner = planner
        self.late: deque[Plan] = deque()
        self.closed = False
        self.changes = 0
        self.planning = PlanningDoor(self)
        self.training = TrainingDoor(self)

    def check_process(self) -> None:
        """Raise `ForkError` in a child; before the lock, which a thread of the parent may have held at the fork."""
        if this_process() != self.process:
            raise ForkError(
                f"this manager belongs to process {process_number_of(self.process)}, not to its child "
                f"{process_number_of(this_process())}; make the model in the process that trains it"
            )

    def check_open(self) -> None:
        """Raise `ClosedError` after close. Inside either lock."""
        if self.closed:
            raise ClosedError("this manager was closed; make a new one")

    def end_late(self) -> None:
        """End the plans that were left in `late`. Inside `lock`."""
        while self.late:
            plan = self.late[0]
            if plan.state == "swapped_in":
                self.planner.finish(plan)
                self.changes += 1
            self.late.popleft()

    def settle(self) -> None:
        """End late plans now if nobody is inside: never waits."""
        if self.late and self.lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self.end_late()
            finally:
                self.lock.release()

    def __enter__(self) -> None:
        self.check_process()
        self.lock.acquire()
        try:
            self.check_open()
            self.rows.acquire()
            try:
                self.end_late()
            except BaseException:
                self.rows.release()
                raise
        except BaseException:
            self.lock.release()  # without an entry there is no exit
            raise

    def __exit__(self, *exc: object) -> None:
        self.rows.release()
        self.lock.release()


class PlanningDoor:
    """The entry of who plans batches and moves rows that no unfinished batch uses."""

    __slots__ = ("_door",)

    def __init__(self, door: Door) -> None:
        self._door = door

    def __enter__(self) -> None:
        door = self._door
        door.check_process()
        door.lock.acquire()
        try:
            door.check_open()
            door.end_late()
        except BaseException:
            door.lock.release()
            raise

    def __exit__(self, *exc: object) -> None:
        self._door.lock.release()


class TrainingDoor:
    """The entry of who reads or trains rows of an unfinished batch in the buffer. Inside nobody may ask for the other entries."""

    __slots__ = ("_door",)

    def __init__(self, door: Door) -> None:
        self._door = door

    def __enter__(self) -> None:
        door = self._door
        door.check_process()
        door.rows.acquire()
        try:
            door.check_open()
        except BaseException:
            door.rows.release()
            raise

    def __exit__(self, *exc: object) -> None:
        self._door.rows.release()
