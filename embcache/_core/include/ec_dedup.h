/* Unique keys, inverse and occurrence lists (CSR) of the keys of one table.
 *
 * Uniques are numbered by first occurrence. A plain call uses one reused open-addressing table; its entries carry a
 * stamp that rises from call to call, so nothing is cleared between calls. It is as large as the distinct keys that the
 * table's last batch lets one expect, and doubles where there are more. With three threads or more a large call is cut in
 * two directions: into blocks of consecutive positions and, by hash bits, into EC_PARTS parts with a hash table each;
 * every phase is a set of independent tasks over blocks or parts. Two threads take half of the positions each
 * (ec_halves.h). All ways give the same arrays; the cut way does two thirds as much work again, so one thread alone takes
 * the plain one.
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

#define EC_DEDUP_AHEAD 16       /* keys between a prefetch and its use */
#define EC_DEDUP_NEAR_KEYS 2048 /* up to so many keys nothing is prefetched: it is near */
#define EC_DEDUP_FAR_KEYS 65536 /* from so many keys on, what an entry leads to is prefetched too */
#define EC_DEDUP_BLOCK 8192     /* positions of a block of a large call */
#define EC_PARTS_LOG2 4
#define EC_PARTS (1 << EC_PARTS_LOG2)
#define EC_DEDUP_LARGE 65536 /* keys of one table from which the call is cut */
#define EC_DEDUP_MAX_KEYS ((int64_t)UINT32_MAX - 1)

/* Half of a hash, and the id plus a base that rises from call to call: entries of earlier calls lie below it. The key
 * itself stands in the list of unique keys, and it alone decides: an entry that outlived its call could only be in the
 * way. Eight bytes, so that the table of a medium call stays in the second-level cache. */
typedef struct {
    uint32_t tag;
    uint32_t stamp;
} ec_dedup_entry;

/* A key of a part: where it came from, and its number inside the part. */
typedef struct {
    int64_t key;
    uint32_t at;
    uint32_t id;
} ec_dedup_item;

/* A reusable probe table; one caller at a time. It never shrinks: 16 to 32 bytes a key of the largest call it served. */
typedef struct {
    ec_block block;
    int64_t places;
    uint32_t base; /* stamp of id 0; every stamp in the table is below the base of the next call */
    int log2;      /* of the places in use */
} ec_dedup_table;

static inline void ec_dedup_table_free(ec_dedup_table *d) {
    ec_block_drop(&d->block);
    memset(d, 0, sizeof *d);
}

/* Most ids that 2^log2 places are used for. Half: a full probe sequence costs more than the cache it saves. */
static inline int64_t ec_dedup_limit(int log2) { return (int64_t)1 << log2 >> 1; }

/* log2 of the places for so many ids: a small call after a large one stays within a small, warm prefix. */
static inline int ec_dedup_log2(int64_t ids) {
    int log2 = 6;
    while (ec_dedup_limit(log2) < ids) log2++;
    return log2;
}

/* Voids all entries and gives up to n stamps to come. */
static inline void ec_dedup_renew(ec_dedup_table *d, int64_t given, int64_t n) {
    if (d->base == 0 || (int64_t)d->base + given + n > UINT32_MAX) {
        memset(d->block.data, 0, (size_t)d->places * sizeof(ec_dedup_entry));
        d->base = 1;
    } else {
        d->base += (uint32_t)given;
    }
}

/* Makes ready for a call with up to n keys: an empty table with places for `expected` ids. It can grow to n without
 * asking for memory. */
static inline int ec_dedup_begin(ec_dedup_table *d, int64_t n, int64_t expected) {
    const int room = ec_dedup_log2(n);
    const int64_t places = (int64_t)1 << room;
    if (places > d->places) {
        ec_block block;
        if (ec_block_take(&block, (size_t)places * sizeof(ec_dedup_entry)) != EC_OK) return EC_NOMEM;
        ec_block_drop(&d->block);
        d->block = block;
        d->places = places;
        d->base = 1;
    }
    ec_dedup_renew(d, 0, n);
    d->log2 = ec_dedup_log2(expected);
    if (d->log2 > room) d->log2 = room;
    return EC_OK;
}

