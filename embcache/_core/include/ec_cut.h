/* The state of a table as of the last finished training batch, for whoever saves it: rows with their counters, and the filter.
 *
 * ec_peek.h says which rows there are; this adds where each is, the counters of keys, which run ahead beside the slots, and the
 * filter's own state. Counters and filter are found as an undo would find them, by walking the journals of unfinished plans
 * backwards, but on copies of what these have touched: nothing of the planner changes. Journals hold what was there before, so
 * unfinished plans must be the newest ones: what a finished one did after them could not be told from what they did.
 *
 * Rows that a finished plan's sweep has killed are passed over, so in this state no pass is under way, and nobody is late.
 *
 * A save reads rows while training goes on. What a row was at the cut it is until a plan that uses it may train, which is once
 * its rows are in their slots, or until its key is evicted by a plan that finishes, or changed from outside; before that whoever
 * saves must have read it (ec_cut_touched() says which rows a plan concerns). So unfinished plans never use rows that are still to
 * be read, unless they have not come in yet, and then they are the newest ones.
 */
#ifndef EC_CUT_H
#define EC_CUT_H

#include <stdint.h>
#include <string.h>

#include "ec_peek.h"

enum { EC_CUT_IN = 1, EC_CUT_CHANGED = 2, EC_CUT_LIVE = 4, EC_CUT_READ = 8 };

/* What a slot that unfinished plans have touched held before them. */
typedef struct {
    ec_slot held;
    int live;
} ec_cut_slot;

typedef struct {
    ec_index slots;   /* slot -> place in `before` */
    ec_index rows;    /* row -> the same, of those that were live */
    ec_vec before;    /* of ec_cut_slot */
    ec_index waiting; /* keys that unfinished plans made late, up to the first of their sweeps */
    ec_index places;  /* row -> slot + 1, or 0 for the host row: those that movements on paper have not reached yet */
} ec_cut;

#define EC_CUT_SLOT(cut, i) EC_AT((cut)->before, ec_cut_slot, i)

static void ec_cut_free(ec_cut *cut) {
    ec_index_free(&cut->slots);
    ec_index_free(&cut->rows);
    ec_index_free(&cut->waiting);
    ec_index_free(&cut->places);
    ec_vec_free(&cut->before);
}

/* The record of a slot; there is room for it. */
static inline ec_cut_slot *ec_cut_of(ec_cut *cut, const ec_cache *c, uint32_t slot) {
    const int64_t key = slot;
    int64_t at = ec_index_find(&cut->slots, key, ec_hash(key));
    if (at < 0) {
        at = cut->before.size;
        ec_index_insert(&cut->slots, key, ec_hash(key), (uint32_t)at);
        EC_PUSH(cut->before, ec_cut_slot, {c->slots[slot], c->state[slot] == EC_SLOT_LIVE});
    }
    return &EC_CUT_SLOT(cut, at);
}

/* Number of unfinished plans up to and with the first that was one of a sweep by time; all where none was. */
static inline int64_t ec_cut_before_sweeps(const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, const ec_index **late) {
    *late = &f->late;
    for (int64_t k = 0; k < plan_count; k++)
        for (int64_t i = 0; plans[k]->parts[t].swept && i < f->sweeps.size; i++)
            if (EC_SWEEP(f, i).step == plans[k]->step) {
                *late = &EC_SWEEP(f, i).late;
                return k + 1;
            }
    return plan_count;
}

static inline void ec_cut_place(ec_cut *cut, int64_t row, int64_t slot) {
    if (ec_index_find(&cut->places, row, ec_hash(row)) < 0) ec_index_insert(&cut->places, row, ec_hash(row), (uint32_t)(slot + 1));
}

