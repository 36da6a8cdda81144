"""Door: the one way into a manager, for every thread and every method."""

from __future__ import annotations

import threading
from collections import deque

from ._core.plan import Plan
from ._core.swap import SwapManager
from ._core.threads import process_number_of, this_process
from .errors import ClosedError, ForkError

__all__ = ["Door"]


class Door:
    """What every entry into a manager passes: the check of the process, the lock, the closed check, and late ends of plans.

    Plans whose graph was garbage-collected end here. A collector may run anywhere, inside a locked region too, so it only
    appends to a deque; the next entry does the work.

    Attributes
    ----------
    changes : int
        Goes up with whatever changes what a reader sees; iterators compare it. Here, since entering may end plans.
    """

    __slots__ = ("changes", "closed", "late", "lock", "planner", "process")

    def __init__(self, planner: SwapManager) -> None:
        self.process = this_process()
        self.lock = threading.RLock()
        self.planner = planner
        self.late: deque[Plan] = deque()
        self.closed = False
        self.changes = 0

    def check_process(self) -> None:
        """Raise `ForkError` in a child; before the lock, which a thread of the parent may have held at the fork."""
        if this_process() != self.process:
            raise ForkError(
                f"this manager belongs to process {process_number_of(self.process)}, not to its child "
                f"{process_number_of(this_process())}; make the model in the process that trains it"
            )

    def __enter__(self) -> None:
        self.check_process()
        self.lock.acquire()
        try:
            if self.closed:
                raise ClosedError("this manager was closed; make a new one")
            while self.late:
                plan = self.late[0]
                if plan.state == "swapped_in":
                    self.planner.finish(plan)
                    self.changes += 1
                self.late.popleft()
        except BaseException:
            self.lock.release()  # without an entry there is no exit
            raise

    def __exit__(self, *exc: object) -> None:
        self.lock.release()
