/* Keys -> row indexes, a batch at a time.
 *
 * The home buckets of a block of keys are prefetched while the block before is served, so that cache misses overlap. Keys
 * that live further on wait aside for the next bucket's line.
 */
#ifndef EC_FIND_H
#define EC_FIND_H

#include <stddef.h>

#include "ec_table.h"

#define EC_AHEAD 16      /* keys between the prefetch of a bucket and its probe; a power of two */
#define EC_FIND_BLOCK 32 /* keys whose buckets are asked for at once */
#define EC_LATE 16       /* keys that may wait for the line after their home bucket; a power of two */
#define EC_FAR_BLOCK 64  /* the same in a table whose index reaches further than the processor's translations of addresses */

static inline uint64_t ec_hash_at(const int64_t *keys, const uint64_t *hashes, int64_t i)
{
    return hashes == NULL ? ec_hash(keys[i]) : hashes[i];
}

/* Where a key will be looked for: its home bucket, on its way into the cache. */
typedef struct ec_probe {
    const ec_bucket *bucket;
    const ec_index *index; /* of a partition, or one by itself */
} ec_probe;

/* Where keys are looked for: in a table, of which rows are wanted, or in an index by itself, of which values are. */
typedef struct ec_place_to_look {
    const ec_table *table; /* or NULL; it holds a key, so every partition has a bucket */
    const ec_index *index;
} ec_place_to_look;

EC_INLINE ec_probe ec_probe_start(const ec_place_to_look in, uint64_t hash)
{
    ec_probe probe;
    probe.index = in.table ? &ec_table_partition(in.table, hash)->index : in.index;
    probe.bucket = probe.index->buckets + ec_index_home(probe.index, hash);
    return probe;
}

/* What is wanted of a key that was found. */
EC_INLINE int64_t ec_probe_found(const ec_place_to_look in, const ec_index *index, uint32_t value)
{
    _Static_assert(offsetof(ec_partition, index) == 0, "a partition begins with its index");
    return in.table ? ec_partition_row((const ec_partition *)(const void *)index, value) : (int64_t)value;
}

/* Where the extent of a value that was found in a partition's index is kept. */
EC_INLINE const uint32_t *ec_probe_extent(const ec_index *index, int64_t value)
{
    return ((const ec_partition *)(const void *)index)->extents + (value >> EC_EXTENT_BITS);
}

EC_INLINE uint32_t ec_probe_match(const ec_bucket *bucket, int64_t key, const int avx2)
{
#if EC_HAS_AVX2_CLONE
    return avx2 ? ec_bucket_match_avx2(bucket, key) : ec_bucket_match(bucket, key);
#else
    (void)avx2;
    return ec_bucket_match(bucket, key);
#endif
}

/* The value of the key, or -1, of one look-up by itself. */
EC_INLINE int64_t ec_probe_value(const ec_probe *probe, int64_t key, const int avx2)
{
    const uint32_t hits = ec_probe_match(probe->bucket, key, avx2);
    if (hits)
        return probe->bucket->vals[__builtin_ctz(hits)];
    if (ec_bucket_overflow(probe->bucket) == 0)
        return -1;
    const uint32_t *value = ec_index_place_from(probe->index, key, (uint64_t)(probe->bucket - probe->index->buckets));
    return value == NULL ? -1 : (int64_t)*value;
}

/* A key that is not in the buckets it was looked for in so far; it waits for the next one's cache line. */
typedef struct ec_late {
    const ec_bucket *bucket;
    const ec_index *index;
    int64_t at;      /* place in the batch */
    uint64_t probes; /* buckets looked at: the search ends at all of them */
} ec_late;

typedef struct ec_late_ring {
    ec_late keys[EC_LATE];
    uint32_t put, taken;
} ec_late_ring;

/* Ask for the bucket after `bucket` and let the key wait for it. There must be a free place. */
EC_INLINE void ec_late_put(ec_late_ring *late, const ec_index *index, const ec_bucket *bucket, int64_t at, uint64_t probes)
{
    bucket = bucket + 1 == index->buckets + index->bucket_count ? index->buckets : bucket + 1;
    EC_PREFETCH_READ(bucket);
    late->keys[late->put++ % EC_LATE] = (ec_late){bucket, index, at, probes};
}

