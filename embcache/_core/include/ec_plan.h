/* A plan's record: what a batch changed in each table, how to take it back, and how to settle it when it has trained.
 *
 * The record is a journal in the order of the changes; ec_plan_undo() walks it backwards and cannot fail. The same walk
 * serves a plan that fails half way (promise I3) and cancel().
 */
#ifndef EC_PLAN_H
#define EC_PLAN_H

#include <stdint.h>
#include <string.h>

#include "ec_cache.h"
#include "ec_filter.h"
#include "ec_table.h"

/* Totals of a table, in this order in ec_side.totals. */
enum {
    EC_HITS = 0,
    EC_MISSES = 1,
    EC_SWAP_OUT_ROWS = 2,
    EC_ADMITTED = 3,
    EC_REJECTED = 4,
    EC_EVICTED = 5,
    EC_FORGOTTEN = 6,
    EC_BORN = 7,
    EC_TOTALS = 8
};

/* One table as the planner sees it. */
typedef struct {
    ec_cache cache;
    ec_filter *filter; /* NULL: every key is admitted, nothing is counted */
    ec_table *table;
    int64_t base; /* number of the table's slot 0 in the whole buffer */
    int64_t met, missed; /* uniques of the last batch, and those of them that were not resident */
    int64_t totals[EC_TOTALS];
} ec_side;

/* A resident that a batch on the short way uses: its slot, and how many uses of any slot ago it was used before. */
typedef struct {
    uint32_t slot;
    uint32_t ago; /* EC_LONG_AGO: the number stands in `long_ago` of the part */
} ec_hit;

#define EC_LONG_AGO UINT32_MAX

/* Counters of a resident before a batch added to them. */
typedef struct {
    uint32_t slot;
    int64_t freq, last;
} ec_count_record;

typedef struct {
    int64_t key;
    uint64_t hash;
    int64_t row;
} ec_birth;

typedef struct {
    ec_kill kill;
    int64_t last; /* the key's, and the last step whose sweep may have killed it: to know which one did */
    int64_t step;
} ec_death;

/* What a plan did to one table. */
typedef struct {
    ec_vec counts;  /* of ec_count_record */
    ec_vec marks;   /* of int64_t: rows marked resident before it was known whether they would survive the sweep */
    ec_vec changes; /* of ec_filter_change */
    ec_vec deaths;  /* of ec_death */
    ec_vec late;    /* of int64_t: keys that joined the late ones */
    ec_sketch_past sketch;
    ec_vec births;  /* of ec_birth */
    ec_vec takes;   /* of ec_take_record, one a swap-in */
    ec_choice choice; /* of victims */
    ec_vec touches; /* of ec_stood, one an admitted key: also the list of the plan's pins. Of the long way */
    ec_vec hits;    /* of ec_hit: the same of the short way, beside the takes */
    ec_vec long_ago; /* of uint64_t */
    int seen;         /* whether the uses of notice `notice` are spent: it told of this batch */
    uint32_t notice;
    int64_t newest_before;
    ec_pass pass_before;
    int64_t epoch_before;
    int64_t swept; /* the plan's step where it was one of a sweep, else 0 */
    int64_t totals[EC_TOTALS];
    int64_t unique;
    int64_t missing;       /* uniques that were not resident, where the short way (ec_resident.h) was gone, and */
    int64_t pinned_before; /* slots pinned before it; it has pinned the hits */
    int quick;             /* whether it was */
    int64_t need, have; /* slots, for the message where they do not suffice */
    int status;
} ec_part;

#define EC_DEATH(part, i) EC_AT((part)->deaths, ec_death, i)
#define EC_TAKE(part, i) EC_AT((part)->takes, ec_take_record, i)
#define EC_TOUCH(part, i) EC_AT((part)->touches, ec_stood, i)
#define EC_HIT(part, i) EC_AT((part)->hits, ec_hit, i)

static inline void ec_part_free(ec_part *p) {
    ec_vec_free(&p->counts);
    ec_vec_free(&p->marks);
    ec_vec_free(&p->changes);
    ec_vec_free(&p->deaths);
    ec_vec_free(&p->late);
    ec_sketch_past_free(&p->sketch);
    ec_vec_free(&p->births);
    ec_vec_free(&p->takes);
    ec_choice_free(&p->choice);
    ec_vec_free(&p->touches);
    ec_vec_free(&p->hits);
    ec_vec_free(&p->long_ago);
}

/* Whether a batch goes the short way (ec_resident.h) in a table, which has n keys of it: a matter of speed only. */
static inline int ec_side_quick(const ec_side *s, int64_t n) {
    return n > 0 && !s->filter && s->cache.policy.kind == EC_LRU && s->cache.index.size > 0 && 2 * s->missed < s->met;
}

