"""The table: any int64 key -> a row of weights and optimizer state in host memory.

Owns the life of one `ec_table` (see ec_table.h for its shape and invariants), the batch calls on it and its doors.

Invariants: a key has at most one row; a row index stays while its key lives; a failed call changes nothing; row indexes
and row values never depend on threads. No pointer into a segment ever leaves the core.

Thread safety: each door takes the table's reader-writer lock with the GIL released; readers run together, a writer
alone, `close` waits for all. The nogil functions take no lock.
"""


import numpy as np

from embcache._core.digest import random_seed
from embcache.errors import ClosedError, ConfigError, ForkError, HostMemoryError, ShapeError, whole_number

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cython cimport final
from libc.math cimport isfinite
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from embcache._core.arena cimport ec_arena, ec_arena_at, ec_arena_free, ec_arena_init, ec_arena_segment_rows, ec_arena_unwritten, ec_memory_room, ec_promises_share, promises
from embcache._core.arrays cimport INT64, Array, array_open, new_int64
from embcache._core.digest cimport EC_VSHARDS, ec_hash, ec_splitmix, ec_xxh3
from embcache._core.directory cimport Directory, ec_backing
from embcache._core.index cimport ec_index, ec_index_free
from embcache._core.threads cimport parallel_for, process_mark, process_number, resolve_threads

ec_promises_share(promises())

cdef extern from "<sys/mman.h>":
    int madvise(void *at, size_t bytes, int advice) noexcept nogil

cdef extern from "ec_init.h":
    const int EC_INIT_CONSTANT
    const int EC_INIT_UNIFORM
    const int EC_INIT_NORMAL
    const int EC_INIT_TRUNCATED
    const int EC_INIT_RAMP

cdef extern from "<pthread.h>":
    ctypedef struct pthread_rwlock_t:
        pass
    ctypedef struct pthread_rwlockattr_t:
        pass
    const int PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP
    int pthread_rwlockattr_init(pthread_rwlockattr_t *attributes) noexcept nogil
    int pthread_rwlockattr_setkind_np(pthread_rwlockattr_t *attributes, int kind) noexcept nogil
    int pthread_rwlockattr_destroy(pthread_rwlockattr_t *attributes) noexcept nogil
    int pthread_rwlock_init(pthread_rwlock_t *lock, const pthread_rwlockattr_t *attributes) noexcept nogil
    int pthread_rwlock_destroy(pthread_rwlock_t *lock) noexcept nogil
    int pthread_rwlock_rdlock(pthread_rwlock_t *lock) noexcept nogil
    int pthread_rwlock_tryrdlock(pthread_rwlock_t *lock) noexcept nogil
    int pthread_rwlock_wrlock(pthread_rwlock_t *lock) noexcept nogil
    int pthread_rwlock_unlock(pthread_rwlock_t *lock) noexcept nogil

cdef extern from "ec_spare.h":
    ctypedef struct ec_spare:
        size_t bytes
    size_t ec_spare_ready(const ec_spare *spares) noexcept nogil
    size_t ec_spare_held(const ec_spare *spares) noexcept nogil
    void ec_spare_drop_all(ec_spare *spares) noexcept nogil

cdef extern from "ec_table.h":
    const int64_t EC_SPLIT_ABOVE
    const int64_t EC_EXTENT_ROWS
    const int64_t EC_ROWS_MAX
    int64_t ec_far_above() noexcept nogil
    const int64_t EC_NARROW_DIM_MAX

    ctypedef struct ec_partition:
        ec_index index
        uint32_t *extents
        int64_t extent_count, extent_slots, next_local, backed_local
        int64_t free_head, free_count, limbo
        int32_t vshard_from, vshard_to

    # The fields of ec_table that only this module touches.
    ctypedef struct ec_table_fields "ec_table":
        int64_t dim, state_dim, state_at
        int type, with_filter, closed
        ec_arena rows, states, keys, flags, frequencies, timestamps
        int64_t row_limit, written
        ec_partition *partitions
        int64_t partition_count, partition_slots, split_above, far_above
        uint8_t partition_of[4096]
        uint32_t *extent_local
        uint32_t *free_extents
        int64_t extent_count, extent_slots, free_extent_count
        int64_t live, limbo
        uint64_t version
        ec_init init
        float *initial_state
        ec_backing *backing
        int tracking
        int64_t *erased
        int64_t erased_count, erased_slots
        ec_spare *spares
        pthread_rwlock_t lock

    ec_partition *ec_partitions_copy(const ec_partition *source, int64_t count, int64_t slots) noexcept nogil
    void ec_table_initial(const ec_table *t, uint64_t hash, void *to, int type) noexcept nogil
    int ec_table_back_locals(ec_table *t) noexcept nogil
    void ec_table_promise(ec_table *t) noexcept nogil
    void ec_table_wrote(ec_table *t) noexcept nogil

cdef extern from "ec_index.h":
    void ec_index_init_in(ec_index *index, uint64_t seed, ec_backing *backing) noexcept nogil

cdef extern from "ec_directory.h":
    int ec_directory_before_store(ec_backing *b) noexcept nogil

cdef extern from "ec_metadata.h":
    int ec_table_flush(ec_table *t, const void *filter, int64_t filter_bytes) noexcept nogil
    int ec_metadata_read(ec_table *t, const void *metadata, int64_t count, const int64_t **marked, int64_t *marked_count) noexcept nogil
    void ec_metadata_settle(ec_table *t, const int64_t *marked, int64_t count) noexcept nogil

cdef extern from "ec_rows.h":
    int ec_streams(const void *out, int64_t stride, int64_t bytes, int64_t rows) noexcept nogil
    int64_t ec_lookup_span(const ec_table *t, const int64_t *keys, int64_t n, void *out, int type, uint8_t *missing,
                           int stream) noexcept nogil
    void ec_read_span(const ec_table *t, const int64_t *rows, int64_t begin, int64_t end, const ec_rows_buffer *buffer,
                      int stream) noexcept nogil
    void ec_write_share(const ec_table *t, const int64_t *rows, int64_t n, const ec_rows_buffer *buffer, int64_t share,
                        int64_t shares) noexcept nogil
    uint64_t ec_hash_at(const int64_t *keys, const uint64_t *hashes, int64_t i) noexcept nogil

cdef extern from "ec_insert.h":
    ctypedef struct ec_insertion:
        ec_table *t
        const int64_t *keys
        const uint64_t *hashes
        int64_t n
        int64_t *rows
        uint8_t *born
        const int64_t *groups
        int64_t shares
        bint bare

    ctypedef struct ec_share_result:
        int64_t born
        int status

    int64_t ec_distinct_estimate(const int64_t *keys, const uint64_t *hashes, int64_t n) noexcept nogil
    int ec_insert_begin(ec_table *t, int64_t n) noexcept nogil
    int ec_insert_prepare(ec_table *t, int64_t distinct) noexcept nogil
    void ec_settle(const ec_insertion *b, int64_t share, ec_share_result *result) noexcept nogil
    void ec_insert_undo(const ec_insertion *b) noexcept nogil
    void ec_insert_finish(const ec_insertion *b, int64_t begin, int64_t end) noexcept nogil
    void ec_insert_fill(const ec_insertion *b, const ec_rows_buffer *buffer, int64_t begin, int64_t end) noexcept nogil

cdef extern from "ec_bulk.h":
    ctypedef struct ec_bulk:
        int64_t *keys
        int64_t *begin

    bint ec_bulk_cut(ec_bulk *bulk, const ec_table *t, const int64_t *keys, int64_t n) noexcept nogil
    void ec_bulk_join(ec_bulk *bulk, const ec_table *t, const int64_t *keys, int64_t n, int64_t *rows, uint8_t *born) noexcept nogil
    void ec_bulk_drop(ec_bulk *bulk) noexcept nogil

cdef extern from "ec_changes.h":
    const int EC_CHANGED
    const int EC_UNTRACKED
    const int EC_TRACKED
    const int EC_LOST
    void ec_table_log_erased(ec_table *t, int64_t key) noexcept nogil
    void ec_table_mark_saved(ec_table *t) noexcept nogil
    int64_t ec_table_count(const ec_table *t, uint8_t flags) noexcept nogil
    int64_t ec_table_save_order(const ec_table *t, int64_t *extents, uint8_t *starts) noexcept nogil
    int64_t ec_table_rows_of_extent(const ec_table *t, int64_t extent, uint8_t flags, int64_t *rows) noexcept nogil

cdef extern from "ec_memory.h":
    int64_t ec_take_countdown

cdef extern from "ec_check.h":
    const char *ec_table_check(const ec_table *t, int64_t *longest, int64_t *total) noexcept nogil

cdef enum:
    PARALLEL_FROM = 8192    # elements below which waking the pool costs more than it gives
    SPAN = 4096             # elements of one task
    MOST_SHARES = 8         # threads of one insert: each reads the whole batch
    MOST_STATE_PARTS = 8
    MOST_DIM = 1 << 20
    POPULATE_WRITE = 23     # MADV_POPULATE_WRITE, from Linux 5.14 on; older ones refuse it
    PAGE = 4096
    HUGE_PAGE = 2 << 20

