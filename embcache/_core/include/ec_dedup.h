/* Unique keys, inverse and occurrence lists (CSR) of the keys of one table.
 *
 * Uniques are numbered by first occurrence. A plain call uses one reused open-addressing table whose entries carry a
 * generation stamp, so nothing is cleared between calls. With several threads a large call is cut in two directions:
 * into blocks of consecutive positions and, by hash bits, into EC_PARTS parts with a hash table each; every phase is a
 * set of independent tasks over blocks, parts or ranges of ids. Both ways give the same arrays; the cut way does about
 * as much work again, so one thread alone takes the plain one.
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
#define EC_RANGES 8            /* ranges of ids that are grouped by themselves */
#define EC_DEDUP_MAX_KEYS ((int64_t)UINT32_MAX - 1)

typedef struct {
    int64_t key;
    uint32_t generation;
    uint32_t id;
} ec_dedup_entry;

/* A key of a part: where it came from, and its number inside the part. */
typedef struct {
    int64_t key;
    uint32_t at;
    uint32_t id;
} ec_dedup_item;

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

/* Numbers the distinct keys of n items: id of each, first[id] = place of its first occurrence, counts[id]. Returns how
 * many. `spent` top bits of the hash are equal for all keys and so choose nothing. Items are read and written through
 * two strides, for plain arrays of keys and ids and for arrays of ec_dedup_item. */
static inline __attribute__((always_inline)) int64_t ec_dedup_run(ec_dedup_table *d, const uint64_t seed[2], int spent,
                                                                  const int64_t *keys, int key_stride, int64_t n,
                                                                  uint32_t *ids, int id_stride, uint32_t *first, uint32_t *counts) {
    ec_dedup_entry *entries = (ec_dedup_entry *)d->block.data;
    const uint32_t generation = d->generation;
    const int log2 = ec_dedup_log2(n);
    const int shift = 64 - log2;
    const uint64_t mask = ((uint64_t)1 << log2) - 1;
    uint64_t ring[EC_DEDUP_AHEAD];
    int64_t unique = 0;

    for (int64_t i = 0; i < EC_DEDUP_AHEAD && i < n; i++) {
        ring[i] = ec_dedup_hash(keys[i * key_stride], seed) << spent >> shift;
        EC_PREFETCH_WRITE(&entries[ring[i]]);
    }
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = ring[i % EC_DEDUP_AHEAD];
        if (i + EC_DEDUP_AHEAD < n) {
            const uint64_t later = ec_dedup_hash(keys[(i + EC_DEDUP_AHEAD) * key_stride], seed) << spent >> shift;
            ring[i % EC_DEDUP_AHEAD] = later;
            EC_PREFETCH_WRITE(&entries[later]);
        }
        const int64_t key = keys[i * key_stride];
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
        ids[i * id_stride] = entry->id;
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
    /* scratch of every call: ids (plain calls) and, by id, first occurrence and count */
    uint32_t *ids, *first, *counts;
    /* scratch of a cut call */
    int64_t blocks;
    ec_dedup_item *items; /* [n] by part, in batch order within a part */
    uint32_t *part_uid;   /* [n] the final id of a part's id */
    int64_t *cursor;      /* [n] where in `order` the next position of an id goes */
    uint32_t *starts;     /* [EC_PARTS * (blocks + 1)] where a block's keys start inside a part's range */
    uint32_t *fresh;      /* [EC_PARTS * (blocks + 1)] ids that a part had given out before a block */
    int64_t *block_first; /* [blocks + 1] ids given out before a block */
    int64_t *block_count; /* [blocks + 1] occurrences of the ids of earlier blocks */
} ec_dedup_call;

/* Groups positions by id: the counting sort of a plain call. */
static inline void ec_dedup_csr(ec_dedup_call *c) {
    int64_t total = c->position_base;
    for (int64_t id = 0; id < c->unique; id++) {
        c->ends[id] = total; /* a cursor first; after the pass below it stands at the end of its group */
        total += c->counts[id];
    }
    int64_t *order = c->order - c->position_base;
    for (int64_t i = 0; i < c->n; i++) order[c->ends[c->inverse[i]]++] = c->position_base + i;
}