/* Callback of ec_cache: the end of an evicted key's row. */
static void ec_side_row_free(void *table, int64_t key, int64_t row) { ec_table_free_row((ec_table *)table, ec_hash(key), row); }

static inline void ec_row_mark(ec_table *t, int64_t row) { *ec_table_flags(t, row) |= EC_RESIDENT; }
static inline void ec_row_unmark(ec_table *t, int64_t row) { *ec_table_flags(t, row) &= (uint8_t)~EC_RESIDENT; }

/* The same of a row that leaves its slot, whose seat has `period`: what no save has is now for the table to remember. */
static inline void ec_row_leave(ec_side *s, int64_t row, uint32_t period) {
    uint8_t *flags = ec_table_flags(s->table, row);
    *flags = (uint8_t)((*flags & ~EC_RESIDENT) | (period >= s->cache.since ? EC_CHANGED : 0));
}

/* Evicts a resident key that a sweep up to `step` has killed from slot, index and host table. EC_NOMEM changes nothing. */
static inline int ec_side_kill_slot(ec_side *s, ec_part *p, uint32_t slot, int64_t step) {
    if (ec_limbo_reserve(&s->cache, 1) != EC_OK || ec_vec_reserve_one(&p->deaths, sizeof(ec_death)) != EC_OK) return EC_NOMEM;
    const int64_t key = s->cache.slots[slot].key, last = s->cache.slots[slot].last;
    EC_PUSH(p->deaths, ec_death, {ec_cache_kill(&s->cache, slot), last, step});
    ec_table_detach(s->table, key, ec_hash(key));
    p->totals[EC_EVICTED]++;
    return EC_OK;
}

/* Evicts a key that is in the host table only. EC_NOMEM changes nothing. */
static inline int ec_side_kill_row(ec_side *s, ec_part *p, int64_t key, uint64_t hash, int64_t row, int64_t last, int64_t step) {
    if (ec_limbo_reserve(&s->cache, 1) != EC_OK || ec_vec_reserve_one(&p->deaths, sizeof(ec_death)) != EC_OK) return EC_NOMEM;
    EC_PUSH(p->deaths, ec_death, {ec_cache_kill_row(&s->cache, key, row), last, step});
    ec_table_detach(s->table, key, hash);
    p->totals[EC_EVICTED]++;
    return EC_OK;
}

/* The notice of the batch waits for it again. */
static inline void ec_plan_unsee(ec_side *s, ec_part *p) {
    if (p->seen) ec_sight_unspend(ec_policy_sight(&s->cache.policy, s->cache.seats), p->notice);
    p->seen = 0;
}

/* The notice of the batch has served. */
static inline void ec_plan_seen(ec_side *s, ec_part *p) {
    if (p->seen) ec_coming_forget(&s->cache.policy.coming, p->notice);
    p->seen = 0;
}

/* Takes back everything that a plan did to a table, newest change first. */
static void ec_plan_undo(ec_side *s, ec_part *p) {
    ec_cache *c = &s->cache;
    ec_plan_unsee(s, p);
    for (int64_t i = p->touches.size - 1; i >= 0; i--) {
        const ec_stood *touch = &EC_TOUCH(p, i);
        ec_policy_restore(&c->policy, c->seats, touch);
        if (touch->before.version != 0) ec_cache_unpin(c, touch->slot); /* the pins of swap-ins go with the slot below */
    }
    for (int64_t i = p->hits.size - 1; i >= 0; i--) {
        const ec_hit hit = EC_HIT(p, i);
        const uint64_t ago = hit.ago == EC_LONG_AGO ? EC_AT(p->long_ago, uint64_t, --p->long_ago.size) : hit.ago;
        c->seats[hit.slot].standing.version = p->choice.version - ago;
        ec_cache_unpin(c, hit.slot);
    }
    if (p->quick) c->policy.placed -= p->takes.size;
    for (int64_t i = p->takes.size - 1; i >= 0; i--) {
        const ec_take_record *take = &EC_TAKE(p, i);
        ec_row_unmark(s->table, c->slots[take->slot].row);
        ec_cache_untake(c, take);
        if (take->from == EC_FROM_VICTIM) {
            ec_row_mark(s->table, take->before.row);
            if (s->filter) {
                *ec_table_freq(s->table, take->before.row) = take->host_freq;
                *ec_table_ts(s->table, take->before.row) = take->host_last;
            }
        }
    }
    ec_policy_undo(&c->policy, c->seats, c->state, &p->choice);
    for (int64_t i = p->births.size - 1; i >= 0; i--) {
        const ec_birth *birth = &EC_AT(p->births, ec_birth, i);
        ec_table_unborn(s->table, birth->key, birth->hash, birth->row);
    }
    for (int64_t i = p->deaths.size - 1; i >= 0; i--) {
        const ec_kill *kill = &EC_DEATH(p, i).kill;
        const ec_limbo gone = EC_GONE(c, kill->limbo);
        ec_cache_unkill(c, kill);
        ec_table_attach(s->table, gone.key, ec_hash(gone.key), gone.row);
    }
    for (int64_t i = p->counts.size - 1; i >= 0; i--) {
        const ec_count_record *count = &EC_AT(p->counts, ec_count_record, i);
        c->slots[count->slot].freq = count->freq;
        c->slots[count->slot].last = count->last;
    }
    for (int64_t i = 0; i < p->marks.size; i++) ec_row_unmark(s->table, EC_AT(p->marks, int64_t, i));
    for (int64_t i = p->changes.size - 1; i >= 0; i--) ec_filter_undo(s->filter, &EC_AT(p->changes, ec_filter_change, i));
    if (!s->filter) return;
    s->filter->newest = p->newest_before;
    s->filter->pass = p->pass_before;
    s->filter->epoch = p->epoch_before;
    ec_sketch_undo(&s->filter->sketch, &p->sketch);
    if (p->swept) ec_filter_unsweep(s->filter);
    for (int64_t i = 0; i < p->late.size; i++)
        ec_index_erase(&s->filter->late, EC_AT(p->late, int64_t, i), ec_hash(EC_AT(p->late, int64_t, i)));
}

