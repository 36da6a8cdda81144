/* The last two phases of a plan (see ec_phases.h): slots for the admitted keys, and the plan's arrays. */
#ifndef EC_PLACE_H
#define EC_PLACE_H

#include <stdint.h>
#include <string.h>

#include "ec_phases.h"

/* -------------------------------------------------------------------------------------------------------------- place */

/* Asks for the seats of the EC_AHEAD uniques from `from` on that are resident: in one go, so that the TLB misses among them
 * are served at the same time (a prefetch that misses it holds up what comes after). */
static inline void ec_place_ask_seats(const ec_work *w, const ec_cache *c, int64_t from, int64_t end) {
    const int64_t to = from + EC_AHEAD < end ? from + EC_AHEAD : end;
    for (int64_t u = from; u < to; u++)
        if (w->slot[u] >= 0) EC_PREFETCH_WRITE(&c->seats[w->slot[u]]);
}

/* The same for what the batch's notice says of the EC_AHEAD uniques from `from` on, which are table t's. */
static inline void ec_place_ask_foreseen(const ec_work *w, const ec_cache *c, int64_t t, int64_t from, int64_t end) {
    const ec_coming *coming = &c->policy.coming;
    const ec_notice *notice = &EC_NOTICE(coming, w->notice);
    const int64_t begin = w->offsets[t], last = notice->count + begin < end ? notice->count + begin : end;
    const int64_t to = from + EC_AHEAD < last ? from + EC_AHEAD : last;
    for (int64_t u = from; u < to; u++) {
        EC_PREFETCH_WRITE(&EC_KNOWN(coming, notice->uses[u - begin].known));
        if (w->slot[u] < 0) continue;
        EC_PREFETCH_WRITE(&coming->of_slot[w->slot[u]]);
        EC_PREFETCH_WRITE(&c->policy.queues.links[w->slot[u]]);
    }
}

/* The same for those that are not resident: where they will be put into the index, and their rows' flags. */
static inline void ec_place_ask_others(const ec_work *w, const ec_side *s, int64_t from, int64_t end) {
    const int64_t to = from + EC_AHEAD < end ? from + EC_AHEAD : end;
    for (int64_t u = from; u < to; u++) {
        if (w->slot[u] >= 0 || !w->admitted[u]) continue;
        ec_index_prefetch(&s->cache.index, w->hash[u]);
        EC_PREFETCH_WRITE(ec_table_flags(s->table, w->row[u]));
    }
}

static inline void ec_place_ask_missing(const ec_work *w, const ec_side *s, int64_t from, int64_t end) {
    const int64_t to = from + EC_AHEAD < end ? from + EC_AHEAD : end;
    for (int64_t i = from; i < to; i++) {
        ec_index_prefetch(&s->cache.index, w->hash[w->missing[i]]);
        EC_PREFETCH_WRITE(ec_table_flags(s->table, w->row[w->missing[i]]));
    }
}

/* Pins the hits of table t, before any victim is chosen, where the short way has not done it, and chooses the victims that its misses need, into `victims`.
 * EC_NOMEM: nothing is pinned. */
static int ec_place_choose(ec_work *w, int64_t t, int64_t need, uint32_t *victims) {
    ec_part *p = &w->parts[t];
    ec_cache *c = &w->sides[t].cache;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    const int64_t to_pin = need > 0 && !p->quick ? end : begin;
    for (int64_t u = begin; u < to_pin; u++) {
        if ((u - begin) % EC_AHEAD == 0) ec_place_ask_seats(w, c, u + EC_AHEAD, end);
        if (w->slot[u] >= 0) ec_cache_pin(c, (uint32_t)w->slot[u]);
    }
    const int status = ec_policy_choose(&c->policy, c->seats, c->slots, c->pinned, need, p->totals[EC_MISSES], victims, &p->choice);
    if (status == EC_OK) return EC_OK;
    for (int64_t u = begin; u < to_pin; u++)
        if (w->slot[u] >= 0) ec_cache_unpin(c, (uint32_t)w->slot[u]);
    return status;
}

