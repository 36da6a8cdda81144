/* The batch insert: absent keys of a batch get rows, all or none.
 *
 * Four steps. *Settle*: one pass over the batch finds each key or gives it a local of its partition; threads own disjoint
 * partitions and each walks the whole batch, so the order inside a partition is that of the batch whoever does it.
 * *Back*: one thread takes the extents of the new locals, in partition order, and maps their memory. *Place*: locals
 * become row indexes. *Bear*: new rows get their initial values. Until the last step nothing but indexes, free lists and
 * counters has changed, and ec_insert_undo takes that back.
 *
 * A call that could fill partitions all by itself is looked through first: an estimate of its distinct keys says how
 * many partitions there will be and how large, so they are split while they are small, and nothing is copied again.
 * The estimate (P. Flajolet and others, HyperLogLog, 2007) is a function of the batch, so row indexes stay one too.
 * Such a call is also cut by partition first (ec_bulk.h) and takes its steps over the keys in that order.
 */
#ifndef EC_INSERT_H
#define EC_INSERT_H

#include "ec_ahead.h"
#include "ec_rows.h"
#include "ec_split.h"

#define EC_FINISH 16 /* rows that are asked for at once, to be written */

enum { EC_BORN = 1, EC_BORN_AGAIN = 2 }; /* marks of born[] while an insert runs: a new key; its row was free before */

typedef struct ec_insertion {
    ec_table *t;
    const int64_t *keys;
    const uint64_t *hashes; /* NULL: computed */
    int64_t n;
    int64_t *rows; /* a row index, or -1 - local where the local was handed out by this call */
    uint8_t *born;
    const int64_t *groups; /* the keys of partition p are groups[p] .. groups[p + 1] - 1; NULL: they come mixed */
    int64_t shares;
    int bare; /* the caller is about to write weights and state of all rows: new ones get no initial values */
} ec_insertion;

typedef struct ec_share_result {
    int64_t born;
    int status;
    char apart[48]; /* a cache line a thread */
} ec_share_result;

/* ----------------------------------------------------------------------------------------------------- looking ahead */

enum { EC_SKETCH_BITS = 12 };

/* About how many different keys a batch holds (standard error 1.6 %). */
static int64_t ec_distinct_estimate(const int64_t *keys, const uint64_t *hashes, int64_t n)
{
    uint8_t longest[1 << EC_SKETCH_BITS];
    const double registers = (double)(1 << EC_SKETCH_BITS);
    memset(longest, 0, sizeof longest);
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t hash = ec_hash_at(keys, hashes, i);
        const uint8_t length = (uint8_t)(__builtin_ctzll(hash >> EC_SKETCH_BITS | (uint64_t)1 << 52) + 1);
        uint8_t *held = longest + (hash & ((1 << EC_SKETCH_BITS) - 1));
        if (length > *held)
            *held = length;
    }
    double sum = 0.0;
    for (int i = 0; i < 1 << EC_SKETCH_BITS; ++i)
        sum += 1.0 / (double)((uint64_t)1 << longest[i]);
    const double estimate = 0.7213 / (1.0 + 1.079 / registers) * registers * registers / sum;
    return estimate < (double)n ? (int64_t)estimate : n;
}

/* Split what is too large, and see that every partition has a bucket to look into. What there is to split was inserted
 * since the last call, so the cost is shared by the inserts; and a call that is undone and repeated finds nothing left
 * to split. */
static int ec_insert_begin(ec_table *t, int64_t n)
{
    for (int64_t i = 0; i < t->partition_count; ++i) {
        int status = ec_table_split_large(t, i, 0);
        if (status != EC_OK)
            return status;
    }
    ec_table_make_ready(t, n);
    return t->partitions->index.bucket_count == 0 ? ec_partition_reserve(t, t->partitions, 1) : EC_OK;
}

/* Split and size the partitions for a batch of `distinct` keys. There will be at least as many keys as the batch has, and
 * at least as many as there are: whichever is more in a partition. */
static int ec_insert_prepare(ec_table *t, int64_t distinct)
{
    for (int64_t i = 0; i < t->partition_count; ++i) {
        int status = ec_table_split_large(t, i, distinct);
        if (status != EC_OK)
            return status;
    }
    for (int64_t i = 0; i < t->partition_count; ++i) {
        ec_partition *p = t->partitions + i;
        const int64_t more = ec_partition_share_of(p, distinct) - p->index.size;
        if (more > 0) { /* and a little more than the estimate: a copy at the end is what this is to save */
            int status = ec_partition_reserve(t, p, more + more / 16);
            if (status != EC_OK)
                return status;
        }
    }
    return EC_OK;
}

