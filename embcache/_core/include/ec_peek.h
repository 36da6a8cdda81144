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
    int ghost;    /* nothing to see: but the journal of an unfinished plan holds a life of the key that ended before */
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

/* The same, but NULL where it has nothing to say about where the row is. */
static inline const ec_whereabouts *ec_overlay_seen(const ec_overlay *o, int64_t key) {
    const ec_whereabouts *where = ec_overlay_find(o, key);
    return where && !where->ghost ? where : NULL;
}

/* Says where a key's row is, unless that is known already. */
static inline void ec_overlay_add(ec_overlay *o, int64_t key, ec_whereabouts found) {
    ec_whereabouts *where = ec_overlay_find(o, key);
    if (!where) {
        ec_index_insert(&o->index, key, ec_hash(key), (uint32_t)o->records.size);
        EC_PUSH(o->records, ec_whereabouts, found);
    } else if (where->ghost) {
        *where = found;
    }
}

/* A movement of (key, row): until it is done the row is at `slot`. The oldest one that is not done decides. `dead`: the
 * key was evicted, so where no unfinished plan has done that it is gone, though its row is still to be written. */
static inline void ec_overlay_settle(ec_overlay *o, int64_t key, int64_t row, int64_t slot, int dead) {
    ec_whereabouts *where = ec_overlay_find(o, key);
    if (!where || where->ghost) {
        if (!dead && !(where && where->row == row)) ec_overlay_add(o, key, (ec_whereabouts){row, slot, 1, 0});
    } else if (where->row == row && !where->settled) {
        where->slot = slot;
        where->settled = 1;
    }
}

static inline int64_t ec_side_row_of(const ec_side *s, int64_t key) {
    const uint64_t hash = ec_hash(key);
    const ec_partition *p = ec_table_partition(s->table, hash);
    const int64_t local = ec_index_find(&p->index, key, hash);
    return local < 0 ? -1 : ec_partition_row(p, local);
}

/* Whether a sweep of a finished plan has killed a mapped row with these counters. */
static inline int ec_dead_in_training(const ec_side *s, int64_t key, int64_t freq, int64_t last) {
    return s->filter && ec_filter_row_dead(s->filter, key, freq, last) && ec_filter_death_trained(s->filter, key, last, INT64_MAX);
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
        most += p->births.size + p->deaths.size + 2 * p->takes.size;
    }
    if (most == 0) return EC_OK;
    if (most > UINT32_MAX) return EC_LIMIT;
    if (ec_index_reserve(&o->index, most) || ec_vec_reserve(&o->records, most, sizeof(ec_whereabouts))) {
        ec_overlay_free(o);
        return EC_NOMEM;
    }
    for (int64_t k = 0; k < plan_count; k++) { /* the oldest plan that made or evicted a key says what was before */
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; i < p->deaths.size; i++) {
            const ec_limbo *gone = &EC_GONE(c, EC_DEATH(p, i).kill.limbo);
            const int64_t slot = gone->slot == EC_NO_SLOT ? -1 : (int64_t)gone->slot;
            const int over = ec_filter_death_trained(s->filter, gone->key, EC_DEATH(p, i).last, EC_DEATH(p, i).step);
            ec_overlay_add(o, gone->key, over ? (ec_whereabouts){gone->row, -1, 1, 1} : (ec_whereabouts){gone->row, slot, 0, 0});
        }
        for (int64_t i = 0; i < p->births.size; i++) {
            ec_overlay_add(o, EC_AT(p->births, ec_birth, i).key, (ec_whereabouts){-1, -1, 1, 0});
        }
    }
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; plans[k]->state == EC_PLANNED && i < p->takes.size; i++) {
            const ec_take_record *take = &EC_TAKE(p, i);
            if (take->from == EC_FROM_FREE) continue;
            const int dead = take->from == EC_FROM_DYING || ec_dead_in_training(s, take->before.key, take->before.freq, take->before.last);
            ec_overlay_settle(o, take->before.key, take->before.row, take->slot, dead);
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

/* The same of a row where it is, in a slot (else -1) or in the host table. */
static inline int ec_row_dead_in_training(const ec_side *s, int64_t slot, int64_t row) {
    if (slot >= 0) return ec_dead_in_training(s, s->cache.slots[slot].key, s->cache.slots[slot].freq, s->cache.slots[slot].last);
    return ec_dead_in_training(s, *ec_table_key(s->table, row), *ec_table_freq(s->table, row), *ec_table_ts(s->table, row));
}

/* slots[i] (in the whole buffer), rows[i] and places[i] (EC_PEEK_...) of keys[i]. */
static void ec_peek(const ec_overlay *o, const ec_side *s, const int64_t *keys, int64_t n, int64_t *slots, int64_t *rows, uint8_t *places) {
    const uint8_t absent = s->filter && ec_filter_waits(s->filter) ? EC_PEEK_DEFAULT : EC_PEEK_ABSENT;
    const int passing = s->filter && s->filter->pass.region != EC_PASS_IDLE;
    for (int64_t i = 0; i < n; i++) {
        if (i + 16 < n) ec_index_prefetch(&s->cache.index, ec_hash(keys[i + 16]));
        const uint64_t hash = ec_hash(keys[i]);
        const ec_whereabouts *where = ec_overlay_seen(o, keys[i]);
        const int64_t found = where ? -1 : ec_index_find(&s->cache.index, keys[i], hash);
        if (where) {
            rows[i] = where->row;
            slots[i] = where->slot;
        } else if (found >= 0) {
            rows[i] = s->cache.slots[found].row;
            slots[i] = found;
        } else {
            rows[i] = ec_side_row_of(s, keys[i]);
            slots[i] = -1;
        }
        if (!where && rows[i] >= 0 && passing && ec_row_dead_in_training(s, slots[i], rows[i])) rows[i] = slots[i] = -1;
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
        if (row >= 0 && !EC_WHERE(o, i).ghost && (*ec_table_flags(s->table, row) & EC_LIMBO)) rows[n++] = row;
    }
    return n;
}

/* How many mapped rows ec_peek() does not show because a finished plan's sweep has killed them. */
static int64_t ec_dead_rows(const ec_overlay *o, const ec_side *s) {
    int64_t n = 0;
    if (!s->filter || s->filter->pass.region == EC_PASS_IDLE) return 0;
    for (int64_t slot = 0; slot < s->cache.capacity; slot++)
        if (s->cache.state[slot] == EC_SLOT_LIVE) n += ec_row_dead_in_training(s, slot, -1) && !ec_overlay_seen(o, s->cache.slots[slot].key);
    for (int64_t row = 0; row < s->table->row_limit; row++)
        if ((*ec_table_flags(s->table, row) & (EC_LIVE | EC_RESIDENT)) == EC_LIVE)
            n += ec_row_dead_in_training(s, -1, row) && !ec_overlay_seen(o, *ec_table_key(s->table, row));
    return n;
}

/* Index of the first key that an unfinished plan uses, moves, made or evicted; n where there is none. */
static int64_t ec_first_in_use(const ec_overlay *o, const ec_side *s, const int64_t *keys, int64_t n) {
    const int passing = s->filter && s->filter->pass.region != EC_PASS_IDLE;
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = ec_index_find(&s->cache.index, keys[i], ec_hash(keys[i]));
        if (ec_overlay_find(o, keys[i]) || (slot >= 0 && s->cache.seats[slot].pins > 0)) return i;
        const int64_t row = passing && slot < 0 ? ec_side_row_of(s, keys[i]) : -1;
        if (!passing || (slot < 0 && row < 0)) continue;
        const int dead = slot >= 0 ? ec_side_slot_dead(s, &s->cache.slots[slot]) : ec_side_row_dead(s, row);
        if (dead && !ec_row_dead_in_training(s, slot, row)) return i; /* the sweep that killed it may be cancelled yet */
    }
    return n;
}

