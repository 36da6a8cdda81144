"""`simulate`: what a policy would do with a trace of accesses.

Owns the public door of the replay: it takes keys as a table does. The policies are the planner's own, in the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._core.simulate import simulate as _simulate
from .table import as_keys

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["simulate"]


def simulate(keys: npt.ArrayLike, capacity: int, policy: str = "lru", lookahead: int | None = None) -> int:
    """Replay a trace of accesses through one of the planner's policies, one key at a time.

    Parameters
    ----------
    keys : array-like of integers, (n,)
        As `EmbTable` takes them: any integer dtype and stride, or a list.
    capacity : int
        Slots, 1 or more.
    policy : str
        ``"lru"``, ``"lfu"`` or ``"s3fifo"``, as a collection takes them; or ``"lookahead"``: the victim is the key whose
        next use is farthest away, as far as the coming accesses are known (Belady, 1966). Keys not used in them go first,
        the least recently used of these in front.
    lookahead : int, optional
        For ``"lookahead"`` only: how many coming accesses are known, 0 or more. 0 is ``"lru"``; None is all of them, which
        no policy can beat.

    Returns
    -------
    int
        Hits. O(1) an access, amortized.

    Raises
    ------
    ConfigError, ShapeError, HostMemoryError

    Examples
    --------
    >>> import numpy as np
    >>> keys = np.array([1, 2, 3, 1, 2, 3])
    >>> simulate(keys, 2), simulate(keys, 2, "lookahead")
    (0, 2)
    """
    return _simulate(as_keys(keys, "simulate"), capacity, policy, lookahead)
