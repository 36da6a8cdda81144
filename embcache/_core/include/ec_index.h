/* The index: an open-addressing map from any int64 key to a uint32 value.
 *
 * Layout: cache-line buckets of 5 keys, 5 values and one meta word (5 occupancy bits; a 24-bit overflow count from
 * bit 8). A key lives in its home bucket or, when that is full, in the next one with a free place. The overflow count
 * of a bucket is the number of stored keys that were placed beyond it, so a look-up ends at the first bucket whose
 * count is 0 and deletion leaves no mark behind: it only takes back the counts it caused. A count that reaches its
 * maximum sticks there, which costs look-ups a step and never an answer.
 *
 * The home bucket is the high half of mix(hash, seed) * bucket_count, so any bucket count works, and walking buckets in
 * order visits homes in order: rehashing writes sequentially. Growth goes by factors of 1.5.
 *
 * Thread safety: any number of readers, or one writer.
 */
#ifndef EC_INDEX_H
#define EC_INDEX_H

#include <stdint.h>
#include <string.h>

#include "ec_backing.h"
#include "ec_hash.h"
#include "ec_isa.h"
#include "ec_status.h"

#define EC_BUCKET_KEYS 5
#define EC_OVERFLOW_SHIFT 8
#define EC_OVERFLOW_ONE (1u << EC_OVERFLOW_SHIFT)
#define EC_OVERFLOW_MAX 0xFFFFFFu
#define EC_OCCUPANCY 31u

typedef struct ec_bucket {
    int64_t keys[EC_BUCKET_KEYS];
    uint32_t vals[EC_BUCKET_KEYS];
    uint32_t meta;
} ec_bucket;

_Static_assert(sizeof(ec_bucket) == 64, "a bucket is one cache line");

typedef struct ec_index {
    ec_bucket *buckets;
    uint64_t bucket_count;
    int64_t size;    /* keys stored */
    int64_t grow_at; /* keys that fit: 3/4 of the places */
    uint64_t seed;
    size_t bytes; /* memory held */
    ec_backing *backing; /* where the buckets lie; NULL: anonymous memory */
} ec_index;

/* What the bytes of the buckets mean, for those who find them in a file: a new number with every change of the layout, of
 * the hash that chooses a bucket, or of the numbers beside the buckets. */
#define EC_INDEX_LAYOUT 1

static void ec_index_init_in(ec_index *index, uint64_t seed, ec_backing *backing)
{
    memset(index, 0, sizeof *index);
    index->seed = seed;
    index->backing = backing;
}

static void ec_index_init(ec_index *index, uint64_t seed) { ec_index_init_in(index, seed, NULL); }

static void ec_index_free(ec_index *index)
{
    ec_backing_free(index->backing, index->buckets, index->bytes);
    ec_index_init_in(index, index->seed, index->backing);
}

static inline uint64_t ec_index_home(const ec_index *index, uint64_t hash)
{
    return (uint64_t)(((unsigned __int128)ec_mix(hash, index->seed) * index->bucket_count) >> 64);
}

static inline uint32_t ec_bucket_overflow(const ec_bucket *bucket) { return bucket->meta >> EC_OVERFLOW_SHIFT; }

/* Bit i is set where place i holds `key`. */
static inline uint32_t ec_bucket_match(const ec_bucket *bucket, int64_t key)
{
    const int64_t *keys = bucket->keys;
    uint32_t hits = (uint32_t)(keys[0] == key) | (uint32_t)(keys[1] == key) << 1 | (uint32_t)(keys[2] == key) << 2 |
                    (uint32_t)(keys[3] == key) << 3 | (uint32_t)(keys[4] == key) << 4;
    return hits & bucket->meta;
}

static inline void ec_index_prefetch(const ec_index *index, uint64_t hash)
{
    EC_PREFETCH_READ(index->buckets + ec_index_home(index, hash));
}

#if EC_HAS_AVX2_CLONE
#include <immintrin.h>

/* The same in AVX2: 9 instructions instead of 20. The second load takes in the values, whose comparisons are dropped. */
EC_TARGET_AVX2 static inline uint32_t ec_bucket_match_avx2(const ec_bucket *bucket, int64_t key)
{
    const __m256i wanted = _mm256_set1_epi64x(key);
    const __m256i first = _mm256_cmpeq_epi64(_mm256_loadu_si256((const __m256i *)bucket), wanted);
    const __m256i last = _mm256_cmpeq_epi64(_mm256_loadu_si256((const __m256i *)bucket + 1), wanted);
    uint32_t hits = (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(first)) |
                    (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(last)) << 4;
    return hits & bucket->meta & EC_OCCUPANCY;
}
#endif

