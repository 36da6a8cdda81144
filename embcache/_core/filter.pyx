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
from libc.string cimport memcpy, memset

from embcache._core.arena cimport ec_promises_share, promises
from embcache._core.digest cimport EC_VSHARDS
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
    int ec_filter_sketch(const ec_filter *f, int64_t blocks, ec_sketch *sketch) noexcept nogil
    int64_t ec_sketch_bytes(const ec_sketch *k) noexcept nogil
    void ec_sketch_free(ec_sketch *k) noexcept nogil

_NUMBERS = ("newest", "epoch", "cutoff", "waiting_cutoff", "sweeping", "sketch_blocks", "sketch_first")
_BYTES = ("sketch_young", "sketch_old")


@final
cdef class FeatureFilter:
    """Counters of the keys of one table that wait for a row.

    Parameters
    ----------
    config : AdmitAndEvictConfig
    seed : int
        Bucket seed of the index.
    vshards : (int, int)
        First and last + 1 of those whose keys come here: a sketch is of these.

    Raises
    ------
    ConfigError
    HostMemoryError
        No room for the sketch.

    Notes
    -----
    Made and changed by `SwapManager`; here one can look, and move the whole state of a filter into an empty one.
    """

    def __cinit__(self, config, seed, vshards=(0, EC_VSHARDS)):
        cdef ec_filter_rule rule
        rule.low, rule.high = vshards
        if not 0 <= rule.low < rule.high <= EC_VSHARDS:
            raise ConfigError(f"vshards = {vshards!r}; give the first and the last + 1 of some from 0 to {EC_VSHARDS}")
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
            (uint8, block by block), ``sketch_clocks`` (int64, for each block that is here occurrences in the young and in the old generation,
            and the newest timestamp when the young one began), and the numbers ``newest``, ``epoch``, ``cutoff``, ``waiting_cutoff``,
            ``sweeping``, ``sketch_blocks`` (of the whole table; 0: no sketch) and ``sketch_first`` (the first one here).

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
            "sketch_clocks": self.clocks(),
            "newest": int(self.f.newest), "epoch": int(self.f.epoch), "cutoff": int(full.sweep.cutoff),
            "waiting_cutoff": int(full.sweep.waiting_cutoff), "sweeping": int(full.sweep.region != EC_PASS_IDLE),
            "sketch_blocks": int(full.sketch.blocks), "sketch_first": int(full.sketch.first),
        }

    cdef object cells(self, void *block):
        """A copy of a generation of the sketch."""
        cdef size_t size = ec_sketch_bytes(&(<ec_filter_full *>&self.f).sketch)
        copy = np.zeros(size, np.uint8)
        cdef uint8_t[::1] view = copy
        if size > 0:
            memcpy(&view[0], block, size)
        return copy

    cdef object clocks(self):
        """A copy of those of the sketch's blocks."""
        cdef ec_sketch *sketch = &(<ec_filter_full *>&self.f).sketch
        copy = np.zeros(3 * sketch.count, np.int64)
        cdef int64_t[::1] view = copy
        if sketch.count > 0:
            memcpy(&view[0], sketch.clocks.data, sketch.count * sizeof(ec_sketch_clock))
        return copy

    def load(self, state):
        """Take over what `state` of another filter gave.

        The sketch has as many blocks as the other one had, whatever a new one would have. Without ``sketch_blocks`` it is an earlier
        version's: one block, whose clocks are the numbers ``sketch_added``, ``sketch_old_added`` and ``sketch_since``.

        Raises
        ------
        ConfigError
            This filter is not empty, or `state` does not fit: an array is missing, of another type or length (the sketch
            of another `sketch_bytes` or `admit_threshold`, or of other vshards), a key is given twice, or a count is below 1.
        HostMemoryError
            Nothing has changed.
        """
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        if full.index.size > 0 or self.clocks().reshape(-1, 3)[:, :2].any() or full.sweeps.size > 0:
            raise ConfigError("this filter has counted keys already; load into a new one")
        if "sketch_blocks" not in state:
            clock = [state.get(name) for name in ("sketch_added", "sketch_old_added", "sketch_since")]
            if not all(isinstance(value, (int, np.integer)) for value in clock):
                raise ConfigError(f"filter state: sketch_added, sketch_old_added, sketch_since = {clock!r}; give three integers")
            held = full.sketch.width > 0
            state = {**state, "sketch_blocks": int(held), "sketch_first": 0, "sketch_clocks": np.array(clock if held else [], np.int64)}
        arrays = {}
        for name in ("keys", "counts", "last", "late", "sketch_clocks", *_BYTES):
            dtype = np.uint8 if name in _BYTES else np.int64
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
        cdef const int64_t[::1] keys = np.append(arrays["keys"], 0), counts = np.append(arrays["counts"], 0), last = np.append(arrays["last"], 0)
        cdef const int64_t[::1] late = np.append(arrays["late"], 0)
        cdef ec_sketch sketch
        memset(&sketch, 0, sizeof(sketch))
        self.take_sketch(&sketch, arrays, numbers)
        if ec_filter_fill(&self.f, &keys[0], &counts[0], &last[0], waiting, &late[0], len(arrays["late"])) != EC_OK:
            ec_sketch_free(&sketch)
            raise HostMemoryError(f"loading a filter of {waiting} keys: out of host memory; nothing has changed")
        ec_news_forget(&full.news)
        ec_sketch_free(&full.sketch)
        full.sketch = sketch
        self.f.newest = numbers["newest"]
        self.f.epoch = numbers["epoch"]
        full.sweep.cutoff = numbers["cutoff"]
        full.sweep.waiting_cutoff = numbers["waiting_cutoff"]
        if numbers["sweeping"]:
            full.sweep.region = EC_PASS_SLOTS

    cdef int take_sketch(self, ec_sketch *sketch, dict arrays, dict numbers) except -1:
        """Make the sketch of a state that is loaded."""
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        cdef int64_t blocks = numbers["sketch_blocks"], size
        cdef const uint8_t[::1] young = np.append(arrays["sketch_young"], np.uint8(0)), old = np.append(arrays["sketch_old"], np.uint8(0))
        cdef const int64_t[::1] clocks = np.append(arrays["sketch_clocks"], 0)
        if (blocks > 0) != (full.sketch.width > 0) or blocks < 0 or blocks > EC_VSHARDS or blocks & (blocks - 1):
            raise ConfigError(f"filter state: sketch_blocks = {blocks}, of a sketch of {self.f.rule.sketch_bytes} bytes; give a power of two up to {EC_VSHARDS}, or 0 without a sketch")
        if blocks > 0 and ec_filter_sketch(&self.f, blocks, sketch) != EC_OK:
            raise HostMemoryError(f"sketch_bytes = {self.f.rule.sketch_bytes}: not so much memory can be had beside the one that is there; nothing has changed")
        try:
            size = ec_sketch_bytes(sketch)
            for name in _BYTES:
                if len(arrays[name]) != size:
                    raise ConfigError(
                        f"filter state: {name} has {len(arrays[name])} bytes, this filter's has {size}; sketch_bytes and admit_threshold must be the same"
                    )
            if numbers["sketch_first"] != sketch.first or len(arrays["sketch_clocks"]) != 3 * sketch.count:
                raise ConfigError(
                    f"filter state: {len(arrays['sketch_clocks']) // 3} blocks of the sketch, from {numbers['sketch_first']} on; this filter's vshards have {sketch.count}, from {sketch.first} on"
                )
        except ConfigError:
            ec_sketch_free(sketch)
            raise
        if size > 0:
            memcpy(sketch.young.data, &young[0], size)
            memcpy(sketch.old.data, &old[0], size)
            memcpy(sketch.clocks.data, &clocks[0], sketch.count * sizeof(ec_sketch_clock))
        return 0

    @property
    def nbytes(self):
        """Host memory held, in bytes."""
        cdef ec_filter_full *full = <ec_filter_full *>&self.f
        cdef size_t lists = full.entries.room * sizeof(ec_filter_entry) + full.unused.room * 4
        lists += (full.news.entries.room + full.news.cells.room + full.news.gone.room) * 8
        return full.index.bytes + full.late.bytes + lists + full.sketch.young.held + full.sketch.old.held + full.sketch.clocks.held

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