/* The batch has trained: its pins end, and what it evicted is gone for good. So are the rows of evicted keys whose slots it took:
 * until now it might have been undone, though the rows were written back long before. */
static void ec_plan_finish(ec_side *s, ec_part *p) {
    for (int64_t i = 0; i < p->touches.size; i++) {
        for (int64_t j = i; i % 32 == 0 && j < i + 32 && j < p->touches.size; j++) EC_PREFETCH_WRITE(&s->cache.seats[EC_TOUCH(p, j).slot]);
        ec_cache_unpin(&s->cache, EC_TOUCH(p, i).slot);
    }
    for (int64_t i = 0; i < p->hits.size; i++) {
        for (int64_t j = i; i % 32 == 0 && j < i + 32 && j < p->hits.size; j++) EC_PREFETCH_WRITE(&s->cache.seats[EC_HIT(p, j).slot]);
        ec_cache_unpin(&s->cache, EC_HIT(p, i).slot);
    }
    for (int64_t i = 0; p->quick && i < p->takes.size; i++) ec_cache_unpin(&s->cache, EC_TAKE(p, i).slot);
    for (int64_t i = 0; i < p->takes.size; i++)
        if (EC_TAKE(p, i).from == EC_FROM_DYING) ec_limbo_release(&s->cache, EC_TAKE(p, i).limbo);
    for (int64_t i = 0; i < p->deaths.size; i++) {
        if (i + 16 < p->deaths.size) {
            const int64_t row = EC_GONE(&s->cache, EC_DEATH(p, i + 16).kill.limbo).row;
            EC_PREFETCH_WRITE(ec_table_key(s->table, row));
            EC_PREFETCH_WRITE(ec_table_flags(s->table, row));
        }
        ec_limbo_release(&s->cache, EC_DEATH(p, i).kill.limbo);
    }
    if (p->swept) ec_filter_sweep_finished(s->filter, p->swept);
    if (s->filter && s->filter->news.known) ec_filter_note(s->filter, &p->changes, &p->sketch);
    ec_plan_seen(s, p);
    ec_part_free(p);
}

/* How LIVE slots stand with the policy: key, rank, version, uses counted. */
static void ec_side_standings(const ec_side *s, int64_t *keys, int64_t *ranks, int64_t *versions, int64_t *counts) {
    const ec_cache *c = &s->cache;
    int64_t got = 0;
    for (int64_t slot = 0; slot < c->capacity; slot++) {
        if (c->state[slot] != EC_SLOT_LIVE) continue;
        const ec_standing it = c->seats[slot].standing;
        keys[got] = c->slots[slot].key;
        ranks[got] = ec_policy_rank(&c->policy, (uint32_t)slot, it);
        versions[got] = (int64_t)it.version;
        counts[got++] = it.count;
    }
}

/* Keys that the policy remembers though they have no slot, in order of their loss. Returns how many. */
static int64_t ec_side_ghosts(const ec_side *s, int64_t *keys) {
    const ec_ghost *g = &s->cache.policy.ghost;
    int64_t got = 0;
    for (int64_t i = 0; i < g->span; i++) {
        const int64_t at = (g->at + i) % g->span;
        if (g->known[at]) keys[got++] = g->keys[at];
    }
    return got;
}