/* Where rows are that unfinished plans move or evict: of several movements the oldest that is not done decides. */
static int ec_cut_find_places(ec_cut *cut, const ec_side *s, int64_t t, ec_plan *const *plans, int64_t plan_count) {
    const ec_cache *c = &s->cache;
    int64_t most = 0;
    for (int64_t k = 0; k < plan_count; k++) most += 2 * plans[k]->parts[t].takes.size + plans[k]->parts[t].deaths.size;
    if (most == 0) return EC_OK;
    if (most > UINT32_MAX || ec_index_reserve(&cut->places, most)) return EC_NOMEM;
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; plans[k]->state == EC_PLANNED && i < p->takes.size; i++)
            if (EC_TAKE(p, i).from != EC_FROM_FREE) ec_cut_place(cut, EC_TAKE(p, i).before.row, EC_TAKE(p, i).slot);
    }
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; plans[k]->state < EC_SWAPPED_IN && i < p->takes.size; i++) ec_cut_place(cut, c->slots[EC_TAKE(p, i).slot].row, -1);
    }
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; i < p->deaths.size; i++) {
            const ec_limbo *gone = &EC_GONE(c, EC_DEATH(p, i).kill.limbo);
            ec_cut_place(cut, gone->row, gone->slot == EC_NO_SLOT ? -1 : (int64_t)gone->slot);
        }
    }
    return EC_OK;
}

/* Makes the cut of table t. EC_NOMEM: nothing is held. */
static int ec_cut_make(ec_cut *cut, const ec_side *s, int64_t t, ec_plan *const *plans, int64_t plan_count) {
    const ec_cache *c = &s->cache;
    const ec_index *late;
    int64_t most = 0, joined = 0;
    memset(cut, 0, sizeof *cut);
    ec_index_init(&cut->slots, c->index.seed);
    ec_index_init(&cut->rows, c->index.seed);
    ec_index_init(&cut->waiting, c->index.seed);
    ec_index_init(&cut->places, c->index.seed);
    if (ec_cut_find_places(cut, s, t, plans, plan_count) != EC_OK) {
        ec_cut_free(cut);
        return EC_NOMEM;
    }
    if (!s->filter) return EC_OK; /* no counters */
    const int64_t early = ec_cut_before_sweeps(s->filter, t, plans, plan_count, &late);
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        most += p->counts.size + p->takes.size + p->deaths.size;
        joined += k < early ? p->late.size : 0;
    }
    if (most > UINT32_MAX) return EC_NOMEM;
    if ((most > 0 && (ec_index_reserve(&cut->slots, most) || ec_index_reserve(&cut->rows, most) || ec_vec_reserve(&cut->before, most, sizeof(ec_cut_slot)))) ||
        (joined > 0 && ec_index_reserve(&cut->waiting, joined))) {
        ec_cut_free(cut);
        return EC_NOMEM;
    }
    for (int64_t k = plan_count - 1; k >= 0; k--) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = p->takes.size - 1; i >= 0; i--) { /* a victim's counters went to its host row: those count */
            ec_cut_slot *slot = ec_cut_of(cut, c, EC_TAKE(p, i).slot);
            *slot = (ec_cut_slot){EC_TAKE(p, i).before, 0};
        }
        for (int64_t i = p->deaths.size - 1; i >= 0; i--)
            if (EC_DEATH(p, i).kill.slot != EC_NO_SLOT) ec_cut_of(cut, c, EC_DEATH(p, i).kill.slot)->live = 1;
        for (int64_t i = p->counts.size - 1; i >= 0; i--) {
            const ec_count_record *count = &EC_AT(p->counts, ec_count_record, i);
            ec_cut_slot *slot = ec_cut_of(cut, c, count->slot);
            slot->held.freq = count->freq;
            slot->held.last = count->last;
        }
        for (int64_t i = 0; k < early && i < p->late.size; i++) {
            const int64_t key = EC_AT(p->late, int64_t, i);
            if (ec_index_find(&cut->waiting, key, ec_hash(key)) < 0) ec_index_insert(&cut->waiting, key, ec_hash(key), 0);
        }
    }
    for (int64_t i = 0; i < cut->before.size; i++) {
        const int64_t row = EC_CUT_SLOT(cut, i).held.row;
        if (EC_CUT_SLOT(cut, i).live) ec_index_insert(&cut->rows, row, ec_hash(row), (uint32_t)i);
    }
    return EC_OK;
}

