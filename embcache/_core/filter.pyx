"""The feature filter of one table: when a key earns a row, and when it loses it.

Owns the counters of keys that have been seen and have no row yet; those of keys with rows live beside the slot or in
the host columns. The rules (DESIGN.md, section 3): all occurrences of a batch are counted first; then, at every
`evict_step_interval`-th step, a sweep sets a cut-off below which keys are dead (or, with show/click, evicts the lowest
scores); then each key is admitted, or not, for the whole batch. The planner (ec_admission.h, ec_sweep.h) applies them,
with a journal to undo.

Thread safety: none inside; the planner's lock covers it.
"""

import numpy as np

from embcache.errors import ConfigError, HostMemoryError

from cython cimport final
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from embcache._core.arena cimport ec_promises_share, promises
from embcache._core.threads cimport process_mark

ec_promises_share(promises())

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

    ctypedef struct ec_block:
        void *data
        size_t held

    ctypedef struct ec_filter_entry:
        int64_t key
        int64_t count
        int64_t last

    ctypedef struct ec_pass:
        int64_t cutoff
        int64_t waiting_cutoff
        int64_t at
        int region
        int again

    ctypedef struct ec_sketch:
        int64_t width
        ec_block young
        ec_block old
        int64_t added
        int64_t old_added
        int64_t since

    ctypedef struct ec_filter_news:
        ec_vec entries
        ec_vec gone
        ec_vec cells

    ctypedef struct ec_filter_full "ec_filter":
        ec_index index
        ec_index late
        ec_vec entries
        ec_vec unused
        ec_pass sweep "pass"
        ec_vec sweeps
        ec_sketch sketch
        ec_filter_news news

    const int EC_PASS_IDLE
    const int EC_PASS_SLOTS

    int ec_filter_init(ec_filter *f, const ec_filter_rule *rule, uint64_t seed) noexcept nogil
    void ec_filter_free(ec_filter *f) noexcept nogil
    int ec_filter_entry_dead(const ec_filter *f, const ec_filter_entry *entry) noexcept nogil
    void ec_filter_late_keys(const ec_filter *f, int64_t *keys) noexcept nogil
    int ec_filter_fill(ec_filter *f, const int64_t *keys, const int64_t *counts, const int64_t *last, int64_t n,
                       const int64_t *late, int64_t late_n) noexcept nogil
    void ec_news_forget(ec_filter_news *n) noexcept nogil
    int ec_filter_check(const ec_filter *f) noexcept nogil
    size_t ec_sketch_block_bytes(const ec_sketch *k) noexcept nogil

_NUMBERS = ("newest", "epoch", "cutoff", "waiting_cutoff", "sweeping", "sketch_added", "sketch_old_added", "sketch_since")