/* Writes the counters of residents to the host columns; those beside the slots stay the ones that count. */
static void ec_side_write_counters(ec_side *s) {
    for (int64_t slot = 0; s->filter && slot < s->cache.capacity; slot++) {
        if (s->cache.state[slot] != EC_SLOT_LIVE) continue;
        const ec_slot *it = &s->cache.slots[slot];
        *ec_table_freq(s->table, it->row) = it->freq;
        *ec_table_ts(s->table, it->row) = it->last;
    }
}

/* The end of the planner: residents' counters go to the host columns, and no row is marked resident any more. */
static void ec_side_retire(ec_side *s) {
    ec_side_write_counters(s);
    for (int64_t slot = 0; slot < s->cache.capacity; slot++)
        if (s->cache.state[slot] == EC_SLOT_LIVE) ec_row_leave(s, s->cache.slots[slot].row, s->cache.seats[slot].period);
}

/* Whether the key of a LIVE slot, or of a host row that is not resident, is dead and not taken away yet. */
static inline int ec_side_slot_dead(const ec_side *s, const ec_slot *slot) {
    return s->filter && ec_filter_row_dead(s->filter, slot->key, slot->freq, slot->last);
}

static inline int ec_side_row_dead(const ec_side *s, int64_t row) {
    return s->filter && s->filter->pass.region != EC_PASS_IDLE &&
           ec_filter_row_dead(s->filter, *ec_table_key(s->table, row), *ec_table_freq(s->table, row), *ec_table_ts(s->table, row));
}

/* Ends a dead row whose sweep has finished, that no plan knows of, and that is not resident. */
static inline void ec_side_bury(ec_side *s, int64_t key, int64_t row) {
    const uint64_t hash = ec_hash(key);
    ec_table_detach(s->table, key, hash);
    ec_table_free_row(s->table, hash, row);
    s->totals[EC_EVICTED]++;
}

/* How many rows and waiting keys are dead and not taken away yet. O(slots + rows + waiting keys) while a pass is under way. */
static void ec_side_count_dead(const ec_side *s, int64_t *rows, int64_t *waiting) {
    *rows = *waiting = 0;
    if (!s->filter || s->filter->pass.region == EC_PASS_IDLE) return;
    for (int64_t slot = 0; slot < s->cache.capacity; slot++)
        *rows += s->cache.state[slot] == EC_SLOT_LIVE && ec_side_slot_dead(s, &s->cache.slots[slot]);
    for (int64_t row = 0; row < s->table->row_limit; row++)
        *rows += (*ec_table_flags(s->table, row) & (EC_LIVE | EC_RESIDENT)) == EC_LIVE && ec_side_row_dead(s, row);
    for (int64_t id = 0; id < s->filter->entries.size; id++) *waiting += ec_filter_entry_dead(s->filter, &EC_ENTRY(s->filter, id));
}

/* Counters of host rows that are not resident, from *cursor on, without the dead. How many, or -1 where there are no more rows. */
static int64_t ec_side_scan(const ec_side *s, int64_t *cursor, int64_t *keys, int64_t *counts, int64_t *last, int64_t most) {
    int64_t got = 0, row = *cursor;
    if (row >= s->table->row_limit) return -1;
    for (; row < s->table->row_limit && got < most; row++) {
        if ((*ec_table_flags(s->table, row) & (EC_LIVE | EC_RESIDENT)) != EC_LIVE || ec_side_row_dead(s, row)) continue;
        keys[got] = *ec_table_key(s->table, row);
        counts[got] = *ec_table_freq(s->table, row);
        last[got++] = *ec_table_ts(s->table, row);
    }
    *cursor = row;
    return got;
}

/* EC_OK, or EC_BROKEN where cache, filter and host table do not agree. O(capacity + rows). */
static int ec_side_check(const ec_side *s) {
    const ec_cache *c = &s->cache;
    ec_table *t = s->table;
    int64_t resident = 0;
    int status = ec_cache_check(c);
    if (status == EC_OK && s->filter) status = ec_filter_check(s->filter);
    if (status != EC_OK) return status;
    for (int64_t slot = 0; slot < c->capacity; slot++) {
        if (c->state[slot] != EC_SLOT_LIVE) continue;
        const int64_t row = c->slots[slot].row;
        if (row < 0 || row >= t->row_limit || *ec_table_key(t, row) != c->slots[slot].key) return EC_BROKEN;
        if ((*ec_table_flags(t, row) & (EC_LIVE | EC_RESIDENT)) != (EC_LIVE | EC_RESIDENT)) return EC_BROKEN;
    }
    for (int64_t row = 0; row < t->row_limit; row++) resident += (*ec_table_flags(t, row) & (EC_LIVE | EC_RESIDENT)) == (EC_LIVE | EC_RESIDENT);
    return resident == c->live && t->limbo == c->limbo_count ? EC_OK : EC_BROKEN;
}

#endif