/* The probe hash; its top bits choose the part, the bits below the place, the lower half is the tag. */
static inline uint64_t ec_dedup_hash(int64_t key, const uint64_t seed[2]) { return ec_fold128((uint64_t)key ^ seed[0], seed[1]); }

/* Twice as many places: puts the ids given so far in anew. */
static __attribute__((noinline)) void ec_dedup_grow(ec_dedup_table *d, const uint64_t seed[2], int spent, const int64_t *unique_keys,
                                                    int64_t unique, int64_t n) {
    ec_dedup_entry *entries = (ec_dedup_entry *)d->block.data;
    ec_dedup_renew(d, unique, n);
    d->log2++;
    const uint64_t mask = ((uint64_t)1 << d->log2) - 1;
    for (int64_t id = 0; id < unique; id++) {
        const uint64_t hash = ec_dedup_hash(unique_keys[id], seed);
        uint64_t at = hash << spent >> (64 - d->log2);
        while (entries[at].stamp >= d->base) at = (at + 1) & mask;
        entries[at] = (ec_dedup_entry){(uint32_t)hash, d->base + (uint32_t)id};
    }
}

/* How far ahead a call looks, by its size: its table and lists fit the first-level cache, the second, or neither. */
enum { EC_DEDUP_NEAR, EC_DEDUP_MIDDLE, EC_DEDUP_FAR };

static inline int ec_dedup_reach(int64_t n) {
    return n <= EC_DEDUP_NEAR_KEYS ? EC_DEDUP_NEAR : n < EC_DEDUP_FAR_KEYS ? EC_DEDUP_MIDDLE : EC_DEDUP_FAR;
}

/* Numbers the distinct keys of n keys, or (`items` is not NULL) items of a part: the id of each, and by id the key and its count;
 * of items the position of its first occurrence too. Returns how many. `spent` top bits of the hash are equal for all keys and so
 * choose nothing. Ids go to `ids`, or into the items. */
static inline __attribute__((always_inline)) int64_t ec_dedup_run_as(
    const int reach, ec_dedup_table *d, const uint64_t seed[2], int spent, const int64_t *restrict keys, ec_dedup_item *restrict items, int64_t n,
    int64_t *restrict ids, int64_t *restrict unique_keys, uint32_t *restrict first, uint32_t *restrict counts) {
    ec_dedup_entry *restrict entries = (ec_dedup_entry *)d->block.data;
    const int64_t ahead = reach == EC_DEDUP_NEAR ? 0 : reach == EC_DEDUP_MIDDLE ? EC_DEDUP_AHEAD : 2 * EC_DEDUP_AHEAD;
    const int room = ec_dedup_log2(n);
    int shift = 64 - d->log2;
    uint64_t mask = ((uint64_t)1 << d->log2) - 1;
    int64_t limit = d->log2 < room ? ec_dedup_limit(d->log2) : n;
    uint64_t ring[2 * EC_DEDUP_AHEAD];
    uint32_t base = d->base, unique = 0;

    for (int64_t i = 0; i < ahead && i < n; i++) {
        ring[i] = ec_dedup_hash(items ? items[i].key : keys[i], seed);
        EC_PREFETCH_WRITE(&entries[ring[i] << spent >> shift]);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t key = items ? items[i].key : keys[i];
        uint64_t hash;
        if (reach == EC_DEDUP_NEAR) {
            hash = ec_dedup_hash(key, seed);
        } else {
            hash = ring[i & (ahead - 1)];
            if (i + ahead < n) {
                const uint64_t later = ec_dedup_hash(items ? items[i + ahead].key : keys[i + ahead], seed);
                ring[i & (ahead - 1)] = later;
                EC_PREFETCH_WRITE(&entries[later << spent >> shift]);
            }
            if (reach == EC_DEDUP_FAR && i + EC_DEDUP_AHEAD < n) { /* the entry has come: fetch what it leads to, if it lives */
                const uint32_t soon = entries[ring[(i + EC_DEDUP_AHEAD) & (ahead - 1)] << spent >> shift].stamp - base;
                const uint32_t near = soon < unique ? soon : 0;
                EC_PREFETCH_READ(&unique_keys[near]);
                EC_PREFETCH_WRITE(&counts[near]);
            }
        }
        uint64_t at = hash << spent >> shift;
        uint32_t id;
        for (;; at = (at + 1) & mask) {
            const ec_dedup_entry entry = entries[at];
            id = entry.stamp - base;
            if (id >= unique) {
                if (unique == limit) { /* full; there is room for twice as many */
                    ec_dedup_grow(d, seed, spent, unique_keys, unique, n);
                    shift = 64 - d->log2;
                    mask = ((uint64_t)1 << d->log2) - 1;
                    limit = d->log2 < room ? ec_dedup_limit(d->log2) : n;
                    base = d->base;
                    at = (hash << spent >> shift) - 1;
                    continue;
                }
                id = unique++;
                entries[at] = (ec_dedup_entry){(uint32_t)hash, base + id};
                unique_keys[id] = key;
                if (items) first[id] = items[i].at;
                counts[id] = 1;
                break;
            }
            if (entry.tag == (uint32_t)hash && unique_keys[id] == key) {
                counts[id]++;
                break;
            }
        }
        if (items) items[i].id = id;
        else ids[i] = id;
    }
    d->base = base + unique;
    return unique;
}

