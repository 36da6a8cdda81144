"""Replays a trace of accesses through the planner's own policies, outside any planner (ec_simulate.h, ec_lookahead.h)."""

from embcache._core.digest import random_seed
from embcache.errors import ConfigError, whole_number

from libc.stdint cimport int64_t, uint64_t

from embcache._core.arena cimport ec_promises_share, promises
from embcache._core.swap cimport EC_LOOKAHEAD, host_memory, int64_array, policy_number
from embcache._core.table cimport EC_NOMEM

ec_promises_share(promises())

cdef enum:
    MAX_CAPACITY = 0x7FFFFFFF


def simulate(keys, capacity, policy="lru", lookahead=None):
    """`embcache.simulate` for keys that are int64[n] and contiguous.

    Raises
    ------
    ConfigError, ShapeError, HostMemoryError
    """
    cdef const int64_t[::1] view = int64_array("keys", keys, -1)
    cdef int64_t n = view.shape[0], slots, hits, window = 0
    cdef uint64_t seed = random_seed()
    cdef int kind = policy_number(policy)
    cdef int looks_ahead = kind == EC_LOOKAHEAD
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
