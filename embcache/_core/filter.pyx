"""The feature filter of one table: when a key earns a row, and when it loses it.

Owns the counters of keys that have been seen and have no row yet; those of keys with rows live beside the slot or in
the host columns. The rules (DESIGN.md, section 3): all occurrences of a batch are counted first; then, at every
`evict_step_interval`-th step, keys whose last timestamp is more than `evict_threshold` below the newest one die; then
each key is admitted, or not, for the whole batch. The planner (ec_phases.h) applies them, with a journal to undo.

Thread safety: none inside; the planner's lock covers it.
"""

import os

from embcache.errors import ConfigError

from cython cimport final
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "ec_status.h":
    const int EC_OK

cdef extern from "ec_filter.h":
    ctypedef struct ec_index:
        int64_t size
        size_t bytes

    ctypedef struct ec_vec:
        void *data
        int64_t size
        int64_t room

    ctypedef struct ec_filter_entry:
        int64_t key
        int64_t count
        int64_t last

    ctypedef struct ec_filter_full "ec_filter":
        ec_index index
        ec_vec entries
        ec_vec unused

    void ec_filter_init(ec_filter *f, const ec_filter_rule *rule, uint64_t seed) noexcept nogil
    void ec_filter_free(ec_filter *f) noexcept nogil
    int ec_filter_entry_dead(const ec_filter *f, const ec_filter_entry *entry) noexcept nogil
    int ec_filter_check(const ec_filter *f) noexcept nogil


@final
cdef class FeatureFilter:
    """Counters of the keys of one table that wait for a row.

    Parameters
    ----------
    config : AdmitAndEvictConfig
    seed : int
        Bucket seed of the index.

    Notes
    -----
    Made and changed by `SwapManager`; here one can only look.
    """

    def __cinit__(self, config, seed):
        cdef ec_filter_rule rule
        rule.admit_threshold = config.admit_threshold
        rule.evict_threshold = config.evict_threshold
        rule.evict_interval = config.evict_step_interval
        rule.keep_min = config.evict_keep_min
        rule.time_is_step = config.time_source == "step"
        rule.needs_timestamps = config.needs_timestamps
        if rule.evict_threshold > 0 and rule.evict_interval < 1:
            raise ConfigError(f"evict_step_interval = {rule.evict_interval} with evict_threshold = {rule.evict_threshold}; give 1 or more")
        ec_filter_init(&self.f, &rule, seed)
        self.config = config
        self.pid = os.getpid()

    def __dealloc__(self):
        if self.pid == os.getpid():  # a forked child must not unmap: the parent's memory is not in it
            ec_filter_free(&self.f)

    cdef int64_t size(self) noexcept nogil:
        return (<ec_filter_full *>&self.f).index.size

    cdef int64_t export(self, int64_t *keys, int64_t *counts, int64_t *last) noexcept nogil:
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        cdef ec_filter_entry *entry
        cdef int64_t i, at = 0
        for i in range(full.entries.size):
            entry = &(<ec_filter_entry *>full.entries.data)[i]
            if entry.count > 0 and not ec_filter_entry_dead(&self.f, entry):
                keys[at] = entry.key
                counts[at] = entry.count
                last[at] = entry.last
                at += 1
        return at

    @property
    def newest(self):
        """Largest timestamp seen; -2**63 before the first."""
        return self.f.newest

    @property
    def nbytes(self):
        """Host memory held, in bytes."""
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        return full.index.bytes + full.entries.room * sizeof(ec_filter_entry) + full.unused.room * sizeof(uint32_t)

    def __len__(self):
        return self.size()

    def check(self):
        """Check the invariants.

        Raises
        ------
        AssertionError
            If one does not hold: our own mistake.
        """
        if ec_filter_check(&self.f) != EC_OK:
            raise AssertionError("feature filter: an invariant does not hold")
