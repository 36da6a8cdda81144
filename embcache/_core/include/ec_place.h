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

/* Unique u's place in the notice of the batch, where that has the key in the same place: as the notice was of this batch. */
static inline ec_when ec_place_foreseen(const ec_work *w, const ec_cache *c, int64_t t, int64_t u) {
    const ec_coming *coming = &c->policy.coming;
    const ec_when use = {w->notice, (uint32_t)(u - w->offsets[t])};
    if ((int64_t)use.at >= EC_NOTICE(coming, use.notice).count) return EC_NEVER_USED;
    return EC_KNOWN(coming, EC_USE(coming, use).known).key == w->key[u] ? use : EC_NEVER_USED;
}

/* The record of unique u's use, where the batch's notice tells of it: a hint for who looks for it next. */
static inline void ec_place_expect(const ec_work *w, ec_cache *c, int64_t t, int64_t u) {
    if (w->notice == EC_NO_NOTICE) return;
    const ec_when use = ec_place_foreseen(w, c, t, u);
    if (use.notice != EC_NO_NOTICE) c->policy.coming.expected = EC_USE(&c->policy.coming, use).known;
}

/* Counters of unique u, which has come into a slot. */
static inline void ec_place_count(const ec_work *w, ec_side *s, int64_t u, uint32_t slot) {
    if (!s->filter) return;
    s->cache.slots[slot].freq = w->freq[u];
    s->cache.slots[slot].last = w->last[u];
}

/* What leaving its slot means for a victim's host row; notes what was there. */
static inline void ec_place_leave(ec_side *s, ec_take_record *take) {
    ec_row_leave(s, take->before.row, take->period);
    if (!s->filter) return;
    int64_t *freq = ec_table_freq(s->table, take->before.row), *last = ec_table_ts(s->table, take->before.row);
    take->host_freq = *freq; /* the host columns are the authority again */
    take->host_last = *last;
    *freq = take->before.freq;
    *last = take->before.last;
}

/* Gives unique u of table t, which is admitted and not resident, a slot that is free or dying. */
static void ec_place_spare(ec_work *w, int64_t t, int64_t u) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_place_expect(w, &s->cache, t, u);
    ec_take_record take = ec_cache_take(&s->cache, w->key[u], w->hash[u], w->row[u], &p->choice);
    take.unique = u - w->offsets[t];
    ec_row_mark(s->table, w->row[u]);
    ec_place_count(w, s, u, take.slot);
    w->slot[u] = take.slot;
    p->totals[EC_SWAP_OUT_ROWS] += take.from != EC_FROM_FREE;
    EC_PUSH(p->takes, ec_take_record, take);
}

/* Victims that give their slots away, EC_AHEAD at a time but for the last. */
typedef struct {
    const uint32_t *victims;
    int64_t need, taken;          /* how many there are, how many have given them away */
    uint64_t hashes[2][EC_AHEAD]; /* of the keys of those that are next, and of those after them, in turns */
} ec_taking;

/* Asks for victims' slots and seats, in one go as with seats of hits; then, as a slot says which, for the key's bucket and the row's
 * flags. */
static inline void ec_taking_ask_slots(const ec_taking *x, const ec_cache *c, int64_t from) {
    const int64_t to = from + EC_AHEAD < x->need ? from + EC_AHEAD : x->need;
    for (int64_t i = from; i < to; i++) {
        EC_PREFETCH_WRITE(&c->slots[x->victims[i]]);
        EC_PREFETCH_WRITE(&c->seats[x->victims[i]]);
        if (c->policy.kind == EC_LOOKAHEAD) EC_PREFETCH_WRITE(&c->policy.coming.of_slot[x->victims[i]]);
    }
}