INIT_KINDS = {
    "zeros": EC_INIT_CONSTANT,
    "constant": EC_INIT_CONSTANT,
    "uniform": EC_INIT_UNIFORM,
    "normal": EC_INIT_NORMAL,
    "truncated_normal": EC_INIT_TRUNCATED,
    "linear_ramp": EC_INIT_RAMP,
}

DTYPES = {"float32": EC_FLOAT32, "float16": EC_FLOAT16, "bfloat16": EC_BFLOAT16}
# Least size of a float32 that rounds to infinity in each type; float32 itself: infinity.
cdef double *ENDS = [float("inf"), 65520.0, 3.39617752923046e38]


def refuse_memory(int64_t countdown):
    """For tests: refuse the request for memory that comes after `countdown` more, once; -1: none.

    Returns
    -------
    int
        What was left of the last countdown; -1: its refusal happened, or there was none.
    """
    global ec_take_countdown
    left = ec_take_countdown
    ec_take_countdown = countdown
    return left


def number_rows_from(Table table not None, *, local=None, last_extent=False):
    """For tests of the limits: as if the table, which must be empty, had numbered as many rows before, in its one partition (`local`, a
    multiple of 1024), or had none left to number beyond those that it has begun (`last_extent`).
    """
    cdef ec_table_fields *t = <ec_table_fields *>table.t
    cdef ec_partition *p = t.partitions
    if local is not None:
        if p.extent_count != 0 or local % EC_EXTENT_ROWS or not 0 < local <= 1 << 32:
            raise ConfigError(f"number_rows_from: local = {local!r}; give a multiple of {EC_EXTENT_ROWS}, and an empty table")
        p.extents = <uint32_t *>calloc(local // EC_EXTENT_ROWS, sizeof(uint32_t))
        if p.extents == NULL:
            raise HostMemoryError("number_rows_from: no host memory for a list of extents")
        p.extent_count = p.extent_slots = local // EC_EXTENT_ROWS
        p.next_local = p.backed_local = local
    if last_extent:
        t.extent_count = EC_ROWS_MAX // EC_EXTENT_ROWS


# ------------------------------------------------------------------------------------------------- life of an ec_table


cdef int64_t _stride(int64_t count) noexcept nogil:
    """Bytes of a row of `count`: padded to whole cache lines, or below one line to a power of two, so that no row straddles."""
    cdef int64_t padded = 1
    if count > 32:
        return (count + 63) // 64 * 64
    while padded < count:
        padded *= 2
    return padded


cdef void _destroy(ec_table *handle) noexcept nogil:
    """Free the memory. Of a file-backed table only what is not in its file: the directory ends the mappings."""
    cdef ec_table_fields *t = <ec_table_fields *>handle
    cdef int64_t i
    if t.backing != NULL:
        t.backing.closing = 1
    for i in range(t.partition_count):
        ec_index_free(&t.partitions[i].index)
        free(t.partitions[i].extents)
    free(t.partitions)
    t.partitions = NULL
    t.partition_count = 0
    ec_spare_drop_all(t.spares)
    ec_arena_free(&t.rows)
    ec_arena_free(&t.states)
    ec_arena_free(&t.keys)
    ec_arena_free(&t.flags)
    ec_arena_free(&t.frequencies)
    ec_arena_free(&t.timestamps)
    free(t.extent_local)
    free(t.free_extents)
    free(t.initial_state)
    free(t.erased)
    t.erased = NULL
    t.erased_count = t.erased_slots = 0
    t.tracking = EC_UNTRACKED
    t.extent_local = NULL
    t.free_extents = NULL
    t.initial_state = NULL
    ec_table_promise(handle)
    t.row_limit = 0
    t.live = 0
    t.limbo = 0


cdef ec_table *_create(int64_t dim, int64_t state_dim, int type, bint with_filter, int64_t split_above, uint64_t index_seed,
                       const float *initial_state, ec_backing *backing) noexcept nogil:
    cdef ec_table_fields *t = <ec_table_fields *>calloc(1, sizeof(ec_table_fields))
    cdef int64_t weight_bytes = dim * ec_type_bytes(type)
    cdef pthread_rwlockattr_t attributes
    cdef bint state_column = 0 < state_dim <= 2
    if t == NULL:
        return NULL
    t.dim = dim
    t.state_dim = state_dim
    t.type = type
    t.state_at = -1 if state_column else (weight_bytes + 3) // 4
    t.with_filter = with_filter
    t.split_above = split_above
    t.far_above = ec_far_above()
    ec_arena_init(&t.rows, _stride(weight_bytes if state_column or state_dim == 0 else 4 * (t.state_at + state_dim)))
    ec_arena_init(&t.states, _stride(4 * state_dim if state_column else 4))
    ec_arena_init(&t.keys, sizeof(int64_t))
    ec_arena_init(&t.flags, 1)
    ec_arena_init(&t.frequencies, sizeof(int64_t))
    ec_arena_init(&t.timestamps, sizeof(int64_t))
    t.backing = backing
    t.rows.backing = t.states.backing = t.keys.backing = t.flags.backing = backing
    t.frequencies.backing = t.timestamps.backing = backing
    t.partition_slots = 1
    t.partitions = ec_partitions_copy(NULL, 0, 1)
    if t.partitions == NULL:
        free(t)
        return NULL
    if initial_state != NULL:
        t.initial_state = <float *>malloc(<size_t>state_dim * sizeof(float))
        if t.initial_state == NULL:
            free(t.partitions)
            free(t)
            return NULL
        memcpy(t.initial_state, initial_state, <size_t>state_dim * sizeof(float))
    # Writers first: a stream of readers must not keep a writer, or close, waiting for ever.
    pthread_rwlockattr_init(&attributes)
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP)
    pthread_rwlock_init(&t.lock, &attributes)
    pthread_rwlockattr_destroy(&attributes)
    t.partition_count = 1
    t.partitions[0].free_head = -1
    t.partitions[0].vshard_to = EC_VSHARDS
    ec_index_init_in(&t.partitions[0].index, index_seed, backing)
    return <ec_table *>t


cdef int _lock(ec_table_fields *t, bint write) noexcept nogil:
    if write:
        pthread_rwlock_wrlock(&t.lock)
    else:
        pthread_rwlock_rdlock(&t.lock)
    if t.closed:
        pthread_rwlock_unlock(&t.lock)
        return EC_CLOSED
    return EC_OK


cdef int table_lock(ec_table *handle, bint write) noexcept nogil:
    cdef ec_table_fields *t = <ec_table_fields *>handle
    cdef int status = _lock(t, write)
    if status == EC_OK and write:
        status = ec_directory_before_store(t.backing)
        if status != EC_OK:
            pthread_rwlock_unlock(&t.lock)
    return status


cdef void table_unlock(ec_table *t) noexcept nogil:
    pthread_rwlock_unlock(&(<ec_table_fields *>t).lock)


# -------------------------------------------------------------------------------------------------------------- batches


cdef struct Batch:
    ec_table *t
    const int64_t *keys
    const uint64_t *hashes
    int64_t n
    int64_t *rows
    void *out
    int type                 # of `out`
    uint8_t *missing
    int64_t absent           # added to atomically
    int stream
    const ec_rows_buffer *buffer
    int64_t shares

cdef extern from *:
    """
    static inline void ec_add_relaxed(int64_t *to, int64_t amount) { __atomic_fetch_add(to, amount, __ATOMIC_RELAXED); }
    """
    void ec_add_relaxed(int64_t *to, int64_t amount) noexcept nogil


cdef inline int64_t _spans(int64_t n) noexcept nogil:
    return (n + SPAN - 1) // SPAN


cdef inline int64_t _span_size(int64_t n, int64_t task) noexcept nogil:
    return min(<int64_t>SPAN, n - task * SPAN)


cdef inline int _threads_for(int64_t n, int num_threads) noexcept nogil:
    return num_threads if n >= PARALLEL_FROM else 1


cdef void _find_task(void *context, int64_t task) noexcept nogil:
    cdef Batch *b = <Batch *>context
    cdef int64_t begin = task * SPAN
    cdef const uint64_t *hashes = b.hashes
    if hashes != NULL:
        hashes += begin
    ec_find_span(b.t, b.keys + begin, hashes, _span_size(b.n, task), b.rows + begin)


cdef void table_find(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows,
                     int num_threads) noexcept nogil:
    cdef Batch b
    if _threads_for(n, num_threads) == 1:
        ec_find_span(t, keys, hashes, n, rows)
        return
    b.t = t
    b.keys = keys
    b.hashes = hashes
    b.n = n
    b.rows = rows
    parallel_for(_find_task, &b, _spans(n), num_threads)


cdef struct Insert:
    ec_insertion b
    const ec_rows_buffer *buffer
    ec_share_result results[MOST_SHARES]


cdef void _settle_task(void *context, int64_t task) noexcept nogil:
    cdef Insert *job = <Insert *>context
    ec_settle(&job.b, task, job.results + task)


cdef void _finish_task(void *context, int64_t task) noexcept nogil:
    cdef Insert *job = <Insert *>context
    cdef int64_t begin = task * SPAN
    ec_insert_finish(&job.b, begin, begin + _span_size(job.b.n, task))


cdef void _fill_task(void *context, int64_t task) noexcept nogil:
    cdef Insert *job = <Insert *>context
    cdef int64_t begin = task * SPAN
    ec_insert_fill(&job.b, job.buffer, begin, begin + _span_size(job.b.n, task))