/* Address of the value of `key`, whose home bucket is `at`, or NULL. */
static inline uint32_t *ec_index_place_from(const ec_index *index, int64_t key, uint64_t at)
{
    for (uint64_t probe = 0; probe < index->bucket_count; ++probe) {
        ec_bucket *bucket = index->buckets + at;
        uint32_t hits = ec_bucket_match(bucket, key);
        if (hits)
            return bucket->vals + __builtin_ctz(hits);
        if (ec_bucket_overflow(bucket) == 0)
            return NULL;
        if (++at == index->bucket_count)
            at = 0;
    }
    return NULL;
}

static inline uint32_t *ec_index_place(const ec_index *index, int64_t key, uint64_t hash)
{
    return ec_index_place_from(index, key, ec_index_home(index, hash));
}

static inline int64_t ec_index_find(const ec_index *index, int64_t key, uint64_t hash)
{
    const uint32_t *value = ec_index_place(index, key, hash);
    return value == NULL ? -1 : (int64_t)*value;
}

/* Insert a key that is absent and whose home bucket is `bucket`, where room was reserved. */
static inline void ec_index_insert_from(ec_index *index, int64_t key, ec_bucket *bucket, uint32_t value)
{
    EC_ASSERT(index->size < index->grow_at);
    while ((bucket->meta & EC_OCCUPANCY) == EC_OCCUPANCY) {
        if (ec_bucket_overflow(bucket) != EC_OVERFLOW_MAX)
            bucket->meta += EC_OVERFLOW_ONE;
        if (++bucket == index->buckets + index->bucket_count)
            bucket = index->buckets;
    }
    int place = __builtin_ctz(~bucket->meta);
    bucket->keys[place] = key;
    bucket->vals[place] = value;
    bucket->meta |= 1u << place;
    index->size += 1;
}

static inline void ec_index_insert(ec_index *index, int64_t key, uint64_t hash, uint32_t value)
{
    ec_index_insert_from(index, key, index->buckets + ec_index_home(index, hash), value);
}

/* Overwrite the value of a present key. EC_OK, or EC_STATE where the key is absent. */
static inline int ec_index_set(ec_index *index, int64_t key, uint64_t hash, uint32_t value)
{
    uint32_t *place = ec_index_place(index, key, hash);
    if (place == NULL)
        return EC_STATE;
    *place = value;
    return EC_OK;
}

/* Remove a key whose home bucket is `home`: its value, or -1 where absent. */
static inline int64_t ec_index_erase_from(ec_index *index, int64_t key, uint64_t home)
{
    uint32_t *value = ec_index_place_from(index, key, home);
    if (value == NULL)
        return -1;
    int64_t old = (int64_t)*value;
    uint64_t last = (uint64_t)((char *)value - (char *)index->buckets) / sizeof(ec_bucket);
    for (uint64_t at = home; at != last;) {
        ec_bucket *bucket = index->buckets + at;
        if (ec_bucket_overflow(bucket) != EC_OVERFLOW_MAX)
            bucket->meta -= EC_OVERFLOW_ONE;
        if (++at == index->bucket_count)
            at = 0;
    }
    ec_bucket *bucket = index->buckets + last;
    bucket->meta &= ~(1u << (value - bucket->vals));
    index->size -= 1;
    return old;
}

static inline int64_t ec_index_erase(ec_index *index, int64_t key, uint64_t hash)
{
    return ec_index_erase_from(index, key, ec_index_home(index, hash));
}

/* Keys that fit in `bucket_count` buckets. */
static inline int64_t ec_index_room(uint64_t bucket_count) { return (int64_t)(bucket_count * (EC_BUCKET_KEYS * 3) / 4); }

/* Buckets that `keys` keys need. */
static inline uint64_t ec_index_buckets_for(int64_t keys)
{
    uint64_t count = ((uint64_t)keys * 4 + EC_BUCKET_KEYS * 3 - 1) / (EC_BUCKET_KEYS * 3);
    return count < 4 ? 4 : count;
}

/* Write to every page of an index that few keys have been copied to, so that it is memory and not only a promise. */
static void ec_index_touch(const ec_index *index)
{
    const size_t page = 4096;
    if (index->bytes < EC_MAP_MIN || (size_t)index->size / 4 >= index->bytes / page)
        return; /* of the heap, or with several keys a page, which has left none out that matters */
    volatile char *at = (volatile char *)index->buckets;
    for (size_t offset = 0; offset < index->bytes; offset += page)
        at[offset] = at[offset];
}