/* ------------------------------------------------------------------------------------------------------------ settling */

/* About how many more new keys come when `seen` of n keys brought `born`: the rest is expected to bring as many in proportion. */
static inline int64_t ec_settle_coming(int64_t seen, int64_t n, int64_t born)
{
    const double coming = (double)(n - seen) * (double)(born + 1) / (double)(seen + 1);
    return coming < (double)INT64_MAX / EC_VSHARDS ? (int64_t)coming : INT64_MAX / EC_VSHARDS;
}

/* Make the index ready for one more key and, within a factor of 4, for `extra` that are expected beside it. */
static __attribute__((noinline)) int ec_settle_grow(const ec_table *t, ec_partition *p, int64_t extra)
{
    const int64_t held = p->index.size + p->limbo;
    extra = extra < 3 * held ? extra : 3 * held;
    int status = ec_partition_reserve(t, p, extra + 1);
    return status == EC_OK ? EC_OK : ec_partition_reserve(t, p, 1);
}

/* The partition of a hash where it belongs to `share`, or NULL: another thread may be moving its index at this moment.
 * `group`: that of all keys, where they do not come mixed. */
EC_INLINE ec_partition *ec_settle_partition(const ec_insertion *b, ec_partition *group, int64_t share, uint64_t hash)
{
    if (group != NULL)
        return group;
    ec_partition *p = ec_table_partition(b->t, hash);
    return b->shares == 1 || (p - b->t->partitions) % b->shares == share ? p : NULL;
}

/* A key on its way: its home bucket, asked for; NULL: of another share. */
typedef struct ec_settling {
    uint64_t hash;
    ec_bucket *home;
} ec_settling;

EC_INLINE void ec_settle_aim(const ec_insertion *b, ec_partition *group, int64_t share, ec_settling *it)
{
    const ec_partition *p = ec_settle_partition(b, group, share, it->hash);
    it->home = p == NULL ? NULL : p->index.buckets + ec_index_home(&p->index, it->hash);
}

EC_INLINE void ec_settle_ask(const ec_insertion *b, ec_partition *group, int64_t share, int64_t i, ec_settling *window)
{
    ec_settling *it = window + (i & (EC_AHEAD - 1));
    it->hash = ec_hash_at(b->keys, b->hashes, i);
    ec_settle_aim(b, group, share, it);
    if (it->home != NULL)
        EC_PREFETCH_READ(it->home);
}

/* Settle the keys from .. to - 1, all of partition `group`, or, where that is NULL, those of the share. */
EC_INLINE void ec_settle_body(const ec_insertion *b, int64_t from, int64_t to, ec_partition *group, int64_t share,
                              ec_share_result *result, const int avx2)
{
    const ec_table *t = b->t;
    const int64_t n = to - from, before = result->born;
    ec_settling window[EC_AHEAD];
    for (int64_t i = from; i < to && i < from + EC_AHEAD; ++i)
        ec_settle_ask(b, group, share, i, window);
    for (int64_t i = from; i < to; ++i) {
        const int64_t key = b->keys[i];
        const uint64_t hash = window[i & (EC_AHEAD - 1)].hash;
        ec_bucket *home = window[i & (EC_AHEAD - 1)].home;
        if (i + EC_AHEAD < to)
            ec_settle_ask(b, group, share, i + EC_AHEAD, window);
        if (i + EC_AHEAD / 2 < to) { /* a full bucket sends the key to the next one */
            const ec_bucket *soon = window[(i + EC_AHEAD / 2) & (EC_AHEAD - 1)].home;
            if (soon != NULL && (soon->meta & EC_OCCUPANCY) == EC_OCCUPANCY)
                EC_PREFETCH_READ(soon + 1);
        }
        if (home == NULL)
            continue;
        ec_partition *p = group != NULL ? group : ec_table_partition(t, hash);
        const ec_probe probe = {home, &p->index};
        const int64_t found = ec_probe_value(&probe, key, avx2);
        if (found >= 0) {
            b->rows[i] = found < p->backed_local ? ec_partition_row(p, found) : -1 - found;
            continue;
        }
        if (p->index.size + p->limbo >= p->grow_at) {
            const int64_t coming = ec_settle_coming(i - from, n, (result->born - before) * (group == NULL ? b->shares : 1));
            result->status = ec_settle_grow(t, p, group == NULL ? ec_partition_share_of(p, coming) : coming);
            if (result->status != EC_OK)
                return;
            home = p->index.buckets + ec_index_home(&p->index, hash); /* buckets have moved */
            for (int64_t j = i + 1; j < to && j <= i + EC_AHEAD; ++j)
                ec_settle_aim(b, group, share, window + (j & (EC_AHEAD - 1)));
        }
        const int again = p->free_head >= 0;
        const int64_t local = ec_partition_pop(t, p);
        if (local < 0) {
            result->status = EC_LIMIT;
            return;
        }
        ec_index_insert_from(&p->index, key, home, (uint32_t)local);
        b->rows[i] = again ? ec_partition_row(p, local) : -1 - local;
        b->born[i] = again ? EC_BORN | EC_BORN_AGAIN : EC_BORN;
        result->born += 1;
    }
}

