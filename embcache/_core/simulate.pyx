"""Replays a trace of accesses through the planner's own policies, outside any planner (ec_simulate.h, ec_lookahead.h)."""

from embcache._core.digest import random_seed
from embcache.errors import ConfigError, whole_number

from libc.stdint cimport int64_t, uint64_t

from embcache._core.swap cimport host_memory, int64_array, policy_number
from embcache._core.table cimport EC_NOMEM

cdef enum:
    MAX_CAPACITY = 0x7FFFFFFF


def simulate(keys, capacity, policy="lru", lookahead=None):
    """Replay a trace of accesses through one of the planner's policies, one key at a time.

    Parameters
    ----------
    keys : int64[n]
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
    >>> keys = np.array([1, 2, 1, 3, 1, 2])
    >>> simulate(keys, 2), simulate(keys, 2, "lookahead")
    (2, 3)
    """
    cdef const int64_t[::1] view = int64_array("keys", keys, -1)
    cdef int64_t n = view.shape[0], slots, hits, window = 0
    cdef uint64_t seed = random_seed()
    cdef int looks_ahead = isinstance(policy, str) and policy == "lookahead"
    cdef int kind = 0 if looks_ahead else policy_number(policy)
    if lookahead is not None:
        if not looks_ahead:
            raise ConfigError(f"lookahead = {lookahead!r}; policy {policy!r} does not look ahead, leave it out")
        known = whole_number(lookahead)
        if known is None or known < 0:
            raise ConfigError(f"lookahead = {lookahead!r}; give an integer of 0 or more, or None for all accesses")
        window = min(known, n)
    else:
        window = n
    most = whole_number(capacity)
    if most is None or most < 1:
        raise ConfigError(f"capacity = {capacity!r}; give an integer of 1 or more")
    slots = min(most, max(n, 1), MAX_CAPACITY)
    if looks_ahead and n > EC_LOOKAHEAD_MOST:
        raise ConfigError(f'keys: {n} accesses; policy "lookahead" replays at most {EC_LOOKAHEAD_MOST}')
    if n == 0:
        return 0
    with nogil:
        if looks_ahead:
            hits = ec_simulate_lookahead(&view[0], n, slots, window, seed)
        else:
            hits = ec_simulate(&view[0], n, slots, kind, seed)
    if hits == EC_NOMEM:
        raise host_memory("simulating")
    return hits