/* Drops the resident copies of keys that no plan uses; their counters go back to the host columns. Returns how many. The
 * dead among the keys are taken away, so that a row for such a key is a new one. */
static int64_t ec_side_drop(ec_side *s, const int64_t *keys, int64_t n) {
    const int passing = s->filter && s->filter->pass.region != EC_PASS_IDLE;
    int64_t dropped = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t found = ec_index_find(&s->cache.index, keys[i], ec_hash(keys[i]));
        if (found < 0) {
            const int64_t row = passing ? ec_side_row_of(s, keys[i]) : -1;
            if (row >= 0 && ec_side_row_dead(s, row)) ec_side_bury(s, keys[i], row);
            continue;
        }
        const ec_slot *slot = &s->cache.slots[found];
        ec_row_leave(s, slot->row, s->cache.seats[found].period);
        if (passing && ec_side_slot_dead(s, slot)) {
            const int64_t row = slot->row;
            ec_cache_drop(&s->cache, (uint32_t)found);
            ec_side_bury(s, keys[i], row);
            continue;
        }
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

/* Index of the first key that waits in the filter and is dead by a sweep that may be cancelled yet; n where there is none. */
static int64_t ec_first_dying(const ec_side *s, const int64_t *keys, int64_t n) {
    for (int64_t i = 0; s->filter->sweeps.size > 0 && i < n; i++) {
        const int64_t id = ec_filter_find(s->filter, keys[i], ec_hash(keys[i]));
        if (id >= 0 && ec_filter_entry_dead(s->filter, &EC_ENTRY(s->filter, id))) return i;
    }
    return n;
}

/* Removes keys that wait in the filter and that no unfinished plan has counted. Returns how many there were. */
static int64_t ec_side_forget_waiting(ec_side *s, const int64_t *keys, int64_t n) {
    int64_t forgotten = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = ec_filter_find(s->filter, keys[i], ec_hash(keys[i]));
        if (id < 0) continue;
        const int dead = ec_filter_entry_dead(s->filter, &EC_ENTRY(s->filter, id));
        ec_filter_remove(s->filter, (uint32_t)id);
        ec_news_gone(&s->filter->news, keys[i]);
        s->totals[EC_FORGOTTEN] += dead;
        forgotten += !dead;
    }
    return forgotten;
}

#endif