/* Counters of a row that was there at the cut and that no finished plan has used since. */
static inline void ec_cut_counters(const ec_cut *cut, const ec_side *s, int64_t key, int64_t row, int64_t *freq, int64_t *last) {
    const int64_t at = cut->rows.size > 0 ? ec_index_find(&cut->rows, row, ec_hash(row)) : -1;
    const int64_t slot = at < 0 && (*ec_table_flags(s->table, row) & EC_RESIDENT) ? ec_index_find(&s->cache.index, key, ec_hash(key)) : -1;
    if (at >= 0) {
        *freq = EC_CUT_SLOT(cut, at).held.freq;
        *last = EC_CUT_SLOT(cut, at).held.last;
    } else if (slot >= 0 && s->cache.slots[slot].row == row && (cut->slots.size == 0 || ec_index_find(&cut->slots, slot, ec_hash(slot)) < 0)) {
        *freq = s->cache.slots[slot].freq;
        *last = s->cache.slots[slot].last;
    } else {
        *freq = *ec_table_freq(s->table, row);
        *last = *ec_table_ts(s->table, row);
    }
}

/* Marks of an extent's rows by their flags; returns how many are in. */
static inline int64_t ec_cut_extent(const uint8_t *flags, uint8_t all, uint8_t *members) {
    int64_t found = 0;
    for (int64_t i = 0; i < EC_EXTENT_ROWS; i++) {
        const uint8_t live = flags[i] & EC_LIVE, changed = live & (uint8_t)(flags[i] >> 4);
        members[i] = (uint8_t)((changed | (live & all)) | (changed << 1) | (live << 2));
    }
    for (int64_t i = 0; i < EC_EXTENT_ROWS; i += 8) {
        uint64_t marks;
        memcpy(&marks, members + i, sizeof marks);
        found += __builtin_popcountll(marks & UINT64_C(0x0101010101010101));
    }
    return found;
}

/* Whether the flags of an extent are all 0. */
static inline int ec_cut_extent_empty(const uint8_t *flags) {
    uint64_t any = 0;
    for (int64_t i = 0; i < EC_EXTENT_ROWS; i += 8) {
        uint64_t eight;
        memcpy(&eight, flags + i, sizeof eight);
        any |= eight;
    }
    return any == 0;
}

/* Which host rows are in the cut: members[row], for all rows below the table's limit, has EC_CUT_LIVE where one is live in it, and EC_CUT_IN
 * where it is to be written: with `changed` only where its flag says that it has changed since the last save, or it is about to leave;
 * EC_CUT_CHANGED where one has the flag, in the cut or not. `members` is all 0 before, and has room for whole extents. Returns how many are in. */
static int64_t ec_cut_members(const ec_overlay *o, const ec_side *s, int64_t number, ec_plan *const *plans, int64_t plan_count, int changed, uint8_t *members) {
    const ec_table *t = s->table;
    const int passing = s->filter && s->filter->pass.region != EC_PASS_IDLE;
    const uint8_t wanted = changed ? EC_LIVE | EC_CHANGED : EC_LIVE;
    int64_t found = 0;
    _Static_assert(EC_LIVE == 1 && EC_CHANGED == 16 && EC_CUT_IN == 1 && EC_CUT_CHANGED == 2 && EC_CUT_LIVE == 4, "flags are moved as bits");
    for (int64_t first = 0; first < t->row_limit; first += EC_EXTENT_ROWS) {
        const uint8_t *flags = ec_table_flags(t, first);
        if (ec_cut_extent_empty(flags)) continue; /* `members` is all 0, much of it not in memory yet */
        found += ec_cut_extent(flags, !changed, members + first);
        for (int64_t row = first; passing && row < first + EC_EXTENT_ROWS; row++) {
            if (!(members[row] & EC_CUT_IN)) continue;
            const int64_t key = *ec_table_key(t, row);
            const int64_t slot = *ec_table_flags(t, row) & EC_RESIDENT ? ec_index_find(&s->cache.index, key, ec_hash(key)) : -1;
            if (!ec_row_dead_in_training(s, slot, row)) continue;
            members[row] &= (uint8_t) ~(EC_CUT_IN | EC_CUT_LIVE);
            found--;
        }
    }
    for (int64_t k = 0; k < plan_count; k++)
        for (int64_t i = 0; i < plans[k]->parts[number].births.size; i++) {
            uint8_t *mark = &members[EC_AT(plans[k]->parts[number].births, ec_birth, i).row];
            found -= *mark & EC_CUT_IN;
            *mark &= (uint8_t) ~(EC_CUT_IN | EC_CUT_LIVE);
        }
    for (int64_t i = 0; i < o->records.size; i++) {
        const int64_t row = EC_WHERE(o, i).row;
        if (row < 0 || EC_WHERE(o, i).ghost) continue;
        const uint8_t flags = *ec_table_flags(t, row);
        uint8_t more = 0;
        if (flags & EC_LIMBO) more = EC_CUT_IN | EC_CUT_CHANGED | EC_CUT_LIVE;
        else if ((flags & wanted) == wanted) more = EC_CUT_IN | EC_CUT_LIVE;
        else if (flags & EC_LIVE) more = EC_CUT_LIVE;
        found += (more & EC_CUT_IN) > (members[row] & EC_CUT_IN);
        members[row] |= more;
    }
    return found;
}