static inline __attribute__((always_inline)) int64_t ec_dedup_run(ec_dedup_table *d, const uint64_t seed[2], int spent,
                                                                  const int64_t *keys, ec_dedup_item *items, int64_t n, int64_t *ids,
                                                                  int64_t *unique_keys, uint32_t *first, uint32_t *counts) {
#define EC_DEDUP_RUN_AS(reach) ec_dedup_run_as(reach, d, seed, spent, keys, items, n, ids, unique_keys, first, counts)
    switch (ec_dedup_reach(n)) { /* three loops, each without the others' tests */
    case EC_DEDUP_NEAR: return EC_DEDUP_RUN_AS(EC_DEDUP_NEAR);
    case EC_DEDUP_MIDDLE: return EC_DEDUP_RUN_AS(EC_DEDUP_MIDDLE);
    default: return EC_DEDUP_RUN_AS(EC_DEDUP_FAR);
    }
#undef EC_DEDUP_RUN_AS
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
    int64_t expected;     /* ids, as an earlier batch lets one think; a matter of speed only */
    uint32_t *counts;     /* [n] scratch: by id, the count, then a cursor */
    /* scratch of a cut call */
    int64_t half_unique[2]; /* ids that each half has given out */
    int64_t blocks;
    ec_dedup_item *items; /* [n] by part, in batch order within a part */
    int64_t *part_unique; /* [n] by a part's id, or the second half's: the key */
    uint32_t *first;      /* [n] by a part's id: the position of its first occurrence. Of halves: see there */
    uint32_t *part_uid;   /* [n] by a part's id, or the second half's: the final id */
    uint32_t *starts;     /* [EC_PARTS * (blocks + 1)] where a block's keys start inside a part's range */
    uint32_t *fresh;      /* [EC_PARTS * (blocks + 1)] ids that a part had given out before a block */
    int64_t *block_first; /* [blocks + 1] ids given out before a block */
    int64_t *block_count; /* [blocks + 1] occurrences of the ids of earlier blocks */
} ec_dedup_call;

/* Puts the positions begin..end into their ids' groups: the last step of a counting sort. */
static inline void ec_dedup_group(uint32_t *restrict cursor, const int64_t *restrict inverse, int64_t *restrict order,
                                  int64_t position_base, int64_t begin, int64_t end) {
    int64_t i = begin;
    if (ec_dedup_reach(end - begin) == EC_DEDUP_FAR) {
        for (; i + EC_DEDUP_AHEAD < end; i++) {
            EC_PREFETCH_WRITE(&cursor[inverse[i + EC_DEDUP_AHEAD]]);
            order[cursor[inverse[i]]++] = position_base + i;
        }
    }
    for (; i < end; i++) order[cursor[inverse[i]]++] = position_base + i;
}

/* Groups positions by id: the counting sort of a plain call. */
static inline void ec_dedup_csr(ec_dedup_call *c) {
    uint32_t *cursor = c->counts, total = 0;
    const int64_t base = c->position_base;
    for (int64_t id = 0; id < c->unique; id++) {
        const uint32_t count = cursor[id];
        cursor[id] = total;
        total += count;
        c->ends[id] = base + total;
    }
    ec_dedup_group(cursor, c->inverse, c->order, base, 0, c->n);
}