static inline void ec_taking_ask_keys(ec_taking *x, const ec_side *s, int64_t from) {
    const int64_t to = from + EC_AHEAD < x->need ? from + EC_AHEAD : x->need;
    uint64_t *hashes = x->hashes[from / EC_AHEAD % 2];
    for (int64_t i = from; i < to; i++) {
        const ec_slot *slot = &s->cache.slots[x->victims[i]];
        hashes[i - from] = ec_hash(slot->key);
        ec_index_prefetch(&s->cache.index, hashes[i - from]);
        EC_PREFETCH_WRITE(ec_table_flags(s->table, slot->row));
        if (!s->filter) continue;
        EC_PREFETCH_WRITE(ec_table_freq(s->table, slot->row));
        EC_PREFETCH_WRITE(ec_table_ts(s->table, slot->row));
    }
}

static inline void ec_taking_begin(ec_taking *x, const ec_side *s, const uint32_t *victims, int64_t need) {
    x->victims = victims;
    x->need = need;
    x->taken = 0;
    ec_taking_ask_slots(x, &s->cache, 0);
    ec_taking_ask_slots(x, &s->cache, EC_AHEAD);
    ec_taking_ask_keys(x, s, 0);
}

/* Gives uniques at[0 .. n - 1] of table t the slots of the next victims; n is EC_AHEAD but for the last of them. Each loop does one
 * thing, so that the processor's window reaches over several keys: with everything done for one key after the other a key
 * took twice the time, most of it for the flags of the two rows. */
static void ec_place_victims(ec_work *w, int64_t t, const int64_t *at, int64_t n, ec_taking *x) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const uint32_t *victims = x->victims + x->taken;
    const uint64_t *hashes = x->hashes[x->taken / EC_AHEAD % 2];
    ec_take_record *takes = &EC_TAKE(p, p->takes.size);
    ec_taking_ask_slots(x, c, x->taken + 2 * EC_AHEAD);
    ec_taking_ask_keys(x, s, x->taken + EC_AHEAD);
    for (int64_t i = 0; i < n; i++) {
        takes[i] = ec_cache_displace(c, victims[i], w->key[at[i]], w->row[at[i]]);
        takes[i].unique = at[i] - w->offsets[t];
        w->slot[at[i]] = victims[i];
    }
    for (int64_t i = 0; i < n; i++) ec_index_erase(&c->index, takes[i].before.key, hashes[i]);
    for (int64_t i = 0; i < n; i++) ec_index_insert(&c->index, w->key[at[i]], w->hash[at[i]], victims[i]);
    for (int64_t i = 0; i < n; i++) ec_place_leave(s, &takes[i]);
    for (int64_t i = 0; i < n; i++) ec_row_mark(s->table, w->row[at[i]]);
    for (int64_t i = 0; i < n; i++) {
        ec_place_expect(w, c, t, at[i]);
        ec_cache_arrive(c, victims[i], w->key[at[i]], w->hash[at[i]], &p->choice);
        ec_place_count(w, s, at[i], victims[i]);
    }
    p->takes.size += n;
    p->totals[EC_SWAP_OUT_ROWS] += n;
    x->taken += n;
}

/* The short way: slots for the keys that are not resident, `spare` ones first, and their use. */
static void ec_place_missing(ec_work *w, int64_t t, int64_t spare, ec_taking *taking) {
    const ec_side *s = &w->sides[t];
    const ec_part *p = &w->parts[t];
    ec_cache *c = &w->sides[t].cache;
    const int64_t begin = w->offsets[t], end = begin + p->totals[EC_MISSES], from = begin + spare;
    ec_place_ask_missing(w, s, begin, end);
    for (int64_t i = begin; i < from; i++) {
        if ((i - begin) % EC_AHEAD == 0) ec_place_ask_missing(w, s, i + EC_AHEAD, end);
        ec_place_spare(w, t, w->missing[i]);
    }
    for (int64_t i = from; i < end; i += EC_AHEAD) {
        ec_place_ask_missing(w, s, i + EC_AHEAD, end);
        ec_place_victims(w, t, w->missing + i, i + EC_AHEAD < end ? EC_AHEAD : end - i, taking);
    }
    for (int64_t i = 0; i < p->takes.size; i++)
        ec_policy_date(&c->policy, &c->seats[EC_TAKE(p, i).slot], p->choice.version + 1 + (uint64_t)EC_TAKE(p, i).unique);
}