cdef int table_insert(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, uint8_t *born,
                      int num_threads) noexcept nogil:
    return _insert(t, keys, hashes, n, rows, born, num_threads, NULL)


cdef int _insert(ec_table *handle, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, uint8_t *born,
                 int num_threads, const ec_rows_buffer *buffer) noexcept nogil:
    """`table_insert`; with `buffer` all keys get its rows, in their order, and of a repeated key the last."""
    cdef ec_table_fields *t = <ec_table_fields *>handle
    cdef Insert job
    cdef ec_bulk bulk
    cdef bint huge = n > t.split_above // 2, cut = False, filled = False
    cdef int64_t i, count = 0
    cdef int threads = _threads_for(n, num_threads)
    cdef int status = ec_insert_begin(handle, n)
    if status == EC_OK and huge:
        status = ec_insert_prepare(handle, ec_distinct_estimate(keys, hashes, n))
    if status != EC_OK:
        ec_spare_drop_all(t.spares)  # memory is short
        return status
    memset(born, 0, <size_t>n)
    memset(job.results, 0, sizeof(job.results))
    job.b.t = handle
    job.b.keys = keys
    job.b.hashes = hashes
    job.b.n = n
    job.b.rows = rows
    job.b.born = born
    job.b.groups = NULL
    job.b.bare = buffer != NULL
    job.buffer = buffer
    job.b.shares = min(<int64_t>threads, min(t.partition_count, <int64_t>MOST_SHARES))
    if huge and t.partition_count > 1:
        cut = ec_bulk_cut(&bulk, handle, keys, n)
    if cut:
        job.b.keys = bulk.keys
        job.b.hashes = NULL
        job.b.groups = bulk.begin
    parallel_for(_settle_task, &job, job.b.shares, threads)
    for i in range(job.b.shares):
        count += job.results[i].born
        if status == EC_OK:
            status = job.results[i].status
    if status == EC_OK:
        status = ec_table_back_locals(handle)
    if status == EC_OK and count:
        filled = buffer != NULL and count == n and not cut
        parallel_for(_fill_task if filled else _finish_task, &job, _spans(n), threads)
        ec_table_wrote(handle)
        t.live += count
        t.version += 1
    elif status != EC_OK:
        ec_insert_undo(&job.b)
        ec_spare_drop_all(t.spares)
    if cut:
        if status == EC_OK:
            ec_bulk_join(&bulk, handle, keys, n, rows, born)
        ec_bulk_drop(&bulk)
    if status == EC_OK and buffer != NULL and not filled:
        table_write(handle, rows, n, buffer, num_threads)
    return status


cdef void _lookup_task(void *context, int64_t task) noexcept nogil:
    cdef Batch *b = <Batch *>context
    cdef int64_t begin = task * SPAN
    cdef int64_t absent = ec_lookup_span(b.t, b.keys + begin, _span_size(b.n, task),
                                         <char *>b.out + begin * b.t.dim * ec_type_bytes(b.type), b.type,
                                         NULL if b.missing == NULL else b.missing + begin, b.stream)
    if absent:
        ec_add_relaxed(&b.absent, absent)


cdef int64_t table_lookup(ec_table *t, const int64_t *keys, int64_t n, void *out, int type, uint8_t *missing,
                          int num_threads) noexcept nogil:
    """Weights of keys into out (n, dim) of `type`. Absent keys: initial values where `missing` is NULL, else missing[i] = 1. Returns their number."""
    cdef Batch b
    cdef int64_t out_bytes = t.dim * ec_type_bytes(type)
    b.t = t
    b.keys = keys
    b.n = n
    b.out = out
    b.type = type
    b.missing = missing
    b.absent = 0
    b.stream = ec_streams(out, out_bytes, out_bytes, n)
    parallel_for(_lookup_task, &b, _spans(n), _threads_for(n, num_threads))
    return b.absent


cdef void _read_task(void *context, int64_t task) noexcept nogil:
    cdef Batch *b = <Batch *>context
    cdef int64_t begin = task * SPAN
    ec_read_span(b.t, b.rows, begin, begin + _span_size(b.n, task), b.buffer, b.stream)


cdef void table_read(ec_table *t, const int64_t *rows, int64_t n, const ec_rows_buffer *buffer, int num_threads) noexcept nogil:
    cdef Batch b
    b.t = t
    b.rows = <int64_t *>rows
    b.n = n
    b.buffer = buffer
    b.stream = ec_streams(buffer.weights, buffer.stride, t.dim * ec_type_bytes(buffer.type), n)
    parallel_for(_read_task, &b, _spans(n), _threads_for(n, num_threads))


cdef void _write_task(void *context, int64_t task) noexcept nogil:
    cdef Batch *b = <Batch *>context
    ec_write_share(b.t, b.rows, b.n, b.buffer, task, b.shares)


cdef void table_write(ec_table *t, const int64_t *rows, int64_t n, const ec_rows_buffer *buffer, int num_threads) noexcept nogil:
    cdef Batch b
    b.t = t
    b.rows = <int64_t *>rows
    b.n = n
    b.buffer = buffer
    b.shares = _threads_for(n, num_threads)
    parallel_for(_write_task, &b, b.shares, <int>b.shares)
    if n > 0:
        t.version += 1


cdef void _init_task(void *context, int64_t task) noexcept nogil:
    cdef Batch *b = <Batch *>context
    cdef int64_t i, begin = task * SPAN
    for i in range(begin, begin + _span_size(b.n, task)):
        ec_table_initial(b.t, ec_hash_at(b.keys, b.hashes, i), <char *>b.out + i * b.t.dim * ec_type_bytes(b.type), b.type)


cdef void table_init_rows(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, void *out, int type,
                          int num_threads) noexcept nogil:
    cdef Batch b
    b.t = t
    b.keys = keys
    b.hashes = hashes
    b.n = n
    b.out = out
    b.type = type
    parallel_for(_init_task, &b, _spans(n), _threads_for(n, num_threads))


cdef int64_t table_scan(ec_table *t, int64_t *cursor, int64_t *rows, int64_t most) noexcept nogil:
    cdef int64_t count = 0, row = cursor[0]
    while row < t.row_limit and count < most:
        if table_flags(t, row)[0] & EC_LIVE:
            rows[count] = row
            count += 1
        row += 1
    cursor[0] = row
    return count


cdef int64_t _erase(ec_table *t, const int64_t *keys, int64_t n) noexcept nogil:
    """Remove keys in batch order; returns how many were there."""
    cdef int64_t i, j, m, row, count = 0
    cdef int64_t found[256]
    for i in range(0, n, 256):
        m = min(<int64_t>256, n - i)
        ec_find_span(t, keys + i, NULL, m, found)  # brings the buckets into the cache, many at once
        for j in range(m):
            if found[j] >= 0:
                row = table_detach(t, keys[i + j], ec_hash(keys[i + j]))
                if row >= 0:
                    table_free(t, ec_hash(keys[i + j]), row)
                    count += 1
    return count


# ---------------------------------------------------------------------------------------------------------------- doors


cdef inline const int64_t *_longs(const int64_t[::1] values) noexcept:
    return &values[0] if values.shape[0] else NULL


cdef inline float *_floats(float[:, ::1] values) noexcept:
    return &values[0, 0] if values.shape[0] and values.shape[1] else NULL


cdef int _integer(object owner, str name, object value, int64_t low, int64_t high, int64_t *out) except -1:
    number = whole_number(value)
    if number is None or not low <= number <= high:
        raise ConfigError(f"{owner}: {name} = {value!r}; give an integer from {low} to {high}")
    out[0] = number
    return 0


cdef double _largest(str kind, double a, double b) noexcept:
    """The size that no initial value exceeds: the generator's normal numbers lie within 8.3 standard deviations."""
    if kind == "normal" or kind == "truncated_normal":
        return abs(a) + (8.3 if kind == "normal" else 2.0) * abs(b)
    return 0.0 if kind == "zeros" else abs(a) if kind == "constant" else max(abs(a), abs(b))


cdef list _runs(object values):
    """[[count, value], ...] of equal neighbours; empty where all are zero."""
    edges = np.flatnonzero(np.diff(values)) + 1
    parts = np.split(values, edges) if np.any(values) else []
    return [[len(part), float(part[0])] for part in parts]


@final
cdef class ComingMemory:
    """Memory in which rows that are still to be born will lie; see `Table.coming_memory`. Any one thread, beside any others' calls."""

    cdef char *at
    cdef char *end

    def ready(self):
        """Have the system clear a little more of it, at most 2 MiB; False once there is nothing left, or the system will not.

        No content changes, whatever has become of the table meanwhile.
        """
        cdef size_t bytes = min(<size_t>HUGE_PAGE, <size_t>(self.end - self.at))
        cdef int refused
        if bytes == 0:
            return False
        with nogil:
            refused = madvise(self.at, bytes, POPULATE_WRITE)
        self.at = self.end if refused else self.at + bytes
        return self.at < self.end