/* Gives unique u of table t, which is admitted and not resident, a slot; see ec_cache_take() about `victim`. Returns it. */
static inline uint32_t ec_place_take(ec_work *w, int64_t t, int64_t u, uint32_t victim) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    ec_take_record take = ec_cache_take(c, w->key[u], w->hash[u], w->row[u], victim, &p->choice);
    take.unique = u - w->offsets[t];
    ec_row_mark(s->table, w->row[u]);
    if (s->filter) {
        c->slots[take.slot].freq = w->freq[u];
        c->slots[take.slot].last = w->last[u];
    }
    if (take.from == EC_FROM_VICTIM) {
        ec_row_leave(s, take.before.row, take.period);
        if (s->filter) { /* the host columns are the authority again */
            int64_t *freq = ec_table_freq(s->table, take.before.row), *last = ec_table_ts(s->table, take.before.row);
            take.host_freq = *freq;
            take.host_last = *last;
            *freq = take.before.freq;
            *last = take.before.last;
        }
    }
    p->totals[EC_SWAP_OUT_ROWS] += take.from != EC_FROM_FREE;
    EC_PUSH(p->takes, ec_take_record, take);
    return take.slot;
}

/* Two looks ahead at a victim: its slot and seat; then, as that says which, its index bucket and its host row. */
static inline void ec_place_prefetch_slot(const ec_cache *c, uint32_t victim) {
    EC_PREFETCH_WRITE(&c->slots[victim]);
    if (c->policy.kind == EC_LOOKAHEAD) EC_PREFETCH_WRITE(&c->policy.coming.of_slot[victim]);
    EC_PREFETCH_WRITE(&c->seats[victim]);
}

static inline void ec_place_prefetch_key(const ec_side *s, uint32_t victim) {
    const ec_slot *slot = &s->cache.slots[victim];
    ec_index_prefetch(&s->cache.index, ec_hash(slot->key));
    EC_PREFETCH_WRITE(ec_table_flags(s->table, slot->row));
    if (s->filter) {
        EC_PREFETCH_WRITE(ec_table_freq(s->table, slot->row));
        EC_PREFETCH_WRITE(ec_table_ts(s->table, slot->row));
    }
}

/* Unique u's place in the notice of the batch, where that has the key in the same place: as the notice was of this batch. */
static inline ec_when ec_place_foreseen(const ec_work *w, const ec_cache *c, int64_t t, int64_t u) {
    const ec_coming *coming = &c->policy.coming;
    const ec_when use = {w->notice, (uint32_t)(u - w->offsets[t])};
    if ((int64_t)use.at >= EC_NOTICE(coming, use.notice).count) return EC_NEVER_USED;
    return EC_KNOWN(coming, EC_USE(coming, use).known).key == w->key[u] ? use : EC_NEVER_USED;
}

/* A slot for unique u of table t, victim number `at` of `need` or, where that is negative, another; it looks ahead at victims. */
static inline uint32_t ec_place_next(ec_work *w, int64_t t, int64_t u, int64_t at, int64_t need, const uint32_t *victims) {
    const ec_side *s = &w->sides[t];
    if (at >= 0 && at + 2 * EC_AHEAD < need) ec_place_prefetch_slot(&s->cache, victims[at + 2 * EC_AHEAD]);
    if (at >= 0 && at + EC_AHEAD < need) ec_place_prefetch_key(s, victims[at + EC_AHEAD]);
    return ec_place_take(w, t, u, at >= 0 ? victims[at] : EC_NO_SLOT);
}

/* A slot for every admitted key: residents keep theirs; free slots first, dying ones after, victims in the end. Then its
 * use, in the order of the uniques. A table of the short way has its hits behind it. */
