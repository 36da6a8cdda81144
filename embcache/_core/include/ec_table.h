/* The table: keys -> rows, as plain C structures and their primitives. table.pyx owns the life cycle and the batches.
 *
 * Rows. A row index is global in the table. Columns (weights and state, keys, flags, and with a filter frequencies and
 * timestamps) are arenas addressed by row index. State (float32) of at most 8 bytes is a column of its own; otherwise it
 * follows the weights (of any element type) at the next multiple of 4 bytes. A row's flags say which of these it is: live (in the index), limbo (detached: data kept, key unmapped),
 * free (in a partition's list, or never used: all bits 0).
 *
 * Partitions. A partition is a range of vshards with its own index, whose uint32 values are partition-local row
 * numbers ("locals"). Locals map to rows through a list of extents of 1024 rows. New locals come from the partition's
 * free list (last in, first out, threaded through the key column of the free rows, so that freeing cannot fail), then
 * by counting up. Extents are taken in partition order by one thread, lowest number first; so row indexes are a
 * function of the sequence of calls and never of threads or of the index's layout.
 *
 * A partition splits above 430,080 rows, seven eighths of what an index of four huge pages (2 MiB) holds. Of a table with
 * many partitions each index takes whole huge pages, two to four of them: on 4 KiB pages a look-up pays a page walk beside
 * its cache line, which costs a third of the speed from 10 M rows on. The rounding adds room for keys, so it wastes little.
 * (A limit of 64 Ki rows left all indexes on 4 KiB pages; one of 1 Mi rows made the longest pause three times as long.)
 * Keys spread evenly, so all partitions would take each step of growth in the same few calls; therefore a partition splits
 * up to a quarter, and grows up to a sixteenth, earlier than it had to, in proportion to its first vshard: the steps come
 * one after the other.
 *
 * Thread safety: none inside; a table's lock is taken at the doors. Within a batch, threads own disjoint partitions or
 * disjoint rows.
 */
#ifndef EC_TABLE_H
#define EC_TABLE_H

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "ec_arena.h"
#include "ec_index.h"
#include "ec_init.h"
#include "ec_spare.h"
#include "ec_types.h"

#define EC_EXTENT_BITS 10
#define EC_EXTENT_ROWS ((int64_t)1 << EC_EXTENT_BITS)
#define EC_PARTITIONS_MAX 256
#define EC_HUGE_BUCKETS (EC_HUGE_BYTES / sizeof(ec_bucket))
#define EC_SPLIT_ABOVE ((int64_t)(4 * EC_HUGE_BUCKETS * EC_BUCKET_KEYS * 3 / 4 * 7 / 8)) /* 430,080 */
#define EC_FAR_ABOVE ((int64_t)1 << 26) /* keys whose index is about 1 GiB */
#define EC_WHOLE_PAGES_FROM 8 /* partitions from which on indexes take whole huge pages */
#define EC_ERASED_SPARE ((int64_t)1 << 16) /* erased keys that are remembered beyond the table's own number */
#define EC_ROWS_MAX ((int64_t)1 << 40)
#define EC_NARROW_DIM_MAX 8192 /* weights of a row of 2-byte elements: their initial values pass through the stack */

/* Live rows above which look-ups go the way for far indexes on this CPU (ec_find.h). */
static inline int64_t ec_far_above(void) { return ec_cpu_is_amd() ? EC_FAR_ABOVE : EC_ROWS_MAX; }

enum {
    EC_LIVE = 1,
    EC_RESIDENT = 2,
    EC_LIMBO = 4,
    EC_AGAIN = 8,  /* its local came from the free list */
    EC_CHANGED = 16, /* born or written since the table was last marked saved */
};

enum { EC_UNTRACKED, EC_TRACKED, EC_LOST }; /* ec_table.tracking: see ec_changes.h */

/* The first cache line is all that a look-up reads. */
typedef struct ec_partition {
    ec_index index;       /* key -> local, live keys only */
    uint32_t *extents;    /* local >> 10 -> global extent */
    int64_t grow_at;      /* keys (limbo rows' included) at which the index grows: a little before it must */
    int64_t extent_count;
    int64_t extent_slots; /* length of `extents` */
    int64_t next_local;   /* locals from here on were never handed out */
    int64_t backed_local; /* locals below this have an extent and memory */
    int64_t free_head;    /* first local of the free list, or -1 */
    int64_t free_count;
    int64_t limbo;        /* limbo rows of its vshards: the index keeps room for their keys */
    int32_t vshard_from, vshard_to;
} __attribute__((aligned(64))) ec_partition;

