"""C contract of the planner: the structures of ec_cache.h, ec_plan.h, ec_work.h and ec_peek.h that swap.pyx looks into."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from embcache._core.filter cimport FeatureFilter, ec_filter, ec_filter_cutoff
from embcache._core.notice cimport Notice
from embcache._core.plan cimport EC_CANCELLED, EC_FINISHED, EC_PLANNED, EC_SWAPPED_IN, EC_SWAPPED_OUT, Plan, Shelf, ec_arrays, ec_part, ec_part_free, ec_plan, ec_vec
from embcache._core.table cimport ec_table
from embcache._core.threads cimport ec_task_fn

cdef extern from "<pthread.h>":
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept nogil

cdef extern from "ec_vec.h":
    int64_t ec_take_countdown

cdef extern from "ec_cache.h":
    const int EC_SLOT_LIVE

    ctypedef struct ec_slot:
        int64_t key
        int64_t row
        int64_t freq
        int64_t last

    ctypedef struct ec_slotset:
        int64_t count

    ctypedef struct ec_index:
        int64_t size

    ctypedef struct ec_ghost:
        int64_t span

    ctypedef struct ec_coming:
        ec_index index
        ec_vec order
        int64_t uses

    ctypedef struct ec_recency:
        int64_t looked

    ctypedef struct ec_policy:
        int kind
        ec_recency recency
        ec_ghost ghost
        ec_coming coming
        int64_t looked

    const int EC_LOOKAHEAD
    const uint32_t EC_NO_NOTICE
    const uint32_t EC_NOTICES_MAX

    ctypedef struct ec_cache:
        int64_t capacity
        ec_slot *slots
        uint8_t *state
        uint64_t *settled
        ec_slotset free
        ec_slotset dying
        ec_policy policy
        int64_t live
        int64_t pinned
        uint32_t period
        uint32_t since
        int64_t limbo_count
        void (*row_free)(void *table, int64_t key, int64_t row) noexcept nogil
        void *table

    int ec_cache_init(ec_cache *c, int64_t capacity, int policy, uint64_t seed) noexcept nogil
    int ec_cache_grow(ec_cache *c, int64_t capacity) noexcept nogil
    void ec_cache_free(ec_cache *c) noexcept nogil

cdef extern from "ec_plan.h":
    const int EC_HITS
    const int EC_MISSES
    const int EC_SWAP_OUT_ROWS
    const int EC_ADMITTED
    const int EC_REJECTED
    const int EC_EVICTED
    const int EC_FORGOTTEN
    const int EC_BORN
    const int EC_TOTALS
    const uint32_t EC_LONG_AGO

    ctypedef struct ec_side:
        ec_cache cache
        ec_filter *filter
        ec_table *table
        int64_t base
        int64_t *totals

    void ec_side_row_free(void *table, int64_t key, int64_t row) noexcept nogil
    int ec_side_check(const ec_side *s) noexcept nogil
    void ec_plan_undo(ec_side *s, ec_part *p) noexcept nogil
    void ec_plan_unsee(ec_side *s, ec_part *p) noexcept nogil
    void ec_plan_seen(ec_side *s, ec_part *p) noexcept nogil
    void ec_plan_finish(ec_side *s, ec_part *p) noexcept nogil
    int ec_side_slot_dead(const ec_side *s, const ec_slot *slot) noexcept nogil
    void ec_side_count_dead(const ec_side *s, int64_t *rows, int64_t *waiting) noexcept nogil
    void ec_side_standings(const ec_side *s, int64_t *keys, int64_t *ranks, int64_t *versions, int64_t *counts) noexcept nogil
    int64_t ec_side_ghosts(const ec_side *s, int64_t *keys) noexcept nogil
    void ec_side_retire(ec_side *s) noexcept nogil
    void ec_side_write_counters(ec_side *s) noexcept nogil
    int64_t ec_side_scan(const ec_side *s, int64_t *cursor, int64_t *keys, int64_t *counts, int64_t *last, int64_t most) noexcept nogil

cdef extern from "ec_isa.h":
    int ec_cpu_has_avx2() noexcept nogil

cdef extern from "ec_work.h":
    const int EC_PARTS
    const int EC_HALVES
    const int EC_THREADS_MAX
    const int64_t EC_DEDUP_MAX_KEYS

    ctypedef struct ec_dedup_call:
        int64_t n
        int64_t blocks

    ctypedef struct ec_dedup_table:
        uint32_t base

    ctypedef struct ec_limit:
        int64_t cutoff
        int64_t rows
        int64_t waiting
        uint64_t *rows_most
        uint64_t *waiting_most

    ctypedef struct ec_work:
        int64_t tables
        int64_t n
        uint32_t notice
        int64_t sweep_rows
        int avx2
        double bracket
        uint32_t long_ago
        const uint8_t *clicked
        const int64_t *times
        const int64_t *clicks_at
        const int64_t *newest
        ec_limit *limits
        int counted
        int64_t step
        ec_side *sides
        ec_part *parts
        ec_arrays out
        ec_dedup_call *calls
        ec_dedup_call *cut
        ec_dedup_table *dedup
        int dedup_count
        int dedup_status
        uint64_t *seed
        ec_vec quick
        ec_vec plain
        ec_vec chunks
        void *spare
        void (*find)(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, int threads) noexcept nogil
        int (*bear)(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, uint8_t *born, int threads) noexcept nogil

    int ec_work_begin(ec_work *w, const int64_t *keys, const int64_t *offsets, const int64_t *timestamps, int64_t step, int threads) noexcept nogil
    int ec_work_chunk(ec_work *w) noexcept nogil
    void ec_work_free(ec_work *w) noexcept nogil
    size_t ec_arrays_front_bytes(int64_t tables, int64_t n) noexcept nogil
    int ec_arrays_reserve(ec_work *w) noexcept nogil
    void ec_arrays_out_offsets(ec_work *w) noexcept nogil

cdef extern from "ec_select.h":
    const double EC_SELECT_BRACKET
    const int EC_BY_TIME
    const int EC_BY_SCORE
    const int EC_WAITING_BY_SCORE

    ctypedef struct ec_rank:
        pass

    ctypedef struct ec_field:
        pass

    void ec_field_make(ec_field *f, const ec_work *w, int64_t t, int kind, int64_t cutoff) noexcept nogil
    int ec_field_ranks(const ec_field *f, ec_vec *ranks, int64_t *living) noexcept nogil

cdef extern from "ec_admission.h":
    int ec_filter_depends(const ec_work *w, int64_t t) noexcept nogil

cdef extern from "ec_phases.h":
    const int64_t EC_ALONE
    void ec_resident_rows(ec_work *w, int64_t t, int threads) noexcept nogil
    void ec_phase_resident(void *work, int64_t task) noexcept nogil
    void ec_dedup_layout(ec_dedup_call *c) noexcept nogil
    void ec_dedup_number(ec_dedup_call *c) noexcept nogil
    void ec_dedup_half_number(ec_dedup_call *c) noexcept nogil
    void ec_dedup_sum(ec_dedup_call *c) noexcept nogil
    void ec_phase_dedup(void *work, int64_t task) noexcept nogil
    void ec_phase_block_count_parts(void *work, int64_t block) noexcept nogil
    void ec_phase_block_scatter(void *work, int64_t block) noexcept nogil
    void ec_phase_part_run(void *work, int64_t part) noexcept nogil
    void ec_phase_block_number(void *work, int64_t block) noexcept nogil
    void ec_phase_block_inverse(void *work, int64_t block) noexcept nogil
    void ec_phase_part_order(void *work, int64_t part) noexcept nogil
    void ec_phase_half_run(void *work, int64_t half) noexcept nogil
    void ec_phase_half_match(void *work, int64_t half) noexcept nogil
    void ec_phase_half_inverse_and_ends(void *work, int64_t task) noexcept nogil
    void ec_phase_half_order(void *work, int64_t half) noexcept nogil
    void ec_pass_share(ec_work *w) noexcept nogil
    void ec_phase_lookup(void *work, int64_t task) noexcept nogil
    void ec_phase_count(void *work, int64_t t) noexcept nogil
    void ec_phase_decide(void *work, int64_t t) noexcept nogil
    void ec_phase_bear(void *work, int64_t t) noexcept nogil
    void ec_bear(ec_work *w, int64_t t, int threads) noexcept nogil

cdef extern from "ec_place.h":
    void ec_phase_place(void *work, int64_t t) noexcept nogil
    void ec_phase_emit(void *work, int64_t t) noexcept nogil

cdef extern from "ec_peek.h":
    const int EC_PEEK_ABSENT
    const int EC_PEEK_SLOT
    const int EC_PEEK_ROW
    const int EC_PEEK_DEFAULT

    ctypedef struct ec_overlay:
        ec_vec records
        uint64_t epoch

    int ec_overlay_make(ec_overlay *o, const ec_side *s, int64_t t, ec_plan **plans, int64_t plan_count) noexcept nogil
    void ec_overlay_free(ec_overlay *o) noexcept nogil
    void ec_peek(const ec_overlay *o, const ec_side *s, const int64_t *keys, int64_t n, int64_t *slots, int64_t *rows, uint8_t *places) noexcept nogil
    int64_t ec_born_rows(const ec_side *s, int64_t t, ec_plan **plans, int64_t plan_count, int64_t *rows) noexcept nogil
    int64_t ec_evicted_rows(const ec_overlay *o, const ec_side *s, int64_t *rows) noexcept nogil
    int64_t ec_dead_rows(const ec_overlay *o, const ec_side *s) noexcept nogil
    int64_t ec_first_dying(const ec_side *s, const int64_t *keys, int64_t n) noexcept nogil
    int64_t ec_first_in_use(const ec_overlay *o, const ec_side *s, const int64_t *keys, int64_t n) noexcept nogil
    int64_t ec_side_drop(ec_side *s, const int64_t *keys, int64_t n) noexcept nogil
    int64_t ec_counting_keys(const ec_side *s, int64_t t, ec_plan **plans, int64_t plan_count, int64_t *keys) noexcept nogil
    int64_t ec_side_forget_waiting(ec_side *s, const int64_t *keys, int64_t n) noexcept nogil


cdef extern from "ec_notice.h":
    ctypedef struct ec_use:
        pass

    ctypedef struct ec_look_part:
        int64_t count
        int status

    ctypedef struct ec_look:
        int64_t tables
        const int64_t *keys
        const int64_t *offsets
        ec_side *sides
        uint32_t id
        uint64_t number
        ec_look_part *parts
        ec_vec uses
        void *block
        size_t bytes

    void ec_phase_look_collect(void *look, int64_t t) noexcept nogil
    void ec_phase_look_link(void *look, int64_t t) noexcept nogil
    int ec_look_scratch(ec_look *look) noexcept nogil
    void ec_look_free(ec_look *look) noexcept nogil
    int64_t ec_side_coming_bytes(const ec_side *s) noexcept nogil
    int ec_look_reserve(ec_look *look) noexcept nogil
    void ec_look_undo(ec_look *look) noexcept nogil
    void ec_side_withdraw(ec_side *s, uint32_t id) noexcept nogil
    void ec_side_noticed(const ec_side *s, uint32_t id, int64_t *keys) noexcept nogil
    int64_t ec_side_noticed_count(const ec_side *s, uint32_t id) noexcept nogil


cdef const int64_t[::1] int64_array(str what, object values, int64_t length)
cdef int policy_number(object policy) except -1
cdef object host_memory(str doing)


cdef class SwapManager:
    cdef ec_work work            # sides, scratch and the call that runs
    cdef ec_overlay *overlays    # one a table, made on demand
    cdef ec_plan **plans         # unfinished ones, oldest first: what `unfinished` holds, for C
    cdef int64_t plan_room
    cdef list unfinished         # of Plan
    cdef ec_look look            # the notice that is taken now
    cdef int looks               # whether the policy is "lookahead"
    cdef dict notices            # id -> Notice that counts, in the order they were given
    cdef list notice_ids         # given back
    cdef int64_t notice_number   # of the last one
    cdef Shelf shelf             # a large block for the next plan's arrays
    cdef list tables             # of Table, kept alive
    cdef list filters            # of FeatureFilter or None
    cdef pthread_mutex_t mutex   # taken with the GIL released; held by every door
    cdef int mutex_ready
    cdef int closed
    cdef int64_t process
    cdef int64_t number          # of this manager in the process
    cdef uint64_t epoch          # changes with every change of state
    cdef uint64_t hands          # changes with every change of a table from outside
    cdef int64_t last_step
    cdef int bases_given
    cdef readonly int num_threads
    cdef int lock_status         # of the last lock_tables
    cdef object agree            # of the call that runs: who decides with others what a sweep takes away; or None
    cdef int agrees              # whether there is one
    cdef object disagreement     # what it has raised
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    cdef int64_t lock_tables(self, int write) noexcept nogil
    cdef void unlock_tables(self, int64_t count) noexcept nogil
    cdef int lock_table(self, int64_t t, int write) except -1
    cdef object lock_failure(self, int64_t t, int status)
    cdef int lock_all(self) except -1
    cdef int check_capacity(self, object table, object capacity) except -1
    cdef int check_settled(self, str doing) except -1
    cdef int check_still(self, str doing) except -1
    cdef int table_number(self, object table) except -1
    cdef void default_bases(self) noexcept
    cdef int reserve_plan(self) noexcept
    cdef int check_batch(self, const int64_t[::1] offsets, int64_t n) except -1
    cdef Notice counting(self, object notice, str doing)
    cdef int notice_into(self, Notice notice, object keys, object table_offsets) except -1
    cdef int take_notice(self, int threads) noexcept nogil
    cdef int end_notice(self, Notice notice, int at) except -1
    cdef int prepare(self, const int64_t *keys, const int64_t *offsets, const int64_t *timestamps) noexcept nogil
    cdef int threads_for(self, int64_t n) noexcept nogil
    cdef int run(self) noexcept nogil
    cdef int count_and_agree(self, int threads) noexcept nogil
    cdef int ask_others(self) except -1
    cdef object ranks_of(self, int64_t t, int kind, int64_t cutoff)
    cdef int dedup(self, int threads) noexcept nogil
    cdef void undo(self, ec_part *parts) noexcept nogil
    cdef object failure(self, Plan plan, int status)
    cdef int64_t order_of(self, Plan plan, int state, str doing) except -1
    cdef int forget(self, int64_t at) except -1
    cdef int check_turn(self, int64_t at, str doing) except -1
    cdef int overlay(self, int64_t t) except -1
    cdef FeatureFilter filter_of(self, int64_t t)
    cdef object figure(self, object table, str name)
    cdef dict numbers(self, int64_t t)
    cdef list lock_living(self, bint closing)
    cdef int unlock_living(self, list living) except -1
    cdef int end_plans(self, list living) except -1
    cdef void free_all(self) noexcept