static void ec_phase_place(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    const int64_t misses = p->totals[EC_MISSES], spare = c->free.count + c->dying.count;
    const int64_t need = misses > spare ? misses - spare : 0;
    uint32_t *victims = (uint32_t *)(w->some_at + begin); /* nobody needs that any more */
    if (!p->quick) ec_policy_mark(&c->policy, &p->choice);
    if (misses > 0 && (p->status = ec_place_choose(w, t, need, victims)) != EC_OK) return;
    for (int64_t i = 0; i < need && i < 2 * EC_AHEAD; i++) ec_place_prefetch_slot(c, victims[i]);
    for (int64_t i = 0; i < need && i < EC_AHEAD; i++) ec_place_prefetch_key(s, victims[i]);
    if (p->quick) {
        for (int64_t i = 0; i < misses; i++) {
            if (i % EC_AHEAD == 0) ec_place_ask_missing(w, s, begin + i + EC_AHEAD, begin + misses);
            const int64_t u = w->missing[begin + i];
            const uint32_t slot = ec_place_next(w, t, u, i - spare, need, victims);
            ec_policy_date(&c->policy, &c->seats[slot], p->choice.version + 1 + (uint64_t)(u - begin));
        }
        return;
    }
    ec_place_ask_seats(w, c, begin, end);
    int64_t taken = -spare; /* the number of the next victim; negative while there are other slots */
    for (int64_t u = begin; u < end; u++) {
        if ((u - begin) % EC_AHEAD == 0) {
            ec_place_ask_seats(w, c, u + EC_AHEAD, end);
            if (misses > 0) ec_place_ask_others(w, s, u + EC_AHEAD, end);
            if (w->notice != EC_NO_NOTICE) ec_place_ask_foreseen(w, c, t, u + EC_AHEAD, end);
        }
        if (!w->admitted[u]) continue;
        const ec_when use = w->notice == EC_NO_NOTICE ? EC_NEVER_USED : ec_place_foreseen(w, c, t, u);
        if (use.notice != EC_NO_NOTICE) c->policy.coming.expected = EC_USE(&c->policy.coming, use).known;
        if (w->slot[u] < 0) w->slot[u] = ec_place_next(w, t, u, taken++, need, victims);
        else if (need == 0) ec_cache_pin(c, (uint32_t)w->slot[u]);
        const uint32_t slot = (uint32_t)w->slot[u];
        if (w->notice == EC_NO_NOTICE) EC_PUSH(p->touches, ec_stood, ec_policy_touch(&c->policy, c->seats, slot));
        else EC_PUSH(p->touches, ec_stood, ec_policy_touch_seen(&c->policy, c->seats, slot, use));
    }
    if (w->notice == EC_NO_NOTICE) return;
    ec_sight_spend_rest(ec_policy_sight(&c->policy, c->seats), w->notice);
    p->notice = w->notice;
    p->seen = 1;
}

/* --------------------------------------------------------------------------------------------------------------- emit */

/* Table t's uniques and their slots, from scratch memory; the short way in turn has written them where they belong. */
static void ec_emit_uniques(ec_work *w, int64_t t) {
    const ec_side *s = &w->sides[t];
    const ec_part *p = &w->parts[t];
    ec_arrays *o = &w->out;
    const int64_t begin = w->offsets[t], stop = w->offsets[t + 1], first = o->unique_offsets[t];
    memcpy(o->unique_keys + first, w->key + begin, (size_t)p->unique * sizeof(int64_t));
    if (first > 0)
        for (int64_t i = begin; i < stop; i++) o->inverse[i] += first;
    if (p->quick) {
        memcpy(o->slots + first, w->slot + begin, (size_t)p->unique * sizeof(int64_t));
        return;
    }
    for (int64_t u = 0; u < p->unique; u++) {
        const int64_t slot = w->admitted[begin + u] ? w->slot[begin + u] : s->cache.capacity;
        o->slots[first + u] = s->base + slot;
    }
}

/* Writes table t's part of the plan's arrays; the offsets are there already. */
static void ec_phase_emit(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    ec_side *s = &w->sides[t];
    const ec_part *p = &w->parts[t];
    ec_arrays *o = &w->out;
    const int64_t begin = w->offsets[t], first = o->unique_offsets[t];
    int64_t in = o->in_offsets[t], out = o->out_offsets[t];
    if (!p->quick || !w->in_turn) ec_emit_uniques(w, t);
    if (p->quick) {
        memset(o->admitted + first, 1, (size_t)p->unique);
    } else {
        memcpy(o->admitted + first, w->admitted + begin, (size_t)p->unique);
        memcpy(o->segment_offsets + first + 1, w->end + begin, (size_t)p->unique * sizeof(int64_t));
    }
    for (int64_t i = 0; i < p->takes.size; i++, in++) {
        const ec_take_record *take = &EC_TAKE(p, i);
        o->slots[first + take->unique] = s->base + take->slot;
        o->in_keys[in] = w->key[begin + take->unique];
        o->in_slots[in] = s->base + take->slot;
        o->in_rows[in] = w->row[begin + take->unique];
        if (take->from == EC_FROM_FREE) continue;
        o->out_keys[out] = take->before.key;
        o->out_slots[out] = s->base + take->slot;
        o->out_rows[out++] = take->before.row;
    }
    o->hits[t] = p->totals[EC_HITS];
    o->misses[t] = p->totals[EC_MISSES];
    for (int i = 0; i < EC_TOTALS; i++) s->totals[i] += p->totals[i];
}

#endif