/* The long way: pins the hits, where that is not done, and gives the others slots, `spare` ones first; then the use of all. */
static void ec_place_all(ec_work *w, int64_t t, int64_t spare, ec_taking *taking) {
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const int64_t begin = w->offsets[t], end = begin + p->unique;
    const int64_t misses = p->totals[EC_MISSES];
    int64_t wait[EC_AHEAD], waiting = 0;
    ec_place_ask_seats(w, c, begin, end);
    if (misses > 0) ec_place_ask_others(w, s, begin, end);
    for (int64_t u = begin; misses > 0 && u < end; u++) {
        if ((u - begin) % EC_AHEAD == 0) {
            if (taking->need == 0) ec_place_ask_seats(w, c, u + EC_AHEAD, end);
            ec_place_ask_others(w, s, u + EC_AHEAD, end);
        }
        if (!w->admitted[u]) continue;
        if (w->slot[u] >= 0) {
            if (taking->need == 0) ec_cache_pin(c, (uint32_t)w->slot[u]);
        } else if (spare > 0) {
            ec_place_spare(w, t, u);
            spare--;
        } else {
            wait[waiting++] = u;
            if (waiting < EC_AHEAD) continue;
            ec_place_victims(w, t, wait, waiting, taking);
            waiting = 0;
        }
    }
    if (waiting > 0) ec_place_victims(w, t, wait, waiting, taking);
    for (int64_t u = begin; u < end; u++) {
        if ((u - begin) % EC_AHEAD == 0) {
            ec_place_ask_seats(w, c, u + EC_AHEAD, end);
            if (w->notice != EC_NO_NOTICE) ec_place_ask_foreseen(w, c, t, u + EC_AHEAD, end);
        }
        if (!w->admitted[u]) continue;
        const uint32_t slot = (uint32_t)w->slot[u];
        if (misses == 0) ec_cache_pin(c, slot);
        if (w->notice == EC_NO_NOTICE) EC_PUSH(p->touches, ec_stood, ec_policy_touch(&c->policy, c->seats, slot));
        else EC_PUSH(p->touches, ec_stood, ec_policy_touch_seen(&c->policy, c->seats, slot, ec_place_foreseen(w, c, t, u)));
    }
    if (w->notice == EC_NO_NOTICE) return;
    ec_sight_spend_rest(ec_policy_sight(&c->policy, c->seats), w->notice);
    p->notice = w->notice;
    p->seen = 1;
}

/* A slot for every admitted key: residents keep theirs; free slots first, dying ones after, victims in the end. Then its
 * use, in the order of the uniques. A table of the short way has its hits behind it. */
static void ec_phase_place(void *context, int64_t t) {
    ec_work *w = (ec_work *)context;
    ec_side *s = &w->sides[t];
    ec_part *p = &w->parts[t];
    ec_cache *c = &s->cache;
    const int64_t misses = p->totals[EC_MISSES], spare = c->free.count + c->dying.count;
    const int64_t need = misses > spare ? misses - spare : 0;
    uint32_t *victims = (uint32_t *)(w->some_at + w->offsets[t]); /* nobody needs that any more */
    ec_taking taking;
    if (!p->quick) ec_policy_mark(&c->policy, &p->choice);
    if (misses > 0 && (p->status = ec_place_choose(w, t, need, victims)) != EC_OK) return;
    ec_taking_begin(&taking, s, victims, need);
    if (p->quick) ec_place_missing(w, t, misses - need, &taking);
    else ec_place_all(w, t, misses - need, &taking);
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
