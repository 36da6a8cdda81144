"""A notice: the planner was told of the keys of a batch to come, and which one that was.

Owns the memory of the notice's uses. The `SwapManager` that took it holds it while it counts, and alone changes it.
"""

from cython cimport final
from libc.stdlib cimport free

STATES = ("given", "planned", "spent", "withdrawn")  # by GIVEN ...


@final
cdef class Notice:
    """What `SwapManager.look_ahead` returns: give it to `plan` with its batch, or to `withdraw`.

    Attributes
    ----------
    number : int
        Rises from notice to notice: batches are expected in this order, and may be planned in any.
    state : str
        ``"given"``; ``"planned"`` while a plan of its batch is unfinished, and ``"given"`` again if that is cancelled;
        ``"spent"`` or ``"withdrawn"`` in the end.
    num_keys, num_uniques : int
        Keys that were given, and distinct ones, all tables together.
    """

    def __cinit__(self):
        self.block = NULL
        self.at = WITHDRAWN

    def __init__(self):
        raise TypeError("notices are made by SwapManager.look_ahead")

    def __dealloc__(self):
        free(self.block)

    cdef void end(self, int at) noexcept:
        """Nobody points into the block any more."""
        free(self.block)
        self.block = NULL
        self.bytes = 0
        self.at = at

    @property
    def state(self):
        return STATES[self.at]

    def __repr__(self):
        return f"Notice(number={self.number}, state={self.state!r}, keys={self.num_keys}, uniques={self.num_uniques})"
