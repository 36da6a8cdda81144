/* Where a key's row is now, as of the last finished training batch (promise I6).
 *
 * The planner's own state runs ahead: plans that have not finished have made keys, evicted keys, and moved rows on
 * paper. The overlay holds, for each key that such plans touch, where its row physically is; all other keys are where
 * the planner thinks. A life of a key is known by its row: a row in limbo is not handed out again, so it names one.
 */
#ifndef EC_PEEK_H
#define EC_PEEK_H

#include <stdint.h>

#include "ec_plan.h"

enum { EC_PLANNED = 0, EC_SWAPPED_OUT = 1, EC_SWAPPED_IN = 2, EC_FINISHED = 3, EC_CANCELLED = 4 };
enum { EC_PEEK_ABSENT = 0, EC_PEEK_SLOT = 1, EC_PEEK_ROW = 2, EC_PEEK_DEFAULT = 3 };

/* A plan that has not finished, oldest first in a list. */
typedef struct {
    ec_part *parts;
    int64_t step;
    int state;
} ec_plan;

typedef struct {
    int64_t row;  /* -1: the key was not there yet */
    int64_t slot; /* -1: the row is in the host table */
    int settled;  /* a movement that is under way has said where the row is */
} ec_whereabouts;

typedef struct {
    ec_index index; /* key -> whereabouts */
    ec_vec records;
    uint64_t epoch; /* state of the manager that this was made from */
} ec_overlay;

#define EC_WHERE(overlay, id) EC_AT((overlay)->records, ec_whereabouts, id)

static inline void ec_overlay_free(ec_overlay *o) {
    ec_index_free(&o->index);
    ec_vec_free(&o->records);
}

static inline ec_whereabouts *ec_overlay_find(const ec_overlay *o, int64_t key) {
    const int64_t id = ec_index_find(&o->index, key, ec_hash(key));
    return id < 0 ? NULL : &EC_WHERE(o, id);
}

static inline void ec_overlay_add(ec_overlay *o, int64_t key, int64_t row, int64_t slot, int settled) {
    ec_index_insert(&o->index, key, ec_hash(key), (uint32_t)o->records.size);
    EC_PUSH(o->records, ec_whereabouts, {row, slot, settled});
}

/* A movement of (key, row): until it is done the row is at `slot`. The oldest one that is not done decides. `dead`: the
 * key was evicted, so where no unfinished plan has done that it is gone, though its row is still to be written. */
static inline void ec_overlay_settle(ec_overlay *o, int64_t key, int64_t row, int64_t slot, int dead) {
    ec_whereabouts *where = ec_overlay_find(o, key);
    if (!where) {
        if (!dead) ec_overlay_add(o, key, row, slot, 1);
    } else if (where->row == row && !where->settled) {
        where->slot = slot;
        where->settled = 1;
    }
}

/* Makes table t's overlay afresh from the unfinished plans. EC_NOMEM leaves an empty one. */
static int ec_overlay_make(ec_overlay *o, const ec_side *s, int64_t t, ec_plan *const *plans, int64_t plan_count) {
    const ec_cache *c = &s->cache;
    int64_t most = 0;
    const uint64_t seed = c->index.seed;
    ec_overlay_free(o);
    ec_index_init(&o->index, seed);
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        most += p->births.size + p->kills.size + 2 * p->takes.size;
    }
    if (most == 0) return EC_OK;
    if (most > UINT32_MAX) return EC_LIMIT;
    if (ec_index_reserve(&o->index, most) || ec_vec_reserve(&o->records, most, sizeof(ec_whereabouts))) {
        ec_overlay_free(o);
        return EC_NOMEM;
    }
    for (int64_t k = 0; k < plan_count; k++) { /* the oldest plan that made or evicted a key says what was before */
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; i < p->births.size; i++) {
            const int64_t key = EC_AT(p->births, ec_birth, i).key;
            if (!ec_overlay_find(o, key)) ec_overlay_add(o, key, -1, -1, 1);
        }
        for (int64_t i = 0; i < p->kills.size; i++) {
            const ec_limbo *gone = &EC_GONE(c, EC_KILL(p, i).limbo);
            const int64_t slot = gone->slot == EC_NO_SLOT ? -1 : (int64_t)gone->slot;
            if (!ec_overlay_find(o, gone->key)) ec_overlay_add(o, gone->key, gone->row, slot, 0);
        }
    }
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; plans[k]->state == EC_PLANNED && i < p->takes.size; i++) {
            const ec_take_record *take = &EC_TAKE(p, i);
            if (take->from == EC_FROM_FREE) continue;
            ec_overlay_settle(o, take->before.key, take->before.row, take->slot, take->from == EC_FROM_DYING);
        }
    }
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; plans[k]->state < EC_SWAPPED_IN && i < p->takes.size; i++) {
            const ec_slot *slot = &c->slots[EC_TAKE(p, i).slot];
            ec_overlay_settle(o, slot->key, slot->row, -1, c->state[EC_TAKE(p, i).slot] == EC_SLOT_LIMBO);
        }
    }
    return EC_OK;
}