/* Rows of residents in slots begin .. end - 1 that have been used since the last save: each that is live in the cut is now in it, for a save
 * of what has changed, unless it is already, or has been read. (Slots used after the cut are taken too, as when they were used before is not
 * known any more: a row that has not been read is as it was.) `rows` is the length of `members`. Returns how many came in. */
static int64_t ec_cut_list(const ec_side *s, int64_t begin, int64_t end, uint8_t *members, int64_t rows) {
    enum { AHEAD = 16 };
    const ec_cache *c = &s->cache;
    int64_t found = 0;
    for (int64_t slot = begin; slot < end; slot++) {
        if (slot + AHEAD < end && c->seats[slot + AHEAD].period >= c->since) EC_PREFETCH_READ(&c->slots[slot + AHEAD]);
        if (c->seats[slot].period < c->since || c->state[slot] != EC_SLOT_LIVE) continue;
        const int64_t row = c->slots[slot].row;
        if (row >= rows || (members[row] & (EC_CUT_IN | EC_CUT_LIVE | EC_CUT_READ)) != EC_CUT_LIVE) continue;
        members[row] |= EC_CUT_IN;
        found++;
    }
    return found;
}

/* Rows that have left their slots for a plan's, and had been used since the last save, and those of residents that it has evicted, whose
 * slots say nothing any more; `rows` has room for ec_cut_most_touched(). Returns how many. */
static int64_t ec_cut_left(const ec_side *s, const ec_part *p, int64_t *rows) {
    int64_t n = 0;
    for (int64_t i = 0; i < p->takes.size; i++)
        if (EC_TAKE(p, i).from == EC_FROM_VICTIM && EC_TAKE(p, i).period >= s->cache.since) rows[n++] = EC_TAKE(p, i).before.row;
    for (int64_t i = 0; i < p->deaths.size; i++)
        if (EC_DEATH(p, i).kill.slot != EC_NO_SLOT) rows[n++] = EC_GONE(&s->cache, EC_DEATH(p, i).kill.limbo).row;
    return n;
}

/* What rows are, and where: the cut's while no finished plan has used them. Writes their keys, where each is now (a slot of the whole
 * buffer, or -1: in the host row), and where the table keeps counters those. Whether a sweep has killed a row meanwhile does not count. */
static void ec_cut_read(const ec_cut *cut, const ec_side *s, const int64_t *rows, int64_t n, int64_t *keys, int64_t *slots, int64_t *freq, int64_t *last) {
    enum { BLOCK = 64 }; /* rows whose cache misses overlap, one kind after the other */
    const ec_table *t = s->table;
    uint64_t hashes[BLOCK];
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = begin + BLOCK < n ? begin + BLOCK : n;
        for (int64_t i = begin; i < end; i++) {
            EC_PREFETCH_READ(ec_table_key(t, rows[i]));
            EC_PREFETCH_READ(ec_table_flags(t, rows[i]));
        }
        for (int64_t i = begin; i < end; i++) {
            keys[i] = *ec_table_key(t, rows[i]);
            if (!(*ec_table_flags(t, rows[i]) & EC_RESIDENT)) continue;
            hashes[i - begin] = ec_hash(keys[i]);
            if (s->cache.index.bucket_count > 0) ec_index_prefetch(&s->cache.index, hashes[i - begin]);
        }
        for (int64_t i = begin; i < end; i++) {
            slots[i] = *ec_table_flags(t, rows[i]) & EC_RESIDENT ? ec_index_find(&s->cache.index, keys[i], hashes[i - begin]) : -1;
            if (slots[i] >= 0) EC_PREFETCH_READ(&s->cache.slots[slots[i]]);
        }
        for (int64_t i = begin; i < end; i++) {
            const int64_t moved = cut->places.size > 0 ? ec_index_find(&cut->places, rows[i], ec_hash(rows[i])) : -1;
            int64_t slot = moved >= 0 ? moved - 1 : slots[i];
            if (slot >= 0 && moved < 0 && s->cache.slots[slot].row != rows[i]) slot = -1;
            slots[i] = slot < 0 ? -1 : slot + s->base;
            if (s->filter) {
                ec_cut_counters(cut, s, keys[i], rows[i], &freq[i], &last[i]);
            } else if (t->with_filter) {
                freq[i] = *ec_table_freq(t, rows[i]);
                last[i] = *ec_table_ts(t, rows[i]);
            }
        }
    }
}