@final
cdef class FeatureFilter:
    """Counters of the keys of one table that wait for a row.

    Parameters
    ----------
    config : AdmitAndEvictConfig
    seed : int
        Bucket seed of the index.

    Raises
    ------
    ConfigError
    HostMemoryError
        No room for the sketch.

    Notes
    -----
    Made and changed by `SwapManager`; here one can look, and move the whole state of a filter into an empty one.
    """

    def __cinit__(self, config, seed):
        cdef ec_filter_rule rule
        chance = config.admit_probability
        scores = config.show_click
        rule.admit_threshold = 0 if scores is not None else config.admit_threshold
        rule.evict_threshold = config.evict_threshold
        rule.evict_interval = config.evict_step_interval
        rule.keep_min = config.evict_keep_min
        rule.time_is_step = config.time_source == "step"
        rule.needs_timestamps = config.needs_timestamps
        rule.admit_always = chance >= 1.0
        rule.admit_below = 0 if chance >= 1.0 else <uint64_t>int(chance * 2.0**64)
        rule.seed = config.admit_seed & (2**64 - 1)
        rule.sketch_bytes = config.sketch_bytes
        rule.scores = scores is not None
        rule.alpha = rule.beta = rule.evict_share = rule.admit_score = 0.0
        rule.decay = 1.0
        if scores is not None:
            rule.alpha, rule.beta, rule.decay = scores.alpha, scores.beta, scores.score_decay
            rule.evict_share, rule.admit_score = scores.evict_percentage, config.admit_threshold
        if rule.evict_threshold > 0 and rule.evict_interval < 1:
            raise ConfigError(f"evict_step_interval = {rule.evict_interval} with evict_threshold = {rule.evict_threshold}; give 1 or more")
        self.process = process_mark()
        self.config = config
        if ec_filter_init(&self.f, &rule, seed) != EC_OK:
            raise HostMemoryError(f"sketch_bytes = {rule.sketch_bytes}: not so much memory can be had; give less")

    def __dealloc__(self):
        if self.process == process_mark():  # a forked child must not unmap: the parent's memory is not in it
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

    def scores(self, const int64_t[::1] counts not None, const int64_t[::1] last not None):
        """Show/click: scores (float64[n]) as of the last sweep, of counters as the planner keeps them (int64[n] each)."""
        cdef int64_t i
        if counts.shape[0] != last.shape[0]:
            raise ConfigError(f"{counts.shape[0]} counts and {last.shape[0]} times; give as many")
        scores = np.empty(counts.shape[0])
        cdef double[::1] view = scores
        for i in range(counts.shape[0]):
            view[i] = ec_filter_score(&self.f, counts[i], last[i])
        return scores

    # ------------------------------------------------------------------------------------------------------ the whole state

    def state(self):
        """All that the filter holds, to be loaded into an empty filter of the same configuration.

        Counters of keys with rows are not in it: they are the host columns, once the planner has dropped its residents.
        While a sweep's pass is under way, dead rows are in the host table too; the loaded filter takes them away.

        Returns
        -------
        dict
            ``keys``, ``counts``, ``last`` (int64, keys that wait, sorted by key; with show/click the count is 1 + the bits of
            the score and `last` the number of sweeps up to it), ``late`` (int64, sorted), ``sketch_young``, ``sketch_old``
            (uint8), and the numbers ``newest``, ``epoch``, ``cutoff``, ``waiting_cutoff``, ``sweeping``, ``sketch_added``,
            ``sketch_old_added``, ``sketch_since``.

        Raises
        ------
        ConfigError
            A plan of a sweep is unfinished.
        """
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        cdef int64_t waiting = full.index.size, late = full.late.size
        if full.sweeps.size > 0:
            raise ConfigError(f"{full.sweeps.size} sweeps belong to unfinished plans; finish or cancel these first")
        chunk = np.zeros((3, waiting + 1), np.int64)
        late_keys = np.zeros(late + 1, np.int64)
        cdef int64_t[:, ::1] view = chunk
        cdef int64_t[::1] late_view = late_keys
        cdef int64_t living = self.export(&view[0, 0], &view[1, 0], &view[2, 0])
        if full.sweep.region == EC_PASS_IDLE:
            late = 0
        else:
            ec_filter_late_keys(&self.f, &late_view[0])
        chunk = chunk[:, :living]
        chunk = chunk[:, np.argsort(chunk[0])]
        return {
            "keys": chunk[0].copy(), "counts": chunk[1].copy(), "last": chunk[2].copy(), "late": np.sort(late_keys[:late]),
            "sketch_young": self.cells(full.sketch.young.data), "sketch_old": self.cells(full.sketch.old.data),
            "newest": int(self.f.newest), "epoch": int(self.f.epoch), "cutoff": int(full.sweep.cutoff),
            "waiting_cutoff": int(full.sweep.waiting_cutoff), "sweeping": int(full.sweep.region != EC_PASS_IDLE),
            "sketch_added": int(full.sketch.added), "sketch_old_added": int(full.sketch.old_added),
            "sketch_since": int(full.sketch.since),
        }

    cdef object cells(self, void *block):
        """A copy of a generation of the sketch."""
        cdef size_t size = ec_sketch_block_bytes(&(<ec_filter_full *>&self.f).sketch)
        copy = np.zeros(size, np.uint8)
        cdef uint8_t[::1] view = copy
        if size > 0:
            memcpy(&view[0], block, size)
        return copy

    def load(self, state):
        """Take over what `state` of another filter gave.

        Raises
        ------
        ConfigError
            This filter is not empty, or `state` does not fit: an array is missing, of another type or length (the sketch
            of another `sketch_bytes` or `admit_threshold`), a key is given twice, or a count is below 1.
        HostMemoryError
            Nothing has changed.
        """
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        cdef int64_t size = ec_sketch_block_bytes(&full.sketch)
        if full.index.size > 0 or full.sketch.added + full.sketch.old_added > 0 or full.sweeps.size > 0:
            raise ConfigError("this filter has counted keys already; load into a new one")
        arrays = {}
        for name in ("keys", "counts", "last", "late", "sketch_young", "sketch_old"):
            dtype = np.uint8 if name.startswith("sketch") else np.int64
            array = state.get(name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise ConfigError(f"filter state: {name} = {array!r}; give a one-dimensional {np.dtype(dtype).name} array")
            arrays[name] = np.ascontiguousarray(array)
        numbers = {}
        for name in _NUMBERS:
            if not isinstance(state.get(name), (int, np.integer)):
                raise ConfigError(f"filter state: {name} = {state.get(name)!r}; give an integer")
            numbers[name] = int(state[name])
        waiting = len(arrays["keys"])
        if len(arrays["counts"]) != waiting or len(arrays["last"]) != waiting:
            raise ConfigError(f"filter state: {waiting} keys, {len(arrays['counts'])} counts, {len(arrays['last'])} last; give as many of each")
        if any(len(np.unique(arrays[name])) != len(arrays[name]) for name in ("keys", "late")):
            raise ConfigError("filter state: a key is given twice; give each once")
        if waiting and arrays["counts"].min() < 1:
            raise ConfigError(f"filter state: a count of {arrays['counts'].min()}; keys that wait have been counted")
        for name in ("sketch_young", "sketch_old"):
            if len(arrays[name]) != size:
                raise ConfigError(f"filter state: {name} has {len(arrays[name])} bytes, this filter's has {size}; sketch_bytes and admit_threshold must be the same")
        cdef const int64_t[::1] keys = np.append(arrays["keys"], 0), counts = np.append(arrays["counts"], 0), last = np.append(arrays["last"], 0)
        cdef const int64_t[::1] late = np.append(arrays["late"], 0)
        cdef const uint8_t[::1] young = np.append(arrays["sketch_young"], np.uint8(0)), old = np.append(arrays["sketch_old"], np.uint8(0))
        if ec_filter_fill(&self.f, &keys[0], &counts[0], &last[0], waiting, &late[0], len(arrays["late"])) != EC_OK:
            raise HostMemoryError(f"loading a filter of {waiting} keys: out of host memory; nothing has changed")
        ec_news_forget(&full.news)
        if size > 0:
            memcpy(full.sketch.young.data, &young[0], size)
            memcpy(full.sketch.old.data, &old[0], size)
        self.f.newest = numbers["newest"]
        self.f.epoch = numbers["epoch"]
        full.sketch.added = numbers["sketch_added"]
        full.sketch.old_added = numbers["sketch_old_added"]
        full.sketch.since = numbers["sketch_since"]
        full.sweep.cutoff = numbers["cutoff"]
        full.sweep.waiting_cutoff = numbers["waiting_cutoff"]
        if numbers["sweeping"]:
            full.sweep.region = EC_PASS_SLOTS

    @property
    def nbytes(self):
        """Host memory held, in bytes."""
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        cdef size_t lists = full.entries.room * sizeof(ec_filter_entry) + full.unused.room * 4
        lists += (full.news.entries.room + full.news.cells.room + full.news.gone.room) * 8
        return full.index.bytes + full.late.bytes + lists + full.sketch.young.held + full.sketch.old.held

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