/* Move to `bucket_count` buckets, which must hold the keys, in a zeroed block as ec_backing_alloc gives it. `touch`: what is left
 * empty will be filled by a call to come, or later in this one, and shall not count as promised until then. */
static void ec_index_move(ec_index *index, uint64_t bucket_count, void *block, size_t held, int touch)
{
    ec_index wider;
    ec_index_init_in(&wider, index->seed, index->backing);
    wider.bytes = held;
    wider.buckets = (ec_bucket *)block;
    wider.bucket_count = bucket_count;
    wider.grow_at = ec_index_room(bucket_count);
    for (uint64_t at = 0; at < index->bucket_count; ++at) {
        const ec_bucket *bucket = index->buckets + at;
        for (uint32_t rest = bucket->meta & EC_OCCUPANCY; rest; rest &= rest - 1) {
            int place = __builtin_ctz(rest);
            ec_index_insert(&wider, bucket->keys[place], ec_hash(bucket->keys[place]), bucket->vals[place]);
        }
    }
    if (touch && wider.backing == NULL)
        ec_index_touch(&wider);
    ec_backing_written(wider.backing, wider.bytes);
    ec_backing_free(index->backing, index->buckets, index->bytes);
    *index = wider;
}

/* Move to exactly `bucket_count` buckets, which must hold the keys. EC_NOMEM and EC_DISK leave the index as it was. */
static int ec_index_resize_to(ec_index *index, uint64_t bucket_count, int touch)
{
    void *block = NULL;
    size_t held;
    if (bucket_count > SIZE_MAX / sizeof(ec_bucket))
        return EC_NOMEM;
    const int status = ec_backing_alloc(index->backing, (size_t)bucket_count * sizeof(ec_bucket), &block, &held);
    if (status == EC_OK)
        ec_index_move(index, bucket_count, block, held, touch);
    return status;
}

static int ec_index_resize(ec_index *index, uint64_t bucket_count) { return ec_index_resize_to(index, bucket_count, 0); }

/* After EC_OK, `extra` inserts cannot fail. Grows to what is needed, and by at least a factor of 1.5. */
static int ec_index_reserve(ec_index *index, int64_t extra)
{
    if (index->size + extra <= index->grow_at)
        return EC_OK;
    uint64_t need = ec_index_buckets_for(index->size + extra);
    uint64_t step = index->bucket_count + index->bucket_count / 2;
    return ec_index_resize(index, need > step ? need : step);
}

/* Check every invariant. EC_OK, EC_BROKEN or EC_NOMEM; *longest and *total receive the longest probe and the sum of all,
 * in buckets. */
static int ec_index_check_probes(const ec_index *index, int64_t *longest, int64_t *total)
{
    int status = EC_OK;
    int64_t keys = 0;
    *longest = *total = 0;
    uint64_t *beyond = (uint64_t *)calloc(index->bucket_count + 1, sizeof *beyond);
    if (beyond == NULL)
        return EC_NOMEM;
    for (uint64_t at = 0; at < index->bucket_count; ++at) {
        const ec_bucket *bucket = index->buckets + at;
        for (uint32_t rest = bucket->meta & EC_OCCUPANCY; rest; rest &= rest - 1) {
            int place = __builtin_ctz(rest);
            int64_t key = bucket->keys[place];
            uint64_t hash = ec_hash(key);
            int64_t probe = 1;
            for (uint64_t from = ec_index_home(index, hash); from != at; ++probe) {
                beyond[from] += 1;
                if (++from == index->bucket_count)
                    from = 0;
            }
            *longest = probe > *longest ? probe : *longest;
            *total += probe;
            keys += 1;
            if (ec_index_place(index, key, hash) != bucket->vals + place) /* a double, or cut off from its home */
                status = EC_BROKEN;
        }
    }
    for (uint64_t at = 0; at < index->bucket_count; ++at) {
        uint32_t count = ec_bucket_overflow(index->buckets + at);
        if (count != EC_OVERFLOW_MAX && (uint64_t)count != beyond[at])
            status = EC_BROKEN;
    }
    if (keys != index->size || index->size > index->grow_at || index->grow_at != ec_index_room(index->bucket_count))
        status = EC_BROKEN;
    free(beyond);
    return status;
}

static int ec_index_check(const ec_index *index, int64_t *longest)
{
    int64_t total;
    return ec_index_check_probes(index, longest, &total);
}

#endif
