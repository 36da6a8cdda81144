/* Unique keys, inverse and occurrence lists (CSR) of the keys of one table.
 *
 * Uniques are numbered by first occurrence. A small call uses one reused open-addressing table whose entries carry a
 * generation stamp, so nothing is cleared between calls. A large call is cut in two directions: into blocks of
 * consecutive positions and, by hash bits, into EC_PARTS parts with a hash table each; every phase is a set of
 * independent tasks over blocks or parts, and each part's table fits a core's own cache, so this pays with one thread
 * too. Both ways give the same arrays.
 *
 * The probe hash is keyed by a random seed of the process: keys crafted against it cannot be prepared, and nothing
 * observable depends on it.
 */
#ifndef EC_DEDUP_H
#define EC_DEDUP_H

#include <stdint.h>
#include <string.h>

#include "ec_hash.h"
#include "ec_vec.h"

#define EC_DEDUP_AHEAD 16      /* keys between the prefetch and the probe */
#define EC_DEDUP_BLOCK 8192    /* positions of a block of a large call */
#define EC_PARTS_LOG2 5
#define EC_PARTS (1 << EC_PARTS_LOG2)
#define EC_DEDUP_LARGE 65536   /* keys of one table from which the call is cut */
#define EC_DEDUP_MAX_KEYS ((int64_t)UINT32_MAX - 1)

typedef struct {
    int64_t key;
    uint32_t generation;
    uint32_t id;
} ec_dedup_entry;

/* A reusable probe table; one caller at a time. It never shrinks: 32 bytes a key of the largest call it served. */
typedef struct {
    ec_block block;
    int64_t places;
    uint32_t generation;
} ec_dedup_table;

static inline void ec_dedup_table_free(ec_dedup_table *d) {
    ec_block_drop(&d->block);
    memset(d, 0, sizeof *d);
}

/* log2 of the places used for n keys: a small call after a large one stays within a small, warm prefix. */
static inline int ec_dedup_log2(int64_t n) {
    int log2 = 6;
    while (((int64_t)1 << log2) < 2 * n) log2++;
    return log2;
}

/* Makes ready for a call with up to n keys: an empty table. */
static inline int ec_dedup_begin(ec_dedup_table *d, int64_t n) {
    const int64_t places = (int64_t)1 << ec_dedup_log2(n);
    if (places > d->places) {
        ec_block block;
        if (ec_block_take(&block, (size_t)places * sizeof(ec_dedup_entry)) != EC_OK) return EC_NOMEM;
        ec_block_drop(&d->block);
        d->block = block;
        d->places = places;
        d->generation = 0;
    }
    if (++d->generation == 0) {
        memset(d->block.data, 0, (size_t)d->places * sizeof(ec_dedup_entry));
        d->generation = 1;
    }
    return EC_OK;
}

/* The probe hash; its top bits choose the part, the bits below the place. */
static inline uint64_t ec_dedup_hash(int64_t key, const uint64_t seed[2]) { return ec_fold128((uint64_t)key ^ seed[0], seed[1]); }

/* Numbers the distinct keys: ids[i] of keys[i], first[id] = i of its first occurrence, counts[id]. Returns how many.
 * `spent` top bits of the hash are equal for all keys and so choose nothing. */
static int64_t ec_dedup_run(ec_dedup_table *d, const uint64_t seed[2], int spent, const int64_t *keys, int64_t n,
                            uint32_t *ids, uint32_t *first, uint32_t *counts) {
    ec_dedup_entry *entries = (ec_dedup_entry *)d->block.data;
    const uint32_t generation = d->generation;
    const int log2 = ec_dedup_log2(n);
    const int shift = 64 - log2;
    const uint64_t mask = ((uint64_t)1 << log2) - 1;
    uint32_t ring[EC_DEDUP_AHEAD];
    int64_t unique = 0;
    EC_ASSERT(log2 <= 32);

    for (int64_t i = 0; i < EC_DEDUP_AHEAD && i < n; i++) {
        ring[i] = (uint32_t)(ec_dedup_hash(keys[i], seed) << spent >> shift);
        EC_PREFETCH_WRITE(&entries[ring[i]]);
    }
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = ring[i % EC_DEDUP_AHEAD];
        if (i + EC_DEDUP_AHEAD < n) {
            const uint32_t later = (uint32_t)(ec_dedup_hash(keys[i + EC_DEDUP_AHEAD], seed) << spent >> shift);
            ring[i % EC_DEDUP_AHEAD] = later;
            EC_PREFETCH_WRITE(&entries[later]);
        }
        const int64_t key = keys[i];
        while (entries[at].generation == generation && entries[at].key != key) at = (at + 1) & mask;
        ec_dedup_entry *entry = &entries[at];
        if (entry->generation != generation) {
            entry->key = key;
            entry->generation = generation;
            entry->id = (uint32_t)unique;
            first[unique] = (uint32_t)i;
            counts[unique] = 0;
            unique++;
        }
        ids[i] = entry->id;
        counts[entry->id]++;
    }
    return unique;
}

/* --------------------------------------------------------------------------------------------------- one table's call */