typedef struct ec_table {
    int64_t dim;
    int64_t state_dim;
    int type;         /* of the weights: EC_FLOAT32, EC_FLOAT16 or EC_BFLOAT16 */
    int64_t state_at; /* floats before the state inside a row; -1: the state is a column */
    int with_filter;
    int closed;
    ec_arena rows, states, keys, flags, frequencies, timestamps;
    int64_t row_limit; /* rows below this are mapped in every column */
    int64_t written;   /* rows below this, as good as all of them, were written once: their pages are in memory */
    int64_t writing;   /* `written` once the insert under way has written its rows */
    int64_t promised;  /* bytes of the columns that are mapped and not written, as ec_promise knows them */
    ec_partition *partitions;
    int64_t partition_count, partition_slots;
    int64_t split_above; /* a partition with more live rows splits */
    int64_t far_above;   /* with more live rows, look-ups expect that addresses must be translated anew (ec_find.h) */
    uint8_t partition_of[EC_VSHARDS];
    uint32_t limbo_of[EC_VSHARDS];
    uint32_t *extent_local;  /* global extent -> its place in its partitions' lists */
    uint32_t *free_extents;  /* extents given back by undo, descending */
    int64_t extent_count, extent_slots, free_extent_count;
    int64_t live, limbo;
    uint64_t version; /* changes with every change of content */
    ec_init init;
    float *initial_state; /* state_dim floats, or NULL for zeros */
    ec_backing *backing;  /* where columns and indexes lie; NULL: anonymous memory */
    int tracking;         /* whether `erased` holds the keys that were erased since the table was marked saved */
    int64_t *erased;
    int64_t erased_count, erased_slots;
    ec_spare spares[EC_SPARES]; /* for indexes that soon move; anonymous memory only */
    int64_t unready;            /* keys that small inserts brought since it was last looked for such indexes */
    pthread_rwlock_t lock;
} ec_table;

/* ----------------------------------------------------------------------------------------------------------- columns */

static inline void *ec_table_weights(const ec_table *t, int64_t row) { return ec_arena_at(&t->rows, row); }

static inline float *ec_table_state(const ec_table *t, int64_t row)
{
    return t->state_at < 0 ? (float *)ec_arena_at(&t->states, row) : (float *)ec_arena_at(&t->rows, row) + t->state_at;
}

static inline int64_t *ec_table_key(const ec_table *t, int64_t row) { return (int64_t *)ec_arena_at(&t->keys, row); }
static inline uint8_t *ec_table_flags(const ec_table *t, int64_t row) { return (uint8_t *)ec_arena_at(&t->flags, row); }
static inline int64_t *ec_table_freq(const ec_table *t, int64_t row) { return (int64_t *)ec_arena_at(&t->frequencies, row); }
static inline int64_t *ec_table_ts(const ec_table *t, int64_t row) { return (int64_t *)ec_arena_at(&t->timestamps, row); }

/* `count` weights as they lie in a row, at `from`, as elements of `type`: those of the table, or float32. */
static inline void ec_table_give(const ec_table *t, void *to, int type, const void *from, int64_t count)
{
    if (type == t->type)
        memcpy(to, from, (size_t)(count * ec_type_bytes(type)));
    else
        ec_widen((float *)to, from, t->type, count, ec_cpu_has_avx2());
}

/* The inverse: float32 is rounded to the table's type. */
static inline void ec_table_take(const ec_table *t, void *to, int type, const void *from, int64_t count)
{
    if (type == t->type)
        memcpy(to, from, (size_t)(count * ec_type_bytes(type)));
    else
        ec_narrow(to, (const float *)from, t->type, count, ec_cpu_has_avx2());
}

static __attribute__((noinline)) void ec_table_initial_narrow(const ec_table *t, uint64_t hash, void *to, int type)
{
    float exact[EC_NARROW_DIM_MAX];
    uint16_t rounded[EC_NARROW_DIM_MAX];
    ec_init_row(&t->init, hash, exact, t->dim);
    ec_narrow(rounded, exact, t->type, t->dim, ec_cpu_has_avx2());
    ec_table_give(t, to, type, rounded, t->dim);
}