/* Look at one more bucket for the key that has waited longest. */
EC_INLINE void ec_late_step(ec_late_ring *late, const ec_place_to_look in, const int64_t *keys, int64_t *out, const int avx2)
{
    const ec_late it = late->keys[late->taken++ % EC_LATE];
    const uint32_t hits = ec_probe_match(it.bucket, keys[it.at], avx2);
    if (hits)
        out[it.at] = ec_probe_found(in, it.index, it.bucket->vals[__builtin_ctz(hits)]);
    else if (ec_bucket_overflow(it.bucket) == 0 || it.probes == it.index->bucket_count)
        out[it.at] = -1;
    else
        ec_late_put(late, it.index, it.bucket, it.at, it.probes + 1);
}

/* Hash keys from .. to - 1 and ask for their home buckets. */
EC_INLINE void ec_find_ask(const ec_place_to_look in, const int64_t *keys, const uint64_t *hashes, int64_t from, int64_t to, ec_probe *probes)
{
    for (int64_t i = from; i < to; ++i) {
        probes[i - from] = ec_probe_start(in, ec_hash_at(keys, hashes, i));
        EC_PREFETCH_READ(probes[i - from].bucket);
    }
}

/* Two loops in turn: one hashes a block of keys and asks for their buckets, one looks into the buckets of the block
 * before. Short loops let the processor's own window reach over many keys, which helps where prefetches do not suffice
 * (translations of addresses are missed as well as lines).
 *
 * One key in ten or so lives beyond its home bucket. Waiting there for another cache line would stall the window
 * (measured: 100 ns a key), so such keys are put aside, their line is asked for, and they are looked at again when
 * EC_LATE of their kind have come. */
EC_INLINE void ec_find_body(const ec_place_to_look in, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *out, const int avx2)
{
    ec_probe blocks[2][EC_FIND_BLOCK];
    ec_late_ring late;
    late.put = late.taken = 0;
    ec_find_ask(in, keys, hashes, 0, n < EC_FIND_BLOCK ? n : EC_FIND_BLOCK, blocks[0]);
    for (int64_t begin = 0, turn = 0; begin < n; begin += EC_FIND_BLOCK, turn ^= 1) {
        const int64_t end = begin + EC_FIND_BLOCK < n ? begin + EC_FIND_BLOCK : n;
        const ec_probe *probes = blocks[turn];
        if (end < n)
            ec_find_ask(in, keys, hashes, end, end + EC_FIND_BLOCK < n ? end + EC_FIND_BLOCK : n, blocks[turn ^ 1]);
        for (int64_t i = begin; i < end; ++i) {
            const ec_probe *probe = &probes[i - begin];
            const uint32_t hits = ec_probe_match(probe->bucket, keys[i], avx2);
            if (EC_LIKELY(hits)) {
                out[i] = ec_probe_found(in, probe->index, probe->bucket->vals[__builtin_ctz(hits)]);
            } else if (ec_bucket_overflow(probe->bucket) == 0) {
                out[i] = -1;
            } else {
                while (late.put - late.taken == EC_LATE)
                    ec_late_step(&late, in, keys, out, avx2);
                ec_late_put(&late, probe->index, probe->bucket, i, 2);
            }
        }
    }
    while (late.taken != late.put)
        ec_late_step(&late, in, keys, out, avx2);
}

/* The same in a table of so many keys that most addresses must be translated anew (`far_above`), on CPUs whose prefetches help
 * little there, while the instructions between two demands keep them from reaching many keys at a time. So the buckets of a
 * block are demanded in a loop that does nothing else, and extents, whose list is no longer in the near caches, are prefetched
 * for a loop of their own. Measured on AMD's Zen 3 with 100 M keys: 80 ns a key instead of 128; with 10 M: 31 instead of 23.
 * On Intel's Sapphire Rapids 80 M keys take 32 ns this way and 26 the other, so `ec_far_above` asks who made the CPU. */
