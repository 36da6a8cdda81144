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

/* Make the index ready for one more key, when `seen` of the n keys of the batch brought `born` new ones: the rest is
 * expected to bring as many in proportion, within a factor of 4. */
static __attribute__((noinline)) int ec_settle_grow(const ec_table *t, ec_partition *p, int64_t seen, int64_t n, int64_t born)
{
    const int64_t held = p->index.size + p->limbo;
    const double coming = (double)(n - seen) * (double)(born + 1) / (double)(seen + 1);
    int64_t extra = coming < (double)INT64_MAX / EC_VSHARDS ? ec_partition_share_of(p, (int64_t)coming) : 3 * held;
    extra = extra < 3 * held ? extra : 3 * held;
    int status = ec_partition_reserve(t, p, extra + 1);
    return status == EC_OK ? EC_OK : ec_partition_reserve(t, p, 1);
}

/* The partition of a hash where it belongs to `share`, or NULL: another thread may be moving its index at this moment. */
EC_INLINE ec_partition *ec_settle_partition(const ec_insertion *b, int64_t share, uint64_t hash)
{
    ec_partition *p = ec_table_partition(b->t, hash);
    return b->shares == 1 || (p - b->t->partitions) % b->shares == share ? p : NULL;
}

EC_INLINE void ec_settle_ask(const ec_insertion *b, int64_t share, uint64_t hash)
{
    const ec_partition *p = ec_settle_partition(b, share, hash);
    if (p != NULL)
        ec_index_prefetch(&p->index, hash);
}

EC_INLINE void ec_settle_body(const ec_insertion *b, int64_t share, ec_share_result *result, const int avx2)
{
    const ec_table *t = b->t;
    const int64_t n = b->n, ahead = EC_AHEAD < n ? EC_AHEAD : n;
    uint64_t window[EC_AHEAD]; /* hashes, not buckets: those move when an index grows */
    for (int64_t i = 0; i < ahead; ++i) {
        window[i] = ec_hash_at(b->keys, b->hashes, i);
        ec_settle_ask(b, share, window[i]);
    }
    for (int64_t i = 0; i < n; ++i) {
        const int64_t key = b->keys[i];
        const uint64_t hash = window[i & (EC_AHEAD - 1)];
        if (i + EC_AHEAD < n) {
            const uint64_t later = ec_hash_at(b->keys, b->hashes, i + EC_AHEAD);
            window[i & (EC_AHEAD - 1)] = later;
            ec_settle_ask(b, share, later);
        }
        if (i + EC_AHEAD / 2 < n) { /* a full bucket sends the key to the next one */
            const uint64_t soon = window[(i + EC_AHEAD / 2) & (EC_AHEAD - 1)];
            const ec_partition *next = ec_settle_partition(b, share, soon);
            if (next != NULL) {
                const ec_bucket *home = next->index.buckets + ec_index_home(&next->index, soon);
                if ((home->meta & EC_OCCUPANCY) == EC_OCCUPANCY)
                    EC_PREFETCH_READ(home + 1);
            }
        }
        ec_partition *p = ec_settle_partition(b, share, hash);
        if (p == NULL)
            continue;
        const ec_probe probe = {p->index.buckets + ec_index_home(&p->index, hash), &p->index};
        const int64_t found = ec_probe_value(&probe, key, avx2);
        if (found >= 0) {
            b->rows[i] = found < p->backed_local ? ec_partition_row(p, found) : -1 - found;
            continue;
        }
        if (p->index.size + p->limbo >= p->grow_at) {
            result->status = ec_settle_grow(t, p, i, n, result->born * b->shares);
            if (result->status != EC_OK)
                return;
        }
        const int again = p->free_head >= 0;
        const int64_t local = ec_partition_pop(t, p);
        if (local < 0) {
            result->status = EC_LIMIT;
            return;
        }
        ec_index_insert(&p->index, key, hash, (uint32_t)local);
        b->rows[i] = again ? ec_partition_row(p, local) : -1 - local;
        b->born[i] = again ? EC_BORN | EC_BORN_AGAIN : EC_BORN;
        result->born += 1;
    }
}

#if EC_HAS_AVX2_CLONE
EC_TARGET_AVX2 static void ec_settle_avx2(const ec_insertion *b, int64_t share, ec_share_result *result)
{
    ec_settle_body(b, share, result, 1);
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
    ec_settle_body(b, share, result, 0);
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

/* Rows and initial values of the elements from .. to - 1. */
static void ec_insert_finish(const ec_insertion *b, int64_t from, int64_t to)
{
    const ec_table *t = b->t;
    const int64_t row_bytes = ec_table_row_bytes(b->t);
    int64_t written = 0;
    uint64_t hashes[EC_FINISH];
    for (; from < to; from += EC_FINISH) {
        const int64_t count = to - from < EC_FINISH ? to - from : EC_FINISH;
        for (int64_t j = 0; j < count; ++j) {
            const int64_t i = from + j;
            if (b->rows[i] >= 0 && !b->born[i])
                continue;
            hashes[j] = ec_hash_at(b->keys, b->hashes, i);
            if (b->rows[i] < 0)
                b->rows[i] = ec_partition_row(ec_table_partition(t, hashes[j]), -1 - b->rows[i]);
            if (b->born[i]) {
                if (!b->bare)
                    EC_PREFETCH_WRITE(ec_table_weights(t, b->rows[i]));
                EC_PREFETCH_WRITE(ec_table_key(t, b->rows[i]));
            }
        }
        for (int64_t i = from; i < from + count; ++i) {
            if (b->born[i]) {
                if (!b->bare)
                    ec_table_begin_row(t, b->rows[i], hashes[i - from]);
                ec_table_bear(t, b->rows[i], b->keys[i], b->born[i] & EC_BORN_AGAIN);
                written += b->born[i] & EC_BORN_AGAIN ? 0 : row_bytes;
                b->born[i] = 1;
            }
        }
        if (written >= (int64_t)EC_ROOM_MIN || (written > 0 && from + EC_FINISH >= to)) {
            ec_table_wrote_some(b->t, written);
            written = 0;
        }
    }
}

#endif
