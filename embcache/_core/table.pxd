"""C contract of the table: batches of keys against one table, no Python objects, no locking inside.

The caller holds the table's lock: `table_lock(t, write)` returns EC_OK, or EC_CLOSED (without the lock) once the table
was closed. Changing calls need the write lock; taking it marks a file-backed table's directory dirty, and returns EC_DISK
(without the lock) where that fails. `hashes[i]` is `ec_hash(keys[i])` everywhere; NULL where a function says so.
Row indexes handed out are a function of the sequence of changing calls, never of threads.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from embcache._core.arena cimport ec_arena
from embcache._core.arrays cimport Array
from embcache._core.directory cimport Directory

cdef extern from "ec_status.h":
    const int EC_OK
    const int EC_NOMEM
    const int EC_LIMIT
    const int EC_CAPACITY
    const int EC_CLOSED
    const int EC_STATE
    const int EC_BROKEN
    const int EC_DISK

cdef extern from "ec_init.h":
    ctypedef struct ec_init:
        uint64_t base
        float a
        float b
        int kind

cdef extern from "ec_types.h":
    const int EC_FLOAT32
    const int EC_FLOAT16
    const int EC_BFLOAT16
    int64_t ec_type_bytes(int type) noexcept nogil

cdef extern from "ec_table.h":
    const int EC_LIVE      # flag: the row's key is in the index
    const int EC_RESIDENT  # flag: the row has a slot; written by the planner only
    const int EC_LIMBO     # flag: detached, neither attached nor freed yet

    ctypedef struct ec_table:
        int64_t dim              # weights of a row
        int64_t state_dim        # state floats of a row
        int type                 # of the weights: EC_FLOAT32, EC_FLOAT16 or EC_BFLOAT16
        int with_filter          # whether the frequency and timestamp columns exist
        int closed
        int64_t live             # keys in the table
        int64_t limbo            # rows in limbo
        int64_t row_limit        # row indexes lie below this
        int64_t partition_count
        uint64_t version         # changes with every change of content

    void *ec_table_weights(const ec_table *t, int64_t row) noexcept nogil
    float *ec_table_state(const ec_table *t, int64_t row) noexcept nogil
    # Columns, valid for live and limbo rows; freq and ts only with a filter.
    int64_t *table_key "ec_table_key"(const ec_table *t, int64_t row) noexcept nogil
    uint8_t *table_flags "ec_table_flags"(const ec_table *t, int64_t row) noexcept nogil
    int64_t *table_freq "ec_table_freq"(const ec_table *t, int64_t row) noexcept nogil
    int64_t *table_ts "ec_table_ts"(const ec_table *t, int64_t row) noexcept nogil

    # Unmap a key. The row keeps its data, in limbo, until attach or free. Row, or -1 where absent. Cannot fail.
    int64_t table_detach "ec_table_detach"(ec_table *t, int64_t key, uint64_t hash) noexcept nogil
    # Inverse of detach; room is kept. EC_STATE, nothing changed, where `row` is not the limbo row of `key`. The key
    # must be absent.
    int table_attach "ec_table_attach"(ec_table *t, int64_t key, uint64_t hash, int64_t row) noexcept nogil
    # End of a limbo row: its row index may be handed out again.
    void table_free "ec_table_free_row"(ec_table *t, uint64_t hash, int64_t row) noexcept nogil
    # Undo of an insert, called newest first: the next inserts get the same row indexes again.
    void table_unborn "ec_table_unborn"(ec_table *t, int64_t key, uint64_t hash, int64_t row) noexcept nogil

cdef extern from "ec_rows.h":
    # Rows outside the table: weights and the state cut into `parts` arrays (Adagrad: one of dim; Adam: two of dim; ...).
    ctypedef struct ec_rows_buffer:
        void *weights
        int64_t stride          # bytes from one row of `weights` to the next
        int type                # of `weights`: the table's, copied bit by bit, or EC_FLOAT32
        float **states          # pointer to the first row of each part
        const int64_t *widths   # floats of a row of each part; the widths add up to state_dim
        int64_t parts           # 0: weights only; -1: writing sets the state to zero
        const int64_t *places   # buffer row of element i; NULL: i
        int home                # writing: a row comes back from where it changed, and whether it did is known already

    void ec_find_span(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows) noexcept nogil

cdef int table_lock(ec_table *t, bint write) noexcept nogil
cdef void table_unlock(ec_table *t) noexcept nogil

# rows[i] = row of keys[i], or -1. `hashes` may be NULL. Parallel from 8192 keys.
cdef void table_find(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows,
                     int num_threads) noexcept nogil

# rows[i] = row of keys[i], inserted where absent; keys may repeat; born[i] = 1 at the first place of each new key, else 0.
# `hashes` may be NULL. EC_OK; EC_NOMEM, EC_DISK or EC_LIMIT leave the table as it was (rows and born are then undefined).
cdef int table_insert(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, uint8_t *born,
                      int num_threads) noexcept nogil

# Table rows -> buffer rows; an element with rows[i] < 0 is passed over. Buffer rows must be distinct.
cdef void table_read(ec_table *t, const int64_t *rows, int64_t n, const ec_rows_buffer *buffer, int num_threads) noexcept nogil

# Buffer rows -> table rows; of several elements with the same row the last wins.
cdef void table_write(ec_table *t, const int64_t *rows, int64_t n, const ec_rows_buffer *buffer, int num_threads) noexcept nogil

# Initial weights of keys, without inserting, as rows of `type` (the table's, or EC_FLOAT32) one behind the other.
# `hashes` may be NULL.
cdef void table_init_rows(ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, void *out, int type,
                          int num_threads) noexcept nogil

# Live rows in row order from *cursor (start at 0) on: up to `most` row indexes; *cursor moves behind them; 0 at the end.
cdef int64_t table_scan(ec_table *t, int64_t *cursor, int64_t *rows, int64_t most) noexcept nogil


cdef class Table:
    cdef ec_table *t               # never NULL once constructed; t.closed says whether it may still be used
    cdef readonly str name
    cdef readonly str dtype        # of the weights: "float32", "float16" or "bfloat16"
    cdef readonly int64_t seed
    cdef readonly int num_threads  # default of the doors
    cdef readonly Directory directory  # None: in memory
    cdef int64_t process           # the process that made it
    cdef object __weakref__
    cdef int build(self, dict description, object bucket_seed, int64_t split) except -1
    cdef int reopen(self) except -1
    cdef void discard(self) noexcept
    cdef int check_process(self) except -1   # ForkError in a child
    cdef int enter(self, bint write) except -1  # check_process, then the lock with the GIL released; ClosedError
    cdef void leave(self) noexcept
    cdef object failure(self, int status, int64_t keys)  # the exception for a failed insert of `keys` keys
    cdef int open_longs(self, str what, object values, int64_t count, bint write, Array *array) except -1
    cdef int check_rows(self, const int64_t[::1] rows, int64_t limit, str what) except -1
    cdef int check_shape(self, str what, int64_t rows, int64_t columns, int64_t want_rows, int64_t want_columns) except -1
    # The memory of rows of weights; `rows` -1: any number. The caller releases it.
    cdef int open_weights(self, str what, object weights, int64_t rows, bint write, Py_buffer *at, int *type) except -1
    cdef int lookup_missing(self, const int64_t[::1] keys, const int64_t[::1] places, void *out, int type) except -1
    cdef int move_rows(self, const int64_t[::1] rows, object weights, const int64_t[::1] places, object states,
                       bint write, bint home=*) except -1
    cdef int move_opened(self, const int64_t[::1] rows, int64_t height, ec_rows_buffer *buffer, const int64_t[::1] places,
                         object states, bint write) except -1
    cdef object unfit(self, str what, object weights, bint write)
    cdef int collect(self, const int64_t[::1] extents, uint8_t flags, int64_t[::1] rows, int64_t *count) except -1
    cdef int settle_limbo(self, const int64_t[::1] keys, const int64_t[::1] rows, bint attach) except -1
    cdef int64_t mapped_bytes(self) noexcept