EC_INLINE void ec_find_far_body(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *out, const int avx2)
{
    const ec_place_to_look in = {t, NULL};
    ec_probe blocks[2][EC_FAR_BLOCK];
    ec_late_ring late;
    late.put = late.taken = 0;
    for (int64_t begin = -EC_FAR_BLOCK, turn = 1; begin < n; begin += EC_FAR_BLOCK, turn ^= 1) {
        ec_probe *probes = blocks[turn], *next = blocks[turn ^ 1];
        const int64_t end = begin + EC_FAR_BLOCK < n ? begin + EC_FAR_BLOCK : n;
        const int64_t asked = end + EC_FAR_BLOCK < n ? EC_FAR_BLOCK : n - end;
        for (int64_t i = 0; i < asked; ++i)
            next[i] = ec_probe_start(in, ec_hash_at(keys, hashes, end + i));
        for (int64_t i = 0; i < asked; ++i)
            (void)*(const volatile uint32_t *)&next[i].bucket->meta;
        if (begin < 0)
            continue;
        for (int64_t i = begin; i < end; ++i) {
            ec_probe *probe = &probes[i - begin];
            const uint32_t hits = ec_probe_match(probe->bucket, keys[i], avx2);
            if (EC_LIKELY(hits)) {
                out[i] = probe->bucket->vals[__builtin_ctz(hits)];
                EC_PREFETCH_READ(ec_probe_extent(probe->index, out[i]));
                continue;
            }
            if (ec_bucket_overflow(probe->bucket) == 0) {
                out[i] = -1;
            } else {
                while (late.put - late.taken == EC_LATE)
                    ec_late_step(&late, in, keys, out, avx2);
                ec_late_put(&late, probe->index, probe->bucket, i, 2);
            }
            probe->index = NULL;
        }
        for (int64_t i = begin; i < end; ++i)
            if (probes[i - begin].index != NULL)
                out[i] = ec_probe_found(in, probes[i - begin].index, (uint32_t)out[i]);
    }
    while (late.taken != late.put)
        ec_late_step(&late, in, keys, out, avx2);
}

#if EC_HAS_AVX2_CLONE
EC_TARGET_AVX2 static void ec_find_far_avx2(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows)
{
    ec_find_far_body(t, keys, hashes, n, rows, 1);
}

EC_TARGET_AVX2 static void ec_find_rows_avx2(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows)
{
    ec_find_body((ec_place_to_look){t, NULL}, keys, hashes, n, rows, 1);
}

EC_TARGET_AVX2 static void ec_find_values_avx2(const ec_index *index, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *values)
{
    ec_find_body((ec_place_to_look){NULL, index}, keys, hashes, n, values, 1);
}
#endif

/* rows[i] = row of keys[i], or -1. `hashes` may be NULL. */
static void ec_find_span(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows)
{
    if (t->live == 0) {
        memset(rows, 0xFF, (size_t)n * sizeof *rows);
        return;
    }
    const int far = t->live > t->far_above;
#if EC_HAS_AVX2_CLONE
    if (ec_cpu_has_avx2()) {
        (far ? ec_find_far_avx2 : ec_find_rows_avx2)(t, keys, hashes, n, rows);
        return;
    }
#endif
    if (far)
        ec_find_far_body(t, keys, hashes, n, rows, 0);
    else
        ec_find_body((ec_place_to_look){t, NULL}, keys, hashes, n, rows, 0);
}

/* The same in an index by itself: values[i] = value of keys[i], or -1. */
static void ec_find_values(const ec_index *index, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *values)
{
    if (index->size == 0) {
        memset(values, 0xFF, (size_t)n * sizeof *values);
        return;
    }
#if EC_HAS_AVX2_CLONE
    if (ec_cpu_has_avx2()) {
        ec_find_values_avx2(index, keys, hashes, n, values);
        return;
    }
#endif
    ec_find_body((ec_place_to_look){NULL, index}, keys, hashes, n, values, 0);
}

#endif