/* What one table's call reads and fills. Positions are relative to the table; all outputs have room for n items. */
typedef struct {
    const int64_t *keys;
    int64_t n;
    const uint64_t *seed;
    int64_t *inverse;     /* [n] id of each position */
    int64_t *order;       /* [n] positions grouped by id, ascending within an id, plus `position_base` */
    int64_t *unique_keys; /* [unique] */
    int64_t *ends;        /* [unique] end of the id's group in `order`, plus `position_base` */
    int64_t position_base;
    int64_t unique;
    /* scratch of a small call: ids and, after it, per-id data; of a large call: see below */
    uint32_t *ids, *first, *counts;
    /* scratch of a large call */
    int64_t blocks;
    int64_t *part_keys;   /* [n] keys by part, in batch order within a part */
    uint32_t *part_at;    /* [n] their positions */
    uint32_t *part_uid;   /* [n] the final id of a part's id */
    int64_t *cursor;      /* [n] write cursor of a part's id */
    uint32_t *starts;     /* [EC_PARTS * (blocks + 1)] where a block's keys start inside a part's range */
    uint32_t *fresh;      /* [EC_PARTS * (blocks + 1)] ids that a part had given out before a block */
    int64_t *block_first; /* [blocks + 1] ids given out before a block */
    int64_t *block_count; /* [blocks + 1] occurrences of the ids of earlier blocks */
} ec_dedup_call;

/* Groups positions by id: the counting sort of a small call. */
static inline void ec_dedup_csr(ec_dedup_call *c) {
    int64_t total = c->position_base;
    for (int64_t id = 0; id < c->unique; id++) {
        c->ends[id] = total; /* a cursor first; after the pass below it stands at the end of its group */
        total += c->counts[id];
    }
    int64_t *order = c->order - c->position_base;
    for (int64_t i = 0; i < c->n; i++) order[c->ends[c->inverse[i]]++] = c->position_base + i;
}

/* The whole of a small call. */
static inline int ec_dedup_small(ec_dedup_call *c, ec_dedup_table *d) {
    if (ec_dedup_begin(d, c->n) != EC_OK) return EC_NOMEM;
    c->unique = ec_dedup_run(d, c->seed, 0, c->keys, c->n, c->ids, c->first, c->counts);
    for (int64_t i = 0; i < c->n; i++) c->inverse[i] = c->ids[i];
    for (int64_t id = 0; id < c->unique; id++) c->unique_keys[id] = c->keys[c->first[id]];
    ec_dedup_csr(c);
    return EC_OK;
}

/* ------------------------------------------------------------------------------------------ the phases of a large call
 * block_count_parts (blocks) -> layout (serial) -> block_scatter (blocks) -> part_run (parts) -> number (serial)
 * -> block_number (blocks) -> sum (serial) -> block_inverse (blocks) -> part_order (parts)
 */

static inline int64_t ec_dedup_blocks(int64_t n) { return (n + EC_DEDUP_BLOCK - 1) / EC_DEDUP_BLOCK; }
static inline int64_t ec_dedup_block_end(const ec_dedup_call *c, int64_t block) {
    const int64_t end = (block + 1) * EC_DEDUP_BLOCK;
    return end < c->n ? end : c->n;
}
static inline uint32_t *ec_dedup_start(const ec_dedup_call *c, int part, int64_t block) {
    return &c->starts[part * (c->blocks + 1) + block];
}
static inline uint32_t *ec_dedup_fresh(const ec_dedup_call *c, int part, int64_t block) {
    return &c->fresh[part * (c->blocks + 1) + block];
}

static inline void ec_dedup_block_count_parts(ec_dedup_call *c, int64_t block) {
    uint32_t sizes[EC_PARTS] = {0};
    const int64_t end = ec_dedup_block_end(c, block);
    for (int64_t i = block * EC_DEDUP_BLOCK; i < end; i++) sizes[ec_dedup_hash(c->keys[i], c->seed) >> (64 - EC_PARTS_LOG2)]++;
    for (int part = 0; part < EC_PARTS; part++) *ec_dedup_start(c, part, block) = sizes[part];
}

static inline void ec_dedup_layout(ec_dedup_call *c) {
    uint32_t total = 0;
    for (int part = 0; part < EC_PARTS; part++) {
        for (int64_t block = 0; block < c->blocks; block++) {
            uint32_t *at = ec_dedup_start(c, part, block);
            const uint32_t size = *at;
            *at = total;
            total += size;
        }
        *ec_dedup_start(c, part, c->blocks) = total;
    }
}

static inline void ec_dedup_block_scatter(ec_dedup_call *c, int64_t block) {
    uint32_t at[EC_PARTS];
    for (int part = 0; part < EC_PARTS; part++) at[part] = *ec_dedup_start(c, part, block);
    const int64_t end = ec_dedup_block_end(c, block);
    for (int64_t i = block * EC_DEDUP_BLOCK; i < end; i++) {
        const uint32_t k = at[ec_dedup_hash(c->keys[i], c->seed) >> (64 - EC_PARTS_LOG2)]++;
        c->part_keys[k] = c->keys[i];
        c->part_at[k] = (uint32_t)i;
    }
}