@final
cdef class Table:
    """Keys -> rows of weights and state in host memory.

    Parameters
    ----------
    name : str
        With `seed`, what the initial values are made of.
    dim : int
        Weights of a row; at most 8192 where they are of 2 bytes.
    state_dim : int
        Optimizer state of a row (float32).
    dtype : {"float32", "float16", "bfloat16"}
        Element type of the weights.
    initializer : tuple of (str, float, float)
        ("zeros" | "constant" | "uniform" | "normal" | "truncated_normal" | "linear_ramp", a, b): (value, -), (low, high),
        (mean, std), (mean, std), (start, stop).
    seed : int
        Any int64.
    initial_state : float32 array of (state_dim,), optional
        State of a new row; default zeros.
    with_filter : bool, optional
        Keep a frequency and a timestamp beside each row. None: as the directory says, else no.
    num_threads : int, optional
        Threads of a large call; default: the CPUs available, at most 16.
    split_above : int
        Live rows above which a partition splits. For tests.
    far_above : int, optional
        Live rows above which look-ups go the way for indexes beyond 1 GiB; default: as is fastest on this CPU. For tests.
    index_seed : int, optional
        Seed of the bucket choice; default: random, so that crafted keys cannot chain. No result depends on it.
    directory : path, optional
        Where the table lies in files (see `Directory`, whose errors come from here too): a new or empty one, or one that a table
        of the same description has left. Default: in memory.

    Notes
    -----
    Arrays are C-contiguous; keys, row indexes and places int64, state float32. Rows of weights are float32 (for a narrower
    table widened when read, rounded to nearest even when written), or lie as in the table, bit by bit: float16 for a float16 table,
    int16 for a bfloat16 table. Arguments are checked before anything changes: `ShapeError` or `ConfigError`; `HostMemoryError` leaves the table as it was; `ClosedError` after `close`;
    `ForkError` in a forked child.

    Thread safety: any thread may call at any time; reading calls run together, a changing call alone.
    """

    def __cinit__(self):
        self.t = NULL
        self.process = process_mark()

    def __init__(self, str name not None, dim, *, state_dim=0, dtype="float32", initializer=("uniform", -0.05, 0.05), seed=0,
                 initial_state=None, with_filter=None, num_threads=None, split_above=EC_SPLIT_ABOVE, far_above=None,
                 index_seed=None, directory=None):
        if self.t != NULL:
            raise ConfigError(f"table {self.name!r}: already constructed; make a new Table")
        owner = f"table {name!r}"
        cdef int64_t weights, state, split, far, table_seed
        if dtype not in DTYPES:
            raise ConfigError(f"{owner}: dtype = {dtype!r}; give one of {', '.join(DTYPES)}")
        cdef int type = DTYPES[dtype]
        _integer(owner, "dim", dim, 1, MOST_DIM if type == EC_FLOAT32 else EC_NARROW_DIM_MAX, &weights)
        _integer(owner, "state_dim", state_dim, 0, 8 * MOST_DIM, &state)
        _integer(owner, "split_above", split_above, 1, EC_SPLIT_ABOVE << 16, &split)
        _integer(owner, "far_above", ec_far_above() if far_above is None else far_above, 0, EC_ROWS_MAX, &far)
        _integer(owner, "seed", seed, INT64_MIN, INT64_MAX, &table_seed)
        kind, a, b = initializer
        if kind not in INIT_KINDS:
            raise ConfigError(f"{owner}: initializer {kind!r}; give one of {sorted(INIT_KINDS)}")
        cdef float first = a, second = b
        if not isfinite(first) or not isfinite(second) or (kind in ("uniform", "linear_ramp") and not isfinite(second - first)):
            raise ConfigError(f"{owner}: initializer {initializer!r} leaves the range of float32; give smaller numbers")
        if type != EC_FLOAT32 and _largest(kind, first, second) >= ENDS[type]:
            raise ConfigError(f"{owner}: initializer {initializer!r} leaves the range of {dtype}, which ends at {ENDS[type]:g}; give smaller numbers")
        if initial_state is not None:
            initial_state = np.ascontiguousarray(initial_state, dtype=np.float32)
            if len(initial_state) != state:
                raise ConfigError(f"{owner}: initial_state has {len(initial_state)} elements; give state_dim = {state}")
        self.num_threads = resolve_threads(num_threads)
        self.name = name
        self.seed = table_seed
        self.dtype = dtype
        description = {
            "name": name, "dim": weights, "state_dim": state, "dtype": dtype, "initializer": [kind, first, second], "seed": table_seed,
            "initial_state": None if initial_state is None else _runs(initial_state),
            "with_filter": None if with_filter is None else bool(with_filter),
        }
        bucket_seed = random_seed() if index_seed is None else index_seed & 0xFFFFFFFFFFFFFFFF
        if directory is not None:
            self.directory = Directory(directory, owner)
        try:
            self.build(description, bucket_seed, split)
            (<ec_table_fields *>self.t).far_above = far
        except BaseException:
            self.discard()
            raise

    cdef int build(self, dict description, object bucket_seed, int64_t split) except -1:
        """Make the empty table, or map the one that the directory holds."""
        cdef ec_backing *backing = NULL
        cdef const float[::1] state_values
        cdef const float *state_from = NULL
        stored = None
        if self.directory is not None:
            backing = &self.directory.backing
            stored = self.directory.identity
        if stored is not None:
            description, bucket_seed = self.agreed(description, stored)
        else:
            description = description | {"initial_state": description["initial_state"] or [], "with_filter": bool(description["with_filter"])}
        if description["initial_state"]:
            state_values = np.concatenate([np.full(count, value, dtype=np.float32) for count, value in description["initial_state"]])
            state_from = &state_values[0]
        encoded = self.name.encode("utf-8", "surrogatepass")
        cdef const char *characters = encoded
        self.t = _create(description["dim"], description["state_dim"], DTYPES[self.dtype], description["with_filter"], split, bucket_seed,
                         state_from, backing)
        if self.t == NULL:
            raise HostMemoryError(f"table {self.name!r}: no host memory for an empty table")
        cdef ec_init *init = &(<ec_table_fields *>self.t).init
        kind, first, second = description["initializer"]
        init.base = ec_splitmix(ec_xxh3(characters, len(encoded), <uint64_t>self.seed))
        init.kind = INIT_KINDS[kind]
        init.a = 0.0 if kind == "zeros" else first
        init.b = second
        if stored is not None:
            self.reopen()
        elif self.directory is not None:
            self.directory.create(description | {"index_seed": bucket_seed})
        return 0

    def agreed(self, description, stored):
        """What is in the directory, if that is what was asked for: (description, bucket seed)."""
        differing = [
            f"{field} = {stored.get(field)!r}, not {value!r}"
            for field, value in description.items() if value is not None and stored.get(field) != value
        ]
        if differing:
            raise ConfigError(f"table {self.name!r}: directory {self.directory.path!r} holds a table with {'; '.join(differing)}; describe the "
                              "table as it was made, or give another directory")
        return stored, stored["index_seed"]

    cdef int reopen(self) except -1:
        """Map what the directory holds. It is left clean, whatever its last planner had marked."""
        cdef const int64_t *marked = NULL
        cdef int64_t marked_count = 0, count
        cdef int status = EC_OK
        cdef const char *content
        metadata = self.directory.metadata()
        if len(metadata) == 0:
            return 0  # nothing was ever stored
        content = metadata
        count = len(metadata)
        with nogil:
            status = ec_metadata_read(self.t, content, count, &marked, &marked_count)
        if status == EC_BROKEN:
            raise self.directory.damaged("its metadata is not what this version writes")
        if status == EC_OK and marked_count > 0:
            status = ec_directory_before_store(&self.directory.backing)
            if status == EC_OK:
                ec_metadata_settle(self.t, marked, marked_count)
                status = ec_table_flush(self.t, NULL, 0)
                if not self.directory.backing.failed:
                    status = EC_OK  # dirty then, and open: the next flush makes it clean
        if status != EC_OK:
            raise self.failure(status, -1)
        return 0

    cdef void discard(self) noexcept:
        """Give back everything; the directory stays as it is on disk."""
        if self.t != NULL:
            if not self.t.closed:
                _destroy(self.t)
            pthread_rwlock_destroy(&(<ec_table_fields *>self.t).lock)
            free(self.t)
            self.t = NULL
        if self.directory is not None:
            self.directory.drop()

    def __dealloc__(self):
        # In a forked child the mappings do not exist (MADV_DONTFORK); something else may lie at their addresses.
        if self.process == process_mark():
            self.discard()

    # ------------------------------------------------------------------------------------------------ locks and errors

    cdef int check_process(self) except -1:
        if self.t == NULL:
            raise ClosedError("table: its construction failed; make a new one")
        if self.process != process_mark():
            raise ForkError(f"table {self.name!r}: made in process {process_number(self.process)}, used in its forked child {process_number(process_mark())}; "
                            "open or build a table in the child instead")
        return 0

    cdef int enter(self, bint write) except -1:
        cdef int status = EC_CLOSED
        self.check_process()
        if not write and pthread_rwlock_tryrdlock(&(<ec_table_fields *>self.t).lock) == 0:
            if not self.t.closed:
                return 0  # nobody to wait for, so no GIL to release
            table_unlock(self.t)
        else:
            with nogil:
                status = table_lock(self.t, write)
        if status != EC_OK:
            raise self.failure(status, 0)
        return 0

    cdef void leave(self) noexcept:
        table_unlock(self.t)

    cdef object failure(self, int status, int64_t keys):
        if status == EC_CLOSED:
            return ClosedError(f"table {self.name!r} was closed")
        if status == EC_DISK:
            return self.directory.refusal()
        if status == EC_NOMEM and keys < 0:
            return HostMemoryError(f"table {self.name!r}: no host memory to open or flush {self.directory.path!r}; nothing has changed: free some")
        if status == EC_NOMEM:
            return HostMemoryError(
                f"table {self.name!r}: no host memory to insert {keys} keys into {self.t.live} rows of {self.t.dim} {self.dtype} "
                f"weights and {self.t.state_dim} of state ({self.mapped_bytes()} bytes held, about {ec_memory_room()} may still be had); the table is unchanged: "
                "insert fewer keys, erase some, or raise the limit (RLIMIT_AS, the cgroup's memory.max)")
        if status == EC_LIMIT:
            return HostMemoryError(
                f"table {self.name!r}: no more rows can be numbered ({self.t.live} live; at most 2^40 in a table and 2^32 in each of its "
                f"{self.t.partition_count} partitions); the table is unchanged: erase keys, or spread them over several tables")
        return AssertionError(f"table {self.name!r}: unexpected status {status}")

    cdef int check_rows(self, const int64_t[::1] rows, int64_t limit, str what) except -1:
        cdef int64_t i, worst = -1
        with nogil:
            for i in range(rows.shape[0]):
                worst = max(worst, rows[i])
        if worst >= limit:
            raise ShapeError(f"table {self.name!r}: {what} {worst} is beyond the last one, {limit - 1}")
        return 0

    cdef int check_shape(self, str what, int64_t rows, int64_t columns, int64_t want_rows, int64_t want_columns) except -1:
        if (want_rows >= 0 and rows != want_rows) or columns != want_columns:
            height = want_rows if want_rows >= 0 else "any"
            raise ShapeError(f"table {self.name!r}: {what} has shape ({rows}, {columns}); give ({height}, {want_columns})")
        return 0

    cdef int open_weights(self, str what, object weights, int64_t rows, bint write, Py_buffer *at, int *type) except -1:
        cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if write else 0)
        cdef char kind = 0
        try:
            PyObject_GetBuffer(weights, at, flags)
        except (TypeError, ValueError, BufferError):
            raise self.unfit(what, weights, write) from None
        if at.ndim == 2 and at.format != NULL and at.format[0] != 0 and at.format[1] == 0:
            kind = at.format[0]
        if kind == b"f":
            type[0] = EC_FLOAT32
        elif (kind == b"e" and self.t.type == EC_FLOAT16) or (kind == b"h" and self.t.type == EC_BFLOAT16):
            type[0] = self.t.type
        else:
            PyBuffer_Release(at)
            raise self.unfit(what, weights, write)
        try:
            self.check_shape(what, at.shape[0], at.shape[1], rows, self.t.dim)
        except ShapeError:
            PyBuffer_Release(at)
            raise
        return 0

    cdef object unfit(self, str what, object weights, bint write):
        found = f"{weights.dtype} of shape {weights.shape}" if isinstance(weights, np.ndarray) else type(weights).__name__
        return ShapeError(f"table {self.name!r}: {what} is {found}; give a {'writeable, ' if write else ''}C-contiguous float32 (n, {self.t.dim})"
                          f"{['', ', or float16', ', or its bits as int16'][self.t.type]}")

    # -------------------------------------------------------------------------------------------------------- properties

    @property
    def dim(self):
        """Weights of a row."""
        return self.t.dim

    @property
    def state_dim(self):
        """State floats of a row."""
        return self.t.state_dim

    @property
    def with_filter(self):
        """Whether frequencies and timestamps are kept."""
        return bool(self.t.with_filter)

    @property
    def closed(self):
        """Whether `close` was called."""
        return bool(self.t.closed)

    @property
    def version(self):
        """A number that changes with every change of content."""
        return self.t.version

    def __len__(self):
        self.enter(False)
        try:
            return self.t.live
        finally:
            self.leave()

    # ------------------------------------------------------------------------------------------------------ keys to rows

    cdef int open_longs(self, str what, object values, int64_t count, bint write, Array *array) except -1:
        """Look at an int64 array of `count` elements, -1: of any number."""
        if not array_open(values, 1, INT64, write, array):
            found = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ShapeError(f"table {self.name!r}: {what} is {found}; give an aligned{', writeable' if write else ''}, contiguous int64 array of one dimension")
        if count >= 0:
            self.check_shape(what, array.rows, 1, count, 1)
        return 0

    def find(self, keys, rows=None):
        """Row index of each key, -1 where absent: int64 (n,), written into `rows` if given."""
        cdef Array key, row
        self.open_longs("keys", keys, -1, False, &key)
        if rows is None:
            rows = new_int64(key.rows)
        self.open_longs("rows", rows, key.rows, True, &row)
        self.enter(False)
        try:
            if key.rows:
                with nogil:
                    table_find(self.t, <const int64_t *>key.at, NULL, key.rows, <int64_t *>row.at, self.num_threads)
        finally:
            self.leave()
        return rows

    def insert_born(self, keys, rows=None):
        """Insert the absent keys: (row index of each key int64 (n,), 1 at the first place of each new key uint8 (n,)).

        The row indexes are written into `rows` if given, which must not share memory with `keys`.
        """
        cdef Array key, row
        self.open_longs("keys", keys, -1, False, &key)
        if rows is None:
            rows = new_int64(key.rows)
        self.open_longs("rows", rows, key.rows, True, &row)
        born = np.empty(key.rows, dtype=np.uint8)
        cdef uint8_t[::1] marks = born
        cdef int status = EC_OK
        self.enter(True)
        try:
            if key.rows:
                with nogil:
                    status = table_insert(self.t, <const int64_t *>key.at, NULL, key.rows, <int64_t *>row.at, &marks[0], self.num_threads)
            if status != EC_OK:
                raise self.failure(status, key.rows)
        finally:
            self.leave()
        return rows, born

    def insert(self, keys, rows=None):
        """Insert the absent keys; row index of each key: int64 (n,), written into `rows` if given."""
        return self.insert_born(keys, rows)[0]

    def erase(self, const int64_t[::1] keys not None):
        """Remove keys; absent ones are passed over. Returns how many were removed."""
        cdef int64_t n = keys.shape[0]
        cdef int64_t count = 0
        self.enter(True)
        try:
            if n:
                with nogil:
                    count = _erase(self.t, &keys[0], n)
        finally:
            self.leave()
        return count

    def scan(self, int64_t cursor, int64_t most):
        """Live rows in row order from `cursor` (0 at first) on: (row indexes int64 (at most `most`,), next cursor)."""
        if cursor < 0 or most < 1:
            raise ShapeError(f"table {self.name!r}: scan from {cursor} for {most} rows; give a cursor >= 0 and at least one row")
        self.enter(False)
        cdef int64_t[::1] out
        cdef int64_t count
        try:
            most = min(most, max(self.t.live, <int64_t>1))
            rows = np.empty(most, dtype=np.int64)
            out = rows
            with nogil:
                count = table_scan(self.t, &cursor, &out[0], most)
        finally:
            self.leave()
        return rows[:count], cursor

    # ------------------------------------------------------------------------------------------------------ rows by key

    def lookup(self, const int64_t[::1] keys not None, out not None, bint insert=True):
        """Write the weights of each key into out (n, dim).

        Absent keys are inserted, or with ``insert=False`` read their initial value.
        """
        cdef int64_t n = keys.shape[0]
        cdef int64_t absent
        cdef uint8_t[::1] missing
        cdef Py_buffer at
        cdef int type
        self.check_process()
        self.open_weights("out", out, n, True, &at, &type)
        try:
            if n and insert:
                missing = np.empty(n, dtype=np.uint8)
            self.enter(False)
            try:
                if n == 0:
                    return
                with nogil:
                    absent = table_lookup(self.t, &keys[0], n, at.buf, type, &missing[0] if insert else NULL, self.num_threads)
            finally:
                self.leave()
            if absent and insert:
                self.lookup_missing(keys, np.flatnonzero(missing), at.buf, type)
        finally:
            PyBuffer_Release(&at)

    cdef int lookup_missing(self, const int64_t[::1] keys, const int64_t[::1] places, void *out, int type) except -1:
        cdef int64_t n = places.shape[0]
        cdef int status
        cdef int64_t i
        cdef int64_t[::1] absent = np.empty(n, dtype=np.int64)
        cdef int64_t[::1] rows = np.empty(n, dtype=np.int64)
        cdef uint8_t[::1] born = np.empty(n, dtype=np.uint8)
        cdef ec_rows_buffer buffer
        self.enter(True)
        try:
            with nogil:
                for i in range(n):
                    absent[i] = keys[places[i]]
                status = table_insert(self.t, &absent[0], NULL, n, &rows[0], &born[0], self.num_threads)
                if status == EC_OK:
                    memset(&buffer, 0, sizeof(buffer))
                    buffer.weights = out
                    buffer.stride = self.t.dim * ec_type_bytes(type)
                    buffer.type = type
                    buffer.places = &places[0]
                    table_read(self.t, &rows[0], n, &buffer, self.num_threads)
            if status != EC_OK:
                raise self.failure(status, n)
        finally:
            self.leave()
        return 0

    def init_rows(self, const int64_t[::1] keys not None, out not None):
        """Write the initial weights of each key into out (n, dim), whether or not the key is in the table."""
        cdef int64_t n = keys.shape[0]
        cdef Py_buffer at
        cdef int type
        self.check_process()
        self.open_weights("out", out, n, True, &at, &type)
        try:
            self.enter(False)
            try:
                if n:
                    with nogil:
                        table_init_rows(self.t, &keys[0], NULL, n, at.buf, type, self.num_threads)
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&at)

    def lookup_rows(self, const int64_t[::1] keys not None, weights=None, state=None):
        """Weights (n, dim) and state (n, state_dim) of each key, written into the given arrays or new ones (of float32).

        An absent key reads its initial values and stays absent.
        """
        if weights is None:
            weights = np.empty((keys.shape[0], self.t.dim), dtype=np.float32)
        if state is None:
            state = np.empty((keys.shape[0], self.t.state_dim), dtype=np.float32)
        cdef int64_t n = keys.shape[0]
        cdef int64_t i, state_dim = self.t.state_dim
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef ec_rows_buffer buffer
        cdef float *state_at
        cdef Py_buffer at
        cdef int type
        cdef float[:, ::1] states = state
        self.check_process()
        self.check_shape("state", states.shape[0], states.shape[1], n, state_dim)
        cdef int64_t[::1] rows = np.empty(n, dtype=np.int64)
        self.open_weights("weights", weights, n, True, &at, &type)
        try:
            self.enter(False)
            try:
                if n:
                    state_at = _floats(states)
                    memset(&buffer, 0, sizeof(buffer))
                    buffer.weights = at.buf
                    buffer.stride = t.dim * ec_type_bytes(type)
                    buffer.type = type
                    buffer.parts = 1 if state_dim else 0
                    buffer.states = &state_at
                    buffer.widths = &state_dim
                    with nogil:
                        table_find(self.t, &keys[0], NULL, n, &rows[0], self.num_threads)
                        table_read(self.t, &rows[0], n, &buffer, self.num_threads)
                        for i in range(n):
                            if rows[i] >= 0:
                                continue
                            ec_table_initial(self.t, ec_hash(keys[i]), <char *>at.buf + i * buffer.stride, type)
                            if state_dim and t.initial_state != NULL:
                                memcpy(state_at + i * state_dim, t.initial_state, <size_t>state_dim * sizeof(float))
                            elif state_dim:
                                memset(state_at + i * state_dim, 0, <size_t>state_dim * sizeof(float))
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&at)
        return weights, state

    def assign(self, const int64_t[::1] keys not None, weights not None, const float[:, ::1] state=None,
               const int64_t[::1] frequencies=None, const int64_t[::1] timestamps=None, *, num_threads=None):
        """Insert or overwrite rows; of a repeated key the last row wins.

        Without `state` the state becomes zero; without `frequencies` and `timestamps`, of a table that keeps them, those of rows that
        were there stay. `num_threads`: default the table's.
        """
        cdef int threads = self.num_threads if num_threads is None else resolve_threads(num_threads)
        cdef int64_t n = keys.shape[0]
        cdef int64_t state_dim = self.t.state_dim
        cdef int status = EC_OK
        cdef ec_rows_buffer buffer
        cdef float *state_at
        cdef Py_buffer at
        self.check_process()
        if state is not None:
            self.check_shape("state", state.shape[0], state.shape[1], n, state_dim)
        if (frequencies is None) != (timestamps is None) or (frequencies is not None and not self.t.with_filter):
            raise ShapeError(f"table {self.name!r}: frequencies and timestamps go together, and to a table with a filter")
        if frequencies is not None:
            self.check_shape("frequencies", frequencies.shape[0], 1, n, 1)
            self.check_shape("timestamps", timestamps.shape[0], 1, n, 1)
        cdef int64_t i
        cdef int64_t[::1] rows = np.empty(n, dtype=np.int64)
        cdef uint8_t[::1] born = np.empty(n, dtype=np.uint8)
        memset(&buffer, 0, sizeof(buffer))
        self.open_weights("weights", weights, n, False, &at, &buffer.type)
        try:
            self.enter(True)
            try:
                if n == 0:
                    return
                buffer.weights = at.buf
                buffer.stride = self.t.dim * ec_type_bytes(buffer.type)
                buffer.parts = -1
                if state is not None and state_dim:
                    state_at = <float *>&state[0, 0]
                    buffer.parts = 1
                    buffer.states = &state_at
                    buffer.widths = &state_dim
                with nogil:
                    status = _insert(self.t, &keys[0], NULL, n, &rows[0], &born[0], threads, &buffer)
                    if status == EC_OK and frequencies is not None:
                        for i in range(n):
                            table_freq(self.t, rows[i])[0] = frequencies[i]
                            table_ts(self.t, rows[i])[0] = timestamps[i]
                if status != EC_OK:
                    raise self.failure(status, n)
            finally:
                self.leave()
        finally:
            PyBuffer_Release(&at)

    # ---------------------------------------------------------------------------------------------- rows by row index

    cdef int move_rows(self, const int64_t[::1] rows, object weights, const int64_t[::1] places, object states,
                       bint write, bint home=False) except -1:
        """Both directions of read_into and write_from; `weights` and `states` are written to when reading."""
        cdef ec_rows_buffer buffer
        cdef Py_buffer at
        self.check_process()
        memset(&buffer, 0, sizeof(buffer))
        self.open_weights("weights", weights, -1, not write, &at, &buffer.type)
        try:
            buffer.weights = at.buf
            buffer.stride = self.t.dim * ec_type_bytes(buffer.type)
            buffer.home = home
            self.move_opened(rows, at.shape[0], &buffer, places, states, write)
        finally:
            PyBuffer_Release(&at)
        return 0

    cdef int move_opened(self, const int64_t[::1] rows, int64_t height, ec_rows_buffer *buffer, const int64_t[::1] places,
                         object states, bint write) except -1:
        """`move_rows` with `height` rows of weights in `buffer`."""
        cdef int64_t n = rows.shape[0]
        cdef int64_t widths[MOST_STATE_PARTS]
        cdef float *pointers[MOST_STATE_PARTS]
        cdef int64_t total = 0, part = 0
        cdef const float[:, ::1] array
        if len(states) > MOST_STATE_PARTS:
            raise ShapeError(f"table {self.name!r}: {len(states)} state arrays; give at most {MOST_STATE_PARTS}")
        for item in states:
            if not write and not item.flags.writeable:
                raise ShapeError(f"table {self.name!r}: state array {part} is read-only")
            array = item.reshape(-1, 1) if item.ndim == 1 else item
            if array.shape[0] != height:
                raise ShapeError(f"table {self.name!r}: state array {part} has {array.shape[0]} rows; give {height}, as weights has")
            widths[part] = array.shape[1]
            pointers[part] = <float *>&array[0, 0] if array.shape[0] and array.shape[1] else NULL
            total += array.shape[1]
            part += 1
        if part and total != self.t.state_dim:
            raise ShapeError(f"table {self.name!r}: the state arrays have {total} columns together; give state_dim = {self.t.state_dim}")
        if places is None:
            if n > height:
                raise ShapeError(f"table {self.name!r}: {n} rows for {height} rows of weights")
        else:
            if places.shape[0] != n:
                raise ShapeError(f"table {self.name!r}: {places.shape[0]} places for {n} rows")
            self.check_rows(places, height, "place")
            if n and int(np.min(places)) < 0:
                raise ShapeError(f"table {self.name!r}: place {int(np.min(places))} is negative")
        if n == 0:
            return 0
        buffer.states = pointers
        buffer.widths = widths
        buffer.parts = part
        if places is not None:
            buffer.places = &places[0]
        self.enter(write)
        try:
            self.check_rows(rows, self.t.row_limit, "row index")
            with nogil:
                if write:
                    table_write(self.t, &rows[0], n, buffer, self.num_threads)
                else:
                    table_read(self.t, &rows[0], n, buffer, self.num_threads)
        finally:
            self.leave()
        return 0

    def read_into(self, const int64_t[::1] rows not None, weights not None, const int64_t[::1] places=None, states=()):
        """Copy table rows into a buffer.

        Parameters
        ----------
        rows : int64 (n,)
            Row indexes; negative ones are passed over.
        weights : (R, dim)
            float32, or of the table's own bits. Written: buffer row places[i] receives the weights of rows[i].
        places : int64 (n,), optional
            Distinct buffer rows; default 0, 1, ...
        states : sequence of float32 (R, width) or (R,)
            Written: the row's state, cut into these widths, which add up to `state_dim`. Empty: weights only.
        """
        self.move_rows(rows, weights, places, states, False)

    def write_from(self, const int64_t[::1] rows not None, weights not None, const int64_t[::1] places=None, states=(), *, bint home=False):
        """Copy buffer rows into table rows: the inverse of `read_into`. Of several elements with one row the last wins.

        With `home` they come back from a copy whose keeper knows which of them have changed (`mark_changed`); else all count as
        changed.
        """
        self.move_rows(rows, weights, places, states, True, home)

    def columns(self, const int64_t[::1] rows not None):
        """(keys, frequencies, timestamps) of row indexes, int64 (n,) each.

        Frequencies are 0 and timestamps the smallest int64 where the table keeps none.
        """
        cdef int64_t i, n = rows.shape[0]
        result = (np.empty(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.full(n, INT64_MIN, dtype=np.int64))
        cdef int64_t[::1] keys = result[0]
        cdef int64_t[::1] frequencies = result[1]
        cdef int64_t[::1] timestamps = result[2]
        self.enter(False)
        try:
            self.check_rows(rows, self.t.row_limit, "row index")
            if n and int(np.min(rows)) < 0:
                raise ShapeError(f"table {self.name!r}: row index {int(np.min(rows))} is negative")
            with nogil:
                for i in range(n):
                    keys[i] = table_key(self.t, rows[i])[0]
                    if self.t.with_filter:
                        frequencies[i] = table_freq(self.t, rows[i])[0]
                        timestamps[i] = table_ts(self.t, rows[i])[0]
        finally:
            self.leave()
        return result

    def write_columns(self, const int64_t[::1] rows not None, const int64_t[::1] frequencies not None,
                      const int64_t[::1] timestamps not None):
        """Set frequency and timestamp of row indexes; of a repeated row the last wins. Only for a table with a filter."""
        cdef int64_t i, n = rows.shape[0]
        self.enter(True)
        try:
            if not self.t.with_filter:
                raise ConfigError(f"table {self.name!r}: keeps no frequencies; make it with with_filter=True")
            if frequencies.shape[0] != n or timestamps.shape[0] != n:
                raise ShapeError(f"table {self.name!r}: {frequencies.shape[0]} frequencies and {timestamps.shape[0]} timestamps for {n} rows")
            self.check_rows(rows, self.t.row_limit, "row index")
            if n and int(np.min(rows)) < 0:
                raise ShapeError(f"table {self.name!r}: row index {int(np.min(rows))} is negative")
            with nogil:
                for i in range(n):
                    table_freq(self.t, rows[i])[0] = frequencies[i]
                    table_ts(self.t, rows[i])[0] = timestamps[i]
                    table_flags(self.t, rows[i])[0] |= EC_CHANGED
                self.t.version += 1
        finally:
            self.leave()

    # ------------------------------------------------------------------------------------------------- for checkpoints

    def mark_saved(self, version=None):
        """Count changes from now on: `changed` is 0, `erased_keys` empty. With `version`, only if that is the table's; True if so.

        It is no change itself; of a file-backed table it leaves a clean directory clean.
        """
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef uint64_t wanted = 0 if version is None else version
        cdef bint always = version is None, marked = False
        cdef int status
        self.check_process()
        with nogil:
            status = _lock(t, True)
            if status == EC_OK:
                marked = always or t.version == wanted
                if marked:
                    ec_table_mark_saved(self.t)
                table_unlock(self.t)
        if status != EC_OK:
            raise self.failure(status, 0)
        return marked

    def mark_changed(self, const int64_t[::1] rows not None):
        """Count rows as changed, those that are live or in limbo. No change of content, as `mark_saved` is none."""
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef int64_t i, n = rows.shape[0]
        cdef int status
        self.check_process()
        self.check_rows(rows, self.t.row_limit, "row index")
        if n and int(np.min(rows)) < 0:
            raise ShapeError(f"table {self.name!r}: row index {int(np.min(rows))} is negative")
        with nogil:
            status = _lock(t, True)
            if status == EC_OK:
                for i in range(n):
                    if table_flags(self.t, rows[i])[0] & (EC_LIVE | EC_LIMBO):
                        table_flags(self.t, rows[i])[0] |= EC_CHANGED
                table_unlock(self.t)
        if status != EC_OK:
            raise self.failure(status, 0)

    def mark_erased(self, keys):
        """Count keys as erased since `mark_saved`, int64 (n,); None: which ones were is not known, so `tracked` becomes False."""
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef const int64_t[::1] view
        cdef int64_t i
        cdef int status
        self.check_process()
        view = np.empty(0, dtype=np.int64) if keys is None else keys
        with nogil:
            status = _lock(t, True)
            if status == EC_OK:
                for i in range(view.shape[0]):
                    if t.tracking == EC_TRACKED:
                        ec_table_log_erased(self.t, view[i])
        if status != EC_OK:
            raise self.failure(status, 0)
        if keys is None:
            t.tracking = EC_LOST
        table_unlock(self.t)

    @property
    def tracked(self):
        """Whether `changed` rows and `erased_keys` are all that changed since `mark_saved`: False before it was called, and where
        more keys were erased than the table has."""
        return (<ec_table_fields *>self.t).tracking == EC_TRACKED

    def changed(self):
        """Number of rows that were born or written since `mark_saved`, or ever."""
        cdef int64_t count
        self.enter(False)
        try:
            with nogil:
                count = ec_table_count(self.t, EC_CHANGED)
            return count
        finally:
            self.leave()

    def erased_keys(self, bint absent=True):
        """Keys that were erased since `mark_saved` and are absent now: int64, sorted; None where they are not known.

        With ``absent=False`` those too that have come back.
        """
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef int64_t[::1] out, places
        self.enter(False)
        try:
            if t.tracking != EC_TRACKED:
                return None
            keys = np.empty(t.erased_count, dtype=np.int64)
            if t.erased_count == 0:
                return keys
            out = keys
            memcpy(&out[0], t.erased, <size_t>t.erased_count * sizeof(int64_t))
            keys = np.unique(keys)
            if not absent:
                return keys
            out = keys
            rows = np.empty(len(keys), dtype=np.int64)
            places = rows
            with nogil:
                table_find(self.t, &out[0], NULL, out.shape[0], &places[0], self.num_threads)
        finally:
            self.leave()
        return keys[rows < 0]

    def save_order(self):
        """(extents int64, starts bool): extents in the order in which a checkpoint reads them; chunks are cut where starts is True.

        Extents of neighbouring vshards come together, each once. `rows_of` reads them.
        """
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef int64_t count
        cdef int64_t[::1] order
        cdef uint8_t[::1] marks
        self.enter(False)
        try:
            extents = np.empty(t.extent_count + 1, dtype=np.int64)
            starts = np.empty(t.extent_count + 1, dtype=np.uint8)
            order = extents
            marks = starts
            with nogil:
                count = ec_table_save_order(self.t, &order[0], &marks[0])
        finally:
            self.leave()
        if count < 0:
            raise HostMemoryError(f"table {self.name!r}: no host memory to list its extents")
        return extents[:count], starts[:count].astype(bool)

    def reserve(self, int64_t rows):
        """Make the indexes ready for so many keys in all: inserts that follow in pieces then copy no index. No content changes.

        Only for a number that is known to come: keys that are there spread over all the room. `HostMemoryError` where there is
        none; what is there stays as it is.
        """
        cdef int status
        if rows < 0:
            raise ShapeError(f"table {self.name!r}: reserve {rows} rows; give a number >= 0")
        self.enter(True)
        try:
            with nogil:
                status = ec_insert_begin(self.t, rows)
                if status == EC_OK and rows > 0:
                    status = ec_insert_prepare(self.t, rows)
            if status != EC_OK:
                raise self.failure(status, rows)
        finally:
            self.leave()

    def coming_memory(self, int64_t skip, int64_t most):
        """Where rows after the next `skip` new ones will lie, `most` of them at most, as far as it is mapped: to be made ready beside inserts.

        Nothing of a table in files: its pages are a file's, and may be more than memory holds.
        """
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef ComingMemory coming = ComingMemory()
        cdef int64_t first, last, segment = 0, begin = 0
        self.enter(False)
        try:
            first = t.written + max(skip, <int64_t>0)
            last = min(first + max(most, <int64_t>0), t.rows.rows)
            if first >= last or t.backing != NULL:
                return coming
            while begin + ec_arena_segment_rows(&t.rows, segment) <= first:
                begin += ec_arena_segment_rows(&t.rows, segment)
                segment += 1
            last = min(last, begin + ec_arena_segment_rows(&t.rows, segment))
            coming.at = ec_arena_at(&t.rows, first)
            coming.end = coming.at + (last - first) * t.rows.stride
            coming.at -= <uint64_t>coming.at % PAGE
        finally:
            self.leave()
        return coming

    def rows_of(self, const int64_t[::1] extents not None, bint changed=False):
        """Live rows of extents, in their order, as row indexes int64; with `changed` only those that `changed` counts."""
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef int64_t count = 0
        cdef uint8_t flags = EC_CHANGED if changed else 0
        self.enter(False)
        try:
            self.check_rows(extents, t.extent_count, "extent")
            if extents.shape[0] and int(np.min(extents)) < 0:
                raise ShapeError(f"table {self.name!r}: extent {int(np.min(extents))} is negative")
            rows = np.empty(extents.shape[0] * EC_EXTENT_ROWS, dtype=np.int64)
            if extents.shape[0] == 0:
                return rows
            self.collect(extents, flags, rows, &count)
            return rows[:count]
        finally:
            self.leave()

    cdef int collect(self, const int64_t[::1] extents, uint8_t flags, int64_t[::1] rows, int64_t *count) except -1:
        cdef int64_t i
        with nogil:
            for i in range(extents.shape[0]):
                count[0] += ec_table_rows_of_extent(self.t, extents[i], flags, &rows[count[0]])
        return 0

    # ----------------------------------------------------------------------------------------- the planner's undo, by hand

    def detach(self, const int64_t[::1] keys not None):
        """Unmap keys: their rows keep their data, in limbo, until `attach` or `free`. Rows, -1 where absent: int64 (n,)."""
        cdef int64_t i, n = keys.shape[0]
        result = np.empty(n, dtype=np.int64)
        cdef int64_t[::1] rows = result
        self.enter(True)
        try:
            with nogil:
                for i in range(n):
                    rows[i] = table_detach(self.t, keys[i], ec_hash(keys[i]))
        finally:
            self.leave()
        return result

    cdef int settle_limbo(self, const int64_t[::1] keys, const int64_t[::1] rows, bint attach) except -1:
        cdef int64_t i, n = keys.shape[0]
        cdef int64_t found
        cdef int status
        if rows.shape[0] != n:
            raise ShapeError(f"table {self.name!r}: {rows.shape[0]} rows for {n} keys")
        self.enter(True)
        try:
            for i in range(n):
                status = EC_STATE
                if 0 <= rows[i] < self.t.row_limit and table_flags(self.t, rows[i])[0] & EC_LIMBO and table_key(self.t, rows[i])[0] == keys[i]:
                    status = EC_OK
                    if attach:
                        table_find(self.t, &keys[i], NULL, 1, &found, 1)
                        status = EC_STATE if found >= 0 else table_attach(self.t, keys[i], ec_hash(keys[i]), rows[i])
                    else:
                        table_free(self.t, ec_hash(keys[i]), rows[i])
                if status != EC_OK:
                    raise ShapeError(f"table {self.name!r}: row {rows[i]} is not the detached row of key {keys[i]}")
        finally:
            self.leave()
        return 0

    def attach(self, const int64_t[::1] keys not None, const int64_t[::1] rows not None):
        """Map keys to their detached rows again, in order; stops with `ShapeError` at one that is not in limbo."""
        self.settle_limbo(keys, rows, True)

    def free(self, const int64_t[::1] keys not None, const int64_t[::1] rows not None):
        """End detached rows, in order; stops with `ShapeError` at one that is not in limbo."""
        self.settle_limbo(keys, rows, False)

    def unborn(self, const int64_t[::1] keys not None):
        """Undo the newest inserts: `keys` in the order in which they were born, undone from the last.

        The next inserts get the same row indexes again. Stops with `ShapeError` at a key that is absent.
        """
        cdef int64_t i, row
        self.enter(True)
        try:
            for i in range(keys.shape[0] - 1, -1, -1):
                table_find(self.t, &keys[i], NULL, 1, &row, 1)
                if row < 0:
                    raise ShapeError(f"table {self.name!r}: key {keys[i]} is not there to be unborn")
                table_unborn(self.t, keys[i], ec_hash(keys[i]), row)
        finally:
            self.leave()

    # --------------------------------------------------------------------------------------------------------- the whole

    cdef int64_t mapped_bytes(self) noexcept:
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef int64_t i, total
        total = <int64_t>(t.rows.bytes + t.states.bytes + t.keys.bytes + t.flags.bytes + t.frequencies.bytes + t.timestamps.bytes)
        for i in range(t.partition_count):
            total += <int64_t>t.partitions[i].index.bytes
        return total + <int64_t>ec_spare_held(t.spares)

    def stats(self):
        """Counts and bytes, by part.

        Returns
        -------
        dict
            rows, limbo_rows, free_rows, partitions, segments; row_bytes (weights and state of live rows), padding_bytes (what
            alignment adds to them), column_bytes (keys, flags, frequencies and timestamps of live rows), index_bytes (with
            what is ready for indexes to move to), slack_bytes (in memory, not holding a live row), other_bytes (extent lists
            and the like), reserved_bytes (mapped for what is to come and never touched: address space, and of a table in a
            directory disk space, but no memory);
            bytes (the sum of all these, or for a file-backed table other_bytes alone: its host memory), file_bytes (of the
            directory's files; 0 in memory); overhead_bytes_per_row (index, columns, slack and other, over the live rows; 0.0
            when empty).
        """
        cdef ec_table_fields *t = <ec_table_fields *>self.t
        cdef ec_arena *columns[6]
        cdef int64_t i, touched = 0, arenas = 0, segments = 0
        self.enter(False)
        try:
            index_bytes = <int64_t>ec_spare_ready(t.spares)
            coming = <int64_t>ec_spare_held(t.spares) - index_bytes
            free_rows = 0
            other = <int64_t>sizeof(ec_table_fields) + t.partition_slots * <int64_t>sizeof(ec_partition) + t.extent_slots * 8
            for i in range(t.partition_count):
                index_bytes += t.partitions[i].index.bytes
                free_rows += t.partitions[i].free_count
                other += t.partitions[i].extent_slots * 4
            stride = t.rows.stride + (t.states.stride if 0 < t.state_dim <= 2 else 0)
            column = t.keys.stride + t.flags.stride + (16 if t.with_filter else 0)
            columns[:] = [&t.rows, &t.states, &t.keys, &t.flags, &t.frequencies, &t.timestamps]
            for i in range(6):
                arenas += <int64_t>columns[i].bytes
                segments += columns[i].segment_count
                touched += <int64_t>(columns[i].bytes - ec_arena_unwritten(columns[i], t.extent_count * EC_EXTENT_ROWS))
            payload = t.dim * ec_type_bytes(t.type) + t.state_dim * 4
            slack = touched - t.live * (stride + column)
            return {
                "rows": t.live,
                "limbo_rows": t.limbo,
                "free_rows": free_rows,
                "partitions": t.partition_count,
                "segments": segments,
                "row_bytes": t.live * payload,
                "padding_bytes": t.live * (stride - payload),
                "column_bytes": t.live * column,
                "index_bytes": index_bytes,
                "slack_bytes": slack,
                "other_bytes": other,
                "reserved_bytes": arenas - touched + coming,
                "bytes": other if t.backing != NULL else arenas + index_bytes + coming + other,
                "file_bytes": 0 if self.directory is None else self.directory.nbytes,
                "overhead_bytes_per_row": (t.live * column + index_bytes + slack + other) / t.live if t.live else 0.0,
            }
        finally:
            self.leave()

    def check(self):
        """Verify every invariant; `AssertionError` says which one does not hold.

        Returns
        -------
        dict
            rows, partitions, longest_probe (buckets), mean_probe.
        """
        cdef const char *broken
        cdef int64_t longest, total
        self.enter(False)
        try:
            with nogil:
                broken = ec_table_check(self.t, &longest, &total)
            if broken != NULL:
                raise AssertionError(f"table {self.name!r}: {broken.decode()}")
            return {"rows": self.t.live, "partitions": self.t.partition_count, "longest_probe": longest,
                    "mean_probe": total / self.t.live if self.t.live else 0.0}
        finally:
            self.leave()

    def flush(self, filter_state=None):
        """Make the content durable and the directory clean. Reading calls go on meanwhile. In memory there is nothing to do.

        Parameters
        ----------
        filter_state : bytes, optional
            What the planner keeps beside the table: `filter_state` of the next open. Default: as at the last flush.

        Raises
        ------
        DiskFullError, StorageError, HostMemoryError
            The directory is as dirty as it was, the table usable; only after a sync that failed it cannot be changed any more.
        """
        cdef const char *content = NULL
        cdef int64_t count = 0
        cdef int status
        if filter_state is not None:
            content = filter_state
            count = len(filter_state)
        self.enter(False)
        try:
            if self.directory is None:
                return
            with nogil:
                status = ec_table_flush(self.t, content, count)
            if status != EC_OK:
                raise self.failure(status, -1)
        finally:
            self.leave()

    @property
    def filter_state(self):
        """The bytes that the planner gave to the last flush of a file-backed table; empty where there are none."""
        self.enter(False)
        try:
            return b"" if self.directory is None else self.directory.filter_state()
        finally:
            self.leave()

    def close(self):
        """Flush, then free all memory, once running calls have returned. Later calls raise `ClosedError`; closing again does nothing.

        Where the flush of a directory fails (`DiskFullError`, `StorageError`), the table stays open. A table that is dropped
        without close leaves its directory as the last flush did, or unclean. One whose directory has failed (a sync failed, or
        somebody deleted it) is closed without a flush; the latter is said once, by `StorageError`.
        """
        cdef ec_table_fields *t
        cdef int status
        cdef bint freed = False
        self.check_process()
        t = <ec_table_fields *>self.t
        with nogil:
            status = _lock(t, True)
            if status == EC_OK:
                if t.backing != NULL and (not t.backing.failed or t.backing.gone):
                    status = ec_table_flush(self.t, NULL, 0)
                if status == EC_OK or (t.backing != NULL and t.backing.gone):
                    _destroy(self.t)
                    t.closed = 1
                    freed = True
                table_unlock(self.t)
        refusal = None if status == EC_OK or status == EC_CLOSED else self.failure(status, -1)
        if freed and self.directory is not None:
            self.directory.drop()
        if refusal is not None:
            raise refusal
