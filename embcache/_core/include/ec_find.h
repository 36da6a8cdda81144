/* Keys -> row indexes, a batch at a time.
 *
 * A rolling window: the home bucket of key i + AHEAD is prefetched while key i is served, so that cache misses overlap.
 * Keys that live further on wait aside for the next bucket's line.
 */
#ifndef EC_FIND_H
#define EC_FIND_H

#include "ec_table.h"

#define EC_AHEAD 16      /* keys between the prefetch of a bucket and its probe; a power of two */
#define EC_FIND_BLOCK 32 /* keys whose buckets are asked for at once */
#define EC_LATE 16       /* keys that may wait for the line after their home bucket; a power of two */

static inline uint64_t ec_hash_at(const int64_t *keys, const uint64_t *hashes, int64_t i)
{
    return hashes == NULL ? ec_hash(keys[i]) : hashes[i];
}

/* Where a key will be looked for: its home bucket, on its way into the cache. */
typedef struct ec_probe {
    const ec_bucket *bucket;
    const ec_partition *partition;
} ec_probe;

/* Only for a table that holds a key: then every partition has a bucket. */
EC_INLINE ec_probe ec_probe_start(const ec_table *t, uint64_t hash)
{
    ec_probe probe;
    probe.partition = ec_table_partition(t, hash);
    probe.bucket = probe.partition->index.buckets + ec_index_home(&probe.partition->index, hash);
    EC_PREFETCH_READ(probe.bucket);
    return probe;
}

/* The rest of a look-up whose home bucket does not hold the key but sent keys on. */
static __attribute__((noinline)) int64_t ec_probe_beyond(const ec_probe *probe, int64_t key)
{
    const ec_index *index = &probe->partition->index;
    const uint32_t *local = ec_index_place_from(index, key, (uint64_t)(probe->bucket - index->buckets));
    return local == NULL ? -1 : (int64_t)*local;
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

/* The local of the key, or -1. */
EC_INLINE int64_t ec_probe_local(const ec_probe *probe, int64_t key, const int avx2)
{
    const uint32_t hits = ec_probe_match(probe->bucket, key, avx2);
    if (hits)
        return probe->bucket->vals[__builtin_ctz(hits)];
    return ec_bucket_overflow(probe->bucket) == 0 ? -1 : ec_probe_beyond(probe, key);
}

/* A key that is not in the buckets it was looked for in so far; it waits for the next one's cache line. */
typedef struct ec_late {
    const ec_bucket *bucket;
    const ec_partition *partition;
    int64_t at;      /* place in the batch */
    uint64_t probes; /* buckets looked at: the search ends at all of them */
} ec_late;

typedef struct ec_late_ring {
    ec_late keys[EC_LATE];
    uint32_t put, taken;
} ec_late_ring;

/* Ask for the bucket after `bucket` and let the key wait for it. There must be a free place. */
EC_INLINE void ec_late_put(ec_late_ring *late, const ec_partition *p, const ec_bucket *bucket, int64_t at, uint64_t probes)
{
    bucket = bucket + 1 == p->index.buckets + p->index.bucket_count ? p->index.buckets : bucket + 1;
    EC_PREFETCH_READ(bucket);
    late->keys[late->put++ % EC_LATE] = (ec_late){bucket, p, at, probes};
}

/* Look at one more bucket for the key that has waited longest. */
EC_INLINE void ec_late_step(ec_late_ring *late, const int64_t *keys, int64_t *rows, const int avx2)
{
    const ec_late it = late->keys[late->taken++ % EC_LATE];
    const uint32_t hits = ec_probe_match(it.bucket, keys[it.at], avx2);
    if (hits)
        rows[it.at] = ec_partition_row(it.partition, it.bucket->vals[__builtin_ctz(hits)]);
    else if (ec_bucket_overflow(it.bucket) == 0 || it.probes == it.partition->index.bucket_count)
        rows[it.at] = -1;
    else
        ec_late_put(late, it.partition, it.bucket, it.at, it.probes + 1);
}

/* Hash keys from .. to - 1 and ask for their home buckets. */
EC_INLINE void ec_find_ask(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t from, int64_t to, ec_probe *probes)
{
    for (int64_t i = from; i < to; ++i)
        probes[i - from] = ec_probe_start(t, ec_hash_at(keys, hashes, i));
}

/* Two loops in turn: one hashes a block of keys and asks for their buckets, one looks into the buckets of the block
 * before. Short loops let the processor's own window reach over many keys, which helps where prefetches do not suffice
 * (translations of addresses are missed as well as lines).
 *
 * One key in ten or so lives beyond its home bucket. Waiting there for another cache line would stall the window
 * (measured: 100 ns a key), so such keys are put aside, their line is asked for, and they are looked at again when
 * EC_LATE of their kind have come. */
EC_INLINE void ec_find_body(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows, const int avx2)
{
    ec_probe blocks[2][EC_FIND_BLOCK];
    ec_late_ring late;
    late.put = late.taken = 0;
    ec_find_ask(t, keys, hashes, 0, n < EC_FIND_BLOCK ? n : EC_FIND_BLOCK, blocks[0]);
    for (int64_t begin = 0, turn = 0; begin < n; begin += EC_FIND_BLOCK, turn ^= 1) {
        const int64_t end = begin + EC_FIND_BLOCK < n ? begin + EC_FIND_BLOCK : n;
        const ec_probe *probes = blocks[turn];
        if (end < n)
            ec_find_ask(t, keys, hashes, end, end + EC_FIND_BLOCK < n ? end + EC_FIND_BLOCK : n, blocks[turn ^ 1]);
        for (int64_t i = begin; i < end; ++i) {
            const ec_probe *probe = &probes[i - begin];
            const uint32_t hits = ec_probe_match(probe->bucket, keys[i], avx2);
            if (EC_LIKELY(hits)) {
                rows[i] = ec_partition_row(probe->partition, probe->bucket->vals[__builtin_ctz(hits)]);
            } else if (ec_bucket_overflow(probe->bucket) == 0) {
                rows[i] = -1;
            } else {
                while (late.put - late.taken == EC_LATE)
                    ec_late_step(&late, keys, rows, avx2);
                ec_late_put(&late, probe->partition, probe->bucket, i, 2);
            }
        }
    }
    while (late.taken != late.put)
        ec_late_step(&late, keys, rows, avx2);
}

#if EC_HAS_AVX2_CLONE
EC_TARGET_AVX2 static void ec_find_avx2(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows)
{
    ec_find_body(t, keys, hashes, n, rows, 1);
}
#endif

/* rows[i] = row of keys[i], or -1. `hashes` may be NULL. */
static void ec_find_span(const ec_table *t, const int64_t *keys, const uint64_t *hashes, int64_t n, int64_t *rows)
{
    if (t->live == 0) {
        memset(rows, 0xFF, (size_t)n * sizeof *rows);
        return;
    }
#if EC_HAS_AVX2_CLONE
    if (ec_cpu_has_avx2()) {
        ec_find_avx2(t, keys, hashes, n, rows);
        return;
    }
#endif
    ec_find_body(t, keys, hashes, n, rows, 0);
}

#endif