EC_INLINE void ec_settle_share(const ec_insertion *b, int64_t share, ec_share_result *result, const int avx2)
{
    if (b->groups == NULL) {
        ec_settle_body(b, 0, b->n, NULL, share, result, avx2);
        return;
    }
    for (int64_t i = share; i < b->t->partition_count && result->status == EC_OK; i += b->shares)
        ec_settle_body(b, b->groups[i], b->groups[i + 1], b->t->partitions + i, share, result, avx2);
}

#if EC_HAS_AVX2_CLONE
EC_TARGET_AVX2 static void ec_settle_avx2(const ec_insertion *b, int64_t share, ec_share_result *result)
{
    ec_settle_share(b, share, result, 1);
}
#endif

/* Settle the keys of the partitions whose number is `share` modulo b->shares. Stops at the first failure. */
static void ec_settle(const ec_insertion *b, int64_t share, ec_share_result *result)
{
#if EC_HAS_AVX2_CLONE
    if (ec_cpu_has_avx2()) {
        ec_settle_avx2(b, share, result);
        return;
    }
#endif
    ec_settle_share(b, share, result, 0);
}

/* Take everything back, newest first. */
static void ec_insert_undo(const ec_insertion *b)
{
    ec_table *t = b->t;
    for (int64_t i = b->n - 1; i >= 0; --i) {
        if (!b->born[i])
            continue;
        const uint64_t hash = ec_hash_at(b->keys, b->hashes, i);
        ec_partition *p = ec_table_partition(t, hash);
        const int64_t local = ec_index_erase(&p->index, b->keys[i], hash);
        ec_partition_unpop(t, p, local, b->born[i] & EC_BORN_AGAIN);
        b->born[i] = 0;
    }
}

/* ----------------------------------------------------------------------------------------------------------- finishing */

/* Where the rows lie whose numbers are equal after `shift` bits: in one segment of every column, so that of rows that follow one
 * another only the first is looked up. */
typedef struct ec_stretch {
    int64_t number;
    int shift;
    char *weights;
    int64_t *keys;
    uint8_t *flags;
} ec_stretch;

static ec_stretch ec_stretch_none(const ec_table *t)
{
    const int rows = t->rows.shift, keys = t->keys.shift, flags = t->flags.shift;
    const int shift = rows < keys ? rows : keys;
    return (ec_stretch){-1, shift < flags ? shift : flags, NULL, NULL, NULL};
}

static inline void ec_stretch_to(const ec_table *t, ec_stretch *stretch, int64_t row)
{
    if (row >> stretch->shift == stretch->number)
        return;
    stretch->number = row >> stretch->shift;
    const int64_t first = stretch->number << stretch->shift;
    stretch->weights = (char *)ec_table_weights(t, first);
    stretch->keys = ec_table_key(t, first);
    stretch->flags = ec_table_flags(t, first);
}

/* A row that is about to be born. */
typedef struct ec_coming_row {
    uint64_t hash;
    void *weights;
    int64_t *key;
    uint8_t *flags;
} ec_coming_row;

