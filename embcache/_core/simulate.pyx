"""Replays a trace of accesses through the planner's own policies, outside any planner (ec_simulate.h)."""

from embcache._core.digest import random_seed
from embcache.errors import ConfigError, whole_number

from libc.stdint cimport int64_t, uint64_t

from embcache._core.swap cimport host_memory, int64_array, policy_number
from embcache._core.table cimport EC_NOMEM


def simulate(keys, capacity, policy="lru", lookahead=None):
    """Replay a trace of accesses through the planner's own policy, one key at a time.

    Parameters
    ----------
    keys : int64[n]
    capacity : int
        Slots, 1 or more.
    policy : str
        ``"lru"``.
    lookahead : int, optional
        For policies that look ahead; ``"lru"`` does not.

    Returns
    -------
    int
        Hits.

    Raises
    ------
    ConfigError, ShapeError, HostMemoryError

    Examples
    --------
    >>> import numpy as np
    >>> simulate(np.array([1, 2, 1, 3, 1, 2]), 2)
    2
    """
    cdef const int64_t[::1] view = int64_array("keys", keys, -1)
    cdef int64_t n = view.shape[0], slots, hits
    cdef uint64_t seed = random_seed()
    policy_number(policy)
    if lookahead is not None:
        raise ConfigError(f"lookahead = {lookahead!r}; policy {policy!r} does not look ahead, leave it out")
    most = whole_number(capacity)
    if most is None or most < 1:
        raise ConfigError(f"capacity = {capacity!r}; give an integer of 1 or more")
    slots = min(most, max(n, 1), 0x7FFFFFFF)
    if n == 0:
        return 0
    with nogil:
        hits = ec_simulate(&view[0], n, slots, seed)
    if hits == EC_NOMEM:
        raise host_memory("simulating")
    return hits