/* Numbers a part's keys by themselves. first[] holds indexes into the part's range. */
static inline int ec_dedup_part_run(ec_dedup_call *c, int part, ec_dedup_table *d) {
    const uint32_t begin = *ec_dedup_start(c, part, 0);
    const int64_t n = *ec_dedup_start(c, part, c->blocks) - begin;
    if (ec_dedup_begin(d, n) != EC_OK) return EC_NOMEM;
    const int64_t unique =
        ec_dedup_run(d, c->seed, EC_PARTS_LOG2, c->part_keys + begin, n, c->ids + begin, c->first + begin, c->counts + begin);
    int64_t id = 0;
    for (int64_t block = 0; block <= c->blocks; block++) {
        const uint32_t before = *ec_dedup_start(c, part, block) - begin;
        while (id < unique && c->first[begin + id] < before) id++;
        *ec_dedup_fresh(c, part, block) = (uint32_t)id;
    }
    return EC_OK;
}

static inline void ec_dedup_number(ec_dedup_call *c) {
    int64_t total = 0;
    for (int64_t block = 0; block < c->blocks; block++) {
        c->block_first[block] = total;
        for (int part = 0; part < EC_PARTS; part++) total += *ec_dedup_fresh(c, part, block + 1) - *ec_dedup_fresh(c, part, block);
    }
    c->block_first[c->blocks] = total;
    c->unique = total;
}

/* Gives the ids that first occur in a block their final numbers: their rank among the block's first occurrences. */
static inline void ec_dedup_block_number(ec_dedup_call *c, int64_t block) {
    uint64_t is_first[EC_DEDUP_BLOCK / 64] = {0};
    uint32_t before[EC_DEDUP_BLOCK / 64];
    const uint32_t base = (uint32_t)(block * EC_DEDUP_BLOCK);
    for (int part = 0; part < EC_PARTS; part++) {
        const uint32_t begin = *ec_dedup_start(c, part, 0), stop = *ec_dedup_fresh(c, part, block + 1);
        for (uint32_t id = *ec_dedup_fresh(c, part, block); id < stop; id++) {
            const uint32_t at = c->part_at[begin + c->first[begin + id]] - base;
            is_first[at >> 6] |= (uint64_t)1 << (at & 63);
        }
    }
    uint32_t rank = 0;
    for (int word = 0; word < EC_DEDUP_BLOCK / 64; word++) {
        before[word] = rank;
        rank += (uint32_t)__builtin_popcountll(is_first[word]);
    }
    int64_t occurrences = 0;
    for (int part = 0; part < EC_PARTS; part++) {
        const uint32_t begin = *ec_dedup_start(c, part, 0), stop = *ec_dedup_fresh(c, part, block + 1);
        for (uint32_t id = *ec_dedup_fresh(c, part, block); id < stop; id++) {
            const uint32_t k = begin + c->first[begin + id];
            const uint32_t at = c->part_at[k] - base;
            const uint64_t lower = is_first[at >> 6] & (((uint64_t)1 << (at & 63)) - 1);
            const int64_t uid = c->block_first[block] + before[at >> 6] + __builtin_popcountll(lower);
            c->part_uid[begin + id] = (uint32_t)uid;
            c->unique_keys[uid] = c->part_keys[k];
            c->ends[uid] = c->counts[begin + id];
            occurrences += c->counts[begin + id];
        }
    }
    c->block_count[block] = occurrences;
}

static inline void ec_dedup_sum(ec_dedup_call *c) {
    int64_t total = c->position_base;
    for (int64_t block = 0; block < c->blocks; block++) {
        const int64_t count = c->block_count[block];
        c->block_count[block] = total;
        total += count;
    }
}

static inline void ec_dedup_block_inverse(ec_dedup_call *c, int64_t block) {
    int64_t end = c->block_count[block];
    for (int64_t uid = c->block_first[block]; uid < c->block_first[block + 1]; uid++) c->ends[uid] = end += c->ends[uid];
    for (int part = 0; part < EC_PARTS; part++) {
        const uint32_t begin = *ec_dedup_start(c, part, 0), stop = *ec_dedup_start(c, part, block + 1);
        for (uint32_t k = *ec_dedup_start(c, part, block); k < stop; k++) c->inverse[c->part_at[k]] = c->part_uid[begin + c->ids[k]];
    }
}

static inline void ec_dedup_part_order(ec_dedup_call *c, int part) {
    const uint32_t begin = *ec_dedup_start(c, part, 0), stop = *ec_dedup_start(c, part, c->blocks);
    const uint32_t unique = *ec_dedup_fresh(c, part, c->blocks);
    int64_t *cursor = c->cursor + begin, *order = c->order - c->position_base;
    for (uint32_t id = 0; id < unique; id++) cursor[id] = c->ends[c->part_uid[begin + id]] - c->counts[begin + id];
    for (uint32_t k = begin; k < stop; k++) order[cursor[c->ids[k]]++] = c->position_base + c->part_at[k];
}

#endif
