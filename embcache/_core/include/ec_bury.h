/* Taking host rows away, many together: the home buckets of a block of keys are asked for at once, and the keys of the block
 * before leave the index meanwhile.
 *
 * At once: a prefetch whose address must be translated anew holds up what comes after it until the page is found, and only
 * those that follow each other with nothing in between are looked up at the same time. (One prefetch a row among the rest
 * took 160 of 380 ns a row; 10 M rows, 10 % of them dead, busy machine.) Some are dropped, so the block is looked at in a
 * loop of nothing else before it is worked on.
 */
#ifndef EC_BURY_H
#define EC_BURY_H

#include <stdint.h>

#include "ec_plan.h"

#define EC_BURY_BLOCK 64 /* rows whose buckets are asked for at once */

/* A row that is about to go. */
typedef struct {
    int64_t row, key, last;
    uint64_t hash, home;
    uint8_t *flags;
    ec_partition *partition;
    const ec_bucket *bucket; /* its home */
} ec_dying;

/* The columns of one extent: of rows in order all but the first of each find them. */
typedef struct {
    int64_t extent;
    int64_t *key, *freq, *last;
    uint8_t *flags;
} ec_extent_columns;

static inline int64_t ec_extent_within(const ec_table *t, ec_extent_columns *at, int64_t row) {
    if (row >> EC_EXTENT_BITS != at->extent) {
        at->extent = row >> EC_EXTENT_BITS;
        const int64_t first = at->extent << EC_EXTENT_BITS;
        *at = (ec_extent_columns){at->extent, ec_table_key(t, first), ec_table_freq(t, first), ec_table_ts(t, first), ec_table_flags(t, first)};
    }
    return row & (EC_EXTENT_ROWS - 1);
}

/* Those of a block of rows that go, whose buckets are on their way afterwards. Returns how many. */
static inline int64_t ec_bury_look(const ec_side *s, const int64_t *rows, int64_t n, int by_time, ec_extent_columns *at, ec_dying *dying) {
    const ec_table *t = s->table;
    int64_t got = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t within = ec_extent_within(t, at, rows[i]), key = at->key[within], last = at->last[within];
        if (by_time && !ec_filter_row_dead(s->filter, key, at->freq[within], last)) continue;
        const uint64_t hash = ec_hash(key);
        ec_partition *partition = ec_table_partition(t, hash);
        const uint64_t home = ec_index_home(&partition->index, hash);
        dying[got++] = (ec_dying){rows[i], key, by_time ? last : 0, hash, home, at->flags + within, partition, partition->index.buckets + home};
    }
    for (int64_t i = 0; i < got; i++) EC_PREFETCH_WRITE(dying[i].bucket);
    return got;
}

/* Takes away live host rows that are not resident, whose key and, `by_time`, counters the caller has asked for; `by_time`: only
 * those of them that are dead. EC_NOMEM: some may be gone. */
static int ec_bury(ec_side *s, ec_part *p, int64_t step, const int64_t *rows, int64_t n, int by_time) {
    ec_dying blocks[2][EC_BURY_BLOCK];
    int64_t before = 0;
    ec_extent_columns at = {.extent = -1};
    if (ec_limbo_reserve(&s->cache, n) != EC_OK) return EC_NOMEM;
    if (p->deaths.room - p->deaths.size < n && ec_vec_reserve(&p->deaths, n + 3 * p->deaths.size, sizeof(ec_death)) != EC_OK) return EC_NOMEM;
    for (int64_t begin = 0, turn = 0; begin < n || before > 0; begin += EC_BURY_BLOCK, turn ^= 1) {
        const int64_t left = n - begin, size = left < EC_BURY_BLOCK ? left : EC_BURY_BLOCK;
        const int64_t found = left > 0 ? ec_bury_look(s, rows + begin, size, by_time, &at, blocks[turn]) : 0;
        for (int64_t i = 0; i < before; i++) (void)*(const volatile uint32_t *)&blocks[turn ^ 1][i].bucket->meta;
        for (int64_t i = 0; i < before; i++) {
            const ec_dying *it = &blocks[turn ^ 1][i];
            EC_PUSH(p->deaths, ec_death, {ec_cache_kill_row(&s->cache, it->key, it->row), it->last, step});
            ec_table_detach_from(s->table, it->partition, it->key, it->hash, it->home, it->flags);
        }
        p->totals[EC_EVICTED] += before;
        before = found;
    }
    return EC_OK;
}

#endif