/* The whole of a plain call. */
static int ec_dedup_plain(ec_dedup_call *c, ec_dedup_table *d) {
    if (ec_dedup_begin(d, c->n, c->expected) != EC_OK) return EC_NOMEM;
    c->unique = ec_dedup_run(d, c->seed, 0, c->keys, NULL, c->n, c->inverse, c->unique_keys, NULL, c->counts);
    ec_dedup_csr(c);
    return EC_OK;
}

/* -------------------------------------------------------------------------------------------- the phases of a cut call
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
        c->items[k] = (ec_dedup_item){c->keys[i], (uint32_t)i, 0};
    }
}

/* Numbers a part's keys by themselves. */
static int ec_dedup_part_run(ec_dedup_call *c, int part, ec_dedup_table *d) {
    const uint32_t begin = *ec_dedup_start(c, part, 0);
    const int64_t n = *ec_dedup_start(c, part, c->blocks) - begin;
    if (ec_dedup_begin(d, n, c->expected / EC_PARTS) != EC_OK) return EC_NOMEM;
    const uint32_t *first = c->first + begin;
    ec_dedup_item *items = c->items + begin;
    const int64_t unique = ec_dedup_run(d, c->seed, EC_PARTS_LOG2, NULL, items, n, NULL, c->part_unique + begin, c->first + begin,
                                        c->counts + begin);
    int64_t id = 0;
    for (int64_t block = 0; block <= c->blocks; block++) {
        while (id < unique && first[id] < block * EC_DEDUP_BLOCK) id++;
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
    uint16_t rank[EC_DEDUP_BLOCK] = {0};
    const uint32_t base = (uint32_t)(block * EC_DEDUP_BLOCK);
    for (int part = 0; part < EC_PARTS; part++) {
        const uint32_t *first = c->first + *ec_dedup_start(c, part, 0), stop = *ec_dedup_fresh(c, part, block + 1);
        for (uint32_t id = *ec_dedup_fresh(c, part, block); id < stop; id++) rank[first[id] - base] = 1;
    }
    uint16_t before = 0;
    for (int at = 0; at < EC_DEDUP_BLOCK; at++) {
        const uint16_t is_first = rank[at];
        rank[at] = before;
        before = (uint16_t)(before + is_first);
    }
    int64_t occurrences = 0;
    for (int part = 0; part < EC_PARTS; part++) {
        const uint32_t begin = *ec_dedup_start(c, part, 0), stop = begin + *ec_dedup_fresh(c, part, block + 1);
        for (uint32_t id = begin + *ec_dedup_fresh(c, part, block); id < stop; id++) {
            const int64_t uid = c->block_first[block] + rank[c->first[id] - base];
            c->part_uid[id] = (uint32_t)uid;
            c->unique_keys[uid] = c->part_unique[id];
            c->ends[uid] = c->counts[id];
            occurrences += c->counts[id];
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
        const uint32_t *uid = c->part_uid + *ec_dedup_start(c, part, 0), stop = *ec_dedup_start(c, part, block + 1);
        for (uint32_t k = *ec_dedup_start(c, part, block); k < stop; k++) c->inverse[c->items[k].at] = uid[c->items[k].id];
    }
}

/* Groups the positions of a part's ids. counts[] becomes where in `order` an id's next position goes. */
static inline void ec_dedup_part_order(ec_dedup_call *c, int part) {
    const uint32_t begin = *ec_dedup_start(c, part, 0), stop = *ec_dedup_start(c, part, c->blocks);
    uint32_t *restrict cursor = c->counts + begin;
    const int64_t base = c->position_base, unique = *ec_dedup_fresh(c, part, c->blocks);
    for (int64_t id = 0; id < unique; id++) cursor[id] = (uint32_t)(c->ends[c->part_uid[begin + id]] - base) - cursor[id];
    int64_t *restrict order = c->order;
    for (uint32_t k = begin; k < stop; k++) {
        if (k + EC_DEDUP_AHEAD < stop) EC_PREFETCH_WRITE(&order[cursor[c->items[k + EC_DEDUP_AHEAD].id]]);
        order[cursor[c->items[k].id]++] = base + c->items[k].at;
    }
}

#endif