/* The initial weights of a key as a new row would hold them, as elements of `type`: the table's, or float32. */
static inline void ec_table_initial(const ec_table *t, uint64_t hash, void *to, int type)
{
    if (t->type == EC_FLOAT32)
        ec_init_row(&t->init, hash, (float *)to, t->dim);
    else
        ec_table_initial_narrow(t, hash, to, type);
}

enum { EC_COLUMNS = 6 };

static inline void ec_table_columns(ec_table *t, ec_arena *columns[EC_COLUMNS])
{
    columns[0] = &t->rows;
    columns[1] = &t->keys;
    columns[2] = &t->flags;
    columns[3] = t->state_at < 0 && t->state_dim > 0 ? &t->states : NULL;
    columns[4] = t->with_filter ? &t->frequencies : NULL;
    columns[5] = t->with_filter ? &t->timestamps : NULL;
}

/* Bring the promises of the columns up to date, after they were mapped, unmapped or written. */
static void ec_table_promise(ec_table *t)
{
    ec_arena *columns[EC_COLUMNS];
    int64_t promised = 0;
    ec_table_columns(t, columns);
    for (int i = 0; i < EC_COLUMNS && t->backing == NULL; ++i)
        if (columns[i] != NULL)
            promised += (int64_t)ec_arena_unwritten(columns[i], t->written);
    ec_promise(promised - t->promised);
    t->promised = promised;
}

/* All rows that were handed out have been written. */
static void ec_table_wrote(ec_table *t)
{
    if (t->writing == t->written)
        return;
    t->written = t->writing;
    ec_table_promise(t);
}