/* Initial weights and state of the row of a key. */
static inline void ec_insert_begin_row(const ec_table *t, int64_t row, const ec_coming_row *coming)
{
    ec_table_initial(t, coming->hash, coming->weights, t->type);
    if (t->state_dim > 0) {
        size_t bytes = (size_t)t->state_dim * sizeof(float);
        if (t->initial_state == NULL)
            memset(ec_table_state(t, row), 0, bytes);
        else
            memcpy(ec_table_state(t, row), t->initial_state, bytes);
    }
}

/* Rows and initial values of the elements from .. to - 1. */
static void ec_insert_finish(const ec_insertion *b, int64_t from, int64_t to)
{
    const ec_table *t = b->t;
    const int64_t row_bytes = ec_table_row_bytes(b->t);
    int64_t written = 0;
    ec_coming_row coming[EC_FINISH];
    ec_stretch stretch = ec_stretch_none(t);
    for (; from < to; from += EC_FINISH) {
        const int64_t count = to - from < EC_FINISH ? to - from : EC_FINISH;
        for (int64_t j = 0; j < count; ++j) {
            const int64_t i = from + j;
            if (b->rows[i] >= 0 && !b->born[i])
                continue;
            const uint64_t hash = ec_hash_at(b->keys, b->hashes, i);
            if (b->rows[i] < 0)
                b->rows[i] = ec_partition_row(ec_table_partition(t, hash), -1 - b->rows[i]);
            if (b->born[i]) {
                ec_stretch_to(t, &stretch, b->rows[i]);
                const int64_t within = b->rows[i] & (((int64_t)1 << stretch.shift) - 1);
                coming[j] = (ec_coming_row){hash, stretch.weights + within * t->rows.stride, stretch.keys + within, stretch.flags + within};
                if (!b->bare)
                    EC_PREFETCH_WRITE(coming[j].weights);
                EC_PREFETCH_WRITE(coming[j].key);
            }
        }
        for (int64_t j = 0; j < count; ++j) {
            const int64_t i = from + j;
            if (b->born[i]) {
                const int again = b->born[i] & EC_BORN_AGAIN;
                if (!b->bare)
                    ec_insert_begin_row(t, b->rows[i], &coming[j]);
                *coming[j].key = b->keys[i];
                *coming[j].flags = again ? EC_LIVE | EC_CHANGED | EC_AGAIN : EC_LIVE | EC_CHANGED;
                if (t->with_filter) {
                    *ec_table_freq(t, b->rows[i]) = 0;
                    *ec_table_ts(t, b->rows[i]) = INT64_MIN;
                }
                written += again ? 0 : row_bytes;
                b->born[i] = 1;
            }
        }
        if (written >= (int64_t)EC_ROOM_MIN || (written > 0 && from + EC_FINISH >= to)) {
            ec_table_wrote_some(b->t, written);
            written = 0;
        }
    }
}

/* The same, of an insert whose keys are all new and come in the order of `buffer`, with the rows that it holds in place of initial
 * values. No two elements have one row, so any part may be done by any thread. */
static void ec_insert_fill(const ec_insertion *b, const ec_rows_buffer *buffer, int64_t from, int64_t to)
{
    const ec_table *t = b->t;
    const int64_t row_bytes = ec_table_row_bytes(b->t);
    int64_t fresh = 0;
    ec_stretch stretch = ec_stretch_none(t);
    for (int64_t i = from; i < to; ++i) {
        const int again = b->born[i] & EC_BORN_AGAIN;
        if (b->rows[i] < 0)
            b->rows[i] = ec_partition_row(ec_table_partition(t, ec_hash_at(b->keys, b->hashes, i)), -1 - b->rows[i]);
        const int64_t row = b->rows[i];
        ec_stretch_to(t, &stretch, row);
        const int64_t within = row & (((int64_t)1 << stretch.shift) - 1);
        stretch.keys[within] = b->keys[i];
        stretch.flags[within] = again ? EC_LIVE | EC_CHANGED | EC_AGAIN : EC_LIVE | EC_CHANGED;
        if (t->with_filter) {
            *ec_table_freq(t, row) = 0;
            *ec_table_ts(t, row) = INT64_MIN;
        }
        ec_write_values(t, row, stretch.weights + within * t->rows.stride, i, buffer);
        fresh += again == 0;
        b->born[i] = 1;
    }
    ec_table_wrote_some(b->t, fresh * row_bytes);
}

#endif