/* Keys of the rows that ec_dead_rows() counts, of which there is room for. Returns how many. */
static int64_t ec_cut_dead(const ec_overlay *o, const ec_side *s, int64_t *keys) {
    const ec_table *t = s->table;
    int64_t n = 0;
    for (int64_t row = 0; row < t->row_limit; row++) {
        const uint8_t flags = *ec_table_flags(t, row);
        if (!(flags & EC_LIVE)) continue;
        const int64_t key = *ec_table_key(t, row);
        const int64_t slot = flags & EC_RESIDENT ? ec_index_find(&s->cache.index, key, ec_hash(key)) : -1;
        if (ec_row_dead_in_training(s, slot, row) && !ec_overlay_seen(o, key)) keys[n++] = key;
    }
    return n;
}

/* At most so many rows does a plan use or evict. */
static inline int64_t ec_cut_most_touched(const ec_part *p) { return p->touches.size + p->hits.size + p->takes.size + p->deaths.size; }

/* Rows that a plan which has come in uses, or whose keys it has evicted, and that a save has to read before its batch trains: those that
 * `members`, of `length`, says are in and not read, and with `listing`, while it is not known of all which have changed, those that are live
 * in the cut: they come in, and `listed` counts them. `rows` has room for ec_cut_most_touched(). Returns how many.
 *
 * Most of them the save has asked for in an earlier plan, and their slots are settled: so a plan costs what it reads first, and a bit a row.
 * A slot that holds another row is not settled any more, whether a plan takes it or gives it back (ec_cache_arrive, ec_cache_untake); and plans
 * come in in the order they were made in, so who finds a slot settled comes behind the plan that has had its row read. */
static int64_t ec_cut_unread(ec_side *s, const ec_part *p, int listing, uint8_t *members, int64_t length, int64_t *rows, int64_t *listed) {
    enum { AHEAD = 16 };
    ec_cache *c = &s->cache;
    int64_t n = 0, found = 0;
    for (int64_t i = 0; i < p->touches.size; i++) {
        rows[n] = EC_TOUCH(p, i).slot;
        n += ec_cache_settle_slot(c, EC_TOUCH(p, i).slot);
    }
    for (int64_t i = 0; i < p->hits.size; i++) {
        rows[n] = EC_HIT(p, i).slot;
        n += ec_cache_settle_slot(c, EC_HIT(p, i).slot);
    }
    for (int64_t i = 0; p->quick && i < p->takes.size; i++) {
        rows[n] = EC_TAKE(p, i).slot;
        n += ec_cache_settle_slot(c, EC_TAKE(p, i).slot);
    }
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) EC_PREFETCH_READ(&c->slots[rows[i + AHEAD]]);
        rows[i] = c->slots[rows[i]].row;
    }
    for (int64_t i = 0; i < p->deaths.size; i++) rows[n++] = EC_GONE(c, EC_DEATH(p, i).kill.limbo).row;
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n && rows[i + AHEAD] < length) EC_PREFETCH_WRITE(&members[rows[i + AHEAD]]);
        const int64_t row = rows[i];
        if (row >= length) continue;
        if (listing && (members[row] & (EC_CUT_IN | EC_CUT_LIVE | EC_CUT_READ)) == EC_CUT_LIVE) {
            members[row] |= EC_CUT_IN;
            ++*listed;
        }
        rows[found] = row;
        found += members[row] & EC_CUT_IN;
    }
    return found;
}