/* Some of them have, and others ask for memory meanwhile: `bytes` of the columns. Several threads at once. */
static void ec_table_wrote_some(ec_table *t, int64_t bytes)
{
    int64_t before = __atomic_load_n(&t->promised, __ATOMIC_RELAXED), after;
    do
        after = before > bytes ? before - bytes : 0;
    while (!__atomic_compare_exchange_n(&t->promised, &before, after, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    ec_promise(after - before);
}

/* Bytes that a row takes in all columns. */
static int64_t ec_table_row_bytes(ec_table *t)
{
    ec_arena *columns[EC_COLUMNS];
    int64_t bytes = 0;
    ec_table_columns(t, columns);
    for (int i = 0; i < EC_COLUMNS; ++i)
        bytes += columns[i] == NULL ? 0 : columns[i]->stride;
    return bytes;
}

/* -------------------------------------------------------------------------------------------------------- partitions */

/* The part of `count` keys that belongs to a partition, were they spread evenly. */
static inline int64_t ec_partition_share_of(const ec_partition *p, int64_t count)
{
    return count / EC_VSHARDS * (p->vshard_to - p->vshard_from) + count % EC_VSHARDS * (p->vshard_to - p->vshard_from) / EC_VSHARDS;
}

/* Live rows above which a partition splits. */
static inline int64_t ec_partition_split_above(const ec_partition *p, int64_t split_above)
{
    return split_above - split_above / 4 * p->vshard_from / EC_VSHARDS;
}

/* Set when the index grows next: up to a sixteenth of its keys before it must. */
static inline void ec_partition_pace(ec_partition *p)
{
    p->grow_at = p->index.grow_at - p->index.grow_at / 16 * p->vshard_from / EC_VSHARDS;
}

/* The buckets to allocate for a partition that needs `need`: whole huge pages where there are many partitions. A growth
 * from `held` buckets goes by about 1.5, and not by less than 1.25. */
static inline uint64_t ec_partition_buckets(const ec_table *t, uint64_t need, uint64_t held)
{
    const uint64_t step = held + held / 2, wanted = need > step ? need : step;
    if (t->partition_count < EC_WHOLE_PAGES_FROM || wanted <= EC_HUGE_BUCKETS * 3 / 4 || wanted > UINT64_MAX / 128)
        return wanted;
    const uint64_t less = wanted / EC_HUGE_BUCKETS * EC_HUGE_BUCKETS;
    return less >= need && less >= held + held / 4 ? less : (wanted + EC_HUGE_BUCKETS - 1) / EC_HUGE_BUCKETS * EC_HUGE_BUCKETS;
}

/* ec_index_resize_to for an index of a partition: into a block made ready ahead, where there is one. */
static int ec_table_resize_index(const ec_table *t, ec_index *index, uint64_t buckets, int touch)
{
    size_t held;
    void *block = buckets > SIZE_MAX / sizeof(ec_bucket) ? NULL : ec_spare_take((ec_spare *)t->spares, buckets * sizeof(ec_bucket), &held);
    if (block == NULL)
        return ec_index_resize_to(index, buckets, touch);
    ec_index_move(index, buckets, block, held, touch);
    return EC_OK;
}

/* Make room for `extra` keys beside those of limbo rows. EC_NOMEM changes nothing. */
static int ec_partition_reserve(const ec_table *t, ec_partition *p, int64_t extra)
{
    const int64_t keys = p->index.size + p->limbo + extra;
    if (keys <= p->grow_at)
        return EC_OK;
    const uint64_t buckets = ec_partition_buckets(t, ec_index_buckets_for(keys), p->index.bucket_count);
    int status = ec_table_resize_index(t, &p->index, buckets, 1);
    if (status == EC_OK)
        ec_partition_pace(p);
    else if (keys <= p->index.grow_at) { /* it need not have grown yet */
        p->grow_at = p->index.grow_at;
        status = EC_OK;
    }
    return status;
}

/* `slots` zeroed partitions behind a copy of `count` of them, cache-line aligned, or NULL. */
static ec_partition *ec_partitions_copy(const ec_partition *from, int64_t count, int64_t slots)
{
    ec_partition *copy = ec_take_refused() ? NULL : (ec_partition *)aligned_alloc(64, (size_t)slots * sizeof *copy);
    if (copy == NULL)
        return NULL;
    if (count > 0)
        memcpy(copy, from, (size_t)count * sizeof *copy);
    memset(copy + count, 0, (size_t)(slots - count) * sizeof *copy);
    return copy;
}

static inline ec_partition *ec_table_partition(const ec_table *t, uint64_t hash)
{
    return t->partitions + t->partition_of[ec_vshard(hash)];
}

static inline int64_t ec_partition_row(const ec_partition *p, int64_t local)
{
    return ((int64_t)p->extents[local >> EC_EXTENT_BITS] << EC_EXTENT_BITS) | (local & (EC_EXTENT_ROWS - 1));
}

static inline int64_t ec_table_local(const ec_table *t, int64_t row)
{
    return ((int64_t)t->extent_local[row >> EC_EXTENT_BITS] << EC_EXTENT_BITS) | (row & (EC_EXTENT_ROWS - 1));
}

static inline void ec_partition_push_row(const ec_table *t, ec_partition *p, int64_t local, int64_t row)
{
    *ec_table_flags(t, row) = 0;
    *ec_table_key(t, row) = p->free_head;
    p->free_head = local;
    p->free_count += 1;
}

static inline void ec_partition_push(const ec_table *t, ec_partition *p, int64_t local)
{
    ec_partition_push_row(t, p, local, ec_partition_row(p, local));
}

/* The next local: from the free list, else by counting up (its extent may have to be taken yet). -1 at the limit. */
static inline int64_t ec_partition_pop(const ec_table *t, ec_partition *p)
{
    int64_t local = p->free_head;
    if (local < 0)
        return p->next_local > UINT32_MAX ? -1 : p->next_local++;
    p->free_head = *ec_table_key(t, ec_partition_row(p, local));
    p->free_count -= 1;
    if (p->free_head >= 0)
        EC_PREFETCH_READ(ec_table_key(t, ec_partition_row(p, p->free_head)));
    return local;
}

/* Give back extents at the end of a partition's list that hold no handed-out local. Cannot fail. */
static void ec_partition_release_extents(ec_table *t, ec_partition *p)
{
    while (p->extent_count > 0 && (p->extent_count - 1) * EC_EXTENT_ROWS >= p->next_local) {
        uint32_t extent = p->extents[--p->extent_count];
        int64_t at = t->free_extent_count++;
        for (; at > 0 && t->free_extents[at - 1] < extent; --at)
            t->free_extents[at] = t->free_extents[at - 1];
        t->free_extents[at] = extent;
    }
}

/* Take back a pop, newest first: afterwards the next pops give the same locals again. `again`: it came from the free list. */
static inline void ec_partition_unpop(ec_table *t, ec_partition *p, int64_t local, int again)
{
    if (!again && local == p->next_local - 1) {
        if (local < p->extent_count * EC_EXTENT_ROWS) {
            int64_t row = ec_partition_row(p, local);
            if (row < t->row_limit)
                *ec_table_flags(t, row) = 0;
        }
        p->next_local = local;
        p->backed_local = p->backed_local < local ? p->backed_local : local;
        ec_partition_release_extents(t, p);
    } else {
        ec_partition_push(t, p, local);
    }
}

/* --------------------------------------------------------------------------------------------- growth of the columns */

static int ec_grow_u32(uint32_t **array, int64_t slots)
{
    uint32_t *wider = (uint32_t *)ec_take(*array, (size_t)slots * sizeof **array);
    if (wider == NULL)
        return EC_NOMEM;
    *array = wider;
    return EC_OK;
}

/* Append the lowest free extent to a partition's list. EC_NOMEM and EC_LIMIT change nothing. */
static int ec_table_take_extent(ec_table *t, ec_partition *p)
{
    if (p->extent_count == p->extent_slots) {
        int64_t slots = p->extent_slots ? p->extent_slots + (p->extent_slots + 1) / 2 : 2;
        if (ec_grow_u32(&p->extents, slots) != EC_OK)
            return EC_NOMEM;
        p->extent_slots = slots;
    }
    uint32_t extent;
    if (t->free_extent_count > 0) {
        extent = t->free_extents[--t->free_extent_count];
    } else {
        if (t->extent_count == EC_ROWS_MAX / EC_EXTENT_ROWS)
            return EC_LIMIT;
        if (t->extent_count == t->extent_slots) {
            int64_t slots = t->extent_slots ? t->extent_slots + (t->extent_slots + 1) / 2 : 2;
            if (ec_grow_u32(&t->extent_local, slots) != EC_OK || ec_grow_u32(&t->free_extents, slots) != EC_OK)
                return EC_NOMEM;
            t->extent_slots = slots;
        }
        extent = (uint32_t)t->extent_count++;
    }
    t->extent_local[extent] = (uint32_t)p->extent_count;
    p->extents[p->extent_count++] = extent;
    return EC_OK;
}

/* Map every column up to `rows` rows, or none further: EC_NOMEM and EC_DISK leave them as they were. */
static int ec_table_map_rows(ec_table *t, int64_t rows)
{
    ec_arena *columns[EC_COLUMNS];
    int64_t before[EC_COLUMNS];
    size_t missing = 0;
    if (rows <= t->row_limit)
        return EC_OK;
    ec_table_columns(t, columns);
    for (int i = 0; i < EC_COLUMNS; ++i)
        if (columns[i] != NULL)
            missing += ec_arena_missing(columns[i], rows);
    if (t->backing == NULL && !ec_memory_claim(missing))
        return EC_NOMEM;
    int status = EC_OK;
    for (int i = 0; i < EC_COLUMNS && status == EC_OK; ++i) {
        if (columns[i] == NULL)
            continue;
        before[i] = columns[i]->segment_count;
        status = ec_arena_reserve(columns[i], rows);
        if (status != EC_OK)
            while (i-- > 0)
                if (columns[i] != NULL)
                    ec_arena_truncate(columns[i], before[i]);
    }
    if (status == EC_OK) {
        t->row_limit = rows;
        ec_table_promise(t);
    }
    if (t->backing == NULL)
        ec_memory_written(missing); /* from here on it is among what the columns have promised */
    return status;
}

/* Give every local that was handed out its extent and its memory. On failure the caller takes the locals back. */
static int ec_table_back_locals(ec_table *t)
{
    int64_t rows = t->written;
    for (int64_t i = 0; i < t->partition_count; ++i) {
        ec_partition *p = t->partitions + i;
        while (p->extent_count * EC_EXTENT_ROWS < p->next_local) {
            int status = ec_table_take_extent(t, p);
            if (status != EC_OK)
                return status;
        }
        for (int64_t local = p->backed_local; local < p->next_local;) {
            int64_t end = ((local >> EC_EXTENT_BITS) + 1) * EC_EXTENT_ROWS;
            end = end < p->next_local ? end : p->next_local;
            int64_t row = ec_partition_row(p, end - 1);
            rows = row + 1 > rows ? row + 1 : rows;
            local = end;
        }
    }
    int status = ec_table_map_rows(t, rows);
    if (status == EC_OK)
        t->writing = rows;
    if (status == EC_OK)
        for (int64_t i = 0; i < t->partition_count; ++i)
            t->partitions[i].backed_local = t->partitions[i].next_local;
    return status;
}

/* -------------------------------------------------------------------------------------------------------- life of a row */

static inline void ec_table_enter_limbo(ec_table *t, ec_partition *p, uint64_t hash, uint8_t *flags)
{
    EC_ASSERT(*flags & EC_LIVE);
    *flags = (uint8_t)((*flags & ~EC_LIVE) | EC_LIMBO);
    p->limbo += 1;
    t->limbo_of[ec_vshard(hash)] += 1;
    t->limbo += 1;
    t->live -= 1;
    t->version += 1;
}

static int64_t ec_table_detach(ec_table *t, int64_t key, uint64_t hash)
{
    ec_partition *p = ec_table_partition(t, hash);
    int64_t local = ec_index_erase(&p->index, key, hash);
    if (local < 0)
        return -1;
    int64_t row = ec_partition_row(p, local);
    ec_table_enter_limbo(t, p, hash, ec_table_flags(t, row));
    return row;
}

/* The same of a key that is there, whose partition, home bucket and row's flags are known. */
static inline void ec_table_detach_from(ec_table *t, ec_partition *p, int64_t key, uint64_t hash, uint64_t home, uint8_t *flags)
{
    const int64_t local = ec_index_erase_from(&p->index, key, home);
    EC_ASSERT(local >= 0 && ec_table_flags(t, ec_partition_row(p, local)) == flags);
    (void)local;
    ec_table_enter_limbo(t, p, hash, flags);
}

static inline void ec_table_leave_limbo(ec_table *t, ec_partition *p, uint64_t hash)
{
    EC_ASSERT(p->limbo > 0 && t->limbo_of[ec_vshard(hash)] > 0);
    p->limbo -= 1;
    t->limbo_of[ec_vshard(hash)] -= 1;
    t->limbo -= 1;
    t->version += 1;
}

/* Inverse of detach. EC_STATE, and nothing changed, where the row is not in limbo. */
static int ec_table_attach(ec_table *t, int64_t key, uint64_t hash, int64_t row)
{
    ec_partition *p = ec_table_partition(t, hash);
    uint8_t *flags = ec_table_flags(t, row);
    if (!(*flags & EC_LIMBO) || *ec_table_key(t, row) != key)
        return EC_STATE;
    ec_table_leave_limbo(t, p, hash);
    *flags = (uint8_t)((*flags & ~EC_LIMBO) | EC_LIVE);
    ec_index_insert(&p->index, key, hash, (uint32_t)ec_table_local(t, row));
    t->live += 1;
    return EC_OK;
}

/* Remember a key whose row is gone for good. A list that is longer than the table is given up, and so is one that finds no
 * memory: then the next checkpoint is a full one, which needs no list. */
static void ec_table_log_erased(ec_table *t, int64_t key)
{
    if (t->erased_count == t->erased_slots) {
        const int64_t slots = t->erased_slots + t->erased_slots / 2 + 1024;
        int64_t *wider = t->erased_count > t->live + EC_ERASED_SPARE ? NULL : (int64_t *)ec_take(t->erased, (size_t)slots * sizeof *wider);
        if (wider == NULL) {
            free(t->erased);
            t->erased = NULL;
            t->erased_count = t->erased_slots = 0;
            t->tracking = EC_LOST;
            return;
        }
        t->erased = wider;
        t->erased_slots = slots;
    }
    t->erased[t->erased_count++] = key;
}

/* End of a limbo row: its place becomes free. */
static void ec_table_free_row(ec_table *t, uint64_t hash, int64_t row)
{
    ec_partition *p = ec_table_partition(t, hash);
    if (!(*ec_table_flags(t, row) & EC_LIMBO))
        return; /* erased from the host table behind the planner's back */
    if (t->tracking == EC_TRACKED)
        ec_table_log_erased(t, *ec_table_key(t, row));
    ec_table_leave_limbo(t, p, hash);
    ec_partition_push_row(t, p, ec_table_local(t, row), row);
}

/* Undo of an insert, newest first: the next inserts get the same row indexes again, unless a partition was split between
 * the inserts that are undone. */
static void ec_table_unborn(ec_table *t, int64_t key, uint64_t hash, int64_t row)
{
    ec_partition *p = ec_table_partition(t, hash);
    int64_t local = ec_index_find(&p->index, key, hash);
    if (local < 0 || ec_partition_row(p, local) != row)
        return; /* somebody has erased the key from the host table, behind the planner's back: its row is free already */
    ec_index_erase(&p->index, key, hash);
    ec_partition_unpop(t, p, local, *ec_table_flags(t, row) & EC_AGAIN);
    t->live -= 1;
    t->version += 1;
}

#endif