/* The whole of a plain call. */
static int ec_dedup_plain(ec_dedup_call *c, ec_dedup_table *d) {
    if (ec_dedup_begin(d, c->n) != EC_OK) return EC_NOMEM;
    c->unique = ec_dedup_run(d, c->seed, 0, c->keys, 1, c->n, c->ids, 1, c->first, c->counts);
    for (int64_t i = 0; i < c->n; i++) c->inverse[i] = c->ids[i];
    for (int64_t id = 0; id < c->unique; id++) c->unique_keys[id] = c->keys[c->first[id]];
    ec_dedup_csr(c);
    return EC_OK;
}

/* -------------------------------------------------------------------------------------------- the phases of a cut call
 * block_count_parts (blocks) -> layout (serial) -> block_scatter (blocks) -> part_run (parts) -> number (serial)
 * -> block_number (blocks) -> sum (serial) -> block_inverse (blocks) -> range_order (ranges)
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
        c->items[k] = (ec_dedup_item){c->keys[i], (uint32_t)i, 0};
    }
}

/* Numbers a part's keys by themselves. first[] holds indexes into the part's range. */
static int ec_dedup_part_run(ec_dedup_call *c, int part, ec_dedup_table *d) {
    const uint32_t begin = *ec_dedup_start(c, part, 0);
    const int64_t n = *ec_dedup_start(c, part, c->blocks) - begin;
    if (ec_dedup_begin(d, n) != EC_OK) return EC_NOMEM;
    ec_dedup_item *items = c->items + begin;
    const int stride = sizeof(ec_dedup_item) / sizeof(int64_t), half_stride = sizeof(ec_dedup_item) / sizeof(uint32_t);
    const int64_t unique = ec_dedup_run(d, c->seed, EC_PARTS_LOG2, &items->key, stride, n, &items->id, half_stride,
                                        c->first + begin, c->counts + begin);
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
            const uint32_t at = c->items[begin + c->first[begin + id]].at - base;
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
            const ec_dedup_item *item = &c->items[begin + c->first[begin + id]];
            const uint32_t at = item->at - base;
            const uint64_t lower = is_first[at >> 6] & (((uint64_t)1 << (at & 63)) - 1);
            const int64_t uid = c->block_first[block] + before[at >> 6] + __builtin_popcountll(lower);
            c->part_uid[begin + id] = (uint32_t)uid;
            c->unique_keys[uid] = item->key;
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
    for (int64_t uid = c->block_first[block]; uid < c->block_first[block + 1]; uid++) {
        c->cursor[uid] = end;
        c->ends[uid] = end += c->ends[uid];
    }
    for (int part = 0; part < EC_PARTS; part++) {
        const uint32_t *uid = c->part_uid + *ec_dedup_start(c, part, 0);
        const ec_dedup_item *stop = c->items + *ec_dedup_start(c, part, block + 1);
        for (const ec_dedup_item *item = c->items + *ec_dedup_start(c, part, block); item < stop; item++)
            c->inverse[item->at] = uid[item->id];
    }
}

/* First block of a range: ranges hold about equally many occurrences of the ids that first occur in their blocks. */
static inline int64_t ec_dedup_range(const ec_dedup_call *c, int range) {
    const int64_t target = c->position_base + c->n / EC_RANGES * range;
    int64_t block = 0;
    if (range == EC_RANGES) return c->blocks;
    while (block < c->blocks && c->block_count[block] < target) block++;
    return block;
}

/* Groups the positions of a range of ids. An id occurs nowhere before its first block. */
static inline void ec_dedup_range_order(ec_dedup_call *c, int range) {
    const int64_t first_block = ec_dedup_range(c, range), last_block = ec_dedup_range(c, range + 1);
    const uint64_t low = (uint64_t)c->block_first[first_block], span = (uint64_t)c->block_first[last_block] - low;
    int64_t *order = c->order - c->position_base;
    if (span == 0) return;
    for (int64_t i = first_block * EC_DEDUP_BLOCK; i < c->n; i++) {
        const uint64_t uid = (uint64_t)c->inverse[i];
        if (uid - low < span) order[c->cursor[uid]++] = c->position_base + i;
    }
}

#endif