/* Rows of residents that a plan has used since the last save. `rows` has room for all residents. Returns how many. */
static int64_t ec_cut_used(const ec_side *s, int64_t *rows) {
    int64_t n = 0;
    for (int64_t slot = 0; slot < s->cache.capacity; slot++) { /* without a branch, which would go either way at random */
        rows[n] = s->cache.slots[slot].row;
        n += (s->cache.state[slot] == EC_SLOT_LIVE) & (s->cache.seats[slot].period >= s->cache.since);
    }
    return n;
}

/* About how many residents have been used since the last save whose rows are not flagged as changed: of up to `most` slots it is exact, of
 * more it is reckoned from so many, at equal distances. */
static int64_t ec_cut_used_about(const ec_side *s, int64_t most) {
    const ec_cache *c = &s->cache;
    const int64_t asked = c->capacity < most ? c->capacity : most;
    int64_t n = 0;
    for (int64_t i = 0; i < asked; i++) {
        const int64_t slot = (int64_t)((unsigned __int128)(uint64_t)i * (uint64_t)c->capacity / (uint64_t)asked);
        if (c->seats[slot].period < c->since || c->state[slot] != EC_SLOT_LIVE) continue;
        n += !(*ec_table_flags(s->table, c->slots[slot].row) & EC_CHANGED);
    }
    return asked == 0 ? 0 : (int64_t)((double)n * (double)c->capacity / (double)asked);
}

/* A cut was made: what residents are used for from now on is not in it, nor what unfinished plans use. */
static void ec_cut_next_period(ec_side *s, int64_t t, ec_plan *const *plans, int64_t plan_count) {
    ec_cache *c = &s->cache;
    const uint32_t period = ++c->period;
    for (int64_t k = 0; k < plan_count; k++) {
        const ec_part *p = &plans[k]->parts[t];
        for (int64_t i = 0; i < p->touches.size; i++) c->seats[EC_TOUCH(p, i).slot].period = period;
        for (int64_t i = 0; i < p->hits.size; i++) c->seats[EC_HIT(p, i).slot].period = period;
        for (int64_t i = 0; p->quick && i < p->takes.size; i++) c->seats[EC_TAKE(p, i).slot].period = period;
    }
}

/* ------------------------------------------------------------------------------------------------------------- filter */

/* The numbers of a filter. */
typedef struct {
    int64_t newest, epoch, cutoff, waiting_cutoff;
    const ec_sketch_clock *clocks; /* of the sketch's blocks */
} ec_cut_numbers;

static void ec_cut_filter(const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, ec_cut_numbers *numbers) {
    *numbers = (ec_cut_numbers){f->newest, f->epoch, f->pass.cutoff, f->pass.waiting_cutoff, (const ec_sketch_clock *)f->sketch.clocks.data};
    for (int64_t k = plan_count - 1; k >= 0; k--) {
        const ec_part *p = &plans[k]->parts[t];
        numbers->newest = p->newest_before;
        numbers->epoch = p->epoch_before;
        numbers->cutoff = p->pass_before.cutoff;
        numbers->waiting_cutoff = p->pass_before.waiting_cutoff;
        if (p->sketch.clocks.size > 0) numbers->clocks = (const ec_sketch_clock *)p->sketch.clocks.data;
    }
}

/* Whether waiting keys whose last timestamp is below the cut-off are dead, but for late ones; and how many late ones there may be. */
static int ec_cut_passing(const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t *most_late) {
    const ec_index *late;
    ec_cut_before_sweeps(f, t, plans, plan_count, &late);
    *most_late = late->size;
    return (plan_count > 0 ? &plans[0]->parts[t].pass_before : &f->pass)->region != EC_PASS_IDLE;
}

/* The late ones, in no order, of which there is room for as many as ec_cut_passing() says. Returns how many. */
static int64_t ec_cut_late(const ec_cut *cut, const ec_filter *f, int64_t t, ec_plan *const *plans, int64_t plan_count, int64_t *keys) {
    const ec_index *late;
    int64_t n = 0;
    ec_cut_before_sweeps(f, t, plans, plan_count, &late);
    for (uint64_t at = 0; at < late->bucket_count; at++)
        for (uint32_t rest = late->buckets[at].meta & EC_OCCUPANCY; rest; rest &= rest - 1) {
            const int64_t key = late->buckets[at].keys[__builtin_ctz(rest)];
            if (!ec_filter_late(&cut->waiting, key)) keys[n++] = key;
        }
    return n;
}

#endif