/* slots[i] (in the whole buffer), rows[i] and places[i] (EC_PEEK_...) of keys[i]. */
static void ec_peek(const ec_overlay *o, const ec_side *s, const int64_t *keys, int64_t n, int64_t *slots, int64_t *rows, uint8_t *places) {
    const uint8_t absent = s->filter && s->filter->rule.admit_threshold > 1 ? EC_PEEK_DEFAULT : EC_PEEK_ABSENT;
    for (int64_t i = 0; i < n; i++) {
        if (i + 16 < n) ec_index_prefetch(&s->cache.index, ec_hash(keys[i + 16]));
        const uint64_t hash = ec_hash(keys[i]);
        const ec_whereabouts *where = ec_overlay_find(o, keys[i]);
        const int64_t found = where ? -1 : ec_index_find(&s->cache.index, keys[i], hash);
        if (where) {
            rows[i] = where->row;
            slots[i] = where->slot;
        } else if (found >= 0) {
            rows[i] = s->cache.slots[found].row;
            slots[i] = found;
        } else {
            const ec_partition *p = ec_table_partition(s->table, hash);
            const int64_t local = ec_index_find(&p->index, keys[i], hash);
            rows[i] = local < 0 ? -1 : ec_partition_row(p, local);
            slots[i] = -1;
        }
        places[i] = rows[i] < 0 ? absent : slots[i] >= 0 ? EC_PEEK_SLOT : EC_PEEK_ROW;
        if (slots[i] >= 0) slots[i] += s->base;
    }
}

/* Rows that unfinished plans made: live in the host table, but not shown by ec_peek(). `rows` has room for all births. */
static int64_t ec_born_rows(const ec_side *s, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t *rows) {
    int64_t n = 0;
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_vec *births = &plans[k]->parts[t].births;
        for (int64_t i = 0; i < births->size; i++) {
            const ec_birth *birth = &EC_AT(*births, ec_birth, i);
            if ((*ec_table_flags(s->table, birth->row) & EC_LIVE) && *ec_table_key(s->table, birth->row) == birth->key) rows[n++] = birth->row;
        }
    }
    return n;
}

/* Rows of keys that unfinished plans evicted: in limbo, but still shown by ec_peek(). `rows` has room for all records. */
static int64_t ec_evicted_rows(const ec_overlay *o, const ec_side *s, int64_t *rows) {
    int64_t n = 0;
    for (int64_t i = 0; i < o->records.size; i++) {
        const int64_t row = EC_WHERE(o, i).row;
        if (row >= 0 && (*ec_table_flags(s->table, row) & EC_LIMBO)) rows[n++] = row;
    }
    return n;
}

/* Index of the first key that an unfinished plan uses, moves, made or evicted; n where there is none. */
static int64_t ec_first_in_use(const ec_overlay *o, const ec_side *s, const int64_t *keys, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = ec_index_find(&s->cache.index, keys[i], ec_hash(keys[i]));
        if (ec_overlay_find(o, keys[i]) || (slot >= 0 && s->cache.pins[slot] > 0)) return i;
    }
    return n;
}

/* Drops the resident copies of keys that no plan uses; their counters go back to the host columns. Returns how many. */
static int64_t ec_side_drop(ec_side *s, const int64_t *keys, int64_t n) {
    int64_t dropped = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t found = ec_index_find(&s->cache.index, keys[i], ec_hash(keys[i]));
        if (found < 0) continue;
        const ec_slot *slot = &s->cache.slots[found];
        ec_row_unmark(s->table, slot->row);
        if (s->filter) {
            *ec_table_freq(s->table, slot->row) = slot->freq;
            *ec_table_ts(s->table, slot->row) = slot->last;
        }
        ec_cache_drop(&s->cache, (uint32_t)found);
        dropped++;
    }
    return dropped;
}

/* Writes the keys whose counters in the filter an unfinished plan has added, changed or removed, with repetitions; there
 * must be room for as many as the plans have changes. An entry that went to another key since was removed by one of the
 * plans, so both keys are written. Returns how many. */
static int64_t ec_counting_keys(const ec_side *s, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t *keys) {
    int64_t found = 0;
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; i < p->changes.size; i++) {
            const ec_filter_change *change = &EC_AT(p->changes, ec_filter_change, i);
            keys[found++] = change->kind == EC_FILTER_ADDED ? EC_ENTRY(s->filter, change->id).key : change->before.key;
        }
    }
    return found;
}

/* Removes keys that wait in the filter and that no unfinished plan has counted. Returns how many there were. */
static int64_t ec_side_forget_waiting(ec_side *s, const int64_t *keys, int64_t n) {
    int64_t forgotten = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = ec_filter_find(s->filter, keys[i], ec_hash(keys[i]));
        if (id < 0) continue;
        ec_filter_remove(s->filter, (uint32_t)id);
        forgotten++;
    }
    return forgotten;
}

/* Sets counters: of keys with a row beside the slot or in the host columns, of others in the filter, which must be
 * empty. Keys must be distinct. EC_NOMEM and EC_LIMIT change nothing. */
static int ec_side_load(ec_side *s, const int64_t *keys, const int64_t *counts, const int64_t *last, int64_t n, int64_t newest) {
    const int status = ec_filter_reserve(s->filter, n);
    if (status != EC_OK) return status;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t hash = ec_hash(keys[i]);
        const int64_t slot = ec_index_find(&s->cache.index, keys[i], hash);
        const ec_partition *p = ec_table_partition(s->table, hash);
        const int64_t local = ec_index_find(&p->index, keys[i], hash);
        if (slot >= 0) {
            s->cache.slots[slot].freq = counts[i];
            s->cache.slots[slot].last = last[i];
        } else if (local >= 0) {
            *ec_table_freq(s->table, ec_partition_row(p, local)) = counts[i];
            *ec_table_ts(s->table, ec_partition_row(p, local)) = last[i];
        } else if (counts[i] > 0) {
            ec_filter_add(s->filter, keys[i], hash, counts[i], last[i]);
        }
    }
    s->filter->newest = newest;
    return EC_OK;
}

#endif
